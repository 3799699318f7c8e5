"""A rank's way into its region and out of it: joining at the meeting point, failing together, running again.

`taking_part` surrounds the rank's function. What it raises ends the others at once, with the same error. A lost peer is no
error: the rank's task asks Dask to run it again, and the ranks meet under the next attempt.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from distributed import Reschedule, get_worker
from distributed.comm.addressing import get_address_host
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.utils import sync

from daskmesh import config
from daskmesh.errors import packed_error, unpacked_error
from daskmesh.gang import Gang, gang_context
from daskmesh.links import Endpoint, PeerLost
from daskmesh.meeting import Meeting
from daskmesh.mesh import ProcessMesh
from daskmesh.parcels import Line
from daskmesh.peers import make_room
from daskmesh.store import store_at
from daskmesh.wires import Address

if TYPE_CHECKING:
    from distributed import Worker

__all__ = ["RegionLost", "taking_part"]

logger = logging.getLogger("daskmesh")

#: Seconds that a rank waits for the others on its worker's thread before it makes room for another task.
PATIENCE = 0.005
#: Seconds before a task that lost a peer is scheduled again: the scheduler learns of the loss within that order.
RETRY_PAUSE = 0.05
_NAME = "daskmesh-links"


class RegionLost(PeerLost):
    """The attempt is over because a rank of it is lost; the region runs again.

    Examples
    --------
    >>> issubclass(RegionLost, ConnectionError)
    True
    """


@dataclass(eq=False)
class _Conversations:
    """What the workers of this process have: an endpoint per cluster, and the lines that are in use."""

    ends: dict[str, Endpoint]
    lines: dict[tuple[str, int], Line]
    lock: threading.Lock


_HERE = _Conversations({}, {}, threading.Lock())


class LinksPlugin(WorkerPlugin):
    """The direct connections of one worker: opened when its first region communicates, closed with it."""

    name = _NAME

    def __init__(self, key: bytes) -> None:
        self.key = key

    def setup(self, worker: Worker) -> None:
        """Open the endpoint, or share that of another worker of this process and cluster."""
        shared = next((end for end in _HERE.ends.values() if end.key == self.key), None)
        _HERE.ends[worker.address] = shared or _open(worker, self.key)
        worker.stream_handlers["daskmesh-region-abort"] = self.abort
        worker.handlers["daskmesh_frame"] = self.frame
        worker.handlers["daskmesh_whereabouts"] = whereabouts
        self.end = _HERE.ends[worker.address]

    def teardown(self, worker: Worker) -> None:
        """Close the endpoint, unless another worker uses it."""
        end = _HERE.ends.pop(worker.address)
        if end not in _HERE.ends.values():
            end.close()

    def abort(self, number: int, attempt: int, why: str) -> None:
        """The scheduler has ended an attempt."""
        self.end.abort(number, attempt, RegionLost(why))

    async def frame(self, frame: bytes) -> None:
        """RPC: a message of a peer that has no connection to this process."""
        self.end.deliver(frame)


def _open(worker: Worker, key: bytes) -> Endpoint:
    """Listen where the worker listens; encrypted or other comms are not to be bypassed between hosts."""
    host = get_address_host(worker.address) if worker.address.startswith("tcp://") else None

    def relay(to: Address, frame: bytes) -> None:
        try:
            sync(worker.loop, worker.rpc(to.worker).daskmesh_frame, frame=frame)
        except OSError as error:
            raise PeerLost(f"worker {to.worker} cannot be reached: {error}") from error

    return Endpoint(key, host, None if host else relay, worker.address)


def _end_of(worker: Worker) -> Endpoint:
    with _HERE.lock:
        if worker.address not in _HERE.ends:
            key = sync(worker.loop, worker.scheduler.daskmesh_meeting_key)
            answer = sync(worker.loop, worker.plugin_add, LinksPlugin(key), name=_NAME)
            if answer["status"] != "OK":
                raise RuntimeError(f"worker {worker.address} cannot open direct connections: {answer}")
        return _HERE.ends[worker.address]


async def whereabouts(region: str) -> list[list[Any]]:
    """RPC: where the ranks of a region are that run in this process."""
    return [[rank, line.whereabouts] for (name, rank), line in list(_HERE.lines.items()) if name == region]


@dataclass(eq=False)
class _Part:
    """One rank's part in one run of a region."""

    region: str
    gate: Any
    gang: Gang
    title: str
    worker: Worker | None = None
    given: BaseException | None = None
    number: int = 0  # of the run that it has joined, and of the attempt
    attempt: int = 0

    def join(self) -> Line:
        """Meet the other ranks; a rank that has to wait for them makes room on its worker."""
        worker = self.worker
        if worker is None:
            raise RuntimeError(
                f"rank {self.gang.rank} of {self.gang.mesh!r} cannot reach the others: collectives need a cluster; compute with "
                "a distributed Client (daskmesh.init_parallel_env() makes one), not with Dask's threaded or synchronous scheduler"
            )
        end = _end_of(worker)
        loop: Any = worker.loop
        answered: Future[dict[str, Any]] = asyncio.run_coroutine_threadsafe(
            worker.scheduler.daskmesh_join_region(
                **self._named(),
                key=worker.get_current_task(),
                worker=worker.address,
                address=dataclasses.astuple(end.address),
                call=self.gang.calling,
                timeout=config.seconds("collective-timeout"),
            ),
            loop.asyncio_loop,
        )
        try:
            answer = answered.result(PATIENCE)
        except TimeoutError:
            make_room()
            answer = answered.result()
        if answer["status"] == "cancelled":
            raise Reschedule
        if answer["status"] == "failed":
            self.given = unpacked_error(answer["error"])
            raise self.given
        store = store_at(worker.address)
        if store is None:
            raise RuntimeError(f"worker {worker.address} has no shard store; call daskmesh.init_parallel_env() first")
        table = {int(rank): Address(*address) for rank, address in answer["table"]}
        self.number, self.attempt = answer["number"], answer["attempt"]
        timeout = config.seconds("collective-timeout")
        line = Line(end, store, self.number, self.attempt, self.gang.rank, table, timeout, self.stuck)
        line.enter()
        _HERE.lines[self.region, self.gang.rank] = line
        return line

    def _named(self) -> dict[str, Any]:
        return {"region": self.region, "rank": self.gang.rank, "ranks": self.gang.mesh.process_ids, "gate": self.gate}

    def _say(self, op: str, **what: Any) -> None:
        if self.worker is not None and (self.gate is not None or self.number):
            self.worker.loop.add_callback(self.worker.batched_send, {"op": f"daskmesh-region-{op}", **what})

    def stuck(self, error: TimeoutError) -> NoReturn:
        """A peer has not answered for too long: ask where everybody is."""
        report = ""
        if self.worker is not None:
            report = sync(self.worker.loop, self.worker.scheduler.daskmesh_region_report, region=self.region)
        raise TimeoutError(f"{error} (daskmesh.collective-timeout); {report}") from None

    def close(self, error: BaseException | None = None) -> None:
        """Leave, or end the attempt for all with `error`."""
        line, self.gang.line = self.gang.line, None
        if line is not None:
            _HERE.lines.pop((self.region, self.gang.rank), None)
            line.close(error)

    def ended(self) -> None:
        """The function has returned."""
        self.close()
        self._say("ended", **self._named(), number=self.number, attempt=self.attempt)

    def failed(self, error: Exception) -> None:
        """The function has raised: all ranks shall raise the same."""
        if error is self.given or (self.gang.line is not None and error is self.gang.line.aborted):
            self.close()
            return
        gang = self.gang
        where = f"rank {gang.rank} at coordinate {gang.mesh.coordinate(gang.rank)} of {gang.mesh!r}"
        error.add_note(f"{where}, running {self.title}" if self.title else where)
        self.close(error)
        self._say("failed", **self._named(), number=self.number, error=packed_error(error))

    def lost(self, error: PeerLost) -> NoReturn:
        """A peer is lost: end the attempt for all, and run again."""
        line = self.gang.line
        logger.info("region %s runs again on rank %d: %s", self.region, self.gang.rank, error)
        if self.gang.on_lost is not None:
            final = self.gang.on_lost(error)
            self.failed(final)
            raise final from error
        if line is not None and not isinstance(error, RegionLost):
            self._say("lost", region=self.region, number=line.region, attempt=line.attempt, why=str(error))
        self.close(error if isinstance(error, RegionLost) else RegionLost(str(error)))
        time.sleep(RETRY_PAUSE)
        raise Reschedule from None


@contextmanager
def taking_part(region: str, mesh: ProcessMesh, rank: int, gate: Any = None, title: str = "") -> Iterator[Gang]:
    """Run the block as `rank` of a region named alike on all ranks; `gate` is the key of a task that depends on all of them.

    `title` is how messages call the function.

    An error in the block gets a note that names the rank, and ends the region on all ranks. When a peer is lost, the task is
    rescheduled.

    **Communication**: with the scheduler, if the block uses a collective; a message to it at the end.

    Examples
    --------
    >>> with taking_part("example", ProcessMesh([7]), 7) as gang:
    ...     gang.group(None).size
    1
    """
    part = _Part(region, gate, Gang(mesh, rank), title)
    part.gang.join = part.join
    try:
        part.worker = get_worker()
    except ValueError:
        part.worker = None
    try:
        with gang_context(part.gang):
            yield part.gang
    except Reschedule:
        part.close(RegionLost(f"rank {rank} runs again"))
        raise
    except PeerLost as error:
        part.lost(error)
    except Exception as error:
        part.failed(error)
        raise
    except BaseException as error:
        part.close(RuntimeError(f"rank {rank} was ended by {error!r}"))
        raise
    else:
        part.ended()


_MEETS_AT = Meeting  # importing it makes every scheduler that gets daskmesh's plugin run one
