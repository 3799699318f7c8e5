"""Saving and loading: any layout to any other, who writes which chunk, and what stays on disk when it goes wrong."""

from __future__ import annotations

import importlib
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client

import daskmesh as dm
from daskmesh import io, transport
from daskmesh.dtensor import DTensor
from daskmesh.layout import Layout, make_layout
from daskmesh.moves import moved
from daskmesh.placement import Partial, Replicate, Shard

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
ROW, GRID = dm.init_mesh(3, ["x"]), dm.init_mesh((2, 2), ("x", "y"))
LAYOUTS: list[tuple[Any, Any]] = [
    (ROW, [S0]), (ROW, [S1]), (ROW, [R]), (ROW, [P]), (ROW, [Partial("avg")]), (GRID, [S0, S0]), (GRID, [S0, S1]),
    (GRID, [S1, S0]), (GRID, [R, S1]), (GRID, [P, S0]), (GRID, [S0, P]), (GRID, [Partial("max"), R]), (GRID, [S1, S1]),
]  # fmt: skip
SHAPES = [(5, 7), (1, 2), (0, 4), (2, 3), (9, 4)]


def values(shape: tuple[int, ...], dtype: Any = "i8") -> np.ndarray:
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) * 3 - 7).astype(dtype)


@pytest.mark.parametrize(("mesh", "placements"), LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_written_is_the_value(
    mesh: Any, placements: Any, shape: tuple[int, ...], threads: Client, tmp_path: Path
) -> None:
    v = values(shape)
    dm.save(dm.shard_tensor(v, mesh, placements), tmp_path / "x")
    array = zarr.open_array(tmp_path / "x", mode="r")
    assert (array.shape, array.dtype, array.metadata.zarr_format) == (v.shape, v.dtype, 3)
    np.testing.assert_array_equal(array[:], v)
    assert os.listdir(tmp_path) == ["x"]


def test_any_layout_is_loaded(threads: Client, tmp_path: Path) -> None:
    for shape in [(5, 7), (0, 4), (2, 3)]:
        v = values(shape)
        path = tmp_path / str(shape)
        dm.save(dm.shard_tensor(v, ROW, [S0]), path)
        for mesh, placements in LAYOUTS:
            x = dm.load(path, mesh=mesh, placements=placements)
            assert x.layout == make_layout(mesh, placements, shape, v.dtype)
            assert x.explain().total_bytes == 0
            np.testing.assert_array_equal(x.compute(), v)


@pytest.mark.parametrize("dtype", ["?", "i1", "u8", "f2", "f4", "f8", "c8", "c16", "M8[s]"])
@pytest.mark.parametrize("shape", [(), (5,)])
def test_dtypes(dtype: str, shape: tuple[int, ...], threads: Client, tmp_path: Path) -> None:
    v = values(shape, dtype)
    dm.save(dm.shard_tensor(v, ROW, [S0] if shape else []), tmp_path / "x")
    back = dm.load(tmp_path / "x", mesh=GRID, placements=[S0] if shape else []).compute()
    assert back.dtype == v.dtype
    np.testing.assert_array_equal(back, v)


def test_bits_of_floats_are_kept(threads: Client, tmp_path: Path) -> None:
    v = np.array([-0.0, 0.0, np.nan, np.inf, 5e-324])
    dm.save(dm.shard_tensor(v, ROW, [S0]), tmp_path / "x", chunks=[1])
    back = dm.load(tmp_path / "x", mesh=ROW, placements=[S0]).compute()
    assert back.tobytes() == v.tobytes()


def uneven(sizes: tuple[int, ...]) -> DTensor:
    """A DTensor over the row with parts of just these sizes."""
    v = values((sum(sizes), 2))
    x = dm.shard_tensor(v, ROW, [S0])
    return DTensor(moved(x._node, x.layout.replace(chunks=(sizes, (2,)))))


@pytest.mark.parametrize(
    ("sizes", "chunk", "rows_moved"),
    [
        ((4, 4, 2), 4, 0),
        ((3, 3, 1), 3, 0),
        ((6, 0, 2), 6, 0),  # one border only
        ((2, 6, 2), 2, 0),  # all borders are multiples of 2
        ((1, 7, 2), 1, 0),  # small chunks are better than moving
        ((1, 18, 5), 8, 10),  # ... but not such small ones: rank 0 lacks rows 1 to 7, rank 2 rows 16 to 18
        ((0, 0, 7), 3, 0),
        ((7, 0, 0), 3, 0),
    ],
)
def test_uneven_parts_are_moved_to_where_the_chunks_are(
    sizes: tuple[int, ...], chunk: int, rows_moved: int, threads: Client, tmp_path: Path
) -> None:
    x = uneven(sizes).persist()
    v = x.compute()
    transport.reset_stats()
    dm.save(x, tmp_path / "x")
    assert sum(road["bytes"] for road in transport.stats().values()) == rows_moved * 2 * 8
    array = zarr.open_array(tmp_path / "x", mode="r")
    assert array.chunks[0] == chunk
    np.testing.assert_array_equal(array[:], v)


def owners(layout: Layout, grid: tuple[int, ...]) -> dict[tuple[int, ...], set[Any]]:
    """Chunk of the file -> the boxes that have a part in it."""
    found: dict[tuple[int, ...], set[Any]] = {}
    for coord in layout.primary():
        box = layout.box(coord)
        if all(s.stop > s.start for s in box):
            spans = [range(s.start // k, -(-s.stop // k)) for s, k in zip(box, grid, strict=True)]
            for chunk in itertools.product(*spans):
                found.setdefault(chunk, set()).add(tuple((s.start, s.stop) for s in box))
    return found


@pytest.mark.parametrize("chunks", [None, (1, 1), (2, 3), (None, 4), (100, None), (3, 1)])
def test_no_chunk_is_written_by_two_ranks(chunks: Any) -> None:
    for (mesh, placements), shape in itertools.product(LAYOUTS, SHAPES):
        target, grid = io._writing(make_layout(mesh, placements, shape, "f8"), chunks)
        assert not target.partial_axes
        assert tuple(map(sum, target.chunks)) == shape
        assert all(len(boxes) == 1 for boxes in owners(target, grid).values())
        assert chunks is None or all(c in (None, g) for c, g in zip(chunks, grid, strict=True))


def test_replicas_and_terms_are_written_by_all_ranks() -> None:
    target, _ = io._writing(make_layout(ROW, [R], (4, 9), "f8"), None)
    assert target.placements == (S1,)
    target, _ = io._writing(make_layout(GRID, [P, S0], (4, 9), "f8"), None)
    assert target.placements == (S1, S0)


def test_large_parts_are_cut_into_several_chunks() -> None:
    layout = make_layout(ROW, [S0], (3 * 2**13, 2**10), "f8")  # 64 MiB a rank
    target, grid = io._writing(layout, None)
    assert target.chunks == layout.chunks
    assert np.prod(grid) * 8 <= io._CHUNK_BYTES
    assert 2**13 % grid[0] == 0


def test_nothing_is_overwritten_unasked(threads: Client, tmp_path: Path) -> None:
    path, first, second = tmp_path / "x", values((4,)), values((6,), "f4")
    dm.save(dm.shard_tensor(first, ROW, [S0]), path)
    with pytest.raises(FileExistsError, match="pass overwrite=True"):
        dm.save(dm.shard_tensor(second, ROW, [S0]), path)
    x = dm.load(path, mesh=ROW, placements=[S0])
    np.testing.assert_array_equal(x.compute(), first)
    dm.save(x * 2, path, overwrite=True)  # from the file that it replaces
    y = dm.load(path, mesh=ROW, placements=[S0]).persist()
    np.testing.assert_array_equal(y.compute(), first * 2)
    dm.save(dm.shard_tensor(second, ROW, [S0]), path, overwrite=True)
    np.testing.assert_array_equal(dm.load(path, mesh=ROW, placements=[S0]).compute(), second)
    assert os.listdir(tmp_path) == ["x"]


def test_a_file_that_replaces_another_is_not_taken_for_it(threads: Client, tmp_path: Path) -> None:
    dm.save(dm.shard_tensor(values((4,)), ROW, [S0]), tmp_path / "x")
    held = dm.load(tmp_path / "x", mesh=ROW, placements=[S0]).persist()
    dm.save(dm.shard_tensor(values((4,)) + 1, ROW, [S0]), tmp_path / "x", overwrite=True)
    fresh = dm.load(tmp_path / "x", mesh=ROW, placements=[S0])
    np.testing.assert_array_equal(fresh.compute(), held.compute() + 1)


def test_a_failed_save_leaves_nothing(threads: Client, tmp_path: Path) -> None:
    def fails(box: Any) -> Any:
        raise ArithmeticError("no such box")

    x = dm.from_callback((5,), "f8", ROW, [S0], fails)
    with pytest.raises(ArithmeticError, match="no such box"):
        dm.save(x, tmp_path / "x")
    assert os.listdir(tmp_path) == []


def test_errors(threads: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = dm.shard_tensor(values((4, 2)), ROW, [S0])
    with pytest.raises(TypeError, match="place it with shard_tensor"):
        dm.save(np.zeros(3), tmp_path / "x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"save\(chunks\): 1 sizes for a tensor of 2 dims"):
        dm.save(x, tmp_path / "x", chunks=[2])
    with pytest.raises(ValueError, match="chunk size 0 of tensor dim 1"):
        dm.save(x, tmp_path / "x", chunks=[2, 0])
    with pytest.raises(TypeError, match="expected a str or path"):
        dm.save(x, b"x")  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="there is no Zarr array at"):
        dm.load(tmp_path / "x", mesh=ROW)
    dm.save(x, tmp_path / "x")
    with pytest.raises(dm.PlacementError):
        dm.load(tmp_path / "x", mesh=ROW, placements=[Shard(2)])

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    for call in (lambda: dm.save(x, tmp_path / "y"), lambda: dm.load(tmp_path / "x", mesh=ROW)):
        with pytest.raises(ImportError, match=r"pip install 'daskmesh\[io\]'"):
            call()


def test_paths_are_those_of_the_client(threads: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dm.save(dm.shard_tensor(values((4,)), ROW, [S0]), "x")
    x = dm.load("x", mesh=ROW, placements=[S0])
    monkeypatch.chdir("/")
    np.testing.assert_array_equal(x.compute(), values((4,)))


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_urls(scheme: str, threads: Client, tmp_path: Path) -> None:
    url, v = f"{scheme}://{tmp_path}/x", values((7,))
    dm.save(dm.shard_tensor(v, ROW, [S0]), url)
    np.testing.assert_array_equal(dm.load(url, mesh=GRID, placements=[S0]).compute(), v)
    with pytest.raises(FileExistsError, match="pass overwrite=True"):
        dm.save(dm.shard_tensor(v, ROW, [S0]), url)
    dm.save(dm.shard_tensor(v + 1, ROW, [S0]), url, overwrite=True)
    np.testing.assert_array_equal(dm.load(url, mesh=GRID, placements=[S0]).compute(), v + 1)


def test_files_of_other_programs_are_loaded(threads: Client, tmp_path: Path) -> None:
    v = values((7, 5), "f4")
    zarr.create_array(tmp_path / "v2", data=v, chunks=(2, 2), zarr_format=2)
    zarr.create_array(tmp_path / "v3", data=v, chunks=(1, 5), shards=(4, 5))
    for name in ("v2", "v3"):
        np.testing.assert_array_equal(dm.load(tmp_path / name, mesh=GRID, placements=[S1, S0]).compute(), v)


@pytest.mark.processes
def test_worker_processes_write_and_read_their_own_boxes(processes: Client, tmp_path: Path) -> None:
    mesh = dm.init_mesh(2, ["x"])
    v = values((6, 3))
    x = dm.shard_tensor(v, mesh, [S0]).persist()
    dm.save(x, tmp_path / "x")
    chunks = [str(p.relative_to(tmp_path / "x")) for p in (tmp_path / "x" / "c").rglob("*") if p.is_file()]
    assert sorted(chunks) == ["c/0/0", "c/1/0"]
    y = dm.load(tmp_path / "x", mesh=mesh, placements=[S1])
    np.testing.assert_array_equal(y.local_value(1), v[:, 2:])
    np.testing.assert_array_equal(y.compute(), v)
