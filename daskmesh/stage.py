"""A stage of a redistribution: which views every rank loads, and how many bytes that moves.

`daskmesh.plan` draws how a target block meets source blocks.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from daskmesh.layout import Box, Coord, Layout
from daskmesh.placement import Partial, Replicate, reduction

__all__ = ["Load", "Stage", "meet", "neutral_op", "refuse_truth"]


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

    def __dask_tokenize__(self) -> Any:
        # Dask's way with dataclasses pickles the class each time.
        return (type(self).__name__, *(getattr(self, name) for name in self.__dataclass_fields__))

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

    def parts(self, coord: Coord) -> list[Sequence[int]]:
        """Per tensor dim, the numbers of the source parts that the target block at `coord` meets, without their slices."""
        out: list[Sequence[int]] = []
        for offsets, solid, b in zip(self.source.offsets, self._solid, self.target.box(coord), strict=True):
            met = range(bisect_right(offsets, b.start) - 1, bisect_left(offsets, b.stop)) if b.start < b.stop else range(0)
            out.append(met if solid else [i for i in met if offsets[i] < offsets[i + 1]])
        return out

    @cached_property
    def _solid(self) -> tuple[bool, ...]:
        """Per tensor dim, whether no part of the source is empty."""
        return tuple(0 not in c for c in self.source.chunks)

    def sources(self, coord: Coord) -> Iterator[Coord]:
        """The source coordinates whose blocks the target block at `coord` needs."""
        if self.neutral_op(coord) is not None:
            return
        source, at = self.source, self._base(self.target.mesh.rank_at(coord), coord)
        for parts in itertools.product(*self.parts(coord)):
            for axes, i in zip(source.shard_axes, parts, strict=True):
                for m in reversed(axes):
                    i, at[m] = divmod(i, source.mesh.shape[m])
            for terms in itertools.product(*(range(source.mesh.shape[m]) for m in self.folded)):
                for m, t in zip(self.folded, terms, strict=True):
                    at[m] = t
                yield tuple(at)

    def reach(self, coord: Coord) -> int:
        """How many source blocks the target block at `coord` needs."""
        return 0 if self.neutral_op(coord) is not None else math.prod(map(len, self.parts(coord))) * self.terms

    def own(self, coord: Coord) -> Coord | None:
        """Where the rank of the target block at `coord` is in the source, if it needs the block that it holds there."""
        source, rank = self.source, self.target.mesh.rank_at(coord)
        if rank not in source.mesh or self.neutral_op(coord) is not None:
            return None
        there = source.mesh.coordinate(rank)
        met = zip(source.part_index(there), self.parts(coord), strict=True)
        return there if all(coord[m] == there[m] for m in self.kept) and all(i in parts for i, parts in met) else None

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
        return bool(self._made[np.ravel_multi_index(coord, self.target.mesh.shape)])

    # What follows is about all ranks at once, in arrays: row i is the target coordinate number i in mesh order.

    @cached_property
    def _coords(self) -> Any:
        """The target coordinates."""
        return np.array(self.target.coords(), dtype=np.int64).reshape(-1, self.target.mesh.ndim)

    @cached_property
    def _valued(self) -> Any:
        """Which target blocks are loaded, not filled with a neutral element."""
        layout, valued = self.target, np.ones(len(self._coords), bool)
        for m in layout.partial_axes:
            if m not in self.kept and not reduction(_op(layout, m)).copies:
                valued &= self._coords[:, m] == 0
        return valued

    @cached_property
    def _bases(self) -> Any:
        """`_base` of every rank."""
        mesh, ranks = self.source.mesh, self.target.mesh.process_ids
        at = np.arange(len(ranks))
        bases = np.zeros((len(ranks), mesh.ndim), dtype=np.int64)
        for m, p in enumerate(self.source.placements):
            if isinstance(p, Replicate):
                at, bases[:, m] = np.divmod(at, mesh.shape[m])
        for row, rank in enumerate(ranks):
            if rank in mesh:
                bases[row] = mesh.coordinate(rank)
        for m in self.kept:
            bases[:, m] = self._coords[:, m]
        return bases

    @cached_property
    def _read(self) -> Any:
        """Which blocks of the source are read by any rank, over its block grid."""
        source, wanted = self.source, self._valued
        leads = [m for m in source.lead_axes if m not in self.folded]
        columns = [self._bases[:, m] for m in leads]
        for d, offsets in enumerate(source.offsets):
            lo, hi = _bounds(self.target, d, self._coords)
            columns += [np.searchsorted(offsets, lo, "right") - 1, np.searchsorted(offsets, hi, "left")]
            wanted = wanted & (lo < hi)
        read = np.zeros(source.grid, bool)
        rows = np.stack(columns, axis=1)[wanted] if columns else np.zeros((int(wanted.any()), 0), np.int64)
        for row in np.unique(rows, axis=0).tolist() if columns else rows.tolist():
            base, runs = dict(zip(leads, row, strict=False)), row[len(leads) :]
            lead = (base.get(m, slice(None)) for m in source.lead_axes)
            read[(*lead, *map(slice, runs[::2], runs[1::2]))] = True
        return read

    @cached_property
    def _made(self) -> Any:
        """Which target blocks are made: what a subclass that leaves some out overrides."""
        if self.reader is None:
            return np.ones(len(self._coords), bool)
        target, coords = self.target, self._coords
        lead = (coords[:, m] for m in target.lead_axes)
        return self.reader._read[(*lead, *(_parts(target, d, coords) for d in range(target.ndim)))]

    @cached_property
    def received(self) -> dict[int, int]:
        """Bytes that each target rank loads from other ranks."""
        source, target, coords = self.source, self.target, self._coords
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
        bytes_ = (volume - own) * (self._valued & self._made) * target.dtype.itemsize
        return dict(zip(target.mesh.process_ids, bytes_.tolist(), strict=True))

    @cached_property
    def total_bytes(self) -> int:
        """Bytes that move between ranks."""
        return sum(self.received.values())


def neutral_op(layout: Layout, coord: Coord, kept: tuple[int, ...] = ()) -> str | None:
    """Where a value is placed as `layout`: the reduction whose neutral element fills the block at `coord`, None for the value.

    Mesh dims in `kept` hold terms already. The lowest mesh dim decides, since placing goes from the last to the first.
    """
    off = [m for m in layout.partial_axes if coord[m] and not reduction(_op(layout, m)).copies]
    return _op(layout, off[0]) if any(m not in kept for m in off) else None


def refuse_truth(layout: Layout, kept: tuple[int, ...] = (), call: str = "reshard") -> None:
    """Raise TypeError, in the name of `call`, where a value that is not bool would be placed as Partial('any') or ('all')."""
    for m in layout.partial_axes:
        if m not in kept and _op(layout, m) in ("any", "all") and layout.dtype != np.bool_:
            raise TypeError(
                f"{call}: cannot place {layout.dtype} values as {layout.placements[m]!r} on mesh dim "
                f"{layout.mesh.dim_names[m]!r} of size {layout.mesh.shape[m]}: it would change them to 0 and 1; "
                f"place x != 0 instead"
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


def _parts(layout: Layout, d: int, coords: Any) -> Any:
    """The part of tensor dim `d` that every coordinate holds."""
    part = np.zeros(len(coords), dtype=np.int64)
    for m in layout.shard_axes[d]:
        part = part * layout.mesh.shape[m] + coords[:, m]
    return part


def _bounds(layout: Layout, d: int, coords: Any) -> tuple[Any, Any]:
    """Start and stop along tensor dim `d` of the box at every coordinate."""
    part = _parts(layout, d, coords)
    offsets = np.array(layout.offsets[d], dtype=np.int64)
    return offsets[part], offsets[part + 1]
