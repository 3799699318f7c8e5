"""Elements that a condition selects: how many there are only the data tell, so each rank selects its own at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from daskmesh.dtensor import DTensor, implements
from daskmesh.eager import run_at_once
from daskmesh.layout import Coord, Layout
from daskmesh.moves import moved, reduced
from daskmesh.ops.gathers import laid_out, rearranged, renumbered, split_over
from daskmesh.placement import Replicate, Shard

__all__ = ["led", "masked"]

Array = Any
_np: Any = np


def led(x: DTensor, ndim: int, why: str) -> DTensor:
    """The first `ndim` dims cut along dim 0 alone, so that parts are runs in row-major order.

    **Communication**: an all-to-all if another one of them is cut; none else.
    """
    layout = x.layout
    if not any(layout.shard_axes[d] for d in range(1, ndim)):
        return x
    placements = [Shard(0) if isinstance(p, Shard) and p.dim < ndim else p for p in layout.placements]
    axes = [m for m, p in enumerate(placements) if p == Shard(0)]
    chunks = [(n,) if d < ndim else c for d, (n, c) in enumerate(zip(layout.shape, layout.chunks, strict=True))]
    chunks[0] = split_over(layout.shape[0], axes, layout.mesh)
    return DTensor(moved(x._node, laid_out(layout, placements, tuple(chunks)), why))


def masked(x: DTensor, mask: DTensor) -> DTensor:
    """``x[mask]``, computed now: the elements selected stay with their ranks, the parts have the sizes that come out.

    **Communication**: none but the sizes, if `x` and `mask` are cut alike, along dim 0.
    """
    if mask.ndim > x.ndim or mask.shape != x.shape[: mask.ndim]:
        raise IndexError(f"a mask of shape {mask.shape} does not fit the first dims of an array of shape {x.shape}")
    if mask.process_mesh != x.process_mesh:
        raise ValueError(f"x[mask]: x lies on {x.process_mesh!r}, the mask on {mask.process_mesh!r}; reshard one of them")
    if mask.ndim == 0:
        x, mask = rearranged(x, (None, *range(x.ndim))), rearranged(mask, (None,))
    k = mask.ndim
    x = led(x, k, "a mask: elements in row-major order")
    layout = x.layout
    cuts = [p if p == Shard(0) else Replicate() for p in layout.placements]
    like = laid_out(layout, cuts, (layout.chunks[0], *((n,) for n in mask.shape[1:])), np.bool_)
    mask = DTensor(moved(mask._node, like, "a mask is cut as the array"))
    places = {0: 0} | {d: d - k + 1 for d in range(k, x.ndim)}
    rest = layout.chunks[k:]
    frame = laid_out(layout, renumbered(layout.placements, places), ((0,) * len(layout.chunks[0]), *rest))
    return run_at_once(_select, (x, mask), frame)


def _select(coord: Coord, local: Array, mask: Array) -> Array:
    return local[mask]


@implements(np.argwhere)
def argwhere(a: DTensor) -> DTensor:
    """Indices of the elements that are not zero, computed now; they stay with the ranks that hold the elements.

    **Communication**: none but the sizes, if `a` is cut along dim 0 alone.
    """
    if a.ndim == 0:
        return DTensor(argwhere(rearranged(a, (None,)))[:, :0]._node)
    x = DTensor(moved(a._node, a.layout.replace(placements=tuple(reduced(a.placements))), "argwhere"))
    x = led(x, x.ndim, "argwhere: elements in row-major order")
    layout = x.layout
    sizes = (0,) * len(layout.chunks[0])
    frame = laid_out(layout, renumbered(layout.placements, {0: 0}), (sizes, (x.ndim,)), np.int64)
    return run_at_once(_argwhere, (x,), frame, {"layout": layout})


def _argwhere(coord: Coord, local: Array, layout: Layout) -> Array:
    found = np.argwhere(local).astype(np.int64, copy=False)
    found += np.asarray([s.start for s in layout.box(coord)], dtype=np.int64)
    return found


@implements(np.nonzero)
def nonzero(a: DTensor) -> tuple[DTensor, ...]:
    if a.ndim == 0:
        raise ValueError("Calling nonzero on 0d arrays is not allowed. Use np.atleast_1d(scalar).nonzero() instead.")
    found = argwhere(a)
    return tuple(found[:, d] for d in range(a.ndim))


@implements(np.flatnonzero)
def flatnonzero(a: DTensor) -> DTensor:
    return nonzero(_np.ravel(a))[0]
