"""What manipulation and indexing are made of: stretches of a dim, dropped dims, plain operands in a given layout.

`regathered` is the one way by which slices, flips, rolls, tiles and padding come about (see `daskmesh.regather`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from daskmesh.conversion import shard_tensor
from daskmesh.creation import build_box
from daskmesh.dtensor import DTensor
from daskmesh.exchange import Exchange
from daskmesh.graph import Local, Node, local_of
from daskmesh.layout import Chunks, Coord, Layout, split_sizes
from daskmesh.mesh import ProcessMesh
from daskmesh.moves import moved, reduced, refuse_beyond_memory
from daskmesh.ops.kinds import record
from daskmesh.placement import Partial, Placement, Replicate, Shard, reduction
from daskmesh.plan import neutral_op
from daskmesh.regather import Regather, Stretch, ascending, counts, cut, relative, spans
from daskmesh.rules import rearranging

__all__ = [
    "as_operand", "dropped", "fillable", "laid_out", "placed", "rearranged", "recut", "regathered", "renumbered", "split_over",
]  # fmt: skip

Array = Any
Stretches = tuple[Stretch, ...]
_EMBED_SIZE = 2**13  # elements of a plain operand that travel with the program, instead of as an array of their own


def as_operand(x: Any) -> Any:
    """A DTensor as it is, anything else as a NumPy array (arrays on a device stay there)."""
    return x if isinstance(x, DTensor) or (hasattr(x, "__array_function__") and hasattr(x, "dtype")) else np.asarray(x)


def split_over(n: int, axes: Sequence[int], mesh: ProcessMesh, unit: int = 1) -> tuple[int, ...]:
    """Sizes of the parts of a dim of `n` rows of `unit` elements, by the split rule."""
    parts: tuple[int, ...] = (n,)
    for m in axes:
        parts = tuple(itertools.chain.from_iterable(split_sizes(k, mesh.shape[m]) for k in parts))
    return tuple(k * unit for k in parts)


def laid_out(layout: Layout, placements: Sequence[Placement], chunks: Chunks, dtype: Any = None) -> Layout:
    """A layout on the same mesh; sizes follow from the parts."""
    return Layout(
        layout.mesh, tuple(placements), tuple(map(sum, chunks)), layout.dtype if dtype is None else np.dtype(dtype), tuple(chunks)
    )


def recut(layout: Layout, sizes: Mapping[int, tuple[int, ...]]) -> Layout:
    """The same placements with other part sizes of some tensor dims."""
    return laid_out(layout, layout.placements, tuple(sizes.get(d, c) for d, c in enumerate(layout.chunks)))


def renumbered(placements: Sequence[Placement], places: Mapping[int, int]) -> tuple[Placement, ...]:
    """Placements after tensor dims have got other numbers; a Shard of a dim without one becomes Replicate."""
    return tuple(
        (Shard(places[p.dim]) if p.dim in places else Replicate()) if isinstance(p, Shard) else p for p in placements
    )


def fillable(x: DTensor) -> DTensor:
    """The same value in a layout where a constant can be put among the terms: not numbers under Partial('any') or ('all')."""
    placements = x.placements
    truth = [isinstance(p, Partial) and p.op in ("any", "all") for p in placements]
    if x.dtype == np.bool_ or not any(truth):
        return x
    target = x.layout.replace(placements=tuple(reduced(placements)))
    return DTensor(moved(x._node, target, "numbers cannot be put among truth values"))


def placed(x: Any, target: Layout, world: str, why: str = "") -> Node:
    """An operand, plain or not, of just the shape and dtype of a layout, in that layout.

    **Communication**: of a DTensor what the redistribution moves; of a large plain array its parts; else none.
    """
    if isinstance(x, DTensor):
        return moved(x._node, target, why)
    if x.size > _EMBED_SIZE:
        return moved(shard_tensor(x, target.mesh, reduced(target.placements))._node, target, why)
    return Local(target, world, _part, (x, target), located=True)


def _part(coord: Coord, array: Array, target: Layout) -> Array:
    return local_of(build_box(array.__getitem__, target, coord), target)


def rearranged(x: DTensor, order: tuple[int | None, ...]) -> DTensor:
    """The dims of `x` in another order, None for a new dim of size 1."""
    if order == tuple(range(x.ndim)):
        return DTensor(x._node)
    return record(_rearranged, rearranging(x.ndim, order), (x,), x.dtype, {"order": order})


def _rearranged(local: Array, order: tuple[int | None, ...]) -> Array:
    turned = local.transpose([d for d in order if d is not None])
    return turned[tuple(None if d is None else slice(None) for d in order)]


def dropped(x: DTensor, dims: Sequence[int], what: str) -> DTensor:
    """`x` without some dims of size 1.

    **Communication**: none, unless one of them is cut. Then the rank that holds the data shares them out along the longest dim
    that is not cut, which moves least, or sends a copy to every rank where no dim is as long as there are ranks.
    """
    if not dims:
        return DTensor(x._node)
    layout = x.layout
    kept = [d for d in range(x.ndim) if d not in dims]
    cuts = [m for m, p in enumerate(layout.placements) if isinstance(p, Shard) and p.dim in dims]
    node = x._node
    if cuts:
        n = math.prod(layout.mesh.shape[m] for m in cuts)
        free = [d for d in kept if not layout.shard_axes[d] and layout.shape[d] >= n]
        placements, chunks = list(layout.placements), list(layout.chunks)
        for d in dims:
            chunks[d] = (1,)
        goal: Placement = Replicate()
        if free:
            longest = max(free, key=lambda d: layout.shape[d])
            goal = Shard(longest)
            chunks[longest] = split_over(layout.shape[longest], cuts, layout.mesh)
        for m in cuts:
            placements[m] = goal
        how = "copied to all" if goal == Replicate() else "shared out"
        node = moved(node, laid_out(layout, placements, tuple(chunks)), f"{what}: what one rank holds is {how}")
    places = {d: i for i, d in enumerate(kept)}
    target = laid_out(layout, renumbered(node.layout.placements, places), tuple(node.layout.chunks[d] for d in kept))
    return DTensor(Local(target, node.world, _squeezed, (node,), {"dims": tuple(dims)}))


def _squeezed(local: Array, dims: tuple[int, ...]) -> Array:
    return np.squeeze(local, dims)


# -- stretches --------------------------------------------------------------------------------------------------------


def regathered(x: DTensor, maps: Mapping[int, Sequence[Stretch]], fill: Any = None, why: str = "") -> DTensor:
    """A result whose dims are made of stretches of those of `x`.

    **Communication**: none along dims that are not cut or whose stretches go forwards: each rank picks from its own part. Other
    dims are cut anew by the split rule, and each rank loads what it lacks, once.

    Parameters
    ----------
    maps : mapping
        Tensor dim -> the stretches that make it up.
    fill : scalar, optional
        What stretches that start at -1 hold.
    """
    if fill is not None:
        x = fillable(x)
    given = {d: tuple(s for s in stretches if s.size) for d, stretches in maps.items()}
    axes = x.layout.shard_axes
    moving = {d: s for d, s in given.items() if axes[d] and not ascending(s)}
    still = {d: s for d, s in given.items() if d not in moving and s != (Stretch(0, 1, x.shape[d]),)}
    if still:
        x = _picked_in_place(x, still, fill)
    return _exchanged(x, moving, fill, why) if moving else x


def _picked_in_place(x: DTensor, maps: Mapping[int, Stretches], fill: Any) -> DTensor:
    layout = x.layout
    picks: dict[int, tuple[Stretches, ...]] = {}
    sizes: dict[int, tuple[int, ...]] = {}
    for d, stretches in maps.items():
        offsets = layout.offsets[d]
        n = sum(s.size for s in stretches)
        sizes[d] = counts(stretches, offsets) if layout.shard_axes[d] else (n,)
        ends = [0, *itertools.accumulate(sizes[d])]
        picks[d] = tuple(
            tuple(s if s.start < 0 else s._replace(start=s.start - at) for s in cut(stretches, lo, hi))
            for at, (lo, hi) in zip(offsets, itertools.pairwise(ends), strict=False)
        )
    target = recut(layout, sizes)
    return DTensor(Local(target, x._node.world, pick, (x._node,), {"layout": target, "picks": picks, "fill": fill}, located=True))


def _exchanged(x: DTensor, maps: Mapping[int, Stretches], fill: Any, why: str) -> DTensor:
    layout = x.layout
    runs: list[tuple[tuple[tuple[int, int], ...], ...] | None] = [None] * layout.ndim
    picks: dict[int, tuple[Stretches, ...]] = {}
    sizes: dict[int, tuple[int, ...]] = {}
    for d, stretches in maps.items():
        sizes[d] = split_over(sum(s.size for s in stretches), layout.shard_axes[d], layout.mesh)
        ends = [0, *itertools.accumulate(sizes[d])]
        parts = [cut(stretches, lo, hi) for lo, hi in itertools.pairwise(ends)]
        needed = tuple(map(spans, parts))
        runs[d] = needed
        picks[d] = tuple(relative(s, r) for s, r in zip(parts, needed, strict=True))
    middle = recut(layout, {d: tuple(sum(b - a for a, b in r) for r in rs) for d, rs in enumerate(runs) if rs is not None})
    target = recut(layout, sizes)
    share = max((math.prod(target.local_shape(c)) for c in target.coords()), default=0) * target.dtype.itemsize
    refuse_beyond_memory(share, lambda: f"{why or 're-gathering'} {x.shape} {x.dtype}")
    node = Exchange(x._node, Regather(layout, middle, runs=tuple(runs)), why)
    return DTensor(Local(target, x._node.world, pick, (node,), {"layout": target, "picks": picks, "fill": fill}, located=True))


def pick(coord: Coord, local: Array, layout: Layout, picks: Mapping[int, Sequence[Stretches]], fill: Any = None) -> Array:
    """The stretches of each dim, out of what the rank holds; `fill` is placed as the layout places a value."""
    op = neutral_op(layout, coord) if layout.partial_axes else None
    value = fill if op is None else reduction(op).neutral(layout.dtype)
    at = layout.part_index(coord)
    source = local
    for d, parts in picks.items():
        local = _along(local, d, parts[at[d]], value)
    # A view would keep the whole source in memory.
    return local.copy() if local.base is not None and 2 * local.nbytes < source.nbytes else local


def _along(local: Array, d: int, stretches: Stretches, value: Any) -> Array:
    lead = (slice(None),) * d
    pieces = []
    for start, step, count in stretches:
        if start < 0:
            shape = (*local.shape[:d], count, *local.shape[d + 1 :])
            pieces.append(np.full_like(local, value, shape=shape, order="C"))
        elif step == 0:
            pieces.append(np.repeat(local[(*lead, slice(start, start + 1))], count, axis=d))
        elif step > 0:
            pieces.append(local[(*lead, slice(start, start + count))])
        else:
            stop = start - count
            pieces.append(local[(*lead, slice(start, None if stop < 0 else stop, -1))])
    if not pieces:
        return local[(*lead, slice(0, 0))]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=d)
