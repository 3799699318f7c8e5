"""Parts with the elements beyond their ends that some local work needs: of windows, of a convolution."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from daskmesh.exchange import Exchange
from daskmesh.graph import Node
from daskmesh.layout import Layout
from daskmesh.ops.gathers import recut
from daskmesh.regather import Regather, Run

__all__ = ["begun", "reaching"]

Shape = tuple[int, ...]


def begun(layout: Layout, d: int, reach: int) -> Shape:
    """How many windows of ``reach + 1`` elements along dim `d` begin in each part."""
    end = layout.shape[d] - reach
    return tuple(max(0, min(b, end) - a) for a, b in itertools.pairwise(layout.offsets[d]))


def reaching(node: Node, dims: Mapping[int, int], why: str) -> Node:
    """Each part of some cut dims with so many elements more as the windows need that begin in it; none where none begins.

    **Communication**: each rank loads what it lacks.
    """
    layout = node.layout
    cut = {d: reach for d, reach in dims.items() if reach and layout.shard_axes[d]}
    if not cut:
        return node
    runs: list[tuple[tuple[Run, ...], ...] | None] = [None] * layout.ndim
    sizes: dict[int, Shape] = {}
    for d, reach in cut.items():
        starts, counts = layout.offsets[d][:-1], begun(layout, d, reach)
        runs[d] = tuple(((a, a + n + reach),) if n else () for a, n in zip(starts, counts, strict=True))
        sizes[d] = tuple(n + reach if n else 0 for n in counts)
    return Exchange(node, Regather(layout, recut(layout, sizes), runs=tuple(runs)), why)
