"""More ranks than workers, and more peers than a rank wants edges to."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client, futures_of, wait

import daskmesh as dm
from daskmesh import transport
from daskmesh.dtensor import DTensor
from daskmesh.exchange import MANY_PEERS
from daskmesh.layout import make_layout
from daskmesh.mesh import init_mesh
from daskmesh.placement import Partial, Replicate, Shard
from daskmesh.plan import make_plan
from daskmesh.store import _STORES
from daskmesh.tasks import RankTask
from daskmesh.world import world_for

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def edges(x: DTensor) -> int:
    return sum(len(task.dependencies) for task in x.__dask_graph__().values() if isinstance(task, RankTask))


def tasks_of(client: Client) -> set[Any]:
    return set(client.run_on_scheduler(lambda dask_scheduler: [k for k in dask_scheduler.tasks]))


@pytest.mark.processes
def test_64_ranks_on_two_workers(processes: Client) -> None:
    """128 tasks carry out the exchange of an (8, 8) mesh, counted on the scheduler."""
    mesh = init_mesh((8, 8), ("x", "y"))
    table = np.arange(30 * 20.0).reshape(30, 20)
    x = dm.shard_tensor(table, mesh, [S0, S1]).persist()
    wait(x)
    assert len(set(world_for(mesh).table().values())) == 2
    before = tasks_of(processes)
    y = x.reshard([S1, S0])
    assert max(y.explain().received.values()) <= 0.125 * table.nbytes
    y = y.persist()
    wait(y)
    new = tasks_of(processes) - before
    assert 64 < len(new) <= 128
    table_of = world_for(mesh).table()
    homes = {k: list(w) for k, w in processes.who_has(y).items()}
    assert homes == {k: [table_of[r]] for k, r in zip(y.__dask_keys__(), mesh.process_ids, strict=True)}
    np.testing.assert_array_equal(y.compute(), table)


@pytest.mark.cluster
def test_more_than_64_peers_go_through_one_directory(threads: Client, eventually: Callable[..., Any]) -> None:
    n = MANY_PEERS + 2
    mesh, table = init_mesh(n, ["x"]), np.arange(2 * n * n).reshape(n, 2 * n)
    x = dm.shard_tensor(table, mesh, [S0]).persist()
    wait(x)
    y = x.reshard([S1])
    graph = dask.optimize(y)[0].__dask_graph__()
    assert len(set(graph) - set(x.__dask_keys__())) == 2 * n + 1
    assert edges(y) <= 4 * n  # expose, directory, and for each assemble the directory and its own block
    plan = y.explain()
    transport.reset_stats()
    y = y.persist()
    wait(y)
    assert sum(road["bytes"] for road in transport.stats().values()) == plan.total_bytes
    np.testing.assert_array_equal(y.compute(), table)
    np.testing.assert_array_equal(x.reshard([P]).compute(), table)
    del y
    addresses = threads.scheduler_info()["workers"]
    eventually(lambda: not sum(len(store) for address, store in _STORES.items() if address in addresses))


@pytest.mark.cluster
def test_all_terms_of_many_ranks_are_folded(threads: Client) -> None:
    n = MANY_PEERS + 2
    x = dm.dtensor_from_local(lambda rank: np.array([rank, 1]), init_mesh(n, ["x"]), [P], shape=((2,), int))
    assert x.reshard([R]).local_value(n - 1).tolist() == [n * (n - 1) // 2, n]


@pytest.mark.cluster
def test_a_failing_rank_behind_a_directory(threads: Client, eventually: Callable[..., Any]) -> None:
    def fails(rank: int) -> np.ndarray:
        return np.ones(65)[rank : rank + 1] + np.ones(65)[rank]

    x = dm.dtensor_from_local(fails, init_mesh(66, ["x"]), [S0], shape=((66,), float))
    y = x.reshard([R]).persist()
    assert isinstance(futures_of(y)[0].exception(), IndexError)
    addresses = threads.scheduler_info()["workers"]
    eventually(lambda: not sum(len(store) for address, store in _STORES.items() if address in addresses))


def test_sizes_beyond_32_bits() -> None:
    """A layout and a plan of an array that no machine here could hold."""
    mesh, shape = init_mesh((3, 2), ("x", "y")), (2**33 + 1, 2**20 + 3)
    a, b = (make_layout(mesh, p, shape, "f8") for p in ([S0, S1], [S1, S0]))
    assert a.nbytes == 8 * shape[0] * shape[1] > 2**56
    assert a.box((2, 1)) == (slice(5726623062, 2**33 + 1), slice(2**19 + 2, 2**20 + 3))
    assert a.local_shape((2, 1)) == (2863311531, 2**19 + 1)
    plan = make_plan(a, b)
    pairs = [zip(a.box(c), b.box(c), strict=True) for c in a.coords()]
    kept = [prod(max(0, min(p.stop, q.stop) - max(p.start, q.start)) for p, q in boxes) for boxes in pairs]
    assert plan.total_bytes == a.nbytes - 8 * sum(kept)
    assert sum(plan.pairs.values()) == plan.total_bytes
