"""Reading the memory of another process of this host with `process_vm_readv`: one copy, the owner not involved.

Reading memory that was freed succeeds, and reading a process that took over a dead one's number may too. So nothing
read is believed until the owner's *generation word*, the last piece of every call, reads as the ticket says.
"""

from __future__ import annotations

import os
import secrets
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Process", "Word", "this_process"]

_BLOCK_WORDS = 512
_lock = threading.Lock()
_blocks: list[np.ndarray[Any, np.dtype[np.int64]]] = []  # never freed: readers look at these words at any time
_free: list[tuple[int, int]] = []


class Process(NamedTuple):
    """A process as its peers know it: two are the same only if their nonces are.

    Examples
    --------
    >>> this_process() == this_process()
    True
    """

    host: str
    pids: str
    pid: int
    nonce_at: int
    nonce: bytes


class Word:
    """Eight bytes at a fixed address that is never unmapped; zero until set.

    Examples
    --------
    >>> word = Word()
    >>> word.value = 7
    >>> word.value
    7
    >>> word.give_back()
    """

    __slots__ = ("_block", "_slot", "address")

    def __init__(self) -> None:
        with _lock:
            if not _free:
                _blocks.append(np.zeros(_BLOCK_WORDS, np.int64))
                _free.extend((len(_blocks) - 1, slot) for slot in reversed(range(_BLOCK_WORDS)))
            block, self._slot = _free.pop()
        self._block = block
        self.address: int = _blocks[block].__array_interface__["data"][0] + 8 * self._slot

    @property
    def value(self) -> int:
        """What a reader sees."""
        return int(_blocks[self._block][self._slot])

    @value.setter
    def value(self, value: int) -> None:
        _blocks[self._block][self._slot] = value

    def give_back(self) -> None:
        """Zero the word and let another entry have it."""
        self.value = 0
        with _lock:
            _free.append((self._block, self._slot))


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:  # not Linux, or hidden: a host of its own, so that no peer takes this process for a neighbour
        return secrets.token_hex(16)


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return secrets.token_hex(16)


_nonces: dict[
    int, tuple[Process, np.ndarray[Any, np.dtype[np.uint8]]]
] = {}  # by pid: a forked child is another process


def this_process() -> Process:
    """This process, for a ticket.

    Examples
    --------
    >>> len(this_process().nonce)
    16
    """
    pid = os.getpid()
    with _lock:
        if pid not in _nonces:
            nonce = secrets.token_bytes(16)
            kept = np.frombuffer(nonce, np.uint8).copy()
            at = kept.__array_interface__["data"][0]
            _nonces[pid] = Process(_read("/proc/sys/kernel/random/boot_id"), _namespace(), pid, at, nonce), kept
        return _nonces[pid][0]
