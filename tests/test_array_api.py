"""The array API standard: every function of the namespace on sharded arrays against array-api-strict, and what it says of itself.

The suite of data-apis is run by hand, see ``array_api/``; this covers the same ground at every push.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import array_api_strict as strict
import dask
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import daskmesh as dm
from daskmesh import array_api
from daskmesh.array_api import namespace, spread
from daskmesh.placement import Partial, Placement, Replicate, Shard
from daskmesh.testing import assert_bytes_moved

pytestmark = pytest.mark.cluster

MESHES = {"3": dm.init_mesh(3, ["x"]), "2x2": dm.init_mesh((2, 2), ("x", "y"))}
strict.set_array_api_strict_flags(api_version="2025.12")

DTYPES = {
    "b": ["bool"],
    "i": ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"],
    "f": ["float32", "float64"],
    "c": ["complex64", "complex128"],
}


@pytest.fixture(autouse=True, scope="module")
def _without_warnings(in_this_thread: None) -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


class Drawn(NamedTuple):
    """An array in both namespaces."""

    sharded: Any
    plain: Any


@st.composite
def arrays(
    draw: Any, mesh: dm.ProcessMesh, dtype: str, *, shape: tuple[int, ...] | None = None, ndims: tuple[int, int] = (0, 3),
    small: int = 0,
) -> Drawn:  # fmt: skip
    """Small arrays, often with empty parts, in any layout; values below `small` if given."""
    if shape is None:
        shape = tuple(draw(st.lists(st.integers(small, 5), min_size=ndims[0], max_size=ndims[1])))
    values = _values(np.random.default_rng(draw(st.integers(0, 999))), shape, dtype)
    placements = [draw(st.sampled_from(_choices(shape, dtype))) for _ in range(mesh.ndim)]
    return Drawn(dm.shard_tensor(values, mesh, placements), strict.asarray(values))


def _values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    kind = np.dtype(dtype).kind
    if kind in "biu":
        low = {"b": 0, "u": 0, "i": -9}[kind]
        return np.asarray(rng.integers(low, 2 if kind == "b" else 10, shape)).astype(dtype)
    parts = [np.asarray(rng.integers(-30, 30, shape) / 8) for _ in range(2)]
    for part in parts if kind == "c" else parts[:1]:
        part[np.asarray(rng.random(shape) < 0.05)] = np.nan
        part[np.asarray(rng.random(shape) < 0.05)] = -0.0
    return (parts[0] + 1j * parts[1] if kind == "c" else parts[0]).astype(dtype)


def _choices(shape: tuple[int, ...], dtype: str) -> list[Placement]:
    terms = [] if np.dtype(dtype).kind in "fc" else [Partial()]  # of nan and -0.0 terms are another matter
    return [Replicate(), *terms, *(Shard(d) for d in range(len(shape)))]


def plain(x: Any) -> np.ndarray:
    return np.asarray(x._array) if hasattr(x, "_array") else np.asarray(x)


def same(got: Any, want: Any, rtol: float = 0) -> None:
    if isinstance(want, (tuple, list)):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            same(g, w, rtol)
        return
    w = plain(want)
    assert isinstance(got, dm.DTensor)
    assert (got.shape, got.dtype) == (w.shape, w.dtype)
    g = np.asarray(got)
    if rtol and w.dtype.kind in "fc":
        np.testing.assert_allclose(g, w, rtol=rtol if w.dtype.itemsize > 4 + 4 * (w.dtype.kind == "c") else 1e-5, atol=1e-5)
    else:
        np.testing.assert_array_equal(g, w)


def quickly(examples: int) -> Callable[[Any], Any]:
    health = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    phases = (Phase.explicit, Phase.generate)  # shrinking runs thousands of programs; these are small
    return settings(
        max_examples=examples, deadline=None, suppress_health_check=health, derandomize=True, database=None, phases=phases
    )


def dtypes(kinds: str) -> st.SearchStrategy[str]:
    return st.sampled_from([d for k in kinds for d in DTYPES[k]])


# -- elementwise ------------------------------------------------------------------------------------------------------

FLOATING = "acos acosh asin asinh atan atanh cos cosh exp expm1 log log1p log2 log10 sin sinh sqrt tan tanh reciprocal"
UNARY = {
    **dict.fromkeys(FLOATING.split(), "fc"),
    **dict.fromkeys("abs negative positive sign square".split(), "ifc"),
    **dict.fromkeys("isfinite isinf isnan".split(), "ifc"),
    **dict.fromkeys("ceil floor trunc".split(), "if"),
    **dict.fromkeys("conj real".split(), "ifc"),
    "imag": "c", "round": "ifc", "signbit": "f", "logical_not": "b", "bitwise_invert": "bi",
}  # fmt: skip
BINARY = {
    **dict.fromkeys("add subtract multiply".split(), "ifc"),
    **dict.fromkeys("equal not_equal".split(), "bifc"),
    **dict.fromkeys("greater greater_equal less less_equal maximum minimum".split(), "if"),
    **dict.fromkeys("logical_and logical_or logical_xor".split(), "b"),
    **dict.fromkeys("bitwise_and bitwise_or bitwise_xor".split(), "bi"),
    **dict.fromkeys("atan2 copysign hypot logaddexp nextafter".split(), "f"),
    "divide": "fc", "floor_divide": "if", "remainder": "if", "pow": "fc",
}  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_array(name: str, mesh: Any) -> None:
    @quickly(4)
    @given(data=st.data(), dtype=dtypes(UNARY[name]))
    def check(data: Any, dtype: str) -> None:
        x = data.draw(arrays(mesh, dtype))
        same(getattr(namespace(mesh), name)(x.sharded), getattr(strict, name)(x.plain))

    check()


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_arrays_broadcast(name: str, mesh: Any) -> None:
    @quickly(4)
    @given(data=st.data(), dtype=dtypes(BINARY[name]))
    def check(data: Any, dtype: str) -> None:
        shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=2)))
        lead, keep = data.draw(st.integers(0, len(shape))), data.draw(st.lists(st.booleans(), min_size=2, max_size=2))
        other = tuple(n if k else 1 for n, k in zip(shape, keep, strict=False))[lead:]
        x, y = data.draw(arrays(mesh, dtype, shape=shape)), data.draw(arrays(mesh, dtype, shape=other))
        f, g = getattr(namespace(mesh), name), getattr(strict, name)
        same(f(x.sharded, y.sharded), g(x.plain, y.plain))
        same(f(y.sharded, x.sharded), g(y.plain, x.plain))

    check()


@pytest.mark.parametrize("pair", [("int8", "int32"), ("uint8", "int8"), ("float32", "float64"), ("float32", "complex64"),
                                  ("uint16", "int64"), ("complex64", "float64")], ids="-".join)  # fmt: skip
def test_promotion(pair: tuple[str, str]) -> None:
    mesh = MESHES["3"]
    xp = namespace(mesh)
    x, y = (xp.ones(4, dtype=getattr(xp, d)) for d in pair)
    want = strict.result_type(*(getattr(strict, d) for d in pair))
    assert (x + y).dtype == xp.result_type(x, y) == want._np_dtype
    assert (x * 2).dtype == x.dtype


# -- one table for the rest: name -> (dtype kinds, call) --------------------------------------------------------------

Call = Callable[[Any, Any], Any]
AXES: dict[str, tuple[str, Call]] = {
    "sum": ("ifc", lambda xp, x: [xp.sum(x), xp.sum(x, axis=0), xp.sum(x, axis=-1, keepdims=True)]),
    "prod": ("ic", lambda xp, x: [xp.prod(x, axis=0), xp.prod(x, axis=(0, 1))]),
    "max": ("if", lambda xp, x: [xp.max(x), xp.max(x, axis=1), xp.max(x, axis=0, keepdims=True)]),
    "min": ("if", lambda xp, x: [xp.min(x), xp.min(x, axis=(1, 0))]),
    "mean": ("fc", lambda xp, x: [xp.mean(x), xp.mean(x, axis=0), xp.mean(x, axis=1, keepdims=True)]),
    "var": ("f", lambda xp, x: [xp.var(x), xp.var(x, axis=0), xp.std(x, axis=1, correction=1.0)]),
    "any": ("bif", lambda xp, x: [xp.any(x), xp.any(x, axis=0), xp.all(x), xp.all(x, axis=1, keepdims=True)]),
    "argmax": ("if", lambda xp, x: [xp.argmax(x), xp.argmax(x, axis=0), xp.argmin(x, axis=1, keepdims=True)]),
    "count_nonzero": ("bifc", lambda xp, x: [xp.count_nonzero(x), xp.count_nonzero(x, axis=0)]),
    "cumulative_sum": ("ifc", lambda xp, x: [xp.cumulative_sum(x, axis=0), xp.cumulative_sum(x, axis=1, include_initial=True)]),
    "cumulative_prod": ("i", lambda xp, x: [xp.cumulative_prod(x, axis=0), xp.cumulative_prod(x, axis=1)]),
    "diff": ("if", lambda xp, x: [xp.diff(x), xp.diff(x, axis=0, n=2), xp.diff(x, axis=0, prepend=x)]),
    "sort": ("if", lambda xp, x: [xp.sort(x), xp.sort(x, axis=0), xp.sort(x, axis=0, descending=True)]),
    "argsort": ("i", lambda xp, x: [xp.argsort(x), xp.argsort(x, axis=0), xp.argsort(x, axis=1, descending=True)]),
    "broadcast_to": ("f", lambda xp, x: [xp.broadcast_to(x, (2, *x.shape)), *xp.broadcast_arrays(x, x[:1, :])]),
    "concat": ("if", lambda xp, x: [xp.concat([x, x[1:, :]]), xp.concat([x, x], axis=1), xp.concat([x, x], axis=None)]),
    "expand_dims": ("i", lambda xp, x: [xp.expand_dims(x, axis=0), xp.expand_dims(x, axis=-1)]),
    "flip": ("i", lambda xp, x: [xp.flip(x), xp.flip(x, axis=0)]),
    "moveaxis": ("i", lambda xp, x: [xp.moveaxis(x, 0, 1), xp.permute_dims(x, (1, 0)), x.T, x.mT, xp.matrix_transpose(x)]),
    "repeat": ("i", lambda xp, x: [xp.repeat(x, 2, axis=0), xp.repeat(x, 3, axis=1), xp.repeat(x, 2)]),
    "reshape": ("i", lambda xp, x: [xp.reshape(x, (-1,)), xp.reshape(x, (x.shape[1], x.shape[0])), xp.reshape(x, (1, *x.shape))]),
    "roll": ("i", lambda xp, x: [xp.roll(x, 1), xp.roll(x, -2, axis=0), xp.roll(x, (1, 2), axis=(0, 1))]),
    "squeeze": ("i", lambda xp, x: [xp.squeeze(x[:1, :], axis=0), xp.squeeze(x[:, 1:2], axis=1)]),
    "stack": ("i", lambda xp, x: [xp.stack([x, x]), xp.stack([x, x], axis=2)]),
    "tile": ("i", lambda xp, x: [xp.tile(x, (2,)), xp.tile(x, (2, 1, 2))]),
    "unstack": ("i", lambda xp, x: [*xp.unstack(x), *xp.unstack(x, axis=1)]),
    "tril": ("ic", lambda xp, x: [xp.tril(x), xp.tril(x, k=1), xp.triu(x), xp.triu(x, k=-1)]),
    "nonzero": ("bif", lambda xp, x: list(xp.nonzero(x))),
    "clip": ("if", lambda xp, x: [xp.clip(x, 1, 3), xp.clip(x, min=2), xp.clip(x, max=2), xp.clip(x, x, x)]),
    "where": ("ifc", lambda xp, x: [xp.where(x != x[:1, :], x, x[:, :1]), xp.where(x == x, x, xp.zeros_like(x))]),
    "take": ("if", lambda xp, x: [xp.take(x, xp.asarray([1, 0, 1]), axis=0), xp.take(x, xp.asarray([0]), axis=1)]),
    "take_along_axis": ("i", lambda xp, x: [xp.take_along_axis(x, xp.argsort(x, axis=a), axis=a) for a in (0, 1)]),
    "unique": ("bifc", lambda xp, x: [*xp.unique_counts(x), xp.unique_values(x)]),
    "unique_inverse": ("bi", lambda xp, x: [*xp.unique_inverse(x), *xp.unique_all(x)]),
    "isin": ("i", lambda xp, x: [xp.isin(x, x[:1, :]), xp.isin(x, x[0, :])]),
    "searchsorted": ("if", lambda xp, x: [xp.searchsorted(xp.asarray([1, 2, 5], dtype=x.dtype), x, side=s)
                                          for s in ("left", "right")]),
    "matmul": ("ifc", lambda xp, x: [x @ x.mT, xp.matmul(x.mT, x), x[0, :] @ x.mT]),
    "tensordot": ("ifc", lambda xp, x: [xp.tensordot(x, x), xp.tensordot(x, x.mT, axes=1),
                                        xp.tensordot(x, x, axes=((0,), (0,)))]),
    "vecdot": ("ifc", lambda xp, x: [xp.vecdot(x, x), xp.vecdot(x, x, axis=-2)]),
    "index": ("ifc", lambda xp, x: [x[0, ...], x[-1, 1], x[..., ::-1], x[1:, None, ::2],
                                    x[xp.asarray([1, 0]), xp.asarray([0, 1])]]),
    "mask": ("if", lambda xp, x: [x[x > 1], x[x[:, 0] > 0]]),
    "meshgrid": ("i", lambda xp, x: [*xp.meshgrid(x[0, :], x[:, 0]), *xp.meshgrid(x[0, :], x[:, 0], indexing="ij")]),
    "astype": ("bif", lambda xp, x: [xp.astype(x, xp.float64), xp.astype(x, xp.bool), xp.astype(x, xp.complex128)]),
    "like": ("ifc", lambda xp, x: [xp.zeros_like(x), xp.ones_like(x), xp.full_like(x, 3), xp.zeros_like(x, dtype=xp.int8)]),
}  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("name", AXES)
def test_functions_of_a_matrix(name: str, mesh: Any) -> None:
    kinds, call = AXES[name]

    @quickly(4)
    @given(data=st.data(), dtype=dtypes(kinds))
    def check(data: Any, dtype: str) -> None:
        x = data.draw(arrays(mesh, dtype, ndims=(2, 2), small=2))
        same(call(namespace(mesh), x.sharded), call(strict, x.plain), rtol=1e-12)

    check()


COMPUTING = {"mask", "nonzero", "unique", "unique_inverse"}  # sizes that depend on values


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("name", AXES)
def test_nothing_is_computed_unasked_and_nothing_moves_unsaid(name: str, mesh: Any) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was computed")

    dtype = {"f": "float64", "i": "int64", "c": "complex128"}[AXES[name][0].replace("b", "")[0]]
    xp = namespace(mesh)
    x = xp.asarray(_values(np.random.default_rng(0), (7, 5), dtype))
    with dask.config.set({} if name in COMPUTING else {"scheduler": refuse}):
        results = AXES[name][1](xp, x)
    for y in results:
        assert_bytes_moved(y)


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_assignment(mesh: Any) -> None:
    keys = [(0, ...), (..., 1), (slice(None, None, 2), slice(1, None)), (-1, -1), (slice(1, 1), ...)]

    @quickly(12)
    @given(data=st.data(), dtype=dtypes("ifc"), key=st.sampled_from([*keys, "mask"]))
    def check(data: Any, dtype: str, key: Any) -> None:
        x = data.draw(arrays(mesh, dtype, ndims=(2, 2), small=2))
        before = np.asarray(x.sharded)
        y, z = namespace(mesh).asarray(x.sharded, copy=True), strict.asarray(x.plain, copy=True)
        y[y == y if key == "mask" else key] = 7
        z[z == z if key == "mask" else key] = 7
        same(y, z)
        np.testing.assert_array_equal(np.asarray(x.sharded), before)

    check()


CREATION: dict[str, Call] = {
    "arange": lambda xp, _: [xp.arange(7), xp.arange(2, 9, 3), xp.arange(5.0), xp.arange(6, 1, -2, dtype=xp.float32)],
    "linspace": lambda xp, _: [xp.linspace(0, 1, 7), xp.linspace(3, -1, 4, endpoint=False, dtype=xp.float32)],
    "eye": lambda xp, _: [xp.eye(4), xp.eye(3, 5, k=1, dtype=xp.int8), xp.eye(2, 0)],
    "zeros": lambda xp, _: [xp.zeros(3), xp.zeros((2, 5), dtype=xp.complex64), xp.ones((0, 2)), xp.ones((), dtype=xp.bool)],
    "full": lambda xp, _: [xp.full(3, 2), xp.full((2, 2), 1.5), xp.full((), True), xp.full(4, 1j), xp.full(2, 3, dtype=xp.uint8)],
    "asarray": lambda xp, _: [xp.asarray(v) for v in (3, 2.5, True, 1j, [1, 2, 3], [[1.0], [2.0]], [])],
}


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("name", CREATION)
def test_creation(name: str, mesh: Any) -> None:
    got = CREATION[name](namespace(mesh), None)
    same(got, CREATION[name](strict, None))
    for x in got:
        assert x.placements == tuple(spread(mesh)(x.ndim))
        assert x.device == mesh


# -- what the namespace says of itself --------------------------------------------------------------------------------


def test_every_name_of_the_standard_is_there() -> None:
    names = {n for n in strict.__all__ if not n.startswith("_")} - {"linalg", "fft", "set_array_api_strict_flags",
             "get_array_api_strict_flags", "reset_array_api_strict_flags", "ArrayAPIStrictFlags", "Device"}  # fmt: skip
    xp = namespace(MESHES["3"])
    for where in (xp, array_api):
        assert not [n for n in names if not hasattr(where, n)]
        assert where.__array_api_version__ == "2025.12"
        assert isinstance(where, ModuleType)


def test_extensions_that_are_not_complete_are_not_claimed() -> None:
    for where in (namespace(MESHES["3"]), array_api):
        assert not hasattr(where, "linalg")
        assert not hasattr(where, "fft")


def test_numpy_functions_beyond_the_standard_are_there() -> None:
    xp = namespace(MESHES["3"])
    assert xp.nansum is np.nansum
    assert not hasattr(xp, "savetxt")


def test_a_namespace_is_that_of_the_mesh() -> None:
    x = namespace(MESHES["2x2"]).ones((4, 4))
    y = x.reshard([Replicate()])
    xp = x.__array_namespace__()
    assert xp is y.__array_namespace__(api_version="2024.12")
    assert pickle.loads(pickle.dumps(xp)) is xp
    assert xp is not namespace(MESHES["3"])
    assert repr(xp) == f"<namespace 'daskmesh.array_api' on {MESHES['2x2']!r}>"
    with pytest.raises(ValueError, match="daskmesh knows the versions"):
        x.__array_namespace__(api_version="1999.01")


def test_a_rule_of_placements() -> None:
    xp = namespace(MESHES["2x2"], lambda ndim: [Replicate(), Shard(0)] if ndim else [])
    assert xp.zeros((4, 4)).placements == (Replicate(), Shard(0))
    other = xp.zeros(4, device=MESHES["3"])
    assert (other.placements, other.device) == ((Shard(0),), MESHES["3"])


def test_info() -> None:
    xp = namespace(MESHES["2x2"])
    info = xp.__array_namespace_info__()
    assert info.capabilities() == {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}
    assert (info.default_device(), info.devices()) == (MESHES["2x2"], (MESHES["2x2"],))
    assert info.default_dtypes()["real floating"] == np.float64
    assert info.default_dtypes(device=MESHES["2x2"])["integral"] == np.int64
    assert set(info.dtypes(kind="complex floating")) == {"complex64", "complex128"}
    assert set(info.dtypes(kind=("bool", "unsigned integer"))) == {"bool", "uint8", "uint16", "uint32", "uint64"}


def test_the_module_makes_arrays_on_the_current_world() -> None:
    mesh = array_api.__array_namespace_info__().default_device()
    assert mesh == dm.init_mesh(dm.get_world_size(), ["x"])
    assert array_api.zeros(7).device == mesh


def test_limits_are_python_numbers() -> None:
    info = array_api.finfo(array_api.complex64)
    assert (info.bits, info.dtype, type(info.eps)) == (32, np.dtype("f4"), float)
    assert array_api.finfo(array_api.ones(2)).max == np.finfo(float).max
    assert array_api.iinfo(array_api.int8).max == 127


def test_asarray_of_a_dtensor() -> None:
    xp = namespace(MESHES["3"])
    x = xp.arange(5)
    assert xp.asarray(x) is x
    assert xp.asarray(x, copy=False) is x
    y = xp.asarray(x, copy=True)
    y += 1
    assert (int(x[0]), int(y[0])) == (0, 1)
    assert xp.asarray(x, dtype=xp.float32).dtype == np.float32
    assert xp.astype(x, xp.int64, copy=False) is x
    assert xp.astype(x, xp.int64) is not x
    assert xp.from_dlpack(x) is x
    assert xp.from_dlpack(np.arange(3)).shape == (3,)


def test_errors_of_creation() -> None:
    xp = namespace(MESHES["3"])
    x = xp.arange(5)
    with pytest.raises(TypeError, match="use stack or concat"):
        xp.asarray([x, x])
    with pytest.raises(ValueError, match="placing data on a mesh copies them"):
        xp.asarray([1, 2], copy=False)
    with pytest.raises(ValueError, match="a cast from int64 to float32 makes a copy"):
        xp.asarray(x, dtype=xp.float32, copy=False)
    with pytest.raises(ValueError, match="the device of a DTensor is its mesh"):
        xp.zeros(3, device="cpu")


# -- the suite of data-apis -------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[1]


def test_known_failures_of_the_suite_are_sorted_by_cause_and_counted_in_the_docs() -> None:
    lines = (ROOT / "tests" / "array_api" / "xfails.txt").read_text(encoding="utf-8").splitlines()
    causes = [i for i, line in enumerate(lines) if line.startswith("# -- ")]
    entries = [(i, line) for i, line in enumerate(lines) if line.startswith("array_api_tests/")]
    assert causes[0] < entries[0][0]
    assert len({line for _, line in entries}) == len(entries) < 110
    for start, end in pairwise([*causes, len(lines)]):
        under = [line for i, line in entries if start < i < end]
        assert under == sorted(under)
        assert under, f"a cause without a failure: {lines[start]}"
    page = " ".join((ROOT / "docs" / "array-api.md").read_text(encoding="utf-8").split())
    assert f"but for {len(entries)} known failures" in page
