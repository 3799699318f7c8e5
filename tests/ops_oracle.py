"""Random arrays in random layouts, and what an operation on them must hold: NumPy's value and dtype, and the bytes of its plan.

A case is computed without the cluster, all ranks in one thread; tickets then hold their arrays, and loads are counted as on
workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import dask
import numpy as np
import plan_oracle as oracle
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import daskmesh as dm
from daskmesh import transport
from daskmesh.dtensor import DTensor
from daskmesh.graph import local_of
from daskmesh.layout import Layout, make_layout
from daskmesh.mesh import ProcessMesh, init_mesh
from daskmesh.placement import Partial, Placement, Replicate, Shard

MESHES = (
    init_mesh(2, ["x"]),
    init_mesh(3, ["x"]),
    init_mesh((2, 2), ("x", "y")),
    ProcessMesh([[4, 1, 3], [0, 5, 2]], dim_names=["x", "y"]),
)
DTYPES = ("f8", "i4", "?", "c16", "f4", "u1", "i8", "f2")
MAX_SIZE = 400
LINE = np.array([3, 1, 4, 1, 5, 9, 2, 6])
TABLE = np.array([[2.5, -1, 4, 0, 7], [1, 8, -2.5, 3, 3], [6, 0, 1, -4, 2], [9, 5, 5, 5, 0], [2, -7, 3, 1, 8]])


def few(n: int) -> settings:
    """So many examples, the same ones in every run."""
    return settings(
        max_examples=n, derandomize=True, deadline=None, database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )  # fmt: skip


class Case(NamedTuple):
    """A DTensor, and its value as an array of NumPy's."""

    x: DTensor
    a: np.ndarray


def operators(dtype: Any) -> list[str]:
    """Reductions that terms of a dtype may have."""
    kind = np.dtype(dtype).kind
    if kind == "b":
        return ["sum", "any", "all", "max"]
    return ["sum", "prod", "avg"] if kind == "c" else ["sum", "max", "min", "avg"]


@st.composite
def placements_of(draw: Any, mesh: ProcessMesh, ndim: int, dtype: Any, partial: bool = True) -> tuple[Placement, ...]:
    choices: list[Placement] = [Replicate(), *(Shard(d) for d in range(ndim)), *(Shard(d) for d in range(ndim))]
    if partial:
        choices += [Partial(op) for op in operators(dtype)[:2]]
    return tuple(draw(st.sampled_from(choices)) for _ in range(mesh.ndim))


@st.composite
def layouts_of(
    draw: Any, mesh: ProcessMesh, shape: Sequence[int], dtype: Any, partial: bool = True, uneven: bool = True
) -> Layout:
    layout = make_layout(mesh, draw(placements_of(mesh, len(shape), dtype, partial)), shape, dtype)
    if not uneven or not draw(st.booleans()):
        return layout
    chunks = []
    for d, n in enumerate(shape):
        ends = sorted(draw(st.integers(0, n)) for _ in range(len(layout.chunks[d]) - 1))
        chunks.append(tuple(b - a for a, b in zip([0, *ends], [*ends, n], strict=True)))
    return make_layout(mesh, layout.placements, shape, dtype, chunks)


@st.composite
def shapes(draw: Any, low: int = 0, high: int = 3) -> tuple[int, ...]:
    ndim = draw(st.integers(low, high))
    sizes = st.sampled_from([4, 1, 0, 3, 2, 5, 7, 9, 6, 8])
    return tuple(draw(st.lists(sizes, min_size=ndim, max_size=ndim).filter(lambda s: np.prod(s, dtype=int) <= MAX_SIZE)))


@st.composite
def cases(
    draw: Any,
    mesh: ProcessMesh | None = None,
    shape: tuple[int, ...] | None = None,
    dtypes: Sequence[str] = DTYPES,
    low: int = 0,
    partial: bool = True,
) -> Case:
    mesh = draw(st.sampled_from(MESHES)) if mesh is None else mesh
    shape = draw(shapes(low)) if shape is None else shape
    layout = draw(layouts_of(mesh, shape, draw(st.sampled_from(dtypes)), partial))
    return made(layout, np.random.default_rng(draw(st.integers(0, 99))))


def made(layout: Layout, rng: np.random.Generator) -> Case:
    """Small whole numbers in a layout."""
    terms = oracle.random_terms(layout, rng)
    return Case(held(layout, terms), oracle.value(layout, terms))


def held(layout: Layout, terms: np.ndarray) -> DTensor:
    """A DTensor of just this layout, from its terms."""
    x = dm.dtensor_from_local(list(oracle.cut(layout, terms).values()), layout.mesh, layout.placements)
    assert x.layout == layout
    return x


def value(x: DTensor) -> np.ndarray:
    """The value of a DTensor from all its blocks: replicas must agree, and the loads must be those of its plan."""
    plan = x.explain()
    transport.reset_stats()
    blocks = dask.get(x.__dask_graph__(), x.__dask_keys__())
    moved = sum(road["bytes"] for road in transport.stats().values())
    assert moved == plan.total_bytes, f"{moved} B moved, the plan says {plan.text}"
    layout = x.layout
    locals_ = {c: local_of(b, layout) for c, b in zip(layout.coords(), blocks, strict=True)}
    return oracle.value(layout, oracle.joined(layout, locals_))


def same(got: Any, want: Any, factor: int = 64) -> None:
    """Equal in shape, dtype and value; floats within some units in the last place of the largest."""
    want = np.asarray(want)
    got = value(got) if isinstance(got, DTensor) else np.asarray(got)
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    if want.dtype.kind not in "fc":
        np.testing.assert_array_equal(got, want)
        return
    finite = np.abs(want[np.isfinite(want)])
    scale = max(1.0, float(finite.max())) if finite.size else 1.0
    np.testing.assert_allclose(got, want, rtol=0, atol=scale * factor * float(np.finfo(want.dtype).eps))


def agree(function: Callable[..., Any], *operands: Any, factor: int = 64) -> None:
    """A function of cases and plain operands gives NumPy's value, or NumPy's error."""
    mine = [c.x if isinstance(c, Case) else c for c in operands]
    theirs = [c.a if isinstance(c, Case) else c for c in operands]
    with np.errstate(all="ignore"):
        try:
            want = function(*theirs)
        except (ValueError, TypeError) as error:
            refused(type(error), function, mine)
            return
        got = function(*mine)
        if not isinstance(want, tuple):
            got, want = (got,), (want,)
        for g, w in zip(got, want, strict=True):
            same(g, w, factor)


def refused(error: type[Exception], function: Callable[..., Any], operands: Sequence[Any]) -> None:
    """The same type of error, at the latest when the value is computed."""
    try:
        result = function(*operands)
        for x in result if isinstance(result, tuple) else (result,):
            value(x)
    except error:
        return
    raise AssertionError(f"NumPy raises {error.__name__}, this gave {result!r}")


def placed(values: np.ndarray, mesh: ProcessMesh, placements: Sequence[Placement], chunks: Any = None) -> Case:
    """A value in a layout, with parts of any sizes."""
    layout = make_layout(mesh, placements, values.shape, values.dtype, chunks)
    x = dm.shard_tensor(values, mesh, placements)
    return Case(x.rechunk(type(x.chunks)(layout.chunks)), values)


def _uneven(n: int) -> tuple[int, int, int]:
    return n - n // 3, 0, n // 3


def lines(values: np.ndarray) -> list[Case]:
    """A 1-d array: even, uneven with an empty part, twice cut, as terms."""
    two, three, square, _ = MESHES
    s0 = Shard(0)
    cases = [placed(values, two, [s0]), placed(values, three, [s0], [_uneven(len(values))]), placed(values, square, [s0, s0])]
    return cases if values.dtype.kind not in "iufc" else [*cases, placed(values, square, [Partial(), s0])]


def tables(values: np.ndarray) -> list[Case]:
    """An array of two or more dims: cut along the second, uneven with an empty part, along both, as terms."""
    two, three, square, _ = MESHES
    s0, s1 = Shard(0), Shard(1)
    uneven = [_uneven(len(values)), *((k,) for k in values.shape[1:])]
    cases = [placed(values, two, [s1]), placed(values, three, [s0], uneven), placed(values, square, [s0, s1])]
    return cases if values.dtype.kind not in "iufc" else [*cases, placed(values, square, [Partial(), s1])]
