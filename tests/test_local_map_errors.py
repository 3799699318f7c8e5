"""What local_map says when something is wrong: what was asked, which argument or output, what would be right."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client

import daskmesh as dm
from daskmesh import Partial, PlacementError, Replicate, Shard, local_map
from daskmesh.collectives import all_reduce
from daskmesh.graph import graph_of
from daskmesh.placement import Placement
from daskmesh.regions import Out, Region
from daskmesh.running import Call, Declared, Input
from daskmesh.trees import entry_tree, flatten

pytestmark = pytest.mark.cluster
M2, M3 = dm.init_mesh(2, ["x"]), dm.init_mesh(3, ["x"])
M22 = dm.init_mesh((2, 2), ("dp", "tp"))


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    dm.shutdown()
    yield
    dm.shutdown()


@pytest.fixture
def x() -> dm.DTensor:
    return dm.arange(6, mesh=M2, placements=[Shard(0)])


def scale(tensor: Any, weights: Any = None, *rest: Any, **named: Any) -> Any:
    return tensor * 2


def says(error: type[Exception], *parts: str) -> Any:
    return pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, parts)))


# -- declaring ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outs", [[Shard(0), None], [None, Replicate()], [Shard(0), [Shard(0)]], Shard(0), "Shard(0)", [["x"]]])
def test_entries_of_two_kinds_show_both_spellings(outs: Any) -> None:
    with says(TypeError, "local_map(scale): out_placements", "[[Shard(0)], None]", "[[Shard(0), Replicate()]]"):
        local_map(scale, outs)


def test_out_placements_are_required() -> None:
    with says(TypeError, "local_map(scale): out_placements is required"):
        local_map(scale)
    with says(TypeError, "local_map(func): expected a function, got 3"):
        local_map(3, [[Shard(0)]])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shapes", "error", "parts"),
    [
        ([(6,), (6,)], ValueError, ["out_shapes has 2 entries, out_placements 1"]),
        ("f4", TypeError, ["got 'f4'"]),
        ([3.5], TypeError, ["got 3.5", "out_shapes=[(8, 4), ((), 'float64')]"]),
        ([None], ValueError, ["output 0 is placed", "give its shape"]),
        ([()], PlacementError, ["output 0", "Shard(0)", "0-d tensor"]),
    ],
    ids=["too many", "dtype alone", "number", "none", "0-d"],
)
def test_out_shapes(x: dm.DTensor, shapes: Any, error: type[Exception], parts: list[str]) -> None:
    with says(error, "local_map(scale)", *parts):
        local_map(scale, [[Shard(0)]], out_shapes=shapes)(x)


def test_out_shapes_without_a_dtensor_need_a_dtype() -> None:
    with says(TypeError, "no argument is a DTensor, so give (shape, dtype)"):
        local_map(lambda: np.ones(2), [[Shard(0)]], process_mesh=M2, out_shapes=(4,))()


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_placed_otherwise(x: dm.DTensor) -> None:
    with says(ValueError, "argument tensor of shape (6,) is placed [Shard(0)]", "wants [Replicate()]", "reshard_inputs=True"):
        local_map(scale, [[Shard(0)]], [[Replicate()]])(x)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda f, x, bad: f(x, bad), "weights"),
        (lambda f, x, bad: f(x, None, 1, bad), "rest[1]"),
        (lambda f, x, bad: f(x, {"b": [bad]}), "weights['b'][0]"),
        (lambda f, x, bad: f(x, extra=(bad,)), "extra[0]"),
        (lambda f, x, bad: f(x, weights=bad), "weights"),
    ],
    ids=["plain", "star", "nested", "keyword", "named"],
)
def test_meshes_must_agree_and_arguments_are_named(x: dm.DTensor, call: Callable[..., Any], name: str) -> None:
    bad = dm.ones(3, mesh=M3, placements=[])
    with says(ValueError, f"argument {name} is on ProcessMesh([0, 1, 2]", "argument tensor on ProcessMesh([0, 1]"):
        call(local_map(scale, [[Shard(0)]]), x, bad)


def test_the_given_mesh_counts_too(x: dm.DTensor) -> None:
    with says(ValueError, "argument tensor is on ProcessMesh([0, 1], dim_names=['x'])", "process_mesh on ProcessMesh([0, 1, 2]"):
        local_map(scale, [[Shard(0)]], process_mesh=M3)(x)
    with says(ValueError, "dim_names=['y']"):  # names count
        local_map(scale, [[Shard(0)]], process_mesh=dm.init_mesh(2, ["y"]))(x)


def test_a_function_without_a_signature_still_gets_named_arguments(x: dm.DTensor) -> None:
    with says(ValueError, "argument 0 of shape"):
        local_map(max, [[Shard(0)]], [[Replicate()]])(x)


@pytest.mark.parametrize("what", ["in_placements", "in_grad_placements"])
def test_number_of_entries_of_the_arguments(x: dm.DTensor, what: str) -> None:
    with says(ValueError, f"{what} has 3 entries for 1 positional arguments"):
        local_map(scale, [[Shard(0)]], **{what: [[Shard(0)]] * 3})(x)


@pytest.mark.parametrize(
    ("entry", "parts"),
    [
        ([Shard(1)], ["argument tensor", "Shard(1)", "mesh dim 'x' of size 2", "out of range"]),
        ([Shard(0), Replicate()], ["argument tensor", "2 placements", "at most 1"]),
        ({"X": Shard(0)}, ["argument tensor", "'X'", "'x'"]),
    ],
    ids=["dim", "too many", "name"],
)
def test_in_placements_that_cannot_be(x: dm.DTensor, entry: Any, parts: list[str]) -> None:
    with says(PlacementError, *parts):
        local_map(scale, [[Shard(0)]], [entry])(x)


def test_no_mesh() -> None:
    with says(ValueError, "no argument is a DTensor", "give process_mesh="):
        local_map(scale, [[Shard(0)]])(np.ones(2))


def test_dask_collections_are_no_local_arrays(x: dm.DTensor) -> None:
    with says(TypeError, "argument weights is a Array", "shard_tensor"):
        local_map(scale, [[Shard(0)]])(x, da.ones(3))


# -- outputs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("f", "outs", "error", "parts"),
    [
        (lambda a: (a, a), [[Shard(0)]], ValueError, ["has 1 entries", "returned 2 outputs (*, *)"]),
        (lambda a: a, [[Shard(0)], None], ValueError, ["has 2 entries", "returned 1 outputs"]),
        (lambda a: (np.sort(a), a), [[Shard(0)]], ValueError, ["has 1 entries", "returned 2 outputs"]),
        (lambda a: "word", [[Shard(0)]], TypeError, ["output 0 is 'word' of type str", "[Shard(0)]", "None"]),
        (lambda a: (np.sort(a), "word"), [[Shard(0)], []], TypeError, ["output 1 is 'word'"]),
        (lambda a: None, [[Shard(0)]], TypeError, ["output 0 is None"]),
        (lambda a: np.sum(a), [[Shard(0)]], PlacementError, ["output 0, of local shape ()", "Shard(0)", "0-d"]),
        (lambda a: float(a[0]), [[Shard(0)]], PlacementError, ["output 0, of local shape ()", "0-d"]),
        (lambda a: a, [[Shard(2)]], PlacementError, ["output 0", "Shard(2)", "mesh dim 'x'"]),
        (lambda a: a, [[Shard(0), Shard(1)]], PlacementError, ["output 0", "2 placements"]),
    ],
    ids=["more", "less", "eager", "word", "eager word", "none", "0-d", "eager 0-d", "dim", "too many"],
)
def test_outputs(x: dm.DTensor, f: Callable[[Any], Any], outs: Any, error: type[Exception], parts: list[str]) -> None:
    with says(error, "local_map(lambda)", *parts):
        local_map(f, outs)(x)


@pytest.mark.parametrize("eager", [False, True])
def test_a_returned_dtensor(x: dm.DTensor, eager: bool) -> None:
    with says(TypeError, "output 0 is a DTensor", "returns local arrays"):
        local_map(lambda a: (float(a[0]), x)[1] if eager else x, [[Shard(0)]])(x)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("placed", [Replicate(), Partial()], ids=str)
def test_sizes_that_must_agree_name_two_ranks(placed: Placement, eager: bool) -> None:
    y = dm.arange(3, mesh=M2, placements=[Shard(0)])
    with says(ValueError, "output 0", "ranks 0 and 1", "sizes 2 and 1"):
        local_map(np.sort if eager else scale, [[placed]])(y)


def by_rank(tensor: Any) -> Any:
    return tensor[: 1 + dm.get_rank()]


@pytest.mark.parametrize("placements", [[Shard(0)], [Partial()]], ids=["shard", "partial"])
def test_a_rank_that_returns_another_shape_than_inferred(x: dm.DTensor, placements: Any) -> None:
    y = local_map(by_rank, [placements])(x)
    with says(
        ValueError, "output 0 of rank 1 at coordinate (1,) has shape (2,)", "not (1,)", "inferred", "out_shapes="
    ) as caught:
        y.compute()
    assert any("rank 1 at coordinate (1,)" in note for note in caught.value.__notes__)


def test_a_rank_that_returns_another_shape_or_dtype_than_declared(x: dm.DTensor) -> None:
    with says(ValueError, "output 0 of rank", "has shape (3,) and dtype int64, not (2,) and int64 as out_shapes"):
        local_map(scale, [[Shard(0)]], out_shapes=(4,))(x).compute()
    with says(ValueError, "dtype int64, not (3,) and float32"):
        local_map(scale, [[Shard(0)]], out_shapes=((6,), "f4"))(x).compute()
    with says(ValueError, "it returned (*,), not * as out_shapes and out_placements say"):
        local_map(lambda a: (a,), [[Shard(0)]], out_shapes=(6,))(x).compute()


def test_ranks_that_return_different_things() -> None:
    y = dm.arange(3, mesh=M2, placements=[Shard(0)])
    with says(ValueError, "has 1 entries", "returned 2 outputs (*, *)"):
        local_map(lambda a: [a] if len(a) == 2 else (a, a), [[Shard(0)]])(y)
    with says(ValueError, "output 0 is a Array on rank 0 and a str on rank 1"):
        local_map(lambda a: a if len(a) == 2 else "word", [None])(y)


@pytest.mark.parametrize(
    ("mesh", "placements", "ranks"),
    [(M3, [Replicate()], "0 and 1"), (M22, [Shard(0), Replicate()], "0 and 1"), (M22, [Replicate(), Partial()], "0 and 2")],
    ids=["all", "rows", "terms"],
)
@pytest.mark.parametrize("eager", [False, True])
def test_replicas_are_compared_when_asked_to(mesh: dm.ProcessMesh, placements: Any, ranks: str, eager: bool) -> None:
    x = dm.ones(4, mesh=mesh, placements=[])

    def f(a: Any) -> Any:
        return (np.sort(a) if eager else a) * dm.get_rank()

    with says(ValueError, f"output 0 is declared {placements}", f"ranks {ranks}"):
        local_map(f, [placements], check_replicas=True)(x).compute()
    same = local_map(lambda a: a * 2, [placements], check_replicas=True)(x)
    np.testing.assert_array_equal(same.local_value(1), np.full(4, 2.0))


def test_replicas_that_are_compared_run_on_all_ranks_whichever_is_asked(x: dm.DTensor) -> None:
    y = local_map(lambda a: np.zeros(2) + dm.get_rank(), [[]], check_replicas=True)(x)
    with says(ValueError, "ranks 0 and 1"):
        y.local_value(0)


# -- a failing rank ----------------------------------------------------------------------------------------------------


class Own(Exception):
    """An error of the user's own with an attribute."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


def fails_on_one(a: Any) -> Any:
    if dm.get_rank() == 1 and isinstance(a, np.ndarray):
        raise Own("no such thing", code=7)
    return a


@pytest.mark.parametrize("shapes", [None, (6,)], ids=["traced", "declared"])
def test_the_error_of_a_rank_is_its_own(x: dm.DTensor, shapes: Any) -> None:
    y = local_map(fails_on_one, [[Shard(0)]], out_shapes=shapes)(x)
    with pytest.raises(Own, match="no such thing") as caught:
        y.compute()
    assert caught.value.code == 7
    assert caught.value.__notes__ == [
        "rank 1 at coordinate (1,) of ProcessMesh([0, 1], dim_names=['x']), running local_map(fails_on_one)"
    ]


def test_the_other_ranks_can_still_be_read_where_nothing_communicates(x: dm.DTensor) -> None:
    y = local_map(fails_on_one, [[Shard(0)]])(x)
    np.testing.assert_array_equal(y.local_value(0), [0, 1, 2])


@pytest.mark.processes
def test_notes_travel_between_processes(processes: Client) -> None:
    dm.shutdown()
    x = dm.arange(6, mesh=M2, placements=[Shard(0)])
    with pytest.raises(Own) as caught:
        local_map(fails_on_one, [[Shard(0)]])(x).compute()
    assert (caught.value.code, caught.value.__notes__[0][:25]) == (7, "rank 1 at coordinate (1,)")
    dm.shutdown()


# -- without a cluster -------------------------------------------------------------------------------------------------


def test_a_communicating_region_needs_a_cluster(x: dm.DTensor) -> None:
    declared = Declared(*map(tuple, [entry_tree([[Shard(0)]], "outs")[0]]), entry_tree([[Shard(0)]], "outs")[1])
    tree = flatten(((0,), {}))[1]
    call = Call("local_map(scale)", scale, M2, (Input(0),), tree, (x.layout,), declared, communicates=True)
    out = Out(Region(call, [x._node], x._node.world), 0, x.layout)
    with dask.config.set(scheduler="synchronous"), says(RuntimeError, "its ranks communicate, which needs a cluster"):
        dm.DTensor(out).compute()
    assert set(graph_of(out).layers) >= {out.name, out.region.name, out.region.gate}
    np.testing.assert_array_equal(dm.DTensor(out), np.arange(6) * 2)


def test_a_rank_that_communicates_where_the_traced_one_did_not() -> None:
    x = dm.arange(8, mesh=M22, placements=[Shard(0), Shard(0)])
    y = local_map(lambda a: all_reduce(a, "tp") if dm.get_rank() > 1 else a, [[Shard(0), Shard(0)]])(x)
    with says(RuntimeError, "local_map(lambda): rank 2 wants to communicate", "all must"):
        y.local_value(2)
