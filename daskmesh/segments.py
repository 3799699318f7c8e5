"""Shared memory between two processes of a host, for where one may not read the other's memory.

The reader makes a segment and names it; the owner of the array maps it and copies the views asked for into it; the reader
copies out. Filling fresh memory is several times slower than filling memory that was filled before, so segments are kept
for the next load. The name is removed as soon as the owner has mapped the segment: what has no name cannot be left behind,
however the two processes end.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import threading
from collections import OrderedDict
from pathlib import Path

from daskmesh.vm import Process, this_process

__all__ = ["SEGMENT_BYTES", "Mappings", "Segment", "give", "remove_leftovers", "take", "throw_away"]

DIRECTORY = Path("/dev/shm")
SEGMENT_BYTES = 8 * 2**20 + 2**16
MAX_IDLE = 8  # kept by a reader for the next load, all owners together
MAX_MAPPED = 64  # kept by an owner, all readers together


def _prefix() -> str:
    namespace = re.sub(r"\D", "", this_process().pids) or "0"
    return f"daskmesh-{namespace[:20]}-"


class Segment:
    """A piece of shared memory that this process reads and another one fills.

    Raises
    ------
    OSError
        There is no shared memory, or no room in it.

    Examples
    --------
    >>> segment = Segment()
    >>> len(segment.memory) == SEGMENT_BYTES, segment.path.exists()
    (True, True)
    >>> segment.unlink()
    >>> segment.path.exists()
    False
    """

    __slots__ = ("memory", "name", "path")

    def __init__(self) -> None:
        self.name = f"{_prefix()}{os.getpid()}-{secrets.token_hex(8)}"
        self.path = DIRECTORY / self.name
        file = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            # Reserved at once: writing to shared memory that has run out kills the writer.
            os.posix_fallocate(file, 0, SEGMENT_BYTES)
            self.memory = mmap.mmap(file, SEGMENT_BYTES)
        except BaseException:
            self.path.unlink()
            raise
        finally:
            os.close(file)

    def unlink(self) -> None:
        """Remove the name, if it is still there; the memory goes when neither process uses it any more."""
        self.path.unlink(missing_ok=True)


_lock = threading.Lock()
_idle: list[tuple[Process, Segment]] = []  # the one used last comes last


def take(owner: Process) -> Segment:
    """A segment for `owner` to fill: one that it has mapped already, or a new one.

    Raises
    ------
    OSError
        There is no shared memory, or no room in it.
    """
    with _lock:
        for at in range(len(_idle) - 1, -1, -1):
            if _idle[at][0] == owner:
                return _idle.pop(at)[1]
    return Segment()


def give(owner: Process, segment: Segment) -> None:
    """Keep a segment that `owner` has mapped, and that nobody writes to or reads any more, for the next load."""
    segment.unlink()
    with _lock:
        _idle.append((owner, segment))
        del _idle[:-MAX_IDLE]


def throw_away() -> None:
    """Keep no segments any more.

    Examples
    --------
    >>> throw_away()
    """
    with _lock:
        _idle.clear()


class Mappings:
    """Segments of readers that this process has mapped to fill them.

    Examples
    --------
    >>> segment, mappings = Segment(), Mappings()
    >>> memory = mappings.find(segment.name)
    >>> memory[:2] = b"ab"
    >>> segment.memory[:2]
    b'ab'
    >>> segment.unlink()
    >>> mappings.find("daskmesh-0-1-0") is None
    True
    """

    def __init__(self) -> None:
        self._mapped: OrderedDict[str, mmap.mmap] = OrderedDict()

    def __len__(self) -> int:
        return len(self._mapped)

    def find(self, name: str) -> mmap.mmap | None:
        """The memory of the segment; None if it is not mapped and its name is not there."""
        if name in self._mapped:
            self._mapped.move_to_end(name)
            return self._mapped[name]
        if re.fullmatch(r"daskmesh-[0-9a-f-]+", name) is None:
            raise ValueError(f"{name!r} is not the name of a daskmesh segment")
        try:
            file = os.open(DIRECTORY / name, os.O_RDWR)
            try:
                self._mapped[name] = memory = mmap.mmap(file, SEGMENT_BYTES)
            finally:
                os.close(file)
        except OSError:  # removed, of another user, or in shared memory that this process does not see
            return None
        for other in [other for other in self._mapped if other != name and _left(other)]:
            del self._mapped[other]
        while len(self._mapped) > MAX_MAPPED:
            self._mapped.popitem(last=False)
        return memory

    def clear(self) -> None:
        """Map none any more."""
        self._mapped.clear()


def _left(name: str) -> bool:
    """Whether the process that made the segment has ended, as far as can be seen from here."""
    if not name.startswith(_prefix()):
        return False
    try:
        os.kill(int(name[len(_prefix()) :].split("-")[0]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def remove_leftovers() -> list[str]:
    """Remove segments whose maker was killed before their name was removed; their names.

    Examples
    --------
    >>> remove_leftovers()
    []
    """
    if not DIRECTORY.is_dir():
        return []
    gone = [path for path in DIRECTORY.glob(_prefix() + "*") if _left(path.name)]
    for path in gone:
        path.unlink(missing_ok=True)
    return [path.name for path in gone]
