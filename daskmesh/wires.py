"""Sockets between processes that know the same key: a Unix socket on one machine, TCP across.

Both ends prove that they know the key before a byte of anything else is read, by the challenge of the standard library's
`multiprocessing.connection`.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import struct
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

__all__ = ["Address", "Listener", "PeerLost", "Watch", "Wire", "dial", "machine_id"]

#: Seconds to reach a peer and to prove knowledge of the key.
CONNECT_SECONDS = 10
#: Seconds to look for a message before sleeping until it comes: at the least, and for each look that paid more than others did.
LOOK_SECONDS = 100e-6
MORE_SECONDS = 600e-6
#: Such looks that are counted; without any it looks only every so many waits.
CREDIT = 8
TRY_AGAIN = 16
#: The share of a look that its thread must have run for, or others waited for the CPU or the interpreter.
RUNNING = 0.8
#: Lets another thread have the CPU, if one waits for it; the function of `os` would keep the interpreter meanwhile.
_yield: Callable[[], int] = ctypes.CDLL(None).sched_yield
LONGEST_POLL = 2**31 - 1  # milliseconds, in the type of the system call
_UNIX = getattr(socket, "AF_UNIX", None)
_REFUSALS = (OSError, EOFError, AuthenticationError, ValueError)


class PeerLost(ConnectionError):
    """The process of a peer has gone, or cannot be reached.

    Examples
    --------
    >>> issubclass(PeerLost, ConnectionError)
    True
    """


@dataclass(frozen=True)
class Address:
    """Where a process listens: a Unix socket on its own machine, and TCP (port 0: not at all); `worker` is its Dask worker.

    Examples
    --------
    >>> Address("a1", "here", host="10.0.0.1", port=4000).local
    ''
    """

    name: str
    machine: str
    local: str = ""
    host: str = ""
    port: int = 0
    worker: str = ""


def machine_id() -> str:
    """Name what two processes must share to reach each other by a Unix socket: the boot and the network namespace.

    Examples
    --------
    >>> machine_id() == machine_id()
    True
    """
    if sys.platform != "linux":
        return f"{socket.gethostname()}-{uuid.getnode()}"
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()}-{os.readlink('/proc/self/ns/net')}"


@dataclass(eq=False)
class Wire:
    """One socket to a peer process that never blocks, with what could not be written yet, and half of what is read.

    Only the holder of `lock` pushes; only one thread at a time pulls.

    Examples
    --------
    >>> ends = [Wire(end, "peer") for end in socket.socketpair()]
    >>> ends[0].push(b"hello"), ends[1].pull(memoryview(bytearray(8)), lambda view, count: print(bytes(view[:count])) or count)
    b'hello'
    (True, True)
    >>> for end in ends:
    ...     end.socket.close()
    """

    socket: socket.socket
    peer: str
    lock: threading.Lock = field(default_factory=threading.Lock)
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)

    def push(self, frame: bytes) -> bool:
        """Write `frame` after all that was pushed before; False if some of it must wait for the peer to read."""
        try:
            if not self.outbox:
                sent = self.socket.send(frame)
                if sent < len(frame):
                    self.outbox += memoryview(frame)[sent:]
            else:
                self.outbox += frame
                del self.outbox[: self.socket.send(self.outbox)]
        except BlockingIOError:
            if not self.outbox:
                self.outbox += frame
        return not self.outbox

    def pull(self, scratch: memoryview, parse: Callable[[memoryview, int], int]) -> bool:
        """Read what is there, through `scratch`; `parse` says how much of it was whole. False at the end of the stream."""
        try:
            count = self.socket.recv_into(scratch)
        except BlockingIOError:
            return True
        if self.inbox:
            self.inbox += scratch[:count]
            with memoryview(self.inbox) as view:
                done = parse(view, len(self.inbox))
            del self.inbox[:done]
        else:
            done = parse(scratch, count)
            if done < count:
                self.inbox += scratch[done:count]
        return count > 0


@dataclass(eq=False)
class Watch:
    """Says which sockets have something to read: it looks for a while before it sleeps, as long as that mostly pays.

    Falling asleep and being woken takes longer than a message does between two processes that both run, and a CPU that was put to
    sleep is slow at first. Where others wait for a CPU, looking would only take it from the one that is waited for: so each look
    gives it away, and does not count among those that paid.

    Examples
    --------
    >>> watch, (near, far) = Watch(), socket.socketpair()
    >>> watch.add(near)
    >>> far.send(b"hello"), watch.wait(10) == [near.fileno()]
    (5, True)
    >>> watch.drop(near), near.close(), far.close()
    (None, None, None)
    """

    _poll: select.poll = field(default_factory=select.poll)
    _credit: int = CREDIT
    _waits: int = 0

    def add(self, peer: socket.socket) -> None:
        """Watch this socket too."""
        self._poll.register(peer, select.POLLIN)

    def drop(self, peer: socket.socket) -> None:
        """Watch it no more."""
        self._poll.unregister(peer)

    def wait(self, timeout: float | None) -> list[int]:
        """Wait until something can be read, for so many seconds; where."""
        found = self._poll.poll(0)
        self._waits += 1
        if not found and (self._credit or self._waits % TRY_AGAIN == 0):
            start = time.perf_counter()
            found = self._look(start, timeout)
            timeout = None if timeout is None else max(timeout - (time.perf_counter() - start), 0)
        if not found:
            found = self._poll.poll(None if timeout is None else min(timeout * 1000, LONGEST_POLL))
        return [fd for fd, _ in found]

    def _look(self, start: float, timeout: float | None) -> list[tuple[int, int]]:
        ran, now = time.thread_time(), start
        seconds = max(LOOK_SECONDS, self._credit * MORE_SECONDS)
        end = start + (seconds if timeout is None else min(seconds, timeout))
        # Each look lets go of the interpreter, and of the CPU where another thread waits for it.
        while not (found := self._poll.poll(0)) and now < end:
            _yield()
            now = time.perf_counter()
        paid = bool(found) and time.thread_time() - ran >= RUNNING * (now - start)
        self._credit = min(self._credit + 1, CREDIT) if paid else max(self._credit - 1, 0)
        return found


@dataclass(eq=False)
class Listener:
    """Accepts peers; `welcome` gets each one's socket and name, once it has proved that it knows the key.

    `host` is the interface to listen on for TCP; without it only processes of this machine get through.

    Examples
    --------
    >>> listener = Listener(b"key", lambda peer, name: peer.close())
    >>> peer = dial(listener.address, b"key", "me")
    >>> peer.close(), listener.close()
    (None, None)
    """

    key: bytes
    welcome: Callable[[socket.socket, str], None]
    host: str | None = None
    worker: str = ""
    address: Address = field(init=False)
    _open: list[socket.socket] = field(default_factory=list)

    def __post_init__(self) -> None:
        name, local, port = uuid.uuid4().hex, "", 0
        if _UNIX is not None:
            # An abstract name leaves no file behind when the process is killed.
            local = f"\0daskmesh-{name}" if sys.platform == "linux" else f"{tempfile.mkdtemp('daskmesh')}/links"
            listener = socket.socket(_UNIX)
            listener.bind(local)
            listener.listen(128)
            self._open.append(listener)
        if self.host is not None:
            self._open.append(socket.create_server((self.host, 0), family=_family(self.host), backlog=128))
            port = self._open[-1].getsockname()[1]
        self.address = Address(name, machine_id(), local, self.host or "", port, self.worker)
        for listener in self._open:
            threading.Thread(target=self._accept, args=(listener,), name="daskmesh-accept", daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return  # closed
            # One that never answers the challenge must not keep the others waiting.
            threading.Thread(target=self._greet, args=(peer,), name="daskmesh-greet", daemon=True).start()

    def _greet(self, peer: socket.socket) -> None:
        connection = _connection(peer)
        try:
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
            name = connection.recv_bytes(64).decode()
        except _REFUSALS:
            connection.close()
            return
        self.welcome(_socket(connection), name)

    def close(self) -> None:
        """Accept no more."""
        for listener in self._open:
            # A thread that sleeps in accept() hears a shutdown, but not a close.
            try:
                listener.shutdown(socket.SHUT_RDWR)
            except OSError:  # macOS: a listener is not connected; there close() does it
                pass
            listener.close()
        self._open.clear()


def dial(to: Address, key: bytes, name: str) -> socket.socket | None:
    """Connect to the process that listens at `to` and introduce ourselves as `name`; None if there is no road.

    **Communication**: one connection and its challenge, by the Unix socket if both are on one machine, else TCP.

    Examples
    --------
    >>> dial(Address("gone", machine_id(), "\\0nobody-listens-here"), b"key", "me") is None
    True
    """
    roads: list[tuple[int, str | tuple[str, int]]] = []
    if to.local and _UNIX is not None and to.machine == machine_id():
        roads.append((_UNIX, to.local))
    if to.port:
        roads.append((_family(to.host), (to.host, to.port)))
    for family, target in roads:
        peer = socket.socket(family)
        peer.settimeout(CONNECT_SECONDS)
        try:
            peer.connect(target)
        except OSError:
            peer.close()
            continue
        connection = _connection(peer)
        try:
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
            connection.send_bytes(name.encode())
        except _REFUSALS:
            connection.close()
            continue
        return _socket(connection)
    return None


def _family(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _connection(peer: socket.socket) -> Connection:
    """Hand the socket to the standard library for the challenge, which must not take for ever."""
    peer.setblocking(True)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        peer.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", CONNECT_SECONDS, 0))
    return Connection(peer.detach())


def _socket(connection: Connection) -> socket.socket:
    """Take the socket back, set up for short messages."""
    peer = socket.socket(fileno=os.dup(connection.fileno()))
    connection.close()
    peer.setblocking(False)
    if peer.family != _UNIX:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return peer
