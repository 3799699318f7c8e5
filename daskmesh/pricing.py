"""The price of a redistribution: its bytes if all parts are even, in microseconds, so that many layouts can be compared.

A plan gives the true figure, uneven parts and all; it is made for the layouts that were chosen.
"""

from __future__ import annotations

import itertools
from functools import lru_cache

from daskmesh.layout import Layout
from daskmesh.placement import Partial, Placement, ReduceType, Shard, reduction

__all__ = ["estimated_bytes"]

_TWO_STAGE_BYTES = 2**20
_COORDINATE_0 = frozenset(t.value for t in ReduceType if not reduction(t.value).copies)


@lru_cache(16384)
def estimated_bytes(source: Layout, target: tuple[Placement, ...]) -> float:
    """Bytes that move when `source` takes the placements `target` on its mesh.

    Examples
    --------
    >>> import daskmesh as dm
    >>> from daskmesh.layout import make_layout
    >>> from daskmesh.pricing import estimated_bytes
    >>> estimated_bytes(make_layout(dm.init_mesh(4, ["x"]), [dm.Shard(0)], (8, 8), "f8"), (dm.Shard(1),))
    384.0
    """
    shape, placed = source.mesh.shape, source.placements
    if target == placed or not source.nbytes:
        return 0.0
    folded = _folded(source, target) if source.partial_axes else []
    terms = 1
    for m in folded:
        terms *= shape[m]
    local, want, held = _fractions(source, target)
    total = terms * want - held
    if folded and local * source.nbytes > _TWO_STAGE_BYTES:
        total = min(total, 2 * want * (1 - 1 / terms))
    for m, p in enumerate(target):
        if isinstance(p, Partial) and p.op in _COORDINATE_0 and (m in folded or p != placed[m]):
            total /= shape[m]
    return source.mesh.size * source.nbytes * total


def _fractions(source: Layout, target: tuple[Placement, ...]) -> tuple[float, float, float]:
    """Of the whole array, the share that a rank holds, the share that it needs, and, on average, the share common to both.

    Mesh dims that cut a tensor dim alike, outermost first, cut the same parts; the others are independent.
    """
    shape = source.mesh.shape
    local = want = common = 1.0
    aims: dict[int, list[int]] = {}
    for m, p in enumerate(target):
        if isinstance(p, Shard):
            want /= shape[m]
            aims.setdefault(p.dim, []).append(m)
    for d, axes in enumerate(source.shard_axes):
        for m in axes:
            local /= shape[m]
        alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(axes, aims.get(d, ()), strict=False))
        for m, _ in alike:
            common *= shape[m]
    return local, want, common * local * want


def _folded(source: Layout, target: tuple[Placement, ...]) -> list[int]:
    """The mesh dims whose terms are reduced: also a Partial that stays, where a later one of another kind goes."""
    placed = source.placements
    folded = [m for m in source.partial_axes if placed[m] != target[m]]
    stuck = [m for m in source.partial_axes if any(d > m and placed[d] != placed[m] for d in folded)]
    return sorted({*folded, *stuck})


_COORDINATE_0 = frozenset(t.value for t in ReduceType if not reduction(t.value).copies)
