"""The roads between worker processes: values, bytes by road, and what a reader sees when the owner frees, repeats or dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import dask
import numpy as np
import pytest
from conftest import local_cluster
from distributed import Client, Event, Reschedule, Worker, get_worker

from daskmesh import fetch, reading, segments, store, transport, vm

pytestmark = pytest.mark.processes

ROADS = ["vm", "shm", "rpc"]


def setup(dask_worker: Worker) -> None:
    """Give a worker its store, as the worker plugin does."""
    transport.setup_worker(dask_worker)


@pytest.fixture(scope="module")
def client(processes: Client) -> Iterator[Client]:
    """A client of two worker processes with stores; emptied at the end, since no plugin does it here."""
    processes.run(setup)
    yield processes
    processes.run(lambda dask_worker: store.store_at(dask_worker.address).clear())


@pytest.fixture(scope="module")
def owner(client: Client) -> str:
    """The worker that exposes."""
    return min(client.scheduler_info()["workers"])


@pytest.fixture(scope="module")
def reader(client: Client) -> str:
    """The worker that loads."""
    return max(client.scheduler_info()["workers"])


KEY = "held-for-a-test"


def exposed(client: Client, owner: str, make: Callable[..., Any], *args: Any) -> Any:
    """Tickets for what ``make(*args)`` gives on the owner, held until the next call.

    Not the result of a task that readers depend on. That would have a copy on each reader, of which Dask's memory manager drops
    one every two seconds, the owner's as well as another; and with the owner's copy go the arrays, where daskmesh's plugin is on
    the workers. Tasks of ranks are kept from that; the tasks here are none.
    """
    return client.submit(_expose, make, *args, workers=[owner], pure=False).result()


def _expose(make: Callable[..., Any], *args: Any) -> Any:
    made = make(*args)
    return transport.expose_all(made, KEY) if isinstance(made, list) else transport.expose(made, KEY)


def source(seed: int) -> np.ndarray[Any, Any]:
    """A strided array that both sides can make."""
    rng = np.random.default_rng(seed)
    ndim = int(rng.integers(1, 5))
    dtype = np.dtype([["f8", "?", "c16", "f2", ">i4", [("a", "i2"), ("b", "f8", (2,))], "M8[s]"][rng.integers(7)]][0])
    shape = tuple(int(n) for n in rng.integers(1, 300 if ndim < 3 else 12, ndim))
    raw = rng.integers(0, 2, int(np.prod(shape)) * dtype.itemsize).astype(np.uint8)
    steps = [slice(None, None, int(step)) for step in rng.choice([1, 1, 2, -1, -3], ndim)]
    return np.ndarray(shape, dtype, raw).transpose(rng.permutation(ndim))[(*steps, ...)]


def some_index(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Ints and slices, empty ones too."""
    index: list[Any] = []
    for n in shape:
        start = int(rng.integers(0, n))
        index.append(start if rng.random() < 0.2 else slice(start, int(rng.integers(start, n + 1))))
    return tuple(index)


def sources(seeds: list[int]) -> list[np.ndarray[Any, Any]]:
    """Several of them."""
    return [source(seed) for seed in seeds]


def check_views(tickets: list[transport.Ticket], seeds: list[int], road: str) -> tuple[int, dict[str, dict[str, int]]]:
    """Load random views of all of them at once, into strided results; bytes expected, and loaded."""
    rng = np.random.default_rng(len(seeds))
    arrays = [source(seed) for seed in seeds]
    jobs, wanted = [], []
    for ticket, array in zip(tickets * 3, arrays * 3, strict=True):
        index = some_index(rng, array.shape)
        shape = array[index].shape
        out = np.zeros(tuple(2 * n for n in shape[::-1]), array.dtype).T[(*[slice(0, 2 * n, 2) for n in shape], ...)]
        jobs.append((ticket, index, out))
        wanted.append(array[(*index, ...)])
    transport.reset_stats()
    with dask.config.set({"daskmesh.transport": road}):
        transport.load_all(jobs)
    for (ticket, index, out), want in zip(jobs, wanted, strict=True):
        if out.tobytes() != want.tobytes():
            raise AssertionError(f"{ticket} {index} differs")
    return sum(want.nbytes for want in wanted), transport.stats()


@pytest.mark.parametrize("road", [*ROADS, "auto"])
def test_random_views_by_every_road(client: Client, owner: str, reader: str, road: str) -> None:
    seeds = list(range(24))
    tickets = exposed(client, owner, sources, seeds)
    nbytes, moved = client.submit(check_views, tickets, seeds, road, workers=[reader], pure=False).result()
    assert nbytes > 10_000
    assert {name: counts["bytes"] for name, counts in moved.items() if counts["loads"]} == {
        "vm" if road == "auto" else road: nbytes
    }
    nbytes, moved = client.submit(check_views, tickets, seeds, road, workers=[owner], pure=False).result()
    assert moved["same"]["bytes"] == nbytes


def load_large(ticket: transport.Ticket, road: str) -> tuple[float, bool, int, int]:
    """Load a large array in many pieces: sum, right or not, peak in flight, and messages' worth of segments left."""
    with dask.config.set({"daskmesh.transport": road, "daskmesh.max-inflight-bytes": "3 MiB"}):
        budget = fetch.budget_of(get_worker())
        budget.peak = 0
        got = transport.load(ticket)
    right = bool((got == np.arange(got.size).reshape(got.shape)).all())
    return float(got.sum()), right, budget.peak, budget.used


def large() -> np.ndarray[Any, Any]:
    """20 MiB, not contiguous."""
    return np.arange(2560 * 1024.0).reshape(1280, 2048).T.copy().T


@pytest.mark.parametrize("road", ROADS)
def test_large_loads_keep_to_the_limit(client: Client, owner: str, reader: str, road: str) -> None:
    ticket = exposed(client, owner, large)
    _, right, peak, used = client.submit(load_large, ticket, road, workers=[reader], pure=False).result()
    assert right
    assert used == 0
    assert (peak == 0) if road == "vm" else (2**20 <= peak <= 3 * 2**20)


def object_and_masked() -> list[Any]:
    """Arrays whose memory says nothing to another process."""
    return [np.array(["x", None, {1: 2}], object), np.ma.masked_array([1, 2], [True, False])]


def load_each(tickets: list[transport.Ticket]) -> tuple[list[Any], dict[str, dict[str, int]]]:
    """Load them whole."""
    transport.reset_stats()
    with dask.config.set({"daskmesh.transport": "vm"}):
        return [transport.load(ticket).tolist() for ticket in tickets], transport.stats()


def test_objects_and_masks_go_by_rpc_whatever_is_forced(client: Client, owner: str, reader: str) -> None:
    tickets = exposed(client, owner, object_and_masked)
    got, moved = client.submit(load_each, tickets, workers=[reader], pure=False).result()
    assert got == [["x", None, {1: 2}], [None, 2]]
    assert moved["rpc"]["loads"] == 2
    assert moved["vm"]["loads"] == 0


def load_refused(ticket: transport.Ticket, road: str) -> tuple[bool, list[str]]:
    """Load as if the memory of the owner were not readable from here."""
    known = dict(vm._refusals)
    vm._refusals[ticket.process] = "process_vm_readv: Operation not permitted"
    transport.reset_stats()
    try:
        with dask.config.set({"daskmesh.transport": road}):
            got = transport.load(ticket)
    finally:
        vm._refusals.clear()
        vm._refusals.update(known)
    return bool((got == source(3)).all()), [name for name, counts in transport.stats().items() if counts["loads"]]


def test_a_refused_road_gives_way_unless_forced(client: Client, owner: str, reader: str) -> None:
    ticket = exposed(client, owner, source, 3)
    right, roads = client.submit(load_refused, ticket, "auto", workers=[reader], pure=False).result()
    assert (right, roads) == (True, ["shm"])
    with pytest.raises(RuntimeError, match="Operation not permitted; set daskmesh"):
        client.submit(load_refused, ticket, "vm", workers=[reader], pure=False).result()


def load_without_room(ticket: transport.Ticket) -> list[tuple[bool, list[str]]]:
    """Load as on a host without shared memory, and again when there is some."""
    directory, known = segments.DIRECTORY, dict(fetch._sharing)
    segments.DIRECTORY = directory / "not-there"
    fetch._sharing.clear()
    segments.throw_away()
    try:
        without = load_refused(ticket, "auto")
        segments.DIRECTORY = directory
        return [without, load_refused(ticket, "auto")]
    finally:
        segments.DIRECTORY = directory
        fetch._sharing.clear()
        fetch._sharing.update(known)


def test_while_there_is_no_shared_memory_there_is_rpc(client: Client, owner: str, reader: str) -> None:
    ticket = exposed(client, owner, source, 3)
    assert client.submit(load_without_room, ticket, workers=[reader], pure=False).result() == [(True, ["rpc"]), (True, ["shm"])]


def load_unreadable(ticket: transport.Ticket) -> tuple[bool, list[str]]:
    """Load when the memory turns out to be such that no other process can read it."""

    def unreadable(*arguments: Any) -> None:
        raise vm.Unreadable

    transport.reset_stats()
    read, reading.vm.read = reading.vm.read, unreadable
    try:
        got = transport.load(ticket)
    finally:
        reading.vm.read = read
    return bool((got == source(3)).all()), [name for name, counts in transport.stats().items() if counts["loads"]]


def test_unreadable_memory_goes_by_rpc(client: Client, owner: str, reader: str) -> None:
    ticket = exposed(client, owner, source, 3)
    assert client.submit(load_unreadable, ticket, workers=[reader], pure=False).result() == (True, ["rpc"])


def load_whole(ticket: transport.Ticket, road: str) -> Any:
    """Load by one road."""
    with dask.config.set({"daskmesh.transport": road}):
        return transport.load(ticket)


def free(key: str, dask_worker: Worker) -> tuple[int, int]:
    """Free a key as the plugin's hook does; what the store still holds under it, and words that still claim it."""
    transport.release(dask_worker.address, key)
    held = store.store_at(dask_worker.address)
    return len(held._by_key.get(key, [])), len(held)


@pytest.mark.parametrize("road", ROADS)
def test_a_freed_ticket_is_lost(client: Client, owner: str, reader: str, road: str) -> None:
    ticket = client.submit(transport.expose, source(5), f"freed-{road}", workers=[owner], pure=False).result()
    assert client.run(free, f"freed-{road}", workers=[owner])[owner][0] == 0
    with pytest.raises(transport.TicketLost, match=str(ticket.id)):
        client.submit(load_whole, ticket, road, workers=[reader], pure=False).result()


def expose_twice() -> tuple[transport.Ticket, transport.Ticket]:
    """A task that Dask runs twice, because its first run ends in Reschedule after it has exposed."""
    worker = get_worker()
    first = getattr(worker, "daskmesh_test_first", None)
    ticket = transport.expose(np.full(1000, 1.0 if first is None else 2.0))
    worker.daskmesh_test_first = ticket
    if first is None:
        raise Reschedule
    return first, ticket


@pytest.mark.parametrize("road", ROADS)
def test_a_task_that_runs_twice(client: Client, owner: str, reader: str, road: str) -> None:
    both = client.submit(expose_twice, key=f"twice-{road}", workers=[owner])
    old, new = both.result()
    assert old.id != new.id
    assert client.submit(load_whole, new, road, workers=[reader], pure=False).result().tolist() == [2.0] * 1000
    with pytest.raises(transport.TicketLost):
        client.submit(load_whole, old, road, workers=[reader], pure=False).result()
    keys = client.run(lambda dask_worker: dict(store.store_at(dask_worker.address)._by_key), workers=[owner])[owner]
    assert keys[both.key] == [new.id]
    client.run(lambda dask_worker: delattr(dask_worker, "daskmesh_test_first"), workers=[owner])


def read_until_lost(ticket: transport.Ticket, road: str, started: str) -> tuple[int, int]:
    """Load over and over until the ticket is lost: loads, and junk among them."""
    loads = junk = 0
    with dask.config.set({"daskmesh.transport": road}):
        while True:
            try:
                got = transport.load(ticket)
            except transport.TicketLost:
                return loads, junk
            loads += 1
            junk += not (got == 7).all()
            if loads == 3:
                Event(started).set()


def free_and_use_again(key: str, nbytes: int, dask_worker: Worker) -> None:
    """Free the array and fill what the allocator hands out next."""
    transport.release(dask_worker.address, key)
    for _ in range(4):
        np.full(nbytes // 8, -1.0)


@pytest.mark.parametrize("nbytes", [100_000, 6_000_000])
@pytest.mark.parametrize("road", ROADS)
def test_freed_while_it_is_read(client: Client, owner: str, reader: str, road: str, nbytes: int) -> None:
    key = f"racing-{road}-{nbytes}"
    ticket = client.submit(lambda: transport.expose(np.full(nbytes // 8, 7.0), key), workers=[owner], pure=False).result()
    running = client.submit(read_until_lost, ticket, road, key, workers=[reader], pure=False)
    Event(key, client=client).wait(timeout=30)
    client.run(free_and_use_again, key, nbytes, workers=[owner])
    loads, junk = running.result(timeout=30)
    assert loads >= 3
    assert junk == 0


@pytest.fixture
def own_cluster() -> Iterator[Client]:
    """Two worker processes to be killed."""
    with local_cluster(n_workers=2, threads_per_worker=1, processes=True) as cluster:
        with Client(cluster, set_as_default=False) as client:
            client.run(setup)
            yield client


def lost_on_every_road(ticket: transport.Ticket, kill: int) -> list[str]:
    """Load by every road, kill the owner, load again."""
    ends = []
    for road in ROADS:
        with dask.config.set({"daskmesh.transport": road}):
            transport.load(ticket)
    os.kill(kill, signal.SIGKILL)
    for road in ROADS:
        with dask.config.set({"daskmesh.transport": road}):
            try:
                while True:
                    transport.load(ticket)
            except transport.TicketLost:
                ends.append(road)
    return ends


def test_a_killed_owner_is_a_lost_ticket(own_cluster: Client) -> None:
    owner, reader = sorted(own_cluster.scheduler_info()["workers"])
    ticket = own_cluster.submit(transport.expose, source(5), workers=[owner], pure=False).result()
    running = own_cluster.submit(lost_on_every_road, ticket, ticket.process.pid, workers=[reader], pure=False)
    assert running.result(timeout=30) == ROADS


def test_no_segment_has_a_name(client: Client) -> None:
    live = {process.pid for process in client.run(vm.this_process).values()}
    names = [path.name for path in segments.DIRECTORY.glob(segments._prefix() + "*")]
    assert not [name for name in names if any(f"-{pid}-" in name for pid in live)]
