"""Recording and lowering: what a graph holds, what is shared, and the evaluation of long elementwise runs in tiles."""

from __future__ import annotations

import tracemalloc
from typing import Any

import dask
import numpy as np
import ops_oracle as oracle
import pytest
from distributed import Client, wait

import daskmesh as dm
from daskmesh import tiles
from daskmesh.dtensor import DTensor
from daskmesh.placement import Partial, Replicate, Shard
from daskmesh.tiles import Slot, Step, run_steps

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("threads")]

R, S0, S1 = Replicate(), Shard(0), Shard(1)
LINE, THREE, SQUARE, _ = oracle.MESHES


def layers(x: DTensor) -> list[tuple[str, int]]:
    """Names of the layers and their numbers of tasks."""
    return sorted((name.rsplit("-", 1)[0], len(layer)) for name, layer in x.dask.layers.items())


# -- lowering ---------------------------------------------------------------------------------------------------------


def test_a_run_of_operations_is_one_task_per_rank() -> None:
    x = dm.zeros((6, 4), mesh=THREE, placements=[S0])
    y = np.sqrt(x + 1) * 2 - np.sin(x)
    z = np.sum(y, axis=1) + 3
    assert layers(z) == [("add", 3), ("zeros", 3)]


def test_a_shared_step_is_evaluated_once_in_a_program() -> None:
    x = dm.ones(6, mesh=THREE, placements=[S0])
    y = x + 1
    program = (y * y)._node.layer
    (task, *_) = program.tasks.values()
    assert len(task.args[0].steps) == 2


def test_one_exchange_costs_two_tasks_per_rank() -> None:
    x, y = dm.zeros((4, 4), mesh=LINE, placements=[S0]), dm.ones((4, 4), mesh=LINE, placements=[S1])
    z = (x + y) * 2
    assert layers(z) == [("expose-ones", 2), ("multiply", 2), ("ones", 2), ("reshard", 2), ("zeros", 2)]


def test_both_results_of_a_ufunc_come_from_one_call() -> None:
    x = dm.shard_tensor(np.arange(6.0), THREE, [S0])
    whole, rest = np.divmod(x, 4)
    both = whole * 4 + rest
    (task, *_) = both._node.layer.tasks.values()
    assert [s.func for s in task.args[0].steps].count(np.divmod) == 1
    oracle.same(both, np.arange(6.0))
    oracle.same(np.frexp(x)[1], np.frexp(np.arange(6.0))[1])


def test_two_records_of_one_expression_share_their_tasks() -> None:
    x = dm.zeros((4, 4), mesh=LINE, placements=[S0])
    a, b = (x + 1).reshard([S1]), (x + 1).reshard([S1])
    assert a.name == b.name
    assert (a + b).explain().total_bytes == a.explain().total_bytes


def test_explaining_one_move_lowers_nothing() -> None:
    x = dm.zeros((4, 4), mesh=LINE, placements=[S0]).reshard([S1])
    assert x.explain().total_bytes == 64
    assert x._node._layer is None


def test_long_chains_do_not_recurse() -> None:
    x = dm.zeros(3, mesh=THREE, placements=[S0])
    for _ in range(3000):
        x = x + 1
    oracle.same(x, np.full(3, 3000.0))


def test_operations_on_operands_of_two_layouts_say_why_they_move() -> None:
    x, y = dm.zeros((4, 4), mesh=LINE, placements=[S0]), dm.ones((4, 4), mesh=LINE, placements=[S1])
    plan = (x + y).explain()
    assert plan.total_bytes == 64
    assert "cut along output dim 0" in plan.reason
    assert "operand 1" in plan.reason


def test_large_plain_operands_do_not_travel_in_the_program() -> None:
    big = np.arange(20000.0)
    x = dm.zeros(20000, mesh=LINE, placements=[S0])
    for y, want in ((x + big, big), (x.reshard([R]) + big, big)):
        (task, *_) = y._node.layer.tasks.values()
        assert all(np.size(a) < 20000 for step in task.args[0].steps for a in step.args if not isinstance(a, Slot))
        oracle.same(y.compute(scheduler="sync"), want)


def test_a_scalar_stays_weak_as_a_term() -> None:
    x = dm.dtensor_from_local([np.ones(2, "f4")] * 2, LINE, [Partial()])
    for y in (x + 2, 2.5 + x, x - 1):
        assert y.placements == (Partial(),)
        assert y.dtype == np.float32
        oracle.value(y)


@pytest.mark.processes
def test_ranks_stay_where_they_are(processes: Client) -> None:
    """Every block of a result is on the worker of its rank."""
    x = dm.zeros((8, 4), mesh=dm.init_mesh(4, ["x"]), placements=[S0])
    y = ((x + 1) @ np.ones((4, 2))).persist()
    z = np.sqrt(y).persist()
    wait([y, z])
    homes = [[processes.who_has(v)[key] for key in v.__dask_keys__()] for v in (y, z)]
    assert homes[0] == homes[1]


# -- tiles ------------------------------------------------------------------------------------------------------------


def plain(steps: list[Step], slots: list[Any]) -> Any:
    for step in steps:
        args = [slots[a.index] if isinstance(a, Slot) else a for a in step.args]
        slots.append(step.func(*args, **(step.kwargs or {})))
    return slots[-1]


def chain(shape: tuple[int, ...], order: str = "C") -> tuple[list[Step], list[Any]]:
    """Eight steps over an array, a row, a column and a scalar; a value that is read twice; a function that returns a view."""
    rng = np.random.default_rng(0)
    x = np.asarray(rng.random(shape), order=order)
    row, column = rng.random(shape[-1]), rng.random((*shape[:-1], 1)).astype("f4")
    s = [Slot(i) for i in range(12)]
    steps = [
        Step(np.add, (s[0], s[1]), None, False), Step(np.multiply, (s[3], s[2]), None, False, (3,)),
        Step(np.sin, (s[4],), None, False, (4,)), Step(np.real, (s[5],), None, False),
        Step(np.square, (s[5],), None, False, (5,)),
        Step(np.add, (s[7], s[6]), None, False, (6, 7)), Step(np.where, (np.array(True), s[8], 2), None, False, (8,)),
        Step(np.multiply, (s[9], np.float64(3)), {"dtype": np.dtype("f8"), "casting": "same_kind"}, False, (9,)),
        Step(np.sqrt, (s[10],), None, False),
    ]  # fmt: skip
    return steps, [x, row, column]


@pytest.mark.parametrize("shape", [(300, 400), (3, 5, 20000), (70000, 1), (1, 70001), (2, 3, 5, 3000)], ids=str)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_tiles_give_the_same_bits(shape: tuple[int, ...], order: str) -> None:
    steps, slots = chain(shape, order)
    want = plain(*chain(shape, order))
    run_steps(steps, slots, (0,))
    np.testing.assert_array_equal(slots[-1], want)
    assert slots[-1].dtype == want.dtype
    assert slots[9] is None  # read in the run alone
    np.testing.assert_array_equal(np.sqrt(slots[10]), want)  # read after it


def test_a_run_starts_and_ends_where_shapes_change() -> None:
    rng = np.random.default_rng(0)
    x, row = rng.random((400, 300)), rng.random(300)
    s = [Slot(i) for i in range(9)]
    steps = [
        Step(np.negative, (s[1],), None, False, (1,)), Step(np.exp, (s[2],), None, False, (2,)),
        Step(np.add, (s[0], s[3]), None, False),
        Step(np.multiply, (s[4], 2), None, False, (4,)), Step(np.sum, (s[5],), {"axis": 0}, False, (5,)),
        Step(np.add, (s[6], s[3]), None, False, (3, 6)),
    ]  # fmt: skip
    slots = [x, row]
    run_steps(steps, slots, (0,))
    np.testing.assert_array_equal(slots[-1], ((x + np.exp(-row)) * 2).sum(axis=0) + np.exp(-row))
    assert [i for i, v in enumerate(slots) if v is not None] == [0, 7]


def test_a_chain_allocates_no_temporaries_of_its_size() -> None:
    """Eight ufuncs on 8 MB: the result and some tiles."""
    a = np.ones((1000, 1000))
    x = dm.shard_tensor(a, dm.init_mesh(1, ["x"]), [S0]).persist(scheduler="sync")
    y = np.sqrt(np.abs(((x * 2 + 1) ** 2 - x) * 3 + np.arange(1000.0)) + 1)
    graph, keys = y.__dask_graph__(), y.__dask_keys__()
    tracemalloc.start()
    try:
        (block,) = dask.get(graph, keys)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(block, np.sqrt(np.abs(((a * 2 + 1) ** 2 - a) * 3 + np.arange(1000.0)) + 1))
    assert peak < 1.25 * a.nbytes


@pytest.mark.parametrize("shape", [(1, 1), (7,), (5, 1, 3), (40000,), (3, 70000), (129, 127, 3)])
@pytest.mark.parametrize("forwards", [True, False])
def test_tiles_cover_every_element_once(shape: tuple[int, ...], forwards: bool) -> None:
    seen = np.zeros(shape, int)
    order = list(range(len(shape)))
    for tile in tiles._tiles(shape, order if forwards else order[::-1]):
        seen[tile] += 1
        assert seen[tile].size <= tiles.TILE_ELEMENTS
    assert (seen == 1).all()


# -- values that several programs read --------------------------------------------------------------------------------


def test_what_costs_more_than_memory_is_computed_once() -> None:
    x = dm.shard_tensor(np.arange(12.0).reshape(4, 3), LINE, [S0])
    product = x @ np.ones((3, 3))
    z = product - product.mean(axis=0)
    assert [name for name, _ in layers(z)].count("matmul") == 1
    assert len(layers(z)) == 6  # data, product, mean, expose, reshard, difference
    oracle.same(z.compute(scheduler="sync"), (lambda v: v - v.mean(axis=0))(np.arange(12.0).reshape(4, 3) @ np.ones((3, 3))))
    wave = np.exp(x) + 1
    z = (wave - wave.mean(axis=0)) / wave.std(axis=0) + wave.max(axis=0)
    assert [name for name, _ in layers(z)].count("add") == 2  # wave and the result


def test_what_is_light_is_computed_by_each_reader() -> None:
    x = dm.shard_tensor(np.arange(12.0).reshape(4, 3), LINE, [S0])
    y = x + 1
    assert [name for name, _ in layers(y - y.mean(axis=0))].count("add") == 0


def test_one_program_needs_no_boundary() -> None:
    x = dm.shard_tensor(np.arange(12.0).reshape(4, 3), LINE, [S0])
    e = np.exp(x)
    assert len(layers(e / e.sum(axis=1, keepdims=True))) == 2


def test_many_exchanges_do_not_recurse() -> None:
    x = dm.zeros(4, mesh=LINE, placements=[S0])
    for i in range(600):
        x = x.reshard([R] if i % 2 else [S0]) + 1
    assert len(x.dask.layers) > 900
