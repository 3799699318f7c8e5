"""Regions: one run of a function on all ranks of a mesh, each on its own local arrays.

A region that does not communicate and has one output is one pinned task per rank. With several outputs a *run* task per rank
returns them all, and an *out* task per rank and output picks one. A region whose ranks talk to each other has a gate between::

    x 0 --> run 0 --> ticket 0 ---------> out 0        whichever out is asked for, the gate asks for every
                              \\         /              rank's ticket, so all ranks run, once; without the gate
                               > gate --<               Dask would cull the ranks nobody asked for, and the
                              /         \\              others would wait for them
    x 1 --> run 1 --> ticket 1 ---------> out 1

The arrays stay in the store of the worker that made them; an out task takes its own by its ticket.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from dask._task_spec import TaskRef
from dask.base import tokenize
from dask.utils import funcname
from distributed import Client

from daskmesh.graph import Layer, Mask, Node, block_key, block_keys, graph_of
from daskmesh.layout import Layout
from daskmesh.placement import Placement
from daskmesh.running import Call, gate_name, one_per_rank, pass_gate, pick, run_ganged, run_several, run_single
from daskmesh.tasks import RankTask, TicketTask

__all__ = ["Out", "Region"]

Key = tuple[Any, ...]


class Region(Node):
    """One run of a function on all ranks: the blocks of this node are what the run tasks return.

    Its inputs, placements and function are kept for the backward pass, which runs the function again.

    Attributes
    ----------
    call : Call
    inputs : tuple of Node
        Already in the placements that the function gets.
    in_grad_placements : tuple, optional
        Per input, what the caller says about its gradient, or None.
    unique : str
        Told apart from every other region, even an equal one, if it does or may do something to others.
    """

    __slots__ = ("call", "in_grad_placements", "inputs", "unique")

    def __init__(
        self, call: Call, inputs: Sequence[Node], world: str, *, unique: bool = False, in_grad_placements: Any = None
    ) -> None:
        super().__init__(one_per_rank(call.mesh), world)
        self.call = call
        self.inputs = tuple(n.as_boundary() for n in inputs)
        self.in_grad_placements = in_grad_placements
        self.unique = uuid.uuid4().hex if unique else ""

    def parents(self) -> Sequence[Node]:
        return self.inputs

    def needs(self, made: Mask) -> Iterable[tuple[Node, Mask]]:
        if self._layer is not None and not self._layer.reads:  # it has run
            return ()
        every = np.ones_like(made) if self.ganged and made.any() else made
        return [(n, every) for n in self.inputs]

    @property
    def func(self) -> Callable[..., Any]:
        """The function that ran."""
        return self.call.func

    @property
    def in_placements(self) -> tuple[tuple[Placement, ...], ...]:
        """How the inputs are placed as the function gets them."""
        return tuple(layout.placements for layout in self.call.layouts)

    @property
    def out_placements(self) -> tuple[tuple[Placement, ...] | None, ...]:
        """How the outputs are placed; None for one that is no array."""
        return tuple(None if layout is None else layout.placements for layout in self.call.outs or ())

    @property
    def ganged(self) -> bool:
        """Whether all ranks run when one is asked for."""
        return self.call.communicates is not False or self.call.check_replicas or self.call.outs == ()

    @property
    def single(self) -> bool:
        """Whether the run tasks return the only output itself."""
        return not self.ganged and self.call.outs is not None and len(self.call.outs) == 1

    @property
    def gate(self) -> str:
        """Name of the gate's layer."""
        return gate_name(self.name)

    def _lower(self) -> Layer:
        call, mesh = self.call, self.call.mesh
        names = [n.name for n in self.inputs]
        name = f"{funcname(call.func)}-{tokenize(call, names, self.world, self.unique)}"
        if not self.single:
            name = "run-" + name
        kind = TicketTask if self.ganged else RankTask
        run = run_ganged if self.ganged else run_single if self.single else run_several
        tasks: dict[Key, RankTask] = {}
        layout = self.call.outs[0] if self.single and self.call.outs and self.call.outs[0] else self.layout
        for coord in self.layout.coords():
            key = (name, *layout.block_index(coord))
            refs = [TaskRef(block_key(n, coord)) for n in self.inputs]
            tasks[key] = kind(key, run, call, name, coord, *refs, world=self.world, rank=mesh.rank_at(coord))
        if not self.ganged:
            return Layer(name, tasks, self.inputs)
        gate = gate_name(name)
        task = RankTask((gate,), pass_gate, call, *map(TaskRef, tasks), world=self.world, rank=mesh.process_ids[0])
        return Layer(name, tasks, self.inputs, {gate: ({(gate,): task}, frozenset({name}))})

    def run_now(self, client: Client) -> list[tuple[Any, ...]]:
        """Run all ranks and wait; what `run_ganged` returned on each, in mesh order. Later graphs share these results."""
        keys = [*block_keys(self), (self.gate,)]
        futures = client.get(graph_of(self), keys, sync=False)
        parts: list[tuple[Any, ...]] = list(client.gather(futures))[:-1]
        held = dict(zip(keys, futures, strict=True))
        gate = {(self.gate,): held.pop((self.gate,))}
        self._layer = Layer(self.name, held, (), {self.gate: (gate, frozenset())})
        return parts


class Out(Node):
    """One output of a region; the value itself of an output that is no array.

    Attributes
    ----------
    region : Region
    index : int
        Among the flat outputs.
    """

    __slots__ = ("index", "region", "valued")

    def __init__(self, region: Region, index: int, layout: Layout | None) -> None:
        super().__init__(region.layout if layout is None else layout, region.world)
        self.region = region
        self.index = index
        self.valued = layout is None

    def parents(self) -> Sequence[Node]:
        return (self.region,)

    def _lower(self) -> Layer:
        region = self.region
        if region.single:
            return region.layer
        name = f"out-{self.index}-{region.name.removeprefix('run-')}"
        gate = (TaskRef((region.gate,)),) if region.ganged else ()
        layout = None if self.valued else self.layout
        tasks: dict[Key, RankTask] = {}
        for coord in self.layout.coords():
            key = (name, *self.layout.block_index(coord))
            run = block_key(region, coord)
            args = (layout, self.index, run, coord, TaskRef(run), *gate)
            tasks[key] = RankTask(key, pick, *args, world=self.world, rank=self.layout.mesh.rank_at(coord))
        return Layer(name, tasks, (region,), extra_reads=frozenset({region.gate} if region.ganged else ()))
