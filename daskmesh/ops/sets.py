"""The distinct values of an array. Their number depends on the values, so these functions compute when they are called.

Each rank finds the distinct values of its part, all ranks load all of these, and each merges them::

    part 0   3 1 3     1 3       .                          values   1 2 3
    part 1   2 3       2 3   ->  1 3 2 3 1, with where  ->  indices  1 3 0        first places in the whole array
    part 2   1         1         and how often              counts   2 1 3
                                                            inverse  looked up where the elements lie
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from daskmesh.dtensor import DTensor, implements
from daskmesh.eager import run_at_once
from daskmesh.graph import Local
from daskmesh.layout import Coord, Layout, make_layout
from daskmesh.ops.kinds import prepare
from daskmesh.placement import Shard
from daskmesh.rules import Signature

__all__: list[str] = []

Array = Any
_np: Any = np  # typed for arrays of its own, not for those that speak its protocols


class UniqueAll(NamedTuple):
    """Result of ``np.unique_all``."""

    values: DTensor
    indices: DTensor
    inverse_indices: DTensor
    counts: DTensor


class UniqueCounts(NamedTuple):
    """Result of ``np.unique_counts``."""

    values: DTensor
    counts: DTensor


class UniqueInverse(NamedTuple):
    """Result of ``np.unique_inverse``."""

    values: DTensor
    inverse_indices: DTensor


def _distinct(x: DTensor, equal_nan: bool) -> DTensor:
    """The table (value, first place, count) of the distinct values of `x`, whole on every rank."""
    mesh = x.process_mesh
    line: Any = x if x.ndim == 1 else np.reshape(x, (-1,))
    flat = line.reshard([Shard(0)] * mesh.ndim)
    dtype = np.dtype([("value", x.dtype), ("place", np.int64), ("count", np.int64)])
    parts = run_at_once(_of_part, [flat], flat.layout, {"layout": flat.layout, "dtype": dtype})
    frame = make_layout(mesh, (), (0,), dtype)
    return run_at_once(_merged, [parts.reshard([])], frame, {"equal_nan": equal_nan})


def _of_part(coord: Coord, local: Array, layout: Layout, dtype: Any) -> Array:
    values, first, counts = np.unique(local, return_index=True, return_counts=True, equal_nan=False)
    table = np.empty_like(values, dtype=dtype)
    table["value"], table["place"], table["count"] = values, first + layout.box(coord)[0].start, counts
    return table


def _merged(coord: Coord, table: Array, equal_nan: bool) -> Array:
    # With return_index the sort is stable, so that nans stay in the order of their places.
    values, _, inverse = np.unique(table["value"], return_index=True, return_inverse=True, equal_nan=equal_nan)
    merged = np.zeros_like(table, shape=values.shape)
    merged["value"], merged["place"] = values, np.iinfo(np.int64).max
    np.minimum.at(merged["place"], inverse, table["place"])
    np.add.at(merged["count"], inverse, table["count"])
    return merged


def _column(table: DTensor, name: str) -> DTensor:
    """One column, cut over all mesh dims: every rank holds the whole, so nothing moves."""
    dtype = table.dtype[name]
    layout = table.layout.replace(dtype=dtype)
    column = DTensor(Local(layout, table._node.world, _field, (table._node,), {"name": name}))
    return column.reshard([Shard(0)] * table.process_mesh.ndim)


def _field(table: Array, name: str) -> Array:
    return np.ascontiguousarray(table[name])


def _inverse(x: DTensor, table: DTensor) -> DTensor:
    """Where each element stands in the table, told where the element lies."""
    labels = tuple(range(x.ndim))
    ready = prepare(Signature((labels, ("table",)), labels), (x, table), np.dtype(np.intp))
    return ready.local(_stands, {"layout": ready.decision.output}, located=True)


def _stands(coord: Coord, local: Array, table: Array, layout: Layout) -> Array:
    at: Array = np.asanyarray(np.searchsorted(table["value"], local))
    odd = local != local
    if not odd.any():
        return at
    if local.dtype.names:
        raise ValueError("np.unique(axis=..., return_inverse=True): a slice holds nan, so that it equals none; replace it first")
    # Each nan counts as a value of its own, known by its place; where there is but one, it is found by that as well.
    grids = np.ix_(*(np.arange(s.start, s.stop) for s in layout.box(coord)))
    places = np.ravel_multi_index(np.broadcast_arrays(*grids), layout.shape)
    first = len(table) - np.count_nonzero(table["value"] != table["value"])
    order = np.argsort(table["place"][first:])
    nth = np.searchsorted(table["place"][first:], places[odd], sorter=order)
    at[odd] = first + (order[nth] if len(order) > 1 else 0)
    return at


@implements(np.unique)
def unique(
    ar: Any, return_index: bool = False, return_inverse: bool = False, return_counts: bool = False, axis: Any = None, *,
    equal_nan: bool = True, sorted: bool = True,
) -> Any:  # fmt: skip
    """The distinct values, sorted, cut over all ranks.

    **Communication**: runs at once; the distinct values of each part are loaded by every rank.
    """
    x = ar if axis is None else _slices_as_elements(ar, axis)
    table = _distinct(x, equal_nan and axis is None)
    values = _column(table, "value")
    found = [values if axis is None else _elements_as_slices(values, ar, axis)]
    if return_index:
        found.append(_column(table, "place"))
    if return_inverse:
        found.append(_inverse(x, table))
    if return_counts:
        found.append(_column(table, "count"))
    return found[0] if len(found) == 1 else tuple(found)


def _slices_as_elements(x: DTensor, axis: int) -> DTensor:
    """The slices along a dim as elements of one dim, which compare as their numbers do, the first ones first.

    **Communication**: what cuts the array along that dim and no other.
    """
    d = normalize_axis_index(axis, x.ndim)
    if not x.size:
        raise ValueError(f"np.unique(axis={axis}): the array of shape {x.shape} has no elements to compare")
    rows = _np.reshape(_np.moveaxis(x, d, 0), (x.shape[d], -1)).reshard([Shard(0)] * x.process_mesh.ndim)
    n, k = rows.shape
    dtype = np.dtype([(f"f{i}", x.dtype) for i in range(k)])
    layout = Layout(rows.process_mesh, rows.placements, (n,), dtype, rows.layout.chunks[:1])
    return DTensor(Local(layout, rows._node.world, _joined, (rows._node,), {"dtype": dtype}))


def _joined(rows: Array, dtype: Any) -> Array:
    return np.ascontiguousarray(rows).view(dtype).reshape(len(rows))


def _elements_as_slices(values: DTensor, like: DTensor, axis: int) -> DTensor:
    d = normalize_axis_index(axis, like.ndim)
    rest = like.shape[:d] + like.shape[d + 1 :]
    layout, k = values.layout, len(values.dtype.names or ())
    target = Layout(layout.mesh, layout.placements, (*layout.shape, k), like.dtype, (*layout.chunks, (k,)))
    rows = DTensor(Local(target, values._node.world, _apart, (values._node,), {"dtype": like.dtype, "k": k}))
    return _np.moveaxis(_np.reshape(rows, (values.shape[0], *rest)), 0, d)  # type: ignore[no-any-return]


def _apart(values: Array, dtype: Any, k: int) -> Array:
    return np.ascontiguousarray(values).view(dtype).reshape(len(values), k)


@implements(np.unique_all)
def unique_all(x: DTensor) -> UniqueAll:
    table = _distinct(x, equal_nan=False)
    return UniqueAll(_column(table, "value"), _column(table, "place"), _inverse(x, table), _column(table, "count"))


@implements(np.unique_counts)
def unique_counts(x: DTensor) -> UniqueCounts:
    table = _distinct(x, equal_nan=False)
    return UniqueCounts(_column(table, "value"), _column(table, "count"))


@implements(np.unique_inverse)
def unique_inverse(x: DTensor) -> UniqueInverse:
    table = _distinct(x, equal_nan=False)
    return UniqueInverse(_column(table, "value"), _inverse(x, table))


@implements(np.unique_values)
def unique_values(x: DTensor) -> DTensor:
    return _column(_distinct(x, equal_nan=False), "value")
