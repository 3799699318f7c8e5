"""local_map: right values on every layout, nothing run too early or too often, no rank sees another's memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, wait

import daskmesh as dm
from daskmesh import Partial, Replicate, Shard, local_map
from daskmesh.collectives import all_reduce
from daskmesh.gang import Gang
from daskmesh.regions import Out, Region
from daskmesh.tracing import Untraceable, shape_only, traced
from daskmesh.world import world_for

pytestmark = pytest.mark.cluster
M2, M3, M4, M5 = (dm.init_mesh(n, ["x"]) for n in (2, 3, 4, 5))
M22 = dm.init_mesh((2, 2), ("x", "y"))
REVERSED = dm.ProcessMesh([[3, 1], [0, 2]], ["x", "y"])
CALLS: list[tuple[str, int]] = []


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    dm.shutdown()
    yield
    dm.shutdown()


@pytest.fixture(autouse=True)
def no_calls() -> None:
    CALLS.clear()


def counted(x: Any) -> Any:
    """Twice `x`; traces and runs are counted. A module's function is pickled by name, so all ranks share the list."""
    CALLS.append(("trace" if isinstance(x, da.Array) else "run", dm.get_rank()))
    return x * 2


def counted_pair(x: Any) -> Any:
    return counted(x), np.sum(x)


def counted_eager(x: Any) -> Any:
    return counted(x)[: max(1, int(np.sum(x)) % 2)]


def locals_of(x: dm.DTensor) -> list[np.ndarray[Any, Any]]:
    return [x.local_value(r) for r in x.process_mesh.process_ids]


def same(got: Any, want: Any) -> None:
    got = np.asarray(got)
    np.testing.assert_array_equal(got, want)
    assert got.dtype == np.asarray(want).dtype


def page_input(n: int) -> dm.DTensor:
    return dm.dtensor_from_local(lambda rank: np.arange(n, dtype="float32") + rank, M2, [Shard(0)])


# -- the cases of the specification ------------------------------------------------------------------------------------


def mean_of_a_window(x: Any) -> Any:
    mask = np.zeros_like(x)
    if dm.get_rank() == 0:
        mask[1:3] = 1
    else:
        mask[4:7] = 1
    x = x * mask
    mask_sum = np.sum(x)
    return mask_sum / mask.sum()


@pytest.mark.parametrize(("op", "value"), [(dm.ReduceType.kRedSum, 7.5), ("avg", 3.75), ("max", 6.0)])
def test_case_1_the_page(op: Any, value: float) -> None:
    wrapped = local_map(mean_of_a_window, out_placements=[[Partial(op)]], in_placements=[[Shard(0)]], process_mesh=M2)
    out = wrapped(page_input(10))
    assert [v.item() for v in locals_of(out)] == [1.5, 6.0]
    assert (out.item(), str(out), out.dtype, out.shape) == (value, str(value), np.float32, ())


def test_case_2_other_windows() -> None:
    def window(x: Any) -> Any:
        mask = np.zeros_like(x)
        mask[1 + dm.get_rank()] = 1
        return np.sum(x * mask) / np.sum(mask)

    out = local_map(window, [[Partial()]])(page_input(4))
    assert ([v.item() for v in locals_of(out)], out.item()) == ([1.0, 3.0], 4.0)


def test_case_3_no_dtensor_among_the_inputs() -> None:
    out = local_map(lambda x: x + 1, [[Shard(0)]], process_mesh=M2)(np.ones(4))
    assert (out.shape, out.placements) == ((8,), (Shard(0),))
    same(out, np.full(8, 2.0))


def test_case_4_an_output_that_is_no_array() -> None:
    total, words = local_map(lambda x: (x.sum(), "hello"), [[Replicate()], None])(dm.ones(4, mesh=M2, placements=[]))
    assert (total.item(), total.placements, dask.compute(*words)) == (4.0, (Replicate(),), ("hello", "hello"))


def test_case_5_inputs_are_resharded_when_asked_to() -> None:
    x = dm.dtensor_from_local([np.ones(4), np.ones(4)], M2, [Shard(0)])
    doubled = local_map(lambda x: 2 * x, [[Replicate()]], [[Replicate()]], reshard_inputs=True)(x)
    assert doubled.placements == (Replicate(),)
    assert doubled.explain().total_bytes == 64  # each rank lacks the other's four
    same(doubled, np.full(8, 2.0))
    for local in locals_of(doubled):
        same(local, np.full(8, 2.0))


def test_case_6_dict_outputs_pair_in_sorted_order_and_keep_their_own() -> None:
    out = local_map(lambda x: {"b": x + 1, "a": x.sum()}, [[Partial()], [Shard(0)]])(page_input(10))
    assert list(out) == ["b", "a"]
    assert ([v.item() for v in locals_of(out["a"])], out["b"].shape) == ([45, 55], (20,))
    same(out["b"], np.r_[1:11, 2:12].astype("f4"))


def test_case_7_dict_inputs() -> None:
    x = page_input(10)
    out = local_map(lambda d: d["a"] - d["b"], [[Shard(0)]], [[Shard(0)], [Shard(0)]])({"b": x, "a": 2 * x})
    same(out, np.asarray(x))


@pytest.mark.parametrize(
    ("n", "f", "placements", "want"),
    [
        (8, lambda t: t.sum().reshape(1), [Shard(0)], [1, 5, 9, 13]),
        (4, lambda t: np.repeat(t, 2), [Shard(0)], [0, 0, 1, 1, 2, 2, 3, 3]),
        (4, lambda t: np.concatenate([t, t]), [Shard(0)], [0, 0, 1, 1, 2, 2, 3, 3]),
        (8, lambda t: t.reshape(1, 2), [Shard(1)], [range(8)]),
        (8, lambda t: t.reshape(1, 2), [Shard(-1)], [range(8)]),
        (8, lambda t: t[::-1], {"x": Shard(0)}, [1, 0, 3, 2, 5, 4, 7, 6]),
    ],
    ids=["sum", "repeat", "concatenate", "other dim", "negative dim", "reversed"],
)
def test_case_8_other_shapes(n: int, f: Callable[[Any], Any], placements: Any, want: Any) -> None:
    out = local_map(f, [placements])(dm.arange(n, mesh=M4, placements=[Shard(0)]))
    same(out, np.array([list(w) if isinstance(w, range) else w for w in want]))
    assert out.shape == np.shape(out)


@pytest.mark.parametrize(
    ("data", "f", "op", "locals_", "value"),
    [
        (range(8), lambda x: np.any(x > 6), "any", [False, False, False, True], True),
        (range(8), lambda x: np.all(x >= 0), "all", [True] * 4, True),
        (range(1, 9), np.prod, "prod", [2, 12, 30, 56], 40320),
        ([5, 3, 8, 1, 9, 2, 7, 4], np.min, "min", [3, 1, 2, 4], 1),
        (range(8), np.mean, "avg", [0.5, 2.5, 4.5, 6.5], 3.5),
        (range(7), np.max, "max", [1, 3, 5, 6], 6),
        (range(7), np.sum, "sum", [1, 5, 9, 6], 21),
    ],
    ids=["any", "all", "prod", "min", "avg", "max", "sum"],
)
def test_case_9_reductions(data: Any, f: Callable[[Any], Any], op: str, locals_: list[Any], value: Any) -> None:
    out = local_map(f, [[Partial(op)]])(dm.shard_tensor(np.array(data), M4, [Shard(0)]))
    assert ([v.item() for v in locals_of(out)], out.item()) == (locals_, value)


def test_case_10_both_mesh_dims_partial() -> None:
    x = dm.shard_tensor(np.arange(16.0).reshape(4, 4), M22, [Shard(0), Shard(1)])
    out = local_map(np.sum, [[Partial(), Partial()]])(x)
    assert ([v.item() for v in locals_of(out)], out.item()) == ([10, 18, 42, 50], 120)


def test_case_11_matmul_with_resharded_inputs() -> None:
    a = np.arange(16).reshape(4, 4)
    x, y = dm.shard_tensor(a, M22, [Shard(0), Shard(1)]), dm.shard_tensor(a, M22, [])
    wanted = [[Replicate(), Shard(1)], [Replicate(), Shard(0)]]
    out = local_map(np.matmul, [[Replicate(), Partial()]], wanted, reshard_inputs=True)(x, y)
    same(out, a @ a)


def test_case_12_a_partial_input_is_this_ranks_term() -> None:
    x = dm.dtensor_from_local(lambda rank: np.array([rank + 1]), M2, [Partial()])
    out = local_map(lambda x: x * 10, [[Partial()]], [[Partial()]])(x)
    assert ([v.item() for v in locals_of(out)], out.item()) == ([10, 20], 30)


# -- layouts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "n", "dtype"),
    [*((m, n, "f8") for m in (M2, M3, M5) for n in (0, 1, 4, 7)), *((M3, 7, d) for d in ("?", "i1", "u2", "f2", "c8", "M8[s]"))],
    ids=str,
)
def test_identity_keeps_every_local_array(mesh: dm.ProcessMesh, n: int, dtype: str) -> None:
    data = np.arange(n).astype(dtype)
    x = dm.shard_tensor(data, mesh, [Shard(0)])
    y = local_map(lambda a: a, [[Shard(0)]])(x)
    assert y.layout == x.layout
    same(y, data)


@pytest.mark.parametrize("mesh", [M22, REVERSED], ids=["in order", "mixed"])
@pytest.mark.parametrize(
    "placements", [[Shard(0)], [Shard(1), Shard(0)], [Shard(0), Shard(0)], [Partial("max"), Shard(1)], []], ids=str
)
def test_identity_on_two_mesh_dims(mesh: dm.ProcessMesh, placements: Any) -> None:
    data = np.arange(15).reshape(5, 3)
    x = dm.shard_tensor(data, mesh, placements)
    y = local_map(lambda a: a, [placements])(x)
    assert y.layout == x.layout
    same(y, data)


def test_uneven_sizes_are_summed_not_multiplied() -> None:
    x = dm.dtensor_from_local([np.arange(2), np.arange(5), np.arange(0)], M3, [Shard(0)])
    y = local_map(lambda a: np.concatenate([a, a]), [[Shard(0)]])(x)
    assert (y.shape, y.layout.chunks) == ((14,), ((4, 10, 0),))
    same(y, np.r_[0, 1, 0, 1, 0:5, 0:5])


def test_scalars_on_an_odd_number_of_ranks() -> None:
    x = dm.zeros((), mesh=M5, placements=[])
    y = local_map(lambda a: a + dm.get_rank(), [[Partial("max")]])(x)
    assert ([v.shape for v in locals_of(y)], y.item()) == ([()] * 5, 4.0)


def test_who_am_i_follows_the_mesh() -> None:
    x = dm.zeros((), mesh=REVERSED, placements=[])
    where = local_map(lambda a: np.array([[dm.get_rank(), *dm.get_coordinate(REVERSED)]]), [[Shard(0), Shard(0)]])(x)
    same(where, np.array([[3, 0, 0], [1, 0, 1], [0, 1, 0], [2, 1, 1]]))


# -- declaring ---------------------------------------------------------------------------------------------------------


def test_as_a_decorator_it_wraps() -> None:
    @local_map(out_placements=[Shard(0)], in_placements=[Shard(0)])
    def scaled(x: Any, by: Any = 1, *, offset: Any = 0) -> Any:
        """Scale."""
        return x * by + offset

    assert (scaled.__name__, scaled.__doc__, scaled.__wrapped__(2, 3)) == ("scaled", "Scale.", 6)
    x = dm.arange(5, mesh=M2, placements=[Shard(0)])
    with pytest.raises(ValueError, match="1 entries for 2"):
        scaled(x, 3)
    same(scaled(x, by=3, offset=1), np.arange(5) * 3 + 1)


def test_keyword_dtensors_are_unwrapped() -> None:
    x, y = dm.arange(6, mesh=M3, placements=[Shard(0)]), dm.ones(2, mesh=M3, placements=[])
    out = local_map(lambda a, *, b, c: a + b["k"][0] + c, [Shard(0)])(x, b={"k": [y]}, c=1)
    same(out, np.arange(6) + 2.0)


@pytest.mark.parametrize(
    "ins",
    [
        None,
        [None, None, None, None],
        [[Shard(0)], [Replicate()], None, None],
        [(Shard(0),), [], {"x": Replicate()}, [Shard(1)]],
        [{"x": Shard(0)}, [[Replicate()], None], None],
        ([Shard(0)], None, None),
        [None, ([], {}), None],
    ],
    ids=["left out", "all none", "flat", "kinds", "nested", "none for a list", "empty"],
)
def test_ways_to_say_in_placements(ins: Any) -> None:
    x, y = dm.arange(4, mesh=M2, placements=[Shard(0)]), dm.ones((2,), mesh=M2, placements=[])
    out = local_map(lambda a, pair, n: a + pair[0] * pair[1] + n, [[Shard(0)]], ins)(x, [y, y], 5)
    same(out, np.arange(4) + 6.0)


@pytest.mark.parametrize("flat", [True, False])
def test_nested_outputs_come_back_in_their_containers(flat: bool) -> None:
    outs = [[Partial()], [Shard(0)], None] if flat else {"z": ([Shard(0)], None), "a": [[Partial()]]}
    x = dm.arange(6, mesh=M3, placements=[Shard(0)])
    found = local_map(lambda a: {"z": (a, "word"), "a": [a.sum()]}, outs)(x)
    assert (list(found), type(found["z"]), type(found["a"])) == (["z", "a"], tuple, list)
    same(found["z"][0], np.arange(6))
    assert (found["a"][0].item(), dask.compute(*found["z"][1])) == (15, ("word",) * 3)


def test_an_array_under_none_counts_as_replicated() -> None:
    out = local_map(lambda a: a.sum(), [None])(dm.ones(3, mesh=M2, placements=[]))
    assert (out.placements, out.item()) == ((Replicate(),), 3.0)


def test_numbers_under_placements_are_arrays() -> None:
    out = local_map(lambda a: len(a), [[Partial()]])(dm.ones(7, mesh=M4, placements=[Shard(0)]))
    assert (out.item(), out.dtype) == (7, np.dtype(int))


def test_no_outputs_run_at_once() -> None:
    assert local_map(returns_nothing, [])(dm.ones(2, mesh=M2, placements=[])) == ()
    assert Counter(CALLS) == Counter([("trace", 0), ("run", 0), ("run", 1)])


def returns_nothing(x: Any) -> Any:
    counted(x)
    return ()


def test_a_region_knows_what_its_gradient_will_need() -> None:
    x, y = dm.arange(4, mesh=M2, placements=[Shard(0)]), dm.ones(2, mesh=M2, placements=[])
    for f in (lambda n, a, b: (a * b * n, "word"), lambda n, a, b: (np.sort(a) * b * n, "word")):
        wanted = [None, [Shard(0)], [Replicate()]]
        out, _ = local_map(f, [[Shard(0)], None], wanted, in_grad_placements=[None, None, [Partial()]])(2, x, y)
        region = out._node.region
        assert isinstance(region, Region)
        assert (region.func, region.inputs) == (f, (x._node, y._node))
        assert region.in_placements == ((Shard(0),), (Replicate(),))
        assert region.out_placements == ((Shard(0),), None)
        assert region.in_grad_placements == (None, (Partial(),))


# -- laziness ----------------------------------------------------------------------------------------------------------


def test_traced_once_for_each_tuple_of_shapes_as_its_first_rank() -> None:
    x = dm.arange(7, mesh=dm.ProcessMesh([3, 1, 0, 2], ["x"]), placements=[Shard(0)])  # 2 2 2 1
    y = local_map(counted, [Shard(0)])(x)
    assert CALLS == [("trace", 3), ("trace", 2)]
    same(y, np.arange(7) * 2)
    assert Counter(CALLS) == Counter([("trace", 3), ("trace", 2), *(("run", r) for r in range(4))])


def test_declared_shapes_leave_the_function_alone() -> None:
    x = dm.dtensor_from_local([np.arange(2), np.arange(5)], M2, [Shard(0)])
    y = local_map(counted, [Shard(0)], out_shapes=(7,))(x)
    assert (CALLS, y.layout) == ([], x.layout)  # cut as the input is
    same(y, np.r_[0, 2, 0:10:2])
    assert sorted(CALLS) == [("run", 0), ("run", 1)]


@pytest.mark.parametrize(
    ("outs", "shapes", "want"),
    [
        ([Shard(0)], [(6,)], [((6,), "i8")]),
        ([Shard(0)], ((6,), "f4"), [((6,), "f4")]),
        ([Shard(0)], [((6,), np.float32)], [((6,), "f4")]),
        ([Partial()], (), [((), "i8")]),
        ([[Partial()], None], [(), None], [((), "i8")]),
        ([[Shard(0)], [Partial()]], [(6,), ((), "f4")], [((6,), "i8"), ((), "f4")]),
        ({"b": [Shard(0)], "a": [Partial()]}, {"b": (6,), "a": ((), "f4")}, [((), "f4"), ((6,), "i8")]),
    ],
    ids=["list", "pair", "listed pair", "0-d", "no array", "two", "dict"],
)
def test_ways_to_say_out_shapes(outs: Any, shapes: Any, want: Any) -> None:
    found = local_map(counted, outs, out_shapes=shapes)(dm.arange(6, mesh=M2, placements=[Shard(0)]))
    leaves = [found[k] for k in sorted(found)] if isinstance(found, dict) else found if isinstance(found, tuple) else [found]
    arrays = [leaf for leaf in leaves if isinstance(leaf, dm.DTensor)]
    assert [(a.shape, a.dtype) for a in arrays] == [(s, np.dtype(d)) for s, d in want]
    assert CALLS == []


def test_arrays_of_several_shapes_in_one_trace() -> None:
    x, y = dm.arange(6, mesh=M3, placements=[Shard(0)]), dm.ones((4, 1), mesh=M3, placements=[])
    out = local_map(lambda a, b: a * b + np.sum(a) + np.ones((4, 1)) @ a[None, :] + all_reduce(np.max(b)), [[Shard(1)]])(x, y)
    sums = np.repeat([1, 5, 9], 2)
    assert isinstance(out._node, Out)
    assert out._node.region.call.communicates is True
    same(out, np.tile(2 * np.arange(6) + sums + 3.0, (4, 1)))


def test_one_local_value_runs_one_rank() -> None:
    y = local_map(counted, [Shard(0)])(dm.arange(5, mesh=M5, placements=[Shard(0)]))
    CALLS.clear()
    same(y.local_value(3), np.array([6]))
    assert CALLS == [("run", 3)]


@pytest.mark.parametrize("shapes", [None, [(6,), ((), "i8")]], ids=["traced", "declared"])
def test_one_compute_runs_each_rank_once_whoever_asks(shapes: Any) -> None:
    y, total = local_map(counted_pair, [[Shard(0)], [Partial()]], out_shapes=shapes)(dm.arange(6, mesh=M3, placements=[Shard(0)]))
    CALLS.clear()
    doubled, sum_, shifted = dask.compute(y, total, y.reshard([Replicate()]) + 1)
    same(doubled, np.arange(6) * 2)
    same(shifted, np.arange(6) * 2 + 1)
    assert (sum_, Counter(CALLS)) == (15, Counter({("run", r): 1 for r in range(3)}))


def test_what_may_communicate_runs_on_all_ranks_whichever_is_asked() -> None:
    y = local_map(counted, [Shard(0)], out_shapes=(6,))(dm.arange(6, mesh=M3, placements=[Shard(0)]))
    same(y.local_value(1), np.array([4, 6]))
    assert Counter(CALLS) == Counter({("run", r): 1 for r in range(3)})


def test_a_function_that_needs_values_runs_at_once_and_only_then() -> None:
    x = dm.arange(6, mesh=M3, placements=[Shard(0)])
    y = local_map(counted_eager, [Shard(0)])(x)
    assert Counter(CALLS) == Counter([("trace", 0), ("run", 0), ("run", 1), ("run", 2)])
    assert y.shape == (3,)
    same(y, np.array([0, 4, 8]))
    same(y + y, np.array([0, 8, 16]))
    assert len(CALLS) == 4


def test_values_of_a_region_that_ran_at_once_are_plain() -> None:
    top, count = local_map(lambda a: (np.sort(a), int(a.sum())), [[Shard(0)], None])(dm.arange(4, mesh=M2, placements=[Shard(0)]))
    assert count == [1, 5]
    same(top, np.arange(4))


@pytest.mark.parametrize(
    "f",
    [
        lambda a: a[a > 2],
        lambda a: np.unique(a),
        lambda a: np.asarray(a) * 2,
        lambda a: a if a.any() else a[:0],
        lambda a: np.array(a.tolist()),
        lambda a: np.array([float(v) for v in a]),
        lambda a: np.searchsorted(a, a),
        lambda a: np.nonzero(a)[0],
    ],
    ids=["mask", "unique", "asarray", "truth", "list", "iteration", "searchsorted", "nonzero"],
)
def test_functions_whose_shapes_depend_on_values(f: Callable[[Any], Any]) -> None:
    data = np.array([3, 0, 1, 2, 2, 5, 0])
    x = dm.shard_tensor(data, M3, [Shard(0)])
    same(local_map(f, [Shard(0)])(x), np.concatenate([f(data[i : i + 3]) for i in (0, 3, 6)]))


def test_a_trace_is_refused_even_if_the_function_looks_away() -> None:
    def hides(x: Any) -> Any:
        try:
            return x[: int(x.sum())]
        except RuntimeError:
            return x

    gang = Gang(M2, 0, trace=shape_only)
    with pytest.raises(Untraceable):
        traced(lambda: hides(shape_only((3,), np.dtype(int))), gang)
    same(local_map(hides, [Shard(0)])(dm.ones(6, mesh=M2, placements=[Shard(0)], dtype=int)), np.ones(6, int))


def test_others_compute_while_a_trace_runs() -> None:
    def f(x: Any) -> Any:
        with world_for(M2).client.as_current():
            pass
        return x + 1

    before = dask.config.get("scheduler", None)
    same(local_map(f, [Shard(0)])(dm.ones(4, mesh=M2, placements=[Shard(0)])), np.full(4, 2.0))
    assert dask.config.get("scheduler", None) == before
    assert da.ones(3).sum().compute() == 3


@pytest.mark.parametrize("scheduler", ["synchronous", "threads"])
def test_without_a_cluster_under_daskss_own_schedulers(scheduler: str) -> None:
    x = dm.arange(6, mesh=M3, placements=[Shard(0)])
    y, total = local_map(lambda a: (a + 1, a.sum()), [[Shard(0)], [Partial()]])(x)
    z = local_map(counted, [Shard(0)], out_shapes=(6,))(y)
    with dask.config.set(scheduler=scheduler):
        same(z, np.arange(2, 14, 2))
        assert total.item() == 15


def test_equal_calls_have_equal_names_unless_they_may_do_something_to_others() -> None:
    x = dm.arange(6, mesh=M3, placements=[Shard(0)])
    assert local_map(counted, [Shard(0)])(x).name == local_map(counted, [Shard(0)])(x).name
    assert local_map(counted, [Shard(0)])(x).name != local_map(counted, [Partial()])(x).name
    declared = [local_map(counted, [Shard(0)], out_shapes=(6,))(x).name for _ in range(2)]
    assert declared[0] != declared[1]


def test_a_chain_of_regions_and_numpy() -> None:
    x = dm.arange(10, mesh=M3, placements=[Shard(0)])
    for _ in range(3):
        x = local_map(lambda a: a + 1, [Shard(0)])(x * 2)
    same(x, np.arange(10) * 8 + 7)


# -- memory ------------------------------------------------------------------------------------------------------------


def adds_in_place(x: Any) -> Any:
    if isinstance(x, da.Array):
        return x + 1
    x += 1
    return x


def test_writing_to_an_argument_is_refused_and_harms_nobody() -> None:
    x = dm.zeros(4, mesh=M4, placements=[]).persist()
    y = local_map(adds_in_place, [[]])(x)
    with pytest.raises(ValueError, match="read-only"):
        y.compute()
    for local in locals_of(x):
        same(local, np.zeros(4))


def test_writeable_gives_copies() -> None:
    x, constant = dm.zeros(4, mesh=M4, placements=[]).persist(), np.ones(4)

    def f(a: Any, b: Any) -> Any:
        if not isinstance(a, da.Array):
            a += b
            b += 1
        return a

    y = local_map(f, [[]], writeable=True)(x, constant)
    for local in locals_of(y):
        same(local, np.ones(4))
    same(x, np.zeros(4))
    same(constant, np.ones(4))


def test_a_small_view_does_not_keep_a_large_array() -> None:
    y = local_map(lambda a: np.tile(a, 1000)[:1], [Shard(0)])(dm.ones(4, mesh=M2, placements=[Shard(0)])).persist()
    (block,) = world_for(M2).client.gather([next(iter(y.__dask_graph__().values()))])
    assert block.base is None or block.base.nbytes <= 16


def test_numpy_arguments_cannot_be_written_to_either() -> None:
    y = local_map(lambda a, c: np.add(c, 1, out=c) if isinstance(a, np.ndarray) else a, [Shard(0)])
    with pytest.raises(ValueError, match="read-only"):
        y(dm.ones(4, mesh=M2, placements=[Shard(0)]), np.ones(2)).compute()


# -- worker processes --------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_on_worker_processes(processes: Client) -> None:
    dm.shutdown()
    world = dm.init_parallel_env(3)
    x = dm.dtensor_from_local(lambda rank: np.arange(rank + 1.0), M3, [Shard(0)])
    y, rank, total = local_map(lambda a: (a * 2, dm.get_rank(), a.sum()), [[Shard(0)], None, [Partial()]])(x)
    y, total = dask.persist(y, total)
    wait(y)
    blocks = {rank: y.__dask_graph__()[y.name, rank] for rank in range(3)}
    held = processes.who_has(list(blocks.values()))
    assert {rank: list(held[block.key]) for rank, block in blocks.items()} == {r: [a] for r, a in world.table().items()}
    same(y, np.array([0, 0, 2, 0, 2, 4.0]))
    assert (total.item(), dask.compute(*rank)) == (4.0, (0, 1, 2))
    z = local_map(lambda a: np.sort(-a), [Shard(0)], check_replicas=True)(y)
    same(z, np.array([0, -2, 0, -4, -2, 0.0]))

    def fails(a: Any) -> Any:
        if dm.get_rank() == 1 and isinstance(a, np.ndarray):
            raise KeyError("missing")
        return a

    with pytest.raises(KeyError, match="missing") as caught:
        local_map(fails, [Shard(0)])(x).compute()
    assert "rank 1 at coordinate (1,)" in caught.value.__notes__[0]
    dm.shutdown()


@pytest.mark.parametrize("dtype", ["?", "i4", "u2", "f4", "i8"])
def test_dtypes_that_dask_promotes_otherwise_than_numpy(dtype: str) -> None:
    x = np.arange(12).reshape(4, 3).astype(dtype)
    placed = dm.shard_tensor(x, M2, [Shard(0)])
    for f in (
        lambda t: np.einsum("ij,kj->ik", t, np.ones((2, 3), t.dtype)),
        lambda t: t.dot(np.ones((3, 2), t.dtype)) if isinstance(t, np.ndarray) else np.dot(t, np.ones((3, 2), t.dtype)),
        lambda t: np.tensordot(t, np.ones((3, 2), t.dtype), axes=1),
        lambda t: t @ np.ones((3, 2), t.dtype),
    ):
        same(local_map(f, out_placements=[[Shard(0)]])(placed), f(x))
