"""Loading views of exposed arrays, over the fastest road that holds.

=====  ===================================================================  ==========================================
road   how                                                                  when
=====  ===================================================================  ==========================================
same   copied by the reader                                                 the array lives in this process
vm     `process_vm_readv` from the owner's memory straight into the result  same host, user and PID namespace
shm    the owner fills a shared segment, the reader copies out of it        same host, memory not readable
rpc    a handler on the owner's worker slices and sends                     anywhere; always for arrays on a device
=====  ===================================================================  ==========================================

Dask config `daskmesh.transport` is "auto" or names one road to be forced ("vm", "shm", "rpc"). A forced road holds
between processes of one host; a pair that cannot take it is an error rather than another road. Between hosts, and for
arrays whose memory is not plain bytes, it is "rpc" in any case. Within a process the road is "same", unless "rpc" is
forced and the array belongs to another worker of the process.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from distributed import Worker, get_worker
from tornado.ioloop import PeriodicCallback

from daskmesh import config, recycling, segments, vm
from daskmesh.fetch import Fetch, Load
from daskmesh.reading import read_all
from daskmesh.roads import ROADS, road_to
from daskmesh.serve import HANDLERS, handlers
from daskmesh.store import (
    Ticket,
    TicketLost,
    close_store,
    expose,
    expose_all,
    local_array,
    open_store,
    release,
    same_process,
    store_at,
)
from daskmesh.views import normal_index, view_shape

__all__ = [
    "ROADS",
    "Ticket",
    "TicketLost",
    "expose",
    "expose_all",
    "load",
    "load_all",
    "load_into",
    "local_array",
    "release",
    "reset_stats",
    "setup_worker",
    "stats",
    "teardown_worker",
]

_TRIMS = "daskmesh-recycling"

_count_lock = threading.Lock()
_counts: Counter[tuple[str, str, str]] = Counter()  # (address of the reader, road, what)


def stats(address: str | None = None) -> dict[str, dict[str, int]]:
    """Loads made by this process since `reset_stats`, and their bytes, by road.

    Parameters
    ----------
    address : str, optional
        Count only what the worker at this address loaded.

    Notes
    -----
    **Communication**: none.

    Examples
    --------
    >>> reset_stats()
    >>> load(expose(np.arange(4)), (slice(1, 3),))
    array([1, 2])
    >>> stats()["same"]
    {'loads': 1, 'bytes': 16}
    """
    with _count_lock:
        counts = dict(_counts)
    return {
        road: {
            what: sum(n for (reader, r, w), n in counts.items() if r == road and w == what and address in (None, reader))
            for what in ("loads", "bytes")
        }
        for road in ROADS
    }


def reset_stats() -> None:
    """Count from zero again.

    Notes
    -----
    **Communication**: none.

    Examples
    --------
    >>> reset_stats()
    >>> stats()["rpc"]
    {'loads': 0, 'bytes': 0}
    """
    with _count_lock:
        _counts.clear()


def _count(worker: Worker | None, by_road: dict[str, list[Load]]) -> None:
    reader = "" if worker is None else worker.address
    with _count_lock:
        for road, loads in by_road.items():
            if loads:
                _counts[reader, road, "loads"] += len(loads)
                _counts[reader, road, "bytes"] += sum(load.nbytes for load in loads)


def load_into(ticket: Ticket, index: Sequence[int | slice], out: Any) -> None:
    """Write ``array[index]`` of the exposed array straight into `out`.

    Parameters
    ----------
    ticket : Ticket
    index : sequence of int and slice
        An int (leading axes, as a rule) or a slice with 0 <= start <= stop and step 1 for each axis; trailing axes left
        out are taken whole.
    out : array
        Any writable strided view of the shape of ``array[index]``. Another dtype is converted ("same_kind").

    Raises
    ------
    TicketLost
        The array is gone, or its worker is. What `out` holds then is undefined.

    Notes
    -----
    **Communication**: the elements of the view, from the owner; none if the array lives in this process.

    Examples
    --------
    >>> out = np.zeros((2, 2))
    >>> load_into(expose(np.arange(6.0).reshape(2, 3)), (0, slice(1, 3)), out[:, 0])
    >>> out
    array([[1., 0.],
           [2., 0.]])
    """
    load_all([(ticket, index, out)])


def load(ticket: Ticket, index: Sequence[int | slice] = ()) -> Any:
    """A fresh array with ``array[index]`` of the exposed array.

    Parameters
    ----------
    ticket, index
        As for `load_into`; no index loads the whole array.

    Raises
    ------
    TicketLost
        The array is gone, or its worker is.

    Notes
    -----
    **Communication**: the elements of the view, from the owner; none if the array lives in this process.

    Examples
    --------
    >>> load(expose(np.arange(6).reshape(2, 3)), (1,))
    array([3, 4, 5])
    """
    shape = view_shape(normal_index(index, ticket.shape))
    if ticket.kind != "other":
        out = recycling.empty(shape, ticket.dtype)
    else:
        out = np.empty_like(_sample(ticket), shape=shape)
    load_into(ticket, index, out)
    return out


def load_all(jobs: Iterable[tuple[Ticket, Sequence[int | slice], Any]]) -> None:
    """Do many loads at once: ``(ticket, index, out)``, each as `load_into` does it.

    At most `daskmesh.max-inflight-bytes` are under way from other workers at a time.

    Raises
    ------
    TicketLost
        One of the arrays is gone. The loads that were under way have ended by then; what the `out` arrays hold is
        undefined.

    Notes
    -----
    **Communication**: the elements of the views, from their owners.

    Examples
    --------
    >>> ticket, out = expose(np.arange(6)), np.zeros(4, int)
    >>> load_all([(ticket, (slice(0, 2),), out[2:]), (ticket, (slice(4, 6),), out[:2])])
    >>> out
    array([4, 5, 0, 1])
    """
    worker = _worker()
    by_road: dict[str, list[Load]] = {road: [] for road in ROADS}
    for job in jobs:
        item = _checked(*job)
        if item.nbytes:
            road, _ = road_to(item.ticket, worker, _bytes_suffice(item))
            by_road[road].append(item)
    remote = _start(worker, by_road["rpc"], by_road["shm"])
    try:
        for item in by_road["same"]:
            _put(item.out, local_array(item.ticket)[(*item.index, ...)])
        unreadable = read_all(by_road["vm"])
    except BaseException:
        if remote is not None:
            remote.stop()
            remote.finish(_put)
        raise
    if remote is not None:
        remote.finish(_put)
    for item in unreadable:
        by_road["vm"].remove(item)
        by_road["rpc"].append(item)
    remote = _start(worker, unreadable)
    if remote is not None:
        remote.finish(_put)
    _count(worker, by_road)


def _worker() -> Worker | None:
    try:
        return get_worker()
    except ValueError:
        return None


def _checked(ticket: Ticket, index: Sequence[int | slice], out: Any) -> Load:
    item = Load(ticket, normal_index(index, ticket.shape), out)
    if tuple(out.shape) != view_shape(item.index):
        raise ValueError(
            f"load: index {tuple(index)} of an exposed array {ticket.shape} selects {view_shape(item.index)}, "
            f"but out has shape {tuple(out.shape)}; pass out of the selected shape"
        )
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError(f"load: out {out.shape} is read-only; pass an array that can be written to")
    return item


def _bytes_suffice(item: Load) -> bool:
    """Whether moving the bytes of the view moves the view."""
    return item.ticket.kind == "raw" and isinstance(item.out, np.ndarray) and item.out.dtype == item.ticket.dtype


def _start(worker: Worker | None, loads: Sequence[Load], shared: Sequence[Load] = ()) -> Fetch | None:
    if not loads and not shared:
        return None
    if worker is None:
        raise RuntimeError(
            f"load: ticket {loads[0].ticket.id} {loads[0].ticket.shape} is held by worker {loads[0].ticket.address}; "
            "only a task on a worker can load it from there"
        )
    return Fetch(worker, loads, shared)


def _put(out: Any, view: Any) -> None:
    if isinstance(out, np.ndarray) and type(view) is np.ndarray:
        np.copyto(out, view, casting="same_kind")
    else:
        out[...] = view


def _sample(ticket: Ticket) -> Any:
    """An empty array of the owner's kind, which says what to create the result with."""
    if same_process(ticket):
        return local_array(ticket)
    sample: list[Any] = []
    index = tuple(slice(0, 0) for _ in ticket.shape)
    remote = _start(_worker(), [Load(ticket, index, None)])
    if remote is not None:
        remote.finish(lambda _, view: sample.append(view))
    return sample[0]


def setup_worker(worker: Worker) -> None:
    """Give `worker` a shard store, the handlers that serve it and a metric of the bytes it holds; twice is once.

    Notes
    -----
    **Communication**: none.
    """
    store = open_store(worker.address)
    worker.handlers.update(handlers(store))
    segments.remove_leftovers()
    worker.metrics["daskmesh"] = _metric
    _recycle(worker)
    if config.get("transport") in ("auto", "vm"):
        vm.allow_readers()


def teardown_worker(worker: Worker) -> None:
    """Let go of all that `setup_worker` made; every ticket born on `worker` is dead from here on.

    Notes
    -----
    **Communication**: none.
    """
    for name in HANDLERS:
        worker.handlers.pop(name, None)
    worker.metrics.pop("daskmesh", None)
    if (trims := worker.periodic_callbacks.pop(_TRIMS, None)) is not None:
        trims.stop()
    recycling.allow(worker.address, 0)
    close_store(worker.address)
    segments.throw_away()


def _recycle(worker: Worker) -> None:
    """Let the process of `worker` keep idle memory while it has plenty."""
    limit = worker.memory_manager.memory_limit if worker.memory_manager else None
    recycling.allow(worker.address, min(config.nbytes("recycle-bytes"), limit // 16 if limit else sys.maxsize))

    def trim() -> None:
        short = limit is not None and worker.monitor.get_process_memory() > limit / 2
        recycling.trim(0.0 if short else recycling.IDLE_SECONDS)

    if _TRIMS not in worker.periodic_callbacks:
        worker.periodic_callbacks[_TRIMS] = PeriodicCallback(trim, 1000 * recycling.IDLE_SECONDS / 2)
        worker.periodic_callbacks[_TRIMS].start()


def _metric(worker: Worker) -> dict[str, Any]:
    store = store_at(worker.address)
    held = {"arrays": 0, "bytes": 0} if store is None else {"arrays": len(store), "bytes": store.nbytes}
    return {"held": held, "loads": stats(worker.address)}
