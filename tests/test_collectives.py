"""Every collective against NumPy: meshes, mesh dims, dtypes, uneven and empty pieces, few and many ranks."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gangs import run_processes, run_ranks

import daskmesh.collectives as c
from daskmesh import algorithms, halo, parcels
from daskmesh.gang import Gang, alone, gang_context
from daskmesh.layout import split_sizes
from daskmesh.mesh import CURRENT_RANK, ProcessMesh
from daskmesh.placement import PlacementError, reduction
from daskmesh.wires import PeerLost

MESHES = {
    "1": ProcessMesh([4], ["x"]),
    "2": ProcessMesh([1, 0], ["x"]),
    "3": ProcessMesh([5, 2, 9], ["x"]),
    "2x2": ProcessMesh([[0, 1], [2, 3]], ["x", "y"]),
    "2x3": ProcessMesh([[5, 4, 3], [0, 1, 2]], ["x", "y"]),
    "10": ProcessMesh(list(range(10)), ["x"]),
}
GROUPS = [(name, dim) for name, mesh in MESHES.items() for dim in (*mesh.dim_names, None)[: 3 if mesh.ndim > 1 else 1]]
OPS = ["sum", "max", "min", "prod", "avg", "any", "all"]
NUMBERS = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
OTHERS = ["M8[s]", "m8[D]", "S3", "U2", [("a", "i4"), ("b", "f8")], "O"]
SHAPES = [(), (1,), (7,), (0,), (4, 3), (2, 0, 3), (5, 1, 2)]


@pytest.fixture
def road(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether payloads travel in the message, or are exposed and loaded (all-reduce by parts then)."""
    if request.param == "loaded":
        monkeypatch.setattr(parcels, "INLINE_BYTES", 1)
        monkeypatch.setattr(algorithms, "WHOLE_BYTES", 0)
        monkeypatch.setattr(algorithms, "PIECE_BYTES", 16)


by_road = pytest.mark.parametrize("road", ["inline", "loaded"], indirect=True)
by_group = pytest.mark.parametrize(
    ("name", "dim", "road"),
    [(name, dim, "inline") for name, dim in GROUPS] + [("2", "x", "loaded"), ("2x3", "y", "loaded"), ("2x3", None, "loaded")],
    indirect=["road"],
)


def me() -> int:
    rank = CURRENT_RANK.get()
    assert rank is not None
    return rank


def value(rank: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """An array that differs from rank to rank, with every kind of number in it."""
    data = np.random.default_rng(rank).integers(-9, 9, size=shape)
    kind = np.dtype(dtype).kind
    if kind == "V":
        return np.array([(i, i / 3) for i in data.ravel().tolist()], dtype).reshape(shape)
    if kind == "u":
        data = np.abs(data)
    if kind in "SU":
        return np.abs(data).astype(dtype)
    if kind == "c":
        return (data + 1j * data[::-1] if data.ndim else data * 1j).astype(dtype)
    return (data / 7 if kind == "f" else data).astype(dtype)


def members(mesh: ProcessMesh, rank: int, dim: Any) -> list[int]:
    """The ranks of the group of `rank`, in order."""
    axes = range(mesh.ndim) if dim is None else [mesh.dim_index(d) for d in (dim if isinstance(dim, tuple) else (dim,))]
    at = mesh.coordinate(rank)
    return [
        mesh.rank_at([coord[i] if i in axes else at[i] for i in range(mesh.ndim)])
        for coord in itertools.product(*(range(n) if i in axes else (0,) for i, n in enumerate(mesh.shape)))
    ]


def same(got: Any, want: Any) -> None:
    """The same bits, shape and dtype; writable."""
    got, want = np.asarray(got), np.asarray(want)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert got.tolist() == want.tolist() if got.dtype.hasobject else got.tobytes() == want.tobytes()


def check(name: str, dim: Any, function: Callable[[], Any], want: Callable[[list[int], int], Any]) -> None:
    """`function` as each rank against `want(ranks of its group, its place among them)`, value by value."""
    mesh = MESHES[name]
    for rank, got in zip(mesh.process_ids, run_ranks(mesh, function, endpoints=2), strict=True):
        group = members(mesh, rank, dim)
        wanted = want(group, group.index(rank))
        assert len(got) == len(wanted)
        for g, w in zip(got, wanted, strict=True):
            same(g, w)


def folded(op: str, terms: list[Any]) -> Any:
    """The oracle of a reduction: NumPy's, over the stacked terms, in the dtype given."""
    stack = np.stack(terms)
    if op == "avg":
        if stack.dtype.kind in "fc":
            return reduction("avg").fold([t.reshape(-1).copy() for t in terms], len(terms)).reshape(terms[0].shape)
        exact = [math.trunc(sum(map(int, column)) / len(terms)) for column in stack.reshape(len(terms), -1).T]
        return np.array(exact, stack.dtype).reshape(terms[0].shape)
    if op in ("any", "all"):
        return getattr(np, op)(stack != 0, axis=0).astype(stack.dtype)
    ufunc = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}[op]
    out = terms[0].reshape(-1)
    for term in terms[1:]:
        out = ufunc(out, term.reshape(-1))
    return out.reshape(terms[0].shape)


@pytest.mark.parametrize("op", OPS)
@by_group
@pytest.mark.usefixtures("road")
def test_all_reduce_and_scan(name: str, dim: Any, op: str) -> None:
    cases = [*itertools.product(SHAPES, ["f8"]), *itertools.product([(5, 2)], NUMBERS[:: 1 if name != "10" else 5])]
    check(
        name,
        dim,
        lambda: [f(value(me(), *case), dim, op=op) for case in cases for f in (c.all_reduce, c.scan)],
        lambda group, i: [folded(op, [value(r, *case) for r in ranks]) for case in cases for ranks in (group, group[: i + 1])],
    )


@by_group
@pytest.mark.usefixtures("road")
def test_reduce_scatter(name: str, dim: Any) -> None:
    cases = [
        (shape, dtype, d, op)
        for shape, dtype in [((7,), "f4"), ((0,), "i4"), ((2, 5), "c16"), ((3, 1, 4), "?"), ((12, 2), "i1")]
        for d in range(-len(shape), len(shape))
        for op in ("sum", "max")
        if op == "sum" or dtype != "c16"
    ]

    def part(group: list[int], i: int, shape: Any, dtype: str, d: int, op: str) -> Any:
        ends = np.cumsum([0, *split_sizes(shape[d], len(group))])
        return np.moveaxis(np.moveaxis(folded(op, [value(r, shape, dtype) for r in group]), d, 0)[ends[i] : ends[i + 1]], 0, d)

    check(
        name,
        dim,
        lambda: [c.reduce_scatter(value(me(), s, t), dim, op=op, dim=d) for s, t, d, op in cases],
        lambda group, i: [part(group, i, *case) for case in cases],
    )


@by_group
@pytest.mark.usefixtures("road")
def test_all_gather(name: str, dim: Any) -> None:
    cases = [((4, 3), d) for d in range(-2, 2)]

    def uneven(rank: int, dtype: Any) -> Any:
        return value(rank, (2, rank % 3, 3), dtype)

    def run() -> list[Any]:
        tiled = [c.all_gather(value(me(), s, "i4"), dim, dim=d) for s, d in cases]
        stacked = [c.all_gather(value(me(), s, "i4"), dim, dim=d, tiled=False) for s, d in [*cases, ((4, 3), 2)]]
        many = [c.all_gather(uneven(me(), t), dim, dim=1) for t in NUMBERS + OTHERS]
        return [*tiled, *stacked, *many, c.all_gather(me(), dim), c.all_gather(np.float32(me()), dim, tiled=False)]

    def want(group: list[int], _: int) -> list[Any]:
        tiled = [np.concatenate([value(r, s, "i4") for r in group], d) for s, d in cases]
        stacked = [np.stack([value(r, s, "i4") for r in group], d) for s, d in [*cases, ((4, 3), 2)]]
        many = [np.concatenate([uneven(r, t) for r in group], 1) for t in NUMBERS + OTHERS]
        return [*tiled, *stacked, *many, np.array(group), np.array(group, "f4")]

    check(name, dim, run, want)


@by_group
@pytest.mark.usefixtures("road")
def test_all_to_all(name: str, dim: Any) -> None:
    def block(rank: int, d: int, dtype: Any) -> Any:
        """Uneven along `d`, rank 2 has nothing."""
        return np.moveaxis(value(rank, ((rank + 1) % 3, 7, 2), dtype), 0, d)

    cases = [(split, concat, "f8") for split in range(3) for concat in range(3) if split != concat]
    cases += [(0, 1, t) for t in NUMBERS + OTHERS] + [(-1, 0, "i8"), (0, -2, "i8")]

    def want(group: list[int], i: int, split: int, concat: int, dtype: Any) -> Any:
        pieces = []
        for r in group:
            x = block(r, concat, dtype)
            ends = np.cumsum([0, *split_sizes(x.shape[split], len(group))])
            pieces.append(np.take(x, range(ends[i], ends[i + 1]), split))
        return np.concatenate(pieces, concat)

    check(
        name,
        dim,
        lambda: [c.all_to_all(block(me(), b, t), dim, split_dim=a, concat_dim=b) for a, b, t in cases],
        lambda group, i: [want(group, i, *case) for case in cases],
    )


@by_group
@pytest.mark.usefixtures("road")
def test_all_to_all_back_and_forth_is_the_identity(name: str, dim: Any) -> None:
    def run() -> list[Any]:
        x = value(me(), (3, 8), "f8")
        there = c.all_to_all(x, dim, split_dim=1, concat_dim=0)
        return [c.all_to_all(there, dim, split_dim=0, concat_dim=1)]

    mesh = MESHES[name]
    for rank, (got,) in zip(mesh.process_ids, run_ranks(mesh, run), strict=True):
        same(got, value(rank, (3, 8), "f8"))


@by_group
@pytest.mark.usefixtures("road")
def test_broadcast_permute_and_shift(name: str, dim: Any) -> None:
    def uneven(rank: int) -> Any:
        return value(rank, (rank % 3, 2), "f8")

    def run() -> list[Any]:
        size = c.axis_size(dim)
        last = c.broadcast(uneven(me()) if c.axis_index(dim) == size - 1 else None, dim, root=size - 1)
        first = [c.broadcast(value(me(), (2, 3), t), dim) for t in NUMBERS + OTHERS]
        swap = [(0, size - 1), (size - 1, 0)] if size > 1 else []
        moved = [c.permute(value(me(), (2,), t), dim, swap) for t in NUMBERS]
        ring = [c.shift(value(me(), (2, 2), "i8"), dim, by, wrap=wrap) for by in (-7, -1, 0, 1, 2, 5) for wrap in (True, False)]
        return [last, *first, *moved, *ring, c.shift(uneven(me()), dim), c.permute(uneven(me()), dim, [(0, 0)])]

    def want(group: list[int], i: int) -> list[Any]:
        size = len(group)
        first = [value(group[0], (2, 3), t) for t in NUMBERS + OTHERS]
        source = {0: size - 1, size - 1: 0} if size > 1 else {}
        moved = [value(group[source[i]], (2,), t) if i in source else np.zeros_like(value(group[i], (2,), t)) for t in NUMBERS]
        ring = []
        for by in (-7, -1, 0, 1, 2, 5):
            from_ = value(group[(i - by) % size], (2, 2), "i8")
            ring += [from_, from_ if 0 <= i - by < size else np.zeros_like(from_)]
        own = uneven(group[i])
        return [
            uneven(group[-1]),
            *first,
            *moved,
            *ring,
            uneven(group[(i - 1) % size]),
            own if i == 0 else np.zeros_like(own),
        ]

    check(name, dim, run, want)


BOUNDARIES: list[tuple[Any, str]] = [("periodic", "wrap"), ("reflect", "symmetric"), ("nearest", "edge"), (7, "constant")]


def halo_of(full: Any, start: list[int], stop: list[int], depths: list[tuple[int, int]], boundary: Any, mode: str) -> Any:
    """The oracle of a halo: NumPy's pad around the global array, then the box with its halos."""
    options = {"constant_values": boundary} if mode == "constant" else {}
    padded = np.pad(full, depths, mode, **options)  # type: ignore[call-overload]
    return padded[tuple(slice(a, b + low + high) for a, b, (low, high) in zip(start, stop, depths, strict=True))]


def box(mesh: ProcessMesh, rank: int, shape: tuple[int, ...], names: tuple[Any, ...]) -> tuple[list[int], list[int]]:
    start, stop = [], []
    for n, name in zip(shape, names, strict=True):
        parts = 1 if name is None else mesh.get_dim_size(name)
        at = 0 if name is None else mesh.coordinate(rank)[mesh.dim_index(name)]
        ends = np.cumsum([0, *split_sizes(n, parts)])
        start.append(int(ends[at]))
        stop.append(int(ends[at + 1]))
    return start, stop


@by_road
@pytest.mark.usefixtures("road")
@pytest.mark.parametrize(("boundary", "mode"), BOUNDARIES)
@pytest.mark.parametrize(
    ("name", "shape", "names", "depth"),
    [
        ("1", (4,), ("x",), 2),
        ("2", (6, 3), ("x", None), 1),
        ("2", (6, 3), ("x", None), ((2, 1), 1)),
        ("3", (3, 4), (None, "x"), 1),
        ("3", (5,), ("x",), 3),  # 2, 2, 1 rows: deeper than any shard
        ("10", (4, 2), ("x", None), 2),  # six empty shards
        ("2", (3,), ("x",), 2),  # 2, 1 rows: one shard has enough for the other, but not the other way
        ("3", (7, 2), ("x", None), 2),  # 3, 3, 1
        ("3", (4, 2), ("x", None), (2, 2)),  # 2, 2, 0
        ("3", (8, 3), ("x", None), ((3, 1), (3, 3))),  # 3, 3, 2
        ("2x2", (5, 4), ("x", "y"), 1),
        ("2x2", (5, 4), ("y", "x"), 2),
        ("2x3", (4, 5, 2), ("y", "x", None), (1, 2, 0)),
        ("2x3", (7, 7), ("x", "y"), ((0, 2), (3, 1))),
    ],
)
def test_halo_exchange_is_numpy_pad(name: str, shape: Any, names: Any, depth: Any, boundary: Any, mode: str) -> None:
    mesh = MESHES[name]
    full = value(0, shape, "f8")
    per_dim = [depth if n is not None else 0 for n in names] if isinstance(depth, int) else list(depth)
    depths = [d if isinstance(d, tuple) else (d, d) for d in per_dim]

    def shard(rank: int) -> Any:
        start, stop = box(mesh, rank, shape, names)
        return full[tuple(map(slice, start, stop))]

    def run() -> Any:
        x = shard(me())
        fresh = c.halo_exchange(x, depth, names, boundary)
        held = np.zeros([n + low + high for n, (low, high) in zip(x.shape, depths, strict=True)])
        inner = held[tuple(slice(low, low + n) for n, (low, _) in zip(x.shape, depths, strict=True))]
        inner[...] = x
        assert c.halo_exchange(inner, depth, names, boundary, out=held).base is not None
        return fresh, held

    for rank, (fresh, held) in zip(mesh.process_ids, run_ranks(mesh, run, endpoints=2), strict=True):
        want = halo_of(full, *box(mesh, rank, shape, names), depths, boundary, mode)
        same(fresh, want)
        same(held, want)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([((1, 2),), ((2, 1),)], r"rank \d called halo_exchange\(float64 \(\*,\), 'x', dim=0, depth=\(., .\), bound"),
        ([1, 2], r"depth=\(1, 1\)"),
    ],
)
def test_ranks_that_ask_for_other_halos_are_found_out(calls: list[Any], message: str) -> None:
    answers = run_ranks(MESHES["2"], lambda: c.halo_exchange(np.arange(4.0), calls[c.axis_index("x")], "x", 0), errors=True)
    assert all(isinstance(a, parcels.Mismatch) and re.search(message, str(a)) for a in answers), answers


def test_scalars_and_masks() -> None:
    mesh = MESHES["2"]
    assert run_ranks(mesh, lambda: c.halo_exchange(3.0, 0, ())) == [3.0, 3.0]
    assert {type(a) for a in run_ranks(mesh, lambda: c.broadcast(5 if c.axis_index("x") == 0 else None))} == {np.int64}
    masked = np.ma.array([1.0, 2.0], mask=[False, True])
    for call in (c.all_reduce, c.all_gather, lambda x: c.halo_exchange(x, 1, "x")):
        answers = run_ranks(mesh, lambda call=call: call(masked), errors=True)
        assert all(isinstance(a, TypeError) and "loses its mask" in str(a) for a in answers)


def test_a_halo_that_was_worked_out_is_found_by_exactly_the_same_arguments() -> None:
    x = np.arange(3.0)
    with alone():
        for deep in ((1, 1), [1, 1]):  # of dims, of which x has one
            with pytest.raises(ValueError, match="dim 1 of an array of 1 dims"):
                c.halo_exchange(x, deep, "x", 0.0)
        for cut in ({0: "x"}, ("x",), ["x"], "x"):
            for deep in ({0: 1}, 1, True, (1,), ((1, 1),), [[1, 1]], {-1: (1, 1)}):
                same(c.halo_exchange(x, deep, cut, 5), np.array([5.0, 0, 1, 2, 5]))
        for deep in (1.0, (1.0,)):
            with pytest.raises(TypeError, match="float"):
                c.halo_exchange(x, deep, "x", 5)
        for beyond in (0.0, -0.0, 0, np.float64(-0.0), np.array(-0.0), (-0.0,), np.nan, 1e-300, True):
            ends = c.halo_exchange(x, 1, "x", beyond)[[0, -1]]
            value = beyond[0] if isinstance(beyond, tuple) else beyond
            same(ends, np.array([value, value], float))
            assert (np.signbit(ends) == np.signbit(np.float64(value))).all()
        for n in range(2 * halo.MOST_KNOWN):  # and what is not asked for again is forgotten
            c.halo_exchange(x, 1, "x", n)
        assert len(halo._KNOWN) <= halo.MOST_KNOWN


@by_road
@pytest.mark.usefixtures("road")
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_halo_without_boundary_ends_with_the_array(depth: int) -> None:
    mesh = MESHES["3"]
    full = np.arange(14.0).reshape(7, 2)

    def run() -> Any:
        start, stop = box(mesh, me(), (7,), ("x",))
        return c.halo_exchange(full[start[0] : stop[0]], depth, "x")

    for rank, got in zip(mesh.process_ids, run_ranks(mesh, run), strict=True):
        (start,), (stop,) = box(mesh, rank, (7,), ("x",))
        same(got, full[max(start - depth, 0) : stop + depth])


def test_halo_mappings_and_per_dim_boundaries() -> None:
    mesh = MESHES["2x2"]
    full = np.arange(16.0).reshape(4, 4)

    def run() -> Any:
        start, stop = box(mesh, me(), (4, 4), ("x", "y"))
        return c.halo_exchange(full[tuple(map(slice, start, stop))], {1: 1}, {0: "x", 1: "y"}, {1: "periodic"})

    for rank, got in zip(mesh.process_ids, run_ranks(mesh, run), strict=True):
        (r0, c0), (r1, c1) = box(mesh, rank, (4, 4), ("x", "y"))
        same(got, np.pad(full, ((0, 0), (1, 1)), "wrap")[r0:r1, c0 : c1 + 2])


def test_scalars_give_numpy_scalars_and_arrays_of_no_dim_stay_arrays() -> None:
    def run() -> list[Any]:
        return [
            c.all_reduce(2),
            c.all_reduce(np.float32(2)),
            c.scan(True, op="any"),
            c.broadcast(1j),
            c.shift(3),
            c.all_reduce(np.array(2)),
        ]

    for name in ("1", "3"):
        for got in run_ranks(MESHES[name], run):
            assert [type(v) for v in got[:5]] == [np.int64, np.float32, np.bool_, np.complex128, np.int64]
            assert isinstance(got[5], np.ndarray)


@by_road
@pytest.mark.usefixtures("road")
def test_results_are_fresh_and_writable_and_arguments_stay() -> None:
    def run() -> None:
        x = np.arange(6.0).reshape(2, 3)
        x.flags.writeable = False
        results = [
            c.all_reduce(x),
            c.reduce_scatter(x, dim=1),
            c.scan(x),
            c.all_gather(x),
            c.all_to_all(x, split_dim=1, concat_dim=0),
            c.broadcast(x),
            c.permute(x, None, [(0, 0)]),
            c.shift(x),
            c.halo_exchange(x, 1, "x", 0),
        ]
        for result in results:
            result[...] = -1  # nobody else may see this
        c.barrier()
        assert not any(np.shares_memory(a, b) for a, b in itertools.combinations([x, *results], 2))
        same(x, np.arange(6.0).reshape(2, 3))
        same(c.broadcast(x), x)

    for name in ("1", "3"):
        run_ranks(MESHES[name], run)


def test_several_names_count_in_row_major_order() -> None:
    def run() -> Any:
        return c.axis_index(("x", "y")), c.axis_size(("x", "y")), c.axis_index("y"), c.all_gather(me(), ("x", "y"))

    mesh = MESHES["2x3"]
    for i, got in enumerate(run_ranks(mesh, run)):
        assert got[:3] == (i, 6, i % 3)
        same(got[3], np.array(mesh.process_ids))


def test_places_may_be_coordinates() -> None:
    def run() -> Any:
        moved = c.permute(me(), None, [((0, 2), (1, 0))])
        return int(moved), int(c.broadcast(me(), root=(1, 1)))

    assert run_ranks(MESHES["2x3"], run) == [(0, 1), (0, 1), (0, 1), (3, 1), (0, 1), (0, 1)]


@by_road
@pytest.mark.usefixtures("road")
def test_sums_have_the_same_bits_on_every_rank_and_in_every_run() -> None:
    def run() -> bytes:
        x = np.random.default_rng(me()).random(1000).astype("f4") * 10.0 ** (me() % 5)
        return b"".join(c.all_reduce(x).tobytes() for _ in range(5))

    for name in ("3", "10"):
        first, again = run_ranks(MESHES[name], run), run_ranks(MESHES[name], run, endpoints=3)
        assert len({*first, *again}) == 1
        assert first[0][:4000] == first[0][-4000:]


def test_groups_may_call_different_numbers_of_times() -> None:
    def run() -> int:
        total = 0
        for _ in range(3 if c.axis_index("x") else 1):
            total = int(c.all_reduce(1, "y"))
        return total + int(c.all_reduce(1))

    assert run_ranks(MESHES["2x3"], run) == [9] * 6


@pytest.mark.parametrize(
    ("mine", "theirs", "message"),
    [
        (
            lambda: c.all_reduce(1.0),
            lambda: c.barrier(),
            r"called barrier\('x'\), but rank .* called all_reduce\(float64 \(\), 'x'",
        ),
        (
            lambda: c.all_reduce(1.0),
            lambda: c.all_reduce(1),
            r"all_reduce\(int64 \(\), 'x', op='sum'\), but rank . called all_reduce\(float64",
        ),
        (lambda: c.all_reduce(np.ones(2)), lambda: c.all_reduce(np.ones(3)), r"\(float64 \(3,\), 'x', op='sum'\), but .*\(2,\)"),
        (lambda: c.scan(1.0, op="max"), lambda: c.scan(1.0, op="min"), r"op='m..'\), but .* op='m..'\)"),
        (lambda: (c.shift(1), c.barrier()), lambda: (c.barrier(), c.shift(1)), "at the same point"),
        (
            lambda: c.all_gather(np.ones((2, 3))),
            lambda: c.all_gather(np.ones((2, 4))),
            r"\(\*, 3\).*\(\*, 4\)|\(\*, 4\).*\(\*, 3\)",
        ),
        (
            lambda: c.broadcast(np.ones(2)),
            lambda: c.broadcast(np.ones(3)),
            r"rank . sends float64 \(.,\), but rank . gave float64 \(.,\)",
        ),
        (lambda: c.barrier(), lambda: None, "has returned from the region"),
    ],
)
def test_mismatched_calls_are_named(mine: Any, theirs: Any, message: str) -> None:
    mesh = ProcessMesh([0, 1], ["x"])
    results = run_ranks(mesh, lambda: mine() if me() == 0 else theirs(), errors=True, endpoints=2)
    errors = [r for r in results if isinstance(r, RuntimeError)]
    assert any(re.search(message, str(error), re.DOTALL) for error in errors), errors


@by_road
@pytest.mark.usefixtures("road")
def test_an_error_on_one_rank_ends_the_others() -> None:
    def run() -> None:
        c.barrier()
        if me() == 2:
            raise KeyError("lost it")
        c.all_reduce(1)

    answers = run_ranks(MESHES["3"], run, errors=True, endpoints=3)
    assert isinstance(answers[1], KeyError)
    for answer in (answers[0], answers[2]):
        # One that was loading from the other finds it gone, where that has heard of the error first: a reason to run again.
        assert isinstance(answer, KeyError) or (isinstance(answer, PeerLost) and "had exposed is gone" in str(answer))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: c.all_reduce(1, "z"), PlacementError, "no dim named 'z'"),
        (lambda: c.all_reduce(1, ("y", "x")), ValueError, r"write \('x', 'y'\)"),
        (lambda: c.all_reduce(1, op="mean"), PlacementError, "unknown reduction 'mean'"),
        (lambda: c.reduce_scatter(np.ones(3), dim=1), ValueError, r"reduce_scatter: dim=1 is out of range .*\(3,\)"),
        (lambda: c.all_to_all(np.ones(3), split_dim=0, concat_dim=5), ValueError, "concat_dim=5 is out of range"),
        (lambda: c.broadcast(1, root=4), ValueError, "broadcast: root 4 is no place among 4 ranks"),
        (lambda: c.broadcast(1, root=(0, 0, 0)), ValueError, "is no place among 4 ranks"),
        (lambda: c.permute(1, None, [(0, 1), (2, 1)]), ValueError, "target twice"),
        (lambda: c.permute(1, None, [(0, 1), (0, 2)]), ValueError, "source twice"),
        (lambda: c.halo_exchange(np.ones(3), 1, "x", "mirror"), ValueError, "unknown boundary 'mirror'"),
        (lambda: c.halo_exchange(np.ones(3), -1, "x"), ValueError, "negative"),
        (lambda: c.halo_exchange(np.ones(3), {2: 1}, "x"), ValueError, "entry for dim 2 of an array of 1 dims"),
        (lambda: c.halo_exchange(np.ones(3), 1, "x", out=np.ones(4)), ValueError, r"out is float64 \(4,\), .*\(5,\)"),
    ],
)
def test_wrong_arguments_are_named(call: Any, error: type[Exception], message: str) -> None:
    with gang_context(Gang(MESHES["2x2"], 0)), pytest.raises(error, match=message):
        call()


class OnDevice(np.lib.mixins.NDArrayOperatorsMixin):
    """What a collective sees of a CuPy array."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.__cuda_array_interface__: dict[str, Any] = {}

    def get(self) -> Any:
        return self.data

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        assert func is np.asarray
        return OnDevice(func(*args, **{k: v for k, v in kwargs.items() if k != "like"}))

    def __setitem__(self, key: Any, value: Any) -> None:
        self.data[key] = value.data


def test_arrays_on_a_device_come_back_to_it() -> None:
    def run() -> Any:
        x = OnDevice(np.arange(3.0) + me())
        held = OnDevice(np.zeros(5))
        assert c.halo_exchange(x, 1, "x", "periodic", out=held) is held
        return c.all_reduce(x), c.all_gather(x, dim=0), held

    for summed, gathered, held in run_ranks(ProcessMesh([0, 1], ["x"]), run):
        assert all(isinstance(v, OnDevice) for v in (summed, gathered, held))
        same(summed.data, np.array([1.0, 3.0, 5.0]))
        same(gathered.data, np.array([0.0, 1, 2, 1, 2, 3]))
        assert held.data[1:4].tolist() in ([0, 1, 2], [1, 2, 3])


def test_outside_a_region_the_error_says_where_collectives_work() -> None:
    with pytest.raises(RuntimeError, match=r"all_reduce\(\) works between the ranks of a region"):
        c.all_reduce(1)


def test_alone_nothing_is_joined() -> None:
    with alone() as gang:
        c.all_reduce(1)
        c.barrier()
        assert gang.line is None


def test_while_shapes_are_inferred_nothing_is_sent() -> None:
    mesh = MESHES["2x3"]
    with gang_context(Gang(mesh, 3, trace=lambda shape, dtype: np.broadcast_to(np.zeros((), dtype), shape))) as gang:
        x = np.ones((6, 5), "f4")
        shapes = [
            c.all_reduce(x, "x").shape,
            c.reduce_scatter(x, "x").shape,
            c.all_gather(x, "y", dim=1).shape,
            c.all_gather(x, dim=-1, tiled=False).shape,
            c.all_to_all(x, "x", split_dim=0, concat_dim=1).shape,
            c.shift(x).shape,
            c.halo_exchange(x, 1, ("x", "y"), 0).shape,
        ]
        assert shapes == [(6, 5), (3, 5), (6, 15), (6, 5, 6), (3, 10), (6, 5), (8, 7)]
        assert gang.communicates
        assert gang.line is None
        gang.even = False
        with pytest.raises(RuntimeError, match="known only once the region runs"):
            c.all_gather(x)


def everything() -> list[Any]:
    """A little of each, for worker processes."""
    x = value(me(), (6, 4), "f8")
    big = np.full(300_000, float(me()))
    small = [c.all_reduce(x), c.all_gather(x), c.all_to_all(x, split_dim=0, concat_dim=1), c.scan(me()), c.shift(x, by=2)]
    large = [c.all_reduce(big), c.reduce_scatter(big), c.broadcast(big, root=1), c.all_gather(big[: 10_000 * (me() + 1)])]
    c.barrier()
    return small + [(len(a), float(a[0]), float(a[-1])) for a in large]


@pytest.mark.processes
def test_between_processes() -> None:
    mesh = ProcessMesh([0, 1, 2], ["x"])
    for got, want in zip(run_processes(mesh, everything), run_ranks(mesh, everything), strict=True):
        for g, w in zip(got, want, strict=True):
            same(g, w)
