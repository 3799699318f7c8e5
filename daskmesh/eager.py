"""Sources that indexing needs: results whose sizes only the data tell, and arrays of indices that each rank has a part of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dask
import numpy as np
from dask.base import tokenize
from dask.delayed import Delayed
from dask.highlevelgraph import HighLevelGraph

from daskmesh.dtensor import DTensor
from daskmesh.graph import Layer, Made, Node, Source, block_of, graph_of, local_of, rank_tasks
from daskmesh.layers import TaskLayer
from daskmesh.layout import Coord, Layout, layout_of_locals
from daskmesh.moves import refuse_asynchronous
from daskmesh.tasks import RankTask

__all__ = ["index_parts", "run_at_once"]

Array = Any


class _Indices(Node):
    """Arrays of indices: array `i` for the ranks that hold part `i` of dim 0."""

    __slots__ = ("arrays",)

    def __init__(self, layout: Layout, arrays: Sequence[Array] | Callable[[], Sequence[Array]], world: str) -> None:
        super().__init__(layout, world)
        self.arrays = arrays

    def _lower(self) -> Layer:
        layout, world = self.layout, self.world
        arrays = self.arrays() if callable(self.arrays) else self.arrays
        name = "index-" + tokenize(arrays, layout, world)
        tasks = {}
        for coord in layout.coords():
            key = (name, *layout.block_index(coord))
            part = arrays[layout.part_index(coord)[0]]
            tasks[key] = RankTask(key, block_of, part, layout, coord, world=world, rank=layout.mesh.rank_at(coord))
        return Layer(name, tasks)


def index_parts(layout: Layout, arrays: Sequence[Array] | Callable[[], Sequence[Array]], world: str) -> Node:
    """A node whose local array is ``arrays[i]`` where a rank holds part `i` of dim 0 of `layout`; each travels to its ranks.

    **Communication**: none between ranks.

    Parameters
    ----------
    arrays : sequence of array, or callable
        The arrays, which may not be written to any more, or what gives them once the node is lowered.
    """
    return _Indices(layout, arrays, world)


def run_at_once(
    func: Callable[..., Array], args: Sequence[DTensor], frame: Layout, kwargs: Mapping[str, Any] | None = None
) -> DTensor:
    """Run a function of local arrays now, once per rank, and keep the local arrays, of whatever size, where they are made.

    **Communication**: what computing `args` moves; the shapes travel to the client.

    Parameters
    ----------
    func : callable
        ``func(coord, *locals, **kwargs)`` returns the local array.
    frame : Layout
        Mesh, placements and number of dims of the result; its sizes do not count.
    """
    refuse_asynchronous("a result whose size only the data tell")
    nodes = [x._node.as_boundary() for x in args]
    world = nodes[0].world
    name = f"{getattr(func, '__name__', 'at-once').strip('_')}-" + tokenize(func, [n.name for n in nodes], frame, kwargs)
    layouts = tuple(n.layout for n in nodes)
    tasks = rank_tasks(frame, world, name, _unknown, (func, layouts, frame.lead, dict(kwargs or {})), nodes)
    graph = graph_of(Made(frame, world, Layer(name, tasks, tuple(nodes))))
    held = dask.persist(*(Delayed(key, graph, layer=name) for key in tasks))
    asked = [dask.delayed(_shape_and_dtype)(block, frame.lead) for block in held]
    kinds = dask.compute(*asked)
    layout = layout_of_locals(frame.mesh, frame.placements, [k[0] for k in kinds], [k[1] for k in kinds])
    blocks = {k: v for block in held for k, v in dict(block.__dask_graph__()).items()}
    return DTensor(Source(layout, world, name, HighLevelGraph({name: TaskLayer(blocks)}, {name: set()})))


def _unknown(
    func: Callable[..., Array], layouts: Sequence[Layout], lead: int, kwargs: Mapping[str, Any], coord: Coord, *blocks: Array
) -> Array:
    local = func(coord, *(local_of(b, lay) for b, lay in zip(blocks, layouts, strict=True)), **kwargs)
    return local[(None,) * lead + (...,)]


def _shape_and_dtype(block: Array, lead: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
    return block.shape[lead:], block.dtype
