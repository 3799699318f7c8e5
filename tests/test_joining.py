"""Regions whose ranks talk to each other on a real cluster: start together, fail together, run again together."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from conftest import local_cluster
from distributed import Client, wait

import daskmesh as dm
from daskmesh import Replicate, Shard, collectives, get_rank, local_map

pytestmark = pytest.mark.processes
M2, M3, M5 = (dm.init_mesh(n, ["x"]) for n in (2, 3, 5))
Eventually = Callable[[Callable[[], Any]], Any]


def meeting_of(client: Client) -> int:
    """How many regions the scheduler still keeps in mind."""

    def count(dask_scheduler: Any) -> int:
        return len(dask_scheduler.handlers["daskmesh_join_region"].__self__._runs)

    return int(client.run_on_scheduler(count))


def lines_of(client: Client) -> int:
    """How many ranks are in conversation, on all workers."""

    def count() -> int:
        from daskmesh import joining

        return len(joining._HERE.lines)

    return sum(client.run(count).values())


def sharded(n: int, mesh: dm.ProcessMesh) -> dm.DTensor:
    return dm.shard_tensor(np.arange(float(n)), mesh, [Shard(0)])


@pytest.fixture
def runs(tmp_path: Path) -> Callable[[], Counter[int]]:
    """How often each rank ran: those that ran left a line in a file."""
    return lambda: Counter(int(line) for line in (tmp_path / "runs").read_text().split())


ASKS: dict[str, tuple[Any, Any]] = {
    "one replica": (lambda r: np.asarray(r), [45.0]),
    "one local value": (lambda r: r.local_value(3), [45.0]),
    "a slice": (lambda r: r.to_dask()[:1].compute(), [45.0]),
    "item": (lambda r: r.item(), 45.0),
    "all": (lambda r: [part.compute() for part in dm.dtensor_to_local(r)], [[45.0]] * 5),
}


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("traced", [True, False])
def test_whatever_is_asked_for_every_rank_runs_once(
    processes: Client, tmp_path: Path, runs: Callable[[], Counter[int]], ask: str, traced: bool
) -> None:
    def total(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            with open(tmp_path / "runs", "a") as file:
                print(get_rank(), file=file)
        elif not traced:
            float(x[0])  # ends the trace, so the region runs at once
        return collectives.all_reduce(x.sum(keepdims=True))

    question, want = ASKS[ask]
    result = local_map(total, out_placements=[Replicate()])(sharded(10, M5))
    assert np.array_equal(question(result), want)
    assert np.array_equal(question(result), want)
    assert set(runs()) == set(range(5))
    if not traced:
        assert runs() == Counter(range(5))


def test_a_hundred_regions_in_shuffled_orders_from_three_threads(processes: Client) -> None:
    x = sharded(10, M5).persist()

    def region(i: int) -> Any:
        def mixed(a: Any) -> Any:
            total = collectives.all_reduce(a.sum() * i)
            return np.array([total + collectives.shift(float(get_rank()))])

        return local_map(mixed, out_placements=[Shard(0)], out_shapes=((5,),))(x)

    found: dict[int, Any] = {}

    def client_thread(jobs: list[int]) -> None:
        pending = [(i, region(i).persist()) for i in jobs]
        for i, result in pending:
            found[i] = np.asarray(result)

    jobs = list(range(100))
    random.Random(0).shuffle(jobs)
    threads = [threading.Thread(target=client_thread, args=(jobs[k::3],)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(100))
    assert all(np.array_equal(found[i], 45.0 * i + np.array([4, 0, 1, 2, 3])) for i in found)


def test_large_arrays_are_loaded_between_processes(processes: Client) -> None:
    def program(a: Any) -> Any:
        whole = collectives.all_gather(a)
        summed = collectives.all_reduce(whole * (get_rank() + 1))
        return collectives.reduce_scatter(summed)

    x = np.random.default_rng(0).random(200_000)
    result = local_map(program, out_placements=[Shard(0)])(dm.shard_tensor(x, M3, [Shard(0)]))
    assert np.allclose(result, 18 * x, rtol=1e-14)


def forget_the_machine() -> None:
    """Make a process believe that it is alone on its machine."""
    from daskmesh import wires

    name = f"machine of {os.getpid()}"
    wires.machine_id = lambda: name


def roads_here() -> str:
    from daskmesh import joining

    ends = joining._HERE.ends.values()
    return "some" if any(end._wires or end.address.port for end in ends) else "neither a socket to a peer nor a TCP port"


def test_on_an_encrypted_cluster_messages_go_by_its_own_comm() -> None:
    dm.shutdown()
    with (
        local_cluster(n_workers=2, threads_per_worker=1, processes=True, security=True) as cluster,
        Client(cluster, security=cluster.security) as client,
    ):
        client.run(forget_the_machine)

        def program(a: Any) -> Any:
            collectives.barrier()
            a = collectives.shift(a)
            return a + collectives.all_reduce(np.ones(200_000))[-1]

        result = local_map(program, out_placements=[Shard(0)], out_shapes=((6,),))(sharded(6, M3))
        assert np.array_equal(result, [7.0, 8.0, 3.0, 4.0, 5.0, 6.0])
        assert set(client.run(roads_here).values()) == {"neither a socket to a peer nor a TCP port"}
        dm.shutdown()


# -- fail together ---------------------------------------------------------------------------------------------------


class OwnError(ValueError):
    """Defined in a test, so workers know it only by value."""


FAILURES: dict[str, Callable[[Any], Any]] = {
    "before anyone has joined": lambda x: 1 / 0 if get_rank() == 1 else collectives.all_reduce(x),
    "after a collective": lambda x: (collectives.barrier(), 1 / 0 if get_rank() == 1 else collectives.all_reduce(x))[1],
    "with what it returns": lambda x: (collectives.barrier(), "no array" if get_rank() == 1 else collectives.all_reduce(x))[1],
}


@pytest.mark.parametrize("mesh", [M2, M5])
@pytest.mark.parametrize("when", FAILURES)
def test_the_error_of_one_rank_is_the_error_of_all(processes: Client, when: str, mesh: dm.ProcessMesh) -> None:
    region = local_map(FAILURES[when], out_placements=[Replicate()], out_shapes=((10,),))
    with pytest.raises((ZeroDivisionError, TypeError)) as caught:
        region(sharded(10, mesh)).compute()
    notes = "".join(caught.value.__notes__)
    assert notes.count("rank 1 at coordinate (1,)") == 1
    assert "rank 0" not in notes


def test_own_error_classes_and_notes_travel(processes: Client) -> None:
    class Local(OwnError):
        pass

    def program(x: Any) -> Any:
        if get_rank() == 1:
            error = Local("mine")
            error.add_note("a note")
            raise error
        return collectives.all_reduce(x)

    with pytest.raises(Exception, match="mine") as caught:
        local_map(program, out_placements=[Replicate()], out_shapes=((10,),))(sharded(10, M2)).compute()
    assert type(caught.value).__name__ == "Local"
    assert "a note" in caught.value.__notes__


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            lambda x: collectives.barrier() if get_rank() else collectives.all_reduce(1),
            r"called barrier\('x'\)|called all_reduce",
        ),
        (
            lambda x: None if get_rank() else collectives.barrier(),
            "rank 1 has returned without taking part, while rank 0 waits in barrier",
        ),
        (lambda x: [collectives.barrier() for _ in range(2 + get_rank())][:0], "has returned from the region"),
    ],
)
def test_ranks_that_do_not_make_the_same_calls_are_named(processes: Client, program: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        local_map(lambda x: (program(x), x)[1], out_placements=[Shard(0)], out_shapes=((4,),))(sharded(4, M2)).compute()


@pytest.fixture
def impatient(processes: Client) -> Iterator[None]:
    """Workers that wait half a second."""
    processes.run(dask.config.set, {"daskmesh.collective-timeout": "500ms"})
    yield
    processes.run(dask.config.set, {"daskmesh.collective-timeout": "60s"})


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("joined", [True, False])
def test_a_rank_that_keeps_the_others_waiting_is_named(
    processes: Client, tmp_path: Path, joined: bool, eventually: Eventually
) -> None:
    def program(x: Any) -> Any:
        if joined:
            collectives.barrier()
        if get_rank() == 1:
            while not (tmp_path / "go on").exists():
                threading.Event().wait(0.01)
        return collectives.all_reduce(x.sum(keepdims=True))

    want = (
        r"rank 0 has waited 0\.5 s for rank 1 .*rank 0 waits for rank 1 in all_reduce.*rank 1 is computing, after barrier\('x'\)"
        if joined
        else r"stuck for 0\.5 s .*rank 0 waits in all_reduce; rank 1 has not come: its task is on worker tcp"
    )
    try:
        with pytest.raises((TimeoutError, RuntimeError), match=want):
            local_map(program, out_placements=[Replicate()], out_shapes=((1,),))(sharded(4, M2)).compute()
    finally:
        (tmp_path / "go on").touch()
    eventually(lambda: not lines_of(processes))


def failed_tasks(client: Client) -> int:
    def count(dask_scheduler: Any) -> int:
        return sum(task.state == "erred" for task in dask_scheduler.tasks.values())

    return int(client.run_on_scheduler(count))


def test_a_failed_region_can_be_tried_again(processes: Client, tmp_path: Path, eventually: Eventually) -> None:
    def program(x: Any) -> Any:
        if get_rank() == 1 and not (tmp_path / "failed").exists():
            (tmp_path / "failed").touch()
            raise OSError("the disk was away")
        return collectives.all_reduce(x.sum(keepdims=True))

    result = local_map(program, out_placements=[Replicate()], out_shapes=((1,),))(sharded(10, M5))
    with pytest.raises(OSError, match="the disk was away"):
        result.compute()
    eventually(lambda: gc.collect() is not None and not failed_tasks(processes))  # until then Dask answers from memory
    assert np.array_equal(result.compute(), [45.0])


def dm_futures(x: Any) -> list[Any]:
    """The futures of a persisted DTensor."""
    return [v for v in dict(x.__dask_graph__()).values() if hasattr(v, "status")]


def test_a_region_nobody_wants_any_more_lets_its_ranks_go(processes: Client, tmp_path: Path, eventually: Eventually) -> None:
    def program(x: Any) -> Any:
        if get_rank() == 1:
            (tmp_path / "there").touch()
            while not (tmp_path / "go on").exists():
                threading.Event().wait(0.01)
        return collectives.all_reduce(x.sum(keepdims=True))

    x = sharded(4, M2)
    unwanted = local_map(program, out_placements=[Replicate()], out_shapes=((1,),))(x).persist()
    eventually((tmp_path / "there").exists)
    del unwanted
    (tmp_path / "go on").touch()
    total = local_map(lambda a: collectives.all_reduce(a.sum(keepdims=True)), out_placements=[Replicate()])(x)
    assert np.array_equal(total, [6.0])
    eventually(lambda: not lines_of(processes))


def test_nothing_is_left_behind(processes: Client, eventually: Eventually) -> None:
    total = local_map(lambda a: collectives.all_reduce(a.sum(keepdims=True)), out_placements=[Replicate()])(sharded(6, M3))
    assert np.array_equal(total, [15.0])
    eventually(lambda: not lines_of(processes))
    before = meeting_of(processes)
    again = local_map(lambda a: collectives.all_reduce(a.max(keepdims=True)), out_placements=[Replicate()])(sharded(6, M3))
    assert np.array_equal(again, [9.0])
    eventually(lambda: meeting_of(processes) <= before)


# -- run again together ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mortal() -> Iterator[Client]:
    """Two worker processes that may be killed: their nannies start new ones."""
    with local_cluster(n_workers=2, threads_per_worker=1, processes=True) as cluster, Client(cluster) as client:
        yield client
        dm.shutdown()


def kill(client: Client, which: int, eventually: Eventually) -> None:
    """Kill a worker process, and wait until the scheduler knows and another has come."""
    workers = client.run(os.getpid)
    address = sorted(workers)[which]
    os.kill(workers[address], signal.SIGKILL)
    eventually(lambda: address not in client.scheduler_info(n_workers=-1)["workers"])
    client.wait_for_workers(2, timeout=30)


def test_a_worker_killed_in_the_middle_three_times(mortal: Client, tmp_path: Path, eventually: Eventually) -> None:
    def program(a: Any, marker: Path) -> Any:
        total = np.float64(0)
        for turn in range(1000):
            total += collectives.all_reduce(a.sum())
            if turn == 300:
                marker.touch()
                while not marker.with_suffix(".killed").exists():  # so that the kill falls into the middle
                    threading.Event().wait(0.01)
        return np.array([total])

    for i in range(3):
        marker = tmp_path / str(i)
        x = dm.shard_tensor(np.arange(6.0) + i, M3, [Shard(0)])
        result = local_map(program, out_placements=[Shard(0)], out_shapes=((3,),))(x, marker).persist()
        eventually(marker.exists)
        kill(mortal, i % 2, eventually)
        marker.with_suffix(".killed").touch()
        assert np.array_equal(result, [1000 * (15.0 + 6 * i)] * 3)


def test_results_lost_after_the_end_are_made_again_by_all(mortal: Client, eventually: Eventually) -> None:
    x = sharded(6, M3)
    result = local_map(lambda a: np.array([collectives.all_reduce(a.sum())]), out_placements=[Shard(0)], out_shapes=((3,),))(x)
    result = result.persist()
    wait(dm_futures(result))
    kill(mortal, 1, eventually)
    assert np.array_equal(result, [15.0] * 3)
    assert np.array_equal(result + 1, [16.0] * 3)
