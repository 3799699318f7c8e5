"""What the array API standard has and no other module of the table: order, searching, differences, grids.

Sorting makes the axis whole on each rank. A table that is searched is whole on every rank; what is looked up stays cut.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from daskmesh.dtensor import DTensor, implements
from daskmesh.ops.kinds import aligned, record
from daskmesh.rules import Signature, elementwise

__all__ = ["ordered"]

Array = Any


def ordered(x: Any, axis: int, *, descending: bool = False, stable: bool = True, indices: bool = False) -> DTensor:
    """Sort along an axis, or tell the indices that would.

    **Communication**: all-to-all if `axis` is cut and other dims can be cut instead, else all-gather.
    """
    axis = normalize_axis_index(axis, x.ndim)
    x = aligned(x, (axis,))
    how = {"axis": axis, "descending": descending, "stable": stable}
    if indices:
        return record(_argsorted, elementwise((x.shape,)), (x,), np.dtype(np.intp), how)
    return record(_sorted, elementwise((x.shape,)), (x,), x.dtype, how)


def _sorted(x: Array, axis: int, descending: bool, stable: bool) -> Array:
    y = np.sort(x, axis=axis, stable=stable)
    return np.flip(y, axis) if descending else y


def _argsorted(x: Array, axis: int, descending: bool, stable: bool) -> Array:
    if not descending:
        return np.argsort(x, axis=axis, stable=stable)
    # Backwards, so that equal values keep their order.
    return x.shape[axis] - 1 - np.flip(np.argsort(np.flip(x, axis), axis=axis, stable=stable), axis)


def _no_order(name: str, order: Any) -> None:
    if order is not None:
        raise TypeError(f"np.{name}(order=...): DTensors have no fields to sort by")


@implements(np.sort)
def sort(a: Any, axis: int | None = -1, kind: Any = None, order: Any = None, *, stable: Any = None) -> DTensor:
    _no_order("sort", order)
    a, axis = (np.ravel(a), 0) if axis is None else (a, axis)
    return ordered(a, axis, stable=bool(stable) or kind in ("stable", "mergesort"))


@implements(np.argsort)
def argsort(a: Any, axis: int | None = -1, kind: Any = None, order: Any = None, *, stable: Any = None) -> DTensor:
    _no_order("argsort", order)
    a, axis = (np.ravel(a), 0) if axis is None else (a, axis)
    return ordered(a, axis, stable=bool(stable) or kind in ("stable", "mergesort"), indices=True)


@implements(np.searchsorted)
def searchsorted(a: Any, v: Any, side: Any = "left", sorter: Any = None) -> DTensor:
    """Elementwise in `v`; the sorted table, and its sorter, are whole on every rank."""
    a, v = (x if isinstance(x, DTensor) else np.asarray(x) for x in (a, v))
    labels = tuple(range(v.ndim))
    if a.ndim != 1:
        raise ValueError(f"np.searchsorted(a): the sorted table has one dim, got shape {a.shape}")
    if sorter is None:
        return record(np.searchsorted, Signature((("table",), labels), labels), (a, v), np.dtype(np.intp), {"side": side})
    sorter = sorter if isinstance(sorter, DTensor) else np.asarray(sorter)
    signature = Signature((("table",), labels, ("table",)), labels)
    return record(_search_sorter, signature, (a, v, sorter), np.dtype(np.intp), {"side": side})


def _search_sorter(a: Array, v: Array, sorter: Array, side: Any) -> Array:
    return np.searchsorted(a, v, side=side, sorter=sorter)


@implements(np.isin)
def isin(element: Any, test_elements: Any, assume_unique: bool = False, invert: bool = False, *, kind: Any = None) -> DTensor:
    """Elementwise in `element`; the elements to test against are whole on every rank."""
    element, test = (x if isinstance(x, DTensor) else np.asarray(x) for x in (element, test_elements))
    labels = tuple(range(element.ndim))
    inner = tuple(f"test {d}" for d in range(test.ndim))
    return record(
        _is_in, Signature((labels, inner), labels), (element, test), np.dtype(np.bool_), {"invert": invert, "kind": kind}
    )


def _is_in(element: Array, test: Array, invert: bool, kind: Any) -> Array:
    return np.isin(element, test, invert=invert, kind=kind)


@implements(np.diff)
def diff(a: Any, n: int = 1, axis: int = -1, prepend: Any = np._NoValue, append: Any = np._NoValue) -> Any:
    """Differences of neighbours.

    **Communication**: the elements beside the borders of the parts, at each of the `n` steps.
    """
    if n < 0:
        raise ValueError(f"np.diff(n={n}): the number of times to take differences is negative")
    axis = normalize_axis_index(axis, a.ndim)
    ends = [_end(prepend, a, axis), a, _end(append, a, axis)]
    given = [x for x in ends if x is not None]
    x = a if len(given) == 1 else np.concatenate(given, axis)
    before = (slice(None),) * axis
    for _ in range(n):
        x = (np.not_equal if x.dtype == np.bool_ else np.subtract)(x[(*before, slice(1, None))], x[(*before, slice(None, -1))])
    return x


def _end(x: Any, a: Any, axis: int) -> Any:
    if x is np._NoValue or x is None:
        return None
    x = x if isinstance(x, DTensor) else np.asanyarray(x)
    return x if x.ndim else np.broadcast_to(x, (*a.shape[:axis], 1, *a.shape[axis + 1 :]))


@implements(np.meshgrid)
def meshgrid(*xi: Any, copy: bool = True, sparse: bool = False, indexing: Any = "xy") -> tuple[Any, ...]:
    """Coordinate arrays; each stays cut along its own dim, and the others repeat it."""
    if indexing not in ("xy", "ij"):
        raise ValueError(f"np.meshgrid(indexing={indexing!r}): 'xy' or 'ij'")
    order = [1, 0, *range(2, len(xi))] if indexing == "xy" and len(xi) > 1 else list(range(len(xi)))
    lines = [np.reshape(x, (-1,)) for x in xi]
    lines = [np.expand_dims(x, [d for d in range(len(xi)) if d != order[i]]) for i, x in enumerate(lines)]
    return tuple(lines) if sparse else tuple(np.broadcast_arrays(*lines))
