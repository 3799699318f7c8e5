"""Symmetric buffers: what a worker holds of symmetric tensors, and what it answers to those who work on them.

A symmetric tensor has one equal buffer per PE (see `buffers`). All of them are made, zeroed, before any PE hears of any, and
they live until they are freed: no garbage collector ever frees one. Dask neither spills nor moves them.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import numpy as np
from distributed import Worker
from distributed.protocol.serialize import Serialize
from distributed.utils import offload

from daskmesh.buffers import Buffer, Claim, PELostError
from daskmesh.store import store_at

__all__ = [
    "Entry",
    "SymmetricStore",
    "close_symmetric",
    "freed",
    "handlers",
    "open_symmetric",
    "setup_symmetric",
    "symmetric_at",
    "teardown_symmetric",
]

FREED_REMEMBERED = 4096
INLINE_BYTES = 8 * 2**20  # a larger view is copied aside, and loaded like any exposed array
OFFLOAD_BYTES = 2**18  # copies larger than this would keep the event loop from answering others
ASIDE_SECONDS = 600  # after which nobody is expected to load what was copied aside


@dataclass(eq=False)
class Entry:
    """What a worker knows of one symmetric tensor: its own buffers, by PE, and the claims on all."""

    id: str
    title: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    claims: tuple[Claim, ...] = ()
    buffers: dict[int, Buffer] = field(default_factory=dict)
    gone: Exception | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of one buffer."""
        return prod(self.shape) * self.dtype.itemsize

    def close(self, why: Exception) -> None:
        """Let go of the buffers held here, for the reason `why`."""
        self.gone = self.gone or why
        for buffer in self.buffers.values():
            buffer.close(self.gone)


class SymmetricStore:
    """The symmetric tensors that one worker has to do with.

    Examples
    --------
    >>> store = SymmetricStore("tcp://10.0.0.1:4000")
    >>> claim = store.make("t", "'tp'", 1, (2, 3), np.dtype("f4"))
    >>> len(store), store.nbytes, store.buffer("t", 1).array.sum()
    (1, 24, np.float32(0.0))
    >>> store.free("t")
    >>> store.buffer("t", 1)
    Traceback (most recent call last):
    RuntimeError: symmetric tensor 'tp' was freed; create it again
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.entries: dict[str, Entry] = {}
        self._freed: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(len(entry.buffers) for entry in list(self.entries.values()) if entry.gone is None)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers held."""
        return sum(b.nbytes for entry in list(self.entries.values()) for b in list(entry.buffers.values()))

    def make(self, tensor: str, title: str, pe: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Claim:
        """A zeroed buffer for one PE of a tensor."""
        buffer = Buffer(shape, dtype)
        with self._lock:
            entry = self.entries.setdefault(tensor, Entry(tensor, title, shape, dtype))
            entry.buffers[pe] = buffer
        return buffer.claim(self.address)

    def open(self, entry: Entry) -> Entry:
        """Learn where the buffers of all PEs are."""
        with self._lock:
            kept = self.entries.setdefault(entry.id, entry)
            kept.claims = entry.claims
            return kept

    def find(self, tensor: str) -> Entry | None:
        """What is known here of a tensor.

        Raises
        ------
        PELostError, RuntimeError
            It is lost, or freed.
        """
        entry = self.entries.get(tensor)
        if entry is not None and entry.gone is not None:
            raise entry.gone.with_traceback(None)
        if entry is None and tensor in self._freed:
            raise freed(self._freed[tensor])
        return entry

    def buffer(self, tensor: str, pe: int) -> Buffer | None:
        """The buffer of one PE, if it is here; raises as `find`."""
        entry = self.find(tensor)
        return None if entry is None else entry.buffers.get(pe)

    def lose(self, tensor: str, why: PELostError) -> None:
        """A PE of the tensor is lost: from now on it is dead here. What is left of it is let go of in the background."""
        entry = self.entries.get(tensor)
        if entry is not None:
            entry.gone = entry.gone or why
            # Another thread may be at work on a buffer; an event loop must not wait for it.
            threading.Thread(target=entry.close, args=(why,), name="daskmesh-lose", daemon=True).start()

    def free(self, tensor: str) -> None:
        """Let go of a tensor; nothing if it is not there."""
        with self._lock:
            entry = self.entries.pop(tensor, None)
            if entry is not None:
                self._freed[tensor] = entry.title
                while len(self._freed) > FREED_REMEMBERED:
                    self._freed.popitem(last=False)
        if entry is not None:
            entry.close(freed(entry.title))

    def clear(self, why: Exception) -> None:
        """Let go of everything."""
        with self._lock:
            entries, self.entries = list(self.entries.values()), {}
        for entry in entries:
            entry.close(why)


def freed(title: str) -> RuntimeError:
    """The error of an operation on a tensor that is no more."""
    return RuntimeError(f"symmetric tensor {title} was freed; create it again")


_STORES: dict[str, SymmetricStore] = {}  # by worker address: under an in-process cluster several workers share this process


def symmetric_at(address: str) -> SymmetricStore | None:
    """The store of the worker at `address` if that worker lives in this process."""
    return _STORES.get(address)


def open_symmetric(address: str) -> SymmetricStore:
    """The store of the worker at `address`, made if need be."""
    return _STORES.setdefault(address, SymmetricStore(address))


def close_symmetric(address: str) -> None:
    """Let go of everything the worker at `address` holds."""
    store = _STORES.pop(address, None)
    if store is not None:
        store.clear(PELostError(f"worker {address} has closed"))


def handlers(store: SymmetricStore) -> dict[str, Any]:
    """The RPC handlers that serve what `store` holds, by name.

    Examples
    --------
    >>> store = SymmetricStore("tcp://10.0.0.1:4000")
    >>> answer = asyncio.run(handlers(store)["daskmesh_symmetric"](tensor="t", pe=0, kind="read", args=((),)))
    >>> answer["status"]
    'unknown'
    """

    async def daskmesh_symmetric(
        tensor: str, pe: int, kind: str, args: Sequence[Any], mark: Any = None, data: Any = None
    ) -> dict[str, Any]:
        """Do one operation on the buffer of `pe`; `data` goes after the first of `args`."""
        if kind == "dropped":  # what was copied aside has been loaded; the tensor may have been freed meanwhile
            _drop(store.address, args[0])
            return {"status": "OK", "answer": None}
        try:
            buffer = store.buffer(tensor, pe)
        except RuntimeError as gone:
            return {"status": "gone", "error": pickle.dumps(gone)}
        if buffer is None:
            return {"status": "unknown"}
        if data is not None:
            args = (args[0], data, *args[1:])
        try:
            answer = await _performed(store, buffer, kind, args, mark)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            return {"status": "gone" if buffer.gone is not None else "failed", "error": pickle.dumps(error)}
        return {"status": "OK", "answer": answer}

    async def daskmesh_symmetric_make(tensor: str, title: str, pe: int, shape: Sequence[int], dtype: bytes) -> list[Any]:
        """Make a zeroed buffer."""
        return list(store.make(tensor, title, pe, tuple(shape), pickle.loads(dtype)))

    async def daskmesh_symmetric_open(tensor: str, title: str, shape: Sequence[int], dtype: bytes, table: Any) -> None:
        """Learn where the buffers of all PEs are."""
        claims = tuple(Claim.unpacked(parts) for parts in table)
        store.open(Entry(tensor, title, tuple(shape), pickle.loads(dtype), claims))

    async def daskmesh_symmetric_free(tensor: str) -> None:
        """Let go of a tensor."""
        await offload(store.free, tensor)

    return {
        handler.__name__: handler
        for handler in (daskmesh_symmetric, daskmesh_symmetric_make, daskmesh_symmetric_open, daskmesh_symmetric_free)
    }


async def _performed(store: SymmetricStore, buffer: Buffer, kind: str, args: Sequence[Any], mark: Any) -> Any:
    if kind == "take":  # a view of any size
        view = await _performed(store, buffer, "read", args, None)
        inline = args[1]
        return Serialize(view) if view.nbytes <= inline else _aside(store, view)
    if _nbytes(buffer, kind, args) > OFFLOAD_BYTES:
        return await offload(partial(buffer.perform, kind, _own(kind, args), mark))
    try:
        return buffer.perform(kind, _own(kind, args), mark, block=False)
    except BlockingIOError:  # a thread of this process is at it
        return await offload(partial(buffer.perform, kind, _own(kind, args), mark))


def _own(kind: str, args: Sequence[Any]) -> Sequence[Any]:
    return args[:1] if kind == "read" else args


def _nbytes(buffer: Buffer, kind: str, args: Sequence[Any]) -> int:
    if kind in ("read", "clear_data"):
        size = prod(stop - start for start, stop in args[0])
        return 0 if buffer.array is None else size * int(buffer.array.itemsize)
    return int(args[1].nbytes) if kind in ("put", "put_signal") else 0


def _aside(store: SymmetricStore, view: np.ndarray[Any, Any]) -> bytes:
    """Expose a copy for a reader to load; the ticket."""
    shards = store_at(store.address)
    if shards is None:
        raise RuntimeError(f"worker {store.address} has no shard store; call daskmesh.init_parallel_env() first")
    key = f"daskmesh-aside-{uuid.uuid4().hex}"
    (ticket,) = shards.put(key, [view])
    asyncio.get_running_loop().call_later(ASIDE_SECONDS, _drop, store.address, key)
    return pickle.dumps(ticket)


def _drop(address: str, key: str) -> None:
    shards = store_at(address)
    if shards is not None:
        shards.free(key)


def setup_symmetric(worker: Worker) -> None:
    """Give `worker` a store of symmetric buffers, the handlers that serve it, and a metric of what it holds; twice is once.

    Notes
    -----
    **Communication**: none.
    """
    store = open_symmetric(worker.address)
    worker.handlers.update(handlers(store))
    worker.stream_handlers["daskmesh-symmetric-lost"] = partial(_lose, store)
    worker.metrics["daskmesh-symmetric"] = _metric


def teardown_symmetric(worker: Worker) -> None:
    """Let go of all that `setup_symmetric` made.

    Notes
    -----
    **Communication**: none.
    """
    worker.metrics.pop("daskmesh-symmetric", None)
    close_symmetric(worker.address)


def _lose(store: SymmetricStore, tensor: str, pe: int, why: str) -> None:
    """The scheduler says that a PE is lost."""
    store.lose(tensor, PELostError(why, pe))


def _metric(worker: Worker) -> dict[str, int]:
    store = symmetric_at(worker.address)
    return {"buffers": 0, "bytes": 0} if store is None else {"buffers": len(store), "bytes": store.nbytes}
