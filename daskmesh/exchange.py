"""Exchanges: a plan being carried out as pinned tasks and one-sided loads.

For every stage, one *expose* task per source rank puts its block into the store of its worker and returns a ticket; one
*assemble* task per target rank depends on just the tickets it needs and loads the views straight into its result::

    x 0 --> expose 0 ---.   .---> assemble 0      tickets travel, never blocks;
                         \\ /                      a rank's own block comes by a plain dependency
    x 1 --> expose 1 ---' ' '---> assemble 1

Where ranks have many peers, one *directory* task collects the tickets and the assembles depend on it alone: 2 P edges, not P^2.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
from dask._task_spec import List, TaskRef
from dask.base import tokenize
from distributed import Reschedule, get_worker
from distributed.utils import sync

from daskmesh import config
from daskmesh.graph import Layer, Mask, Node, block_key, block_of, local_of
from daskmesh.layout import Box, Coord, Layout
from daskmesh.placement import Partial, reduction
from daskmesh.plan import Load, Plan, Stage
from daskmesh.recycling import empty
from daskmesh.store import Ticket, TicketLost, expose
from daskmesh.tasks import DirectoryTask, RankTask, TicketTask
from daskmesh.transport import load as load_view
from daskmesh.transport import load_all

__all__ = ["Exchange", "Words", "exchanged", "expose_layer", "reschedule"]

MANY_PEERS = 64
TILE_BYTES = 4 * 2**20
_RETRY_PAUSE = 0.05  # before a task that met a dead ticket is scheduled again: the scheduler learns of a loss within that order

Tasks = dict[tuple[Any, ...], RankTask]
Words = str | Callable[[], str]  # a callable where words cost more than recording does: they are made when someone asks


class Exchange(Node):
    """One stage of a plan over the blocks of another node."""

    __slots__ = ("source", "stage", "why")

    def __init__(self, source: Node, stage: Stage, reason: Words = "") -> None:
        super().__init__(stage.target, source.world)
        self.source = source.as_boundary()
        self.stage = stage if stage.made is None else replace(stage, made=None)  # others may read what this plan does not
        self.why = reason

    @property
    def reason(self) -> str:
        """Why it moves that."""
        return self.why if isinstance(self.why, str) else self.why()

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (self.stage,)

    def parents(self) -> Sequence[Node]:
        return (self.source,)

    def moves(self, made: Mask) -> tuple[Stage, ...]:
        return (self.stage.making(made),)

    def needs(self, made: Mask) -> Iterator[tuple[Node, Mask]]:
        stage = self.stage
        needed = stage.needs(made)
        if len(needed) > MANY_PEERS and not needed.all():
            others = np.array([stage.reach(c) - (stage.own(c) is not None) for c in stage.target.coords()])
            if others.max() > MANY_PEERS and (others[made] > 0).any():
                needed = np.ones_like(needed)  # the directory is complete
        yield self.source, needed

    def _lower(self) -> Layer:
        # As a task carries it: without what was worked out for the plan.
        source, stage = self.source, replace(self.stage)
        name = "reshard-" + tokenize(source.name, stage)
        tickets, tasks = expose_layer(source)
        reach = max((stage.reach(c) - (stage.own(c) is not None) for c in stage.target.coords()), default=0)
        many = reach > MANY_PEERS
        extra: dict[str, tuple[Tasks, frozenset[str]]] = {tickets: (tasks, frozenset({source.name}))}
        reads = {tickets, source.name}
        if many:
            directory = "directory-" + tokenize(tickets)
            extra[directory] = (_directory(directory, tickets, source), frozenset({tickets}))
            reads.add(directory)
        layer: Tasks = {}
        for coord in stage.target.coords():
            own = stage.own(coord)
            held = TaskRef(block_key(source, own)) if own is not None else None
            claims: Any = None
            if many and stage.reach(coord) > (own is not None):
                claims = TaskRef((directory,))
            elif others := [c for c in stage.sources(coord) if c != own]:
                claims = List(*(TaskRef((tickets, *source.layout.block_index(c))) for c in others))
            key = (name, *stage.target.block_index(coord))
            rank = stage.target.mesh.rank_at(coord)
            layer[key] = RankTask(key, assemble, stage, coord, held, claims, world=self.world, rank=rank)
        return Layer(name, layer, (source,), extra, frozenset(reads))


def exchanged(source: Node, plan: Plan, reason: Words = "") -> Node:
    """The node that carries out all stages of a plan."""
    for stage in plan.stages:
        source = Exchange(source, stage, reason or plan.reason)
    return source


def expose_layer(source: Node) -> tuple[str, Tasks]:
    """Expose tasks of a node, named by the node alone, so that all exchanges of it share one store entry per rank."""
    name = "expose-" + source.name
    tasks: Tasks = {}
    for coord in source.layout.coords():
        key = (name, *source.layout.block_index(coord))
        ref = TaskRef(block_key(source, coord))
        tasks[key] = TicketTask(key, expose, ref, world=source.world, rank=source.layout.mesh.rank_at(coord))
    return name, tasks


def _directory(name: str, tickets: str, source: Node) -> Tasks:
    layout = source.layout
    refs = List(*(TaskRef((tickets, *layout.block_index(c))) for c in layout.coords()))
    rank = layout.mesh.process_ids[0]
    return {(name,): DirectoryTask((name,), _collected, layout, refs, world=source.world, rank=rank)}


def _collected(layout: Layout, tickets: Sequence[Ticket]) -> dict[Coord, Ticket]:
    return dict(zip(layout.coords(), tickets, strict=True))


def stage_sources(stage: Stage, coord: Coord) -> list[Coord]:
    """Source coordinates that the target block at `coord` loads from, in order of first use."""
    return list(stage.sources(coord))


def assemble(stage: Stage, coord: Coord, own: Any, tickets: Sequence[Ticket] | dict[Coord, Ticket] | None) -> Any:
    """Build the target block at `coord`: load the views that it needs, folding terms where the source is Partial.

    Parameters
    ----------
    own : array or None
        The block that this rank itself holds of the source, if it is needed.
    tickets : sequence, mapping or None
        Claims on the other blocks that are needed, in order of use; or on all, by coordinate.

    Raises
    ------
    distributed.Reschedule
        A ticket is dead: its worker is lost, and the block is being made again.
    """
    reader = _Reader(stage, coord, own, tickets)
    target = stage.target
    out = reader.empty(target.local_shape(coord))
    op = stage.neutral_op(coord)
    try:
        if op is not None:
            out[...] = reduction(op).neutral(target.dtype)
        elif not stage.folded:
            reader.read([(load, out[(*load.dst, ...)]) for _, (load,) in stage.regions(coord)])
        else:
            for dst, loads in stage.regions(coord):
                for inner in _tiles(dst, target.dtype.itemsize):
                    out[inner] = reader.fold([_cut(load, inner) for load in loads])
    except TicketLost:
        reschedule(reader.tickets.values())
    return block_of(out, target, coord)


def reschedule(tickets: Iterable[Ticket]) -> NoReturn:
    """End the running task, which met a void ticket, so that it runs again once the ticket has been made anew.

    Parameters
    ----------
    tickets : iterable of Ticket
        The tickets that the task read. If the scheduler does not know by now that one is void, it is told.

    Raises
    ------
    distributed.Reschedule
        Always.
    """
    time.sleep(_RETRY_PAUSE)
    worker = get_worker()
    task = worker.state.tasks.get(worker.get_current_task())
    if task is not None and task.state in ("executing", "long-running"):  # else cancelled: the scheduler knows
        for ticket in tickets:
            try:
                load_view(ticket, [slice(0, min(n, 1)) for n in ticket.shape])
            except TicketLost:
                sync(worker.loop, worker.scheduler.daskmesh_ticket_lost, key=ticket.key, address=ticket.address)
                break
    raise Reschedule


class _Reader:
    """Where the views of one assemble task come from."""

    def __init__(self, stage: Stage, coord: Coord, own: Any, tickets: Any) -> None:
        self.stage = stage
        layout = stage.source
        self.own: Any = None if own is None else local_of(own, layout)
        self.rank = stage.target.mesh.rank_at(coord)
        self.lead: tuple[int | slice, ...] = (0,) * layout.lead
        mine = stage.own(coord)
        others = [c for c in stage.sources(coord) if c != mine]
        if isinstance(tickets, dict):
            self.tickets: dict[Coord, Ticket] = {c: tickets[c] for c in others}
        else:
            self.tickets = dict(zip(others, tickets or (), strict=True))

    def empty(self, shape: tuple[int, ...]) -> Any:
        """A fresh array, of the kind of this rank's own block."""
        dtype = self.stage.source.dtype
        if self.own is None or isinstance(self.own, np.ndarray):
            return empty(shape, dtype)
        return np.empty_like(self.own, shape=shape, dtype=dtype, order="C")

    def read(self, wanted: Sequence[tuple[Load, Any]]) -> None:
        """Load views into arrays, many at once."""
        jobs: list[tuple[Ticket, tuple[int | slice, ...], Any]] = []
        for load, out in wanted:
            if load.rank == self.rank:
                out[...] = self.own[load.src]
            else:
                jobs.append((self.tickets[load.coord], (*self.lead, *load.src), out))
        if jobs:
            load_all(jobs)

    def fold(self, loads: Sequence[Load]) -> Any:
        """The value of one tile from its terms, loaded in batches and folded in order."""
        layout, folded = self.stage.source, self.stage.folded
        terms = self._terms(loads)

        def level(axes: tuple[int, ...]) -> Any:
            if not axes:
                return next(terms)
            p, n = layout.placements[axes[-1]], layout.mesh.shape[axes[-1]]
            if not isinstance(p, Partial):
                raise TypeError(f"mesh dim {axes[-1]} of {layout!r} is folded but not Partial")
            return reduction(p.op).fold((level(axes[:-1]) for _ in range(n)), n)

        return level(folded)

    def _terms(self, loads: Sequence[Load]) -> Iterator[Any]:
        shape = tuple(s.stop - s.start for s in loads[0].src)
        each = max(1, math.prod(shape) * self.stage.source.dtype.itemsize)
        batch = max(1, min(len(loads), config.nbytes("max-inflight-bytes") // each))
        for i in range(0, len(loads), batch):
            chunk = loads[i : i + batch]
            arrays = [self.empty(shape) for _ in chunk]
            self.read(list(zip(chunk, arrays, strict=True)))
            yield from arrays


def _tiles(box: Box, itemsize: int) -> Iterator[Box]:
    """Cut a box along its first dims into tiles of at most `TILE_BYTES`, so that terms in flight stay small."""
    size = math.prod(s.stop - s.start for s in box) * itemsize
    for d, s in enumerate(box):
        n = s.stop - s.start
        if size <= TILE_BYTES or n == 0:
            break
        if n > 1:
            step = max(1, n * TILE_BYTES // size)
            for start in range(s.start, s.stop, step):
                part = slice(start, min(start + step, s.stop))
                yield from _tiles((*box[:d], part, *box[d + 1 :]), itemsize)
            return
    yield box


def _cut(load: Load, inner: Box) -> Load:
    """The load of a tile: `inner` is a box within ``load.dst``."""
    src = tuple(
        slice(s.start + i.start - d.start, s.start + i.stop - d.start)
        for s, d, i in zip(load.src, load.dst, inner, strict=True)
    )
    return Load(load.rank, load.coord, src, inner)
