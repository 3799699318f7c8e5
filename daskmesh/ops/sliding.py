"""Sliding windows: each rank makes those that begin in its own part, and loads the elements that reach beyond it.

A window of 3 over 9 elements in 3 parts::

    x        0 1 2 | 3 4 5 | 6 7 8
    loads    . . . 3 4     |             rank 0 loads 3 4 of its neighbour, and makes the windows that begin at 0 1 2
             | . . . 6 7   |             rank 1 loads 6 7
             |     | . . .               the windows are 3 | 3 | 1

The windows of a rank are a view of what it holds, so a sum over them takes no more memory than it gives.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple
from numpy.lib.stride_tricks import sliding_window_view

from daskmesh.dtensor import DTensor, implements
from daskmesh.graph import Local
from daskmesh.layout import Coord, Layout
from daskmesh.ops.gathers import laid_out, recut
from daskmesh.ops.reaching import begun, reaching

__all__: list[str] = []

Array = Any
Shape = tuple[int, ...]


@implements(sliding_window_view)
def sliding_windows(
    x: DTensor, window_shape: Any, axis: Any = None, *, subok: bool = False, writeable: bool = False
) -> DTensor:
    """Windows over some dims, which stand last; those that begin in a part stay with it.

    **Communication**: along a dim that is cut, each rank loads what its windows reach beyond its part: window - 1 elements.
    """
    if writeable:
        raise TypeError("np.lib.stride_tricks.sliding_window_view(writeable=True): a DTensor has no views; leave it out")
    window = _sizes(window_shape)
    axes = tuple(range(x.ndim)) if axis is None else normalize_axis_tuple(axis, x.ndim, allow_duplicate=True)
    if len(window) != len(axes):
        raise ValueError(f"sliding_window_view: a window of {len(window)} dims over {len(axes)} axes; give one size per axis")
    reach: dict[int, int] = {}
    for d, n in zip(axes, window, strict=True):
        reach[d] = reach.get(d, 0) + n - 1
    for d, n in reach.items():
        if n >= max(x.shape[d], 1):
            raise ValueError(f"sliding_window_view: windows over dim {d} span {n + 1} elements, the dim has {x.shape[d]}")
    layout = x.layout
    node = reaching(x._node, reach, "what windows reach beyond their parts")
    made = recut(layout, {d: begun(layout, d, n) for d, n in reach.items()})
    target = laid_out(made, made.placements, (*made.chunks, *((n,) for n in window)))
    return DTensor(Local(target, node.world, _windows, (node,), {"window": window, "axes": axes, "layout": target}, located=True))


def _sizes(window_shape: Any) -> Shape:
    window = np.atleast_1d(np.asarray(window_shape))
    if window.dtype.kind not in "iu" or window.ndim != 1:
        raise TypeError(f"sliding_window_view(window_shape={window_shape!r}): an integer, or one per axis")
    if np.any(window < 1):
        raise ValueError(f"sliding_window_view(window_shape={window_shape!r}): sizes must be at least 1")
    return tuple(int(n) for n in window)


def _windows(coord: Coord, local: Array, window: Shape, axes: Shape, layout: Layout) -> Array:
    shape = layout.local_shape(coord)
    if 0 in shape:
        return np.empty_like(local, shape=shape)
    made = sliding_window_view(local, window, axes)
    # A dim that is not cut, or whose windows are of size 1, is whole here and may hold more than what begins in this part.
    return made[tuple(slice(0, n) for n in shape)]
