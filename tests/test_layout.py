"""Layouts: sizes, boxes and block indices against tables, and the facts that must hold for all of them."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import numpy as np
import pytest
from dask.base import tokenize

from daskmesh.layout import Layout, layout_of_locals, make_layout, normalise_placements, split_sizes
from daskmesh.mesh import ProcessMesh, init_mesh
from daskmesh.placement import Partial, PlacementError, Replicate, Shard

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
M22 = ProcessMesh([[0, 1], [2, 3]], ["x", "y"])


def held(layout: Layout) -> list[list[Any]]:
    """What each coordinate holds of ``arange(size).reshape(shape)``."""
    value = np.arange(layout.size).reshape(layout.shape)
    return [value[layout.box(c)].tolist() for c in layout.coords()]


@pytest.mark.parametrize(
    ("n", "sizes"),
    [
        (0, (0, 0, 0, 0)), (1, (1, 0, 0, 0)), (2, (1, 1, 0, 0)), (3, (1, 1, 1, 0)), (5, (2, 2, 1, 0)), (6, (2, 2, 2, 0)),
        (7, (2, 2, 2, 1)), (9, (3, 3, 3, 0)), (10, (3, 3, 3, 1)), (13, (4, 4, 4, 1)),
    ],
)  # fmt: skip
def test_split_over_four(n: int, sizes: tuple[int, ...]) -> None:
    assert split_sizes(n, 4) == sizes
    assert make_layout(init_mesh(4), [S0], (n,), "f8").chunks == (sizes,)


@pytest.mark.parametrize("parts", range(1, 9))
def test_split_is_ceil_chunks_with_both_ends_clamped(parts: int) -> None:
    for n in range(40):
        c = -(-n // parts)
        ends = [(min(i * c, n), min((i + 1) * c, n)) for i in range(parts)]
        assert split_sizes(n, parts) == tuple(b - a for a, b in ends)


def test_many_parts() -> None:
    sizes = split_sizes(512, 30)
    assert (sizes[:28], sizes[28:]) == ((18,) * 28, (8, 0))
    assert make_layout(init_mesh(30), [S0], (512,), "f8").box((29,)) == (slice(512, 512),)


@pytest.mark.parametrize(
    ("n", "want"),
    [
        (5, [[0, 1], [2], [3], [4]]),
        (6, [[0, 1], [2], [3, 4], [5]]),
        (7, [[0, 1], [2, 3], [4, 5], [6]]),
        (1, [[0], [], [], []]),
    ],
)
def test_two_mesh_dims_on_one_tensor_dim(n: int, want: Any) -> None:
    assert held(make_layout(M22, [S0, S0], (n,), "f8")) == want


def test_nested_split_of_two_over_eight() -> None:
    layout = make_layout(init_mesh((2, 4)), [S0, S0], (2,), "f8")
    boxes = {c: (b.start, b.stop) for c in layout.coords() for b in layout.box(c)}
    assert {c: b for c, b in boxes.items() if b[0] < b[1]} == {(0, 0): (0, 1), (1, 0): (1, 2)}


def test_rows_and_columns() -> None:
    mesh = init_mesh(2)
    assert held(make_layout(mesh, [S0], (3, 2), "f8")) == [[[0, 1], [2, 3]], [[4, 5]]]
    assert held(make_layout(mesh, [S1], (3, 2), "f8")) == [[[0], [2], [4]], [[1], [3], [5]]]


def test_blocks_of_a_2d_mesh() -> None:
    a, b, c, d = [[0, 1], [4, 5]], [[2, 3], [6, 7]], [[8, 9], [12, 13]], [[10, 11], [14, 15]]
    assert held(make_layout(M22, [S0, S1], (4, 4), "f8")) == [a, b, c, d]
    assert held(make_layout(M22, [S1, S0], (4, 4), "f8")) == [a, c, b, d]


def test_the_coordinate_counts_not_the_rank() -> None:
    mesh = ProcessMesh([3, 1, 0, 2], ["x"])
    layout = make_layout(mesh, [S0], (4,), "f8")
    assert {r: layout.box(mesh.coordinate(r))[0].start for r in range(4)} == {0: 2, 1: 1, 2: 3, 3: 0}


LAYOUTS = [
    make_layout(init_mesh(mesh), placements, shape, "f4")
    for mesh, shapes in (((3,), [(), (5,), (4, 7)]), ((2, 3), [(), (7,), (5, 4)]), ((2, 2, 2), [(3,), (5, 6), (3, 0, 4)]))
    for shape in shapes
    for placements in itertools.product([R, P, *map(Shard, range(len(shape)))], repeat=len(mesh))
]


def test_boxes_tile_the_array() -> None:
    """Every element is held once in each replica and each term; shapes, grids and indices agree."""
    for layout in LAYOUTS:
        count = np.zeros(layout.shape, int)
        leading = 1
        for m in layout.lead_axes:
            leading *= layout.mesh.shape[m]
        seen = set()
        for coord in layout.coords():
            box = layout.box(coord)
            count[box] += 1
            shape = tuple(s.stop - s.start for s in box)
            assert layout.local_shape(coord) == shape
            assert layout.block_shape(coord) == (1,) * layout.lead + shape
            index = layout.block_index(coord)
            assert tuple(c[i] for c, i in zip(layout.block_chunks, index, strict=True)) == layout.block_shape(coord)
            assert all(0 <= i < n for i, n in zip(index, layout.grid, strict=True))
            seen.add(index)
        assert (count == leading).all()
        assert len(seen) == layout.mesh.size == np.prod(layout.grid, dtype=int)
        assert tuple(map(len, layout.block_chunks)) == layout.grid
        assert tuple(map(sum, layout.chunks)) == layout.shape
        assert layout.ndim + layout.lead == len(layout.grid)


def test_primary_is_one_replica_with_all_its_terms() -> None:
    layout = make_layout(init_mesh((2, 3, 2)), [R, S0, P], (6,), "f8")
    assert layout.primary() == tuple((0, i, j) for i in range(3) for j in range(2))


def test_zero_dims() -> None:
    layout = make_layout(M22, [R, P], (), "f8")
    assert (layout.chunks, layout.size, layout.nbytes, layout.grid, layout.lead) == ((), 1, 8, (2, 2), 2)
    assert layout.box((1, 1)) == ()
    assert layout.block_shape((1, 1)) == (1, 1)


def test_part_sizes_given() -> None:
    layout = make_layout(init_mesh((2, 2)), [S0, S0], (6, 3), "f8", [(0, 5, 0, 1), None])
    assert layout.chunks == ((0, 5, 0, 1), (3,))
    assert [layout.local_shape(c)[0] for c in layout.coords()] == [0, 5, 0, 1]
    assert layout.box((1, 1)) == (slice(5, 6), slice(0, 3))
    assert layout != make_layout(init_mesh((2, 2)), [S0, S0], (6, 3), "f8")


@pytest.mark.parametrize(
    ("placements", "want"),
    [
        ([], (R, R)),
        ([S1], (S1, R)),
        ([Shard(-1), Shard(-2)], (S1, S0)),
        ((S0, P), (S0, P)),
        ({"y": S0}, (R, S0)),
        ({}, (R, R)),
        ({1: S1, "x": P}, (P, S1)),
        ({-1: S1}, (R, S1)),
    ],
    ids=repr,
)
def test_placements_are_completed(placements: Any, want: Any) -> None:
    assert normalise_placements(placements, M22, 2) == want
    layout = make_layout(M22, placements, (3, 4), "f8")
    assert layout.placements == want
    assert make_layout(M22, want, (3, 4), "f8") == layout
    assert hash(make_layout(M22, want, (3, 4), np.float64)) == hash(layout)


def test_tensor_dims_unchecked_without_ndim() -> None:
    assert normalise_placements([Shard(-3), Shard(7)], M22, None) == (Shard(-3), Shard(7))


def test_layouts_are_values() -> None:
    assert len(set(LAYOUTS)) == len(LAYOUTS)
    for layout in LAYOUTS[::7]:
        layout.block_chunks  # noqa: B018  fills a cache that does not travel
        again = pickle.loads(pickle.dumps(layout))
        assert again == layout
        assert hash(again) == hash(layout)
        assert "block_chunks" not in vars(again)
        assert again.coords() == layout.coords()
    with pytest.raises(AttributeError):
        LAYOUTS[0].shape = (3,)  # type: ignore[misc]


def test_dtype_and_names_count() -> None:
    base = make_layout(M22, [S0], (4,), "f8")
    assert base != make_layout(M22, [S0], (4,), "f4")
    assert base != make_layout(M22, [S0], (4,), ">f8")
    assert base != make_layout(ProcessMesh([[0, 1], [2, 3]], ["x", "z"]), [S0], (4,), "f8")


def test_layout_of_real_local_sizes() -> None:
    layout = layout_of_locals(init_mesh(2, ["x"]), [S0], [(2, 2), (1, 2)], ["f8", "f8"])
    assert (layout.shape, layout.chunks) == ((3, 2), ((2, 1), (2,)))
    nested = layout_of_locals(M22, [S0, S0], [(3,), (0,), (5,), (1,)], ["i4"] * 4)
    assert (nested.shape, nested.chunks, nested.dtype) == ((9,), ((3, 0, 5, 1),), np.dtype("i4"))
    mixed = layout_of_locals(M22, [S0, P], [(3,), (3,), (1,), (1,)], ["i4"] * 4)
    assert mixed.chunks == ((3, 1),)
    assert layout_of_locals(M22, [P, R], [()] * 4, ["f8"] * 4).shape == ()


@pytest.mark.parametrize(
    ("placements", "shapes", "text"),
    [
        ([S0, R], [(3,), (2,), (1,), (1,)], "ranks 0 and 1 hold the same part of tensor dim 0, but have sizes 3 and 2"),
        ([R, R], [(3,), (3,), (3,), (4,)], "ranks 0 and 3 hold the same part of tensor dim 0, but have sizes 3 and 4"),
        ([S0, P], [(3,), (3,), (1,), (2,)], "ranks 2 and 3 hold the same part of tensor dim 0, but have sizes 1 and 2"),
        ([S0, S0], [(3, 1), (2, 1), (1, 2), (1, 1)], "ranks 0 and 2 hold the same part of tensor dim 1"),
        ([R, R], [(3,), (3,), (3, 1), (3,)], r"rank 0 has shape \(3,\) .*, rank 2 has shape \(3, 1\)"),
    ],
)
def test_local_sizes_that_do_not_fit(placements: Any, shapes: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        layout_of_locals(M22, placements, shapes, ["f8"] * 4)


@pytest.mark.parametrize("shape", [(-1,), (3, -2)])
def test_negative_sizes(shape: Any) -> None:
    with pytest.raises(ValueError, match="no negative sizes"):
        make_layout(M22, [], shape, "f8")


def test_sizes_are_integers() -> None:
    with pytest.raises(TypeError):
        make_layout(M22, [], (2.5,), "f8")
    assert make_layout(M22, [], (np.int64(3),), "f8").shape == (3,)
    assert type(make_layout(M22, [], (np.int64(3),), "f8").shape[0]) is int


@pytest.mark.parametrize("sizes", [[(1, 2)], [(1, 2, 3)], [(4, 2)], [(-1, 6)], [(5,)], [(2, 3), (1,)]])
def test_part_sizes_that_do_not_fit(sizes: Any) -> None:
    with pytest.raises(PlacementError, match=r"part sizes|do not fit"):
        make_layout(init_mesh(2, ["x"]), [S0], (5,), "f8", sizes)


def test_equal_layouts_have_one_hash_and_one_token() -> None:
    a = make_layout(M22, [S0, S1], (4, 6), "f8")
    b = pickle.loads(pickle.dumps(make_layout(M22, [S0, S1], (4, 6), "f8", [(2, 2), (3, 3)])))
    assert a is not b
    assert a == b
    assert (hash(a), tokenize(a)) == (hash(b), tokenize(b))
    others = [
        a.replace(dtype=np.dtype("f4")), a.replace(dtype=np.dtype(">f8")), a.replace(placements=(S0, R)),
        a.replace(chunks=((3, 1), (3, 3))), a.replace(mesh=ProcessMesh([[0, 1], [3, 2]], ["x", "y"])),
        a.replace(shape=(5, 6), chunks=((3, 2), (3, 3))), a.replace(mesh=ProcessMesh([[0, 1], [2, 3]], ["x", "z"])),
    ]  # fmt: skip
    assert all(a != other for other in others)
    assert len({tokenize(x) for x in (a, *others)}) == len(others) + 1
    assert a != "a layout"
