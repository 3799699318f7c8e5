"""Lost PEs: errors that name them, waits that end, nothing done twice, nothing left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import local_cluster
from distributed import Client, Event
from shmem_cases import ADD, block, filled, force, held, kill, segments

import daskmesh as dm
from daskmesh import PELostError, Shard

pytestmark = pytest.mark.processes

M2 = dm.init_mesh(2, ["pair"])


@pytest.fixture(scope="module")
def mortal() -> Iterator[Client]:
    """A cluster of its own, whose workers may be killed."""
    dm.shutdown()
    with local_cluster(n_workers=2, threads_per_worker=1, processes=True) as cluster, Client(cluster) as client:
        yield client
        dm.shutdown()


@pytest.fixture
def cluster(mortal: Client, eventually: Callable[..., Any]) -> Client:
    """The same with both workers alive and every rank at home."""
    eventually(lambda: all(dm.init_parallel_env(client=mortal).table().values()))
    mortal.wait_for_workers(2)
    return mortal


def test_44_a_lost_pe(cluster: Client, eventually: Callable[..., Any]) -> None:
    t = filled()
    kill(cluster, 1)
    for call in (
        lambda: dm.shmem_load(t, 1).compute(),
        lambda: dm.shmem_load(t, 3).compute(),
        lambda: dm.shmem_put([[1]], [0, 0], t, 1).compute(),
        lambda: dm.shmem_atomic_add(t, (0, 0), 1, 1).compute(),
        lambda: dm.shmem_wait_until(t, 1, 1, by=0).compute(),
        lambda: dm.local_map(lambda: dm.shmem_load(t, 0), [[Shard(0)]], process_mesh=t.mesh)().compute(),
    ):
        with pytest.raises(PELostError, match=r"PE [13] of symmetric tensor 'tp' is lost: .*create the tensor again") as caught:
            call()
        assert caught.value.pe in (1, 3)
    assert eventually(lambda: len(cluster.scheduler_info()["workers"]) == 2)
    assert {bytes_[0] for bytes_ in held(cluster).values()} == {0}  # what is left of it is let go of
    with filled() as again:
        assert dm.shmem_load(again, 1).compute().tolist() == block(1).tolist()
        clear = dm.shmem_clear_data(again)
        assert not dm.shmem_load(again, 1, pred=clear).compute().any()
    t.free()
    assert set(held(cluster).values()) == {(0, 0)}
    assert segments() == []


def test_a_lost_pe_wakes_who_waits(cluster: Client) -> None:
    with dm.create_shmem_signal("pair", 2) as ready:

        def program() -> None:
            if dm.my_pe() == 0:
                Event("waits").set()
                dm.shmem_wait_until(ready, 1, 1)
            Event("never").wait()

        waiting = cluster.compute(dm.local_map(program, [None], process_mesh=M2, out_shapes=[None])())
        Event("waits").wait(timeout=10)
        kill(cluster, 1)
        with pytest.raises(PELostError, match="PE 1 of symmetric tensor 'pair' is lost"):
            cluster.gather(waiting)


@pytest.mark.parametrize("collective", [True, False])
def test_a_region_that_has_changed_others_is_not_run_again(cluster: Client, collective: bool) -> None:
    def program() -> Any:
        dm.shmem_put(np.ones(1), [0], t, 0, put_op=ADD)
        dm.shmem_barrier_all(t)
        if dm.my_pe() == 1 and not Event(f"killed {collective}").is_set():
            Event(f"killed {collective}").set()
            os.kill(os.getpid(), signal.SIGKILL)
        if collective:
            return dm.collectives.all_reduce(np.ones(1))
        dm.shmem_barrier_all(t)
        return np.ones(1)

    with dm.create_shmem_tensor("pair", 2, "f8", [1]) as t:
        region = dm.local_map(program, [[dm.Replicate()]], process_mesh=M2, out_shapes=[((1,), "f8")])
        with pytest.raises(PELostError, match=r"is (lost|dead)"):
            region().compute()
        with pytest.raises(PELostError):
            dm.shmem_load(t, 0).compute()


def test_a_killed_reader_or_writer_leaves_nothing(cluster: Client, eventually: Callable[..., Any]) -> None:
    force(cluster, "shm")
    with dm.create_shmem_tensor("pair", 2, "f8", [2**20]) as t:

        def program() -> None:
            if dm.my_pe() == 1:
                dm.shmem_load(t, 0)
                os.kill(os.getpid(), signal.SIGKILL)
            Event("never").wait(timeout=20)

        with pytest.raises(PELostError):
            cluster.gather(cluster.compute(dm.local_map(program, [None], process_mesh=M2, out_shapes=[None])()))
    eventually(lambda: len(cluster.scheduler_info()["workers"]) == 2)
    assert {bytes_[0] for bytes_ in held(cluster).values()} == {0}
    eventually(lambda: not segments())
