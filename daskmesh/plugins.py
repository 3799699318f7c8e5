"""What daskmesh adds to a scheduler and to its workers.

One `RankPlugin` per scheduler keeps a table per world. It pins the tasks of each rank before they are scheduled, moves
ranks when workers come and go, and releases the tickets that a dead worker's store had made good. `MeshWorkerPlugin`
opens the shard store on each worker and frees its entries with their keys.

Dask logs and swallows what a plugin raises, so a fault here does not fail: it loses pins. The tests therefore count
pinned tasks on a scheduler in a process of its own.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import uuid
from collections.abc import Callable, Generator, Iterable
from operator import attrgetter
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from distributed.active_memory_manager import ReduceReplicas, Suggestion
from distributed.comm.addressing import get_address_host
from distributed.diagnostics.plugin import SchedulerPlugin, WorkerPlugin
from distributed.protocol.pickle import dumps

from daskmesh import config
from daskmesh.blame import Blame, watch_worker
from daskmesh.pins import Table, WorkerId
from daskmesh.tasks import WATCHERS, RankTask, TicketTask
from daskmesh.tickets import TicketBook
from daskmesh.transport import release, setup_worker, teardown_worker

if TYPE_CHECKING:
    from distributed import Scheduler, Worker
    from distributed.scheduler import TaskState, WorkerState

__all__ = ["SERVICES", "VERSION", "MeshWorkerPlugin", "RankPlugin", "Service"]

logger = logging.getLogger("daskmesh")

VERSION: str = sys.modules[__package__].__version__
# Dask keeps a plugin that is already there under a name, so the name tells versions apart.
PLUGIN_NAME = f"daskmesh-{VERSION}"


class Service(Protocol):
    """Something more that runs beside the tables on the scheduler, such as the meeting point of collectives."""

    def install(self, ranks: RankPlugin) -> None:
        """Add handlers (`ranks.handle`) and listeners (`ranks.on_remove_worker`); called once, on the scheduler."""


# Floors above append classes at import; every scheduler that gets the plugin runs one instance of each.
SERVICES: list[Callable[[], Service]] = []


class RankPlugin(SchedulerPlugin):
    """The tables of all worlds on one scheduler, and the hooks that keep tasks where their ranks are.

    Parameters
    ----------
    services : iterable of callable
        Classes of further services; they are pickled by name.

    Attributes
    ----------
    worlds : dict
        Table of each world, by id.
    on_remove_worker : list of callable
        Called with (worker address, stimulus id) after the ranks of a lost worker are unpinned.
    on_forget_world : list of callable
        Called with the id of a world that its client has left.

    Examples
    --------
    >>> RankPlugin().name.startswith("daskmesh-")
    True
    """

    name = PLUGIN_NAME
    idempotent = True

    def __init__(self, services: Iterable[Callable[[], Service]] = ()) -> None:
        self._service_types = tuple(services)
        self.worlds: dict[str, Table] = {}
        self.on_remove_worker: list[Callable[[str, str], None]] = []
        self.on_forget_world: list[Callable[[str], None]] = []

    async def start(self, scheduler: Scheduler) -> None:
        """Run once, on the scheduler."""
        # Claimed before the first await: of two clients that register at once, the second must find the first's plugin.
        scheduler.add_plugin(self, name=self.name, idempotent=True)
        self.scheduler = scheduler
        self.ready = asyncio.Event()
        self.tickets = TicketBook(scheduler)
        self.blame = Blame(scheduler)
        self._timers: set[asyncio.TimerHandle] = set()
        own = (self.create_world, self.world_table, self.world_size, self.forget_world)
        for handler in (*own, self.tickets.ticket_lost, self.blame.watch, self.blame.begins):
            self.handle(handler.__name__, handler)
        for service in self._service_types:
            service().install(self)
        self._replace_replica_policy()
        try:
            plugin = dumps(MeshWorkerPlugin())
            answers = await scheduler.register_worker_plugin(None, plugin, name=self.name, idempotent=True)
            for address, answer in answers.items():
                if answer["status"] != "OK":
                    raise RuntimeError(f"daskmesh cannot start on worker {address}: {answer['exception_text']}")
        except BaseException:
            scheduler.remove_plugin(self.name)
            raise
        finally:
            self.ready.set()

    def handle(self, name: str, handler: Callable[..., Any]) -> None:
        """Answer the RPC ``daskmesh_<name>`` of clients and workers."""
        self.scheduler.handlers[f"daskmesh_{name}"] = handler

    async def close(self) -> None:
        """Run when the scheduler closes."""
        for timer in self._timers:
            timer.cancel()
        self.tickets.close()

    # -- worlds: RPCs of clients -----------------------------------------------------------------------------------

    async def create_world(self, client: str, ranks: int | None, at_least: int = 0) -> dict[str, Any]:
        """Make a world of `ranks` ranks, or of as many as there are workers and `at_least`."""
        await self.ready.wait()
        self._drop_orphans()
        size = ranks if ranks is not None else max(len(self.scheduler.workers), at_least)
        table = self._grown(f"w{uuid.uuid4().hex[:12]}", client, size)
        return {"world": table.world, "size": size, "workers": len(self.scheduler.workers)}

    async def world_table(self, world: str, client: str, size: int) -> list[str]:
        """The worker address of each rank, empty for one that has none right now, of a world of `size` ranks at least.

        Ranks that are there keep their workers; a world that is not there is made.
        """
        return self._grown(world, client, size).addresses()

    async def world_size(self, world: str) -> int:
        """Number of ranks; 1 for a world that is not there."""
        return self.worlds[world].size if world in self.worlds else 1

    async def forget_world(self, world: str) -> None:
        """Drop a world as soon as nothing pinned to it is left."""
        if world in self.worlds:
            self.worlds[world].released = True
            for listener in self.on_forget_world:
                listener(world)
            self._drop_orphans()

    def _grown(self, world: str, client: str, size: int) -> Table:
        # A world nobody here knows (its client was cut off, an old pickle) is dealt anew: no task is left without a pin.
        table = self.worlds.get(world)
        if table is None:
            table = self.worlds[world] = Table(world, client, config.seconds("grace"))
        if size > table.size:
            table.grow(size, self._running(), monotonic())
            self._fold_later(table)
        return table

    def _drop_orphans(self) -> None:
        gone = {id_ for id_, table in self.worlds.items() if table.released or table.client not in self.scheduler.clients}
        if gone:
            specs = (task.run_spec for task in self.scheduler.tasks.values())
            gone -= {spec.world for spec in specs if isinstance(spec, RankTask)}
        for world in gone:
            del self.worlds[world]

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """A client left; its worlds stay while others hold something pinned to them."""
        self._drop_orphans()

    def restart(self, scheduler: Scheduler) -> None:
        """All tasks were forgotten; workers come back one by one."""
        self.tickets.restart()
        self._drop_orphans()

    # -- pins ------------------------------------------------------------------------------------------------------

    def update_graph(self, scheduler: Scheduler, *, client: str, tasks: list[Any], **kwargs: Any) -> None:
        """Pin new tasks, before any of them is scheduled."""
        self.tickets.read_by(scheduler.tasks[key] for key in tasks)
        for key in tasks:
            task = scheduler.tasks[key]
            spec = task.run_spec
            if isinstance(spec, RankTask):
                task.worker_restrictions = self._grown(spec.world, client, spec.rank + 1).pin(spec.rank)

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Bring ranks home; Dask schedules the tasks that wait for them right after."""
        who = _worker_id(scheduler.workers[worker])
        folded = False
        for table in self.worlds.values():
            table.arrive(who, monotonic())
            folded |= table.fold(self._running(), monotonic())
        if folded:
            self._wake()

    def remove_worker(self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: Any) -> None:
        """Unpin the ranks of a lost worker, give them the grace time, and release the tickets born there."""
        for table in self.worlds.values():
            if table.leave(worker, monotonic()):
                self._fold_later(table)
        self.tickets.lose_worker(worker, stimulus_id)
        for listener in self.on_remove_worker:
            listener(worker, stimulus_id)

    def _fold_later(self, table: Table) -> None:
        if all(table.addresses()):
            return

        def fold() -> None:
            self._timers.discard(timer)
            if table.fold(self._running(), monotonic()):
                self._wake()

        # A hair later than the grace time, so that the slots are past it on the clock that the table reads.
        timer = asyncio.get_running_loop().call_later(table.grace + 0.01, fold)
        self._timers.add(timer)

    def _wake(self) -> None:
        """Tasks without a worker do not look at their pins again by themselves."""
        awake = [task for task in self.scheduler.unrunnable if self.scheduler.valid_workers(task)]
        awake.sort(key=attrgetter("priority"), reverse=True)
        self.scheduler.transitions({task.key: "processing" for task in awake}, f"daskmesh-fold-{monotonic()}")

    def _running(self) -> list[WorkerId]:
        workers = self.scheduler.running or self.scheduler.workers.values()
        return [_worker_id(worker) for worker in workers]

    def valid_workers_downscaling(self, scheduler: Scheduler, workers: list[WorkerState]) -> list[WorkerState]:
        """Workers without ranks go first; those with ranks only when no other is left."""
        ranked = {address for table in self.worlds.values() for address in table.addresses()}
        return [worker for worker in workers if worker.address not in ranked] or workers

    def log_event(self, topic: str, msg: Any) -> None:
        """Hear of a death; no other hook comes between Dask's count of it and the moves of the tasks."""
        if topic == "all" and isinstance(msg, dict) and msg.get("action") == "remove-worker" and not msg["expected"]:
            self.blame.worker_died(msg["worker"], msg["processing-tasks"])

    # -- tickets ---------------------------------------------------------------------------------------------------

    def transition(self, key: Any, start: str, finish: str, *args: Any, stimulus_id: str, **kwargs: Any) -> None:
        """Keep the book of tickets."""
        self.tickets.note(key, start, finish, kwargs.get("worker"))

    def owners(self, task: TaskState) -> set[str]:
        """Workers that keep their copy of a result: the birthplace of a ticket, the rank's worker of other results."""
        spec = task.run_spec
        if isinstance(spec, TicketTask):
            return {birthplace} if (birthplace := self.tickets.born.get(task.key)) else set()
        if isinstance(spec, RankTask) and spec.world in self.worlds:
            return self.worlds[spec.world].pin(spec.rank)
        return set()

    def _replace_replica_policy(self) -> None:
        manager = self.scheduler.extensions.get("amm")
        if manager is None:
            return
        for policy in [policy for policy in manager.policies if type(policy) in (ReduceReplicas, OwnersKeep)]:
            manager.policies.discard(policy)
            manager.add_policy(OwnersKeep(self))


class OwnersKeep(ReduceReplicas):
    """Dask's policy against superfluous copies, except that a rank's worker keeps its own.

    The stock policy drops the copy on the fuller worker, which sooner or later is the rank's.
    """

    def __init__(self, ranks: RankPlugin) -> None:
        self._ranks = ranks

    def run(self) -> Generator[Suggestion, WorkerState | None, None]:
        """Dask's suggestions, owners left out of the candidates."""
        for suggestion in super().run():
            owners = self._ranks.owners(suggestion.ts)
            if owners:
                readers = {worker for worker in suggestion.ts.who_has or () if worker.address not in owners}
                suggestion = Suggestion(suggestion.op, suggestion.ts, readers)
            yield suggestion


class MeshWorkerPlugin(WorkerPlugin):
    """The worker's side: its shard store, and the end of an entry with the end of its key.

    Examples
    --------
    >>> MeshWorkerPlugin().name == RankPlugin().name
    True
    """

    name = PLUGIN_NAME
    idempotent = True

    async def setup(self, worker: Worker) -> None:
        """Open the store and its handlers."""
        self.worker = worker
        setup_worker(worker)
        await watch_worker(worker)

    def teardown(self, worker: Worker) -> None:
        """Close the store."""
        WATCHERS.pop(worker.address, None)
        teardown_worker(worker)

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        """Free what the task `key` exposed on this worker when the worker lets go of the key."""
        if finish in ("released", "forgotten"):
            release(self.worker.address, key)


def _worker_id(worker: WorkerState) -> WorkerId:
    return WorkerId(worker.address, get_address_host(worker.address), worker.nanny, str(worker.name))
