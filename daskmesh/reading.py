"""Loads from the memory of other processes of this host, several threads at a time."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait

from daskmesh import vm
from daskmesh.fetch import Load
from daskmesh.store import TicketLost
from daskmesh.views import View, cut, view_of

__all__ = ["read_all"]

THREADS = max(2, min(4, os.cpu_count() or 1))  # one thread copies at about 0.6 of what the memory can do
PARALLEL_BYTES = 4 * 2**20  # below this a second thread costs more than it brings

_pool_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}  # by process: threads do not survive a fork


def _pool() -> ThreadPoolExecutor:
    with _pool_lock:
        pid = os.getpid()
        if pid not in _pools:
            workers = max(THREADS, 2 * (os.cpu_count() or 1))
            _pools[pid] = ThreadPoolExecutor(workers, thread_name_prefix="daskmesh-load")
        return _pools[pid]


def read_all(loads: Iterable[Load]) -> list[Load]:
    """Carry out `loads`; those whose memory turned out not to be readable are returned undone.

    Raises
    ------
    TicketLost
        One of the arrays is gone. No thread writes to a result any more by then.
    """
    todo: deque[tuple[Load, View]] = deque()
    total = 0
    for load in loads:
        view = view_of(load.ticket.pointer, load.ticket.strides, load.index, load.out)
        limit = view.nbytes if view.nbytes <= PARALLEL_BYTES else -(-view.nbytes // THREADS)
        todo.extend((load, piece) for piece in cut(view, limit))
        total += view.nbytes
    unreadable: list[Load] = []
    helpers = min(THREADS, len(todo)) - 1 if total > PARALLEL_BYTES else 0
    futures = [_pool().submit(_work, todo, unreadable) for _ in range(helpers)]
    try:
        _work(todo, unreadable)
    finally:
        todo.clear()  # after an error the helpers stop at the piece they are at
        started = [future for future in futures if not future.cancel()]
        if started:
            wait(started)
    for future in started:
        future.result()
    return list(dict.fromkeys(unreadable))


def _work(todo: deque[tuple[Load, View]], unreadable: list[Load]) -> None:
    while True:
        try:
            load, view = todo.popleft()
        except IndexError:
            return
        ticket = load.ticket
        if ticket.process is None or load in unreadable:
            continue
        try:
            vm.read(ticket.process, view, ticket.word, ticket.id)
        except vm.Unreadable:
            unreadable.append(load)
        except vm.Gone as gone:
            todo.clear()
            raise TicketLost(
                f"ticket {ticket.id} {ticket.shape} of worker {ticket.address} is gone: {gone}; expose the array again"
            ) from gone
