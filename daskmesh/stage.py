"""A stage of a redistribution: which views every rank loads, and how many bytes that moves.

`daskmesh.plan` draws how a target block meets source blocks.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from daskmesh.layout import Box, Coord, Layout
from daskmesh.placement import Partial, Replicate, reduction

__all__ = ["Load", "Stage", "coords_of", "meet", "neutral_op", "parts_of", "refuse_truth", "sizes_of"]


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

    Attributes
    ----------
    made : bytes, optional
        Which target blocks are made, in mesh order, where nobody reads the others; by default all are.
    """

    source: Layout
    target: Layout
    made: bytes | None = None

    def making(self, made: Any) -> Stage:
        """The same stage where just those target blocks are made that a mask over the coordinates, in mesh order, says."""
        flags = None if made.all() else made.tobytes()
        if flags == self.made:
            return self
        stage = replace(self, made=flags)
        stage.__dict__["_loaded"] = self._loaded  # which is most of the work
        return stage

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
        return self.made is None or bool(self.made[np.ravel_multi_index(coord, self.target.mesh.shape)])

    # What follows is about all ranks at once, in arrays: row i is the target coordinate number i in mesh order.

    @cached_property
    def _valued(self) -> Any:
        """Which target blocks are loaded, not filled with a neutral element."""
        layout, coords = self.target, coords_of(self.target)
        valued = np.ones(len(coords), bool)
        for m in layout.partial_axes:
            if m not in self.kept and not reduction(_op(layout, m)).copies:
                valued &= coords[:, m] == 0
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
            bases[:, m] = coords_of(self.target)[:, m]
        return bases

    def needs(self, made: Any) -> Any:
        """Which source blocks the target blocks in `made` need; both are masks over the coordinates in mesh order.

        Each of these target blocks needs a box of the source's block grid. The corners of all boxes are marked, and summed up.
        """
        source, mesh = self.source, self.source.mesh
        rows = np.flatnonzero(made & self._valued)
        held = coords_of(self.target)[rows]
        leads = [m for m in source.lead_axes if m not in self.folded]
        cuts = [d for d in range(source.ndim) if len(source.chunks[d]) > 1]
        # The first column is for layouts that have neither.
        columns: list[Any] = [np.zeros(len(rows), np.int64), *(self._bases[rows, m] for m in leads)]
        parts = [parts_of(self.target, d, held) for d in range(source.ndim)]
        for d in range(source.ndim):
            which, start, stop = self._runs_met(d, parts[d])
            columns, parts = [c[which] for c in columns], [p[which] for p in parts]
            columns += [start, stop] if d in cuts else []
        marks = np.zeros((1, *(mesh.shape[m] for m in leads), *(len(source.chunks[d]) + 1 for d in cuts)), np.int64)
        lead, ends = columns[: 1 + len(leads)], columns[1 + len(leads) :]
        for corner in itertools.product((0, 1), repeat=len(cuts)):
            at = (*lead, *(ends[2 * k + c] for k, c in enumerate(corner)))
            np.add.at(marks, at, (-1) ** sum(corner))
        for k in range(len(cuts)):
            np.cumsum(marks, axis=1 + len(leads) + k, out=marks)
        every = coords_of(source)
        where = [parts_of(source, d, every) for d in range(source.ndim)]
        needed = marks[(np.zeros(len(every), np.int64), *(every[:, m] for m in leads), *(where[d] for d in cuts))] > 0
        for d in cuts:  # empty parts in the middle of a run
            needed = needed & (np.array(source.chunks[d]) > 0)[where[d]]
        return needed

    def _runs_met(self, d: int, parts: Any) -> tuple[Any, Any, Any]:
        """The runs of source parts along tensor dim `d` that target parts meet: (place of the part in the array, start, stop)."""
        offsets, ends = np.array(self.source.offsets[d]), np.array(self.target.offsets[d])
        which = np.flatnonzero(ends[parts] < ends[parts + 1])
        met = parts[which]
        return which, np.searchsorted(offsets, ends[met], "right") - 1, np.searchsorted(offsets, ends[met + 1], "left")

    @cached_property
    def _loaded(self) -> Any:
        """Bytes that each target rank loads from other ranks, if its block is made."""
        source, target, coords = self.source, self.target, coords_of(self.target)
        ranks, origin = target.mesh.process_ids, (0,) * source.mesh.ndim
        inside = np.array([r in source.mesh for r in ranks])
        there = np.array([source.mesh.coordinate(r) if r in source.mesh else origin for r in ranks]).reshape(len(ranks), -1)
        own = inside.astype(np.int64)
        for d in range(target.ndim):
            own *= self._common(d, parts_of(target, d, coords), parts_of(source, d, there))
        for m in self.kept:
            own *= coords[:, m] == there[:, m]
        return (sizes_of(target) * self.terms - own) * self._valued * target.dtype.itemsize

    def _common(self, d: int, target: Any, source: Any) -> Any:
        """How many elements along tensor dim `d` target parts and source parts have in common, pair by pair."""
        ends, offsets = np.array(self.target.offsets[d]), np.array(self.source.offsets[d])
        start, stop = np.maximum(ends[target], offsets[source]), np.minimum(ends[target + 1], offsets[source + 1])
        return np.maximum(stop - start, 0)

    @cached_property
    def received(self) -> dict[int, int]:
        """Bytes that each target rank loads from other ranks."""
        loaded = self._loaded if self.made is None else self._loaded * np.frombuffer(self.made, bool)
        return dict(zip(self.target.mesh.process_ids, loaded.tolist(), strict=True))

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


@lru_cache(256)
def _coords(shape: Coord) -> Any:
    return np.indices(shape).reshape(len(shape), -1).T.copy()


def coords_of(layout: Layout) -> Any:
    """The coordinates of a layout in mesh order, one row each."""
    return _coords(layout.mesh.shape)


def parts_of(layout: Layout, d: int, coords: Any) -> Any:
    """The part of tensor dim `d` that every coordinate holds."""
    part = np.zeros(len(coords), dtype=np.int64)
    for m in layout.shard_axes[d]:
        part = part * layout.mesh.shape[m] + coords[:, m]
    return part


def sizes_of(layout: Layout) -> Any:
    """How many elements every coordinate holds, in mesh order."""
    coords = coords_of(layout)
    size = np.ones(len(coords), dtype=np.int64)
    for d, chunks in enumerate(layout.chunks):
        size *= np.array(chunks, dtype=np.int64)[parts_of(layout, d, coords)]
    return size
