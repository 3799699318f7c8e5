"""The shmem family between worker processes: every road, races, lost PEs, and what is left behind."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import dask
import numpy as np
import pytest
from conftest import local_cluster
from distributed import Client, get_worker
from shmem_cases import ADD, GE, LOADS, MODES, PROGRAMS, Boxed, check, filled, force, held, run, segments

import daskmesh as dm
from daskmesh import Shard, peers
from daskmesh.buffers import Buffer
from daskmesh.symmetric import symmetric_at

pytestmark = pytest.mark.processes

ROADS = ["vm", "shm", "rpc"]
M2 = dm.init_mesh(2, ["pair"])


@pytest.fixture(scope="module")
def client(processes: Client) -> Iterator[Client]:
    """Two worker processes with one thread each."""
    dm.shutdown()
    yield processes
    dm.shutdown()


@pytest.fixture(scope="module", params=ROADS)
def road(request: pytest.FixtureRequest, client: Client) -> Iterator[str]:
    """A road, forced on all workers."""
    force(client, request.param)
    yield request.param
    force(client, "auto")


@pytest.fixture(scope="module")
def constant(road: str) -> Iterator[dm.ShmemTensor]:
    """For tests that change nothing."""
    with filled(group="constant") as tensor:
        yield tensor


@pytest.mark.parametrize("mode", MODES)
def test_loads_over_each_road(constant: dm.ShmemTensor, road: str, mode: str) -> None:
    for name, (program, want) in LOADS.items():
        try:
            check(run(mode, program, constant), want)
        except AssertionError as error:
            error.add_note(name)
            raise


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["17 put", "22 add", "41 compare_swap"])
def test_cases_over_each_road(client: Client, road: str, name: str, mode: str) -> None:
    program, want = PROGRAMS[name]
    with filled() as tensor:
        check(run(mode, program, tensor), want)


WITH_THREADS = ["36 ring", "17 put", "19 order", "22 add", "29 a counter", "34 barrier", "40 fetch_add", "put and signal"]


def test_cases_with_two_threads(client: Client) -> None:
    dm.shutdown()
    with local_cluster(n_workers=2, threads_per_worker=2, processes=True) as cluster, Client(cluster) as other:
        for name, mode in itertools.product(WITH_THREADS, MODES):
            program, want = (LOADS | PROGRAMS)[name]
            with filled() as tensor:
                try:
                    check(run(mode, program, tensor), want)
                except AssertionError as error:
                    error.add_note(f"{name}, {mode}")
                    raise
        assert set(held(other).values()) == {(0, 0)}
        dm.shutdown()


ROAD_OF = {"vm": "vm", "shm": "ask", "rpc": "ask"}


@pytest.mark.parametrize(("arguments", "nbytes"), [(([2, 3], [1, 2]), 24), (([2, 4], [0, 0], None, [2, 2]), 16), ((), 96)])
def test_only_the_view_moves(constant: dm.ShmemTensor, road: str, arguments: Any, nbytes: int) -> None:
    shape, offsets, _, valid = (*arguments, None, None, None, None)[:4]

    one = dm.ProcessMesh([0], ["one"])

    def alone() -> Any:
        peers.reset_stats()
        dm.shmem_load(constant, 1, shape, offsets, valid_shape=valid)
        return Boxed(peers.stats())

    (value,) = dask.compute(*dm.local_map(alone, [None], process_mesh=one)())
    assert value.value[ROAD_OF[road]] == {"loads": 1, "bytes": nbytes}
    assert sum(of["loads"] for of in value.value.values()) == 1


def test_large_views_over_each_road(client: Client, road: str, eventually: Callable[..., Any]) -> None:
    n = 2**20 + 5
    with dm.create_shmem_tensor("pair", 2, "f8", [2, n]) as t:

        def program() -> Any:
            dm.shmem_put(np.arange(2.0 * n).reshape(2, n), [0, 0], t, 1, by=0)
            dm.shmem_barrier_all(t)
            whole, part = dm.shmem_load(t, 1), dm.shmem_load(t, 1, [2, n - 7], [0, 3])
            return Boxed((float(whole.sum()), float(part[1].sum()), whole[1, 1], part[0, 0]))

        for value in dask.compute(*dm.local_map(program, [None], process_mesh=t.mesh)()):
            assert value.value == (float(2 * n * (2 * n - 1) // 2), float(np.arange(n + 3, 2 * n - 4).sum()), n + 1, 3)
    eventually(lambda: set(held(client).values()) == {(0, 0)})
    assert segments() == []


def test_a_load_is_never_torn(client: Client, road: str) -> None:
    n, turns = 2**17, 60

    def program() -> Any:
        if dm.my_pe() == 0:
            for turn in range(1, turns + 1):
                dm.shmem_put(np.full(n, turn, "f8"), [0], t, 0)
            dm.shmem_signal(t, 0, 1, target_pe=1)
            return Boxed((0, turns))
        torn = seen = 0
        while not dm.shmem_signal_fetch(t, 0):
            got = dm.shmem_load(t, 0)
            torn += bool((got != got[0]).any())
            seen += 1
        return Boxed((torn, seen))

    with dm.create_shmem_tensor("pair", 2, "f8", [n]) as t:
        program = dm.local_map(program, [None], process_mesh=t.mesh, out_shapes=[None])
        _, (torn, seen) = (v.value for v in dask.compute(*program()))
    assert torn == 0
    assert seen > 0


def test_puts_racing_with_puts_are_whole(client: Client) -> None:
    n = 2**15

    def program() -> Any:
        me = dm.my_pe()
        for turn in range(20):
            dm.shmem_put(np.full(n, 2 * turn + me, "f8"), [0], t, turn % 2)
            got = dm.shmem_load(t, turn % 2)
            if (got != got[0]).any():
                return Boxed(f"torn at {turn}")
            dm.shmem_put(np.ones(n), [0], total, 1, put_op=ADD)
        dm.shmem_barrier_all(t)
        return Boxed(float(dm.shmem_load(total, 1).min()))

    with dm.create_shmem_tensor("pair", 2, "f8", [n]) as t, dm.create_shmem_tensor("pair", 2, "f8", [n]) as total:
        values = dask.compute(*dm.local_map(program, [None], process_mesh=t.mesh, out_shapes=[None])())
    assert [v.value for v in values] == [40.0, 40.0]


def test_cancelled_and_resubmitted_loads_never_give_junk(
    client: Client, road: str, eventually: Callable[..., Any]
) -> None:
    n = 2**19
    for turn in range(1, 6):
        with dm.create_shmem_tensor("pair", 2, "f8", [n]) as t:
            dm.shmem_put(np.full(n, float(turn)), [0], t, lambda rank: rank).compute()
            future = client.compute(dm.shmem_load(t, lambda rank: 1 - rank))
            client.cancel(future)
            again = dm.shmem_load(t, lambda rank: 1 - rank).compute()
            assert (again == turn).all()
            late = client.compute(dm.shmem_load(t, lambda rank: 1 - rank))
        with contextlib.suppress(RuntimeError):  # freed meanwhile; what it did give is right
            assert (late.result() == turn).all()
    eventually(lambda: set(held(client).values()) == {(0, 0)})


def test_a_put_that_runs_again_elsewhere_is_applied_once(client: Client) -> None:
    """Its token is lost, not its PE: the task runs again, and the target knows its mark."""
    with dm.create_shmem_tensor("pair", 2, "i8", [1]) as t:
        token = dm.shmem_put(np.ones(1, int), [0], t, 1, put_op=ADD)
        for _ in range(3):
            token.compute()

        def program() -> Any:
            before = dm.shmem_atomic_fetch_add(t, 0, 10, 0)
            dm.shmem_barrier_all(t)
            return before.reshape(1)

        lazy = dm.local_map(program, [[Shard(0)]], process_mesh=M2, out_shapes=[((2,), "i8")])()
        first = lazy.compute()
        assert sorted(first.tolist()) == [0, 10]
        assert lazy.compute().tolist() == first.tolist()
        assert dm.shmem_load(t, lambda rank: rank).compute().tolist() == [20, 2]


def test_the_owner_is_asked_when_a_version_never_rests(client: Client) -> None:
    force(client, "vm")
    with dm.create_shmem_tensor("pair", 2, "f8", [8]) as t:

        def program() -> Any:
            if dm.my_pe() == 0:
                entry = symmetric_at(get_worker().address).entries[t.id]
                buffer: Buffer = entry.buffers[0]
                buffer._word.value += 1  # as within a change
                dm.shmem_barrier_all(t)
                dm.shmem_wait_until(t, 1, 1, cmp=GE)
                buffer._word.value += 1
                return Boxed(None)
            dm.shmem_barrier_all(t)
            peers.reset_stats()
            got = dm.shmem_load(t, 0)
            dm.shmem_signal(t, 1, 1, target_pe=0)
            return Boxed((got.tolist(), peers.stats()["ask"]))

        values = dask.compute(*dm.local_map(program, [None], process_mesh=M2, out_shapes=[None])())
        assert values[1].value == ([0.0] * 8, {"loads": 1, "bytes": 64})
    force(client, "auto")
