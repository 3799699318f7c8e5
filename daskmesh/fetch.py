"""Asking the worker that holds an array for views of it, over whatever comm the cluster uses.

The owner slices before it sends. Views are asked for in messages of at most 8 MiB, several small views to one peer in
one message, and a worker has at most `daskmesh.max-inflight-bytes` under way at once. The coroutines run on the event
loop of the worker and only fetch; the task's thread, which waits anyway, copies what arrived into place. So nothing is
written to a result after the load has returned or raised.
"""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from distributed import Worker
from distributed.core import Status, send_recv
from distributed.utils import in_async_call

from daskmesh import config, segments
from daskmesh.segments import SEGMENT_BYTES, Segment
from daskmesh.store import Ticket, TicketLost
from daskmesh.views import Index, view_shape
from daskmesh.vm import Process, this_process

__all__ = ["Budget", "Fetch", "Load", "budget_of", "shares_memory"]

MESSAGE_BYTES = 8 * 2**20
MESSAGE_VIEWS = 64
ALIGNMENT = 64
MESSAGES = 32  # under way at once, however small


@dataclass(slots=True, eq=False)
class Load:
    """One view on its way: `out[...] = <the ticket's array>[index]`.

    Examples
    --------
    >>> import numpy as np
    >>> from daskmesh.store import expose
    >>> Load(expose(np.ones(3)), (slice(0, 2),), np.empty(2)).nbytes
    16
    """

    ticket: Ticket
    index: Index
    out: Any

    @property
    def nbytes(self) -> int:
        """Bytes of the view."""
        size = self.ticket.dtype.itemsize
        for extent in view_shape(self.index):
            size *= extent
        return size


class Budget:
    """Bytes and messages that one worker has under way; used from its event loop only.

    Examples
    --------
    >>> budget = Budget()
    >>> asyncio.run(budget.take(100))
    >>> budget.give(100)
    >>> budget.used, budget.peak
    (0, 100)
    """

    def __init__(self) -> None:
        self.used = 0
        self.messages = 0
        self.peak = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self, nbytes: int) -> None:
        """Wait until `nbytes` more may be under way; a single message always may."""
        while self.messages and (self.messages >= MESSAGES or self.used + nbytes > config.nbytes("max-inflight-bytes")):
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn
        self.messages += 1
        self.used += nbytes
        self.peak = max(self.peak, self.used)

    def give(self, nbytes: int) -> None:
        """The message has been dealt with."""
        self.messages -= 1
        self.used -= nbytes
        waiting, self._waiting = self._waiting, deque()
        for turn in waiting:
            if not turn.done():
                turn.set_result(None)


_BUDGETS: WeakKeyDictionary[Worker, Budget] = WeakKeyDictionary()


def budget_of(worker: Worker) -> Budget:
    """The budget of the loads that `worker` makes."""
    return _BUDGETS.setdefault(worker, Budget())


@dataclass(slots=True)
class Batch:
    """Views asked of one peer in one message; through a segment of shared memory if `shared`."""

    shared: bool
    loads: list[Load] = field(default_factory=list)
    nbytes: int = 0
    segment: Segment | None = None

    @property
    def offsets(self) -> list[int]:
        """Where each view begins in a segment; one more, the room they take, is left out."""
        return self._places()[:-1]

    @property
    def room(self) -> int:
        """Bytes the views take in a segment."""
        return self._places()[-1]

    def _places(self) -> list[int]:
        return list(accumulate((-(-load.nbytes // ALIGNMENT) * ALIGNMENT for load in self.loads), initial=0))

    @property
    def request(self) -> list[list[Any]]:
        """What travels: the id, and an int or [start, stop] for each axis."""
        return [[load.ticket.id, [[i.start, i.stop] if isinstance(i, slice) else i for i in load.index]] for load in self.loads]


def pieces(load: Load, limit: int) -> Iterator[Load]:
    """`load` cut along its leading axes into loads of at most `limit` bytes (one element at least).

    Examples
    --------
    >>> import numpy as np
    >>> from daskmesh.store import expose
    >>> load = Load(expose(np.ones((4, 3))), (slice(0, 4), slice(0, 3)), np.empty((4, 3)))
    >>> [piece.index[0] for piece in pieces(load, 48)]
    [slice(0, 2, None), slice(2, 4, None)]
    """
    nbytes = load.nbytes
    axis = next((i for i, e in enumerate(load.index) if isinstance(e, slice) and e.stop - e.start > 1), None)
    if nbytes <= limit or axis is None:
        yield load
        return
    entry = load.index[axis]
    assert isinstance(entry, slice)
    rows = entry.stop - entry.start
    step = max(1, limit * rows // nbytes)
    out_axis = sum(isinstance(e, slice) for e in load.index[:axis])
    for at in range(0, rows, step):
        stop = min(at + step, rows)
        index = (*load.index[:axis], slice(entry.start + at, entry.start + stop), *load.index[axis + 1 :])
        out = load.out[(slice(None),) * out_axis + (slice(at, stop),)]
        yield from pieces(Load(load.ticket, index, out), limit)


def batches(loads: Iterable[Load], shared: bool = False) -> list[Batch]:
    """The messages that ask for `loads`."""
    limit = max(1, min(MESSAGE_BYTES, config.nbytes("max-inflight-bytes")))
    done: list[Batch] = []
    filling: dict[str, Batch] = {}
    for load in loads:
        for piece in pieces(load, limit):
            batch = filling.setdefault(piece.ticket.address, Batch(shared))
            if batch.loads and (batch.nbytes + piece.nbytes > limit or len(batch.loads) >= MESSAGE_VIEWS):
                done.append(batch)
                batch = filling[piece.ticket.address] = Batch(shared)
            batch.loads.append(piece)
            batch.nbytes += piece.nbytes
    return done + list(filling.values())


async def _call(worker: Worker, ticket: Ticket, operation: str, **arguments: Any) -> Any:
    """Call a handler of the worker that holds `ticket`, with a connect timeout of our own."""
    what = f"worker {ticket.address}, which held ticket {ticket.id} {ticket.shape}"
    for last in (False, True):
        try:
            comm = await worker.rpc.connect(ticket.address, timeout=config.seconds("connect-timeout"))
        except (OSError, TimeoutError) as error:
            raise TicketLost(f"{what}, cannot be reached: {error}") from error
        try:
            return await send_recv(comm, op=operation, **arguments)
        except (OSError, TimeoutError) as error:
            # A connection kept from before may have ended without the worker; a fresh one tells.
            if last:
                raise TicketLost(f"{what}, ended the connection: {error}") from error
        finally:
            worker.rpc.reuse(ticket.address, comm)
    raise AssertionError("the second attempt returns or raises")


async def _ask(worker: Worker, ticket: Ticket, operation: str, **arguments: Any) -> dict[str, Any]:
    answer = await _call(worker, ticket, operation, **arguments)
    if answer is None:  # no such handler: another worker has taken over the address
        raise TicketLost(f"worker {ticket.address} does not know daskmesh; ticket {ticket.id} {ticket.shape} is gone")
    if answer["status"] == "lost":
        raise TicketLost(answer["reason"])
    return dict(answer)


async def ask(worker: Worker, batch: Batch) -> list[Any]:
    """The views of a batch, as arrays; they lie in `batch.segment` if it has one afterwards."""
    ticket = batch.loads[0].ticket
    if batch.shared and ticket.process is not None and batch.room <= SEGMENT_BYTES:
        with suppress(NoRoom):
            batch.segment = await _filled(worker, ticket, batch.request, batch.offsets)
        if batch.segment is not None:
            memory = batch.segment.memory
            return [
                np.ndarray(view_shape(load.index), load.ticket.dtype, memory, offset)
                for load, offset in zip(batch.loads, batch.offsets, strict=True)
            ]
    answer = await _ask(worker, ticket, "daskmesh_views", loads=batch.request)
    return list(answer["views"])


async def _filled(worker: Worker, ticket: Ticket, loads: list[Any], offsets: list[int]) -> Segment | None:
    """A segment that the owner has filled; None if it cannot map even a new one.

    Raises
    ------
    NoRoom
        There is none for a segment, at this moment at least.
    """
    if ticket.process is None:
        return None
    for kept in (True, False):  # one kept from before may have left the owner's list; a new one has a name
        try:
            segment = segments.take(ticket.process) if kept else Segment()
        except OSError as error:
            raise NoRoom from error
        try:
            answer = await _ask(worker, ticket, "daskmesh_fill", segment=segment.name, loads=loads, offsets=offsets)
        finally:
            segment.unlink()  # and where this was given up, not kept either: the owner may be writing to it still
        if answer["status"] == "OK":
            return segment
    return None


class NoRoom(Exception):
    """There is no shared memory, or it is full."""


_sharing: dict[Process, bool] = {}


async def shares_memory(worker: Worker, ticket: Ticket) -> bool:
    """Whether the owner of `ticket` can map a segment that this process makes. What it answers is asked once per process."""
    if ticket.process is None or ticket.process.host != this_process().host:
        return False
    if ticket.process not in _sharing:
        try:
            segment = await _filled(worker, ticket, [], [])
        except NoRoom:
            return False
        _sharing[ticket.process] = segment is not None
        if segment is not None:
            segments.give(ticket.process, segment)
    return _sharing[ticket.process]


class Fetch:
    """Loads on their way from other workers to `worker`, started by making one; `finish` puts them in place.

    For a thread that is not the event loop's.
    """

    def __init__(self, worker: Worker, loads: Iterable[Load], shared: Iterable[Load] = ()) -> None:
        if in_async_call(worker.loop):
            raise RuntimeError("load: called on the event loop, which it would block; call it from a thread (a plain task)")
        self._worker = worker
        self._loop = worker.loop.asyncio_loop  # type: ignore[attr-defined]
        self._arrived: queue.SimpleQueue[tuple[Batch, list[Any]] | None] = queue.SimpleQueue()
        self._requests: list[asyncio.Task[None]] = []
        self._stopped = False
        self._future = asyncio.run_coroutine_threadsafe(self._run(batches(loads) + batches(shared, shared=True)), self._loop)

    async def _run(self, todo: list[Batch]) -> None:
        try:
            if not self._stopped:
                self._requests = [asyncio.ensure_future(self._request(batch)) for batch in todo]
                await asyncio.gather(*self._requests)
        except BaseException:
            self._cancel()
            await asyncio.gather(*self._requests, return_exceptions=True)
            if not self._stopped:
                raise
        finally:
            self._arrived.put(None)

    async def _request(self, batch: Batch) -> None:
        budget = budget_of(self._worker)
        await budget.take(batch.nbytes)
        try:
            views = await ask(self._worker, batch)
        except BaseException:
            budget.give(batch.nbytes)
            raise
        self._arrived.put((batch, views))

    def _cancel(self) -> None:
        for request in self._requests:
            request.cancel()

    def stop(self) -> None:
        """Ask for nothing more; `finish` then waits for the end and puts nothing in place."""
        self._stopped = True
        self._loop.call_soon_threadsafe(self._cancel)

    def finish(self, put: Callable[[Any, Any], None]) -> None:
        """Call `put(out, view)` for each piece as it arrives; once all have come to an end, raise what went wrong."""
        error: Exception | None = None
        while (arrival := self._next()) is not None:
            batch, views = arrival
            try:
                if not self._stopped:
                    for load, view in zip(batch.loads, views, strict=True):
                        put(load.out, view)
            except Exception as failed:
                error = failed
                self.stop()
            finally:
                owner = batch.loads[0].ticket.process
                if batch.segment is not None and owner is not None:
                    segments.give(owner, batch.segment)
                self._loop.call_soon_threadsafe(budget_of(self._worker).give, batch.nbytes)
        self._future.result()
        if error is not None:
            raise error

    def _next(self) -> tuple[Batch, list[Any]] | None:
        while True:
            try:
                return self._arrived.get(timeout=1)
            except queue.Empty:
                if self._loop.is_closed() or self._worker.status in (Status.closed, Status.failed):
                    raise RuntimeError(f"worker {self._worker.address} has closed while it was loading") from None
