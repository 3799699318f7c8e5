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
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from daskmesh.draw import plan_html
from daskmesh.layout import Layout, split_sizes
from daskmesh.mesh import ProcessMesh
from daskmesh.pen import format_bytes
from daskmesh.placement import Replicate, Shard
from daskmesh.stage import Load, Stage, meet, neutral_op, refuse_truth, sizes_of

__all__ = ["Load", "Plan", "Stage", "format_bytes", "make_plan", "meet", "neutral_op", "refuse_truth", "sizes_of"]


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
    held = math.prod(map(max, source.chunks)) * source.dtype.itemsize
    limit = f"two-stage-bytes {format_bytes(two_stage_bytes)}"
    if held <= two_stage_bytes:
        return Plan(source, target, (direct,), f"{how}: a rank holds {format_bytes(held)}, no more than {limit}")
    middle = _scattered(direct)
    last = None if middle is None else Stage(middle, target)
    stages = () if middle is None or last is None else (_read_by(Stage(source, middle), last), last)
    total = sum(s.total_bytes for s in stages)
    replicas = any(isinstance(p, Replicate) for p in target.placements)
    if not stages or total > direct.total_bytes or (total == direct.total_bytes and not replicas):
        return Plan(source, target, (direct,), f"{how}: two stages would not move less")
    reason = (
        f"reduce-scatter, then all-gather: a rank holds {format_bytes(held)}, more than {limit}; "
        f"in one stage {format_bytes(direct.total_bytes)} would move"
    )
    return Plan(source, target, stages, reason)


def _read_by(stage: Stage, reader: Stage) -> Stage:
    """A stage whose target nobody reads but another stage."""
    return stage.making(reader.needs(np.ones(reader.target.mesh.size, bool)))


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
