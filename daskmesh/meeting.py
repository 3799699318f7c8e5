"""Where the ranks of a region meet: a service on the scheduler.

A rank joins at its first collective and waits for the answer, which comes when all ranks are there: the number of the
attempt, and where each rank's process listens::

    rank 0 ── join ──> │          │
    rank 2 ── join ──> │ meeting  │
    rank 1 ── join ──> │  point   │ ── attempt 1, addresses ──> ranks 0, 1, 2, which talk directly from now on

An attempt ends for all when one of its ranks is lost, which is when its worker goes, when it says so, or when it comes
again: its task is running anew. The others run again too, and meet under the next number. Ranks whose task had already
finished are called up: their results are released, so that Dask runs them. A rank that fails, or ends without ever
coming, ends the waiting of the others with an error.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Any

from dask.utils import format_bytes

from daskmesh.errors import packed_error
from daskmesh.plugins import SERVICES
from daskmesh.tasks import RankTask

if TYPE_CHECKING:
    from distributed.scheduler import TaskState

    from daskmesh.plugins import RankPlugin

__all__ = ["Meeting"]

#: Seconds between two looks at who is missing.
LOOK_SECONDS = 0.25
#: Attempts that may end without any worker having gone, before the region fails.
FRUITLESS = 5

Answer = dict[str, Any]


@dataclass
class _Arrival:
    """A rank that waits: its task and worker, where its process listens, and the call it waits in."""

    key: Any
    worker: str
    address: tuple[Any, ...]
    call: str
    answer: asyncio.Future[Answer]


@dataclass
class _Run:
    """One region: who waits, who is in the attempt that is running, who has ended."""

    ranks: tuple[int, ...]
    gate: Any
    number: int
    attempt: int = 0
    waiting: dict[int, _Arrival] = field(default_factory=dict)
    going: dict[int, _Arrival] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    failure: bytes | None = None
    failed_run: int = -1  # of the task that failed, as Dask counts
    failed: int = -1
    told: set[int] = field(default_factory=set)
    fruitless: int = 0
    timeout: float = 60.0
    stuck_since: float | None = None
    watch: asyncio.Task[None] | None = None

    @property
    def missing(self) -> list[int]:
        """Ranks that have not come."""
        return [rank for rank in self.ranks if rank not in self.waiting]


class Meeting:
    """The meeting point of all regions on one scheduler.

    Examples
    --------
    >>> len(Meeting().key)
    32
    """

    def __init__(self) -> None:
        self.key = secrets.token_bytes(32)  # what processes must know to be let into a conversation
        self._numbers = count(1)
        self._runs: dict[str, _Run] = {}

    def install(self, ranks: RankPlugin) -> None:
        """Answer workers, and hear of those that go."""
        self.scheduler = ranks.scheduler
        ranks.handle("meeting_key", self.meeting_key)
        ranks.handle("join_region", self.join_region)
        ranks.handle("region_report", self.region_report)
        ranks.on_remove_worker.append(self.lose_worker)
        for op, handler in (("ended", self.end), ("failed", self.fail), ("lost", self.lose)):
            self.scheduler.stream_handlers[f"daskmesh-region-{op}"] = handler

    async def meeting_key(self) -> bytes:
        """RPC: the secret that the processes of this cluster share."""
        return self.key

    # -- joining ---------------------------------------------------------------------------------------------------

    async def join_region(
        self,
        region: str,
        rank: int,
        ranks: Iterable[int],
        gate: Any,
        key: Any,
        worker: str,
        address: Any,
        call: str,
        timeout: float,
    ) -> Answer:
        """RPC of a rank: answers when all ranks are there, or never will be."""
        run = self._run(region, tuple(ranks), gate)
        if run.failure is not None:
            if rank not in run.told and self._is_late(run):
                return self._tell_failure(region, run, rank)
            run = self._forget(region, renew=run)
        if rank in run.going:
            self._end_attempt(run, f"rank {rank} runs again")
        if old := run.waiting.pop(rank, None):
            _answer(old, {"status": "cancelled"})
        run.timeout = timeout
        arrival = _Arrival(key, worker, tuple(address), call, asyncio.get_running_loop().create_future())
        run.waiting[rank] = arrival
        if not run.missing:
            self._go(run)
        elif run.watch is None:
            run.watch = asyncio.create_task(self._watch(region, run))
        return await arrival.answer

    def _run(self, region: str, ranks: tuple[int, ...], gate: Any) -> _Run:
        if region not in self._runs:
            for name in [n for n, r in self._runs.items() if not r.waiting and r.gate not in self.scheduler.tasks]:
                del self._runs[name]
            self._runs[region] = _Run(ranks, gate, next(self._numbers))
        return self._runs[region]

    def _forget(self, region: str, *, renew: _Run) -> _Run:
        self._runs[region] = _Run(renew.ranks, renew.gate, next(self._numbers))
        return self._runs[region]

    def _go(self, run: _Run) -> None:
        run.attempt += 1
        run.going, run.waiting, run.ended, run.stuck_since = run.waiting, {}, set(), None
        if run.watch is not None:
            run.watch.cancel()
            run.watch = None
        table = [[rank, arrival.address] for rank, arrival in run.going.items()]
        for arrival in run.going.values():
            _answer(arrival, {"status": "go", "number": run.number, "attempt": run.attempt, "table": table})

    # -- endings ---------------------------------------------------------------------------------------------------

    def end(self, region: str, rank: int, ranks: Iterable[int], gate: Any, number: int, attempt: int, worker: str) -> None:
        """A rank's function has returned; `number` is 0 if it did not join."""
        if number and (region not in self._runs or (number, attempt) != (self._runs[region].number, self._runs[region].attempt)):
            return  # of an attempt that is over
        run = self._run(region, tuple(ranks), gate)
        run.ended.add(rank)
        if run.waiting and not number:
            self._give_up(region, run, self._ended_early(run, [rank]))
        elif len(run.ended) == len(run.ranks):
            del self._runs[region]

    def fail(self, region: str, rank: int, ranks: Iterable[int], gate: Any, number: int, error: bytes, worker: str) -> None:
        """A rank has failed; if it had joined (`number` is not 0), the others know already."""
        if number:
            if region in self._runs and self._runs[region].number == number:
                del self._runs[region]
            return
        run = self._run(region, tuple(ranks), gate)
        if run.failure is None:
            run.failure, run.failed = error, rank
            run.failed_run = getattr(self._tasks(run).get(rank), "run_id", -1)
        self._tell_failure(region, run, rank)
        for other in list(run.waiting):
            _answer(run.waiting.pop(other), self._tell_failure(region, run, other))

    def lose(self, region: str, number: int, attempt: int, why: str, worker: str) -> None:
        """A rank has lost a peer."""
        run = self._runs.get(region)
        if run is not None and run.going and (run.number, run.attempt) == (number, attempt):
            run.fruitless += 1
            if run.fruitless > FRUITLESS:
                self._give_up(region, run, f"{FRUITLESS} attempts have ended because of lost connections, the last one: {why}")
            self._end_attempt(run, why)

    def lose_worker(self, address: str, stimulus_id: str) -> None:
        """End every attempt that has a rank on a worker that is gone."""
        for run in self._runs.values():
            for rank in [r for r, arrival in run.waiting.items() if arrival.worker == address]:
                _answer(run.waiting.pop(rank), {"status": "cancelled"})
            if any(arrival.worker == address and rank not in run.ended for rank, arrival in run.going.items()):
                run.fruitless = 0
                self._end_attempt(run, f"worker {address} is gone")

    def _end_attempt(self, run: _Run, why: str) -> None:
        message = {"op": "daskmesh-region-abort", "number": run.number, "attempt": run.attempt, "why": why}
        for worker in {arrival.worker for arrival in run.going.values()}:
            if worker in self.scheduler.stream_comms:
                self.scheduler.worker_send(worker, message)
        run.going = {}

    def _give_up(self, region: str, run: _Run, text: str) -> None:
        """Fail for everyone, with the same error."""
        self.fail(region, -1, run.ranks, run.gate, 0, packed_error(RuntimeError(text)), "")

    def _tell_failure(self, region: str, run: _Run, rank: int) -> Answer:
        run.told.add(rank)
        if run.told >= set(run.ranks):
            self._runs.pop(region, None)
        return {"status": "failed", "error": run.failure}

    def _is_late(self, run: _Run) -> bool:
        """Whether the failure is news to a rank that comes now, and not one of an earlier computation."""
        gate, failed = self.scheduler.tasks.get(run.gate), self._tasks(run).get(run.failed)
        if gate is None or failed is None or "erred" in (gate.state, failed.state):
            return True
        return failed.state == "processing" and getattr(failed, "run_id", -1) == run.failed_run

    # -- who is missing --------------------------------------------------------------------------------------------

    async def _watch(self, region: str, run: _Run) -> None:
        while run.waiting:
            self._look(region, run)
            await asyncio.sleep(LOOK_SECONDS)
        run.watch = None

    def _look(self, region: str, run: _Run) -> None:
        """Call up ranks that have finished; see whether those that wait are still wanted, and the others can come."""
        for rank, arrival in list(run.waiting.items()):
            task = self.scheduler.tasks.get(arrival.key)
            if task is None or task.processing_on is None or task.processing_on.address != arrival.worker:
                _answer(run.waiting.pop(rank), {"status": "cancelled"})
        tasks = self._tasks(run)
        missing = {rank: task for rank in run.missing if (task := tasks.get(rank)) is not None}
        early = [rank for rank in missing if rank in run.ended]
        if run.waiting and early and not run.attempt:
            self._give_up(region, run, self._ended_early(run, early))
            return
        self._call_up(run, [task for task in missing.values() if task.state in ("memory", "released")])
        self._mind_the_time(region, run, missing)

    def _tasks(self, run: _Run) -> dict[int, TaskState]:
        """The task of each rank, found through the gate, which depends on all of them."""
        gate = self.scheduler.tasks.get(run.gate)
        tasks = () if gate is None else gate.dependencies
        return {task.run_spec.rank: task for task in tasks if isinstance(task.run_spec, RankTask)}

    def _call_up(self, run: _Run, finished: list[TaskState]) -> None:
        if not finished or not run.waiting:
            return
        gate = self.scheduler.tasks[run.gate]
        stimulus = f"daskmesh-call-up-{monotonic()}"
        if gate.state == "memory":  # first: it is the gate that wants all ranks, once it waits again
            self.scheduler.transitions({gate.key: "released"}, stimulus)
        self.scheduler.transitions({task.key: "released" for task in finished if task.state == "memory"}, stimulus)

    def _mind_the_time(self, region: str, run: _Run, missing: dict[int, TaskState]) -> None:
        """Report when nothing but the missing ranks themselves has kept the others waiting for too long."""
        if any(_busy(task) for task in missing.values()):
            run.stuck_since = None
            return
        now = monotonic()
        run.stuck_since = run.stuck_since or now
        if now - run.stuck_since > run.timeout:
            waits = [f"rank {rank} waits in {arrival.call}" for rank, arrival in run.waiting.items()]
            absent = [f"rank {rank} has not come: {_whereabouts(missing.get(rank))}" for rank in run.missing]
            text = f"stuck for {run.timeout:g} s (daskmesh.collective-timeout) before the ranks have met; "
            self._give_up(region, run, text + "; ".join(waits + absent))

    def _ended_early(self, run: _Run, ended: list[int]) -> str:
        waits = ", ".join(f"rank {rank} waits in {arrival.call}" for rank, arrival in run.waiting.items())
        return f"rank {', '.join(map(str, ended))} has returned without taking part, while {waits}"

    async def region_report(self, region: str) -> str:
        """RPC: where each rank of a running attempt is."""
        run = self._runs.get(region)
        lines: dict[int, str] = {}
        workers = {arrival.worker for arrival in run.going.values()} if run is not None else set()
        for worker in workers & set(self.scheduler.workers):
            try:
                answer = await asyncio.wait_for(self.scheduler.rpc(worker).daskmesh_whereabouts(region=region), 5)
            except (OSError, TimeoutError):
                continue
            lines |= {int(rank): text for rank, text in answer}
        tasks = self._tasks(run) if run is not None else {}
        ranks = run.ranks if run is not None else ()
        return "; ".join(
            f"rank {rank} {lines.get(rank) or _whereabouts(tasks.get(rank))}{_state(tasks.get(rank))}" for rank in ranks
        )


def _answer(arrival: _Arrival, answer: Answer) -> None:
    if not arrival.answer.done():
        arrival.answer.set_result(answer)


def _busy(task: TaskState) -> bool:
    """Whether a task that has not joined has a reason outside itself: its inputs, or tasks before it on its worker."""
    worker = task.processing_on
    if worker is None:
        return task.state == "waiting"
    others = [other for other in worker.executing if other is not task and other not in worker.long_running]
    return worker.status.name == "running" and task not in worker.executing and len(others) >= worker.nthreads


def _whereabouts(task: TaskState | None) -> str:
    if task is None:
        return "nobody asked for its result"
    if task.processing_on is None:
        return f"its task is {task.state}"
    return f"its task is on worker {task.processing_on.address}{_state(task)}"


def _state(task: TaskState | None) -> str:
    """What is to be said about the worker of a task."""
    worker = None if task is None else task.processing_on
    if worker is None or worker.status.name == "running":
        return ""
    used, limit = worker.metrics.get("memory", 0), worker.memory_limit
    share = f", {used / limit:.0%} of {format_bytes(limit)} memory" if limit else ""
    return f" (worker {worker.status.name}{share})"


SERVICES.append(Meeting)
