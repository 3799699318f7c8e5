"""What `explain()` says of whole chains of operations is what their loads move, for all blocks and for one replica."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import dask
import numpy as np
import ops_oracle as oracle
import pytest
from dask.graph_manipulation import clone
from distributed import wait
from hypothesis import given
from hypothesis import strategies as st
from ops_oracle import Case

import daskmesh as dm
from daskmesh import collectives, exchange, transport
from daskmesh.dtensor import DTensor
from daskmesh.graph import local_of
from daskmesh.mesh import ProcessMesh
from daskmesh.moves import moved
from daskmesh.placement import Partial, Placement, Replicate, Shard
from daskmesh.plan import Stage
from daskmesh.summa import Streamed

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("threads")]

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
LINE, THREE, SQUARE, ODD = oracle.MESHES
FIRST = ProcessMesh([0], ["f"])  # reading there alone leaves out what the others would make
Draw = Callable[[Any], Any]


class Step(NamedTuple):
    """A function of an array, NumPy's or sharded, and of further operands."""

    func: Callable[..., Any]
    operands: tuple[Case, ...] = ()


def loaded(graph: Any, keys: Any) -> int:
    """Bytes that ranks load of one another when these blocks are made, all ranks in this thread."""
    transport.reset_stats()
    dask.get(graph, keys)
    return sum(road["bytes"] for road in transport.stats().values())


def both(x: DTensor, want: Any = None) -> tuple[int, int]:
    """The bytes that all blocks take, and one replica; `explain` must say them."""
    if want is not None:
        oracle.same(x, want)
    expr = x.expr.finalize_compute()
    graph, keys = dict(expr.__dask_graph__()), expr.__dask_keys__()
    found = loaded(x.__dask_graph__(), x.__dask_keys__()), loaded(graph, keys)
    every, one = x.explain(), x.explain("compute")
    assert (every.total_bytes, one.total_bytes) == found, f"{every}\n{one}"
    for plan in (every, one):
        assert sum(plan.received.values()) == sum(plan.pairs.values()) == plan.total_bytes
    return found


# -- chains -----------------------------------------------------------------------------------------------------------


def another(draw: Draw, like: Case, shape: tuple[int, ...] | None = None) -> Case:
    return draw(oracle.cases(like.x.process_mesh, like.a.shape if shape is None else shape, ["i8"]))


def reshard(draw: Draw, c: Case) -> Step:
    target = draw(oracle.layouts_of(c.x.process_mesh, c.a.shape, c.x.dtype))
    return Step(lambda x: DTensor(moved(x._node, target)) if isinstance(x, DTensor) else x)


def to_other_ranks(draw: Draw, c: Case) -> Step:
    mesh = c.x.process_mesh
    ranks = draw(st.lists(st.sampled_from(mesh.process_ids), min_size=1, max_size=3, unique=True))
    few = ProcessMesh(ranks, ["few"])
    there = draw(oracle.placements_of(few, c.a.ndim, "i8"))
    back = draw(oracle.placements_of(mesh, c.a.ndim, "i8"))
    return Step(lambda x: x.reshard(there, few).reshard(back, mesh) if isinstance(x, DTensor) else x)


def a_slice(draw: Draw, n: int) -> Any:
    kind = draw(st.sampled_from(["slice", "slice", "step", "whole", "back", "int"]))
    lo, hi = sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n))))
    if kind == "int" and n:
        return draw(st.integers(-n, n - 1))
    return {"slice": slice(lo, hi), "step": slice(lo, hi, 2), "back": slice(None, None, -1)}.get(kind, slice(None))


def sliced(draw: Draw, c: Case) -> Step:
    key = tuple(a_slice(draw, n) for n in c.a.shape)
    return Step(lambda x: x[key])


def assigned(draw: Draw, c: Case) -> Step:
    key = tuple(a_slice(draw, n) for n in c.a.shape)
    return Step(lambda x, v: written(x, key, v), (another(draw, c, np.empty(c.a.shape)[key].shape),))


def assigned_picked(draw: Draw, c: Case) -> Step:
    if not c.a.ndim or not c.a.shape[0]:
        return Step(lambda x: x)
    index = np.array(draw(st.lists(st.integers(0, c.a.shape[0] - 1), min_size=1, max_size=4, unique=True)))
    return Step(lambda x, v: written(x, index, v), (another(draw, c, (len(index), *c.a.shape[1:])),))


def assigned_masked(draw: Draw, c: Case) -> Step:
    return Step(lambda x, m: written(x, m > 1, 7), (another(draw, c),))


def written(x: Any, key: Any, value: Any) -> Any:
    x = x + 0
    if isinstance(x, np.generic):
        x = np.array(x)
    x[key] = value
    return x


def reduced(draw: Draw, c: Case) -> Step:
    if not c.a.ndim:
        return Step(np.negative)
    axis, keepdims = draw(st.integers(0, c.a.ndim - 1)), draw(st.booleans())
    func = draw(st.sampled_from([np.sum, np.max] if c.a.shape[axis] else [np.sum]))
    return Step(lambda x: func(x, axis=axis, keepdims=keepdims))


def multiplied(draw: Draw, c: Case) -> Step:
    if not c.a.ndim:
        return Step(lambda x, y: x * y, (another(draw, c),))
    return Step(lambda x, y: x @ y, (another(draw, c, (c.a.shape[-1], draw(st.integers(0, 5)))),))


def taken(draw: Draw, c: Case) -> Step:
    if not c.a.ndim or not c.a.shape[0]:
        return Step(lambda x: x)
    index = draw(st.lists(st.integers(0, c.a.shape[0] - 1), max_size=6))
    return Step(lambda x: np.take(x, np.array(index, np.int64), axis=0))


def taken_by_values(draw: Draw, c: Case) -> Step:
    if not c.a.ndim or not c.a.shape[0]:
        return Step(lambda x: x)
    return Step(lambda x, i: x[i % c.a.shape[0]], (another(draw, c, (draw(st.integers(0, 4)),)),))


def joined(draw: Draw, c: Case) -> Step:
    if not c.a.ndim:
        return Step(lambda x, y: np.stack([x, y]), (another(draw, c),))
    shape = (draw(st.integers(0, 4)), *c.a.shape[1:])
    return Step(lambda x, y: np.concatenate([x, y]), (another(draw, c, shape),))


def reshaped(draw: Draw, c: Case) -> Step:
    n = c.a.size
    shapes = [(n,), (1, n), *((k, n // k) for k in range(2, n + 1) if n % k == 0)]
    shape = draw(st.sampled_from(shapes))
    return Step(lambda x: np.reshape(x, shape))


def along_an_axis(draw: Draw, c: Case) -> Step:
    if not c.a.ndim:
        return Step(np.negative)
    axis, by = draw(st.integers(0, c.a.ndim - 1)), draw(st.integers(-4, 4))
    funcs = [
        lambda x: np.cumsum(x, axis=axis), lambda x: np.sort(x, axis=axis), lambda x: np.roll(x, by, axis=axis),
        lambda x: np.flip(x, axis), lambda x: np.repeat(x, 2, axis), lambda x: np.array_split(x, 2, axis)[1],
        lambda x: np.swapaxes(x, 0, axis),
    ]  # fmt: skip
    return Step(draw(st.sampled_from(funcs)))


def combined(draw: Draw, c: Case) -> Step:
    funcs = [lambda x, y: x - y, lambda x, y: np.where(y > 1, x, y), lambda x, y: np.where(x > 1, y, 0)]
    return Step(draw(st.sampled_from(funcs)), (another(draw, c),))


def with_itself(draw: Draw, c: Case) -> Step:
    step = reshard(draw, c)
    return Step(lambda x: x * 2 - step.func(x))


def mapped(draw: Draw, c: Case) -> Step:
    index = draw(st.integers(0, 1))

    def func(x: Any) -> Any:
        if not isinstance(x, DTensor):
            return (x * 2, x)[index]
        kept = [R if isinstance(p, Partial) else p for p in x.placements]
        return dm.local_map(lambda a: (a * 2, a + 0), out_placements=(kept, kept))(x.reshard(kept))[index]

    return Step(func)


STEPS = [
    reshard, reshard, reshard, to_other_ranks, sliced, assigned, assigned_picked, assigned_masked, reduced, multiplied, taken,
    taken_by_values, joined, reshaped, along_an_axis, combined, with_itself, mapped,
]  # fmt: skip


@st.composite
def chains(draw: Draw) -> tuple[Case, list[str]]:
    """An array and what became of it in a few steps, and the names of these."""
    c = draw(oracle.cases(dtypes=["i8"], low=1))
    names = [repr(c.x.layout)]
    for make in draw(st.lists(st.sampled_from(STEPS), min_size=2, max_size=4)):
        func, operands = make(draw, c)
        c = Case(func(c.x, *(o.x for o in operands)), np.asarray(func(c.a, *(o.a for o in operands))))
        names.append(f"{make.__name__} -> {c.x.layout!r}")
        if c.a.size > oracle.MAX_SIZE:
            break
    return c, names


@pytest.mark.parametrize(
    ("two_stage_bytes", "many_peers"), [(2**20, 64), (8, 64), (2**20, 1)], ids=["direct", "two-stage", "directory"]
)
def test_chains(two_stage_bytes: int, many_peers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MANY_PEERS", many_peers)

    @oracle.few(40)
    @given(st.data())
    def check(data: Any) -> None:
        with dask.config.set({"daskmesh.two-stage-bytes": two_stage_bytes}):
            c, names = data.draw(chains())
            try:
                both(c.x, c.a)
            except BaseException as error:
                error.add_note("\n".join(names))
                raise

    check()


# -- kinds of nodes ---------------------------------------------------------------------------------------------------


def table(mesh: ProcessMesh, placements: list[Placement], n: int = 6) -> DTensor:
    return dm.shard_tensor(np.arange(float(n * n)).reshape(n, n), mesh, placements)


def on_first(x: DTensor) -> DTensor:
    return x.reshard([R], FIRST)


def test_blocks_that_nobody_reads_are_not_counted() -> None:
    whole = table(THREE, [S0]).reshard([R])
    assert both(whole) == (3 * 192, 192)
    assert both(on_first(whole)) == (192, 192)  # rank 0 has a copy by then, and the others need none
    assert both(whole.reshard([S0])) == (3 * 192, 3 * 192)
    plan = on_first(whole).explain()
    assert plan.received == {0: 192, 1: 0, 2: 0}
    assert plan.pairs == {(1, 0): 96, (2, 0): 96}


def test_parts_without_elements_are_not_made_for_a_reader() -> None:
    """The middle part is empty, but is made of what other ranks hold."""
    x = table(THREE, [S1])
    parts = x.layout.replace(placements=(S0,), chunks=((6, 0, 0), (6,)))
    y = DTensor(moved((x[:0].reshard([R]) + 1)._node, x.layout.replace(shape=(0, 6), chunks=((0,), (2, 2, 2)))))
    assert both(y)[0] == 0
    z = np.sum(DTensor(moved(x._node, parts)), axis=0, keepdims=True)
    both(z.reshard([S0]))


def test_a_contraction_takes_what_its_ranks_read() -> None:
    a, b = table(SQUARE, [S0, S1]), table(SQUARE, [S0, S1])
    product = a @ b
    assert isinstance(product._node, Streamed)
    every = both(product, np.asarray(a) @ np.asarray(b))[0]
    assert both(on_first(product[:1, :1]))[0] < every
    both((product @ b).reshard([R, R]))


def test_a_region_whose_ranks_talk_runs_on_all_of_them() -> None:
    x = table(THREE, [S0])
    columns = x.reshard([S1])
    alone = dm.local_map(lambda a: a + 1, out_placements=[S1])(columns)
    talks = dm.local_map(lambda a: a + collectives.all_reduce(a.sum(), "x"), out_placements=[S1])(columns)
    corner = [on_first(y[:, :1]).explain().total_bytes for y in (alone, talks)]
    assert corner == [64, 192]
    transport.reset_stats()
    y = on_first(talks[:, :1]).persist()
    wait(y)
    assert sum(road["bytes"] for road in transport.stats().values()) == 192


def test_what_a_region_of_measured_outputs_took_is_not_counted_again() -> None:
    x = table(THREE, [S0])
    picked = dm.local_map(lambda a: a[a > 3][:2].reshape(1, -1), out_placements=[S0])(x.reshard([S1]))
    assert picked.explain().total_bytes == 0
    assert picked.reshard([R]).explain().total_bytes == 6 * 2 * 8


def test_other_names_of_the_mesh_dims_hide_no_exchange() -> None:
    x = table(THREE, [S0]).reshard([R])
    renamed = x.reshard([R], ProcessMesh([0, 1, 2], ["other"]))
    assert renamed.name == x.name
    assert both(renamed) == (3 * 192, 192)
    assert both(on_first(renamed)) == (192, 192)


def test_one_expression_recorded_twice_moves_what_either_reader_needs() -> None:
    x = table(THREE, [S0])
    first, second = ((x.reshard([R]) + 1).reshard([R], ProcessMesh([r], ["f"])) for r in (0, 1))
    assert both(first.reshard([R], FIRST) + second.reshard([R], FIRST))[0] == 192 + 192 + 288
    assert both((x.reshard([R]) + 1) + (x.reshard([R]) + 2))[0] == 3 * 192


@pytest.mark.parametrize("given_as", ["pickled", "optimized", "cloned", "to_dask"])
def test_loads_inside_a_graph_that_is_given_count(given_as: str) -> None:
    x = table(THREE, [S0])
    y = on_first(x.reshard([R]))
    restored = {
        "pickled": lambda: pickle.loads(pickle.dumps(y)),
        "optimized": lambda: dask.optimize(y)[0],
        "cloned": lambda: clone(y),
        "to_dask": lambda: dm.shard_tensor(y.to_dask(), FIRST, [R]),
    }[given_as]()
    assert both(restored) == (192, 192)
    assert "graph that was given" in restored.explain().reason
    assert both(restored[:1].reshard([S1]) + y[:1])[0] == (384 if given_as == "cloned" else 192)


def test_a_stage_of_two_and_the_same_stage_alone_run_once() -> None:
    x = dm.dtensor_from_local([np.ones(4)] * 3, THREE, [P])
    with dask.config.set({"daskmesh.two-stage-bytes": 8}):
        y = x.reshard([S0]) + x.reshard([R]).reshard([S0])
    assert both(y)[0] == both(x.reshard([S0]).reshard([R]).reshard([S0]))[0]


def test_persisted_arrays_have_moved_already() -> None:
    y = table(THREE, [S0]).reshard([S1]).persist()
    wait(y)
    assert y.explain().total_bytes == 0
    assert y.reshard([R]).explain().total_bytes == 3 * 192


def test_terms_too_large_to_gather_are_folded_by_their_ranks() -> None:
    x = dm.dtensor_from_local([np.ones((6, 6))] * 3, THREE, [P])
    assert both(x) == (0, 0)
    with dask.config.set({"daskmesh.two-stage-bytes": 64}):
        assert both(x) == (0, 3 * 2 * 96)


def test_explaining_a_long_chain_lowers_nothing() -> None:
    x = table(LINE, [S0])
    for _ in range(4):
        x = (x.reshard([S1]) + 1).reshard([S0]) * 2
    assert x.explain().total_bytes == 8 * 144
    assert x._node._layer is None


def test_another_call_cannot_be_explained() -> None:
    with pytest.raises(ValueError, match=r"explain\('gather'\): expected 'persist'.*'compute'"):
        table(LINE, [S0]).explain("gather")


def test_replicas_agree_after_a_chain() -> None:
    """The blocks themselves, not only their bytes."""
    x = written(table(THREE, [S0]).reshard([R]), (slice(None), 0), 3.0)
    blocks = dask.get(x.__dask_graph__(), x.__dask_keys__())
    first, *others = (local_of(b, x.layout) for b in blocks)
    assert all(np.array_equal(first, b) for b in others)


@oracle.few(60)
@given(st.data())
def test_needed_blocks_at_once_are_those_of_every_coordinate(data: Any) -> None:
    shape = data.draw(oracle.shapes())
    source, target = (data.draw(oracle.layouts_of(data.draw(st.sampled_from(oracle.MESHES)), shape, "i8")) for _ in range(2))
    stage = Stage(source, target)
    made = np.array(data.draw(st.lists(st.booleans(), min_size=target.mesh.size, max_size=target.mesh.size)))
    want = {s for c, m in zip(target.coords(), made, strict=True) if m for s in stage.sources(c)}
    assert {c for c, n in zip(source.coords(), stage.needs(made), strict=True) if n} == want
    part = stage.making(made)
    assert part.total_bytes == sum(n for n, m in zip(stage.received.values(), made, strict=True) if m)
    assert [part.makes(c) for c in target.coords()] == made.tolist()
