"""The shard store: arrays that a worker holds for others to load from, and the tickets that claim them.

A ticket is small and carries no data, so copies of it are harmless. What it claims lives in one place: the store of the
worker it was born on. Each entry has a *generation word*, eight bytes in memory that is never freed, which equals the
entry's id while the entry lives. The store zeroes the word before it lets go of the array, so whoever reads the array's
memory and then the word knows whether what was read was still the array: memory that has been freed, or used again,
reads without any error.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from dask.sizeof import sizeof
from distributed import get_worker

from daskmesh import vm

__all__ = ["ShardStore", "Ticket", "TicketLost", "expose", "expose_all", "local_array", "release", "store_at"]

_STORES: dict[str, ShardStore] = {}  # by worker address: under an in-process cluster several workers share this process


class TicketLost(RuntimeError):
    """The array behind a ticket is gone: it was freed, or the worker that held it has died.

    A task that meets it raises `distributed.Reschedule`: when it runs again, the ticket will have been made anew.

    Examples
    --------
    >>> raise TicketLost("ticket 7 of tcp://10.0.0.1:4000 is gone")
    Traceback (most recent call last):
    daskmesh.store.TicketLost: ticket 7 of tcp://10.0.0.1:4000 is gone
    """


@dataclass(frozen=True, slots=True)
class Ticket:
    """A claim on an exposed array.

    Outside any worker the ticket holds the array itself.

    Attributes
    ----------
    address : str
        Worker that holds the array; empty if the ticket does.
    id : int
        Random, never used twice, never 0; what the generation word reads while the entry lives.
    shape, dtype, strides, nbytes
        As of the array.
    kind : str
        "raw" where its memory can be read as bytes, "plain" for other NumPy arrays (object dtype), "other" for the rest
        (on a device, masked).
    pointer, word : int
        Addresses of the first element and of the generation word in the memory of the process.
    process : vm.Process
        The process that holds it.
    key : hashable
        What the store holds it under: the key of the task whose result the ticket is, as a rule.

    Examples
    --------
    >>> ticket = expose(np.arange(6.0).reshape(2, 3))
    >>> ticket.shape, ticket.nbytes, ticket.address
    ((2, 3), 48, '')
    """

    address: str
    id: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...]
    nbytes: int
    kind: str
    pointer: int = 0
    word: int = 0
    process: vm.Process | None = None
    key: Hashable = None
    array: Any = field(default=None, compare=False, repr=False)


@sizeof.register(Ticket)  # type: ignore[untyped-decorator]
def _sizeof_ticket(ticket: Ticket) -> int:
    return 512 + (0 if ticket.array is None else int(sizeof(ticket.array)))


@dataclass(slots=True)
class _Entry:
    array: Any
    word: vm.Word
    key: Hashable


class ShardStore:
    """The arrays one worker has exposed.

    Parameters
    ----------
    address : str
        The worker's address.

    Examples
    --------
    >>> store = ShardStore("tcp://10.0.0.1:4000")
    >>> (ticket,) = store.put("x", [np.ones(3)])
    >>> store.nbytes, store.get(ticket.id)
    (24, array([1., 1., 1.]))
    >>> store.free("x")
    >>> len(store)
    0
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._entries: dict[int, _Entry] = {}
        self._by_key: dict[Hashable, list[int]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays held."""
        with self._lock:
            return sum(int(entry.array.nbytes) for entry in self._entries.values())

    def put(self, key: Hashable, arrays: Sequence[Any]) -> list[Ticket]:
        """Hold `arrays` under `key` instead of what an earlier run of the task left there; one ticket for each."""
        arrays = [_whole(array) for array in arrays]
        entries = {secrets.randbits(62) + 1: _Entry(array, vm.Word(), key) for array in arrays}
        with self._lock:
            dead = self._take(key)
            for id_, entry in entries.items():
                entry.word.value = id_
            self._entries.update(entries)
            self._by_key[key] = list(entries)
        _drop(dead)
        return [_ticket(self.address, id_, entry) for id_, entry in entries.items()]

    def get(self, id_: int) -> Any:
        """The array with this id, itself.

        Raises
        ------
        TicketLost
            The store does not hold it.
        """
        entry = self._entries.get(id_)
        if entry is None:
            raise TicketLost(f"worker {self.address} does not hold ticket {id_} any more; expose the array again")
        return entry.array

    def free(self, key: Hashable) -> None:
        """Let go of everything held under `key`; nothing if there is nothing."""
        if key in self._by_key:
            with self._lock:
                dead = self._take(key)
            _drop(dead)

    def clear(self) -> None:
        """Let go of everything."""
        with self._lock:
            dead = list(self._entries.values())
            for entry in dead:
                entry.word.value = 0
            self._entries.clear()
            self._by_key.clear()
        _drop(dead)

    def _take(self, key: Hashable) -> list[_Entry]:
        dead = [self._entries.pop(id_) for id_ in self._by_key.pop(key, ())]
        for entry in dead:
            entry.word.value = 0
        return dead


def _drop(dead: list[_Entry]) -> None:
    # Outside the lock: the last reference to an array may run a finalizer. The word was zeroed before, and is given
    # back only now, so that no new entry makes it valid again under a reader.
    for entry in dead:
        entry.array = None
        entry.word.give_back()


def _whole(array: Any) -> Any:
    """Scalars as 0-d arrays: NumPy's have no memory of their own that stays."""
    return np.asarray(array) if isinstance(array, np.generic | bool | int | float | complex) else array


def _kind(array: Any) -> str:
    if type(array) is not np.ndarray and type(array) is not np.memmap:
        return "other"
    return "plain" if array.dtype.hasobject else "raw"


def _ticket(address: str, id_: int, entry: _Entry | None, array: Any = None) -> Ticket:
    held = array if entry is None else entry.array
    kind = _kind(held)
    raw = entry is not None and kind == "raw"
    return Ticket(
        address=address,
        id=id_,
        shape=tuple(held.shape),
        dtype=held.dtype,
        strides=tuple(held.strides) if kind == "raw" else (),
        nbytes=int(held.nbytes),
        kind=kind,
        pointer=held.__array_interface__["data"][0] if raw else 0,
        word=entry.word.address if raw and entry is not None else 0,
        process=vm.this_process(),
        key=None if entry is None else entry.key,
        array=array,
    )


def store_at(address: str) -> ShardStore | None:
    """The store of the worker at `address` if that worker lives in this process."""
    return _STORES.get(address)


def open_store(address: str) -> ShardStore:
    """The store of the worker at `address`, made if need be."""
    return _STORES.setdefault(address, ShardStore(address))


def close_store(address: str) -> None:
    """Let go of everything the worker at `address` holds, and of its store."""
    store = _STORES.pop(address, None)
    if store is not None:
        store.clear()


def expose_all(arrays: Iterable[Any], key: Hashable = None) -> list[Ticket]:
    """Let others load from `arrays`: one ticket for each.

    Parameters
    ----------
    arrays : iterable of array
        Local arrays; not copied, so they must not change while they are exposed.
    key : hashable, optional
        Key they are held under until `release`; the running task's if left out. Whatever an earlier call left under
        that key is let go of.

    Returns
    -------
    list of Ticket

    Raises
    ------
    RuntimeError
        On a worker without a store.

    Notes
    -----
    **Communication**: none.

    Examples
    --------
    >>> [ticket.shape for ticket in expose_all([np.ones(2), np.ones(3)])]
    [(2,), (3,)]
    """
    try:
        worker = get_worker()
    except ValueError:  # not on a worker: nobody would free the entry, so the ticket holds the array
        return [_ticket("", secrets.randbits(62) + 1, None, _whole(array)) for array in arrays]
    store = _STORES.get(worker.address)
    if store is None:
        raise RuntimeError(
            f"expose: worker {worker.address} has no shard store, because daskmesh has not set it up; "
            "call daskmesh.init_parallel_env() first"
        )
    return store.put(worker.get_current_task() if key is None else key, list(arrays))


def expose(array: Any, key: Hashable = None) -> Ticket:
    """Let others load from `array`.

    On a worker the array goes into that worker's shard store, under the key of the running task. Elsewhere the ticket
    holds the array itself. A second call under the same key lets go of the first array; `expose_all` exposes several.

    Parameters
    ----------
    array : array
        A local array; not copied, so it must not change while it is exposed.
    key : hashable, optional
        Key it is held under until `release`; the running task's if left out.

    Returns
    -------
    Ticket

    Raises
    ------
    RuntimeError
        On a worker without a store.

    Notes
    -----
    **Communication**: none.

    Examples
    --------
    >>> expose(np.ones((2, 3), "f4")).nbytes
    24
    """
    return expose_all([array], key)[0]


def release(address: str, key: Hashable) -> None:
    """Let go of every array held under `key` by the worker at `address`; nothing if there is none in this process.

    Notes
    -----
    **Communication**: none.

    Examples
    --------
    >>> release("tcp://10.0.0.1:4000", "nothing-there")
    """
    store = _STORES.get(address)
    if store is not None:
        store.free(key)


def same_process(ticket: Ticket) -> bool:
    """Whether the array can be had without leaving this process.

    Examples
    --------
    >>> same_process(expose(np.ones(3)))
    True
    """
    return ticket.array is not None or ticket.process == vm.this_process()


def local_array(ticket: Ticket) -> Any:
    """The exposed array itself, where it lives in this process: not a copy, so not to be written to.

    Raises
    ------
    TicketLost
        The array has been let go of.
    ValueError
        It lives in another process.

    Notes
    -----
    **Communication**: none.

    Examples
    --------
    >>> local_array(expose(np.arange(3)))
    array([0, 1, 2])
    """
    if ticket.array is not None:
        return ticket.array
    if not same_process(ticket):
        raise ValueError(
            f"local_array: ticket {ticket.id} {ticket.shape} lives in another process, that of worker "
            f"{ticket.address}; load(ticket, index) copies a view of it"
        )
    store = _STORES.get(ticket.address)
    if store is None:
        raise TicketLost(f"worker {ticket.address}, which held ticket {ticket.id}, has closed; expose the array again")
    return store.get(ticket.id)
