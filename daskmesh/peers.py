"""Working on the buffers of a symmetric tensor's PEs from a task's thread, wherever they are.

=========  =======================================================================  ===================================
road       how                                                                      when
=========  =======================================================================  ===================================
same       the operation is done by the caller, under the buffer's lock             the buffer lives in this process
vm         version word, data and version word again, read from the owner's memory  loads, same host
ask        a handler on the owner's worker does it, under the lock                  everything else
=========  =======================================================================  ===================================

A load by the road vm that meets a change three times asks the owner. A view of more than 8 MiB the owner copies aside, and it
is loaded like any exposed array. Operations carry their mark, so that one whose answer was lost is asked for again.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from time import monotonic
from typing import Any

import numpy as np
from distributed import Worker, secede
from distributed.core import send_recv
from distributed.protocol.serialize import Serialize
from distributed.threadpoolexecutor import thread_state
from distributed.utils import sync

from daskmesh import config, vm
from daskmesh.buffers import Buffer, Claim, Mark, PELostError, Span
from daskmesh.fetch import Load
from daskmesh.reading import PARALLEL_BYTES, read_all
from daskmesh.store import Ticket, TicketLost
from daskmesh.symmetric import INLINE_BYTES, Entry, freed, open_symmetric, symmetric_at
from daskmesh.transport import load_into as load_exposed
from daskmesh.views import View, contiguous, view_of

__all__ = ["ask_all", "entry_of", "load_view", "make_room", "own_buffer", "perform", "reset_stats", "stats"]

TRIES = 3
#: Seconds for which an owner is tried that cannot be reached, though the scheduler does not miss it.
LOST_SECONDS = 5.0
RETRY_PAUSE = 0.05
ROADS = ("same", "vm", "ask")

_lock = threading.Lock()
_counts: Counter[tuple[str, str]] = Counter()


def stats() -> dict[str, dict[str, int]]:
    """Loads of symmetric buffers by this process since `reset_stats`, and their bytes, by road.

    Examples
    --------
    >>> reset_stats()
    >>> stats()["vm"]
    {'loads': 0, 'bytes': 0}
    """
    with _lock:
        return {road: {what: _counts[road, what] for what in ("loads", "bytes")} for road in ROADS}


def reset_stats() -> None:
    """Count from zero again."""
    with _lock:
        _counts.clear()


def make_room() -> None:
    """Let the worker run another task instead of this one, which is going to wait; twice is once."""
    if getattr(thread_state, "proceed", False):
        secede()


def entry_of(worker: Worker, tensor: str, title: str) -> Entry:
    """What is known of a tensor on this worker; where it has no PE, the scheduler is asked once.

    Raises
    ------
    PELostError
        A PE of the tensor is lost.
    RuntimeError
        The tensor was freed.
    """
    store = open_symmetric(worker.address)
    entry = store.find(tensor)
    if entry is None or not entry.claims:
        entry = store.open(_looked_up(worker, tensor, title))
    return entry


def _looked_up(worker: Worker, tensor: str, title: str) -> Entry:
    answer = sync(worker.loop, worker.scheduler.daskmesh_symmetric_state, tensor=tensor)
    if answer["status"] == "lost":
        raise PELostError(answer["why"], answer["pe"])
    if answer["status"] != "open":
        raise freed(title)
    claims = tuple(Claim.unpacked(parts) for parts in answer["table"])
    return Entry(tensor, title, tuple(answer["shape"]), pickle.loads(answer["dtype"]), claims)


def gone(worker: Worker, entry: Entry, pe: int, why: str) -> Exception:
    """The error to raise where the buffer of a PE is not there any more: the tensor was freed, or the PE is lost."""
    try:
        open_symmetric(worker.address).find(entry.id)
        _looked_up(worker, entry.id, entry.title)
    except RuntimeError as error:
        return error
    return PELostError(f"PE {pe} of symmetric tensor {entry.title} is lost: {why}; create the tensor again", pe)


def own_buffer(worker: Worker, entry: Entry, pe: int) -> Buffer:
    """The buffer of a PE, which must be the caller's.

    Raises
    ------
    PELostError
        The PE's rank sits elsewhere than when the tensor was created.
    """
    store = open_symmetric(worker.address)
    buffer = store.buffer(entry.id, pe)
    if buffer is None:
        raise PELostError(
            f"PE {pe} of symmetric tensor {entry.title} has moved from worker {entry.claims[pe].address} to {worker.address}, "
            "and its memory has not; create the tensor again",
            pe,
        )
    return buffer


def here(worker: Worker, entry: Entry, pe: int) -> Buffer | None:
    """The buffer of a PE if the caller can get at it itself."""
    claim = entry.claims[pe]
    if config.get("transport") == "rpc" and claim.address != worker.address:
        return None
    if claim.process != vm.this_process():
        return None
    store = symmetric_at(claim.address)
    buffer = None if store is None else store.buffer(entry.id, pe)
    if buffer is None:
        raise gone(worker, entry, pe, f"worker {claim.address} does not hold it any more")
    return buffer


# -- loading ------------------------------------------------------------------------------------------------------------


def load_view(worker: Worker, entry: Entry, pe: int, span: Span, out: np.ndarray[Any, Any]) -> None:
    """Copy a view of a PE's buffer into `out`, of the same shape: as it was at one moment.

    Raises
    ------
    PELostError
        A PE of the tensor is lost.
    RuntimeError
        The tensor was freed; or `daskmesh.transport` forces a road that cannot be taken.
    """
    if not out.nbytes:
        return
    buffer = here(worker, entry, pe)
    if buffer is not None:
        buffer.read_into(span, out)
        _count("same", out.nbytes)
    elif _may_read(entry.claims[pe], entry, pe) and _read(worker, entry, pe, span, out):
        _count("vm", out.nbytes)
    else:
        _take(worker, entry, pe, span, out)
        _count("ask", out.nbytes)


def _count(road: str, nbytes: int) -> None:
    with _lock:
        _counts[road, "loads"] += 1
        _counts[road, "bytes"] += nbytes


def _may_read(claim: Claim, entry: Entry, pe: int) -> bool:
    forced = config.get("transport")
    if forced not in ("auto", "vm"):
        return False
    if claim.process.host != vm.this_process().host:
        return False
    try:
        reason = vm.refusal(claim.process)
    except vm.Gone:
        return True  # reading will find out
    if reason and forced == "vm":
        raise RuntimeError(
            f"load: daskmesh.transport is 'vm', but the memory of worker {claim.address} cannot be read from here: {reason}; "
            "set daskmesh.transport to 'auto'"
        )
    return not reason


def _read(worker: Worker, entry: Entry, pe: int, span: Span, out: np.ndarray[Any, Any]) -> bool:
    """Read the view from the owner's memory; False if it changes too often, or cannot be read."""
    claim = entry.claims[pe]
    index = tuple(slice(start, stop) for start, stop in span)
    try:
        for _ in range(TRIES):
            outcome = _read_once(claim, entry, index, out)
            if outcome is not None:
                return outcome
            if not vm.read_word(claim.process, claim.word):
                raise vm.Gone(f"worker {claim.address} does not hold it any more")
    except vm.Gone as error:
        raise gone(worker, entry, pe, str(error)) from None
    return False


def _read_once(claim: Claim, entry: Entry, index: tuple[slice, ...], out: np.ndarray[Any, Any]) -> bool | None:
    """Read version, data and version; None if these differ, False if the memory cannot be read."""
    view = view_of(claim.pointer, claim.strides, index, out)
    if out.nbytes <= PARALLEL_BYTES and not _runs(view, view.strides) and not _runs(view, view.out.strides):
        before, after = vm.read_between(claim.process, view.pointer, view.out, claim.word)
        return True if before == after and before % 2 == 0 and before else None
    version = vm.read_word(claim.process, claim.word)
    if version % 2 or not version:
        return None
    ticket = Ticket(
        claim.address, version, entry.shape, entry.dtype, claim.strides, entry.nbytes, "raw", claim.pointer, claim.word,
        claim.process,
    )  # fmt: skip
    try:
        return not read_all([Load(ticket, index, out)])  # looks at the word in each of its calls
    except TicketLost:
        return None


def _runs(view: View, strides: tuple[int, ...]) -> int:
    """Leading axes that are not part of one run of memory."""
    return contiguous(view.out.shape, strides, view.itemsize)[0]


def _take(worker: Worker, entry: Entry, pe: int, span: Span, out: np.ndarray[Any, Any]) -> None:
    """Ask the owner for the view."""
    inline = 0 if config.get("transport") == "shm" else INLINE_BYTES
    answer = perform(worker, entry, pe, "take", (span, inline))
    if not isinstance(answer, bytes):
        np.copyto(out, answer)
        return
    ticket = pickle.loads(answer)
    try:
        load_exposed(ticket, (), out)
    except TicketLost as error:
        raise gone(worker, entry, pe, str(error)) from error
    finally:
        loop: Any = worker.loop
        asyncio.run_coroutine_threadsafe(_ask(worker, entry, pe, "dropped", (ticket.key,), None), loop.asyncio_loop)


# -- changing -----------------------------------------------------------------------------------------------------------


def perform(worker: Worker, entry: Entry, pe: int, kind: str, args: Sequence[Any], mark: Mark | None = None) -> Any:
    """Do one operation on a PE's buffer; what it answers.

    Raises
    ------
    PELostError
        A PE of the tensor is lost.
    RuntimeError
        The tensor was freed.
    """
    return ask_all(worker, entry, [(pe, kind, args)], mark)[0]


def ask_all(worker: Worker, entry: Entry, todo: Sequence[tuple[int, str, Sequence[Any]]], mark: Mark | None = None) -> list[Any]:
    """Do operations on the buffers of several PEs at once, all under one mark; raises as `perform`."""
    answers: list[Any] = [None] * len(todo)
    remote: list[tuple[int, Future[Any]]] = []
    loop: Any = worker.loop
    for i, (pe, kind, args) in enumerate(todo):
        buffer = None if kind == "take" else here(worker, entry, pe)
        if buffer is not None:
            answers[i] = buffer.perform(kind, args, mark)
        else:
            asked = _ask(worker, entry, pe, kind, args, mark)
            remote.append((i, asyncio.run_coroutine_threadsafe(asked, loop.asyncio_loop)))
    for i, future in remote:
        pe = todo[i][0]
        try:
            answer = future.result()
        except OSError as error:
            raise gone(worker, entry, pe, f"worker {entry.claims[pe].address} cannot be reached: {error}") from None
        if answer is None or answer["status"] == "unknown":
            raise gone(worker, entry, pe, f"worker {entry.claims[pe].address} does not hold it any more")
        if answer["status"] != "OK":
            raise pickle.loads(answer["error"])
        answers[i] = answer["answer"]
    return answers


async def _ask(worker: Worker, entry: Entry, pe: int, kind: str, args: Sequence[Any], mark: Mark | None) -> Any:
    """Call the owner's handler, with a connect timeout of our own; the mark makes a second try harmless.

    A connection may end, or take too long to be made, without the owner being lost: the scheduler knows.
    """
    address = entry.claims[pe].address
    message: dict[str, Any] = {"tensor": entry.id, "pe": pe, "kind": kind, "args": tuple(args), "mark": mark}
    if kind in ("put", "put_signal"):
        message["args"], message["data"] = (args[0], *args[2:]), Serialize(args[1])
    end = monotonic() + LOST_SECONDS
    while True:
        try:
            comm = await worker.rpc.connect(address, timeout=config.seconds("connect-timeout"))
            try:
                return await send_recv(comm, op="daskmesh_symmetric", **message)
            finally:
                worker.rpc.reuse(address, comm)
        except OSError:
            scheduler: Any = worker.scheduler
            state = await scheduler.daskmesh_symmetric_state(tensor=entry.id)
            if state["status"] != "open" or monotonic() > end:
                raise
            await asyncio.sleep(RETRY_PAUSE)
