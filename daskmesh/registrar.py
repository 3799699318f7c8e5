"""The list of symmetric tensors: a service on the scheduler, which makes and frees them and hears of lost PEs.

::

    client ── create ──> registrar ── make ──> workers of all PEs     zeroed buffers; their claims come back
                                   ── open ──> the same workers       only now can anyone reach another's buffer

When a worker with a PE goes, the tensor is dead: the registrar tells the workers of all other PEs, whose waiting and later
operations raise. A tensor lives until it is freed, its world ends, or the client that made it leaves.
"""

from __future__ import annotations

import asyncio
import pickle
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from time import monotonic
from typing import TYPE_CHECKING, Any

from dask.utils import format_bytes
from distributed.core import send_recv
from distributed.diagnostics.plugin import SchedulerPlugin, WorkerPlugin
from distributed.protocol.pickle import dumps

from daskmesh import config
from daskmesh.plugins import SERVICES
from daskmesh.symmetric import setup_symmetric, teardown_symmetric

if TYPE_CHECKING:
    from distributed import Scheduler, Worker

    from daskmesh.plugins import RankPlugin

__all__ = ["Registrar"]

_NAME = "daskmesh-symmetric"
#: Seconds between two looks whether a rank without a worker has one.
LOOK_SECONDS = 0.05
#: Seconds for which a tensor is tried to be made on workers that do not answer.
MAKING_SECONDS = 10.0


class SymmetricPlugin(WorkerPlugin):
    """The worker's side: opens and closes its store of symmetric buffers."""

    name = _NAME
    idempotent = True

    def setup(self, worker: Worker) -> None:
        """Open the store."""
        setup_symmetric(worker)

    def teardown(self, worker: Worker) -> None:
        """Close it."""
        teardown_symmetric(worker)


class _Leaving(SchedulerPlugin):
    """Frees what a client made when that client leaves."""

    name = _NAME

    def __init__(self, registrar: Registrar) -> None:
        self.registrar = registrar

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        self.registrar.free_where(lambda tensor: tensor.client == client)


@dataclass
class _Tensor:
    """One symmetric tensor: whose it is, and which worker has each PE."""

    id: str
    title: str
    client: str
    world: str
    shape: tuple[int, ...]
    dtype: bytes
    addresses: list[str]
    table: list[Any] = field(default_factory=list)
    lost: tuple[int, str] | None = None


class Registrar:
    """The symmetric tensors of all worlds on one scheduler.

    Examples
    --------
    >>> Registrar().tensors
    {}
    """

    def __init__(self) -> None:
        self.tensors: dict[str, _Tensor] = {}
        self._groups: dict[tuple[str, str], int] = {}
        self._ready: asyncio.Lock | None = None
        self._installed = False
        self._chores: set[asyncio.Task[None]] = set()

    def install(self, ranks: RankPlugin) -> None:
        """Answer clients and workers, and hear of those that go."""
        self.ranks = ranks
        self.scheduler = ranks.scheduler
        for handler in (
            self.symmetric_create,
            self.symmetric_free,
            self.symmetric_state,
            self.symmetric_kill,
            self.symmetric_group,
        ):
            ranks.handle(handler.__name__, handler)
        ranks.on_remove_worker.append(self.lose_worker)
        ranks.on_forget_world.append(lambda world: self.free_where(lambda tensor: tensor.world == world))
        self.scheduler.add_plugin(_Leaving(self), name=_NAME, idempotent=True)

    # -- groups ------------------------------------------------------------------------------------------------------

    async def symmetric_group(self, world: str, name: str, size: int | None = None) -> int:
        """RPC: the size of a named group, which is `size` if it is new; 0 for one that is not there."""
        if size is None:
            return self._groups.get((world, name), 0)
        return self._groups.setdefault((world, name), size)

    # -- life --------------------------------------------------------------------------------------------------------

    async def symmetric_create(
        self, client: str, world: str, ranks: Sequence[int], title: str, shape: Sequence[int], dtype: bytes
    ) -> dict[str, Any]:
        """RPC of a client: make the buffers of all PEs, zeroed, then let the PEs know of each other."""
        await self._set_up()
        end = monotonic() + MAKING_SECONDS
        while True:
            seats = await self._seats(client, world, ranks)
            tensor = _Tensor(uuid.uuid4().hex, title, client, world, tuple(shape), dtype, seats)
            if too_large := self._beyond_memory(tensor):
                return _failed(MemoryError(too_large))
            self.tensors[tensor.id] = tensor
            try:
                await self._make(tensor)
            except OSError as error:  # a worker that the scheduler does not miss yet
                await self._free(tensor)
                if monotonic() > end:
                    return _failed(RuntimeError(f"symmetric tensor {title} cannot be made: {error}"))
                await asyncio.sleep(LOOK_SECONDS)
            except MemoryError as error:
                await self._free(tensor)
                return _failed(error)
            else:
                return {"status": "OK", "tensor": tensor.id}

    async def _make(self, tensor: _Tensor) -> None:
        what = {"tensor": tensor.id, "title": tensor.title, "shape": tensor.shape, "dtype": tensor.dtype}
        made = (self._tell(address, "make", pe=pe, **what) for pe, address in enumerate(tensor.addresses))
        tensor.table = list(await asyncio.gather(*made))
        opened = (self._tell(address, "open", table=tensor.table, **what) for address in dict.fromkeys(tensor.addresses))
        await asyncio.gather(*opened)

    async def symmetric_free(self, tensor: str) -> None:
        """RPC: let go of a tensor; nothing if it is not there."""
        if tensor in self.tensors:
            await self._free(self.tensors[tensor])

    async def symmetric_state(self, tensor: str) -> dict[str, Any]:
        """RPC: whether a tensor is open, lost or freed, and where its buffers are."""
        found = self.tensors.get(tensor)
        if found is None:
            return {"status": "freed"}
        if found.lost is not None:
            return {"status": "lost", "pe": found.lost[0], "why": found.lost[1]}
        return {"status": "open", "table": found.table, "shape": found.shape, "dtype": found.dtype}

    async def symmetric_kill(self, tensor: str, pe: int, why: str) -> None:
        """RPC: what was done to a tensor cannot be completed, so that nobody may go on with it."""
        if tensor in self.tensors:
            self._lose(self.tensors[tensor], pe, why)

    def free_where(self, which: Any) -> None:
        """Free tensors, in the background."""
        for tensor in [tensor for tensor in self.tensors.values() if which(tensor)]:
            chore = asyncio.create_task(self._free(tensor))
            self._chores.add(chore)
            chore.add_done_callback(self._chores.discard)

    def lose_worker(self, address: str, stimulus_id: str) -> None:
        """Every tensor with a PE on a worker that is gone is dead."""
        for tensor in self.tensors.values():
            if address in tensor.addresses:
                self._lose(tensor, tensor.addresses.index(address), f"worker {address} is gone")

    def _lose(self, tensor: _Tensor, pe: int, why: str) -> None:
        if tensor.lost is not None:
            return
        who = f"PE {pe} of symmetric tensor {tensor.title} is lost" if pe >= 0 else f"symmetric tensor {tensor.title} is dead"
        tensor.lost = (pe, f"{who}: {why}; create the tensor again")
        message = {"op": "daskmesh-symmetric-lost", "tensor": tensor.id, "pe": pe, "why": tensor.lost[1]}
        for address in list(self.scheduler.stream_comms):  # those that have read it without a PE of it, too
            self.scheduler.worker_send(address, message)

    async def _free(self, tensor: _Tensor) -> None:
        self.tensors.pop(tensor.id, None)
        there = set(self.scheduler.workers)  # those that have read it without a PE of it, too
        # A worker that cannot be reached takes its buffers with it.
        await asyncio.gather(*(self._tell(address, "free", tensor=tensor.id) for address in there), return_exceptions=True)

    # -- workers -----------------------------------------------------------------------------------------------------

    async def _set_up(self) -> None:
        """Give every worker, those that join later too, its store."""
        if self._ready is None:
            self._ready = asyncio.Lock()
        async with self._ready:
            if not self._installed:
                plugin = dumps(SymmetricPlugin())
                answers = await self.scheduler.register_worker_plugin(None, plugin, name=_NAME, idempotent=True)
                for address, answer in answers.items():
                    if answer["status"] != "OK":
                        raise RuntimeError(f"daskmesh cannot hold symmetric tensors on worker {address}: {answer}")
                self._installed = True

    async def _seats(self, client: str, world: str, ranks: Iterable[int]) -> list[str]:
        """The worker of each PE; a rank that has none gets the time to come home, or to be folded."""
        while True:
            addresses = await self.ranks.world_table(world, client, max(ranks) + 1)
            seats = [addresses[rank] for rank in ranks]
            if all(seats):
                return seats
            await asyncio.sleep(LOOK_SECONDS)

    def _beyond_memory(self, tensor: _Tensor) -> str:
        nbytes = prod(tensor.shape) * pickle.loads(tensor.dtype).itemsize
        for address in set(tensor.addresses):
            limit = self.scheduler.workers[address].memory_limit
            share = nbytes * tensor.addresses.count(address)
            if limit and share > limit:
                return (
                    f"symmetric tensor {tensor.title} takes {format_bytes(share)} on worker {address}, whose memory limit is "
                    f"{format_bytes(limit)}; make it smaller, or use more workers"
                )
        return ""

    async def _tell(self, address: str, what: str, **message: Any) -> Any:
        comm = await self.scheduler.rpc.connect(address, timeout=config.seconds("connect-timeout"))
        try:
            return await send_recv(comm, op=f"daskmesh_symmetric_{what}", **message)
        finally:
            self.scheduler.rpc.reuse(address, comm)


def _failed(error: Exception) -> dict[str, Any]:
    return {"status": "failed", "error": pickle.dumps(error)}


SERVICES.append(Registrar)
