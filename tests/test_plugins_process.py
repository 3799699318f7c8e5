"""Pins, homes and tickets on a scheduler in a process of its own, with workers that get killed.

Dask swallows what a plugin raises, and LocalCluster runs the scheduler inside the client's process, where faults hide.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import dask
import dask.array as da
import numpy as np
import pytest
from conftest import ShellCluster, child_environment
from dask._task_spec import List, TaskRef
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from distributed import Client, KilledWorker, Reschedule, wait
from distributed.client import FutureCancelledError

from daskmesh import Replicate, Shard, create_shmem_tensor, init_mesh, shard_tensor, shmem_load
from daskmesh.plugins import RankPlugin
from daskmesh.store import store_at
from daskmesh.tasks import DirectoryTask, RankTask, TicketTask
from daskmesh.transport import TicketLost, expose, load
from daskmesh.world import init_parallel_env, shutdown, world_for

pytestmark = pytest.mark.processes
PLUGIN = RankPlugin.name
names = iter(f"work-{os.getpid()}-{i}" for i in range(10**6))  # no key is another process's


# -- what runs in tasks


def ones(n, value=1.0):
    return np.full(n, value)


def add_one(x):
    return x + 1


def first(x):
    return float(x[0])


def die(flag):
    os.kill(os.getpid(), signal.SIGKILL)


def read(tickets):
    """The sum of all that the tickets claim; runs again when one is void."""
    try:
        return float(sum(load(ticket).sum() for ticket in tickets))
    except TicketLost:
        raise Reschedule from None


# -- what runs on the scheduler and the workers


def pinned(dask_scheduler=None, prefix=""):
    """(tasks with the pin of their rank, tasks with a rank) among the keys that start with `prefix`."""
    worlds = dask_scheduler.plugins[PLUGIN].worlds
    ranked = [t for k, t in dask_scheduler.tasks.items() if k[0].startswith(prefix) and isinstance(t.run_spec, RankTask)]
    return sum(t.worker_restrictions is worlds[t.run_spec.world].pin(t.run_spec.rank) for t in ranked), len(ranked)


def worlds_of(dask_scheduler=None):
    return set(dask_scheduler.plugins[PLUGIN].worlds)


def exposed(dask_worker=None):
    return len(store_at(dask_worker.address))


# -- helpers


def submit(client, world, funcs, cls=RankTask, **options):
    """One task per (rank, func, *args); futures in order."""
    name = next(names)
    keys = [(name, i) for i in range(len(funcs))]
    graph = {k: cls(k, func, *args, world=world.id, rank=rank) for k, (rank, func, *args) in zip(keys, funcs, strict=True)}
    return client.get(graph, keys, sync=False, **options)


def at_home(client, world, futures, ranks):
    """Whether each result lies on its rank's worker."""
    holders, table = client.who_has(futures), world.table()
    return [table[rank] in holders[f.key] for f, rank in zip(futures, ranks, strict=True)]


def blocks(world, ranks, size=4):
    """A dask array of one rank task per block."""
    name = next(names)
    layer = {(name, r): RankTask((name, r), ones, size, float(r), world=world.id, rank=r) for r in range(ranks)}
    graph = HighLevelGraph({name: MaterializedLayer(layer)}, {name: set()})
    return da.Array(graph, name, ((size,) * ranks,), dtype=float)


def kill(client, address):
    os.kill(client.run(os.getpid, workers=[address])[address], signal.SIGKILL)


@pytest.fixture
def world(shell_client):
    return init_parallel_env(4)


# -- pins


def test_pinned_tasks_are_the_rank_tasks_whatever_becomes_of_the_graph(shell_client, world):
    x = blocks(world, 4)
    values = np.repeat(np.arange(4.0), 4)
    chain = x.map_blocks(add_one) + blocks(world, 4)  # two roots, fused
    (optimized,) = dask.optimize(blocks(world, 4)[1:15].rechunk(3))
    lone = blocks(world, 4)
    held = shell_client.persist([x, chain, optimized, lone])
    wait(held)
    mine, ranked = shell_client.run_on_scheduler(pinned)
    assert (mine, ranked) == (16, 16)
    for array, right in zip(held, [values, 2 * values + 1, values[1:15], values], strict=True):
        np.testing.assert_array_equal(array.compute(), right)
    futures = [dict(held[3].dask)[lone.name, r] for r in range(4)]
    assert all(at_home(shell_client, world, futures, range(4)))


def test_the_plugin_reaches_every_worker_and_those_that_join_later(shell_cluster, shell_client, world):
    shell_cluster.start_worker()
    shell_client.wait_for_workers(3, timeout=30)
    before = world.table()
    assert set(shell_client.run(exposed).values()) == {0}
    assert len(shell_client.run(exposed)) == 3
    late = (set(shell_client.scheduler_info()["workers"]) - set(before.values())).pop()
    assert world.table() == before
    # Workers without ranks go first when the cluster shrinks.
    assert shell_client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.workers_to_close(n=2)) == [late]
    shell_cluster.stop_worker_of(shell_client, late)


def test_two_clients_that_come_at_once_find_one_plugin(shell_cluster, shell_client):
    shell_client.unregister_scheduler_plugin(PLUGIN) if PLUGIN in plugins(shell_client) else None
    start = threading.Barrier(2)
    made = []

    def register():
        with Client(shell_cluster.address, set_as_default=False) as client:
            start.wait()
            client.register_plugin(RankPlugin())
            made.append(client.sync(client.scheduler.daskmesh_create_world, client=client.id, ranks=2)["world"])
            start.wait()
            assert set(made) <= client.run_on_scheduler(worlds_of)
            start.wait()  # a client that leaves takes its world with it

    threads = [threading.Thread(target=register) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 2


def plugins(client):
    return client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.plugins))


# -- workers that die


def test_a_killed_worker_comes_back_as_the_same_ranks(shell_client, world):
    held = submit(shell_client, world, [(r, ones, 8, r) for r in range(4)])
    wait(held)
    before = world.table()
    slow = submit(shell_client, world, [(i % 4, add_one, i) for i in range(100)])
    kill(shell_client, before[1])
    assert shell_client.gather(slow) == [i + 1 for i in range(100)]
    assert [v.tolist() for v in shell_client.gather(held)] == [[float(r)] * 8 for r in range(4)]
    after = world.table()
    assert after[1] == after[3] != before[1]
    assert after[0] == after[2] == before[0]
    assert all(at_home(shell_client, world, held, range(4)))


def test_a_restart_of_all_workers_keeps_the_ranks(shell_client, world):
    wait(submit(shell_client, world, [(r, ones, 8) for r in range(4)]))
    before = world.table()
    shell_client.restart()
    after = world.table()
    assert not set(before.values()) & set(after.values())
    assert len({after[0], after[1]}) == 2
    again = submit(shell_client, world, [(r, ones, 8) for r in range(4)])
    wait(again)
    assert all(at_home(shell_client, world, again, range(4)))


def test_innocents_around_a_task_that_kills_its_worker(shell_client, world):
    """All are assigned to the worker when it dies; some have just run, unreported, and most wait behind the culprit."""
    (culprit,) = submit(shell_client, world, [(1, die, 0)], priority=10)
    before = submit(shell_client, world, [(1, add_one, i) for i in range(10)], priority=20)
    behind = submit(shell_client, world, [(1, add_one, i) for i in range(50)])
    assert shell_client.gather(before) == [i + 1 for i in range(10)]
    assert shell_client.gather(behind) == [i + 1 for i in range(50)]
    with pytest.raises(KilledWorker):
        culprit.result()


def test_a_worker_gone_for_good_then_a_move_home_then_the_stand_in_dies(shell_cluster, shell_client, world, eventually):
    """Rank 1 is folded onto rank 0's worker, goes home to a new worker, and its tickets from in between are made again."""
    before = world.table()
    waiting = submit(shell_client, world, [(1, add_one, 1)])
    wait(waiting)
    shell_cluster.stop_worker_of(shell_client, before[1])
    pending = submit(shell_client, world, [(1, add_one, 2)])
    assert pending[0].result(timeout=30) == 3  # never pends: after the grace time it runs on the survivor
    assert set(world.table().values()) == {before[0]}

    tickets = submit(shell_client, world, [(r, expose, ones(5, r)) for r in range(4)], TicketTask)
    wait(tickets)
    shell_cluster.start_worker()
    eventually(lambda: len(set(world.table().values())) == 2)
    table = world.table()
    assert table[0] == before[0] != table[1]
    total = submit(shell_client, world, [(1, read, List(*(TaskRef(t.key) for t in tickets)))])
    assert total[0].result(timeout=30) == 30.0
    copies = shell_client.who_has(tickets)
    assert any(table[1] in copies[t.key] for t in tickets)

    kill(shell_client, before[0])
    again = submit(shell_client, world, [(1, read, List(*(TaskRef(t.key) for t in tickets)))])
    assert again[0].result(timeout=30) == 30.0
    assert all(at_home(shell_client, world, tickets, range(4)))


# -- replicas and tickets


def test_the_owner_keeps_its_chunk_and_the_readers_copy_goes(shell_client, world, eventually):
    table = world.table()
    chunk, ballast = submit(shell_client, world, [(0, ones, 10**6), (0, ones, 10**7)])
    wait([chunk, ballast])
    reads = submit(shell_client, world, [(1, first, TaskRef(chunk.key))])
    assert reads[0].result() == 1.0
    assert set(shell_client.who_has(chunk)[chunk.key]) == {table[0], table[1]}
    spread = shell_client.scatter(np.ones(3), broadcast=True)

    def settled():
        shell_client.amm.run_once()
        holders = shell_client.who_has([chunk, spread])
        return all(len(h) == 1 for h in holders.values()) and holders

    assert set(eventually(settled)[chunk.key]) == {table[0]}


def test_a_ticket_stays_where_it_was_born(shell_client, world, eventually):
    """Its copy goes, although the birthplace is the fuller worker; then the store is empty as soon as nobody asks."""
    (ticket,) = submit(shell_client, world, [(0, expose, ones(10**6))], TicketTask)
    ballast = submit(shell_client, world, [(0, ones, 10**7)])
    wait(ballast)
    total = submit(shell_client, world, [(1, read, List(TaskRef(ticket.key)))])
    assert total[0].result() == 10**6
    table = world.table()
    assert len(shell_client.who_has(ticket)[ticket.key]) == 2

    def settled():
        shell_client.amm.run_once()
        return len(shell_client.who_has(ticket)[ticket.key]) == 1

    eventually(settled)
    assert list(shell_client.who_has(ticket)[ticket.key]) == [table[0]]
    assert shell_client.run(exposed, workers=[table[0]]) == {table[0]: 1}
    ticket.release()
    eventually(lambda: set(shell_client.run(exposed).values()) == {0})


def test_a_directory_keeps_its_tickets_and_falls_with_them(shell_client, world, eventually):
    name = next(names)
    graph = {(name, r): TicketTask((name, r), expose, ones(3, r), world=world.id, rank=r) for r in range(4)}
    tickets = List(*(TaskRef(k) for k in graph))
    graph[name, "all"] = DirectoryTask((name, "all"), list, tickets, world=world.id, rank=0)
    (directory,) = shell_client.get(graph, [(name, "all")], sync=False)
    wait(directory)

    def total():
        (found,) = submit(shell_client, world, [(2, read, TaskRef(directory.key))])
        return found.result(timeout=30)

    assert total() == 18.0
    assert sum(shell_client.run(exposed).values()) == 4
    kill(shell_client, world.table()[1])
    assert total() == 18.0
    directory.release()
    eventually(lambda: set(shell_client.run(exposed).values()) == {0})
    assert not shell_client.run_on_scheduler(lambda dask_scheduler: [c for c in dask_scheduler.clients if "daskmesh" in c])


def test_a_reader_can_report_a_void_ticket(shell_client, world):
    (ticket,) = submit(shell_client, world, [(0, expose, ones(4))], TicketTask)
    claim = ticket.result()
    address = world.table()[0]
    shell_client.run(lambda key, dask_worker: store_at(dask_worker.address).free(key), ticket.key, workers=[address])
    shell_client.sync(shell_client.scheduler.daskmesh_ticket_lost, key=ticket.key, address=address)
    total = submit(shell_client, world, [(1, read, List(TaskRef(ticket.key)))])
    assert total[0].result(timeout=30) == 4.0
    assert ticket.result().id != claim.id


# -- worlds and clients

OTHER = """
import sys
from distributed import Client
from daskmesh.world import init_parallel_env
from test_plugins_process import add_one, at_home, pinned, submit
with Client(sys.argv[1]) as client:
    (published,) = client.get_dataset("published")
    world = init_parallel_env(3)
    mine = submit(client, world, [(r, add_one, r) for r in range(3)])
    assert client.gather(mine) == [1, 2, 3]
    assert all(at_home(client, world, mine, range(3)))
    print(world.id, published.result(), client.run_on_scheduler(pinned))
"""


def test_a_second_client_has_a_world_of_its_own_and_a_published_one_outlives_its_client(shell_cluster, shell_client, eventually):
    with Client(shell_cluster.address, set_as_default=False) as client:
        first_world = init_parallel_env(2, client=client)
        futures = submit(client, first_world, [(1, add_one, 6)])
        wait(futures)
        client.publish_dataset(futures, name="published")
    shutdown()
    run = subprocess.run(
        [sys.executable, "-c", OTHER, shell_cluster.address], env=child_environment(), capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    other, value, mine, ranked = run.stdout.replace("(", "").replace(")", "").replace(",", "").split()
    assert other != first_world.id
    assert (value, mine, ranked) == ("7", "4", "4")
    eventually(lambda: other not in shell_client.run_on_scheduler(worlds_of))
    assert first_world.id in shell_client.run_on_scheduler(worlds_of)
    shell_client.unpublish_dataset("published")
    with Client(shell_cluster.address, set_as_default=False):
        pass
    eventually(lambda: first_world.id not in shell_client.run_on_scheduler(worlds_of))


def test_tasks_of_an_unknown_world_are_pinned_all_the_same(shell_client, world):
    stray = type(world)("elsewhere", shell_client, 5, fixed=True, implicit=False)
    futures = submit(shell_client, stray, [(r, add_one, r) for r in (4, 0, 2)])
    assert shell_client.gather(futures) == [5, 1, 3]
    assert all(at_home(shell_client, stray, futures, (4, 0, 2)))
    assert shell_client.run_on_scheduler(pinned, prefix=futures[0].key[0]) == (3, 3)


def test_a_restarted_scheduler_is_an_error_that_names_the_way_on(eventually):
    cluster = ShellCluster(workers=1, grace="2s", nanny=False)
    try:
        with Client(cluster.address, timeout="30s") as client:
            mesh = init_mesh(2, ["x"])
            recipe = shard_tensor(np.arange(4.0), mesh, [Shard(0)])
            held = (recipe + 1).persist()
            wait(held)
            symmetric = create_shmem_tensor("pair", 2, "f8", [2])
            world = world_for(mesh)
            cluster.stop(cluster.scheduler)
            cluster.start_scheduler()
            cluster.start_worker()
            assert cluster.workers[0].wait(timeout=60) == 0  # Dask's workers end with their scheduler
            eventually(lambda: client.status == "running" and world._restarted)
            with pytest.raises(RuntimeError, match=r"restarted.*init_parallel_env\(\)"):
                world_for(mesh)
            with pytest.raises(FutureCancelledError):
                held.reshard([Replicate()]).compute()
            again = init_parallel_env()
            assert again is not world
            assert world_for(mesh) is again
            assert recipe.compute().tolist() == [0, 1, 2, 3]  # needs nothing that was lost
            with pytest.raises(RuntimeError, match="create it again"):
                shmem_load(symmetric, 1).compute()
            shutdown()
    finally:
        cluster.close()
