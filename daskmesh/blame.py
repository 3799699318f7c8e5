"""Which task killed a worker.

Dask counts a worker's death against all tasks assigned to it, and after a few deaths they fail. A rank's tasks are all
assigned to its worker at once, so one task that kills its worker would fail the whole queue of the rank. Here only tasks
that may have been running are left with the count: those that have seceded, and as many others as the worker has threads.

Which these are is not always known: what a worker finished in its last milliseconds it has not reported, and it runs what
has its inputs, not what comes first. So after a death the workers that join are *watched* for a while: there a rank's task
announces itself to the scheduler before it begins, which costs a message, and the next death has a name.
"""

from __future__ import annotations

import logging
import threading
from time import monotonic
from typing import TYPE_CHECKING, Any

from distributed.utils import sync

from daskmesh.tasks import WATCHERS, RankTask

if TYPE_CHECKING:
    from distributed import Scheduler, Worker
    from distributed.scheduler import TaskState

__all__ = ["Blame", "watch_worker"]

logger = logging.getLogger("daskmesh")

WATCH_SECONDS = 60.0


class Blame:
    """The scheduler's side: who was running where, and the pardon of the others."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._last_death = float("-inf")
        self._began: dict[str, dict[int, Any]] = {}

    async def watch(self) -> float:
        """RPC: for how many seconds a worker that joins now has to announce what it begins."""
        return max(0.0, self._last_death + WATCH_SECONDS - monotonic())

    async def begins(self, worker: str, thread: int, key: Any) -> None:
        """RPC: a thread of a watched worker is about to run a task."""
        self._began.setdefault(worker, {})[thread] = key

    def worker_died(self, address: str, keys: set[Any]) -> None:
        """Pardon the innocents among the tasks that were assigned to a worker.

        Called after Dask has counted the death and before the tasks move on, when they can still be told apart.
        """
        began = set(self._began.pop(address, {}).values())
        tasks = [task for key in keys if (task := self.scheduler.tasks.get(key)) is not None]
        if any(isinstance(task.run_spec, RankTask) for task in tasks):
            self._last_death = monotonic()
        for task in _innocents(tasks, began):
            task.suspicious = 0


def _innocents(tasks: list[TaskState], began: set[Any]) -> list[TaskState]:
    worker = next((task.processing_on for task in tasks if task.processing_on is not None), None)
    if worker is None:
        return []
    queue = [task for task in tasks if task not in worker.long_running]
    if any(task.key in began for task in queue):
        spared = [task for task in queue if task.key not in began]
    else:
        # Tasks that the last heartbeat named as running come first, then the others in the order of their priority.
        queue.sort(key=lambda task: (task not in worker.executing, task.priority))
        spared = queue[worker.nthreads :]
    return [task for task in spared if isinstance(task.run_spec, RankTask)]


async def watch_worker(worker: Worker) -> None:
    """The worker's side, run when it joins: announce the tasks of ranks if the scheduler asks for it."""
    scheduler: Any = worker.scheduler
    end = monotonic() + await scheduler.daskmesh_watch()

    def announce(key: Any) -> None:
        if monotonic() > end:
            WATCHERS.pop(worker.address, None)
            return
        try:
            sync(worker.loop, scheduler.daskmesh_begins, worker=worker.address, thread=threading.get_ident(), key=key)
        except OSError:
            logger.debug("could not announce %r", key, exc_info=True)

    if monotonic() < end:
        WATCHERS[worker.address] = announce
