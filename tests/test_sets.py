"""Order, sets, searching, differences and grids against NumPy: values, bytes, and what is left where it lies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import daskmesh as dm
from daskmesh.placement import Partial, Replicate, Shard
from daskmesh.testing import assert_bytes_moved, assert_layout

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("in_this_thread")]

ROW, GRID = dm.init_mesh(3, ["x"]), dm.init_mesh((2, 2), ("x", "y"))
R, S0, S1 = Replicate(), Shard(0), Shard(1)
LAYOUTS: list[tuple[Any, Any]] = [
    (ROW, [S0]), (ROW, [Partial()]), (GRID, [S0, S1]), (GRID, [S1, S1]), (GRID, [R, S0]),
]  # fmt: skip
SHAPES = [(7, 5), (2, 3), (0, 3)]


def values(shape: tuple[int, ...], dtype: str = "i8") -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 6, shape).astype(dtype)


def with_nans(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    v = values(shape, dtype)
    v.reshape(-1)[1::3] = np.nan
    return v


def same(got: Any, want: Any) -> None:
    assert isinstance(got, dm.DTensor)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_array_equal(np.asarray(got), want)


@pytest.mark.parametrize(("mesh", "placements"), LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sorting(mesh: Any, placements: Any, shape: tuple[int, ...]) -> None:
    v = values(shape)
    x = dm.shard_tensor(v, mesh, placements)
    for axis in (0, -1, None):
        same(np.sort(x, axis), np.sort(v, axis))
        same(np.argsort(x, axis, stable=True), np.argsort(v, axis, stable=True))
    same(x.argsort(axis=0, kind="stable"), v.argsort(axis=0, kind="stable"))


def test_sorting_along_a_whole_dim_moves_nothing() -> None:
    x = dm.shard_tensor(values((6, 4)), ROW, [S0])
    assert_layout(np.sort(x, axis=1), [S0])
    assert_bytes_moved(np.sort(x, axis=1), 0)
    assert_bytes_moved(np.sort(x, axis=0))
    assert_layout(np.sort(x, axis=0), [S1])
    with pytest.raises(TypeError, match="no fields to sort by"):
        np.sort(x, order="a")


@pytest.mark.parametrize(("mesh", "placements"), LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unique(mesh: Any, placements: Any, shape: tuple[int, ...]) -> None:
    v = values(shape)
    x = dm.shard_tensor(v, mesh, placements)
    for got, want in zip(np.unique(x, True, True, True), np.unique(v, True, True, True), strict=True):
        same(got, want)
    for f in (np.unique_all, np.unique_counts, np.unique_inverse):
        for got, want in zip(f(x), f(v), strict=True):
            same(got, want)
        assert f(x)._fields == f(v)._fields
    same(np.unique_values(x), np.sort(np.unique_values(v)))  # NumPy leaves them in any order


@pytest.mark.parametrize("dtype", ["f4", "f8", "c16"])
@pytest.mark.parametrize(("mesh", "placements"), [(ROW, [S0]), (ROW, [S1]), (GRID, [S1, R])], ids=str)
def test_unique_nans(mesh: Any, placements: Any, dtype: str) -> None:
    v = with_nans((7, 5), dtype)
    x = dm.shard_tensor(v, mesh, placements)
    for equal in (True, False):
        got, want = (np.unique(a, True, True, True, equal_nan=equal) for a in (x, v))
        for g, w in zip(got, want, strict=True):
            same(g, w)


@pytest.mark.parametrize("dtype", ["?", "i1", "u8", "U3"])
def test_unique_of_other_dtypes(dtype: str) -> None:
    v = values((9,)).astype(dtype)
    same(np.unique(dm.shard_tensor(v, ROW, [S0])), np.unique(v))


def test_unique_leaves_the_result_cut_and_the_inverse_where_the_elements_lie() -> None:
    x = dm.shard_tensor(values((7, 5)), ROW, [S0])
    found, inverse = np.unique_inverse(x)
    assert_layout(found, [S0])
    assert_layout(inverse, [S0], shape=(7, 5))
    assert inverse.explain().total_bytes == 0
    assert_layout(np.unique(x, axis=0), [S0], shape=(7, 5))


@pytest.mark.parametrize(("mesh", "placements"), LAYOUTS, ids=str)
def test_searching(mesh: Any, placements: Any) -> None:
    v, table = values((7, 5)), np.array([0, 2, 2, 5])
    x, t = dm.shard_tensor(v, mesh, placements), dm.shard_tensor(table, mesh, [S0])
    order = np.array([3, 0, 2, 1])
    for side in ("left", "right"):
        for held in (table, t):
            same(np.searchsorted(held, x, side), np.searchsorted(table, v, side))
        same(np.searchsorted(t, v, side), np.searchsorted(table, v, side))
        same(np.searchsorted(t[np.argsort(order)], x, side, order), np.searchsorted(table, v, side))
    same(np.isin(x, t), np.isin(v, table))
    same(np.isin(x, [1, 9], invert=True), np.isin(v, [1, 9], invert=True))
    same(np.isin(v, t), np.isin(v, table))


def test_only_the_table_moves() -> None:
    x, t = dm.shard_tensor(values((7, 5)), ROW, [S0]), dm.shard_tensor(np.arange(6), ROW, [S0])
    for y in (np.searchsorted(t, x), np.isin(x, t)):
        assert_layout(y, [S0])
        assert_bytes_moved(y, 2 * 6 * 8)
    with pytest.raises(ValueError, match="the sorted table has one dim"):
        np.searchsorted(x, x)


@pytest.mark.parametrize(("mesh", "placements"), LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_differences(mesh: Any, placements: Any, shape: tuple[int, ...]) -> None:
    v = values(shape)
    x = dm.shard_tensor(v, mesh, placements)
    same(np.diff(x), np.diff(v))
    same(np.diff(x, axis=0), np.diff(v, axis=0)) if shape[0] else None
    same(np.diff(x, 2, 1), np.diff(v, 2, 1)) if shape[1] > 1 else None
    same(np.diff(x, axis=1, prepend=0, append=v), np.diff(v, axis=1, prepend=0, append=v))
    same(np.diff(x > 2, axis=1), np.diff(v > 2, axis=1))


def test_differences_move_what_lies_beside_the_borders() -> None:
    x = dm.shard_tensor(values((9, 4)), ROW, [S0])
    assert_bytes_moved(np.diff(x, axis=0), 2 * 4 * 8)
    assert_bytes_moved(np.diff(x, axis=1), 0)
    assert np.diff(x, 0) is not None
    with pytest.raises(ValueError, match="negative"):
        np.diff(x, -1)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("indexing", ["xy", "ij"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_grids(n: int, indexing: Any, sparse: bool) -> None:
    lines = [np.arange(k) for k in (4, 3, 5)[:n]]
    for mesh in (ROW, GRID):
        got = np.meshgrid(*(dm.shard_tensor(v, mesh, [S0]) for v in lines), indexing=indexing, sparse=sparse)
        for g, w in zip(got, np.meshgrid(*lines, indexing=indexing, sparse=sparse), strict=True):
            same(g, w)
    with pytest.raises(ValueError, match="'xy' or 'ij'"):
        np.meshgrid(dm.shard_tensor(lines[0], ROW, [S0]), indexing="ji")  # type: ignore[arg-type]
