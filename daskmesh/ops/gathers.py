"""What manipulation and indexing are made of: stretches of a dim, dropped dims, plain operands in a given layout.

`regathered` is the one way by which slices, flips, rolls, tiles and padding come about (see `daskmesh.regather`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

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
    "as_operand", "dropped", "fillable", "laid_out", "placed", "rearranged", "recut", "refuse_plain", "regathered", "renumbered",
    "split_over",
]  # fmt: skip

Array = Any
Stretches = tuple[Stretch, ...]
_TRUTH = ("any", "all")
_FEW = 64  # stretches whose way is remembered
_EMBED_SIZE = 2**13  # elements of a plain operand that travel with the program, instead of as an array of their own


def as_operand(x: Any) -> Any:
    """A DTensor as it is, anything else as a NumPy array (arrays on a device stay there)."""
    return x if isinstance(x, DTensor) or (hasattr(x, "__array_function__") and hasattr(x, "dtype")) else np.asarray(x)


def refuse_plain(x: Any, name: str) -> None:
    """Raise TypeError where a function is to work on a plain array, and only another argument is a DTensor."""
    if not isinstance(x, DTensor):
        raise TypeError(
            f"np.{name}: the array is a {type(x).__name__}, another argument is a DTensor; place the array as well, "
            f"dm.shard_tensor(x, mesh, placements), or gather the other with np.asarray(x)"
        )


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
    if not x.layout.partial_axes or x.dtype == np.bool_ or not any(isinstance(p, Partial) and p.op in _TRUTH for p in placements):
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
    return Local(target, world, _part, (x.copy(), target), located=True)  # the caller may go on to write into the array


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
    middle, how, target = _without(x.layout, tuple(dims))
    node = x._node if middle is None else moved(x._node, middle, f"{what}: what one rank holds is {how}")
    return DTensor(Local(target, node.world, _squeezed, (node,), {"dims": tuple(dims)}))


@lru_cache(1024)
def _without(layout: Layout, dims: tuple[int, ...]) -> tuple[Layout | None, str, Layout]:
    """The layout in which none of some dims of size 1 is cut, if one is, what happens to them, and the layout without them."""
    kept = [d for d in range(layout.ndim) if d not in dims]
    cuts = [m for m, p in enumerate(layout.placements) if isinstance(p, Shard) and p.dim in dims]
    middle: Layout | None = None
    how = ""
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
        middle = layout = laid_out(layout, placements, tuple(chunks))
    places = {d: i for i, d in enumerate(kept)}
    return middle, how, laid_out(layout, renumbered(layout.placements, places), tuple(layout.chunks[d] for d in kept))


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
    given = tuple((d, tuple(stretches)) for d, stretches in maps.items())
    few = sum(len(stretches) for _, stretches in given) <= _FEW
    way = (_way if few else _way.__wrapped__)(x.layout, given)
    node, world = x._node, x._node.world
    if way.here is not None:
        target, picks = way.here
        node = Local(target, world, pick, (node,), {"layout": target, "picks": picks, "fill": fill}, located=True)
    if way.stage is not None and way.there is not None:
        target, picks = way.there
        refuse_beyond_memory(way.share, lambda: f"{why or 're-gathering'} {x.shape} {x.dtype}")
        loaded = Exchange(node, way.stage, why)
        node = Local(target, world, pick, (loaded,), {"layout": target, "picks": picks, "fill": fill}, located=True)
    return DTensor(node)


_Picks = tuple[Layout, dict[int, tuple[Stretches, ...]]]


class _Way(NamedTuple):
    """How a result of stretches comes about.

    Attributes
    ----------
    here : layout and picks, or None
        What every rank picks of its own part.
    stage, there : Regather, layout and picks, or None
        What is loaded then, and picked of that.
    share : int
        Bytes that a rank holds of the result of `there`.
    """

    here: _Picks | None
    stage: Regather | None = None
    there: _Picks | None = None
    share: int = 0


@lru_cache(1024)
def _way(layout: Layout, maps: tuple[tuple[int, Stretches], ...]) -> _Way:
    given = {d: tuple(s for s in stretches if s.size) for d, stretches in maps}
    moving = {d: s for d, s in given.items() if layout.shard_axes[d] and not ascending(s)}
    still = {d: s for d, s in given.items() if d not in moving and s != (Stretch(0, 1, layout.shape[d]),)}
    here = _picks_here(layout, still) if still else None
    return _loaded(layout if here is None else here[0], moving, here) if moving else _Way(here)


def _picks_here(layout: Layout, maps: Mapping[int, Stretches]) -> _Picks:
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
    return recut(layout, sizes), picks


def _loaded(layout: Layout, maps: Mapping[int, Stretches], here: _Picks | None) -> _Way:
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
    return _Way(here, Regather(layout, middle, runs=tuple(runs)), (target, picks), share)


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
