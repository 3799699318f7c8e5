"""Exchanges between worker processes, with a scheduler in a process of its own: pins, bytes, and workers that get killed."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from conftest import ShellCluster
from dask.delayed import Delayed
from distributed import Client, wait

import daskmesh as dm
from daskmesh import transport
from daskmesh.dtensor import DTensor
from daskmesh.mesh import init_mesh
from daskmesh.placement import Partial, Replicate, Shard
from daskmesh.store import store_at
from daskmesh.world import world_for

pytestmark = pytest.mark.processes

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
TABLE = np.arange(60.0).reshape(12, 5)


def gated(box: tuple[slice, ...], gate: Path) -> np.ndarray:
    """Rows of the table; the last ones once the gate is there."""
    while box[0].stop == len(TABLE) and not gate.exists():
        sleep(0.01)
    return TABLE[box]


def exposed(dask_worker: Any = None) -> int:
    store = store_at(dask_worker.address)
    return 0 if store is None else len(store)


def in_stores(client: Client) -> int:
    return sum(client.run(exposed).values())


def kill(client: Client, address: str) -> None:
    """Kill a worker, not its nanny, which starts it again."""
    pid = client.run(os.getpid, workers=[address])[address]
    os.kill(pid, signal.SIGKILL)


def at_home(x: DTensor, client: Client) -> bool:
    """Whether every block is in memory on the worker of its rank, and nowhere else."""
    wait(x)
    table = world_for(x.process_mesh).table()
    want = {key: [table[r]] for key, r in zip(x.__dask_keys__(), x.process_mesh.process_ids, strict=True)}
    return {key: list(where) for key, where in client.who_has(x).items()} == want


def loaded(client: Client) -> Counter[str]:
    """Bytes that each worker has loaded."""
    stats = client.run(transport.stats)
    return Counter({worker: sum(road["bytes"] for road in roads.values()) for worker, roads in stats.items()})


# -- lost workers


def test_a_worker_killed_while_data_are_held(shell_client: Client, eventually: Callable[..., Any]) -> None:
    mesh = init_mesh(4, ["x"])
    x = dm.shard_tensor(TABLE, mesh, [S0]).persist()
    y = (x * 2).reshard([S1]).persist()
    assert at_home(y, shell_client)
    kill(shell_client, world_for(mesh).table()[1])
    np.testing.assert_array_equal((y + x.reshard([S1])).compute(), 3 * TABLE)
    eventually(lambda: all(world_for(mesh).table().values()))
    eventually(lambda: at_home(y, shell_client) and at_home(x, shell_client))
    eventually(lambda: in_stores(shell_client) == 0)


@pytest.mark.parametrize("victim", [0, 3])
def test_a_worker_killed_during_an_exchange(
    shell_client: Client, tmp_path: Path, eventually: Callable[..., Any], victim: int
) -> None:
    """The first worker has exposed its rows, the last rank is still at work: one worker or the other dies."""
    mesh = init_mesh(4, ["x"])
    x = dm.from_callback(TABLE.shape, float, mesh, [S0], partial(gated, gate=tmp_path / "gate"))
    y = shell_client.persist(x.reshard([S1]) + 1)
    eventually(lambda: in_stores(shell_client) >= 2)
    kill(shell_client, world_for(mesh).table()[victim])
    (tmp_path / "gate").touch()
    np.testing.assert_array_equal(y.compute(), TABLE + 1)
    eventually(lambda: all(world_for(mesh).table().values()))
    eventually(lambda: at_home(y, shell_client))
    eventually(lambda: in_stores(shell_client) == 0)


def test_a_worker_killed_between_the_stages(shell_client: Client, tmp_path: Path, eventually: Callable[..., Any]) -> None:
    mesh = init_mesh(3, ["x"])
    x = dm.from_callback(TABLE.shape, float, mesh, [S0], partial(gated, gate=tmp_path / "gate"))
    terms = x.reshard([P])
    with dask.config.set({"daskmesh.two-stage-bytes": 0}):
        whole = terms.reshard([R])
    assert len(whole.explain().stages) == 3
    y = shell_client.persist(whole)
    eventually(lambda: in_stores(shell_client) >= 1)
    kill(shell_client, world_for(mesh).table()[1])
    (tmp_path / "gate").touch()
    np.testing.assert_array_equal(y.compute(), TABLE)
    eventually(lambda: all(world_for(mesh).table().values()))
    np.testing.assert_array_equal(y.local_value(2), TABLE)
    eventually(lambda: in_stores(shell_client) == 0)


def test_a_directory_whose_tickets_died_with_a_worker(shell_client: Client, eventually: Callable[..., Any]) -> None:
    mesh = init_mesh(66, ["x"])
    x = dm.arange(66, mesh=mesh, placements=[S0]).persist()
    y = x.reshard([R])
    graph = y.__dask_graph__()
    name = next(layer for layer in graph.layers if layer.startswith("directory-"))
    directory = shell_client.compute(dask.delayed(len)(Delayed((name,), graph, layer=name)))
    assert directory.result() == 66
    kept = shell_client.persist(Delayed((name,), graph, layer=name))
    wait(kept)
    assert in_stores(shell_client) == 66
    kill(shell_client, world_for(mesh).table()[1])
    np.testing.assert_array_equal(y.local_value(65), np.arange(66))
    eventually(lambda: all(world_for(mesh).table().values()))
    np.testing.assert_array_equal(y.local_value(64), np.arange(66))
    del kept, directory
    eventually(lambda: in_stores(shell_client) == 0)


# -- two, three and four worker processes


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_pins_and_bytes(shell_cluster: ShellCluster, shell_client: Client, workers: int) -> None:
    while len(shell_cluster.workers) < workers:
        shell_cluster.start_worker()
    shell_client.wait_for_workers(workers, timeout=30)
    mesh = init_mesh(5, ["x"])
    x = dm.shard_tensor(TABLE, mesh, [S0])
    assert len(set(world_for(mesh).table().values())) == workers
    held = x.persist()
    assert at_home(held, shell_client)
    (same,) = dask.optimize(held * 1)
    assert at_home(same.persist(), shell_client)
    chain = held
    for _ in range(5):
        chain = (chain + 1).persist()
    assert at_home(chain, shell_client)
    before, plan = loaded(shell_client), held.reshard([S1]).explain()
    y = held.reshard([S1]).persist()
    assert at_home(y, shell_client)
    received, table = Counter[str](), world_for(mesh).table()
    for rank, n in plan.received.items():
        received[table[rank]] += n
    assert loaded(shell_client) - before == received
    assert at_home((y * 2).reshard([R]).persist(), shell_client)
    np.testing.assert_array_equal((y + 1).compute(), TABLE + 1)


def test_large_terms_take_two_stages(shell_client: Client) -> None:
    mesh, n = init_mesh(2, ["x"]), 2**18
    x = dm.full(n, 3.0, mesh=mesh, placements=[P]).persist()
    y = x.reshard([R])
    assert len(y.explain().stages) == 2
    before = loaded(shell_client)
    y = y.persist()
    assert at_home(y, shell_client)
    assert sum((loaded(shell_client) - before).values()) == y.nbytes * 2 == x.reshard([R]).explain().total_bytes
    assert (y.local_value(1) == 3).all()


def test_what_no_worker_could_hold_is_refused_with_the_figures(shell_client: Client) -> None:
    x = dm.zeros((2**30, 2**14), mesh=init_mesh(2**7, ["x"]), placements=[S0])
    everyone = (lambda: dask.compute(1, x), lambda: shell_client.compute(x), lambda: np.asarray(x))
    for ask in (lambda: x.reshard([R]), x.compute, *everyone):
        with pytest.raises(MemoryError, match=r"128 TiB on one worker, whose memory limit is .* keep it sharded"):
            ask()


def test_a_dask_array_never_visits_the_client(shell_client: Client) -> None:
    data = da.ones((8, 6), chunks=(3, 4)) * da.arange(6, chunks=2)
    x = dm.shard_tensor(data, init_mesh((2, 2), ("x", "y")), [S1, S0])
    assert not [v for v in x.__dask_graph__().values() if isinstance(v, np.ndarray)]
    held = x.persist()
    assert at_home(held, shell_client)
    np.testing.assert_array_equal(held.compute(), data.compute())
