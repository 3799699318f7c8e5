"""Elementwise operations against NumPy: promotion, broadcasting, terms of a Partial, where=, in-place operators."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import ops_oracle as oracle
import pytest
import scipy.special
import xarray
from distributed import Client
from hypothesis import given
from hypothesis import strategies as st
from ops_oracle import Case, cases, few

import daskmesh as dm
from daskmesh.dtensor import DTensor
from daskmesh.layout import make_layout
from daskmesh.placement import Partial, Replicate, Shard

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("threads"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's of invalid values are not what is tested
]

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
LINE, THREE, SQUARE, _ = oracle.MESHES
UFUNCS = sorted(
    name for name, f in vars(np).items() if isinstance(f, np.ufunc) and f.signature is None and f.__name__ == name
)
OPERATORS = (
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow, operator.eq,
    operator.lt, operator.ge, operator.and_, operator.or_, operator.xor, operator.lshift, divmod,
)  # fmt: skip
SCALARS = (2, -1, 0, 0.5, True, 1j, np.float32(3), np.int8(2), np.float64("nan"))


def shrunk(shape: tuple[int, ...], keep: int, drop: int) -> tuple[int, ...]:
    """A shape that broadcasts to `shape`."""
    return tuple(n if keep >> d & 1 else 1 for d, n in enumerate(shape))[min(drop, len(shape)) :]


@st.composite
def operands_of(draw: Any, n: int) -> list[Any]:
    """Operands that broadcast: at least one DTensor, others plain arrays or scalars."""
    first = draw(cases())
    out: list[Any] = [first]
    for _ in range(n - 1):
        shape = shrunk(first.a.shape, draw(st.integers(0, 7)), draw(st.integers(0, 2)))
        other = draw(st.one_of(cases(first.x.process_mesh, shape), st.sampled_from(SCALARS), cases(LINE, shape)))
        if isinstance(other, Case) and other.x.process_mesh != first.x.process_mesh:
            other = other.a
        out.append(other)
    return out if draw(st.booleans()) else out[::-1]


@pytest.mark.parametrize("name", UFUNCS)
@few(6)
@given(st.data())
def test_every_ufunc(name: str, data: Any) -> None:
    ufunc = getattr(np, name)
    oracle.agree(ufunc, *data.draw(operands_of(ufunc.nin)))


@few(220)
@given(st.sampled_from(OPERATORS), operands_of(2))
def test_operators(op: Any, operands: list[Any]) -> None:
    oracle.agree(op, *operands)


@few(150)
@given(st.data())
def test_chains_keep_terms_apart_where_they_may(data: Any) -> None:
    """What passes an operation unreduced must give the value that reducing first gives."""
    case = data.draw(cases(dtypes=("f8", "c16", "i8"), low=1))
    other = data.draw(cases(case.x.process_mesh, case.a.shape, dtypes=("f8", "i8")))
    steps = data.draw(st.lists(st.sampled_from([
        lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, lambda a, b: -a, lambda a, b: a * 2, lambda a, b: a + 1,
        lambda a, b: 3 - a, lambda a, b: a / 4, lambda a, b: abs(a), lambda a, b: np.where(b > 0, a, b),
        lambda a, b: a.astype("c16"), lambda a, b: a.real, lambda a, b: a * a, lambda a, b: np.conj(a),
    ]), min_size=1, max_size=4))  # fmt: skip

    def chain(a: Any, b: Any) -> Any:
        for step in steps:
            a = step(a, b)
        return a

    oracle.agree(chain, case, other)


FUNCTIONS = [
    lambda a, b: np.isclose(a, b), lambda a, b: np.clip(a, -1, 2), lambda a, b: np.clip(a, b, 3),
    lambda a, b: np.clip(a, None, 1), lambda a, b: a.clip(0), lambda a, b: np.where(a > 0, a, b),
    lambda a, b: np.where(a > 0, 1, 2.0), lambda a, b: np.round(a, 1),
    lambda a, b: a.round(), lambda a, b: np.real(a), lambda a, b: np.imag(a), lambda a, b: np.angle(a, True),
    lambda a, b: np.nan_to_num(a / b, nan=7.0), lambda a, b: np.sinc(a), lambda a, b: np.isreal(a), lambda a, b: np.iscomplex(a),
    lambda a, b: np.select([a > 1, a < 0], [a, b], 5), lambda a, b: np.zeros_like(a), lambda a, b: np.ones_like(a, dtype="i2"),
    lambda a, b: np.full_like(a, 3), lambda a, b: np.add.outer(a, b), lambda a, b: np.add(a, b, dtype="c16"),
    lambda a, b: np.multiply(a, b, where=True), lambda a, b: a.astype("f4"), lambda a, b: a.conj(), lambda a, b: a.copy(),
    lambda a, b: np.fix(a / 2), lambda a, b: np.isposinf(a), lambda a, b: np.digitize(a, [-1, 0, 2]),
    lambda a, b: np.interp(np.real(a), [-1, 0, 1], [2, 3, 9.0]), lambda a, b: np.square(a, dtype="f4", casting="unsafe"),
]  # fmt: skip


@few(200)
@given(st.sampled_from(FUNCTIONS), st.data())
def test_functions(function: Any, data: Any) -> None:
    case = data.draw(cases(dtypes=("f8", "i4", "c16", "f4")))
    other = data.draw(cases(case.x.process_mesh, shrunk(case.a.shape, data.draw(st.integers(0, 7)), 1), ("f8", "i4")))
    oracle.agree(function, case, other)


@few(40)
@given(cases(dtypes=("f8", "f4", "i4")), st.data())
def test_scipy_special(case: Case, data: Any) -> None:
    function = data.draw(st.sampled_from([
        scipy.special.expit, scipy.special.erf, lambda a: scipy.special.gammaln(abs(a) + 1),
        lambda a: scipy.special.xlogy(a, abs(a)),
        lambda a: scipy.special.sici(a)[1], scipy.special.j0,
    ]))  # fmt: skip
    oracle.agree(function, case)


# -- where= -----------------------------------------------------------------------------------------------------------


def test_where_leaves_zeros() -> None:
    """NumPy leaves the elements that are not selected undefined; here they are 0."""
    a, b = np.arange(6.0), np.array([0.0, 1, 2, 0, 4, 5])
    x, y = (dm.shard_tensor(v, THREE, [S0]) for v in (a, b))
    want = np.divide(a, b, where=b != 0, out=np.zeros(6))
    with np.errstate(all="raise"):
        oracle.same(np.divide(x, y, where=y != 0), want)
        oracle.same(np.divide(x, b, where=b != 0), want)
    quotient, rest = np.divmod(x, y, where=b > 1)
    oracle.same(quotient, np.divmod(a, b, where=b > 1, out=(np.zeros(6), np.zeros(6)))[0])
    oracle.same(rest, np.divmod(a, b, where=b > 1, out=(np.zeros(6), np.zeros(6)))[1])
    with pytest.raises(TypeError, match="must be bool"):
        np.add(x, y, where=b)


# -- in place ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mine", "other"), [([R], [S0]), ([S0], [P]), ([P], [S0]), ([S0], [R]), ([P], [P])])
def test_in_place_keeps_the_placements(mine: Any, other: Any) -> None:
    a, b = np.arange(4.0), np.arange(4.0) * 10
    x, y = dm.shard_tensor(a, LINE, mine), dm.shard_tensor(b, LINE, other)
    before, handle = x * 1, x
    x += y
    assert x is handle
    assert x.placements == tuple(mine)
    oracle.same(x.compute(scheduler="sync"), a + b)
    oracle.same(before.compute(scheduler="sync"), a)


def test_in_place_operators() -> None:
    a = np.arange(1, 7)
    x = dm.shard_tensor(a.copy(), LINE, [S0])
    for op in (operator.iadd, operator.isub, operator.imul, operator.ifloordiv, operator.imod, operator.ipow, operator.ior):
        x, a = op(x, 3), op(a, 3)
        oracle.same(x.compute(scheduler="sync"), a)
    with pytest.raises(TypeError, match="cannot put float64"):
        x /= 2
    with pytest.raises(ValueError, match="cannot put a value of shape"):
        x += np.ones((2, 6), int)


def test_a_constant_joins_the_terms_once() -> None:
    for op, want in (("sum", 5.0), ("avg", 3.5), ("max", 4.0), ("min", 3.0)):
        x = dm.dtensor_from_local([np.array([1.0]), np.array([2.0])], LINE, [Partial(op)])
        oracle.same(x + 2, [want])
        x += 2
        assert x.placements == (Partial(op),)
        oracle.same(x.compute(scheduler="sync"), [want])


def test_what_terms_give() -> None:
    """The values of reducing first, whatever passes."""
    x = dm.dtensor_from_local([np.array([1.0]), np.array([2.0])], LINE, [P])
    for function, want in [
        (lambda x: x * x, 9.0), (lambda x: x / x, 1.0), (lambda x: x**2, 9.0), (lambda x: 1 - x, -2.0), (lambda x: 1 / x, 1 / 3),
        (lambda x: np.clip(x, None, 2.5), 2.5), (lambda x: np.maximum(x, 0), 3.0), (lambda x: abs(x - 4), 1.0),
    ]:  # fmt: skip
        oracle.same(function(x), [want])
    y = dm.dtensor_from_local([np.array([0.6]), np.array([0.6])], LINE, [P])
    oracle.same(y.astype("i8"), [1])
    oracle.same(np.round(y - 0.4), [1.0])
    top = dm.dtensor_from_local([np.array([1.0]), np.array([2.0])], LINE, [Partial("max")])
    assert (-top).placements == (Partial("min"),)
    oracle.same(-top, [-2.0])
    oracle.same(top * -1, [-2.0])
    oracle.same(1 - top, [-1.0])
    half = dm.dtensor_from_local([np.array([1], "f4"), np.array([2], "f4")], LINE, [P])
    assert half.astype("f8").placements == (P,)
    assert (half + 1).dtype == np.float32


def test_uneven_parts_stay_where_they_are() -> None:
    layout = make_layout(THREE, [S0], (7, 2), "f8", [(1, 0, 6), None])
    x = oracle.held(layout, np.arange(14.0).reshape(7, 2))
    y = np.sqrt(x) + np.arange(7.0)[:, None]
    assert y.layout.chunks == layout.chunks
    assert y.explain().total_bytes == 0


# -- comparisons of whole arrays, refusals ----------------------------------------------------------------------------


def test_comparisons_of_whole_arrays() -> None:
    a = np.arange(6.0)
    x = dm.shard_tensor(a, THREE, [S0])
    assert np.allclose(x, a + 1e-12)
    assert not np.allclose(x, a + 1)
    assert isinstance(np.allclose(x, a), DTensor)
    assert np.array_equal(x, a)
    assert not np.array_equal(x, a[:5])
    assert np.array_equal(x / 0, a / 0, equal_nan=True)
    assert np.array_equiv(x, np.stack([a, a]))
    assert not np.array_equiv(x, a[:5])


def test_what_is_refused() -> None:
    x = dm.shard_tensor(np.arange(6.0), LINE, [S0])
    with pytest.raises(TypeError, match=r"np\.add\(out=\.\.\.\): a DTensor is no buffer"):
        np.add(x, 1, out=np.zeros(6))
    with pytest.raises(TypeError, match=r"np\.add\.at is not defined"):
        np.add.at(x, [0], 1)
    with pytest.raises(TypeError, match=r"np\.add\.reduceat is not defined"):
        np.add.reduceat(x, [0, 2])
    with pytest.raises(TypeError, match=r"np\.add\(out=\.\.\.\)"):
        np.add(x, x, np.zeros(6))
    with pytest.raises(ValueError, match="could not be broadcast"):
        x + np.ones(5)
    with pytest.raises(ValueError, match="lies on"):
        x + dm.zeros(6, mesh=THREE)


def test_an_array_of_another_library_answers_itself() -> None:
    x = dm.shard_tensor(np.arange(6.0).reshape(2, 3), LINE, [S1])
    table = xarray.DataArray(x, dims=("a", "b"))
    for result, want in ((x + table, x + x), (table + x, x + x), (table.mean("a"), np.mean(x, axis=0)), (table.sum(), np.sum(x))):
        assert isinstance(result, xarray.DataArray)
        assert isinstance(result.data, DTensor)
        oracle.same(result.data, want.compute(scheduler="sync"))


@pytest.mark.processes
def test_on_worker_processes(processes: Client) -> None:
    a = np.arange(10.0)
    x = dm.shard_tensor(a, THREE, [S0])
    y = np.sqrt(x * 2 + 1) - np.where(x > 3, x, 0)
    np.testing.assert_array_equal(y.compute(), np.sqrt(a * 2 + 1) - np.where(a > 3, a, 0))
