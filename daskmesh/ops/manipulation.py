"""Transposing, adding and dropping dims, broadcasting, reshaping; little moves, and much of it nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index, normalize_axis_tuple

from daskmesh.dtensor import DTensor, implements
from daskmesh.layout import Coord, Layout
from daskmesh.ops.gathers import as_operand, dropped, rearranged
from daskmesh.ops.kinds import prepare
from daskmesh.ops.reshaping import reshaped
from daskmesh.rules import broadcasting

__all__: list[str] = []

Array = Any
Order = tuple[int | None, ...]


@implements(np.transpose)
def transpose(a: DTensor, axes: Any = None) -> DTensor:
    """Transpose; the placements are renumbered.

    **Communication**: none.
    """
    if axes is None:
        return rearranged(a, tuple(reversed(range(a.ndim))))
    order = normalize_axis_tuple(axes, a.ndim, "axes")
    if len(order) != a.ndim:
        raise ValueError(f"np.transpose: axes {tuple(axes)} do not match an array of {a.ndim} dim(s)")
    return rearranged(a, order)


@implements(np.matrix_transpose)
def matrix_transpose(x: DTensor, /) -> DTensor:
    if x.ndim < 2:
        raise ValueError(f"np.matrix_transpose: the array must have at least 2 dims, it has {x.ndim}")
    return swapaxes(x, -1, -2)


@implements(np.swapaxes)
def swapaxes(a: DTensor, axis1: int, axis2: int) -> DTensor:
    i, j = normalize_axis_index(axis1, a.ndim), normalize_axis_index(axis2, a.ndim)
    order = list(range(a.ndim))
    order[i], order[j] = j, i
    return rearranged(a, tuple(order))


@implements(np.moveaxis)
def moveaxis(a: DTensor, source: Any, destination: Any) -> DTensor:
    here, there = normalize_axis_tuple(source, a.ndim, "source"), normalize_axis_tuple(destination, a.ndim, "destination")
    if len(here) != len(there):
        raise ValueError(f"np.moveaxis: {len(here)} source axes and {len(there)} destinations; give as many of both")
    order = [d for d in range(a.ndim) if d not in here]
    for to, d in sorted(zip(there, here, strict=True)):
        order.insert(to, d)
    return rearranged(a, tuple(order))


@implements(np.rollaxis)
def rollaxis(a: DTensor, axis: int, start: int = 0) -> DTensor:
    d = normalize_axis_index(axis, a.ndim)
    to = start + a.ndim if start < 0 else start
    if not 0 <= to <= a.ndim:
        raise np.exceptions.AxisError(f"np.rollaxis: start {start} is out of range for an array of {a.ndim} dim(s)")
    return moveaxis(a, d, to - 1 if d < to else to)


@implements(np.expand_dims)
def expand_dims(a: DTensor, axis: Any) -> DTensor:
    given = axis if isinstance(axis, (tuple, list)) else (axis,)
    new = normalize_axis_tuple(given, a.ndim + len(given))
    old = iter(range(a.ndim))
    return rearranged(a, tuple(None if d in new else next(old) for d in range(a.ndim + len(given))))


@implements(np.squeeze)
def squeeze(a: DTensor, axis: Any = None) -> DTensor:
    """Drop dims of size 1.

    **Communication**: none, unless a dropped dim is cut; then the one rank that holds the data shares them out.
    """
    if axis is None:
        return dropped(a, tuple(d for d, n in enumerate(a.shape) if n == 1), "squeeze")
    dims = normalize_axis_tuple(axis, a.ndim, "axis")
    long = [d for d in dims if a.shape[d] != 1]
    if long:
        raise ValueError(f"np.squeeze: cannot drop dim {long[0]} of size {a.shape[long[0]]}; only dims of size 1 can go")
    return dropped(a, dims, "squeeze")


@implements(np.broadcast_to)
def broadcast_to(array: DTensor, shape: Any, subok: bool = False) -> DTensor:
    """Broadcast: new dims and dims of size 1 grow on every rank.

    **Communication**: none, unless a dim of size 1 is cut.
    """
    to = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(int(n) for n in shape)
    if np.broadcast_shapes(array.shape, to) != to:
        raise ValueError(f"np.broadcast_to: cannot broadcast an array of shape {array.shape} to shape {to}")
    prepared = prepare(broadcasting(array.shape, to), (array,), array.dtype)
    return prepared.local(_broadcast, {"layout": prepared.decision.output}, located=True)


def _broadcast(coord: Coord, local: Array, layout: Layout) -> Array:
    return np.broadcast_to(local, layout.local_shape(coord))


@implements(np.broadcast_arrays)
def broadcast_arrays(*args: Any, subok: bool = False) -> tuple[Any, ...]:
    operands = [as_operand(x) for x in args]
    shape = np.broadcast_shapes(*(x.shape for x in operands))
    return tuple(broadcast_to(x, shape) if isinstance(x, DTensor) else np.broadcast_to(x, shape) for x in operands)


def _at_least(arrays: Sequence[Any], places: Sequence[Order]) -> Any:
    """Arrays with too few dims get new ones where `places` says, by their number of dims."""
    made = []
    for x in map(as_operand, arrays):
        few = x.ndim < len(places)
        if not isinstance(x, DTensor):
            order = places[x.ndim] if few else ()
            made.append(x[tuple(None if d is None else slice(None) for d in order)] if few else x)
        else:
            made.append(rearranged(x, places[x.ndim]) if few else x)
    return made[0] if len(made) == 1 else tuple(made)


@implements(np.atleast_1d)
def atleast_1d(*arys: Any) -> Any:
    return _at_least(arys, ((None,),))


@implements(np.atleast_2d)
def atleast_2d(*arys: Any) -> Any:
    return _at_least(arys, ((None, None), (None, 0)))


@implements(np.atleast_3d)
def atleast_3d(*arys: Any) -> Any:
    return _at_least(arys, ((None, None, None), (None, 0, None), (0, 1, None)))


# -- reshape ----------------------------------------------------------------------------------------------------------


def _wanted(shape: Any, size: int, old: tuple[int, ...]) -> tuple[int, ...]:
    sizes = [int(shape)] if isinstance(shape, (int, np.integer)) else [int(n) for n in shape]
    free = [i for i, n in enumerate(sizes) if n < 0]
    if len(free) > 1:
        raise ValueError("can only specify one unknown dimension")
    known = math.prod(n for n in sizes if n >= 0)
    if free and known and size % known == 0:
        sizes[free[0]] = size // known
    elif free or known != size:
        raise ValueError(f"cannot reshape array of size {size} and shape {old} into shape {tuple(sizes)}")
    return tuple(sizes)


@implements(np.reshape)
def reshape(a: DTensor, /, shape: Any, order: str = "C", *, copy: bool | None = None) -> DTensor:
    """Reshape, whatever the cuts.

    Dims that the reshape merges or splits form groups. Within a group the cut stays with the first dim, whose parts are runs of
    the group in row-major order; the parts of the result are the nearest whole rows.

    **Communication**: none where parts begin at whole rows of the result; else the rows at the borders. A cut within a group
    goes to its first dim first.
    """
    to = _wanted(shape, a.size, a.shape)
    if copy is False:
        raise ValueError("np.reshape(copy=False): a DTensor has no views")
    if order not in ("C", "A", "F"):
        raise ValueError(f"np.reshape: order must be one of 'C', 'F', 'A', got {order!r}")
    if order == "F":
        return transpose(reshaped(transpose(a), to[::-1]))
    return reshaped(a, to)


@implements(np.ravel)
def ravel(a: DTensor, order: str = "C") -> DTensor:
    return reshape(a, -1, order="F" if order == "F" else "C")
