"""The scheduler's book of tickets: where each was born, and what dies with it.

Dask takes copies of a result for equal. A ticket is a claim on an array in the store of the worker it was born on: when
that worker goes, every copy of the ticket is void, though Dask still counts the key as in memory. And the array is freed
when its ticket is no longer wanted, which for Dask is as soon as a directory has collected it. The book corrects both: it
releases void tickets, so that Dask makes them again, and it wants the tickets of a directory as long as the directory is
wanted.

A ticket for a block that somebody holds (a persisted array) costs nothing while the block is there, but the next exchange would
wait for Dask to make it and to carry it to its readers once more. So the book wants it for some seconds after its last use, at
most as long as the block is held: an array that is exchanged again and again is exposed once, and one that Dask spills to disk
leaves the memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from time import monotonic
from typing import TYPE_CHECKING, Any

from daskmesh.tasks import DirectoryTask, TicketTask

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import TaskState

__all__ = ["TicketBook"]

KEEPER = "daskmesh-keeps-tickets"  # the client that is none, in whose name tickets of held blocks are wanted
KEEP_SECONDS = 3.0
_OVER = ("released", "forgotten", "erred")  # states in which a directory needs its tickets no more


class TicketBook:
    """Births of tickets and the directories that collect them, on one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.born: dict[Any, str] = {}
        self._collected: dict[Any, list[Any]] = {}
        self._kept: dict[Any, float] = {}  # when a graph last read it
        self._sweep: asyncio.TimerHandle | None = None

    def note(self, key: Any, start: str, finish: str, worker: str | None) -> None:
        """Follow a task's change of state."""
        if finish == "memory":
            task = self.scheduler.tasks[key]
            if isinstance(task.run_spec, TicketTask):
                self.born[key] = worker or next(iter(task.who_has or ())).address
                if any(block.who_wants for block in task.dependencies):
                    self._keep(key)
            return
        if start == "memory":
            self.born.pop(key, None)
            if self._kept and key in self.scheduler.tasks:
                for ticket in self._kept.keys() & {reader.key for reader in self.scheduler.tasks[key].dependents}:
                    self._soon(self._unkeep, ticket)
        if finish == "waiting":
            task = self.scheduler.tasks[key]
            if isinstance(task.run_spec, DirectoryTask):
                self._hold(key, [ticket.key for ticket in task.dependencies])
        elif key in self._collected and finish in _OVER:
            self._soon(self._let_go, key)

    def read_by(self, tasks: Iterable[TaskState]) -> None:
        """New tasks: the tickets that they read are kept from now on."""
        if self._kept:
            for ticket in self._kept.keys() & {read.key for task in tasks for read in task.dependencies}:
                self._kept[ticket] = monotonic()

    def lose_worker(self, address: str, stimulus_id: str) -> None:
        """Release every ticket born on a worker that is gone.

        By birthplace, not by rank: a rank that moved home has left tickets behind on the worker it was folded onto.
        """
        self._release([key for key, birthplace in self.born.items() if birthplace == address], stimulus_id)

    async def ticket_lost(self, key: Any, address: str) -> None:
        """RPC: a reader found the ticket `key` of worker `address` void.

        Covers the endings no hook sees, such as a copy that a retiring worker gave away before it dropped its own.
        """
        task = self.scheduler.tasks.get(key)
        if task is not None and task.state == "memory" and self.born.get(key, address) == address:
            self._release([key], f"daskmesh-ticket-lost-{monotonic()}")

    def close(self) -> None:
        """Wait for nothing any more: the scheduler closes, or no ticket is kept."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None

    def restart(self) -> None:
        """All tasks are forgotten."""
        self.born.clear()
        for key in tuple(self._kept):
            self._unkeep(key)
        for key in list(self._collected):
            self._let_go(key)

    def _keep(self, ticket: Any) -> None:
        self._kept[ticket] = monotonic()
        self.scheduler.client_desires_keys([ticket], KEEPER)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(KEEP_SECONDS, self._expire)

    def _expire(self) -> None:
        self._sweep, since = None, monotonic() - KEEP_SECONDS
        for ticket in [ticket for ticket, read in self._kept.items() if read <= since]:
            self._unkeep(ticket)
        if self._kept:
            rest = max(0.01, min(self._kept.values()) - since)
            self._sweep = asyncio.get_running_loop().call_later(rest, self._expire)

    def _unkeep(self, ticket: Any) -> None:
        if self._kept.pop(ticket, None) is None:
            return
        self.scheduler.client_releases_keys([ticket], KEEPER)
        if not self._kept:
            self.scheduler.clients.pop(KEEPER, None)
            self.close()

    @staticmethod
    def _soon(action: Callable[[Any], None], key: Any) -> None:
        # Not from within a transition, where Dask forbids others.
        asyncio.get_running_loop().call_soon(action, key)

    def _release(self, tickets: Iterable[Any], stimulus_id: str) -> None:
        tasks = self.scheduler.tasks
        self.scheduler.transitions(dict.fromkeys(tickets, "released"), stimulus_id)
        stale = [
            key
            for key in self._collected
            if tasks[key].state == "memory" and any(ticket.state != "memory" for ticket in tasks[key].dependencies)
        ]
        self.scheduler.transitions(dict.fromkeys(stale, "released"), stimulus_id)

    # Both kinds are wanted as published datasets want their keys: by a client that is none.

    def _hold(self, directory: Any, tickets: list[Any]) -> None:
        self._collected[directory] = tickets
        self.scheduler.client_desires_keys(tickets, _holder(directory))

    def _let_go(self, directory: Any) -> None:
        task = self.scheduler.tasks.get(directory)
        if directory not in self._collected or (task is not None and task.state not in _OVER):
            return
        holder = _holder(directory)
        self.scheduler.client_releases_keys(self._collected.pop(directory), holder)
        self.scheduler.clients.pop(holder, None)


def _holder(directory: Any) -> str:
    return f"daskmesh-holds-tickets-of-{directory!r}"
