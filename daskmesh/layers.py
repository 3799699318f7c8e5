"""The layer of a graph that holds task objects, as Dask's own does, and can be cloned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dask._task_spec import GraphNode, Task, TaskRef
from dask.base import clone_key
from dask.graph_manipulation import chunks
from dask.highlevelgraph import Layer, MaterializedLayer

from daskmesh.tasks import RankTask

__all__ = ["TaskLayer", "as_layer"]


class TaskLayer(MaterializedLayer):
    """A mapping of keys to task objects.

    Dask's clone of such a layer renames its keys, but neither the keys inside the tasks nor those that they read, so that
    `dask.graph_manipulation.clone`, `bind` and `wait_on` fail.
    """

    def clone(self, keys: set[Any], seed: Any, bind_to: Any = None) -> tuple[Layer, bool]:
        """The layer under other keys; tasks that read nothing of what is cloned wait for `bind_to`."""
        cloned: dict[Any, Any] = {}
        bound = False
        for key, task in self.mapping.items():
            if key not in keys:
                cloned[key] = task
                continue
            new = clone_key(key, seed)
            read = task.dependencies & keys if isinstance(task, GraphNode) else set()
            if isinstance(task, GraphNode):
                task = task.substitute({k: clone_key(k, seed) for k in read}, key=new)
            if bind_to is not None and not read:
                task = _bound(new, task, bind_to)
                bound = True
            cloned[new] = task
        return TaskLayer(cloned), bound


def as_layer(tasks: Mapping[Any, Any]) -> Layer:
    """A layer of some tasks; Dask's layers that are no plain mappings stay as they are."""
    if isinstance(tasks, MaterializedLayer):
        return tasks if isinstance(tasks, TaskLayer) else TaskLayer(tasks.mapping)
    return tasks if isinstance(tasks, Layer) else TaskLayer(tasks)


def _bound(key: Any, task: Any, bind_to: Any) -> Any:
    """The task, run after `bind_to`."""
    first = TaskRef(bind_to)
    if isinstance(task, RankTask):
        return type(task)(key, _after, first, task.func, *task.args, world=task.world, rank=task.rank, **task.kwargs)
    if isinstance(task, GraphNode):
        return Task(key, chunks.bind, task, first)
    return (chunks.bind, task, bind_to)


def _after(_: Any, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return func(*args, **kwargs)
