"""Reading the memory of another process of this host with `process_vm_readv`: one copy, the owner not involved.

Reading memory that was freed succeeds, and reading a process that took over a dead one's number may too. So nothing
read is believed until the owner's *generation word*, the last piece of every call, reads as the ticket says.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import secrets
import sys
import threading
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from daskmesh.views import View, addresses, contiguous, cut, spanned

__all__ = [
    "Gone",
    "Process",
    "Unreadable",
    "Word",
    "allow_readers",
    "read",
    "read_between",
    "read_word",
    "refusal",
    "this_process",
]

Iovecs: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]
Runs: TypeAlias = tuple[np.ndarray[Any, Any], int]  # addresses, and the length of each

logger = logging.getLogger(__name__)

CALL_BYTES = 0x7FFFF000  # what the kernel reads in one call
CALL_RUNS = 1023  # iovecs in one call, less the one of the word
GAP_BYTES = 2048  # reading so much for nothing costs less than one more iovec, about 450 ns
SHORT_RUN = 256  # runs of the result shorter than this are written by NumPy, from a buffer
BUFFER_BYTES = 2**20
MANY_RUNS = 2**16

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


_nonces: dict[int, tuple[Process, np.ndarray[Any, np.dtype[np.uint8]]]] = {}  # by pid: a forked child is another process


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


class Gone(Exception):
    """The memory does not hold the array any more: the generation word differs, or the process has ended."""


class Unreadable(Exception):
    """The array is still there, but its memory cannot be read from another process."""


def _load_readv() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    readv = getattr(libc, "process_vm_readv", None)
    if readv is not None:
        readv.restype = ctypes.c_ssize_t
        readv.argtypes = [ctypes.c_int, *[ctypes.c_void_p, ctypes.c_ulong] * 2, ctypes.c_ulong]
    return readv


_readv = _load_readv()  # None where the system has no such call


def _call(pid: int, remote: Iovecs, local: Iovecs) -> int:
    """Bytes read; the lock of the interpreter is not held meanwhile."""
    read = _readv(pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0)
    if read < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(read)


def _iovecs(at: Any, length: int, word_at: int = 0) -> Iovecs:
    vectors = np.empty((len(at) + bool(word_at), 2), np.uint64)
    vectors[: len(at), 0] = at
    vectors[: len(at), 1] = length
    if word_at:
        vectors[-1] = word_at, 8
    return vectors


def _read_bytes(process: Process, at: int, length: int) -> bytes:
    buffer = np.empty(length, np.uint8)
    short = _call(process.pid, _iovecs([at], length), _iovecs([buffer.ctypes.data], length)) != length
    return b"" if short else buffer.tobytes()


def read_word(process: Process, word: int) -> int:
    """The generation word at address `word` of `process`; 0 if there is nothing to read there.

    Raises
    ------
    Gone
        The process has ended.
    """
    try:
        return int.from_bytes(_read_bytes(process, word, 8), sys.byteorder)
    except OSError as error:
        if error.errno == errno.EFAULT:
            return 0
        raise Gone(f"process {process.pid}: {error.strerror}") from error


def read_between(process: Process, at: int, out: np.ndarray[Any, Any], word: int) -> tuple[int, int]:
    """Read memory from `at` on into a contiguous array; the word at address `word` as it was before and after. One call.

    Words that could not be read are 0; the array holds anything then.

    Raises
    ------
    Gone
        The process has ended.

    Examples
    --------
    >>> word, source, out = Word(), np.arange(3), np.empty(2, int)
    >>> word.value = 6
    >>> read_between(this_process(), source.ctypes.data + 8, out, word.address), out
    ((6, 6), array([1, 2]))
    >>> word.give_back()
    """
    words = np.zeros(2, np.int64)
    here, size = words.__array_interface__["data"][0], out.nbytes
    local = np.array([(here, 8), (out.__array_interface__["data"][0], size), (here + 8, 8)], np.uint64)
    remote = np.array([(word, 8), (at, size), (word, 8)], np.uint64)
    try:
        if _call(process.pid, remote, local) != size + 16:
            words[1] = 0
    except OSError as error:
        if error.errno != errno.EFAULT:
            raise Gone(f"process {process.pid}: {error.strerror}") from error
    return int(words[0]), int(words[1])


_refusals: dict[Process, str] = {}


def refusal(process: Process) -> str:
    """Why the memory of `process` cannot be read from here; empty if it can. Found out once per process.

    Raises
    ------
    Gone
        The process has ended.

    Examples
    --------
    >>> refusal(this_process()._replace(host="another"))
    'it runs on another host'
    """
    if process not in _refusals:
        _refusals[process] = reason = _try_nonce(process)
        if reason and process.host == this_process().host:
            logger.info("Memory of process %d cannot be read directly: %s. Using the next road.", process.pid, reason)
    return _refusals[process]


def _try_nonce(process: Process) -> str:
    here = this_process()
    if process.host != here.host:
        return "it runs on another host"
    if process.pids != here.pids:
        return "it runs in another PID namespace"
    if _readv is None:
        return "this system has no process_vm_readv"
    try:
        found = _read_bytes(process, process.nonce_at, len(process.nonce))
    except OSError as error:
        if error.errno == errno.ESRCH:
            raise Gone(f"process {process.pid} has ended") from error
        return f"process_vm_readv: {error.strerror}"
    return "" if found == process.nonce else "it is not the process that announced itself"


def allow_readers() -> None:
    """Let other processes of this user read this one's memory where Yama would only let its ancestors (mode 1).

    Any process of the same user may then attach to this one as a debugger may. Daskmesh calls it on its workers unless
    `daskmesh.transport` is "rpc" or "shm".
    """
    try:
        mode = Path("/proc/sys/kernel/yama/ptrace_scope").read_text(encoding="ascii").strip()
    except OSError:  # no Yama here, so nothing to lift
        return
    if mode == "1":
        any_process = ctypes.c_ulong(-1)
        ctypes.CDLL(None).prctl(0x59616D61, any_process, 0, 0, 0)  # PR_SET_PTRACER


def read(process: Process, view: View, word: int, generation: int) -> None:
    """Read `view` of the memory of `process` into its array, provided that the word at address `word` is `generation`.

    Raises
    ------
    Gone
        The word is not, or the process has ended; the array holds anything then.
    Unreadable
        The word is, but the memory cannot be read.
    """
    repeated = [axis for axis, stride in enumerate(view.strides) if stride == 0]
    if repeated:  # a broadcast array: read each element once
        first = view.out[(*(0 if axis in repeated else slice(None) for axis in range(view.out.ndim)), ...)]
        read(process, View(view.pointer, tuple(s for s in view.strides if s), first), word, generation)
        view.out[...] = np.expand_dims(first, repeated)
        return
    for piece in cut(view, CALL_BYTES):
        _read_piece(process, piece, word, generation)


def _read_piece(process: Process, view: View, word: int, generation: int) -> None:
    shape = view.out.shape
    outer, extent = spanned(view, GAP_BYTES)
    inner, length = contiguous(shape, view.out.strides, view.itemsize)
    dense = extent == view.itemsize * prod(shape[outer:])
    direct = dense and length >= min(extent, SHORT_RUN)
    # Cut further what takes too many runs at once, or too large a buffer.
    excess = max(prod(shape[:outer]), prod(shape[:inner])) / MANY_RUNS
    if not direct:
        excess = extent * prod(shape[:outer]) / BUFFER_BYTES
    if excess > 1 and view.nbytes > view.itemsize:
        for piece in cut(view, max(view.itemsize, min(int(view.nbytes / excess), view.nbytes // 2))):
            _read_piece(process, piece, word, generation)
        return
    remote = addresses(view.pointer, shape[:outer], view.strides[:outer]), extent
    if direct:
        local = addresses(view.out.ctypes.data, shape[:inner], view.out.strides[:inner]), length
        _transfer(process, remote, local, (word, generation))
        return
    buffer = np.empty(extent * len(remote[0]), np.uint8)
    _transfer(process, remote, (np.array([buffer.ctypes.data]), buffer.nbytes), (word, generation))
    strides = tuple(extent * prod(shape[axis + 1 : outer]) for axis in range(outer))
    view.out[...] = np.ndarray(shape, view.out.dtype, buffer, 0, strides + view.strides[outer:])


def _transfer(process: Process, remote: Runs, local: Runs, word: tuple[int, int]) -> None:
    """Read all remote runs into the local ones: the same bytes, cut differently."""
    found = np.zeros(1, np.int64)
    for there, here in _calls(remote, local):
        theirs, ours = _iovecs(*there, word_at=word[0]), _iovecs(*here, word_at=found.ctypes.data)
        found[0] = 0
        try:
            complete = _call(process.pid, theirs, ours) == len(there[0]) * there[1] + 8
        except OSError as error:
            if error.errno not in (errno.EFAULT, errno.ESRCH):
                raise
            complete = False
        if complete and found[0] == word[1]:
            continue
        if complete or read_word(process, word[0]) != word[1]:
            raise Gone(f"process {process.pid} has let go of the array")
        raise Unreadable(f"memory of process {process.pid}")


def _calls(remote: Runs, local: Runs) -> Iterator[tuple[Runs, Runs]]:
    """The runs of each call: as many bytes on both sides, no more than `CALL_RUNS` runs on either."""
    long, short = (remote, local) if remote[1] >= local[1] else (local, remote)
    each = long[1] // short[1]  # short runs in a long one; exact, since both are the last axes of one shape
    together = max(1, CALL_RUNS // each)
    for first in range(0, len(long[0]), together):
        some = long[0][first : first + together]
        shorts = short[0][first * each : (first + together) * each]
        for at in range(0, len(shorts), CALL_RUNS):
            mine = shorts[at : at + CALL_RUNS]
            length = len(mine) * short[1] // len(some)
            pair = (some + at * short[1], length), (mine, short[1])
            yield pair if long is remote else (pair[1], pair[0])
