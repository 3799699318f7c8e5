"""What carrying out a recorded array moves between ranks, counted before anything runs.

Dask runs no task that nobody asks for, so the count starts at the blocks that are wanted and follows what they need backwards,
node by node; which blocks that are is a mask over the coordinates::

    x  [Shard(0)]        0 1 2        all: the loads of 0 and 1 need them
    |
    y  [Replicate()]     0 1 .        rank 2 loads nothing: its copy is not asked for, nor made
    |
    z  [Shard(0)]        0 1 .        on a mesh of ranks 0 and 1

A *source* of which the graph is given, say an array that has been pickled or made of a dask array, may hold loads that no node
stands for. Then the tasks themselves are looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from dask._task_spec import convert_legacy_graph, cull
from dask.highlevelgraph import MaterializedLayer

from daskmesh.exchange import assemble
from daskmesh.graph import Mask, Node, Source, block_keys, graph_of
from daskmesh.layout import Coord
from daskmesh.moves import folded
from daskmesh.plan import Plan, Stage
from daskmesh.summa import contract
from daskmesh.tasks import RankTask

__all__ = ["explained"]


def explained(node: Node, call: str = "persist") -> Plan:
    """The loads behind a node as one plan, in the order in which they were recorded.

    Parameters
    ----------
    call : str
        "persist", which makes all blocks, or "compute", which makes those of one replica, large terms folded.

    Raises
    ------
    ValueError
        Another `call`.
    """
    if call not in ("persist", "compute"):
        raise ValueError(f"x.explain({call!r}): expected 'persist', for what all blocks take, or 'compute', for one replica")
    if call == "compute":
        node = folded(node)
    coords = node.layout.coords() if call == "persist" else node.layout.primary()
    nodes = _nodes(node)
    found = _followed(nodes, np.isin(np.arange(node.layout.mesh.size), _numbers(node, coords)))
    reason = "; ".join(dict.fromkeys(n.reason for n, _ in found))
    stages = [s for n, made in found for s in n.moves(made)]
    if any(isinstance(n, Source) and _holds_loads(n) for n in nodes):
        reason = "; ".join(filter(None, (reason, "as the tasks of a graph that was given say")))
        stages = _in_tasks(node, coords)
    if not stages:
        return Plan(node.layout, node.layout, (), "nothing moves")
    return Plan(stages[0].source, node.layout, tuple(stages), reason)


def _numbers(node: Node, coords: Sequence[Coord]) -> Any:
    return np.ravel_multi_index(np.array(coords).T, node.layout.mesh.shape)


def _nodes(node: Node) -> list[Node]:
    """A node and all that it was recorded from, these first. No recursion: chains are long."""
    seen: set[int] = set()
    order: list[Node] = []
    stack: list[tuple[Node, bool]] = [(node, False)]
    while stack:
        n, done = stack.pop()
        if done:
            order.append(n)
        elif id(n) not in seen:
            seen.add(id(n))
            stack.append((n, True))
            stack.extend((p, False) for p in reversed(n.parents()))
    return order


def _followed(nodes: Sequence[Node], wanted: Mask) -> list[tuple[Node, Mask]]:
    """The nodes that move something, and which of their blocks are made where those in `wanted` of the last node are."""
    masks: dict[int, Mask] = {id(nodes[-1]): wanted}
    found = []
    for n in reversed(nodes):
        made = masks.pop(id(n), None)
        if made is None or not made.any():
            continue
        if n.stages:
            found.append((n, made))
        for p, needed in n.needs(made):
            known = masks.get(id(p))
            if known is not needed:
                masks[id(p)] = needed if known is None else known | needed
    return _once(nodes, found[::-1])


def _once(nodes: Sequence[Node], found: list[tuple[Node, Mask]]) -> list[tuple[Node, Mask]]:
    """Nodes of one name, which are carried out once, as one.

    To have a name a node is lowered, which costs more than its plan, so only those are that may share theirs.
    """
    if len(found) < 2:
        return found
    ways = _ways(nodes)
    alike = Counter(ways[id(n)] for n, _ in found)
    merged: dict[Any, tuple[Node, Mask]] = {}
    for n, made in found:
        key: Any = n.name if alike[ways[id(n)]] > 1 else id(n)
        first, known = merged.get(key, (n, made))
        merged[key] = first, known | made
    return list(merged.values())


def _ways(nodes: Sequence[Node]) -> dict[int, frozenset[int]]:
    """Per node, numbers of the stages that lead to it and of the ways to these: where they differ, names do.

    Behind a source of which more is known than tasks that make its blocks there may be stages that are not seen, say those of an
    array that was persisted and keeps its name; then just the last stages count.
    """
    seen = not any(isinstance(n, Source) and _is_given(n) for n in nodes)
    numbers: dict[Any, int] = {}
    ways: dict[int, frozenset[int]] = {}
    for n in nodes:
        way = frozenset[int]().union(*(ways[id(p)] for p in n.parents())) if seen else frozenset()
        ways[id(n)] = frozenset([numbers.setdefault((n.stages, way), len(numbers))]) if n.stages else way
    return ways


def _is_given(source: Source) -> bool:
    """Whether a source may stand for something that has been recorded as nodes, too."""
    tasks = source.layer.tasks
    return not tasks or len(source.graph.layers) > 1 or not all(isinstance(task, RankTask) for task in tasks.values())


# -- tasks ------------------------------------------------------------------------------------------------------------


def _holds_loads(source: Source) -> bool:
    """Whether tasks of the graph of a source load from other ranks."""
    return any(
        _loads(task) is not None
        for layer in source.graph.layers.values()
        if isinstance(layer, MaterializedLayer)
        for task in layer.mapping.values()
    )


def _loads(task: Any) -> tuple[Iterable[Stage], Coord] | None:
    """What a task loads, and for which coordinate; None if it is none that loads."""
    if not isinstance(task, RankTask):
        return None
    if task.func is assemble:
        return (task.args[0],), task.args[1]
    if task.func is contract:
        stream, coord = task.args[:2]
        busy = 0 not in stream.result.local_shape(coord)
        return (s for s in stream.stages if busy and s.source != s.target), coord
    return None


def _in_tasks(node: Node, coords: Sequence[Coord]) -> list[Stage]:
    """The stages of which the graph of a node holds tasks that are needed for its blocks at some coordinates.

    Task by task, as schedulers do: culling by layers may keep more.
    """
    graph = graph_of(node)
    tasks = convert_legacy_graph(graph)
    needed = cull(tasks, block_keys(node, coords))
    found: dict[tuple[Any, int], tuple[Stage, Mask]] = {}
    for key in (k for k in reversed(list(tasks)) if k in needed):
        stages, coord = _loads(needed[key]) or ((), ())
        for i, stage in enumerate(stages):
            name = key[0] if isinstance(key, tuple) else key
            made = found.setdefault((name, i), (stage, np.zeros(stage.target.mesh.size, bool)))[1]
            made[np.ravel_multi_index(coord, stage.target.mesh.shape)] = True
    return [stage.making(made) for stage, made in found.values()]
