"""What users ask of Dask in its issues, as small cases with a right value. The scheduler is in a process of its own.

Numbers are those of issues of dask (d) and distributed (D).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from conftest import ShellCluster
from distributed import Client, futures_of, wait

import daskmesh as dm
from daskmesh import transport
from daskmesh.dtensor import DTensor
from daskmesh.mesh import init_mesh
from daskmesh.placement import Partial, Replicate, Shard
from daskmesh.tasks import RankTask
from daskmesh.world import world_for

pytestmark = pytest.mark.processes

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def sent(client: Client) -> int:
    """Bytes that workers have sent each other: those of Dask's own transfers and those of loads."""

    def outgoing(dask_worker: Any) -> int:
        return int(dask_worker.transfer_outgoing_bytes_total)

    loads = client.run(transport.stats).values()
    return sum(client.run(outgoing).values()) + sum(road["bytes"] for stats in loads for road in stats.values())


def held(x: DTensor) -> DTensor:
    x = x.persist()
    wait(x)
    return x


def owners(x: DTensor) -> list[list[str]]:
    """The worker of each rank, in mesh order, as `who_has` gives them."""
    table = world_for(x.process_mesh).table()
    return [[table[r]] for r in x.process_mesh.process_ids]


def holders(client: Client, x: DTensor) -> list[list[str]]:
    where = client.who_has(x)
    return [list(where[key]) for key in x.__dask_keys__()]


def drop_superfluous_copies(dask_scheduler: Any) -> None:
    dask_scheduler.extensions["amm"].run_once()


def wait_for_gate(box: tuple[slice, ...], gate: str) -> np.ndarray:
    while box[0].start and not Path(gate).exists():
        sleep(0.01)
    return np.ones(box[0].stop - box[0].start)


def gated(n: int, gate: Path) -> DTensor:
    """Ones; all but the first rank wait for the gate."""
    path = str(gate)
    return dm.from_callback(n, float, init_mesh(2), [S0], lambda box: wait_for_gate(box, path))


def test_case_1_rows_are_pinned_and_only_the_small_operand_moves(shell_client: Client) -> None:
    """D 3197."""
    mesh = init_mesh(4, ["x"])
    a = held(dm.ones((1, 10000), mesh=mesh, placements=[S1]))
    s = held(dm.ones((100, 1), mesh=mesh, placements=[S0]))
    before = sent(shell_client)
    total = held(np.sum(s.reshard([R]) * a, axis=0))
    assert sent(shell_client) - before <= mesh.size * s.nbytes + 4096
    assert holders(shell_client, total) == owners(total)
    assert (total.compute() == 100).all()


def test_case_2_a_pinned_task_outlives_the_restart_of_its_worker(shell_client: Client, tmp_path: Path) -> None:
    """D 8600. Where the worker takes longer than the grace time to come back, a survivor stands in."""
    x = shell_client.persist(gated(6, tmp_path / "gate"))
    before = world_for(init_mesh(2)).table()
    shell_client.restart_workers([before[1]])
    (tmp_path / "gate").touch()
    assert x.compute().sum() == 6
    y = held(x + 1)
    assert holders(shell_client, y) == owners(y)
    assert world_for(init_mesh(2)).table()[1] != before[1]


def test_case_4_equal_layouts_add_without_moving_a_byte(shell_client: Client) -> None:
    """D 6597."""
    mesh, rng = init_mesh(4), np.random.default_rng(0)
    tables = rng.normal(size=(2, 40, 50))
    a, b = (held(dm.shard_tensor(t, mesh, [S0])) for t in tables)
    before = sent(shell_client)
    c = held(a + b)
    assert sent(shell_client) == before
    np.testing.assert_array_equal(c.compute(), tables[0] + tables[1])


def test_case_5_a_replica_stays_on_every_rank(shell_client: Client, eventually: Callable[..., Any]) -> None:
    """D 6570, d 11148."""
    mesh = init_mesh(4)
    v = held(dm.arange(2**17, mesh=mesh, placements=[R]))
    x = held(dm.ones(2**17, "i8", mesh=mesh, placements=[S0]))
    for _ in range(2):
        shell_client.run_on_scheduler(drop_superfluous_copies)
    before = sent(shell_client)
    y = held(x * v)
    assert sent(shell_client) == before
    assert holders(shell_client, v) == owners(v)
    np.testing.assert_array_equal(y.compute(), np.arange(2**17))


def pinned_and_ranked(dask_scheduler: Any) -> tuple[int, int]:
    tasks = [t for t in dask_scheduler.tasks.values() if isinstance(t.run_spec, RankTask)]
    return sum(bool(t.worker_restrictions) for t in tasks), len(tasks)


def test_case_6_pins_survive_daskss_own_expressions(shell_client: Client, tmp_path: Path, eventually: Callable[..., Any]) -> None:
    """d 7036: counted while the ranks are at work."""
    x = gated(6, tmp_path / "gate") + 1
    total = ((x.to_dask() * 2).sum() + x.reshard([R]).blocks[1].max()).persist()
    pinned, ranked = eventually(lambda: (c := shell_client.run_on_scheduler(pinned_and_ranked))[1] and c)
    (tmp_path / "gate").touch()
    assert pinned == ranked >= 6
    assert total.compute() == 26


def test_case_7_rows_to_columns(shell_client: Client) -> None:
    """d 6552: every rank holds its rows and its columns, never more."""
    table = np.arange(64 * 4096.0).reshape(64, 4096)
    x = held(dm.shard_tensor(table, init_mesh(4), [S0]))
    y = x.reshard([S1])
    assert set(y.explain().received.values()) == {table.nbytes // 4 * 3 // 4}
    y = held(y)
    assert [y.local_value(r).shape for r in range(4)] == [(64, 1024)] * 4
    np.testing.assert_array_equal(y.compute(), table)


def test_case_8_a_contraction_over_the_cut_dim_leaves_terms(shell_client: Client) -> None:
    mesh = init_mesh(4, ["x"])
    x, y = (held(dm.ones((9, k), mesh=mesh, placements=[S0])) for k in (3, 2))
    before = sent(shell_client)
    z = held(x.T @ y)
    assert z.placements == (P,)
    assert sent(shell_client) == before
    np.testing.assert_array_equal(np.asarray(z), np.full((3, 2), 9.0))


def test_case_9_a_contraction_holds_one_term_per_rank(shell_client: Client) -> None:
    a, b = (held(dm.ones((4, 2, 2, 2, 2), mesh=init_mesh(4, ["x"]), placements=[S0])) for _ in "ab")
    z = np.tensordot(a, b, axes=(0, 0))
    assert (z.shape, z.placements) == ((2,) * 8, (P,))
    assert [z.local_value(r).size for r in range(4)] == [2**8] * 4
    np.testing.assert_array_equal(np.asarray(z), np.full((2,) * 8, 4.0))


@pytest.mark.parametrize("n", [4, 7])
def test_case_11_a_stencil_moves_faces(shell_client: Client, n: int) -> None:
    def stencil(local: np.ndarray) -> np.ndarray:
        wide = dm.collectives.halo_exchange(local, (1, 0), "x", "periodic")
        return wide[:-2] + wide[1:-1] + wide[2:]

    data = np.arange(n * 3.0).reshape(n, 3)
    x = dm.shard_tensor(data, init_mesh(2, ["x"]), [S0])
    got = dm.local_map(stencil, [[S0]], out_shapes=[(n, 3)])(x)
    np.testing.assert_array_equal(np.asarray(got), np.roll(data, 1, 0) + data + np.roll(data, -1, 0))


def test_case_10_anomalies(shell_client: Client) -> None:
    """d 5359: only rows of means move."""
    x = held(dm.shard_tensor(np.random.default_rng(1).normal(size=(600, 5)), init_mesh(4), [S0]))
    before = sent(shell_client)
    z = held(np.sum(x - np.mean(x, axis=0), axis=0))
    assert sent(shell_client) - before <= 4 * 3 * 5 * 8 * 2 + 4096
    np.testing.assert_allclose(z.compute(), 0, atol=1e-10)


def test_case_12_the_owner_keeps_its_chunk_when_others_read_it(shell_client: Client, eventually: Callable[..., Any]) -> None:
    """A chunk of rank 0 is fetched to the other worker by plain Dask; the copy goes, the owner's stays."""
    x = held(dm.arange(10, mesh=init_mesh(2), placements=[S0]))
    key, (home, other) = x.__dask_keys__()[0], [w for (w,) in owners(x)]
    (chunk,) = (f for f in futures_of(x) if f.key == key)
    assert shell_client.submit(np.sum, chunk, workers=[other]).result() == 10
    assert home in shell_client.who_has(x)[key]
    eventually(lambda: shell_client.run_on_scheduler(drop_superfluous_copies) or holders(shell_client, x) == owners(x))


def test_case_13_values_in_the_order_of_the_arguments(shell_client: Client) -> None:
    x = dm.full(3, 2, mesh=init_mesh(2), placements=[S0])
    got = dask.compute(da.ones(4).sum(), x, da.full(7, 1).sum(), np.sum(x))
    assert [np.asarray(g).tolist() for g in got] == [4.0, [2, 2, 2], 7, 6]


def test_case_14_a_function_cannot_write_to_the_chunk_of_another_rank(embedded: None) -> None:
    """Workers of one process hand each other the very arrays."""
    x = held(dm.zeros(4, mesh=init_mesh(2), placements=[R]))

    def spoil(local: np.ndarray) -> np.ndarray:
        local += 1 + dm.get_rank()
        return local

    with pytest.raises(ValueError, match="read-only"):
        dm.local_map(spoil, out_placements=[[P]])(x).compute()
    done = dm.local_map(spoil, out_placements=[[P]], writeable=True)(x)
    assert (done.compute().tolist(), x.compute().tolist()) == ([3] * 4, [0] * 4)


def test_case_3_a_rank_whose_worker_is_gone_for_good(
    shell_cluster: ShellCluster, shell_client: Client, tmp_path: Path
) -> None:
    """D 7346: after the grace time it runs elsewhere."""
    x = shell_client.persist(gated(6, tmp_path / "gate"))
    shell_cluster.stop_worker_of(shell_client, world_for(init_mesh(2)).table()[1])
    (tmp_path / "gate").touch()
    assert x.compute().sum() == 6
    assert len(set(world_for(init_mesh(2)).table().values())) == 1
    assert holders(shell_client, x) == owners(x)
