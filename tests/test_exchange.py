"""Exchanges inside this process: values, bytes, who holds the result, and what is left in the store."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import dask
import numpy as np
import plan_oracle as oracle
import pytest
from dask.delayed import Delayed
from distributed import Client, futures_of, wait

import daskmesh as dm
from daskmesh import exchange, tickets, transport
from daskmesh.dtensor import DTensor
from daskmesh.graph import local_of
from daskmesh.layout import Layout, make_layout
from daskmesh.mesh import ProcessMesh, init_mesh
from daskmesh.moves import moved
from daskmesh.placement import Partial, Placement, ReduceType, Replicate, Shard
from daskmesh.stage import Stage
from daskmesh.store import _STORES
from daskmesh.world import world_for

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("threads")]

R, S0, S1 = Replicate(), Shard(0), Shard(1)
P, MAX, MIN, PROD, AVG, ANY, ALL = map(Partial, ReduceType)
EVERY = (S0, R, P, MAX, MIN, PROD, AVG, ANY, ALL)
DTYPES = ("i8", "f8", "?", "i1", "u8", "f4", "c16")


def place(layout: Layout, terms: np.ndarray) -> DTensor:
    """A DTensor of just this layout, from the local arrays that it says."""
    x = dm.dtensor_from_local(list(oracle.cut(layout, terms).values()), layout.mesh, layout.placements)
    assert x.layout == layout
    return x


def loaded() -> int:
    return sum(road["bytes"] for road in transport.stats().values())


def check(source: Layout, target: Layout, rng: np.random.Generator) -> None:
    """One exchange without a cluster: the value, kept terms, replicas that agree, and the bytes of the plan."""
    terms = oracle.random_terms(source, rng)
    x = place(source, terms)
    y = DTensor(moved(x._node, target))
    plan = y.explain()
    transport.reset_stats()
    blocks = dask.get(y.__dask_graph__(), y.__dask_keys__())
    assert loaded() == plan.total_bytes
    for stage in plan.stages:
        check_sources(stage)
    result = oracle.joined(target, {c: local_of(b, target) for c, b in zip(target.coords(), blocks, strict=True)})
    oracle.assert_same(oracle.value(target, result), oracle.value(source, terms))
    oracle.check_kept(source, target, terms, result)


def check_sources(stage: Stage) -> None:
    """Who is read, told without listing the loads."""
    for coord in stage.target.coords():
        read = {load.coord for _, loads in stage.regions(coord) for load in loads}
        sources = list(stage.sources(coord))
        assert set(sources) == read
        assert len(sources) == len(read) == stage.reach(coord)
        rank = stage.target.mesh.rank_at(coord)
        assert [c for c in sources if stage.source.mesh.rank_at(c) == rank] == [c for c in [stage.own(coord)] if c is not None]


def sample(
    meshes: tuple[ProcessMesh, ProcessMesh], choices: Sequence[Placement], count: int, shapes: Sequence[tuple[int, ...]]
) -> Iterator[tuple[Layout, Layout]]:
    """So many pairs of layouts, all placements in all places; shapes and dtypes in turn."""
    a, b = meshes
    every = [list(itertools.product(choices, repeat=m.ndim)) for m in meshes]
    total = len(every[0]) * len(every[1])
    stride = max(1, total // count) | 1
    for i, at in enumerate(range(0, total, stride)):
        p, q = every[0][at // len(every[1])], every[1][at % len(every[1])]
        truth = any(r in (ANY, ALL) and (m >= len(p) or p[m] != r) for m, r in enumerate(q))
        dtype = "?" if truth or (p != q and any(r in (ANY, ALL) for r in q)) else DTYPES[i % len(DTYPES)]
        shape = shapes[i % len(shapes)]
        yield make_layout(a, p, shape, dtype), make_layout(b, q, shape, dtype)


SIZES = [(n,) for n in (7, 0, 1, 4, 13, 2)]
TABLES = [(5, 3), (1, 7), (0, 4), (6, 6)]


@pytest.mark.parametrize(
    ("shape", "choices", "shapes", "count"),
    [
        ((1,), EVERY, SIZES, 81),
        ((2,), EVERY, SIZES, 81),
        ((3,), EVERY, SIZES, 81),
        ((5,), EVERY, SIZES, 81),
        ((2, 2), EVERY, SIZES, 60),
        ((2, 3), (S0, S1, R, P, MAX), TABLES, 60),
        ((2, 2, 2), (S0, S1, R, P, AVG), TABLES, 40),
    ],
)
def test_pairs_of_placements_give_the_value_and_move_the_bytes_of_the_plan(
    shape: tuple[int, ...], choices: Sequence[Placement], shapes: Any, count: int
) -> None:
    mesh, rng = init_mesh(shape), np.random.default_rng(len(shapes))
    for i, (source, target) in enumerate(sample((mesh, mesh), choices, count, shapes)):
        with dask.config.set({"daskmesh.two-stage-bytes": 0 if i % 3 else 2**20}):
            check(source, target, rng)


OTHER_MESHES = [
    ([0, 1], [1, 0]),
    ([0, 1], [2, 3]),
    ([3, 1, 0, 2], [1, 2]),
    ([0, 1, 2], [7, 8, 9, 0, 2]),
    ([[0, 1], [2, 3]], [[2, 0], [3, 1]]),
    ([[0, 1, 2], [3, 4, 5]], [[9, 4], [5, 1], [0, 2]]),
    ([[0, 1], [2, 3]], [4]),
]


@pytest.mark.parametrize(("source", "target"), OTHER_MESHES)
def test_another_mesh(source: Any, target: Any) -> None:
    rng = np.random.default_rng(1)
    meshes = ProcessMesh(source), ProcessMesh(target)
    for a, b in sample(meshes, (S0, R, P, AVG), 20, SIZES):
        check(a, b, rng)


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)])
def test_no_tensor_dims(shape: tuple[int, ...]) -> None:
    rng, mesh = np.random.default_rng(2), init_mesh(shape)
    for a, b in sample((mesh, mesh), (R, P, MAX, PROD, AVG, ANY, ALL), 49, [()]):
        check(a, b, rng)


def test_part_sizes_given() -> None:
    """Uneven sources become the split rule and other given sizes; where the cut stays, uneven sizes stay."""
    rng, mesh = np.random.default_rng(3), init_mesh((2, 3), ("x", "y"))
    sizes = [(0, 7), (7, 0), (4, 3)], [(1, 0, 4), (0, 0, 5), (3, 1, 1)]
    targets: list[Any] = [([S1, S0], None), ([S0, S1], None), ([S0, S1], [(2, 5), (5, 0, 0)]), ([P, S0], None), ([], None)]
    for rows, columns in itertools.product(*sizes):
        source = make_layout(mesh, [S0, S1], (7, 5), "f8", [rows, columns])
        for placements, chunks in targets:
            check(source, make_layout(mesh, placements, (7, 5), "f8", chunks), rng)
    x = place(source, np.zeros((7, 5)))
    assert x.reshard([S0, S1]).layout == source
    assert x.reshard([S0]).layout.chunks == ((4, 3), (5,))


@pytest.mark.parametrize("dtype", ["M8[s]", "U3", "S2", [("a", "i2"), ("b", "f8")], "f2", ">i4", "O"])
def test_any_dtype_that_numpy_holds(dtype: Any) -> None:
    mesh, table = init_mesh(3, ["x"]), np.arange(20).reshape(5, 4).astype(np.dtype(dtype))
    x = dm.dtensor_from_local([table[:2], table[2:4], table[4:]], mesh, [S0]) if dtype != "O" else None
    if x is None:
        with pytest.raises(TypeError, match="objects"):
            dm.dtensor_from_local([table] * 3, mesh, [R])
        return
    for placements in ([S1], [R]):
        got = x.reshard(placements).compute()
        assert got.dtype == table.dtype
        np.testing.assert_array_equal(got, table)


def test_terms_are_folded_tile_by_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "TILE_BYTES", 50)
    rng, mesh = np.random.default_rng(4), init_mesh((2, 3), ("x", "y"))
    with dask.config.set({"daskmesh.max-inflight-bytes": 100}):
        for a, b in ([[P, S0], [S1, R]], [[P, MAX], [R, S0]], [[AVG, P], []], [[P, P], [S0, S0]]):
            check(make_layout(mesh, a, (7, 9), "i8"), make_layout(mesh, b, (7, 9), "i8"), rng)


# -- on workers


def in_store(client: Client) -> int:
    """Arrays exposed on the workers of a client; they are in this process."""
    addresses = client.scheduler_info()["workers"]
    return sum(len(store) for address, store in _STORES.items() if address in addresses)


def pins(x: DTensor, client: Client) -> None:
    """Every block is in memory on the worker of its rank, and nowhere else."""
    wait(x)
    table = world_for(x.process_mesh).table()
    want = {key: [table[r]] for key, r in zip(x.__dask_keys__(), x.process_mesh.process_ids, strict=True)}
    assert {key: list(where) for key, where in client.who_has(x).items()} == want


ROADS = [
    ([S0], [S1], (9, 7), "f8"),
    ([S0], [R], (5,), "i4"),
    ([P], [R], (4, 3), "f8"),
    ([R], [S0], (2,), "c16"),
    ([AVG], [S0], (11, 2), "i8"),
    ([S0], [MAX], (3,), "f4"),
    ([MAX], [P], (), "i8"),
    ([S0], [R], (0, 4), "?"),
]


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize(("a", "b", "shape", "dtype"), ROADS)
def test_on_workers_each_rank_gets_its_block_and_the_bytes_that_the_plan_says(
    threads: Client, size: int, a: Any, b: Any, shape: Any, dtype: str
) -> None:
    rng, mesh = np.random.default_rng(size), init_mesh(size, ["x"])
    source = make_layout(mesh, a, shape, dtype)
    terms = oracle.random_terms(source, rng)
    x = place(source, terms).persist()
    pins(x, threads)
    lazy = x.reshard(b)
    plan = lazy.explain()
    transport.reset_stats()
    y = lazy.persist()
    pins(y, threads)
    table, by_worker = world_for(mesh).table(), Counter[str]()
    for rank, n in plan.received.items():
        by_worker[table[rank]] += n
    got = {w: sum(road["bytes"] for road in transport.stats(w).values()) for w in set(table.values())}
    assert got == {w: by_worker[w] for w in got}
    oracle.assert_same(y.compute(), oracle.value(source, terms))


def extra_tasks(x: DTensor, y: DTensor) -> int:
    """Tasks that computing all of `y` adds to those of `x`, as Dask would submit them."""
    before, after = (dask.optimize(z)[0].__dask_graph__() for z in (x, y))
    return len(set(after) - set(before))


@pytest.mark.parametrize(
    ("mesh_shape", "a", "b", "two_stage", "most"),
    [
        ((4,), [S0], [S1], 0, 2),
        ((4,), [R], [S0], 0, 2),
        ((2, 3), [S0, S1], [S1, S0], 0, 2),
        ((3,), [P], [S0], 0, 2),
        ((3,), [P], [R], 2**20, 2),
        ((3,), [P], [R], 0, 4),
        ((3,), [S0], [P], 0, 2),
    ],
)
def test_tasks_on_top_of_the_step_before(mesh_shape: Any, a: Any, b: Any, two_stage: int, most: int) -> None:
    mesh = init_mesh(mesh_shape)
    x = dm.ones((12, 12), mesh=mesh, placements=a)
    with dask.config.set({"daskmesh.two-stage-bytes": two_stage}):
        y = x.reshard(b)
    assert extra_tasks(x, y) <= most * mesh.size


def test_two_stages_move_less_and_say_so() -> None:
    mesh, n = init_mesh(4, ["x"]), 16 * 8
    x = dm.ones(16, mesh=mesh, placements=[P])
    one = x.reshard([R]).explain()
    with dask.config.set({"daskmesh.two-stage-bytes": 0}):
        two = x.reshard([R]).explain()
    assert (len(one.stages), one.total_bytes) == (1, 4 * 3 * n)
    assert (len(two.stages), two.total_bytes) == (2, 2 * 3 * n)
    assert "reduce-scatter, then all-gather" in two.text


def test_moving_to_the_same_layout_is_the_array_itself() -> None:
    mesh = init_mesh((2, 2), ("x", "y"))
    x = dm.ones((4, 4), mesh=mesh, placements=[S0, P])
    y = x.reshard({"x": Shard(-2), "y": Partial("sum")})
    assert (y.name, y.explain().total_bytes, y.explain().stages) == (x.name, 0, ())


def test_other_names_move_nothing(threads: Client) -> None:
    x = dm.ones((4, 4), mesh=init_mesh((2, 2), ("x", "y")), placements=[S0, S1]).persist()
    y = x.reshard([S0, S1], init_mesh((2, 2), ("dp", "tp")))
    assert y.process_mesh.dim_names == ("dp", "tp")
    assert (y.name, y.explain().total_bytes) == (x.name, 0)
    assert (y + 1).compute().sum() == 32


def test_exchanges_of_one_array_share_what_it_exposes() -> None:
    x = dm.ones((4, 4), mesh=init_mesh(2), placements=[S0])
    ys = [x.reshard([S1]), x.reshard([R]), x.reshard([P])]
    exposed = {k for y in ys for k in y.__dask_graph__() if str(k[0]).startswith("expose-")}
    assert len(exposed) == 2


def test_a_chain_is_explained_exchange_by_exchange() -> None:
    x = dm.ones((4, 4), mesh=init_mesh(2), placements=[S0])
    y = (x.reshard([S1]) * 2).reshard([R])
    plan = y.explain()
    assert [s.total_bytes for s in plan.stages] == [64, 128]
    assert (plan.total_bytes, plan.received, plan.pairs) == (192, {0: 96, 1: 96}, {(0, 1): 96, (1, 0): 96})
    assert plan.source == x.layout


# -- what is left in the store: nothing


GATE = threading.Event()


def slow_on_the_last(box: tuple[slice, ...]) -> np.ndarray:
    """Waits at the gate where the box is the last one."""
    if box[0].stop == 6:
        GATE.wait(30)
    return np.ones(box[0].stop - box[0].start)


def fails_on_the_last(box: tuple[slice, ...]) -> np.ndarray:
    if box[0].stop == 6:
        raise ZeroDivisionError("on the last rank")
    return np.ones(box[0].stop - box[0].start)


def half_done(eventually: Callable[..., Any], client: Client, fn: Any = slow_on_the_last) -> DTensor:
    """An exchange with two tickets made and one held back at the gate."""
    GATE.clear()
    y = dm.from_callback(6, float, init_mesh(3), [S0], fn).reshard([R])
    y = client.persist(y)
    eventually(lambda: in_store(client) == 2)
    return y


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tickets of held arrays are kept for a moment only."""
    monkeypatch.setattr(tickets, "KEEP_SECONDS", 0.01)


@pytest.mark.usefixtures("briefly")
def test_nothing_stays_exposed_when_done(threads: Client, eventually: Callable[..., Any]) -> None:
    x = dm.ones((6, 6), mesh=init_mesh(3), placements=[S0]).persist()
    y = x.reshard([S1]).persist()
    wait(y)
    eventually(lambda: in_store(threads) == 0)
    assert dask.delayed(np.sum)(x.reshard([R])).compute() == 36
    eventually(lambda: in_store(threads) == 0)


def ids_in_stores() -> set[int]:
    return {ticket for store in _STORES.values() for ticket in store._entries}


def test_a_held_array_is_exposed_once_for_exchanges_that_follow_each_other(
    threads: Client, eventually: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tickets, "KEEP_SECONDS", 3600)
    x = dm.arange(36, mesh=init_mesh(3), placements=[S0]).reshape(6, 6).persist()
    a = x.reshard([S1]).persist()
    wait(a)
    assert in_store(threads) == 3
    exposed = ids_in_stores()
    b = (x * 1).reshard([R]).persist()  # of another array, which nobody holds: gone with the exchange
    wait(b)
    eventually(lambda: in_store(threads) == 3)
    c = x.reshard([R]).persist()
    wait(c)
    assert ids_in_stores() == exposed
    np.testing.assert_array_equal(c.compute(), np.arange(36).reshape(6, 6))
    del x
    eventually(lambda: in_store(threads) == 0)
    assert not threads.run_on_scheduler(lambda dask_scheduler: [c for c in dask_scheduler.clients if "daskmesh" in c])


def test_nothing_stays_exposed_when_a_rank_fails(threads: Client, eventually: Callable[..., Any]) -> None:
    y = dm.from_callback(6, float, init_mesh(3), [S0], fails_on_the_last).reshard([R])
    with pytest.raises(ZeroDivisionError, match="on the last rank"):
        y.compute()
    eventually(lambda: in_store(threads) == 0)


def test_nothing_stays_exposed_when_cancelled(threads: Client, eventually: Callable[..., Any]) -> None:
    y = half_done(eventually, threads)
    threads.cancel(futures_of(y))
    GATE.set()
    eventually(lambda: in_store(threads) == 0)


def test_nothing_stays_exposed_when_forgotten(threads: Client, eventually: Callable[..., Any]) -> None:
    y = half_done(eventually, threads)
    del y
    GATE.set()
    eventually(lambda: in_store(threads) == 0)


def test_nothing_stays_exposed_when_the_client_is_gone(
    thread_cluster: Any, threads: Client, eventually: Callable[..., Any]
) -> None:
    with Client(thread_cluster, set_as_default=False) as other:
        half_done(eventually, other)
    GATE.set()
    eventually(lambda: in_store(threads) == 0)


@pytest.mark.usefixtures("briefly")
def test_a_void_ticket_is_made_anew_though_no_worker_was_lost(threads: Client, eventually: Callable[..., Any]) -> None:
    x = dm.arange(6, mesh=init_mesh(3), placements=[S0]).persist()
    y = x.reshard([R])
    graph = y.__dask_graph__()
    name = next(k[0] for k in graph if str(k[0]).startswith("expose-"))
    tickets = [Delayed((name, i), graph, layer=name).persist() for i in range(3)]
    wait(tickets)
    for store in _STORES.values():
        store.clear()
    np.testing.assert_array_equal(y.compute(), np.arange(6))
    del tickets
    eventually(lambda: in_store(threads) == 0)
