"""Arrays between the ranks of a group: small ones inline in a message, large ones exposed and loaded.

A message is the array's bytes (or a ticket for them) and a *head*: the call it belongs to, dtype and shape. The call is
written out, ``all_reduce(float64 (3, 4), 'dp', op='sum')``, and compared: a rank that made another call than its peer
learns both names. A head is the same bytes each time round a loop, so packing and unpacking it are lookups.

::

    small   source ── bytes + head ──────────────> target          copied once on each side
    large   source ── ticket + head ─────────────> target          the source goes on
                   <═══════ loads the view ═══════                  one copy, straight into the result
                   <─────────── done ────────────                   now the source may change the array
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import numpy as np

from daskmesh.links import Address, Endpoint, PeerLost, RankLeft, Tag
from daskmesh.recycling import empty
from daskmesh.store import ShardStore, Ticket, TicketLost
from daskmesh.transport import load_into

__all__ = ["Group", "Line", "Mismatch", "Parcel"]

Array = Any

#: From this many bytes on an array is exposed and loaded; below, copying it twice is faster.
INLINE_BYTES = 2**18
_TAIL = struct.Struct("<I")
_BYTES, _PICKLE, _TICKET = range(3)
_DONE = "done"


class Mismatch(RuntimeError):
    """Two ranks made different collective calls at the same point.

    Examples
    --------
    >>> issubclass(Mismatch, RuntimeError)
    True
    """


class Head(NamedTuple):
    """What is said about the array of a message."""

    call: str
    kind: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


@lru_cache(1024)
def _pack_head(call: str, kind: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    packed = pickle.dumps((call, kind, dtype, shape))
    return packed + _TAIL.pack(len(packed))


@lru_cache(1024)
def _unpack_head(packed: bytes) -> Head:
    return Head(*pickle.loads(packed))


@dataclass(eq=False)
class Line:
    """One rank's end of its conversations with the others, within one attempt of one region.

    `store` holds what this rank exposes; `table` says where each rank's process listens; `stuck` turns a timeout into an error
    that says more.
    """

    endpoint: Endpoint
    store: ShardStore
    region: int
    attempt: int
    rank: int
    table: Mapping[int, Address]
    timeout: float | None = None
    stuck: Callable[[TimeoutError], NoReturn] | None = None
    doing: str = ""
    _overdue: int | None = None  # the rank that this one has given up waiting for
    _exposed: int = 0
    _routes: dict[int, tuple[tuple[Address, Tag], tuple[Tag, Address]]] = field(default_factory=dict)

    def send(self, target: int, body: bytes) -> None:
        """Send `body` to the rank `target`."""
        self.endpoint.send(*self._route(target)[0], body)

    def receive(self, source: int, call: str = "") -> bytearray:
        """Wait for the next message of the rank `source`, for the sake of `call`."""
        self.doing = call
        try:
            return self.endpoint.receive(*self._route(source)[1], self.timeout)
        except RankLeft:
            raise RankLeft(
                f"rank {source} has returned from the region, but rank {self.rank} waits for it in {call}; all ranks of a "
                "group must make the same collective calls"
            ) from None
        except TimeoutError as error:
            if self.stuck is None:
                raise
            self._overdue = source
            self.stuck(error)

    def _route(self, peer: int) -> tuple[tuple[Address, Tag], tuple[Tag, Address]]:
        """What the endpoint wants to know to send to a rank, and to receive from it."""
        if peer not in self._routes:
            where = self.table[peer]
            there = Tag(self.region, self.attempt, self.rank, peer)
            back = Tag(self.region, self.attempt, peer, self.rank)
            self._routes[peer] = ((where, there), (back, where))
        return self._routes[peer]

    @property
    def whereabouts(self) -> str:
        """What this rank is doing, for messages."""
        mine = [tag for tag in self.endpoint.waiting() if (tag.region, tag.target) == (self.region, self.rank)]
        source = mine[0].source if mine else self._overdue
        if source is not None:
            return f"waits for rank {source} in {self.doing}"
        return f"is computing, after {self.doing}" if self.doing else "is computing, before its first collective"

    @property
    def aborted(self) -> BaseException | None:
        """The error with which this attempt was ended, if it was."""
        return self.endpoint.aborted(self.region, self.attempt)

    def expose(self, array: Array) -> Ticket:
        """Let others load from `array` until `withdraw` or `close`."""
        self._exposed += 1
        return self.store.put(self._key(self._exposed), [array])[0]

    def withdraw(self) -> None:
        """Let go of everything exposed."""
        while self._exposed:
            self.store.free(self._key(self._exposed))
            self._exposed -= 1

    def _key(self, number: int) -> tuple[str, int, int, int, int]:
        return ("daskmesh-region", self.region, self.attempt, self.rank, number)

    def enter(self) -> None:
        """Begin: messages for this attempt are kept from now on."""
        here = sum(address.name == self.endpoint.address.name for address in self.table.values())
        self.endpoint.enter(self.region, self.attempt, here)

    def close(self, error: BaseException | None = None) -> None:
        """End: tell the others that this rank sends nothing more or, with `error`, make them raise it."""
        self.withdraw()
        tag = Tag(self.region, self.attempt, self.rank, self.rank)
        for address in {address.name: address for address in self.table.values()}.values():
            try:
                if error is None:
                    self.endpoint.send_left(address, tag)
                else:
                    self.endpoint.send_abort(address, tag, error)
            except PeerLost:
                continue  # whoever waited there has gone with it
        self.endpoint.leave(self.region, self.attempt)


@dataclass(eq=False)
class Parcel:
    """An array that a peer sent: its shape and dtype are known, its bytes are here or can be loaded."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    _held: Array | Ticket
    _source: int

    def into(self, out: Array, index: tuple[slice, ...] = ()) -> None:
        """Write the array into `out`, of the same shape, or a view of it."""
        if not isinstance(self._held, Ticket):
            out[...] = self._held[index]
            return
        try:
            load_into(self._held, index, out)
        except TicketLost as error:
            raise PeerLost(f"what index {self._source} of the group had exposed is gone") from error

    def take(self) -> Array:
        """The array, fresh and writable."""
        if not isinstance(self._held, Ticket):
            return self._held
        out = empty(self.shape, self.dtype)
        self.into(out)
        return out


@dataclass(eq=False)
class Group:
    """The ranks of one collective call, in the order of their coordinates, seen by one of them.

    `label` is how calls name the group; `index` is this rank's place in `ranks`.
    """

    line: Line | None
    ranks: tuple[int, ...]
    index: int
    label: str
    _tickets: dict[int, tuple[Array, Ticket]] = field(default_factory=dict)
    size: int = 0
    _lent: list[int] = field(default_factory=list)
    _loaded: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.size = len(self.ranks)

    def send(self, to: int, call: str, array: Array) -> None:
        """Send `array` to the index `to`. A large one must not change until `settle`."""
        if array.dtype.hasobject:
            kind, body = _PICKLE, pickle.dumps(array, 5)
        elif array.nbytes < INLINE_BYTES:
            kind, body = _BYTES, array.tobytes()
        else:
            kind, body = _TICKET, pickle.dumps(self._ticket(array), 5)
            self._lent.append(to)
        line = self.line or _speechless(self)
        line.send(self.ranks[to], body + _pack_head(call, kind, array.dtype, array.shape))

    def receive(self, source: int, call: str) -> Parcel:
        """Take what the index `source` sent, which must belong to the same call."""
        line = self.line or _speechless(self)
        body = line.receive(self.ranks[source], call)
        end = len(body) - _TAIL.size
        start = end - _TAIL.unpack_from(body, end)[0]
        head = _unpack_head(bytes(body[start:end]))
        if head.call != call:
            raise Mismatch(
                f"rank {line.rank} called {call}, but rank {self.ranks[source]} called {head.call} at the same "
                "point; all ranks of a group must make the same collective calls in the same order, with the same shapes"
            )
        if head.kind == _BYTES:
            held: Array | Ticket = np.ndarray(head.shape, head.dtype, body)
        else:
            held = pickle.loads(memoryview(body)[:start])
            if head.kind == _TICKET:
                self._loaded.append(source)
        return Parcel(head.shape, head.dtype, held, source)

    def settle(self) -> None:
        """Wait until all peers have loaded what was sent, so that it may change; say that all that came has been loaded."""
        if not (self._loaded or self._lent):
            return
        line = self.line or _speechless(self)
        for source in self._loaded:
            line.send(self.ranks[source], _pack_head(_DONE, _BYTES, _NOTHING.dtype, _NOTHING.shape))
        self._loaded.clear()
        for target in self._lent:
            self.receive(target, _DONE)
        self._lent.clear()
        if self._tickets:
            line.withdraw()
            self._tickets.clear()

    def _ticket(self, array: Array) -> Ticket:
        """One ticket for an array, whoever it goes to."""
        if id(array) not in self._tickets:
            self._tickets[id(array)] = (array, (self.line or _speechless(self)).expose(array))
        return self._tickets[id(array)][1]


def _speechless(group: Group) -> NoReturn:
    raise RuntimeError(f"the group {group.label} of {group.size} ranks has no line to speak over")


_NOTHING = np.empty(0)
