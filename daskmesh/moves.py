"""Moving and exporting recorded arrays: another layout, what that costs, the blocks as plain dask arrays.

These work on nodes; `dtensor` wraps them for people.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary

import dask.array as da
from dask._expr import HLGExpr
from distributed import Client, default_client

from daskmesh import config
from daskmesh.exchange import Words, exchanged
from daskmesh.gathering import gather
from daskmesh.graph import Layer, Made, Node, Renamed, block_keys, graph_of, local_of, rank_tasks
from daskmesh.layout import Coord, Layout, make_layout
from daskmesh.placement import Partial, Placement, Replicate, Shard
from daskmesh.plan import format_bytes, make_plan
from daskmesh.world import world_for

__all__ = [
    "OneReplica",
    "dask_array_of",
    "fits",
    "folded",
    "local_arrays_of",
    "moved",
    "reduced",
    "refuse_asynchronous",
    "refuse_beyond_memory",
]

_ALWAYS_FITS = 2**24
_REMEMBERED = 2.0  # seconds; Dask's clients ask how their scheduler is as often
_LIMITS: WeakKeyDictionary[Client, tuple[float, float]] = WeakKeyDictionary()


def moved(node: Node, target: Layout, reason: Words = "") -> Node:
    """A node in another layout of the same shape and dtype; the node itself if it has it already.

    Raises
    ------
    ValueError
        The node belongs to a world that is not the current one, and the target is another mesh.
    MemoryError
        A rank's share would not fit its worker's memory limit.
    """
    source = node.layout
    if source == target:
        return node
    if source.mesh != target.mesh and world_for(target.mesh).id != node.world:
        raise ValueError(
            f"an array on {source.mesh!r} belongs to another world than {target.mesh!r}; "
            f"bring it into this one with shard_tensor(x.to_dask(), mesh, placements)"
        )
    same = (source.mesh.process_ids, source.mesh.shape) == (target.mesh.process_ids, target.mesh.shape)
    if same and source.placements == target.placements and source.chunks == target.chunks:
        # Only the names of the mesh differ: the keys are shared, nothing moves.
        return Renamed(target, node)
    plan = make_plan(source, target, config.nbytes("two-stage-bytes"))
    share = math.prod(max(c) for c in target.chunks) * target.dtype.itemsize
    refuse_beyond_memory(share, lambda: f"resharding {source.shape} {source.dtype} to {list(target.placements)}")
    return exchanged(node, plan, reason)


def refuse_beyond_memory(nbytes: int, what: Callable[[], str]) -> None:
    """Raise MemoryError before something runs that no worker could hold.

    Parameters
    ----------
    nbytes : int
        What one worker would have to hold.
    what : callable
        Says what that is; called where it is refused, for making words costs as much as recording a move.
    """
    if not fits(nbytes):
        limit = _LIMITS[default_client()][0]
        raise MemoryError(
            f"{what()} takes {format_bytes(nbytes)} on one worker, whose memory limit is {format_bytes(int(limit))}; "
            f"keep it sharded, or reduce it first"
        )


def fits(nbytes: int) -> bool:
    """Whether every worker of the current client could hold so much; True where that cannot be asked."""
    if nbytes < _ALWAYS_FITS:  # asking the scheduler costs more than it could save
        return True
    try:
        client = default_client()
    except ValueError:
        return True
    if client.asynchronous or nbytes <= _least_limit(client):
        return True
    _LIMITS.pop(client, None)  # nothing is refused for what is no longer so
    return nbytes <= _least_limit(client)


def _least_limit(client: Client) -> float:
    """The least memory limit of a client's workers, as it was at most `_REMEMBERED` seconds ago."""
    now = monotonic()
    limit, until = _LIMITS.get(client, (0.0, now))
    if now >= until:
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        limit = min((w["memory_limit"] for w in workers if w["memory_limit"]), default=math.inf)
        _LIMITS[client] = limit, now + _REMEMBERED
    return limit


class OneReplica(HLGExpr):
    """The graph of a node: all blocks when persisted; when computed, by whatever call, one replica with large terms folded.

    Computing raises MemoryError where the value would not fit a worker's memory limit.
    """

    _parameters = [*HLGExpr._parameters, "recorded"]  # noqa: RUF012
    _defaults = {**HLGExpr._defaults, "recorded": None}  # noqa: RUF012

    @classmethod
    def of(cls, node: Node, optimizer: Any) -> OneReplica:
        """The expression of a node."""
        blocks, post = block_keys(node), (gather, (node.layout,))
        recorded = _Recorded(node)
        return cls(
            dsk=graph_of(node), low_level_optimizer=optimizer, output_keys=blocks, postcompute=post, recorded=recorded
        )

    def finalize_compute(self) -> Any:
        """Run by Dask on the client, before anything is sent."""
        node = self.operand("recorded").node
        layout = node.layout
        refuse_beyond_memory(layout.nbytes, lambda: f"gathering the value of {layout!r}")
        node = folded(node)
        one = HLGExpr(
            dsk=graph_of(node),
            low_level_optimizer=self.low_level_optimizer,
            output_keys=block_keys(node, node.layout.primary()),
            postcompute=(gather, (node.layout,)),
        )
        return one.finalize_compute()


class _Recorded:
    """A node for the client alone: it does not travel with the graph that it stands for."""

    def __init__(self, node: Node | None = None) -> None:
        self.node = node

    def __reduce__(self) -> Any:
        return _Recorded, ()


def folded(node: Node) -> Node:
    """The node to gather a value from: itself, or with large terms folded by the ranks that hold them, each its share.

    Small terms are folded where they are gathered, which needs no step more.
    """
    layout = node.layout
    if not layout.partial_axes or not layout.ndim or layout.nbytes <= config.nbytes("two-stage-bytes"):
        return node
    longest = max(range(layout.ndim), key=lambda d: layout.shape[d])
    placements = [Shard(longest) if isinstance(p, Partial) else p for p in layout.placements]
    return moved(node, make_layout(layout.mesh, placements, layout.shape, layout.dtype))


def refuse_asynchronous(call: str) -> None:
    """Raise TypeError where the current client cannot be waited for."""
    try:
        client = default_client()
    except ValueError:
        return
    if client.asynchronous:
        raise TypeError(
            f"{call}: Dask's current client is asynchronous and cannot be waited for here; write `await client.persist(x)` "
            f"to hold the array on its workers, or `await client.compute(x)` for its value"
        )


def reduced(placements: Sequence[Placement]) -> list[Placement]:
    """The placements with every Partial made Replicate."""
    return [Replicate() if isinstance(p, Partial) else p for p in placements]


def dask_array_of(node: Node) -> da.Array:
    """The global value of a node without Partial dims as a dask array: one replica, empty blocks left out."""
    layout = node.layout
    name = "to-dask-" + node.name
    pinned = rank_tasks(layout, node.world, name, _local_at, (layout,), (node,))
    filled = [[i for i, k in enumerate(c) if k] or [0] for c in layout.chunks]
    place = [{i: at for at, i in enumerate(f)} for f in filled]
    tasks = {}
    for coord in layout.primary():
        parts = layout.part_index(coord)
        if all(i in p for i, p in zip(parts, place, strict=True)):
            key: tuple[Any, ...] = (name, *(p[i] for i, p in zip(parts, place, strict=True)))
            tasks[key] = pinned[name, *layout.block_index(coord)].substitute({}, key=key)
    chunks = tuple(tuple(c[i] for i in f) for c, f in zip(layout.chunks, filled, strict=True))
    graph = graph_of(Made(layout, node.world, Layer(name, tasks, (node,))))
    return da.Array(graph, name, chunks, dtype=layout.dtype)


def local_arrays_of(node: Node) -> list[da.Array]:
    """The local arrays as dask arrays of one chunk each, in mesh order; the chunks stay pinned."""
    layout = node.layout
    name = "local-" + node.name
    pinned = rank_tasks(layout, node.world, name, _local_at, (layout,), (node,))
    arrays = []
    for coord in layout.coords():
        mine = f"{name}-{layout.mesh.rank_at(coord)}"
        key: tuple[Any, ...] = (mine, *(0,) * layout.ndim)
        task = pinned[name, *layout.block_index(coord)].substitute({}, key=key)
        graph = graph_of(Made(layout, node.world, Layer(mine, {key: task}, (node,))))
        arrays.append(da.Array(graph, mine, tuple((n,) for n in layout.local_shape(coord)), dtype=layout.dtype))
    return arrays


def _local_at(layout: Layout, coord: Coord, block: Any) -> Any:
    return local_of(block, layout)
