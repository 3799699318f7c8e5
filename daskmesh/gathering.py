"""The global value from the blocks of ranks: terms folded, parts put together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from daskmesh.graph import local_of
from daskmesh.layout import Coord, Layout
from daskmesh.placement import reduction

__all__ = ["gather"]

Array = Any


def gather(blocks: Sequence[Array], layout: Layout) -> Array:
    """The global value from the blocks of one replica (or of all ranks), in mesh order: terms folded, parts put together."""
    coords = layout.primary()
    if len(blocks) != len(coords):
        every = dict(zip(layout.coords(), blocks, strict=True))
        blocks = [every[c] for c in coords]
    held = {c: local_of(b, layout) for c, b in zip(coords, blocks, strict=True)}
    out: Array = None
    for parts in _places(layout):
        box = layout.box(parts)
        value = _folded(held, layout, parts)
        if out is None:
            out = np.empty_like(value, shape=layout.shape, dtype=layout.dtype)
        out[box] = value
    return out


def _places(layout: Layout) -> Iterator[Coord]:
    """Coordinates with 0 along every mesh dim that is not Shard."""
    return (c for c in layout.coords() if not any(c[m] for m in layout.lead_axes))


def _folded(held: Mapping[Coord, Array], layout: Layout, coord: Coord) -> Array:
    """Reduce the terms of one part, mesh dim 0 first."""

    def level(axes: tuple[int, ...], at: Coord) -> Array:
        if not axes:
            return held[at].copy() if layout.partial_axes else held[at]
        m, op = axes[-1], layout.placements[axes[-1]].op  # type: ignore[union-attr]
        n = layout.mesh.shape[m]
        return reduction(op).fold((level(axes[:-1], (*at[:m], i, *at[m + 1 :])) for i in range(n)), n)

    return level(layout.partial_axes, coord)
