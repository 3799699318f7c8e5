"""Indexing and assignment against NumPy: every kind of key, values, dtypes, replicas that agree, and the bytes of the plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import dask
import numpy as np
import ops_oracle as oracle
import pytest
from distributed import Client
from hypothesis import given
from hypothesis import strategies as st
from ops_oracle import Case, cases, few

import daskmesh as dm
from daskmesh import transport
from daskmesh.dtensor import DTensor
from daskmesh.mesh import init_mesh
from daskmesh.placement import Partial, Replicate, Shard

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("threads")]

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
LINE, THREE, SQUARE, _ = oracle.MESHES
FOUR = init_mesh(4, ["x"])


@pytest.fixture
def sync() -> Iterator[None]:
    """What runs at once runs here, in one thread, as the rest of a case does."""
    with dask.config.set(scheduler="sync"):
        yield


def agree(function: Callable[..., Any], *operands: Any) -> None:
    """NumPy's value, or NumPy's type of error, at the latest when the value is computed."""
    mine = [c.x if isinstance(c, Case) else c for c in operands]
    theirs = [c.a if isinstance(c, Case) else c for c in operands]
    try:
        want = function(*theirs)
    except (IndexError, ValueError, TypeError) as error:
        with pytest.raises(type(error)):
            evaluate(function, mine)
        return
    got = function(*mine)
    if not isinstance(want, tuple):
        got, want = (got,), (want,)
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        oracle.same(g, w)


def evaluate(function: Callable[..., Any], operands: list[Any]) -> None:
    result = function(*operands)
    for x in result if isinstance(result, tuple) else (result,):
        oracle.value(x)


# -- keys -------------------------------------------------------------------------------------------------------------


@st.composite
def slices(draw: Any, n: int) -> slice:
    ends = st.one_of(st.none(), st.integers(-n - 1, n + 1))
    return slice(draw(ends), draw(ends), draw(st.sampled_from([None, 1, 2, -1, -2, 3])))


@st.composite
def keys(draw: Any, shape: tuple[int, ...], arrays: bool) -> tuple[Any, ...]:
    """A key for an array of `shape`, with or without index arrays, in bounds but for sizes of 0."""
    picked = draw(st.sampled_from([(2,), (3,), (1,), (0,), (2, 2), (3, 1), ()])) if arrays else ()
    key: list[Any] = []
    for n in shape:
        kind = draw(st.sampled_from(["slice", "slice", "int", "array", "array"] if arrays else ["slice", "slice", "int"]))
        if kind == "slice" or not n:
            key.append(draw(slices(n)))
        elif kind == "int":
            key.append(draw(st.integers(-n, n - 1)))
        else:
            sizes = tuple(1 if draw(st.integers(0, 3)) == 0 else k for k in picked)
            count = math.prod(sizes)
            key.append(np.array(draw(st.lists(st.integers(-n, n - 1), min_size=count, max_size=count)), int).reshape(sizes))
    cut = draw(st.integers(0, len(key)))
    if draw(st.booleans()):
        key = [*key[:cut], Ellipsis] if draw(st.booleans()) else [Ellipsis, *key[cut:]]
    else:
        key = key[:cut]
    for _ in range(draw(st.integers(0, 1))):
        key.insert(draw(st.integers(0, len(key))), None)
    return tuple(key)


@few(70)
@given(st.data())
def test_slices_and_integers(data: st.DataObject) -> None:
    case = data.draw(cases())
    key = data.draw(keys(case.a.shape, arrays=False))
    agree(lambda x: x[key], case)


@few(80)
@given(st.data())
def test_integer_arrays(data: st.DataObject) -> None:
    case = data.draw(cases(low=1))
    key = data.draw(keys(case.a.shape, arrays=True))
    agree(lambda x: x[key], case)


@few(25)
@given(st.data())
def test_indices_that_are_dtensors(data: st.DataObject) -> None:
    case = data.draw(cases(low=1))
    index = data.draw(cases(case.x.process_mesh, dtypes=["i8", "i4", "u1"]))
    d = data.draw(st.integers(0, case.a.ndim - 1))
    n = case.a.shape[d]
    lead = (slice(None),) * d
    if n:
        agree(lambda x, i: x[(*lead, i % n)], case, index)
        agree(lambda x, i: np.take(x, i, axis=d, mode="wrap"), case, index)


@pytest.mark.parametrize(
    "key",
    [5, -6, (0, 0, 0), [9], ([0, 1], [0, 1, 2]), 1.5, [1.5], "x", (..., ...), np.ones(4, bool), np.ones((3, 3), bool)],
    ids=repr,
)
@pytest.mark.parametrize("placements", [[S0], [R], [S1], [P]], ids=repr)
def test_bad_keys_are_refused_before_anything_runs(key: Any, placements: Any) -> None:
    a = np.arange(15).reshape(5, 3)
    x = dm.shard_tensor(a, THREE, placements)
    with pytest.raises(IndexError):
        a[key]
    with pytest.raises(IndexError):
        x[key]


def test_an_index_out_of_bounds_that_only_the_data_show() -> None:
    x = dm.arange(5, mesh=THREE, placements=[S0])
    i = dm.shard_tensor(np.array([0, 7]), THREE, [S0])
    with pytest.raises(IndexError):
        x[i].compute(scheduler="sync")


@pytest.mark.usefixtures("sync")
def test_masks() -> None:
    @few(25)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        case = data.draw(cases())
        shape = case.a.shape[: data.draw(st.integers(0, case.a.ndim))]
        mask = data.draw(cases(case.x.process_mesh, shape, dtypes=["?"]))
        agree(lambda x, m: x[m], case, mask)
        if shape:
            agree(lambda x: x[mask.a], case)
            agree(lambda x, m: x[m, ..., None], case, mask)

    run()


FUNCTIONS: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "nonzero": (1, np.nonzero),
    "argwhere": (0, np.argwhere),
    "flatnonzero": (0, np.flatnonzero),
    "where": (1, np.where),
    "extract": (0, lambda x: np.extract(x == x, x)),
    "compress": (1, lambda x: np.compress([True, False, True][: x.shape[0]], x, axis=0)),
    "take": (1, lambda x: np.take(x, [0, -1, 0], axis=-1)),
    "take flat": (0, lambda x: np.take(x, [[0, 1], [1, 2]], mode="clip")),
    "take one": (1, lambda x: np.take(x, 0, axis=0)),
    "take_along_axis": (1, lambda x: np.take_along_axis(x, np.zeros((2, *(1,) * (x.ndim - 1)), int), 0)),
    "delete": (1, lambda x: np.delete(x, 0, axis=0)),
    "delete several": (1, lambda x: np.delete(x, slice(None, None, 2), axis=-1)),
    "delete flat": (0, lambda x: np.delete(x, [0])),
    "insert": (1, lambda x: np.insert(x, 0, 1, axis=-1)),
    "insert flat": (0, lambda x: np.insert(x, [0, 0], [1, 0])),
    "ediff1d": (0, lambda x: np.ediff1d(x, to_end=x.ravel()[:1])),
    "rows": (1, lambda x: tuple(x)),
    "choose": (0, lambda x: np.choose(np.zeros(x.shape, int), [x, x])),
    "trapezoid": (1, np.trapezoid),
    "gradient": (1, lambda x: tuple(np.gradient(x, axis=(0,), edge_order=1) for _ in range(1))),
    "gradient 2": (1, lambda x: np.gradient(x, 0.5, axis=-1, edge_order=2)),
    "gradient places": (1, lambda x: np.gradient(x, np.arange(x.shape[0]) ** 2.0, axis=0, edge_order=2)),
}


NUMBERS = ("trapezoid", "gradient", "gradient 2", "gradient places")


@pytest.mark.usefixtures("sync")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_agree_with_numpy(name: str) -> None:
    low, function = FUNCTIONS[name]

    @few(10)
    @given(cases(low=low, dtypes=["f8", "i8", "i4", "?"] if name not in NUMBERS else ["f8", "i4"]))
    def run(case: Case) -> None:
        agree(function, case)

    run()


# -- assignment -------------------------------------------------------------------------------------------------------


def assigned(key: Any, x: Any, value: Any) -> Any:
    """The array after ``x[key] = value``, and what another name of its old value holds."""
    new, old = np.copy(x), x + x.dtype.type(0) if isinstance(x, DTensor) else np.copy(x)
    new[key] = value
    return new, old


@few(80)
@given(st.data())
def test_assignment_by_every_key(data: st.DataObject) -> None:
    case = data.draw(cases(low=1, dtypes=["f8", "i8", "i4", "c16"]))
    key = data.draw(keys(case.a.shape, arrays=data.draw(st.booleans())))
    shape = case.a[key].shape
    ones = tuple(1 if data.draw(st.integers(0, 3)) == 0 else n for n in shape)[data.draw(st.integers(0, 1)) if shape else 0 :]
    if data.draw(st.booleans()):
        new: Any = data.draw(cases(case.x.process_mesh, ones, dtypes=["f8", "i8"] if case.a.dtype.kind == "f" else ["i4"]))
    else:
        new = np.arange(1, 1 + math.prod(ones)).reshape(ones)
    agree(lambda x, v: assigned(key, x, v), case, new)


@few(25)
@given(st.data())
def test_assignment_of_a_scalar(data: st.DataObject) -> None:
    case = data.draw(cases(low=1, dtypes=["f8", "i8", "u1", "c16"]))
    key = data.draw(keys(case.a.shape, arrays=data.draw(st.booleans())))
    scalar = data.draw(st.sampled_from([3, 2.5, np.float32(1), [4]]))
    agree(lambda x: assigned(key, x, scalar), case)


@few(25)
@given(st.data())
def test_of_repeated_indices_the_last_wins(data: st.DataObject) -> None:
    case = data.draw(cases(shape=data.draw(st.sampled_from([(4,), (5, 3), (3, 4, 2)])), dtypes=["i8"]))
    count = data.draw(st.integers(0, 7))
    index = np.array(data.draw(st.lists(st.integers(0, case.a.shape[0] - 1), min_size=count, max_size=count)), int)
    rows = data.draw(cases(case.x.process_mesh, (count, *case.a.shape[1:]), dtypes=["i8"]))
    agree(lambda x, v: assigned(index, x, v), case, rows)
    held = dm.shard_tensor(index, case.x.process_mesh, [S0])
    new = np.copy(case.x)
    new[held] = rows.x
    np.testing.assert_array_equal(oracle.value(new), assigned(index, case.a, rows.a)[0])


@pytest.mark.usefixtures("sync")
def test_assignment_under_masks() -> None:
    @few(20)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        case = data.draw(cases(dtypes=["i8", "f8"], low=1))
        shape = case.a.shape[: data.draw(st.integers(1, case.a.ndim))]
        mask = data.draw(cases(case.x.process_mesh, shape, dtypes=["?"]))
        agree(lambda x, m: assigned(m, x, 7), case, mask)
        agree(lambda x: assigned(mask.a, x, 7), case)
        row = np.arange(math.prod(case.a.shape[len(shape) :])).reshape(case.a.shape[len(shape) :])
        agree(lambda x, m: assigned(m, x, row), case, mask)
        every = np.arange(case.a[mask.a].size).reshape(case.a[mask.a].shape)
        agree(lambda x, m: assigned(m, x, every), case, mask)

    run()


def written(function: Callable[[Any], None]) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        new = np.copy(x)
        function(new)
        return new

    return run


def _augmented(x: Any) -> None:
    x[1:] += 1
    x[::2, 0] *= 3


WRITERS: dict[str, Callable[[Any], None]] = {
    "augmented": _augmented,
    "put": lambda x: np.put(x, [0, 3], [7, 8]),
    "put_along_axis": lambda x: np.put_along_axis(x, np.zeros((1, x.shape[1]), int), 9, 0),
    "putmask": lambda x: np.putmask(x, x > 2, 0),
    "copyto": lambda x: np.copyto(x, 4),
    "copyto where": lambda x: np.copyto(x, 4, where=x > 1),
    "fill_diagonal": lambda x: np.fill_diagonal(x, 5),
}


@pytest.mark.parametrize("name", WRITERS)
def test_functions_that_write_rebind(name: str) -> None:
    @few(8)
    @given(cases(shape=(5, 3), dtypes=["i8", "f8"]))
    def run(case: Case) -> None:
        agree(written(WRITERS[name]), case)

    run()


def test_a_write_is_never_lost() -> None:
    """Through a slice, cut or not; and what was made before keeps the old value."""
    for placements in ([S0], [S1], [R], [P]):
        x = dm.shard_tensor(np.ones((4, 4)), LINE, placements)
        before = x * 2
        layout = x.layout
        x[:2] = 0
        assert x.layout == layout
        assert float(np.sum(x)) == 8
        assert float(np.sum(before)) == 32


def test_values_of_another_shape_or_mesh_are_refused() -> None:
    x = dm.zeros((4, 3), mesh=LINE, placements=[S0])
    with pytest.raises(ValueError, match="could not broadcast"):
        x[1] = np.ones(2)
    with pytest.raises(ValueError, match="reshard it first"):
        x[1] = dm.ones(3, mesh=THREE)


# -- layouts and bytes ------------------------------------------------------------------------------------------------


def sharded(shape: tuple[int, ...], placements: Any, mesh: Any = FOUR) -> DTensor:
    return dm.shard_tensor(np.arange(math.prod(shape)).reshape(shape), mesh, placements)


def test_a_slice_of_a_cut_dim_stays_cut() -> None:
    """What is cut stays cut, empty parts among it."""
    x = sharded((32, 32), [S1])
    y = x[:, :16]
    assert y.placements == (S1,)
    assert y.layout.chunks[1] == (8, 8, 0, 0)
    assert x[:, 5::3].layout.chunks[1] == (1, 3, 3, 2)
    for z in (y, x[:, 5::3], x[3:5], x[::2, None], x[..., 30:]):
        assert z.explain().total_bytes == 0


BYTES: dict[str, tuple[Callable[[Any], Any], Any, tuple[Any, ...], int]] = {
    "row": (lambda x: x[3], [S0], (S0,), 3 * 2 * 8),  # one rank shares its row out
    "row of few": (lambda x: x[3, :2], [S0], (R,), 3 * 2 * 8),  # too short to be shared: copied
    "column of rows": (lambda x: x[:, 3], [S0], (S0,), 0),
    "element": (lambda x: x[3, 3], [S0], (R,), 3 * 8),
    "backwards": (lambda x: x[::-1], [S0], (S0,), 512),
    "in order": (lambda x: x[[0, 2, 5, 5, 7]], [S0], (S0,), 0),
    "swapped": (lambda x: x[[7, 6, 1, 0]], [S0], (S0,), 4 * 64),
    "repeated": (lambda x: x[[7] * 7 + [0]], [S0], (S0,), 4 * 64),  # once to each rank, however often it is wanted
    "repeated in order": (lambda x: x[[7] * 8], [S0], (S0,), 0),
    "across": (lambda x: x[:, [7, 0]], [S0], (S0,), 0),
    "pairs": (lambda x: x[[0, 7], [7, 0]], [S0], (S0,), 0),
    "index is a DTensor": (lambda x: x[:, dm.arange(3, mesh=FOUR)], [S0], (S0,), 0),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes(name: str) -> None:
    function, placements, result, nbytes = BYTES[name]
    y = function(sharded((8, 8), placements))
    assert y.placements == result
    assert y.explain().total_bytes == nbytes
    oracle.same(y, function(np.arange(64).reshape(8, 8)) if "DTensor" not in name else np.arange(64).reshape(8, 8)[:, :3])


def test_explain_says_why() -> None:
    x = sharded((8, 8), [S0])
    assert "an integer index" in x[3].explain().reason
    assert "integer arrays" in x[[7, 0]].explain().reason
    assert "negative step" in x[::-1].explain().reason


def test_partial_rows_stay_partial() -> None:
    x = dm.shard_tensor(np.arange(12.0).reshape(4, 3), LINE, [P])
    for y in (x[1], x[::-1], x[[3, 0]], x[..., None]):
        assert y.placements == (P,)
        assert y.explain().total_bytes == x.explain().total_bytes


def test_rows_of_an_uneven_table() -> None:
    """A lookup of rows of an uneven table, of which the result is used more than once."""
    x = sharded((5, 2), [S0], LINE)
    y = x[dm.shard_tensor(np.array([0, 4, 2]), LINE, [R])]
    np.testing.assert_array_equal(y, [[0, 1], [8, 9], [4, 5]])
    np.testing.assert_array_equal(y + 1, [[1, 2], [9, 10], [5, 6]])
    np.testing.assert_array_equal(y + 1, [[1, 2], [9, 10], [5, 6]])


def test_a_table_that_is_much_longer_than_the_indices_stays_where_it_is() -> None:
    x = sharded((1000, 4), [S0])
    y = x[dm.shard_tensor(np.array([999, -1, 3, 500, 0, 7, 8, 9]), FOUR, [S0])]
    assert y.placements == (S0,)
    assert y.explain().total_bytes == 4 * 6 * 8 + 3 * 8 * 4 * 8  # the indices to all, then the rows reduced and scattered
    oracle.same(y, np.arange(4000).reshape(1000, 4)[[999, -1, 3, 500, 0, 7, 8, 9]])


@pytest.mark.parametrize("kind", ["f8", "f2", "c16", "?", "M8[s]", "U3", "S2"])
def test_every_dtype_is_picked_bit_by_bit(kind: str) -> None:
    a = np.array(["2020", "2021", "NaT"] * 3, kind) if kind[0] == "M" else np.arange(9).astype(kind)
    if a.dtype.kind == "f":
        a[2], a[7] = -0.0, np.nan
    x = dm.shard_tensor(a, THREE, [S0])
    index = np.array([7, 2, 2])
    for i in (index, dm.shard_tensor(index, THREE, [S0])):
        got = x[i].compute(scheduler="sync")
        assert got.dtype == a.dtype
        assert got.tobytes() == a[index].tobytes()


def test_iteration_and_length() -> None:
    x = sharded((5, 2), [S0], THREE)
    assert len(x) == 5
    assert [row.compute().tolist() for row in x] == np.arange(10).reshape(5, 2).tolist()
    with pytest.raises(TypeError):
        len(x[0, 0])


def test_on_a_cluster(threads: Client) -> None:
    a = np.arange(80).reshape(8, 10)
    x = sharded((8, 10), [S0]).persist()
    picks = np.array([5, 1, 6, 2, 2])
    y = x[picks, ::-1]
    transport.reset_stats()
    np.testing.assert_array_equal(y.persist().compute(), a[picks, ::-1])
    assert sum(road["bytes"] for road in transport.stats().values()) == y.explain().total_bytes
    m = x[x % 3 == 0]
    assert m.placements == (S0,)
    assert m.layout.chunks[0] == tuple(int((part % 3 == 0).sum()) for part in np.split(a, 4))
    np.testing.assert_array_equal(m, a[a % 3 == 0])
    x[picks[:4]] = y[:4, ::-1] * 10
    want = a.copy()
    want[picks[:4]] = a[picks[:4]] * 10
    np.testing.assert_array_equal(x, want)
    with pytest.raises(IndexError):
        x[dm.shard_tensor(np.array([99]), FOUR, [R])].compute()
