"""Direct connections between worker processes, for messages that cannot wait for an event loop.

Every process has one `Endpoint`. It listens, and keeps one connection per peer process, over which the messages of all
ranks that live there are multiplexed. There is no thread that reads: **a thread that waits for a message reads the
sockets itself**, so a message wakes the very thread that wants it.

::

    rank 0 ── receive ──> nobody reads yet: read all sockets ──> mine: return it, hand the reading to rank 2
    rank 2 ── receive ──> somebody reads: sleep on a lock    <── rank 0 put rank 2's message here and woke it

Messages from one rank to another arrive in the order in which they were sent, so a message needs no number: the n-th
one sent is the n-th one received, and a rank that made another call than its peer is found out at once. What a
message belongs to is its `Tag`: region, attempt, source rank, target rank. Messages of an attempt that is over are
dropped where they arrive.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from daskmesh.errors import packed_error, unpacked_error
from daskmesh.wires import Address, Listener, PeerLost, Watch, Wire, dial

__all__ = ["Address", "Endpoint", "PeerLost", "RankLeft", "Tag"]

#: Bytes read from a socket in one call.
READ_BYTES = 2**18
#: Attempts that are over are remembered this long (counted in attempts), to drop their late messages.
REMEMBERED = 4096
#: Seconds between two tries to write to a full socket.
FULL_SECONDS = 0.002

_HEAD = struct.Struct("<QQIIIB")  # length of the body, region, attempt, source, target, kind
_DATA, _ABORT, _LEFT = range(3)


class RankLeft(RuntimeError):
    """A peer has left the region and will send nothing more."""


class Tag(NamedTuple):
    """Who speaks to whom, in which attempt of which region."""

    region: int
    attempt: int
    source: int
    target: int


@dataclass(eq=False, slots=True)
class _Waiter:
    """A thread waiting for one message; it sleeps on `alarm` unless it is the one that reads the sockets."""

    tag: Tag
    source: str
    thread: int
    alarm: threading.Lock
    outcome: bytearray | BaseException | None = None


class Endpoint:
    """This process's end of all its direct connections; `key` is the secret that all peers share.

    `host` is the interface to listen on for TCP (None: Unix socket only). Where no connection is possible, `relay`
    carries a frame to a peer by other means, and the peer hands it to `deliver`.
    """

    def __init__(
        self,
        key: bytes,
        host: str | None = None,
        relay: Callable[[Address, bytes], None] | None = None,
        worker: str = "",
    ) -> None:
        self.key = key
        self._relay = relay
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        self._mail: dict[Tag, deque[bytearray]] = {}
        self._waiters: dict[Tag, _Waiter] = {}
        self._reader: object | None = None
        self._members: dict[tuple[int, int], int] = {}
        self._aborted: dict[tuple[int, int], BaseException] = {}
        self._left: dict[tuple[int, int], set[int]] = {}
        self._over: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._wires: dict[str, Wire] = {}
        self._lost: set[str] = set()
        self._scratch = memoryview(bytearray(READ_BYTES))
        self._watch = Watch()
        self._by_fd: dict[int, Wire] = {}
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        self._watch.add(self._bell)
        self._closed = False
        self._listener = Listener(key, self._add_wire, host, worker)
        self.address = self._listener.address

    def _wire(self, to: Address) -> Wire | None:
        with self._connecting:
            if to.name not in self._wires:
                if to.name in self._lost:
                    raise PeerLost(f"the process {to.name} has gone")
                peer = dial(to, self.key, self.address.name)
                if peer is None and self._relay is None:
                    raise PeerLost(f"no road to the process that listens at {to.host or 'a local socket'}:{to.port}")
                if peer is not None:
                    self._add_wire(peer, to.name)
            return self._wires.get(to.name)

    def _add_wire(self, peer: socket.socket, name: str) -> None:
        wire = Wire(peer, name)
        with self._lock:
            if self._closed:
                peer.close()
                return
            # Both sides may connect at once: each goes on sending where it first did, so the order is kept.
            self._wires.setdefault(name, wire)
            self._by_fd[peer.fileno()] = wire
            self._watch.add(peer)
            self._ring_bell()  # whoever polls now does not know of it yet

    # -- regions ---------------------------------------------------------------------------------------------------

    def enter(self, region: int, attempt: int, ranks: int) -> None:
        """Keep messages of this attempt until the `ranks` ranks that it has in this process have left."""
        with self._lock:
            self._members.setdefault((region, attempt), ranks)

    def leave(self, region: int, attempt: int) -> None:
        """Count one rank out; with the last one the attempt is over and whatever still arrives for it is dropped."""
        key = (region, attempt)
        with self._lock:
            self._members[key] -= 1
            if self._members[key]:
                return
            del self._members[key]
            self._over[key] = None
            while len(self._over) > REMEMBERED:
                self._over.popitem(last=False)
            for tag in [tag for tag in self._mail if tag[:2] == key]:
                del self._mail[tag]
            self._aborted.pop(key, None)
            self._left.pop(key, None)

    def abort(self, region: int, attempt: int, error: BaseException) -> None:
        """Wake everyone in this process who waits in this attempt, and whoever waits there later, with `error`."""
        key = (region, attempt)
        with self._lock:
            if key in self._over:
                return
            self._aborted.setdefault(key, error)
            for waiter in self._waiters.values():
                if waiter.tag[:2] == key:
                    self._resolve(waiter, error)

    def aborted(self, region: int, attempt: int) -> BaseException | None:
        """The error with which this attempt was ended, if it was."""
        return self._aborted.get((region, attempt))

    def waiting(self) -> list[Tag]:
        """List the messages that threads of this process wait for."""
        return list(self._waiters)

    # -- sending ---------------------------------------------------------------------------------------------------

    def send(self, to: Address, tag: Tag, body: bytes) -> None:
        """Send `body`; returns when the bytes are on their way. Raises PeerLost, or the error of an abort."""
        self._send(to, tag, _DATA, body)

    def send_abort(self, to: Address, tag: Tag, error: BaseException) -> None:
        """Make the process `to` call `abort` with this error."""
        self._send(to, tag, _ABORT, packed_error(error))

    def send_left(self, to: Address, tag: Tag) -> None:
        """Tell the process `to` that the source rank of `tag` sends nothing more."""
        self._send(to, tag, _LEFT, b"")

    def _send(self, to: Address, tag: Tag, kind: int, body: bytes) -> None:
        if to.name == self.address.name:
            self._handle(tag, kind, bytearray(body))
            return
        frame = _HEAD.pack(len(body), *tag, kind) + body
        wire = self._wires.get(to.name) or self._wire(to)
        if wire is None:
            if self._relay is not None:
                self._relay(to, frame)
            return
        with wire.lock:
            try:
                if not wire.push(frame):
                    self._flush(wire, tag)
            except OSError as error:
                self._lose(wire)
                raise PeerLost(f"the connection to a peer of rank {tag.source} broke: {error}") from error

    def _flush(self, wire: Wire, tag: Tag) -> None:
        """Write what is left; meanwhile read, because the peer may be as stuck as we are.

        An aborted sender goes; the rest of its message stays in the outbox, so the stream stays whole.
        """
        while wire.outbox:
            if error := self._aborted.get(tag[:2]):
                raise error
            with self._lock:
                mine = self._reader is None
                if mine:
                    self._reader = wire
            try:
                if mine:
                    self._pump(FULL_SECONDS)
                else:
                    time.sleep(FULL_SECONDS)
            finally:
                if mine:
                    with self._lock:
                        self._hand_over()
            wire.push(b"")

    # -- receiving -------------------------------------------------------------------------------------------------

    def receive(self, tag: Tag, source: Address, timeout: float | None = None) -> bytearray:
        """Wait for the next message of `tag`. Raises TimeoutError, PeerLost, RankLeft, or the error of an abort."""
        waiter = _Waiter(tag, source.name, threading.get_ident(), threading.Lock())
        with self._lock:
            mail = self._mail.get(tag)
            if mail:
                return mail.popleft()
            if error := self._hopeless(waiter):
                raise error.with_traceback(None)
            self._waiters[tag] = waiter
            waiter.alarm.acquire()
            if self._reader is None:
                self._reader = waiter
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while waiter.outcome is None:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"rank {tag.target} has waited {timeout} s for rank {tag.source}")
                if self._reader is waiter:
                    self._pump(left)
                else:
                    waiter.alarm.acquire(timeout=-1 if left is None else left)
        finally:
            with self._lock:
                del self._waiters[tag]
                if self._reader is waiter:
                    self._hand_over()
        if isinstance(waiter.outcome, BaseException):
            raise waiter.outcome.with_traceback(None)
        return waiter.outcome

    def _hopeless(self, waiter: _Waiter) -> BaseException | None:
        """Say why this waiter's message cannot come any more, if so."""
        tag = waiter.tag
        if self._closed:
            return PeerLost("this process has closed its connections")
        if error := self._aborted.get(tag[:2]):
            return error
        if tag.source in self._left.get(tag[:2], ()):
            return RankLeft(f"rank {tag.source} has left the region while rank {tag.target} waits for it")
        if waiter.source in self._lost:
            return PeerLost(f"the process of rank {tag.source} has gone")
        return None

    def _hand_over(self) -> None:
        """Let another waiting thread read, as this one stops; holds the lock."""
        for waiter in self._waiters.values():
            if waiter.outcome is None:
                self._reader = waiter
                waiter.alarm.release()
                return
        self._reader = None
        if self._closed:
            self._shut()

    def _pump(self, timeout: float | None) -> None:
        """Wait until a socket has something, and hand out all it has; only the reader calls this."""
        for fd in self._watch.wait(timeout):
            wire = self._by_fd.get(fd)
            if wire is not None:
                self._read(wire)
            elif fd == self._bell.fileno():
                self._bell.recv(READ_BYTES)

    def _read(self, wire: Wire) -> None:
        try:
            if not wire.pull(self._scratch, self._parse):
                self._lose(wire)
        except OSError:
            self._lose(wire)

    def _parse(self, view: memoryview, count: int) -> int:
        """Handle the whole frames in the first `count` bytes; return how many of them they took."""
        done = 0
        while done + _HEAD.size <= count:
            size, region, attempt, source, target, kind = _HEAD.unpack_from(view, done)
            end = done + _HEAD.size + size
            if end > count:
                break
            self._handle(Tag(region, attempt, source, target), kind, bytearray(view[done + _HEAD.size : end]))
            done = end
        return done

    def deliver(self, frame: bytes) -> None:
        """Take a frame that a peer's `relay` carried here."""
        self._parse(memoryview(frame), len(frame))

    def _handle(self, tag: Tag, kind: int, body: bytearray) -> None:
        key = tag[:2]
        if kind == _ABORT:
            self.abort(*key, unpacked_error(body))
            return
        with self._lock:
            if key in self._over:
                return
            if kind == _LEFT:
                self._left.setdefault(key, set()).add(tag.source)
                for waiter in self._waiters.values():
                    if waiter.tag[:3] == tag[:3]:
                        self._resolve(waiter, self._hopeless(waiter))
                return
            waiting = self._waiters.get(tag)
            if waiting is not None and waiting.outcome is None:
                self._resolve(waiting, body)
            else:
                self._mail.setdefault(tag, deque()).append(body)

    def _resolve(self, waiter: _Waiter, outcome: bytearray | BaseException | None) -> None:
        """Give a waiter its outcome and wake it; holds the lock."""
        if waiter.outcome is not None:
            return
        waiter.outcome = outcome
        if waiter.thread == threading.get_ident():
            return
        if self._reader is waiter:
            self._ring_bell()
        else:
            waiter.alarm.release()

    def _ring_bell(self) -> None:
        with suppress(BlockingIOError):  # full of rings that nobody has heard yet: it will be heard
            self._ring.send(b"\0")

    # -- ending ----------------------------------------------------------------------------------------------------

    def _lose(self, wire: Wire) -> None:
        with self._lock:
            if wire.peer in self._lost and wire.socket.fileno() < 0:
                return
            self._lost.add(wire.peer)
            self._wires.pop(wire.peer, None)
            if wire.socket.fileno() >= 0:
                self._watch.drop(wire.socket)
                del self._by_fd[wire.socket.fileno()]
                wire.socket.close()
            wire.outbox.clear()
            for waiter in self._waiters.values():
                if waiter.source == wire.peer:
                    self._resolve(waiter, self._hopeless(waiter))

    def close(self) -> None:
        """Close every connection; peers see this process as gone, and so does whoever waits here."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._listener.close()
            wires = list(self._by_fd.values())
            for waiter in self._waiters.values():
                self._resolve(waiter, PeerLost("this process has closed its connections"))
        for wire in wires:
            self._lose(wire)
        with self._lock:
            if self._reader is None:
                self._shut()

    def _shut(self) -> None:
        self._bell.close()
        self._ring.close()
