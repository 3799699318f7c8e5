"""The world: ranks bound to the workers of one Dask client, made at the first use of a mesh.

One world is current at a time. It goes by an explicit client, else by Dask's current client, else by a cluster inside
this process that is started for it. A world whose client was closed is replaced at its next use.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any

from distributed import Client
from distributed.utils import sync
from distributed.worker import get_worker

from daskmesh.clients import StandIn, address_of, close_embedded, current_client, embedded_client, prepare, scheduler_id
from daskmesh.mesh import ProcessMesh
from daskmesh.tasks import CURRENT_WORLD

__all__ = ["World", "get_world_size", "init_parallel_env", "shutdown", "world_for"]

logger = logging.getLogger("daskmesh")


class World:
    """A set of ranks bound to the workers of a Dask client. Made by `init_parallel_env`.

    Attributes
    ----------
    id : str
        Names the world on its scheduler.
    client : distributed.Client
        The client it is bound to.
    fixed : bool
        Whether `init_parallel_env` was told the number of ranks; if not, the world grows with the meshes used.

    Examples
    --------
    >>> import daskmesh as dm
    >>> dm.shutdown()  # leaves the world that there may be
    >>> world = dm.init_parallel_env(2)
    >>> world.size, world.fixed, sorted(world.table())
    (2, True, [0, 1])
    >>> dm.shutdown()
    """

    def __init__(self, id_: str, client: Client, size: int, *, fixed: bool, implicit: bool) -> None:
        self.id = id_
        self.client = client
        self.fixed = fixed
        self._size = size
        self._implicit = implicit
        self._told = False
        self._stand_in: StandIn | None = None
        self._scheduler = scheduler_id(client)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._size

    def table(self) -> dict[int, str]:
        """The worker address of each rank as it is now; an empty string for a rank that has lost its worker.

        **Communication**: one message to the scheduler.
        """
        return dict(enumerate(self._addresses(self.size)))

    def __repr__(self) -> str:
        return f"World(size={self.size}, fixed={self.fixed}, scheduler={address_of(self.client)!r})"

    def _grow(self, size: int) -> None:
        addresses = self._addresses(size)
        self._size = len(addresses)
        self._tell(len(set(addresses)))

    def _tell(self, workers: int) -> None:
        """Say once that ranks share workers."""
        if self.size > workers and not self._told:
            logger.info("%d ranks are dealt to %d workers, round robin", self.size, workers)
            self._told = True

    def _addresses(self, size: int) -> list[str]:
        client = self.client
        addresses: list[str] = _ask(client, "world_table", world=self.id, client=client.id, size=size)
        return addresses

    @property
    def _closed(self) -> bool:
        return self.client.status in ("closed", "closing")

    @property
    def _restarted(self) -> bool:
        return bool(scheduler_id(self.client) != self._scheduler)


@dataclass
class _State:
    """What this process is bound to."""

    world: World | None = None


_STATE = _State()
_LOCK = threading.RLock()


def init_parallel_env(n_ranks: int | None = None, client: Client | None = None) -> World:
    """Bind ranks to workers. Optional: the first use of a mesh does it.

    Parameters
    ----------
    n_ranks : int, optional
        Number of ranks, which is fixed then. By default as many as the first mesh has, and with a client at least one
        per worker; such a world grows with later meshes.
    client : distributed.Client, optional
        By default Dask's current client, else a cluster inside this process. A client of another scheduler than that of
        Dask's current client, such as that of the cluster inside this process, is Dask's default until `shutdown`.

    Returns
    -------
    World
        A second call with the same or no arguments returns the same world.

    Notes
    -----
    Ranks are dealt to the workers round robin, in the order of host, then nanny address or name. Workers that join
    later take only ranks that have lost their worker.

    **Communication**: a few messages to the scheduler and one to each worker.

    Raises
    ------
    RuntimeError
        There is a world with other arguments, or the scheduler or a worker lacks this version of daskmesh.
    TypeError
        The client is asynchronous, or no client.

    Examples
    --------
    >>> import daskmesh as dm
    >>> world = dm.init_parallel_env()
    >>> world is dm.init_parallel_env()
    True
    >>> dm.shutdown()
    """
    if n_ranks is not None and (isinstance(n_ranks, bool) or not isinstance(n_ranks, int)):
        raise TypeError(f"init_parallel_env: n_ranks is a number of ranks, got {n_ranks!r}")
    if n_ranks is not None and n_ranks < 1:
        raise ValueError(f"init_parallel_env: n_ranks must be at least 1, got {n_ranks}")
    if client is not None and not hasattr(client, "run_on_scheduler"):
        raise TypeError(f"init_parallel_env: client is a distributed.Client, got {client!r}; write Client({client!r})")
    with _LOCK:
        world = _live_world()
        if world is None or world._restarted:
            return _make_world(n_ranks, client)
        if client not in (None, world.client) or (n_ranks is not None and (n_ranks != world.size or not world.fixed)):
            asked = ", ".join(f"{k}={v!r}" for k, v in (("n_ranks", n_ranks), ("client", client)) if v is not None)
            raise RuntimeError(f"init_parallel_env({asked}): there is a world already, {world!r}; call shutdown() first")
        return world


def shutdown() -> None:
    """Leave the world, and close the cluster inside this process if one was started for it.

    Results held on an outer cluster stay there as long as something refers to them.

    **Communication**: one message to the scheduler.

    Examples
    --------
    >>> import daskmesh as dm
    >>> _ = dm.init_parallel_env(2)
    >>> dm.shutdown()
    >>> dm.get_world_size()
    1
    """
    with _LOCK:
        world, _STATE.world = _STATE.world, None
        if world is not None:
            if world._stand_in is not None:
                world._stand_in.end()
            if world.client.status == "running" and not world._restarted:
                _ask(world.client, "forget_world", world=world.id)
        close_embedded()


def get_world_size() -> int:
    """Number of ranks in the world; 1 without a world. Works on the client and inside a rank's task.

    **Communication**: none on the client, one message to the scheduler inside a task.

    Examples
    --------
    >>> import daskmesh as dm
    >>> dm.shutdown()
    >>> dm.get_world_size()
    1
    >>> _ = dm.init_parallel_env(3)
    >>> dm.get_world_size()
    3
    >>> dm.shutdown()
    """
    running = CURRENT_WORLD.get()
    world = _STATE.world
    if running is not None and (world is None or world.id != running):
        try:
            worker = get_worker()
        except ValueError:
            return 1
        return int(sync(worker.loop, worker.scheduler.daskmesh_world_size, world=running))
    return max(1, world.size) if world is not None and not world._closed else 1


def world_for(mesh: ProcessMesh) -> World:
    """The world that holds all ranks of `mesh`, made or grown if need be.

    **Communication**: none if the world has these ranks.

    Raises
    ------
    ValueError
        A rank of the mesh is beyond a world of fixed size.
    RuntimeError
        The scheduler was restarted and does not know the world any more.

    Examples
    --------
    >>> import daskmesh as dm
    >>> world = world_for(dm.ProcessMesh([0, 1, 2]))
    >>> world.size, world_for(dm.ProcessMesh([0, 4])).size, world.size
    (3, 5, 5)
    >>> dm.shutdown()
    """
    need = max(mesh.process_ids) + 1
    with _LOCK:
        world = _live_world()
        if world is None:
            return _make_world(None, None, need)
        if world._restarted:
            raise RuntimeError(
                f"the scheduler at {address_of(world.client)} was restarted and has lost the world and its data; "
                "call init_parallel_env() and make the DTensors again"
            )
        if need > world.size:
            if world.fixed:
                raise ValueError(
                    f"rank {need - 1} of {mesh!r} is beyond the world, whose size was fixed at {world.size}: use "
                    f"ranks 0 to {world.size - 1}, or call shutdown() and init_parallel_env(n_ranks={need})"
                )
            world._grow(need)
        return world


def _live_world() -> World | None:
    """The current world unless it has to be replaced: its client is closed, or Dask's current client is another."""
    world = _STATE.world
    if world is None or world._closed:
        return None
    current = current_client()
    if world._implicit and current is not None and current is not world.client:
        return None
    return world


def _make_world(n_ranks: int | None, client: Client | None, at_least: int = 0) -> World:
    if CURRENT_WORLD.get() is not None:
        raise RuntimeError("a world cannot be made inside a rank's task: use NumPy arrays there and DTensors on the client")
    # Made by the first use of a mesh, or as good as: it follows Dask's current client. One made to measure stays.
    implicit = client is None and n_ranks is None
    client = client or current_client()
    if client is None:
        client = embedded_client(n_ranks or at_least)
        n_ranks, fixed = n_ranks or at_least, n_ranks is not None
    else:
        fixed = n_ranks is not None
        if client.asynchronous:
            raise TypeError(
                "init_parallel_env: an asynchronous client cannot be waited for; make the world with a synchronous "
                "Client of the same scheduler, then use `await client.persist(x)` and `await client.compute(x)` here"
            )
    prepare(client)
    answer = _ask(client, "create_world", client=client.id, ranks=n_ranks, at_least=at_least)
    world = World(answer["world"], client, answer["size"], fixed=fixed, implicit=implicit)
    world._tell(answer["workers"])
    current = current_client()
    if current is None or scheduler_id(current) != scheduler_id(client):  # Dask would compute elsewhere
        world._stand_in = StandIn(client)
        logger.info("the client of %s is Dask's default client until shutdown()", address_of(client))
    _STATE.world = world
    return world


def _ask(client: Any, what: str, /, **message: Any) -> Any:
    """Call the scheduler plugin."""
    return client.sync(getattr(client.scheduler, f"daskmesh_{what}"), **message)
