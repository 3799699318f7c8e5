"""Contractions whose operands are streamed: while one panel is multiplied, the next is being loaded.

Where a contraction gathers its operands along the dim that is summed, no rank needs all of them at once. As in SUMMA, every rank
walks along that dim in panels, loads its rows of one operand and its columns of the other one-sidedly, and adds up::

    rank (i, j) of a 2-D mesh, a and b both [Shard(0), Shard(1)]

        panel of a: rows i        panel of b: columns j
              | k |                 ---- k ----
              |   |        x                         added to block (i, j) of the result
              | k |

Memory: the local blocks, the result, and two panels. Ranks start at different panels, so that they do not all ask the same rank;
replicas start at the same one, so that they agree to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from dask._task_spec import List, TaskRef
from dask.base import tokenize

from daskmesh import config
from daskmesh.exchange import Words, expose_layer, reschedule, stage_sources
from daskmesh.graph import Layer, Mask, Node, block_key, block_of, local_of
from daskmesh.layout import Coord, Layout
from daskmesh.placement import Shard
from daskmesh.plan import Load, Stage, sizes_of
from daskmesh.store import Ticket, TicketLost
from daskmesh.tasks import RankTask
from daskmesh.transport import load_all

__all__ = ["Streamed"]

Array = Any
_TEMPORARY_BYTES = 4 * 2**20  # of one product, before it is added to the result


@dataclass(frozen=True)
class Stream:
    """What every rank does: `func` of panels of both operands, summed.

    Attributes
    ----------
    stages : tuple of Stage
        Per operand the way from what its ranks hold to what the contraction needs; where nothing moves both ends are equal.
    dims : tuple of int
        Per operand the dim that is summed in panels.
    result : Layout
    """

    func: Callable[..., Array]
    kwargs: Mapping[str, Any]
    stages: tuple[Stage, Stage]
    dims: tuple[int, int]
    result: Layout


class Streamed(Node):
    """The contraction of two nodes, their panels loaded while others are multiplied."""

    __slots__ = ("operands", "stream", "why")

    def __init__(self, operands: tuple[Node, Node], stream: Stream, reason: Words) -> None:
        super().__init__(stream.result, operands[0].world)
        self.operands = (operands[0].as_boundary(), operands[1].as_boundary())
        self.stream = stream
        self.why = reason

    @property
    def reason(self) -> str:
        """Why it moves that."""
        return self.why if isinstance(self.why, str) else self.why()

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The redistributions that the streams add up to."""
        return tuple(s for s in self.stream.stages if s.source != s.target)

    def moves(self, made: Mask) -> tuple[Stage, ...]:
        loading = made & (sizes_of(self.layout) > 0)  # for an empty block nothing is multiplied
        return tuple(s.making(loading) for s in self.stages)

    def parents(self) -> Sequence[Node]:
        return self.operands

    def needs(self, made: Mask) -> Iterator[tuple[Node, Mask]]:
        for node, stage in zip(self.operands, self.stream.stages, strict=True):
            yield node, made if stage.source == stage.target else stage.needs(made)

    def _lower(self) -> Layer:
        stream, layout = self.stream, self.layout
        name = f"{getattr(stream.func, '__name__', 'contract')}-{tokenize(stream, [x.name for x in self.operands])}"
        extra: dict[str, tuple[Mapping[Any, Any], frozenset[str]]] = {}
        tickets = []
        for node, stage in zip(self.operands, stream.stages, strict=True):
            exposed, tasks = expose_layer(node)
            tickets.append(exposed)
            if stage.source != stage.target:
                extra[exposed] = (tasks, frozenset({node.name}))
        layer = {}
        for coord in layout.coords():
            rank = layout.mesh.rank_at(coord)
            given = [self._given(k, coord, rank, tickets[k]) for k in (0, 1)]
            key = (name, *layout.block_index(coord))
            args = (stream, coord, *(x for pair in given for x in pair))
            layer[key] = RankTask(key, contract, *args, world=self.world, rank=rank)
        reads = frozenset({*extra, *(x.name for x in self.operands)})
        return Layer(name, layer, self.operands, extra, reads)

    def _given(self, k: int, coord: Coord, rank: int, tickets: str) -> tuple[Any, Any]:
        """The rank's own block of an operand, and tickets for those of others that it reads."""
        node, stage = self.operands[k], self.stream.stages[k]
        if stage.source == stage.target:
            return TaskRef(block_key(node, coord)), None
        own, others = _sources(stage, coord, rank)
        held = TaskRef(block_key(node, own)) if own is not None else None
        return held, List(*(TaskRef((tickets, *stage.source.block_index(c))) for c in others)) if others else None


def _sources(stage: Stage, coord: Coord, rank: int) -> tuple[Coord | None, list[Coord]]:
    every = stage_sources(stage, coord)
    own = next((c for c in every if stage.source.mesh.rank_at(c) == rank), None)
    return own, [c for c in every if c != own]


class _Operand:
    """Where the panels of one operand come from at one rank."""

    def __init__(self, stage: Stage, dim: int, coord: Coord, own: Any, tickets: Sequence[Ticket] | None) -> None:
        self.stage, self.dim = stage, dim
        self.shape = stage.target.local_shape(coord)
        self.rank = stage.target.mesh.rank_at(coord)
        self.own: Any = None if own is None else local_of(own, stage.source)
        self.moves = stage.source != stage.target
        self.tickets: dict[Coord, Ticket] = {}
        self.loads: list[Load] = []
        self.buffers: dict[int, Any] = {}
        if self.moves:
            self.tickets = dict(zip(_sources(stage, coord, self.rank)[1], tickets or (), strict=True))
            self.loads = [load for _, (load,) in stage.regions(coord)]

    @property
    def row_bytes(self) -> int:
        """Bytes of a panel of width 1; none where the panels are views."""
        if not self.moves:
            return 0
        return math.prod(n for d, n in enumerate(self.shape) if d != self.dim) * self.stage.target.dtype.itemsize

    def panel(self, start: int, stop: int, turn: int) -> Array:
        """The part from `start` to `stop` of the summed dim, loaded into one of two buffers."""
        span = tuple(slice(start, stop) if d == self.dim else slice(None) for d in range(len(self.shape)))
        if not self.moves:
            return self.own[span]
        shape = tuple(stop - start if d == self.dim else n for d, n in enumerate(self.shape))
        out = self._buffer(turn, shape)
        jobs: list[tuple[Ticket, Sequence[int | slice], Any]] = []
        lead = (0,) * self.stage.source.lead
        for load in self.loads:
            at = load.dst[self.dim]
            low, high = max(at.start, start), min(at.stop, stop)
            if low >= high:
                continue
            shift = load.src[self.dim].start - at.start
            src = _replaced(load.src, self.dim, slice(low + shift, high + shift))
            dst = _replaced(load.dst, self.dim, slice(low - start, high - start))
            if load.rank == self.rank:
                out[dst] = self.own[src]
            else:
                jobs.append((self.tickets[load.coord], (*lead, *src), out[dst]))
        if jobs:
            load_all(jobs)
        return out

    def _buffer(self, turn: int, shape: tuple[int, ...]) -> Array:
        held = self.buffers.get(turn)
        if held is None or held.shape != shape:
            dtype = self.stage.target.dtype
            like = self.own
            held = np.empty(shape, dtype) if like is None else np.empty_like(like, shape=shape, dtype=dtype, order="C")
            self.buffers[turn] = held
        return held


def _replaced(box: tuple[slice, ...], d: int, s: slice) -> tuple[slice, ...]:
    return (*box[:d], s, *box[d + 1 :])


def contract(
    stream: Stream, coord: Coord, own_a: Any, tickets_a: Any, own_b: Any, tickets_b: Any
) -> Array:
    """The block of the result at `coord`.

    Raises
    ------
    distributed.Reschedule
        A ticket is dead: its worker is lost, and the block is being made again.
    """
    a = _Operand(stream.stages[0], stream.dims[0], coord, own_a, tickets_a)
    b = _Operand(stream.stages[1], stream.dims[1], coord, own_b, tickets_b)
    try:
        out = _summed(stream, coord, a, b)
    except TicketLost:
        reschedule([*a.tickets.values(), *b.tickets.values()])
    return block_of(out, stream.result, coord)


def _summed(stream: Stream, coord: Coord, a: _Operand, b: _Operand) -> Array:
    like = a.own if a.own is not None else b.own
    shape, dtype = stream.result.local_shape(coord), stream.result.dtype
    out = np.zeros(shape, dtype) if like is None else np.zeros_like(like, shape=shape, dtype=dtype, order="C")
    panels = list(_panels(stream, coord, a, b)) if out.size else []
    with ThreadPoolExecutor(1) as pool:
        running: Future[None] | None = None
        for turn, (start, stop) in enumerate(panels):
            # Loads stay in the thread of the task, which its worker knows; the product goes to the other.
            pair = a.panel(start, stop, turn % 2), b.panel(start, stop, turn % 2)
            if running is not None:
                running.result()
            running = pool.submit(_add_product, stream, out, *pair)
        if running is not None:
            running.result()
    return out


def _panels(stream: Stream, coord: Coord, a: _Operand, b: _Operand) -> Iterator[tuple[int, int]]:
    """Intervals of the summed dim: as many as there are sources, more where they would be too large."""
    n = a.shape[a.dim]
    parts = max((len({load.dst[x.dim].start for load in x.loads}) for x in (a, b)), default=1)
    most = max(1, config.nbytes("max-inflight-bytes") // 2 // max(1, a.row_bytes + b.row_bytes))
    width = max(1, min(-(-n // max(1, parts)), most))
    count = -(-n // width)
    first = sum(coord[m] for m, p in enumerate(stream.result.placements) if isinstance(p, Shard))
    for i in range(count):
        start = (i + first) % count * width
        yield start, min(start + width, n)


def _add_product(stream: Stream, out: Array, a: Array, b: Array) -> None:
    """Add the product of two panels to the result, some rows at a time where rows of the one are rows of the other."""
    rows = out.shape[-2] if stream.func is np.matmul and a.ndim > 1 and b.ndim > 1 else 1
    step = max(1, rows * _TEMPORARY_BYTES // max(1, out.nbytes)) if rows > 1 else 1
    if rows == 1 or step >= rows:
        np.add(out, stream.func(a, b, **stream.kwargs), out=out, casting="unsafe")
        return
    for i in range(0, rows, step):
        part = out[..., i : i + step, :]
        np.add(part, stream.func(a[..., i : i + step, :], b, **stream.kwargs), out=part, casting="unsafe")
