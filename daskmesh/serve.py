"""What a worker answers to those who load from it."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from distributed.protocol.serialize import Serialize
from distributed.utils import offload

from daskmesh.segments import Mappings
from daskmesh.store import ShardStore, TicketLost

__all__ = ["HANDLERS", "handlers", "select"]

HANDLERS = ("daskmesh_views", "daskmesh_fill")
OFFLOAD_BYTES = 2**18  # copies larger than this would keep the event loop from answering others


def select(array: Any, index: Iterable[Any]) -> Any:
    """The view of `array` that a request names; an array also where every axis has an int.

    Examples
    --------
    >>> select(np.arange(6).reshape(2, 3), [1, [0, 2]])
    array([3, 4])
    """
    key = tuple(entry if isinstance(entry, int) else slice(*entry) for entry in index)
    return array[(*key, ...)]


def handlers(store: ShardStore) -> dict[str, Callable[..., Any]]:
    """The RPC handlers that serve what `store` holds, by name.

    Examples
    --------
    >>> import asyncio
    >>> views = handlers(ShardStore("tcp://10.0.0.1:4000"))["daskmesh_views"]
    >>> asyncio.run(views(loads=[[7, []]]))["status"]
    'lost'
    """
    mappings = Mappings()

    async def daskmesh_views(loads: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Send views: for each load the id of the entry, and an int or [start, stop] for each axis."""
        try:
            views = [select(store.get(id_), index) for id_, index in loads]
        except TicketLost as lost:
            return {"status": "lost", "reason": str(lost)}
        return {"status": "OK", "views": [Serialize(view) for view in views]}

    async def daskmesh_fill(segment: str, loads: Sequence[Sequence[Any]], offsets: Sequence[int]) -> dict[str, Any]:
        """Copy views into a segment of shared memory, each from its offset on, in C order."""
        memory = mappings.find(segment)
        if memory is None:
            return {"status": "unmapped"}
        try:
            views = [select(store.get(id_), index) for id_, index in loads]
        except TicketLost as lost:
            return {"status": "lost", "reason": str(lost)}
        if sum(view.nbytes for view in views) > OFFLOAD_BYTES:
            await offload(_fill, memory, views, offsets)
        else:
            _fill(memory, views, offsets)
        return {"status": "OK"}

    return {handler.__name__: handler for handler in (daskmesh_views, daskmesh_fill)}


def _fill(memory: mmap.mmap, views: Sequence[Any], offsets: Sequence[int]) -> None:
    for view, offset in zip(views, offsets, strict=True):
        np.copyto(np.ndarray(view.shape, view.dtype, memory, offset), view)
