"""Reshaping across the borders of blocks.

Dims that a reshape merges and splits form *groups*: least stretches of dims, before and after, of the same number of elements::

    (2, 3, 4, 5) -> (6, 20)       groups  (2, 3) -> (6,)    (4, 5) -> (20,)

Within a group, a part of the first dim is a run of the group's elements in row-major order. So the cuts of a group are brought to
its first dim, the group is flattened where it lies, its parts are shifted to the nearest whole rows of the result, and it is
split.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import Any, NamedTuple

from daskmesh.dtensor import DTensor
from daskmesh.graph import Local
from daskmesh.layout import Coord, Layout
from daskmesh.moves import moved, reduced
from daskmesh.ops.gathers import dropped, laid_out, renumbered, split_over
from daskmesh.placement import Shard

__all__ = ["reshaped"]

Array = Any
Shape = tuple[int, ...]


class Group(NamedTuple):
    """Dims that a reshape merges or splits: `old` become `new`, neither has dims of size 1."""

    old: tuple[int, ...]
    new: Shape


def groups(old: Shape, new: Shape) -> list[Group]:
    """The groups of a reshape between shapes without 0 and 1.

    Examples
    --------
    >>> from daskmesh.ops.reshaping import groups
    >>> groups((2, 3, 20), (6, 4, 5))
    [Group(old=(0, 1), new=(6,)), Group(old=(2,), new=(4, 5))]
    """
    out = []
    i = j = 0
    while i < len(old):
        a, b = i, j
        p, q = old[i], new[j]
        i, j = i + 1, j + 1
        while p != q:
            if p < q:
                p *= old[i]
                i += 1
            else:
                q *= new[j]
                j += 1
        out.append(Group(tuple(range(a, i)), new[b:j]))
    return out


def reshaped(x: DTensor, shape: Shape) -> DTensor:
    """`x` in another shape of the same size, in row-major order.

    **Communication**: none where the parts of the first dim of each group begin at whole rows of the result, and no other dim
    of a group is cut.
    """
    if shape == x.shape:
        return DTensor(x._node)
    if not x.size:
        return _empty(x, shape)
    x = dropped(x, tuple(d for d, n in enumerate(x.shape) if n == 1), "reshape")
    way = _way(x.layout, shape)
    node = moved(x._node, way.led, "reshape: a cut goes to the first of the dims that merge")
    if way.merged is not None and way.shifted is not None:
        node = Local(way.merged, node.world, _reshape, (node,), {"layout": way.merged}, located=True)
        node = moved(node, way.shifted, "reshape: parts are shifted to whole rows of the result")
    return DTensor(Local(way.result, node.world, _reshape, (node,), {"layout": way.result}, located=True))


class _Way(NamedTuple):
    """The layouts on the way of a reshape: `merged` and `shifted` only where parts do not begin at whole rows of the result."""

    led: Layout
    merged: Layout | None
    shifted: Layout | None
    result: Layout


@lru_cache(1024)
def _way(layout: Layout, shape: Shape) -> _Way:
    parts = groups(layout.shape, tuple(n for n in shape if n != 1))
    led = _led(layout, parts)
    merged, shifted = _aligned(led, parts)
    return _Way(led, merged, shifted, _split(shifted or led, parts, shape))


def _empty(x: DTensor, shape: Shape) -> DTensor:
    """No elements: the cuts go to the first dim that the result has."""
    cuts = [isinstance(p, Shard) for p in x.placements]
    placements = reduced(x.placements)
    if shape:
        placements = [Shard(0) if c else p for c, p in zip(cuts, placements, strict=True)]
    axes = [m for m, c in enumerate(cuts) if c] if shape else []
    chunks = tuple(split_over(n, axes if d == 0 else (), x.process_mesh) for d, n in enumerate(shape))
    layout = laid_out(x.layout, placements, chunks)
    return DTensor(Local(layout, x._node.world, _fresh, (x._node,), {"layout": layout}, located=True))


def _fresh(coord: Coord, local: Array, layout: Layout) -> Array:
    return local.reshape(-1)[:0].reshape(layout.local_shape(coord))


def _led(layout: Layout, parts: list[Group]) -> Layout:
    """The cuts of every group at its first dim."""
    placements, chunks = list(layout.placements), list(layout.chunks)
    for group in parts:
        first = group.old[0]
        if len(group.old) == 1 or not any(layout.shard_axes[d] for d in group.old[1:]):
            continue
        for m, p in enumerate(placements):
            if isinstance(p, Shard) and p.dim in group.old:
                placements[m] = Shard(first)
        axes = [m for m, p in enumerate(placements) if p == Shard(first)]
        chunks[first] = split_over(layout.shape[first], axes, layout.mesh)
        for d in group.old[1:]:
            chunks[d] = (layout.shape[d],)
    return laid_out(layout, placements, tuple(chunks))


def _aligned(layout: Layout, parts: list[Group]) -> tuple[Layout, Layout] | tuple[None, None]:
    """Every group flattened, and its parts shifted to whole rows of what it becomes; nothing where they are so."""
    flat, wanted = [], []
    for group in parts:
        inner = math.prod(layout.shape[d] for d in group.old[1:])
        sizes = tuple(k * inner for k in layout.chunks[group.old[0]])
        row = math.prod(group.new[1:])
        borders = [(2 * b + row) // (2 * row) * row for b in (0, *itertools.accumulate(sizes))]
        flat.append(sizes)
        wanted.append(tuple(b - a for a, b in itertools.pairwise(borders)) if len(sizes) > 1 else sizes)
    if flat == wanted:
        return None, None
    placements = renumbered(layout.placements, {g.old[0]: i for i, g in enumerate(parts)})
    return laid_out(layout, placements, tuple(flat)), laid_out(layout, placements, tuple(wanted))


def _split(layout: Layout, parts: list[Group], shape: Shape) -> Layout:
    """The layout of the result, from that of the groups, flattened or not yet."""
    flat = layout.ndim == len(parts) and any(len(g.old) > 1 for g in parts)
    firsts = [i if flat else g.old[0] for i, g in enumerate(parts)]
    solid = [d for d, n in enumerate(shape) if n != 1]
    chunks: list[Shape] = [(n,) for n in shape]
    places: dict[int, int] = {}
    at = 0
    for group, first in zip(parts, firsts, strict=True):
        d = solid[at]
        whole = math.prod(layout.shape[d] for d in (() if flat else group.old[1:]))
        row = math.prod(group.new[1:])
        chunks[d] = tuple(k * whole // row for k in layout.chunks[first])
        places[first] = d
        at += len(group.new)
    return laid_out(layout, renumbered(layout.placements, places), tuple(chunks))


def _reshape(coord: Coord, local: Array, layout: Layout) -> Array:
    return local.reshape(layout.local_shape(coord))
