"""Creation on the ranks, bit for bit as NumPy does it."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
from distributed import Client, futures_of

import daskmesh as dm
from daskmesh.dtensor import DTensor
from daskmesh.mesh import init_mesh
from daskmesh.placement import Partial, PlacementError, ReduceType, Replicate, Shard

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("threads")]

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
LINE, GRID = init_mesh(4, ["x"]), init_mesh((2, 3), ("x", "y"))
LAYOUTS: list[tuple[Any, Any]] = [
    (LINE, [S0]),
    (LINE, [R]),
    (LINE, [P]),
    (GRID, [S0, S0]),
    (GRID, [Partial("max"), S0]),
    (GRID, [P, Partial("prod")]),
    (GRID, {"y": Partial("min")}),
    (init_mesh(1), [S0]),
]


def same(x: DTensor, want: np.ndarray) -> None:
    """Equal to the last bit, dtype included."""
    got = x.compute(scheduler="sync")
    assert (got.dtype, got.shape, x.dtype, x.shape) == (want.dtype, want.shape, want.dtype, want.shape)
    assert got.tobytes() == want.tobytes(), f"{got} != {want}"


@pytest.mark.parametrize("dtype", ["?", "i1", "u8", "f2", "f4", "f8", "c8", "c16", "M8[D]", "m8[s]"])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (3, 4), (2, 0, 3)])
def test_constants(shape: tuple[int, ...], dtype: str) -> None:
    for mesh, placements in LAYOUTS:
        if not shape and any(isinstance(p, Shard) for p in placements):
            continue
        if dtype[0] in "Mm" and P in placements:  # there is no sum of dates, and no product of spans
            continue
        where = {"mesh": mesh, "placements": placements}
        same(dm.zeros(shape, dtype, **where), np.zeros(shape, dtype))
        same(dm.empty(shape, dtype, **where), np.zeros(shape, dtype))
        if dtype[0] not in "Mm":
            same(dm.ones(shape, dtype, **where), np.ones(shape, dtype))
            same(dm.full(shape, 3, dtype, **where), np.full(shape, 3, dtype))


VALUES = [True, 7, -2.5, 1 - 2j, np.float32(0.1), np.int8(-3), np.datetime64("2020-02-29"), "ab", np.nan]


@pytest.mark.parametrize("value", VALUES)
def test_full_takes_the_dtype_of_its_value(value: Any) -> None:
    same(dm.full((3,), value, mesh=LINE, placements=[S0]), np.full((3,), value))
    same(dm.full(3, value, mesh=LINE), np.full(3, value))


@pytest.mark.parametrize("op", [t.value for t in ReduceType])
@pytest.mark.parametrize("dtype", ["?", "i4", "f8", "c16"])
def test_placed_as_partial_it_has_the_same_value(op: str, dtype: str) -> None:
    """Every operator, on one mesh dim and on two."""
    p = Partial(op)
    for placements in ([p], [p, p], [p, S0], [S0, p], [P, p], [p, Partial("max")]):
        if len(placements) > 1 and op in ("any", "all") and dtype != "?":
            continue
        mesh = LINE if len(placements) == 1 else GRID
        if op in ("any", "all") and dtype != "?":
            with pytest.raises(TypeError, match=r"x != 0"):
                dm.ones(5, dtype, mesh=mesh, placements=placements)
            continue
        same(dm.full(5, 6, dtype, mesh=mesh, placements=placements), np.full(5, 6, dtype))
        same(dm.zeros(5, dtype, mesh=mesh, placements=placements), np.zeros(5, dtype))


RANGES: list[tuple[Any, ...]] = [
    (6,), (0,), (-3,), (5.5,), (2, 7), (7, 2), (7, 2, -1), (1, 20, 3), (20, 1, -4), (0, 1, 0.1), (1, 0, -0.1), (0.1, 0.9, 0.1),
    (-5, 5, 2.5), (1e16, 1e16 + 20, 3.0), (0, 1, 1 / 3), (3, 3), (0.5, 10), (np.float32(0), np.float32(1), np.float32(0.1)),
    (np.int8(0), np.int8(100), np.int8(9)), (2**40, 2**40 + 9, 2), (1e-3, 1e-2, 1.7e-3), (0, -1, -0.3),
]  # fmt: skip


@pytest.mark.parametrize("args", RANGES)
def test_arange(args: tuple[Any, ...]) -> None:
    for mesh, placements in LAYOUTS:
        same(dm.arange(*args, mesh=mesh, placements=placements), np.arange(*args))


@pytest.mark.parametrize("dtype", ["i2", "u4", "f2", "f4", "c8", "i8"])
@pytest.mark.parametrize("args", [(6,), (1, 9, 2), (9, 1, -3), (0, 3, 0.5), (0.5, 6.5)])
def test_arange_of_a_dtype(args: tuple[Any, ...], dtype: str) -> None:
    try:
        want = np.arange(*args, dtype=dtype)
    except (TypeError, ValueError) as error:
        with pytest.raises(type(error)):
            dm.arange(*args, dtype=dtype, mesh=LINE)
        return
    same(dm.arange(*args, dtype=dtype, mesh=LINE, placements=[S0]), want)


def test_arange_takes_a_step_by_name_and_refuses_none() -> None:
    same(dm.arange(5, step=2, mesh=LINE, placements=[S0]), np.arange(0, 5, 2))
    with pytest.raises((ValueError, ZeroDivisionError), match="step"):
        dm.arange(5, step=0, mesh=LINE)


def test_arange_is_numpys_for_a_thousand_random_arguments() -> None:
    rng = np.random.default_rng(0)
    for _ in range(150):
        start, step = rng.normal(size=2) * 10.0 ** rng.integers(-3, 4, size=2)
        stop = start + step * rng.integers(0, 30) + rng.normal() * step
        same(dm.arange(start, stop, step, mesh=LINE, placements=[S0]), np.arange(start, stop, step))


LINES: list[tuple[Any, ...]] = [
    (0, 1, 5), (0, 1), (0, 1, 0), (0, 1, 1), (3, 3, 4), (5, -5, 7), (0, 1, 10, False), (0, 1, 1, False), (-1.5, 2.25, 6),
    (0, 1e-320, 5), (0, 5e-324, 7), (1j, 2 - 1j, 5), (np.float32(0), np.float32(1), 7), (0.1, 0.7, 13), (1e308, -1e308, 3),
    (0, 10, 4, True), (0, np.inf, 3), (np.nan, 1, 3), (10, 0, 11, False),
]  # fmt: skip


@pytest.mark.parametrize("args", LINES)
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
def test_linspace(args: tuple[Any, ...]) -> None:
    for mesh, placements in LAYOUTS[:5]:
        same(dm.linspace(*args, mesh=mesh, placements=placements), np.linspace(*args))


@pytest.mark.parametrize("dtype", ["i4", "u1", "f4", "f2", "c16", "?"])
def test_linspace_of_a_dtype(dtype: str) -> None:
    for args in ((0, 10, 4), (0, 7, 10, False), (2.5, 9.75, 5)):
        same(dm.linspace(*args, dtype=dtype, mesh=LINE, placements=[S0]), np.linspace(*args, dtype=dtype))
    same(dm.linspace(-3, 3, 5, dtype="i8", mesh=LINE, placements=[S0]), np.linspace(-3, 3, 5, dtype="i8"))


def test_linspace_is_numpys_for_random_arguments() -> None:
    rng = np.random.default_rng(1)
    for _ in range(150):
        start, stop = rng.normal(size=2) * 10.0 ** rng.integers(-3, 4, size=2)
        num, endpoint = int(rng.integers(0, 30)), bool(rng.integers(2))
        same(dm.linspace(start, stop, num, endpoint, mesh=LINE, placements=[S0]), np.linspace(start, stop, num, endpoint))


def test_linspace_refuses_a_negative_number() -> None:
    with pytest.raises(ValueError, match="num"):
        dm.linspace(0, 1, -1, mesh=LINE)


def test_eye() -> None:
    shapes = [(4, None), (0, None), (3, 5), (5, 3), (1, 7), (4, 0)]
    layouts: list[tuple[Any, Any]] = [(LINE, [S0]), (LINE, [S1]), (GRID, [S0, S1]), (GRID, [S1, S0]), (GRID, [P, S1]), (GRID, [])]
    for (n, m), k, (mesh, placements) in itertools.product(shapes, (-7, -2, 0, 1, 6), layouts):
        same(dm.eye(n, m, k, mesh=mesh, placements=placements), np.eye(n, m, k))
    for dtype in ("?", "i1", "c8"):
        same(dm.eye(3, dtype=dtype, mesh=LINE, placements=[S0]), np.eye(3, dtype=dtype))


def test_from_callback_builds_only_its_own_boxes() -> None:
    table = np.arange(35).reshape(5, 7)
    same(dm.from_callback((5, 7), int, GRID, [S0, S1], table.__getitem__), table)
    same(dm.from_callback((5, 7), "f4", GRID, [S1, P], table.__getitem__), table.astype("f4"))
    seen: list[Any] = []

    def build(box: Any) -> np.ndarray:
        seen.append(box)
        return table[box]

    x = dm.from_callback((5, 7), int, GRID, [S0, S1], build)
    assert x.compute(scheduler="sync").sum() == table.sum()
    assert sorted((b[0].start, b[1].start) for b in seen) == [(0, 0), (0, 3), (0, 6), (3, 0), (3, 3), (3, 6)]
    same(dm.from_callback(5, float, LINE, [S0], lambda box: [1.0] * (box[0].stop - box[0].start)), np.ones(5))
    same(dm.from_callback((), float, LINE, [R], lambda box: 2.0), np.array(2.0))


def test_from_callback_runs_where_its_rank_is(threads: Client) -> None:
    x = dm.from_callback(4, int, LINE, [S0], lambda box: np.full(box[0].stop - box[0].start, dm.get_rank()))
    assert x.compute().tolist() == [0, 1, 2, 3]
    assert len(futures_of(x.persist())) == 4


def test_a_box_of_the_wrong_shape_is_refused_with_its_rank() -> None:
    x = dm.from_callback(5, float, LINE, [S0], lambda box: np.ones(2))
    with pytest.raises(ValueError, match=r"rank \d at coordinate \(\d,\).*\(2,\).*says \(\d,\)"):
        x.compute(scheduler="sync")

    def fails(box: Any) -> np.ndarray:
        return np.ones(2)[box[0].start] * np.ones(box[0].stop - box[0].start)

    with pytest.raises(IndexError) as caught:
        dm.from_callback(5, float, LINE, [S0], fails).compute()
    assert any(re.match(r"rank \d at coordinate \(\d,\)", note) for note in caught.value.__notes__)


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match="function"):
        dm.from_callback(3, int, LINE, [S0], np.ones(3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="negative"):
        dm.zeros((2, -1), mesh=LINE)
    with pytest.raises(ValueError, match=r"scalar.*shard_tensor"):
        dm.full(3, [1, 2, 3], mesh=LINE)
    with pytest.raises(PlacementError, match=r"0-d"):
        dm.zeros((), mesh=LINE, placements=[S0])
    with pytest.raises(PlacementError, match=r"Shard\(1\)"):
        dm.arange(3, mesh=LINE, placements=[S1])
    with pytest.raises(TypeError, match="mesh"):
        dm.zeros(3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"zeros: 'float' object"):
        dm.zeros((2.5,), mesh=LINE)  # type: ignore[arg-type]


@pytest.mark.parametrize("call", ["zeros", "ones", "empty"])
def test_errors_begin_with_what_was_called(call: str) -> None:
    with pytest.raises(PlacementError, match=rf"^{call}: Shard\(4\) on mesh dim"):
        getattr(dm, call)(3, mesh=LINE, placements=[Shard(4)])


def test_values_of_another_kind_are_not_cut_short() -> None:
    x = dm.from_callback(3, int, LINE, [S0], lambda box: np.full(box[0].stop - box[0].start, 1.5))
    with pytest.raises(TypeError, match="float64") as caught:
        x.compute(scheduler="sync")
    assert any(re.match(r"rank \d at coordinate", note) for note in caught.value.__notes__)
    assert dm.from_callback(3, "f4", LINE, [S0], lambda box: [2] * (box[0].stop - box[0].start)).compute().tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("dtype", "op"),
    [("M8[D]", "sum"), ("M8[D]", "avg"), ("M8[D]", "any"), ("m8[s]", "prod"), ("U3", "sum"), ("U3", "max"), ("O", "sum"),
     ([("a", "i4")], "max"), ([("a", "i4")], "all")],
)  # fmt: skip
def test_a_dtype_without_the_reduction_is_refused_before_anything_runs(dtype: Any, op: str) -> None:
    what = rf"zeros: Partial\('{op}'\) on mesh dim 'x' of size {LINE.size}: .* cannot be reduced by {op}"
    with pytest.raises(TypeError, match=what):
        dm.zeros(3, dtype, mesh=LINE, placements=[Partial(op)])
    with pytest.raises(TypeError, match=what.replace("zeros", "reshard")):
        dm.zeros(3, dtype, mesh=LINE, placements=[S0]).reshard([Partial(op)])


class OnADevice:
    """An array of another module than NumPy, as far as creation asks."""

    def __init__(self, held: np.ndarray) -> None:
        self.held, self.shape, self.dtype, self.ndim = held, held.shape, held.dtype, held.ndim

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return OnADevice(func(args[0].held, *args[1:], **kwargs))

    def __getitem__(self, key: Any) -> Any:
        return OnADevice(self.held[key])

    def astype(self, dtype: Any, **options: Any) -> Any:
        return OnADevice(self.held.astype(dtype, **options))


def test_like_takes_the_module_of_the_blocks() -> None:
    x = dm.full(3, 2.0, mesh=LINE, placements=[S0], like=OnADevice(np.ones((2, 2))))
    block = x.blocks.blocks[0].compute(scheduler="sync")
    assert isinstance(block, OnADevice)
    assert block.held.tolist() == [2.0]
