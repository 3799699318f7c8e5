"""Memory of large arrays, used again.

The operating system zeroes memory page by page as it is first written, which takes as long as the copy that it is wanted for, and
processes that Dask starts give all memory back at once. So what an exchange or a load fills is taken from here::

    empty ──> array ──> its last view is gone ──> idle ──> empty        of about the same size
                                                   '────> given back    after some seconds, beyond the cap, or if memory is short

Only a process that has a worker keeps memory. What the array held is not looked at by anybody: like that of `numpy.empty`, it is
whatever was there.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from time import monotonic
from typing import Any

import numpy as np

__all__ = ["IDLE_SECONDS", "LEAST", "allow", "empty", "idle", "trim"]

LEAST = 2**20  # bytes; the allocator keeps smaller pieces itself
WASTE = 1.25  # an idle piece serves for what is no smaller than its size by this factor
IDLE_SECONDS = 3.0

_lock = threading.Lock()
_idle: list[tuple[float, np.ndarray[Any, Any]]] = []  # (since, bytes), oldest first; under the lock
# An array may end anywhere, on a thread that has the lock, too: then its memory waits here for whoever has the lock next.
_ended: deque[tuple[float, np.ndarray[Any, Any]]] = deque()
_allowed: dict[str, int] = {}  # address of a worker of this process -> bytes
_cap = 0


class _Lease:
    """The base of an array made here: gives the memory back when the last view of it is gone."""

    __slots__ = ("__array_interface__", "memory")

    def __init__(self, memory: np.ndarray[Any, Any]) -> None:
        self.memory = memory
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        _take_back(self.memory)


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """A C-ordered array of whatever values, in memory used before if some of about that size is idle.

    Parameters
    ----------
    shape : tuple of int, (k, ...)
    dtype : dtype

    Returns
    -------
    ndarray, (k, ...)

    Notes
    -----
    **Communication**: none.

    Examples
    --------
    >>> empty((2, 3), "f4").shape
    (2, 3)
    """
    dtype = np.dtype(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < LEAST or nbytes > _cap or dtype.hasobject:
        return np.empty(shape, dtype)
    memory = _fitting(nbytes)
    lease = _Lease(np.empty(nbytes, np.uint8) if memory is None else memory)
    array: np.ndarray[Any, Any] = np.asarray(lease)[:nbytes].view(dtype).reshape(shape)
    return array


def allow(worker: str, nbytes: int) -> None:
    """Let this process keep up to so many idle bytes for a worker of its; 0 when the worker closes.

    Where several workers share the process, the least of what they allow holds; without any it keeps nothing.

    Notes
    -----
    **Communication**: none.

    Examples
    --------
    >>> allow("tcp://10.0.0.1:4000", 2**24)
    >>> allow("tcp://10.0.0.1:4000", 0)
    >>> idle()
    0
    """
    global _cap
    with _lock:
        _allowed[worker] = nbytes
        if not nbytes:
            del _allowed[worker]
        _cap = min(_allowed.values(), default=0)
    trim(IDLE_SECONDS)


def idle() -> int:
    """Bytes that nobody uses, and that are kept.

    Notes
    -----
    **Communication**: none.

    Examples
    --------
    >>> idle()
    0
    """
    with _lock:
        return sum(memory.nbytes for _, memory in [*_idle, *_ended])


def trim(seconds: float = 0.0) -> None:
    """Give back to the operating system what has been idle for so long, and what is beyond the cap.

    Notes
    -----
    **Communication**: none.

    Examples
    --------
    >>> trim()
    >>> idle()
    0
    """
    with _lock:
        dead = _settled(seconds)
    del dead  # outside of the lock: freeing takes its time


def _settled(seconds: float) -> list[Any]:
    """Take in what has ended, and take out what is not to be kept."""
    while _ended:
        _idle.append(_ended.popleft())
    kept, since, size = [], monotonic() - seconds, 0
    for piece in reversed(_idle):
        size += piece[1].nbytes
        if piece[0] > since and size <= _cap:
            kept.append(piece)
    dead = list(_idle)
    _idle[:] = reversed(kept)
    return dead


def _fitting(nbytes: int) -> np.ndarray[Any, Any] | None:
    """The smallest idle piece that serves, the one used last among equals."""
    with _lock:
        dead = _settled(IDLE_SECONDS)
        serving = [i for i, (_, memory) in enumerate(_idle) if nbytes <= memory.nbytes <= WASTE * nbytes]
        best = min(serving, key=lambda i: (_idle[i][1].nbytes, -i), default=None)
        found = None if best is None else _idle.pop(best)[1]
    del dead
    return found


def _take_back(memory: np.ndarray[Any, Any]) -> None:
    _ended.append((monotonic(), memory))
    if _lock.acquire(blocking=False):
        try:
            dead = _settled(IDLE_SECONDS)
        finally:
            _lock.release()
        del dead
