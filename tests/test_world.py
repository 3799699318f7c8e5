"""The world: how it is made, grown, replaced and left."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from contextlib import nullcontext

import dask
import pytest
from conftest import child_environment, local_cluster
from dask._task_spec import TaskRef
from dask.system import CPU_COUNT
from distributed import Client, wait
from distributed.client import default_client

import daskmesh as dm
from daskmesh import clients
from daskmesh.collectives import all_reduce
from daskmesh.mesh import ProcessMesh
from daskmesh.plugins import RankPlugin
from daskmesh.region import get_coordinate, get_rank
from daskmesh.tasks import RankTask, TicketTask
from daskmesh.world import get_world_size, init_parallel_env, shutdown, world_for

MESH = ProcessMesh([[0, 1, 2], [3, 4, 5]], ["dp", "tp"])


def who(mesh):
    """Runs in a task."""
    return get_rank(), get_coordinate(mesh), get_world_size(), os.getpid()


def add(x, y):
    return x + y


def answers(world, mesh, client):
    tasks = {("who", world.id, r): RankTask(("who", world.id, r), who, mesh, world=world.id, rank=r) for r in mesh.process_ids}
    return client.get(tasks, list(tasks))


# -- tasks


@pytest.mark.parametrize("cls", [RankTask, TicketTask])
def test_a_rank_task_keeps_its_rank(cls):
    task = cls(("x", 0), add, TaskRef("a"), y=1, world="w", rank=3)
    same = [task.copy(), pickle.loads(pickle.dumps(task)), task.substitute({"a": "b"}), task.substitute({}, key=("y", 0))]
    assert all(type(t) is cls and (t.world, t.rank) == ("w", 3) for t in same)
    assert same[2].dependencies == {"b"}
    assert same[3].key == ("y", 0)
    assert (task.block_fusion, task.data_producer) == (True, False)
    assert task({"a": 2}) == 3


def test_tasks_of_two_ranks_differ_in_token():
    tasks = [RankTask("x", add, 1, 2, world=w, rank=r) for w in "ab" for r in (0, 1)]
    assert len({dask.tokenize.tokenize(t) for t in tasks}) == 4
    assert tasks[0] != tasks[1]
    assert tasks[0] == tasks[0].copy()


# -- who am I


@pytest.mark.parametrize(("call", "ask"), [("get_rank", get_rank), ("get_coordinate", lambda: get_coordinate(MESH))])
def test_the_client_is_no_rank_and_is_told_where_to_ask(call, ask):
    with pytest.raises(RuntimeError, match=rf"{call}\(.*client.*local_map"):
        ask()


@pytest.mark.cluster
def test_inside_a_task_a_rank_knows_itself(embedded):
    world = world_for(MESH)
    found = answers(world, MESH, world.client)
    assert found == [(r, MESH.coordinate(r), 6, os.getpid()) for r in range(6)]
    assert get_world_size() == 6


@pytest.mark.processes
def test_inside_a_task_of_another_process_too(processes):
    world = world_for(MESH)
    found = answers(world, MESH, processes)
    assert [f[:3] for f in found] == [(r, MESH.coordinate(r), 6) for r in range(6)]
    assert found[0][3] == found[2][3] != found[1][3]


# -- the cluster inside this process


@pytest.mark.cluster
def test_the_first_mesh_starts_a_cluster_and_shutdown_ends_it(embedded):
    assert get_world_size() == 1
    world = world_for(ProcessMesh([0, 2]))
    info = world.client.scheduler_info()
    assert (world.size, world.fixed) == (3, False)
    assert len(info["workers"]) == min(3, CPU_COUNT)
    assert set(world.table().values()) == set(info["workers"])
    assert default_client() is world.client
    shutdown()
    assert (world.client.status, get_world_size()) == ("closed", 1)
    with pytest.raises(ValueError, match="No clients found"):
        default_client()
    shutdown()


@pytest.mark.cluster
def test_an_explicit_start_leaves_the_size_to_the_first_mesh(embedded):
    world = init_parallel_env()
    assert (world.size, get_world_size()) == (0, 1)
    assert world_for(MESH) is world
    assert world.size == get_world_size() == 6


@pytest.mark.cluster
def test_the_process_ends_without_a_word(embedded):
    script = (
        "from daskmesh.world import init_parallel_env as init; from daskmesh.tasks import RankTask; w = init(3)\n"
        "print(w.client.get({'x': RankTask('x', abs, -1, world=w.id, rank=2)}, 'x'))"
    )
    run = subprocess.run([sys.executable, "-c", script], env=child_environment(), capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "1\n", "")


# -- growing and fixed worlds


@pytest.mark.cluster
def test_a_grown_world_keeps_the_workers_of_its_ranks(embedded):
    world = world_for(ProcessMesh([0, 1, 2]))
    before = world.table()
    assert world_for(ProcessMesh([6, 1])) is world
    after = world.table()
    assert world.size == len(after) == 7
    assert {rank: after[rank] for rank in before} == before
    assert world_for(ProcessMesh([0])).size == 7


@pytest.mark.cluster
def test_a_fixed_world_refuses_a_rank_beyond_it(embedded):
    world = init_parallel_env(3)
    assert world_for(ProcessMesh([2, 0])) is world
    with pytest.raises(ValueError, match=r"rank 3 .*fixed at 3.*shutdown\(\).*init_parallel_env\(n_ranks=4\)"):
        world_for(ProcessMesh([1, 3]))


@pytest.mark.cluster
def test_a_second_call_returns_the_world_or_says_what_to_do(embedded):
    world = init_parallel_env(2)
    assert init_parallel_env() is init_parallel_env(2) is init_parallel_env(client=world.client) is world
    with pytest.raises(RuntimeError, match=r"init_parallel_env\(n_ranks=3\): there is a world already.*shutdown\(\)"):
        init_parallel_env(3)
    with local_cluster(n_workers=0, processes=False) as cluster, Client(cluster) as other:
        with pytest.raises(RuntimeError, match=r"shutdown\(\)"):
            init_parallel_env(client=other)


def test_ranks_that_share_workers_are_said_once(embedded, caplog):
    world = init_parallel_env()
    caplog.set_level("INFO", "daskmesh")  # after Dask has silenced the handlers that it found
    for size in (1, CPU_COUNT + 1, CPU_COUNT + 4):
        world._grow(size)
    (line,) = [record.getMessage() for record in caplog.records if "round robin" in record.getMessage()]
    assert line == f"{CPU_COUNT + 1} ranks are dealt to {CPU_COUNT} workers, round robin"


def test_what_is_no_client_is_refused(embedded):
    with pytest.raises(TypeError, match=r"client is a distributed\.Client, got 'tcp://h:1'; write Client\('tcp://h:1'\)"):
        init_parallel_env(client="tcp://h:1")


@pytest.mark.parametrize(("n_ranks", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)])
def test_n_ranks_is_a_positive_number(n_ranks, error):
    with pytest.raises(error, match="n_ranks"):
        init_parallel_env(n_ranks)


# -- clients


@pytest.mark.processes
def test_with_a_client_there_is_a_rank_for_each_worker_at_least(processes):
    shutdown()  # the world that another module may have made on this cluster
    world = world_for(ProcessMesh([0]))
    assert (world.size, world.client) == (2, processes)
    assert set(world.table().values()) == set(processes.scheduler_info()["workers"])
    shutdown()
    assert world_for(MESH).size == 6
    assert processes.status == "running"
    shutdown()


@pytest.mark.cluster
def test_a_world_moves_on_when_its_client_is_closed_or_another_is_current(embedded):
    first = world_for(MESH)
    with local_cluster(n_workers=1, processes=False) as cluster:
        with Client(cluster) as client:
            second = world_for(MESH)
            assert second is not first
            assert second.client is client
            assert init_parallel_env() is second
        third = world_for(MESH)
        assert third.client is first.client  # the cluster inside this process is still there
        with Client(cluster) as client:
            named = init_parallel_env(client=client)
            with Client(cluster):
                assert world_for(MESH) is named  # asked for by name: it stays


def where(x):
    """The addresses that hold the blocks of a persisted DTensor."""
    wait(x)
    return {str(worker) for workers in default_client().who_has(x).values() for worker in workers}


@pytest.mark.cluster
@pytest.mark.parametrize("before", [True, False])
def test_dask_computes_with_an_explicit_client_until_shutdown(embedded, before):
    with local_cluster(n_workers=1, processes=False) as here, local_cluster(n_workers=1, processes=False) as there:
        with Client(there, set_as_default=False) as named, Client(here) if before else nullcontext() as first:
            world = init_parallel_env(client=named)
            assert default_client() is named
            x = dm.arange(5, mesh=ProcessMesh([0, 1]), placements=[dm.Shard(0)]).persist()
            assert where(x) == set(world.table().values())
            assert x.reshard([dm.Replicate()]).local_value(1).tolist() == list(range(5))
            shutdown()
            if before:
                assert default_client() is first
            else:
                with pytest.raises(ValueError, match="No clients found"):
                    default_client()


@pytest.mark.cluster
def test_a_scheduler_without_a_world_keeps_ranks_in_place_too(embedded):
    x = dm.arange(6, mesh=ProcessMesh([0, 1, 2]), placements=[dm.Shard(0)])
    met = dm.local_map(lambda a: all_reduce(a), [[dm.Replicate()]])(x)
    for ask in (met.compute, lambda: met.local_value(2), lambda: dask.compute(1, met)[1]):
        with local_cluster(n_workers=2, processes=False) as cluster, Client(cluster):
            assert ask().tolist() == [6, 9]
            assert len(where(x.persist())) == 2


@pytest.mark.cluster
def test_an_asynchronous_client_is_told_what_to_write(embedded):
    async def ask():
        async with Client(processes=False, n_workers=0, dashboard_address="127.0.0.1:0", asynchronous=True) as client:
            with pytest.raises(TypeError, match=r"await client\.persist\(x\)"):
                init_parallel_env(client=client)

    asyncio.run(ask())


class Elsewhere:
    """A client whose scheduler and worker answer as told."""

    asynchronous = False
    status = "running"
    scheduler = type("Scheduler", (), {"address": "tcp://there:1"})

    def __init__(self, scheduler, worker):
        self.answers = scheduler, worker

    def run_on_scheduler(self, *args):
        if isinstance(self.answers[0], Exception):
            raise self.answers[0]
        return self.answers[0]

    def run(self, *args, on_error):
        return {"tcp://there:2": self.answers[1]}


@pytest.mark.parametrize(
    ("scheduler", "worker", "text"),
    [
        (ModuleNotFoundError("No module named 'daskmesh'"), clients.VERSION, "the scheduler tcp://there:1 cannot import"),
        (clients.VERSION, ModuleNotFoundError("No module named 'daskmesh'"), "worker tcp://there:2 cannot import"),
        ("0.0.1", clients.VERSION, "the scheduler tcp://there:1 has 0.0.1"),
        (clients.VERSION, "9.9", "worker tcp://there:2 has 9.9"),
    ],
)
def test_a_process_without_this_version_is_named_with_the_cure(embedded, scheduler, worker, text):
    with pytest.raises(RuntimeError, match=rf"{text}.*pip install daskmesh=={clients.VERSION}"):
        init_parallel_env(client=Elsewhere(scheduler, worker))


@pytest.mark.cluster
def test_no_world_is_made_inside_a_task(embedded):
    world = init_parallel_env(1)
    task = RankTask("inner", world_for, ProcessMesh([0]), world=world.id, rank=0)
    shutdown()
    with pytest.raises(RuntimeError, match="inside a rank's task"):
        task()


# -- more on the scheduler


class Roll:
    """A service that counts the workers lost."""

    def install(self, ranks):
        self.lost = []
        ranks.on_remove_worker.append(lambda address, stimulus_id: self.lost.append(address))
        ranks.handle("roll", self.call)

    async def call(self):
        return self.lost


@pytest.mark.cluster
def test_a_service_runs_beside_the_tables(embedded):
    with local_cluster(n_workers=2, processes=False) as cluster, Client(cluster) as client:
        client.register_plugin(RankPlugin([Roll]))
        client.register_plugin(RankPlugin([Roll]))
        world = init_parallel_env(3)
        lost = world.table()[1]
        assert client.sync(client.scheduler.daskmesh_roll) == []
        client.retire_workers([lost])
        assert client.sync(client.scheduler.daskmesh_roll) == [lost]
        assert [bool(address) for address in world.table().values()] == [True, False, True]


@pytest.mark.cluster
def test_a_world_that_its_scheduler_dropped_is_dealt_again(embedded):
    world = init_parallel_env(3)
    world.client.sync(world.client.scheduler.daskmesh_forget_world, world=world.id)
    assert list(world.table()) == [0, 1, 2]
    assert all(world.table().values())
