"""Cumulative operations: cumsum, cumprod and `accumulate` of the ufuncs.

Along a dim that is cut, every rank scans its part, and the totals of the parts before it are added in::

    part 0   1 2 3     total 6              1  3  6
    part 1   4 5       total 9     6    ->  10 15         the totals travel in one small exchange,
    part 2   6         total 6     6+9  ->  21            each rank sums those before its own
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from daskmesh.algebra import Flow, reduction_flows
from daskmesh.dtensor import UFUNC_METHODS, DTensor, implements
from daskmesh.graph import Local
from daskmesh.layout import Coord, Layout
from daskmesh.moves import moved
from daskmesh.ops.kinds import aligned, dtype_of, prepare
from daskmesh.ops.parts import REGROUPING, cut_dims, given_options, no_out
from daskmesh.placement import Replicate
from daskmesh.rules import elementwise

__all__: list[str] = []

Array = Any
_OPS = {
    np.add: "sum", np.multiply: "prod", np.maximum: "max", np.minimum: "min", np.logical_or: "any", np.logical_and: "all",
}  # fmt: skip


@lru_cache(256)
def _flows(ufunc: np.ufunc) -> tuple[Flow, ...]:
    """A scan is a set of reductions, so terms pass it as they pass those."""
    return reduction_flows(_OPS[ufunc]) if ufunc in _OPS else ()


def _scan(a: DTensor, axis: int, ufunc: np.ufunc, dtype: Any, *, skip_nan: bool = False) -> DTensor:
    options = given_options(dtype=dtype)
    result = dtype_of(_scan_of, a, ufunc=ufunc, axis=0, skip_nan=skip_nan, **options)
    how = {"ufunc": ufunc, "axis": axis, "skip_nan": skip_nan, "dtype": None if result.kind in "mM" else result}
    regroups = ufunc in REGROUPING or ufunc in _OPS
    if not regroups:
        a = aligned(a, (axis,))
    ready = prepare(elementwise((a.shape,), () if skip_nan else _flows(ufunc)), (a,), result)
    layout = ready.decision.output
    if not cut_dims(layout, (axis,)):
        return ready.local(_scan_of, how)
    source = ready.args[0].as_boundary()  # read by the totals and by the scan
    each, whole = _totals_layouts(layout, axis)
    totals = Local(each, ready.world, _total_of, (source,), how)
    gathered = moved(totals, whole, f"totals of the parts of dim {axis}, which is scanned")
    return DTensor(Local(layout, ready.world, _scan_after, (source, gathered), {**how, "layout": layout}, located=True))


@lru_cache(4096)
def _totals_layouts(layout: Layout, axis: int) -> tuple[Layout, Layout]:
    """One total for each part of a dim: where it is made, and all of them on every rank."""
    parts = len(layout.chunks[axis])
    placements = tuple(Replicate() if m in layout.shard_axes[axis] else p for m, p in enumerate(layout.placements))
    return _resized(layout, axis, (1,) * parts), _resized(layout, axis, (parts,)).replace(placements=placements)


def _resized(layout: Layout, axis: int, sizes: tuple[int, ...]) -> Layout:
    shape = (*layout.shape[:axis], sum(sizes), *layout.shape[axis + 1 :])
    return layout.replace(shape=shape, chunks=(*layout.chunks[:axis], sizes, *layout.chunks[axis + 1 :]))


def _scan_of(x: Array, ufunc: np.ufunc, axis: int, skip_nan: bool, dtype: Any = None) -> Array:
    if skip_nan:
        return (np.nancumsum if ufunc is np.add else np.nancumprod)(x, axis=axis, dtype=dtype)
    return ufunc.accumulate(x, axis=axis, dtype=dtype)


def _total_of(x: Array, ufunc: np.ufunc, axis: int, skip_nan: bool, dtype: Any) -> Array:
    if not x.shape[axis]:
        return np.zeros_like(x, shape=(*x.shape[:axis], 1, *x.shape[axis + 1 :]), dtype=dtype)
    if skip_nan:
        return (np.nansum if ufunc is np.add else np.nanprod)(x, axis=axis, dtype=dtype, keepdims=True)
    return ufunc.reduce(x, axis=axis, dtype=dtype, keepdims=True)


def _scan_after(
    coord: Coord, x: Array, totals: Array, ufunc: np.ufunc, axis: int, skip_nan: bool, dtype: Any, layout: Layout
) -> Array:
    y = _scan_of(x, ufunc, axis, skip_nan, dtype)
    before = [i for i in range(layout.part_index(coord)[axis]) if layout.chunks[axis][i]]
    if not before or not y.size:
        return y
    start = ufunc.reduce(totals.take(before, axis=axis), axis=axis, dtype=dtype, keepdims=True)
    return ufunc(start, y, out=y)


def _cumulative(ufunc: np.ufunc, name: str, skip_nan: bool = False) -> Callable[..., DTensor]:
    def scan(a: Any, axis: Any = None, dtype: Any = None, out: Any = None) -> DTensor:
        no_out(out, name)
        if axis is None:
            a, axis = (a if a.ndim == 1 else np.ravel(a)), 0
        return _scan(a, normalize_axis_index(axis, a.ndim), ufunc, dtype, skip_nan=skip_nan and a.dtype.kind in "fc")

    return scan


implements(np.cumsum)(_cumulative(np.add, "cumsum"))
implements(np.cumprod)(_cumulative(np.multiply, "cumprod"))
implements(np.nancumsum)(_cumulative(np.add, "nancumsum", skip_nan=True))
implements(np.nancumprod)(_cumulative(np.multiply, "nancumprod", skip_nan=True))


def _standard(ufunc: np.ufunc, name: str, first: int) -> Callable[..., DTensor]:
    """The names of the array API standard."""

    def scan(x: Any, /, *, axis: Any = None, dtype: Any = None, out: Any = None, include_initial: bool = False) -> DTensor:
        no_out(out, name)
        if axis is None and x.ndim != 1:
            raise ValueError(f"np.{name}: axis must be given for an array of {x.ndim} dims")
        axis = normalize_axis_index(0 if axis is None else axis, x.ndim)
        result = _scan(x, axis, ufunc, dtype)
        return _with_initial(result, axis, first) if include_initial else result

    return scan


implements(np.cumulative_sum)(_standard(np.add, "cumulative_sum", 0))
implements(np.cumulative_prod)(_standard(np.multiply, "cumulative_prod", 1))


def _with_initial(x: DTensor, axis: int, first: int) -> DTensor:
    """One more element at the start, on the rank that holds the first part."""
    x = x if not x.layout.partial_axes else aligned(x)
    sizes = x.layout.chunks[axis]
    layout = _resized(x.layout, axis, (sizes[0] + 1, *sizes[1:]))
    how = {"layout": layout, "axis": axis, "first": first}
    return DTensor(Local(layout, x._node.world, _prepended, (x._node,), how, located=True))


def _prepended(coord: Coord, x: Array, layout: Layout, axis: int, first: int) -> Array:
    if layout.part_index(coord)[axis]:
        return x
    start = np.full_like(x, first, shape=(*x.shape[:axis], 1, *x.shape[axis + 1 :]))
    return np.concatenate([start, x], axis=axis)


def ufunc_accumulate(ufunc: np.ufunc, a: DTensor, axis: int = 0, dtype: Any = None) -> DTensor:
    """``ufunc.accumulate``; ufuncs that do not regroup need the dim whole, and so move it."""
    return _scan(a, normalize_axis_index(axis, a.ndim), ufunc, dtype)


UFUNC_METHODS["accumulate"] = ufunc_accumulate
