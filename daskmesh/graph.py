"""Recording and lowering: from NumPy calls to one pinned task per rank.

An operation on DTensors records a `Node`; nothing is named, tokenised or submitted. Lowering happens at the first use of a
collection method and is cached on the node::

    recorded                     lowered

    source  x  (a boundary)      layer x        one task per rank
      |
    local   x + 1                \\
      |                            layer z       one task per rank, running the program (x + 1) * 2
    local   (x + 1) * 2  = z     /

A run of local nodes between two *boundaries* becomes one layer. Boundaries have keys of their own that every later graph shares:
sources (creation, persisted arrays), results of exchanges and regions, and local nodes that an exchange or a region reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from dask._task_spec import TaskRef
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from daskmesh.layers import TaskLayer, as_layer
from daskmesh.layout import Coord, Layout
from daskmesh.mesh import ProcessMesh
from daskmesh.plan import Stage
from daskmesh.sharing import lowering_order
from daskmesh.tasks import RankTask
from daskmesh.tiles import Slot, Step, run_steps

__all__ = [
    "Layer",
    "Local",
    "Made",
    "Mask",
    "Node",
    "Program",
    "Renamed",
    "Source",
    "Step",
    "block_key",
    "block_keys",
    "errors_named",
    "graph_of",
    "local_of",
    "plain",
    "rank_tasks",
    "reach",
]

Key = tuple[Any, ...]
Array = Any
Mask = Any  # one truth value per coordinate, in mesh order: which blocks of a node are meant

_TWO_WORLDS = (
    "arrays of two worlds cannot be combined: the same rank may sit on two workers. Bring one into the current world with "
    "shard_tensor(x.to_dask(), mesh, placements)"
)


@dataclass(frozen=True)
class Layer:
    """A named piece of graph, and the layers and nodes that it reads.

    ``extra`` holds layers that belong to this one alone, such as expose tasks: name -> (tasks, names it reads).
    """

    name: str
    tasks: Mapping[Key, Any]
    reads: tuple[Node, ...] = ()
    extra: Mapping[str, tuple[Mapping[Key, Any], frozenset[str]]] | None = None
    extra_reads: frozenset[str] = frozenset()


class Node:
    """A recorded array: its layout, the world whose ranks hold it, and how it comes about.

    Subclasses say how in ``_lower``; in ``stages`` and ``reason`` what they move between ranks and why; and in ``moves`` and
    ``needs`` what of it is carried out where just some blocks are made. A node is immutable but for the caches and `boundary`.
    """

    __slots__ = ("_layer", "boundary", "layout", "world")

    def __init__(self, layout: Layout, world: str, *, boundary: bool = True) -> None:
        self.layout = layout
        self.world = world
        self.boundary = boundary
        self._layer: Layer | None = None

    @property
    def layer(self) -> Layer:
        """The layer that makes this node's blocks; made once."""
        if self._layer is None:
            for n in lowering_order(self, reach):
                n._layer = n._lower()
        return self._layer  # type: ignore[return-value]

    @property
    def name(self) -> str:
        """Name of the layer, first part of its keys."""
        return self.layer.name

    def _lower(self) -> Layer:
        raise NotImplementedError

    def parents(self) -> Sequence[Node]:
        """The nodes that this one was recorded from."""
        return ()

    @property
    def stages(self) -> tuple[Stage, ...]:
        """What this node moves between ranks."""
        return ()

    def moves(self, made: Mask) -> tuple[Stage, ...]:
        """What it moves where just the blocks in `made` are made."""
        return ()

    def needs(self, made: Mask) -> Iterable[tuple[Node, Mask]]:
        """The blocks of the nodes that it reads which are made for those in `made`: here those at the same coordinates."""
        return [(p, made) for p in self.parents()]

    @property
    def reason(self) -> str:
        """Why it moves that."""
        return ""

    def as_boundary(self) -> Node:
        """Give the node keys of its own in every graph lowered from now on."""
        self.boundary = True
        return self

    def __getstate__(self) -> Any:
        return self.layout, self.world, self.name, graph_of(self)

    def __reduce__(self) -> Any:
        return _restored, self.__getstate__()


def _restored(layout: Layout, world: str, name: str, graph: HighLevelGraph) -> Source:
    return Source(layout, world, name, graph)


class Source(Node):
    """Blocks that a given graph makes: creation, conversion, persisted arrays."""

    __slots__ = ("graph",)

    def __init__(self, layout: Layout, world: str, name: str, graph: HighLevelGraph) -> None:
        super().__init__(layout, world)
        self.graph = graph
        layers: Mapping[str, Any] = graph.layers
        tasks: Mapping[Key, Any] = layers.get(name, {})
        rest: dict[str, tuple[Mapping[Key, Any], frozenset[str]]] = {
            k: (layer, frozenset(graph.dependencies.get(k, ()))) for k, layer in layers.items() if k != name
        }
        self._layer = Layer(name, tasks, extra=rest, extra_reads=frozenset(graph.dependencies.get(name, ())))

    @classmethod
    def from_tasks(cls, layout: Layout, world: str, name: str, tasks: Mapping[Key, Any]) -> Source:
        """A source of plain tasks that read nothing."""
        return cls(layout, world, name, HighLevelGraph({name: TaskLayer(tasks)}, {name: set()}))


class Made(Node):
    """A node whose layer is given ready made, over the nodes that the layer reads."""

    __slots__ = ()

    def __init__(self, layout: Layout, world: str, layer: Layer) -> None:
        super().__init__(layout, world)
        self._layer = layer

    def parents(self) -> Sequence[Node]:
        return self.layer.reads


class Renamed(Node):
    """A node whose mesh dims have got other names: the same blocks under the same keys."""

    __slots__ = ("node",)

    def __init__(self, layout: Layout, node: Node) -> None:
        super().__init__(layout, node.world)
        self.node = node.as_boundary()

    def parents(self) -> Sequence[Node]:
        return (self.node,)

    def _lower(self) -> Layer:
        return self.node.layer


class Local(Node):
    """A pure function of the local arrays of nodes on one mesh, rank by rank.

    Parameters
    ----------
    func : callable
        Called with the local arrays (no leading axes) and `kwargs`; with the coordinate first if `located`.
    args : sequence
        Nodes of the same mesh, or constants.
    """

    __slots__ = ("args", "func", "kwargs", "located")

    def __init__(
        self,
        layout: Layout,
        world: str,
        func: Callable[..., Array],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        located: bool = False,
    ) -> None:
        super().__init__(layout, world, boundary=False)
        for a in args:
            if isinstance(a, Node) and a.world != world:
                raise ValueError(_TWO_WORLDS)
        self.func = func
        self.args = tuple(args)
        self.kwargs = kwargs
        self.located = located

    def parents(self) -> Sequence[Node]:
        return [a for a in self.args if isinstance(a, Node)]

    def _lower(self) -> Layer:
        program, inputs = _compile(self)
        name = f"{getattr(self.func, '__name__', 'local')}-{tokenize(program, self.layout, self.world, [n.name for n in inputs])}"
        tasks = rank_tasks(self.layout, self.world, name, run_program, (program,), inputs)
        return Layer(name, tasks, tuple(inputs))


@dataclass(frozen=True, slots=True)
class Program:
    """Straight-line code over local arrays. Slots 0..n-1 are the inputs, then one per step; the last one is the result."""

    layouts: tuple[Layout, ...]
    steps: tuple[Step, ...]
    layout: Layout


def run_program(program: Program, coord: Coord, *blocks: Array) -> Array:
    """Carry out a program on the blocks of the rank at `coord`."""
    slots: list[Any] = [local_of(b, lay) for b, lay in zip(blocks, program.layouts, strict=True)]
    del blocks
    with errors_named(program.layout.mesh, coord):
        run_steps(program.steps, slots, coord)
    return block_of(slots[-1], program.layout, coord)


def _compile(node: Local) -> tuple[Program, list[Node]]:
    """The program of a local node back to the boundaries, and those."""
    inputs, order = _walk(node)
    slot = {id(n): i for i, n in enumerate([*inputs, *order])}
    last: dict[int, int] = {}
    for i, n in enumerate(order):
        for a in n.args:
            if isinstance(a, Node):
                last[slot[id(a)]] = i
    drops: list[list[int]] = [[] for _ in order]
    for s, i in last.items():
        drops[i].append(s)
    steps = tuple(
        Step(n.func, tuple(Slot(slot[id(a)]) if isinstance(a, Node) else a for a in n.args), n.kwargs, n.located, tuple(d))
        for n, d in zip(order, drops, strict=True)
    )
    return Program(tuple(n.layout for n in inputs), steps, node.layout), inputs


def reach(node: Node) -> tuple[list[Node], list[Local]]:
    return _walk(node) if isinstance(node, Local) else (list(node.parents()), [])


def _walk(node: Local) -> tuple[list[Node], list[Local]]:
    """Boundaries that `node` reads, and the local nodes up to it in order of evaluation. No recursion: chains are long."""
    inputs: dict[int, Node] = {}
    order: dict[int, Local] = {}
    stack: list[tuple[Node, bool]] = [(node, False)]
    while stack:
        n, ready = stack.pop()
        if id(n) in order or id(n) in inputs:
            continue
        if not isinstance(n, Local) or (n.boundary and n is not node):
            inputs[id(n)] = n
        elif ready:
            order[id(n)] = n
        else:
            stack.append((n, True))
            stack.extend((a, False) for a in reversed(n.parents()))
    return list(inputs.values()), list(order.values())


def rank_tasks(
    layout: Layout,
    world: str,
    name: str,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    inputs: Sequence[Node] = (),
) -> dict[Key, RankTask]:
    """One pinned task per coordinate: ``func(*args, coord, *blocks of the inputs at that coordinate)``."""
    from_ = [(n.name, n.layout) for n in inputs]
    tasks: dict[Key, RankTask] = {}
    for coord in layout.coords():
        key = (name, *layout.block_index(coord))
        refs = [TaskRef((n, *lay.block_index(coord))) for n, lay in from_]
        tasks[key] = RankTask(key, func, *args, coord, *refs, world=world, rank=layout.mesh.rank_at(coord))
    return tasks


def graph_of(*nodes: Node) -> HighLevelGraph:
    """The whole graph behind some nodes, layer by layer; shared layers once."""
    layers: dict[str, Any] = {}
    deps: dict[str, set[str]] = {}
    stack = list(nodes)
    while stack:
        layer = stack.pop().layer
        if layer.name in layers:
            continue
        layers[layer.name] = as_layer(layer.tasks)
        deps[layer.name] = {n.name for n in layer.reads} | set(layer.extra_reads)
        for name, (extra, reads) in (layer.extra or {}).items():
            layers[name] = as_layer(extra)
            deps[name] = set(reads)
        stack.extend(layer.reads)
    return HighLevelGraph(layers, deps)


def block_key(node: Node, coord: Coord) -> Key:
    """The key of the block at a coordinate."""
    return (node.name, *node.layout.block_index(coord))


def block_keys(node: Node, coords: Sequence[Coord] | None = None) -> list[Key]:
    """The keys of the blocks at some coordinates (all of them by default) in mesh order."""
    return [block_key(node, c) for c in (node.layout.coords() if coords is None else coords)]


def local_of(block: Array, layout: Layout) -> Array:
    """The local array in a block: a view without the leading axes."""
    return block[(0,) * layout.lead + (...,)] if layout.lead else block


def plain(local: Any) -> Array:
    """What can be a block: an array, not a scalar, and none of NumPy's subclasses, of which only the numbers would travel.

    Raises
    ------
    TypeError
        A masked array.
    """
    if type(local) is np.ndarray:
        return local
    if isinstance(local, np.ma.MaskedArray):
        raise TypeError("a masked array would lose its mask on the way between ranks; give x.filled(value), or x.data and x.mask")
    return local if hasattr(local, "shape") and not isinstance(local, np.generic | np.ndarray) else np.asarray(local)


def _told_by_a_scalar(dtype: np.dtype[Any], found: np.dtype[Any]) -> bool:
    """Whether a NumPy scalar of an array of this dtype may have the other: it has the machine's order of bytes, no padding."""
    return dtype.kind == found.kind and (np.can_cast(found, dtype) if dtype.kind in "SU" else dtype.newbyteorder("=") == found)


def block_of(local: Array, layout: Layout, coord: Coord) -> Array:
    """A local array as the block at `coord`, its shape and dtype held to the layout."""
    want = layout.local_shape(coord)
    if isinstance(local, np.generic) and _told_by_a_scalar(layout.dtype, local.dtype):
        local = np.asarray(local, layout.dtype)
    local = plain(local)
    if local.shape != want or local.dtype != layout.dtype:
        raise ValueError(
            f"rank {layout.mesh.rank_at(coord)} at coordinate {coord} made a local array of shape {local.shape} and dtype "
            f"{local.dtype}; its layout says {want} and {layout.dtype}"
        )
    return local[(None,) * layout.lead + (...,)] if layout.lead else local


@contextmanager
def errors_named(mesh: ProcessMesh, coord: Coord) -> Iterator[None]:
    """An error that a rank's task raises says in a note which rank it was."""
    try:
        yield
    except Exception as error:
        error.add_note(f"rank {mesh.rank_at(coord)} at coordinate {coord} of {mesh!r}")
        raise
