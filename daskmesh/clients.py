"""Dask's clients: the current one, the one of the cluster inside this process, and making ready what a client leads to.

Dask computes with its own current client and asks nobody. So a client that ranks are bound to is made its default one, and
whatever scheduler the current client leads to gets the plugin before a graph of ranks does.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dask.system import CPU_COUNT
from distributed import Client, LocalCluster
from distributed.client import _current_client, _global_clients, ensure_default_client
from distributed.utils import silence_logging_cmgr

from daskmesh.plugins import SERVICES, VERSION, RankPlugin
from daskmesh.tasks import CURRENT_WORLD

__all__ = [
    "StandIn", "address_of", "close_embedded", "current_client", "embedded_client", "prepare", "prepare_current", "scheduler_id",
]  # fmt: skip

logger = logging.getLogger("daskmesh")

_PREPARED: set[Any] = set()  # ids of the schedulers that have the plugin
_EMBEDDED: list[tuple[Any, Any]] = []  # the cluster inside this process and its client, or nothing


def current_client() -> Client | None:
    """Dask's current client, if it is open."""
    try:
        client: Client = Client.current()
    except ValueError:
        return None
    return None if client.status in ("closed", "closing") else client


def address_of(client: Any) -> str:
    """The address of a client's scheduler."""
    return str(client.scheduler.address)


def scheduler_id(client: Client) -> Any:
    """What tells a client's scheduler from others, one at the same address included."""
    # The client's own copy, refreshed whenever it connects: asking the scheduler here would cost a message per mesh.
    return client._scheduler_identity.get("id")


class StandIn:
    """A client in the place of Dask's default one, and of the current one of this context, until `end`."""

    def __init__(self, client: Client) -> None:
        ensure_default_client(client)
        self._place = max(_global_clients)
        # Inside `with Client(...)` the current client goes before the default one.
        self._before: Client | None = _current_client.get()
        _current_client.set(None)

    def end(self) -> None:
        """Restore what was there."""
        _global_clients.pop(self._place, None)
        if _current_client.get() is None and self._before is not None and self._before.status == "running":
            _current_client.set(self._before)


def prepare_current() -> None:
    """Make sure that ranks keep their workers on the scheduler of Dask's current client, whatever world they are of.

    **Communication**: none, but for the first call for a scheduler.
    """
    client = None if CURRENT_WORLD.get() is not None else current_client()
    if client is not None and not client.asynchronous and scheduler_id(client) not in _PREPARED:
        prepare(client)


def prepare(client: Any) -> None:
    """Put the plugin on a client's scheduler, once scheduler and workers are known to have this version of daskmesh."""
    if not any(client is mine for _, mine in _EMBEDDED):
        _check_versions(client)
    client.register_plugin(RankPlugin(SERVICES))
    _PREPARED.add(scheduler_id(client))


def _check_versions(client: Any) -> None:
    """Same daskmesh on scheduler and workers, or the error they would give later would name neither cause nor cure."""
    # An expression, because a function of this package could not be unpickled where the package is missing.
    probe = "getattr(__import__('daskmesh'), '__version__', 'of unknown version')"
    found: dict[str, Any] = {}
    try:
        found[f"the scheduler {address_of(client)}"] = client.run_on_scheduler(eval, probe)
    except ImportError as error:
        found[f"the scheduler {address_of(client)}"] = error
    for address, answer in client.run(eval, probe, on_error="return").items():
        found[f"worker {address}"] = answer
    for where, answer in found.items():
        if isinstance(answer, ImportError) or (isinstance(answer, str) and answer != VERSION):
            has = f"cannot import it ({answer})" if isinstance(answer, ImportError) else f"has {answer}"
            raise RuntimeError(
                f"init_parallel_env: scheduler and workers need the client's daskmesh {VERSION}, but {where} {has}; "
                f"run there: pip install daskmesh=={VERSION}"
            )


def embedded_client(ranks: int) -> Any:
    """A cluster of threads inside this process: no more workers than CPUs, nor than ranks if these are known (0: not)."""
    for _, mine in _EMBEDDED:
        if mine.status == "running":
            return mine
    close_embedded()
    workers = min(CPU_COUNT, ranks or CPU_COUNT)
    cluster = LocalCluster(
        n_workers=workers,
        threads_per_worker=max(1, CPU_COUNT // workers),
        processes=False,
        # Not None: Dask would then bind its default port for plain HTTP, and warn where another cluster has it.
        dashboard_address="127.0.0.1:0",
        scheduler_kwargs={"dashboard": False},
        # Each worker would take the memory of the whole process for its own, and spill or pause for that of the others.
        memory_limit=0,
        silence_logs=logging.ERROR,
    )
    client = Client(cluster)
    _EMBEDDED.append((cluster, client))
    logger.info("started a Dask cluster in this process, %d workers; its client is Dask's default client now", workers)
    return client


@atexit.register
def close_embedded() -> None:
    """Close the cluster inside this process, if there is one."""
    while _EMBEDDED:
        cluster, client = _EMBEDDED.pop()
        with _quiet():
            client.close()
            cluster.close()


@contextmanager
def _quiet() -> Iterator[None]:
    """Closing a cluster cuts comms that others still listen to; what they log about it is no news."""
    with silence_logging_cmgr(logging.CRITICAL):
        yield
