"""The scheduler's book of tickets: where each was born, and what dies with it.

Dask takes copies of a result for equal. A ticket is a claim on an array in the store of the worker it was born on: when
that worker goes, every copy of the ticket is void, though Dask still counts the key as in memory. And the array is freed
when its ticket is no longer wanted, which for Dask is as soon as a directory has collected it. The book corrects both: it
releases void tickets, so that Dask makes them again, and it wants the tickets of a directory as long as the directory is
wanted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from time import monotonic
from typing import TYPE_CHECKING, Any

from daskmesh.tasks import DirectoryTask, TicketTask

if TYPE_CHECKING:
    from distributed import Scheduler

__all__ = ["TicketBook"]

_OVER = ("released", "forgotten", "erred")  # states in which a directory needs its tickets no more


class TicketBook:
    """Births of tickets and the directories that collect them, on one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.born: dict[Any, str] = {}
        self._collected: dict[Any, list[Any]] = {}

    def note(self, key: Any, start: str, finish: str, worker: str | None) -> None:
        """Follow a task's change of state."""
        if finish == "memory":
            task = self.scheduler.tasks[key]
            if isinstance(task.run_spec, TicketTask):
                self.born[key] = worker or next(iter(task.who_has or ())).address
            return
        if start == "memory":
            self.born.pop(key, None)
        if finish == "waiting":
            task = self.scheduler.tasks[key]
            if isinstance(task.run_spec, DirectoryTask):
                self._hold(key, [ticket.key for ticket in task.dependencies])
        elif key in self._collected and finish in _OVER:
            # Not from within a transition, where Dask forbids others.
            asyncio.get_running_loop().call_soon(self._let_go, key)

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

    def restart(self) -> None:
        """All tasks are forgotten."""
        self.born.clear()
        for key in list(self._collected):
            self._let_go(key)

    def _release(self, tickets: Iterable[Any], stimulus_id: str) -> None:
        tasks = self.scheduler.tasks
        self.scheduler.transitions(dict.fromkeys(tickets, "released"), stimulus_id)
        stale = [
            key
            for key in self._collected
            if tasks[key].state == "memory" and any(ticket.state != "memory" for ticket in tasks[key].dependencies)
        ]
        self.scheduler.transitions(dict.fromkeys(stale, "released"), stimulus_id)

    def _hold(self, directory: Any, tickets: list[Any]) -> None:
        # As published datasets hold their keys: wanted by a client that is none.
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
