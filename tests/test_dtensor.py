"""DTensor: a Dask collection in every respect, and a value."""

from __future__ import annotations

import asyncio
import functools
import pickle
import subprocess
import sys
import uuid
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from conftest import child_environment
from dask.graph_manipulation import bind, checkpoint, clone, wait_on
from distributed import Client, LocalCluster, as_completed, futures_of, progress, wait

import daskmesh as dm
from daskmesh import transport
from daskmesh.dtensor import DTensor
from daskmesh.mesh import ProcessMesh, init_mesh
from daskmesh.placement import Partial, PlacementError, Replicate, Shard
from daskmesh.tasks import RankTask
from daskmesh.world import world_for

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("threads")]

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
MESH = init_mesh((2, 3), ("x", "y"))
TABLE = np.arange(35.0).reshape(5, 7)


def rows() -> DTensor:
    """Rows over "x", replicated over "y"."""
    return dm.shard_tensor(TABLE, MESH, [S0])


def same(x: DTensor, value: Any = TABLE) -> None:
    got = x.compute()
    assert type(got) is np.ndarray
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got, value)


# -- the collection protocol


def test_large_terms_are_folded_where_they_are_held(threads: Client) -> None:
    n, mesh = 2**18, init_mesh((2, 2), ("x", "y"))
    x = dm.full(n, 3.0, mesh=mesh, placements=[P, Partial("max")]).persist()
    wait(x)
    transport.reset_stats()
    assert (x.compute() == 3).all()
    assert sum(road["bytes"] for road in transport.stats().values()) == 3 * x.nbytes
    transport.reset_stats()
    assert (x.compute(scheduler=None, optimize_graph=False) == 3).all()
    for ask in (lambda: dask.compute(da.ones(2), x)[1], lambda: threads.compute(x).result()):
        transport.reset_stats()
        assert (ask() == 3).all()
    same(dm.full(5, 3.0, mesh=mesh, placements=[P]), np.full(5, 3.0))
    assert sum(road["bytes"] for road in transport.stats().values()) == 3 * x.nbytes


def test_it_is_a_dask_collection() -> None:
    x = rows()
    assert dask.is_dask_collection(x)
    assert len(x.__dask_keys__()) == MESH.size
    assert set(x.__dask_keys__()) <= set(x.__dask_graph__())
    assert x.__dask_layers__() == (x.name,)
    assert x.dask.layers.keys() == x.__dask_graph__().layers.keys()
    assert dask.tokenize.tokenize(x) == dask.tokenize.tokenize(rows())
    assert dask.tokenize.tokenize(x) != dask.tokenize.tokenize(x + 1)
    assert (x + 1).name == (rows() + 1).name


@pytest.mark.parametrize("scheduler", ["sync", "threads", None])
@pytest.mark.parametrize("optimize_graph", [True, False])
def test_compute_and_persist_under_any_scheduler(scheduler: Any, optimize_graph: bool) -> None:
    how = {"scheduler": scheduler, "optimize_graph": optimize_graph}
    x = (rows() * 2 + 1).reshard([S1, R])
    np.testing.assert_array_equal(x.compute(**how), TABLE * 2 + 1)
    held = x.persist(**how)
    assert isinstance(held, DTensor)
    assert (held.layout, held.name) == (x.layout, x.name)
    np.testing.assert_array_equal((held + 1).compute(**how), TABLE * 2 + 2)
    (done,) = dask.compute(held - 1, **how)
    np.testing.assert_array_equal(done, TABLE * 2)


def test_results_come_in_the_order_of_the_arguments() -> None:
    a, x = da.arange(4, chunks=2), rows()
    got = dask.compute(a, x, a + 1, x.reshard([S1]) + 1, {"k": [x, a]})
    np.testing.assert_array_equal(got[0], np.arange(4))
    np.testing.assert_array_equal(got[1], TABLE)
    np.testing.assert_array_equal(got[2], np.arange(4) + 1)
    np.testing.assert_array_equal(got[3], TABLE + 1)
    np.testing.assert_array_equal(got[4]["k"][0], TABLE)
    first, second, third = dask.persist(a, x, a + 2)
    same(second)
    np.testing.assert_array_equal(third.compute() - first.compute(), [2, 2, 2, 2])


RAN: list[int] = []


def noted(turn: str, rank: int) -> np.ndarray:
    RAN.append(rank)
    return np.arange(3)


@pytest.mark.parametrize(
    ("ask", "ranks"),
    [
        (lambda x, client: x.compute().tolist(), [0, 3]),
        (lambda x, client: dask.compute(x, da.ones(2))[0].tolist(), [0, 3]),
        (lambda x, client: client.compute(x).result().tolist(), [0, 3]),
        (lambda x, client: x.persist().compute().tolist(), [0, 1, 2, 3, 4, 5]),
        (lambda x, client: dask.persist(x)[0].compute().tolist(), [0, 1, 2, 3, 4, 5]),
        (lambda x, client: x.compute(scheduler="sync").tolist(), [0, 3]),
    ],
)
def test_compute_fetches_one_replica_and_persist_holds_all(threads: Client, ask: Any, ranks: list[int]) -> None:
    """The function runs on the ranks of one replica, each once; on all ranks where all are held."""
    # A function that no other turn has: its keys may still be held from there.
    x = dm.dtensor_from_local(functools.partial(noted, uuid.uuid4().hex), MESH, [S0, R], shape=((6,), int))
    RAN.clear()
    assert ask(x, threads) == [0, 1, 2] * 2
    assert sorted(RAN) == ranks


def test_a_client_computes_gathers_and_waits(threads: Client, capsys: pytest.CaptureFixture[str]) -> None:
    x = rows()
    np.testing.assert_array_equal(threads.compute(x, sync=True), TABLE)
    future, other = threads.compute([x, x + 1])
    np.testing.assert_array_equal(threads.gather(other), TABLE + 1)
    np.testing.assert_array_equal(future.result(), TABLE)
    held = threads.persist(x)
    assert wait(held).done == set(futures_of(held))
    progress(held, notebook=False)
    assert "100%" in capsys.readouterr().out
    assert {f.key for f in as_completed(futures_of(held))} == set(x.__dask_keys__())
    assert len(futures_of(held)) == 6
    assert futures_of(x) == []
    one, two = threads.persist([x, x * 2])
    same(one)
    same(two, 2 * TABLE)


def test_optimize_keeps_the_collection_and_the_ranks() -> None:
    x = rows() + 1
    (y,) = dask.optimize(x.reshard([S1]))
    assert isinstance(y, DTensor)
    same(y, TABLE + 1)
    tasks = list(y.__dask_graph__().values())
    assert all(isinstance(t, RankTask) for t in tasks)


def test_delayed_takes_the_global_value() -> None:
    assert dask.delayed(np.sum)(rows()).compute() == TABLE.sum()
    assert dask.delayed(lambda pair: pair["a"].shape)({"a": rows()}).compute() == (5, 7)


def test_graph_manipulation() -> None:
    x = rows() + 1
    other = clone(x)
    assert set(other.__dask_keys__()).isdisjoint(x.__dask_keys__())
    same(other, TABLE + 1)
    same(clone(x.reshard([S1])), TABLE + 1)
    same(wait_on(x), TABLE + 1)
    same(bind(x, rows()), TABLE + 1)
    assert checkpoint(x).compute() is None
    assert {t.rank for t in other.__dask_graph__().values()} == set(range(6))


def test_pickle_and_copy() -> None:
    lazy = (rows() + 1).reshard([S1])
    same(pickle.loads(pickle.dumps(lazy)), TABLE + 1)
    back = pickle.loads(pickle.dumps(lazy))
    assert (back.layout, back.name) == (lazy.layout, lazy.name)
    held = lazy.persist()
    same(pickle.loads(pickle.dumps(held)) + 1, TABLE + 2)


def test_a_long_chain_is_one_task_per_rank_and_no_recursion() -> None:
    x = rows()
    for _ in range(2000):
        x = x + 1
    assert len(x.__dask_graph__()) <= 2 * MESH.size + 5 * MESH.size
    same(x, TABLE + 2000)
    assert len(pickle.dumps(x)) < 10**6


def test_visualize(tmp_path: Any) -> None:
    pytest.importorskip("graphviz", reason="dask draws graphs with graphviz")
    graph = rows().visualize(filename=None)
    assert "shard-tensor" in graph.source


def test_blocks_and_to_dask() -> None:
    x = dm.shard_tensor(np.arange(10.0).reshape(5, 2), MESH, [S0, P])
    assert x.blocks.chunks == ((1, 1, 1), (3, 2), (2, 2)[:1])
    assert x.blocks.name == x.name
    assert x.blocks[0].compute().sum() == 45
    assert x.blocks.sum().compute() == 45
    np.testing.assert_array_equal(x.to_dask().compute(), np.arange(10.0).reshape(5, 2))
    sparse = dm.arange(5, mesh=init_mesh(4), placements=[S0])
    assert sparse.to_dask().chunks == ((2, 2, 1),)
    assert sparse.to_dask().argmax().compute() == 4
    nothing = dm.zeros((0, 3), mesh=init_mesh(4), placements=[S0]).to_dask()
    assert (nothing.chunks, nothing.compute().shape) == (((0,), (3,)), (0, 3))
    assert dm.full((), 3, mesh=MESH).to_dask().compute() == 3
    total = (x.to_dask() + x.to_dask().mean(axis=0)).sum()
    assert total.compute() == 90


def test_local_value_is_asked_by_rank_number() -> None:
    mesh = ProcessMesh([4, 2])
    x = dm.arange(5, mesh=mesh, placements=[S0])
    assert (x.local_value(4).tolist(), x.local_value(2).tolist()) == ([0, 1, 2], [3, 4])
    assert x._local_value(2).tolist() == [3, 4]
    with pytest.raises(ValueError, match=r"rank 1 .*\[4, 2\]|1.*not.*mesh"):
        x.local_value(1)
    local = x.persist().local_value(4)
    local[:] = 9
    assert x.local_value(4).tolist() == [0, 1, 2]


# -- values


def test_attributes() -> None:
    x = dm.zeros((5, 7), "f4", mesh=MESH, placements={"y": Shard(-1)})
    assert (x.shape, x.dtype, x.ndim, x.size, x.nbytes) == ((5, 7), np.dtype("f4"), 2, 35, 140)
    assert (x.process_mesh, x.placements) == (MESH, (R, S1))
    assert (np.shape(x), np.ndim(x), np.size(x), np.size(x, 1), len(x)) == ((5, 7), 2, 35, 7, 5)
    assert x.layout.chunks == ((5,), (3, 3, 1))
    with pytest.raises(TypeError, match=r"0-d.*item"):
        len(dm.full((), 1, mesh=MESH))


def test_the_result_is_the_callers_own() -> None:
    held = rows().persist()
    for get in (DTensor.compute, np.asarray, np.array, dm.unshard_dtensor):
        value = get(held)
        assert value.flags.writeable
        value[:] = -1
    same(held)
    assert np.asarray(held, dtype="f4").dtype == np.float32
    with pytest.raises(ValueError, match="copy"):
        np.asarray(held, copy=False)


def test_scalars() -> None:
    x = dm.full((), 7, mesh=MESH, placements=[P])
    assert (x.item(), int(x), float(x), complex(x), bool(x), x.tolist()) == (7, 7, 7.0, 7 + 0j, True, 7)
    assert [0, 1, 2, 3, 4, 5, 6, 7][x] == 7
    assert (str(x), f"{x:03d}", f"{dm.full((), 2.5, mesh=MESH):.2f}") == ("7", "007", "2.50")
    assert repr(x).startswith("DTensor(shape=(), dtype=int64, placements=[Partial('sum'), Replicate()]")
    one = dm.full((1, 1), 2.5, mesh=MESH)
    assert (one.item(), bool(one), one.tolist()) == (2.5, True, [[2.5]])
    assert str(one) == repr(one) == f"{one}"
    with pytest.raises(ValueError, match=r"one element.*\(5, 7\)"):
        rows().item()
    with pytest.raises(ValueError, match=r"ambiguous.*np\.any"):
        bool(rows())
    for kind in (int, float, complex):  # as NumPy has it
        with pytest.raises(TypeError, match=rf"^{kind.__name__}\(x\).*one number.*\(5, 7\)"):
            kind(rows())
    with pytest.raises(TypeError, match="index"):
        [1][dm.full((), 0.5, mesh=MESH)]
    assert not dm.full((), 0, mesh=MESH)


def test_repr_is_the_layout_and_computes_nothing() -> None:
    assert repr(rows()) == f"DTensor(shape=(5, 7), dtype=float64, placements=[Shard(0), Replicate()], mesh={MESH!r})"
    html = rows()._repr_html_()
    assert "svg" in html
    assert "0:3" in html


def test_in_place_operators_rebind_the_handle() -> None:
    x = rows()
    before, alias = x + 0, x
    x += 1
    x *= 2
    assert alias is x
    same(x, (TABLE + 1) * 2)
    same(before)
    assert x.placements == (S0, R)
    x -= dm.shard_tensor(TABLE, MESH, [S1, S0])
    assert (x.placements, x.shape) == ((S0, R), (5, 7))
    n = dm.arange(3, mesh=MESH)
    with pytest.raises(TypeError, match=r"float64.*int64.*astype"):
        n += 0.5
    with pytest.raises(ValueError, match="shape"):
        n += np.ones((2, 3), int)
    small = dm.ones(3, "f4", mesh=MESH)
    small += np.float64(1)
    assert small.dtype == np.float32


def test_what_is_not_in_the_table_is_a_type_error_that_names_it() -> None:
    x = rows()
    with pytest.raises(TypeError, match=r"numpy.*scimath\.sqrt is not defined on DTensors"):
        np.emath.sqrt(x)
    with pytest.raises(TypeError, match=r"out="):
        np.add(x, x, out=np.zeros((5, 7)))
    with pytest.raises(TypeError, match=r"np\.add\.at"):
        np.add.at(x, [0], 1)


def test_reshard_says_what_is_wrong() -> None:
    x = rows()
    with pytest.raises(PlacementError, match=r"'z'.*'x', 'y'|'x'.*'y'"):
        x.reshard({"z": S0})
    with pytest.raises(PlacementError, match=r"3 placements"):
        x.reshard([S0, S0, S0])
    with pytest.raises(PlacementError, match=r"Shard\(2\).*out of range"):
        x.reshard([Shard(2)])
    with pytest.raises(TypeError, match=r"x != 0"):
        x.reshard([Partial("any")])
    with pytest.raises(TypeError, match=r"shard_tensor"):
        dm.reshard(TABLE, MESH, [S0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ProcessMesh"):
        x.reshard([S0], mesh=[0, 1])  # type: ignore[arg-type]


# -- other clients


def test_an_asynchronous_client_is_told_what_to_write(thread_cluster: LocalCluster) -> None:
    x = rows()

    async def ask() -> None:
        async with Client(thread_cluster.scheduler_address, asynchronous=True) as client:
            for call in (x.compute, x.persist, x.tolist, lambda: np.asarray(x), lambda: x.local_value(0)):
                with pytest.raises(TypeError, match=r"await client\.persist\(x\)|await client\.compute\(x\)"):
                    call()
            held = await client.persist(x)
            np.testing.assert_array_equal(await client.compute(held), TABLE)

    asyncio.run(ask())


def test_a_world_of_another_client_is_refused(thread_cluster: LocalCluster) -> None:
    x = rows()
    with Client(thread_cluster):
        same(x)
        other = dm.ones((5, 7), mesh=MESH)
        with pytest.raises(ValueError, match=r"world.*shard_tensor\(x\.to_dask\(\)"):
            x + other
        with pytest.raises(ValueError, match=r"world.*shard_tensor\(x\.to_dask\(\)"):
            x.reshard([S0], init_mesh(2))
        same(dm.shard_tensor(x.to_dask(), MESH, [S1]) + other, TABLE + 1)


READER = """
import sys, numpy as np, daskmesh as dm
from distributed import Client, wait
if __name__ == "__main__":
    with Client(sys.argv[1]) as client:
        x = client.get_dataset("table")
        y = (x + 1).reshard([dm.Shard(1)]).persist()
        wait(y)
        homes = [[client.who_has(z)[k] for k in z.__dask_keys__()] for z in (x, y)]
        assert homes[0] == homes[1] and {len(h) for h in homes[0]} == {1}, homes
        assert y.compute().tolist() == (np.arange(35.0).reshape(5, 7) + 1).tolist()
        own = dm.ones(4, mesh=dm.init_mesh(2), placements=[dm.Shard(0)])
        assert own.compute().sum() == 4
        print(len(homes[0]))
"""


@pytest.mark.processes
def test_a_published_dtensor_is_read_with_its_pins_by_a_second_process(processes: Client, tmp_path: Any) -> None:
    x = dm.shard_tensor(TABLE, init_mesh(3, ["x"]), [S0]).persist()
    wait(x)
    processes.publish_dataset(table=x)
    (tmp_path / "reader.py").write_text(READER)
    try:
        command = [sys.executable, str(tmp_path / "reader.py"), processes.scheduler.address]
        run = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=60)
        assert (run.returncode, run.stdout) == (0, "3\n"), run.stderr
    finally:
        processes.unpublish_dataset("table")
    where = world_for(x.process_mesh).table()
    assert [list(processes.who_has(x)[k]) for k in x.__dask_keys__()] == [[where[r]] for r in range(3)]
