"""Plans: a redistribution as view loads, known in bytes before anything runs.

Every pair of layouts is served by one construction, box intersection. The rank at target coordinate q needs its target
box. Along every tensor dim it meets a run of source parts; the product of these runs tiles the box, one view each::

    mesh (2,) "x", shape (4, 4)          rank 0 target          loads of rank 0
    [Shard(0)] -> [Shard(1)]             . . | | |              rank 0 [0:2, 0:2] -> [0:2, :]   its own, no bytes
        0 0 0 0        0 0 1 1           0 0                    rank 1 [0:2, 0:2] -> [2:4, :]   32 B of float64
        0 0 0 0   ->   0 0 1 1           0 0
        1 1 1 1        0 0 1 1           1 1
        1 1 1 1        0 0 1 1           1 1

Where the source is Replicate the rank reads the replica that shares its own coordinate (its own block, when that covers
the box). Where the source is Partial it reads all terms and folds them, mesh dim 0 first. A mesh dim that is the same
Partial on both sides keeps its terms apart, if its reduction commutes with those that are folded. Where the target is a
new Partial, coordinate 0 holds the value and the others the neutral element, or all hold a copy, as the reduction table
says.

Large terms that become replicas take two stages: reduce-scatter, then all-gather. The layout in the middle cuts one tensor
dim over the mesh dims that are folded, inside the parts that there are already, so that each element is folded once.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from daskmesh.draw import plan_html
from daskmesh.layout import Box, Coord, Layout, split_sizes
from daskmesh.mesh import ProcessMesh
from daskmesh.pen import format_bytes
from daskmesh.placement import Partial, Replicate, Shard, reduction

__all__ = ["Load", "Plan", "Stage", "format_bytes", "make_plan", "meet", "neutral_op", "refuse_truth"]


@dataclass(frozen=True, slots=True)
class Load:
    """One view: `src` of the local array of rank `rank` (at `coord` of the source) goes to `dst` of the result."""

    rank: int
    coord: Coord
    src: Box
    dst: Box

    @property
    def size(self) -> int:
        """Elements of the view."""
        return math.prod(s.stop - s.start for s in self.dst)


@dataclass(frozen=True)
class Stage:
    """One exchange: every rank of `target` loads the views it needs of `source`.

    Where `reader` is the only stage that reads the target, blocks that it does not read are not made.
    """

    source: Layout
    target: Layout
    reader: Stage | None = None

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """Mesh dims whose terms stay apart: the same Partial on both sides."""
        source, target = self.source, self.target
        if source.mesh.shape != target.mesh.shape:
            return ()
        kept = [m for m in source.partial_axes if source.placements[m] == target.placements[m]]
        while True:
            folded = [d for d in source.partial_axes if d not in kept]
            bad = [m for m in kept if any(d > m and not self._commute(m, d) for d in folded)]
            if not bad:
                return tuple(kept)
            kept = [m for m in kept if m not in bad]

    def _commute(self, m: int, d: int) -> bool:
        """Whether folding mesh dim `d` before `m` gives the value that the order m, d defines."""
        ops = {_op(self.source, m), _op(self.source, d)}
        if self.source.dtype.kind in "fc" and ops <= {"sum", "avg"}:
            return True
        return len(ops) == 1 and "avg" not in ops  # integer averages truncate

    @cached_property
    def folded(self) -> tuple[int, ...]:
        """Mesh dims of the source whose terms are reduced, in the order of reduction."""
        return tuple(m for m in self.source.partial_axes if m not in self.kept)

    @cached_property
    def terms(self) -> int:
        """How many terms are folded for each element."""
        return math.prod(self.source.mesh.shape[m] for m in self.folded)

    def neutral_op(self, coord: Coord) -> str | None:
        """The reduction whose neutral element fills the target block at `coord`; None where it is loaded."""
        return neutral_op(self.target, coord, self.kept)

    def _base(self, rank: int, coord: Coord) -> list[int]:
        """The source coordinate that `rank` reads from, before parts and terms are chosen."""
        mesh = self.source.mesh
        if rank in mesh:
            base = list(mesh.coordinate(rank))
        else:  # spread the readers over the replicas
            at = self.target.mesh.process_ids.index(rank)
            base = [0] * mesh.ndim
            for m, p in enumerate(self.source.placements):
                if isinstance(p, Replicate):
                    at, base[m] = divmod(at, mesh.shape[m])
        for m in self.kept:
            base[m] = coord[m]
        return base

    def meets(self, coord: Coord) -> list[list[tuple[int, slice, slice]]]:
        """Per tensor dim, the source parts that the target block at `coord` meets: (part, slice in it, slice in the block)."""
        return [meet(o, b) for o, b in zip(self.source.offsets, self.target.box(coord), strict=True)]

    def regions(self, coord: Coord) -> Iterator[tuple[Box, tuple[Load, ...]]]:
        """The target block at `coord`, region by region: the box in the result and the loads of its terms, in fold order.

        The first folded mesh dim varies fastest.
        """
        if self.neutral_op(coord) is not None:
            return
        source, base = self.source, self._base(self.target.mesh.rank_at(coord), coord)
        for parts in itertools.product(*self.meets(coord)):
            at = list(base)
            for axes, (i, _, _) in zip(source.shard_axes, parts, strict=True):
                for m in reversed(axes):
                    i, at[m] = divmod(i, source.mesh.shape[m])
            loads, src, dst = [], tuple(p[1] for p in parts), tuple(p[2] for p in parts)
            for terms in itertools.product(*(range(source.mesh.shape[m]) for m in reversed(self.folded))):
                for m, t in zip(reversed(self.folded), terms, strict=True):
                    at[m] = t
                where = tuple(at)
                loads.append(Load(source.mesh.rank_at(where), where, src, dst))
            yield dst, tuple(loads)

    def loads(self, rank: int) -> tuple[Load, ...]:
        """All view loads of `rank`, its own block included; O(peers of that rank)."""
        if rank not in self.target.mesh:
            return ()
        return tuple(load for _, loads in self.regions(self.target.mesh.coordinate(rank)) for load in loads)

    def makes(self, coord: Coord) -> bool:
        """Whether the target block at `coord` is made."""
        return self.reader is None or bool(self.reader._read[self.target.block_index(coord)])

    @cached_property
    def _read(self) -> Any:
        """Which blocks of the source are read by any rank, over its block grid."""
        source, target = self.source, self.target
        read = np.zeros(source.grid, bool)
        for coord in target.coords():
            box = target.box(coord)
            if self.neutral_op(coord) is not None or any(b.start == b.stop for b in box):
                continue
            runs = (slice(bisect_right(o, b.start) - 1, bisect_left(o, b.stop)) for o, b in zip(source.offsets, box, strict=True))
            base = self._base(target.mesh.rank_at(coord), coord)
            lead = (slice(None) if m in self.folded else base[m] for m in source.lead_axes)
            read[(*lead, *runs)] = True
        return read

    @cached_property
    def received(self) -> dict[int, int]:
        """Bytes that each target rank loads from other ranks."""
        source, target = self.source, self.target
        coords = np.array(target.coords(), dtype=np.int64).reshape(-1, target.mesh.ndim)
        ranks, origin = target.mesh.process_ids, (0,) * source.mesh.ndim
        inside = np.array([r in source.mesh for r in ranks])
        there = np.array([source.mesh.coordinate(r) if r in source.mesh else origin for r in ranks])
        volume = np.full(len(coords), self.terms, dtype=np.int64)
        own = inside.astype(np.int64)
        for d in range(target.ndim):
            lo, hi = _bounds(target, d, coords)
            lo_own, hi_own = _bounds(source, d, there)
            volume *= hi - lo
            own *= np.maximum(np.minimum(hi, hi_own) - np.maximum(lo, lo_own), 0)
        for m in self.kept:
            own *= coords[:, m] == there[:, m]
        loaded = np.array([self.neutral_op(c) is None and self.makes(c) for c in target.coords()])
        bytes_ = (volume - own) * loaded * target.dtype.itemsize
        return dict(zip(target.mesh.process_ids, bytes_.tolist(), strict=True))

    @cached_property
    def total_bytes(self) -> int:
        """Bytes that move between ranks."""
        return sum(self.received.values())


@dataclass(frozen=True)
class Plan:
    """What a redistribution moves, before anything runs.

    Attributes
    ----------
    stages : tuple of Stage
        Carried out one after the other; usually one.
    reason : str
        Why it has this many stages.

    Examples
    --------
    >>> import daskmesh as dm
    >>> from daskmesh.layout import make_layout
    >>> from daskmesh.plan import make_plan
    >>> mesh = dm.init_mesh(2, ["x"])
    >>> a, b = (make_layout(mesh, [dm.Shard(d)], (4, 4), "f8") for d in (0, 1))
    >>> plan = make_plan(a, b)
    >>> plan.total_bytes, plan.received, plan.pairs
    (64, {0: 32, 1: 32}, {(1, 0): 32, (0, 1): 32})
    """

    source: Layout
    target: Layout
    stages: tuple[Stage, ...]
    reason: str

    @cached_property
    def received(self) -> dict[int, int]:
        """Bytes each rank receives from other ranks."""
        out = dict.fromkeys(self.target.mesh.process_ids, 0)
        for stage in self.stages:
            for rank, n in stage.received.items():
                out[rank] = out.get(rank, 0) + n
        return out

    @cached_property
    def total_bytes(self) -> int:
        """Bytes that move between ranks, over all stages."""
        return sum(s.total_bytes for s in self.stages)

    @cached_property
    def pairs(self) -> dict[tuple[int, int], int]:
        """Bytes by (source rank, target rank); built when asked for."""
        out: dict[tuple[int, int], int] = {}
        for stage in self.stages:
            for coord in filter(stage.makes, stage.target.coords()):
                rank = stage.target.mesh.rank_at(coord)
                for load in stage.loads(rank):
                    if load.rank != rank and load.size:
                        key = (load.rank, rank)
                        out[key] = out.get(key, 0) + load.size * stage.source.dtype.itemsize
        return out

    @property
    def text(self) -> str:
        """The plan in words and bytes."""
        return str(self)

    def __str__(self) -> str:
        busiest = max(self.received.values(), default=0)
        lines = [
            *self._route,
            f"moves {format_bytes(self.total_bytes)} in {len(self.stages)} stage{'s' * (len(self.stages) != 1)}, "
            f"at most {format_bytes(busiest)} to one rank ({self.reason})",
        ]
        shown = sorted((r, n) for r, n in self.received.items() if n)
        lines += [f"  rank {r} receives {format_bytes(n)}" for r, n in shown[:8]]
        if len(shown) > 8:
            lines.append(f"  ... and {len(shown) - 8} more ranks")
        return "\n".join(lines)

    @property
    def _route(self) -> list[str]:
        """What becomes what: one line for one array, one line for each move of several."""
        stages = self.stages
        if all(a.target == b.source for a, b in itertools.pairwise(stages)):
            return [_becomes(self.source, self.target)]
        return [f"{_becomes(s.source, s.target)}, {format_bytes(s.total_bytes)}" for s in stages]

    def _repr_html_(self) -> str:
        few = max(self.source.mesh.size, self.target.mesh.size) <= 16
        return plan_html(str(self).splitlines(), self.pairs if few else {})


@lru_cache(1024)
def make_plan(source: Layout, target: Layout, two_stage_bytes: int = 2**20) -> Plan:
    """Plan the way from one layout to another of the same global shape.

    Parameters
    ----------
    two_stage_bytes : int
        Where terms are reduced into replicas, local arrays larger than this go by reduce-scatter and all-gather.

    Raises
    ------
    ValueError
        The layouts have different shapes or dtypes.
    TypeError
        A value that is not bool would become Partial('any') or Partial('all').
    """
    if source.shape != target.shape or source.dtype != target.dtype:
        raise ValueError(
            f"a redistribution keeps shape and dtype: {source.shape} {source.dtype} cannot become "
            f"{target.shape} {target.dtype}"
        )
    direct = Stage(source, target)
    refuse_truth(target, direct.kept)
    if not direct.folded:
        return Plan(source, target, (direct,), "each rank loads the views it lacks")
    how = f"each rank loads the {direct.terms} terms of what it needs and folds them"
    held = max(math.prod(source.local_shape(c)) for c in source.coords()) * source.dtype.itemsize
    limit = f"two-stage-bytes {format_bytes(two_stage_bytes)}"
    if held <= two_stage_bytes:
        return Plan(source, target, (direct,), f"{how}: a rank holds {format_bytes(held)}, no more than {limit}")
    middle = _scattered(direct)
    last = None if middle is None else Stage(middle, target)
    stages = () if middle is None or last is None else (Stage(source, middle, last), last)
    total = sum(s.total_bytes for s in stages)
    replicas = any(isinstance(p, Replicate) for p in target.placements)
    if not stages or total > direct.total_bytes or (total == direct.total_bytes and not replicas):
        return Plan(source, target, (direct,), f"{how}: two stages would not move less")
    reason = (
        f"reduce-scatter, then all-gather: a rank holds {format_bytes(held)}, more than {limit}; "
        f"in one stage {format_bytes(direct.total_bytes)} would move"
    )
    return Plan(source, target, stages, reason)


def _scattered(stage: Stage) -> Layout | None:
    """The source of a stage with its folded mesh dims cutting one tensor dim, within the parts that there are.

    Best is a tensor dim that the target cuts over these mesh dims, and cut in the target's order, so that much of what a
    rank folds stays with it; else the longest. Mesh order is split order: another order is a transposed mesh. Terms that
    are kept apart pin the mesh dims to their places; None where that leaves no tensor dim to cut.
    """
    source, target, folded = stage.source, stage.target, stage.folded
    same = (source.mesh.shape, source.mesh.process_ids) == (target.mesh.shape, target.mesh.process_ids)
    in_place = [d for d, axes in enumerate(source.shard_axes) if all(m < min(folded) for m in axes)]
    dims = in_place if stage.kept else range(source.ndim)
    if not dims:
        return None

    def worth(d: int) -> tuple[bool, int]:
        longest = max(source.chunks[d])
        return same and longest >= stage.terms and any(m in folded for m in target.shard_axes[d]), longest

    dim = max(dims, key=worth)
    order = list(range(source.mesh.ndim))
    if not stage.kept:
        ahead = [m for m in folded if same and m in target.shard_axes[dim]]
        cuts = [*source.shard_axes[dim], *ahead, *(m for m in folded if m not in ahead)]
        if cuts != sorted(cuts):
            order = [m for m in order if m not in cuts] + cuts
    mesh = ProcessMesh(source.mesh.mesh.transpose(order), [source.mesh.dim_names[m] for m in order])
    parts = source.chunks[dim]
    for m in order:
        if m in folded:
            parts = tuple(itertools.chain.from_iterable(split_sizes(k, source.mesh.shape[m]) for k in parts))
    chunks = (*source.chunks[:dim], parts, *source.chunks[dim + 1 :])
    placements = tuple(Shard(dim) if m in folded else source.placements[m] for m in order)
    return Layout(mesh, placements, source.shape, source.dtype, chunks)


def _becomes(source: Layout, target: Layout) -> str:
    return f"{source.dtype} {source.shape}: {list(source.placements)} -> {list(target.placements)}"


def neutral_op(layout: Layout, coord: Coord, kept: tuple[int, ...] = ()) -> str | None:
    """Where a value is placed as `layout`: the reduction whose neutral element fills the block at `coord`, None for the value.

    Mesh dims in `kept` hold terms already. The lowest mesh dim decides, since placing goes from the last to the first.
    """
    off = [m for m in layout.partial_axes if coord[m] and not reduction(_op(layout, m)).copies]
    return _op(layout, off[0]) if any(m not in kept for m in off) else None


def refuse_truth(layout: Layout, kept: tuple[int, ...] = ()) -> None:
    """Raise TypeError where a value that is not bool would be placed as Partial('any') or Partial('all')."""
    for m in layout.partial_axes:
        if m not in kept and _op(layout, m) in ("any", "all") and layout.dtype != np.bool_:
            raise TypeError(
                f"cannot place {layout.dtype} values as {layout.placements[m]!r} on mesh dim {layout.mesh.dim_names[m]!r}: "
                f"it would change them to 0 and 1; place x != 0 instead"
            )


def _op(layout: Layout, m: int) -> str:
    p = layout.placements[m]
    if not isinstance(p, Partial):
        raise TypeError(f"mesh dim {m} of {layout!r} is not Partial")
    return p.op


def meet(offsets: tuple[int, ...], box: slice) -> list[tuple[int, slice, slice]]:
    """The parts that meet a box along one dim: (part, slice in the part, slice in the box)."""
    lo, hi = box.start, box.stop
    out = []
    i = max(bisect_right(offsets, lo) - 1, 0)
    while i < len(offsets) - 1 and offsets[i] < hi:
        start, stop = max(lo, offsets[i]), min(hi, offsets[i + 1])
        if start < stop:
            out.append((i, slice(start - offsets[i], stop - offsets[i]), slice(start - lo, stop - lo)))
        i += 1
    return out


def _bounds(layout: Layout, d: int, coords: Any) -> tuple[Any, Any]:
    """Start and stop along tensor dim `d` of the box at every coordinate."""
    part = np.zeros(len(coords), dtype=np.int64)
    for m in layout.shard_axes[d]:
        part = part * layout.mesh.shape[m] + coords[:, m]
    offsets = np.array(layout.offsets[d], dtype=np.int64)
    return offsets[part], offsets[part + 1]
