"""The planner against NumPy: values, bytes and words, for every kind of pair of layouts, with no cluster."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import plan_oracle as oracle
import pytest

from daskmesh.layout import Layout, make_layout
from daskmesh.mesh import ProcessMesh, init_mesh
from daskmesh.placement import Partial, Placement, ReduceType, Replicate, Shard
from daskmesh.plan import Plan, make_plan

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
P, MAX, MIN, PROD, AVG, ANY, ALL = map(Partial, ReduceType)
PARTIALS = (P, MAX, MIN, PROD, AVG, ANY, ALL)
EVERY = (S0, R, *PARTIALS)
DTYPES = ("i8", "f8", "?", "i1", "u1", "u8", "f4", "c16")
Placements = Sequence[Placement]


def dtype_for(a: Placements, b: Placements, i: int) -> str:
    """Each dtype in turn; bool where a value has to become any or all."""
    truth = [m for m, p in enumerate(b) if p in (ANY, ALL)]
    unchanged = all(p == q for p, q in zip(a, b, strict=False) if isinstance(p, Partial))
    kept = unchanged and all(a[m : m + 1] == b[m : m + 1] for m in truth)
    return DTYPES[i % len(DTYPES)] if kept or not truth else "?"


def run(
    meshes: tuple[ProcessMesh, ProcessMesh],
    pairs: Iterator[tuple[int, Placements, Placements]],
    shape_of: Any,
    seed: int,
    chunks_of: Any = None,
) -> int:
    """Check pairs of placements; case `i` takes its shape, dtype and road by `i` and the seed."""
    rng = np.random.default_rng(seed)
    done = 0
    for i, a, b in pairs:
        shape, dtype = shape_of(i), dtype_for(a, b, i + seed)
        source, target = (make_layout(mesh, p, shape, dtype) for mesh, p in zip(meshes, (a, b), strict=True))
        if chunks_of is not None:
            source, target = chunks_of(source, rng), chunks_of(target, rng)
        try:
            oracle.check(source, target, 0 if (i // 7 + seed) % 3 else 2**20, rng)
        except BaseException as error:
            error.add_note(f"case {i}: {source} -> {target}, seed {seed}")
            raise
        done += 1
    return done


def pairs_of(ndim: tuple[int, int], choices: Placements, stride: int = 1, start: int = 0) -> Iterator[Any]:
    """Every `stride`-th pair of placement lists; odd strides take all values in all places."""
    sides = [list(itertools.product(choices, repeat=n)) for n in ndim]
    total = len(sides[0]) * len(sides[1])
    for i in range(start, total, stride):
        yield i, list(sides[0][i // len(sides[1])]), list(sides[1][i % len(sides[1])])


@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_one_mesh_dim(p: int) -> None:
    """All 81 pairs of placements at all sizes 0..13: 1,134 cases a mesh."""
    mesh = init_mesh(p, ["x"])
    done = sum(run((mesh, mesh), pairs_of((1, 1), EVERY), lambda i, n=n: (n,), seed=n) for n in range(14))
    assert done == 1134


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("shape", [(2, 2), (2, 3)])
def test_two_mesh_dims(shape: tuple[int, int], part: int) -> None:
    """All 6,561 pairs of placements on either mesh, sizes 0..13 in turn."""
    mesh = init_mesh(shape, ["x", "y"])
    assert run((mesh, mesh), pairs_of((2, 2), EVERY, 3, part), lambda i: (i // 3 % 14,), seed=part) == 2187


def test_three_mesh_dims() -> None:
    """1,083 of the 531,441 pairs of placements on (2, 2, 2): one in 491."""
    mesh = init_mesh((2, 2, 2), ["x", "y", "z"])
    assert run((mesh, mesh), pairs_of((3, 3), EVERY, 491), lambda i: (i // 491 % 14,), seed=0) == 1083


def test_three_mesh_dims_of_sums_and_shards() -> None:
    """4,096 pairs have Shard, Replicate, sum or max in every place: one in 9 of them."""
    mesh = init_mesh((2, 2, 2), ["x", "y", "z"])
    assert run((mesh, mesh), pairs_of((3, 3), (S0, R, P, MAX), 9), lambda i: (8 + i % 6,), seed=3) == 456


SHAPES_2D = ((4, 6), (5, 3), (1, 7), (0, 4), (7, 2), (6, 6))
SHAPES_3D = ((3, 2, 5), (2, 3, 4), (1, 0, 3), (4, 4, 4), (2, 7, 1))


@pytest.mark.parametrize(
    ("mesh_shape", "choices", "shapes", "stride"),
    [
        ((3,), (S0, S1, R, P, MAX, AVG), SHAPES_2D, 1),
        ((2, 2), (S0, S1, R, P, AVG), SHAPES_2D, 1),
        ((2, 3), (S0, S1, R, P, MAX), SHAPES_2D, 1),
        ((2, 3), (S0, S1, S2, R, P), SHAPES_3D, 1),
        ((2, 2, 2), (S0, S1, S2, R, P, MAX), SHAPES_3D, 101),
    ],
)
def test_more_tensor_dims(mesh_shape: tuple[int, ...], choices: Placements, shapes: Any, stride: int) -> None:
    mesh = init_mesh(mesh_shape)
    k = len(mesh_shape)
    done = run((mesh, mesh), pairs_of((k, k), choices, stride), lambda i: shapes[i // stride % len(shapes)], seed=k)
    assert done == -(-(len(choices) ** (2 * k)) // stride)


def uneven(layout: Layout, rng: np.random.Generator) -> Layout:
    """Parts cut at random places, empty ones among them."""
    chunks = []
    for n, c in zip(layout.shape, layout.chunks, strict=True):
        ends = np.sort(rng.integers(0, n + 1, size=len(c) - 1))
        chunks.append(np.diff(ends, prepend=0, append=n).tolist())
    return make_layout(layout.mesh, layout.placements, layout.shape, layout.dtype, chunks)


@pytest.mark.parametrize(
    ("mesh_shape", "choices", "shapes"),
    [
        ((3,), (S0, S1, R, P, AVG), SHAPES_2D),
        ((5,), (S0, R, P, MIN), ((9,), (3,), (13,))),
        ((2, 2), (S0, S1, R, P), SHAPES_2D),
        ((2, 3), (S0, S1, R, P), SHAPES_2D),
    ],
)
def test_part_sizes_given(mesh_shape: tuple[int, ...], choices: Placements, shapes: Any) -> None:
    mesh = init_mesh(mesh_shape)
    k = len(mesh_shape)
    repeats = 6 if k == 1 else 1
    for seed in range(repeats):
        run((mesh, mesh), pairs_of((k, k), choices), lambda i, s=seed: shapes[(i + s) % len(shapes)], seed, uneven)


OTHER_MESHES = [
    ([0, 1], [1, 0]),
    ([0, 1], [2, 3]),
    ([0, 1], [0, 1, 2]),
    ([3, 1, 0, 2], [1, 2]),
    ([0, 1, 2], [7, 8, 9, 0, 2]),
    ([5], [0, 5, 1]),
    ([2, 0, 1], [[0, 1], [2, 3]]),
    ([[0, 1], [2, 3]], [0, 1, 2, 3]),
    ([[0, 1], [2, 3]], [[2, 0], [3, 1]]),
    ([[0, 1], [2, 3]], [[4, 5], [6, 7]]),
    ([[0, 1], [2, 3]], [[1, 0, 5], [4, 3, 2]]),
    ([[0, 1, 2], [3, 4, 5]], [[9, 4], [5, 1], [0, 2]]),
    ([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], [3, 4, 9]),
    ([[4, 2], [8, 1]], [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
]


@pytest.mark.parametrize(("source", "target"), OTHER_MESHES)
def test_another_mesh(source: Any, target: Any) -> None:
    """Other rank numbers, ranks in common in another order, another number of ranks or of mesh dims."""
    a, b = ProcessMesh(source), ProcessMesh(target)
    choices = (S0, R, P, MAX, AVG)
    total = len(choices) ** (a.ndim + b.ndim)
    stride = -(-total // 400) | 1
    stride += 2 * (stride == 5)
    run((a, b), pairs_of((a.ndim, b.ndim), choices, stride), lambda i: (i // stride % 14,), seed=a.size)


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (3,), (5,), (2, 2), (2, 3)])
def test_zero_dims(mesh_shape: tuple[int, ...]) -> None:
    mesh = init_mesh(mesh_shape)
    k = len(mesh_shape)
    stride = 1 if k == 1 else 7
    done = run((mesh, mesh), pairs_of((k, k), (R, *PARTIALS), stride), lambda i: (), seed=mesh.size)
    assert done == -(-(64**k) // stride)


def test_zero_dims_of_three_mesh_dims() -> None:
    mesh = init_mesh((2, 2, 2))
    run((mesh, mesh), pairs_of((3, 3), (R, *PARTIALS), 1999), lambda i: (), seed=1)


# Placing and reading back


SPECIAL = {
    "?": [True, False],
    "i1": [-128, 127, -1, 0, 5],
    "u1": [0, 1, 255],
    "i8": [-(2**63), 2**63 - 1, -1, 0, 7],
    "u8": [0, 1, 2**64 - 1],
    "f4": [-np.inf, np.inf, np.nan, -0.0, 1.5, 3e38],
    "f8": [-np.inf, np.inf, np.nan, -0.0, 0.1, 1e308, 5e-324],
    "c16": [1 - 2j, 0j, -0.5j, complex(0.1, 1e300)],
}


@pytest.mark.parametrize("dtype", SPECIAL)
@pytest.mark.parametrize("mesh_shape", [(3,), (2, 3), (2, 2, 2)])
def test_placing_and_reading_back_is_the_identity(mesh_shape: tuple[int, ...], dtype: str) -> None:
    """Every combination of sum, max, min, prod, integer avg, and any and all on bool, to the last bit but the sign of zero."""
    ops = [P, MAX, MIN, PROD] + [AVG] * (dtype[0] not in "fc") + [ANY, ALL] * (dtype == "?")
    mesh = init_mesh(mesh_shape)
    value = np.array(SPECIAL[dtype], dtype)
    source = make_layout(mesh, [], value.shape, dtype)
    for combination in itertools.product(ops, repeat=mesh.ndim):
        target = make_layout(mesh, combination, value.shape, dtype)
        held = carried(make_plan(source, target), oracle.cut(source, value))
        np.testing.assert_array_equal(oracle.value(target, oracle.joined(target, held)), value, err_msg=str(combination))
        back = carried(make_plan(target, source, 0), held)
        np.testing.assert_array_equal(oracle.joined(source, back), value, err_msg=str(combination))


def carried(plan: Plan, held: oracle.Locals) -> oracle.Locals:
    for stage in plan.stages:
        held = oracle.carry_out(stage, held)
    return held


def test_terms_of_a_placed_value() -> None:
    """The value at (0, 0), 1 along y, 0 elsewhere: the reverse of reducing mesh dim 0 first."""
    mesh = init_mesh((2, 2), ["x", "y"])
    source, target = (make_layout(mesh, p, (1,), "i8") for p in ([R, R], [P, PROD]))
    held = carried(make_plan(source, target), oracle.cut(source, np.array([7])))
    assert {c: int(v[0]) for c, v in held.items()} == {(0, 0): 7, (0, 1): 1, (1, 0): 0, (1, 1): 0}


@pytest.mark.parametrize(
    ("op", "want"),
    [(P, [4, 7, 1]), (MAX, [3, 4, 0.5]), (MIN, [1, 3, 0.5]), (PROD, [3, 12, 0.25]), (AVG, [2, 3.5, 0.5])],
)
def test_reductions_of_two_terms(op: Partial, want: list[float]) -> None:
    mesh = init_mesh(2, ["x"])
    terms = np.array([[1, 4, 0.5], [3, 3, 0.5]])
    source = make_layout(mesh, [op], (3,), "f8")
    whole, cut = (make_layout(mesh, [p], (3,), "f8") for p in (R, S0))
    held = oracle.cut(source, terms)
    for got in carried(make_plan(source, whole), held).values():
        assert got.tolist() == want
    parts = carried(make_plan(source, cut), held)
    assert [parts[0,].tolist(), parts[1,].tolist()] == [want[:2], want[2:]]


@pytest.mark.parametrize(
    ("ops", "want"),
    [
        ((P, P), 10), ((MAX, MAX), 4), ((MIN, MIN), 1), ((PROD, PROD), 24), ((AVG, AVG), 2.5),
        ((P, MAX), 6), ((MAX, P), 7), ((MIN, P), 3), ((MIN, MAX), 2),
        ((AVG, P), 5), ((AVG, MAX), 3), ((PROD, P), 11), ((PROD, MAX), 8),
    ],
)  # fmt: skip
def test_mixed_terms_reduce_mesh_dim_0_first(ops: Placements, want: float) -> None:
    mesh = init_mesh((2, 2), ["x", "y"])
    terms = np.array([[1.0, 2.0], [3.0, 4.0]] if len(set(ops)) == 1 else [[1.0, 4.0], [3.0, 2.0]])
    source, target = (make_layout(mesh, p, (), "f8") for p in (ops, [R, R]))
    held = carried(make_plan(source, target), oracle.cut(source, terms))
    assert {float(v) for v in held.values()} == {want}


def test_terms_that_do_not_commute_go_through_the_value() -> None:
    """[sum, max] -> [sum, R]: the max over y of the sums over x; keeping x's terms apart would give the sum of maxima."""
    mesh = init_mesh((2, 2), ["x", "y"])
    source, target = (make_layout(mesh, p, (1,), "i8") for p in ([P, MAX], [P, R]))
    plan = make_plan(source, target)
    held = carried(plan, oracle.cut(source, np.array([[[1], [4]], [[3], [2]]])))
    assert plan.stages[0].kept == ()
    assert [int(v[0]) for v in held.values()] == [6, 6, 0, 0]


def test_terms_that_commute_stay_apart() -> None:
    mesh = init_mesh((2, 2), ["x", "y"])
    source, target = (make_layout(mesh, p, (1,), "i8") for p in ([MAX, P], [R, P]))
    plan = make_plan(source, target)
    held = carried(plan, oracle.cut(source, np.array([[[1], [4]], [[3], [2]]])))
    assert plan.stages[0].kept == (1,)
    assert [int(v[0]) for v in held.values()] == [3, 4, 3, 4]


@pytest.mark.parametrize("road", [0, 2**20])
def test_kept_terms_stay_apart_on_either_road(road: int) -> None:
    """A later mesh dim cuts the only long tensor dim: a transposed middle would lose the terms of z."""
    mesh = init_mesh((2, 3, 2), ["x", "y", "z"])
    a, b = (make_layout(mesh, p, (9, 1), "i8") for p in ([P, S0, MAX], [R, R, MAX]))
    rng = np.random.default_rng(0)
    terms = oracle.random_terms(a, rng)
    result = oracle.joined(b, carried(make_plan(a, b, road), oracle.cut(a, terms)))
    assert oracle.check_kept(a, b, terms, result)


@pytest.mark.parametrize("placements", [p for p in itertools.product(EVERY, repeat=2) if p != (S0, S0)])
def test_same_layout_moves_nothing(placements: Placements) -> None:
    mesh = init_mesh((2, 3), ["x", "y"])
    layout = make_layout(mesh, placements, (7,), "f8")
    plan = make_plan(layout, layout, 0)
    assert (plan.total_bytes, len(plan.stages), plan.pairs) == (0, 1, {})
    held = oracle.cut(layout, oracle.random_terms(layout, np.random.default_rng(0)))
    after = carried(plan, held)
    assert all(np.array_equal(held[c], after[c]) for c in held)


# Bytes


def plan_of(mesh: ProcessMesh, a: Placements, b: Placements, shape: Any, two_stage_bytes: int = 0) -> Plan:
    source, target = (make_layout(mesh, p, shape, "f8") for p in (a, b))
    plan = make_plan(source, target, two_stage_bytes)
    oracle.check_bytes(plan)
    return plan


@pytest.mark.parametrize("p", [2, 3, 5, 8])
@pytest.mark.parametrize("n", [0, 1, 4, 13, 40])
def test_bounds_on_one_mesh_dim(p: int, n: int) -> None:
    mesh = init_mesh(p, ["x"])
    assert plan_of(mesh, [R], [S0], (n,)).total_bytes == 0
    assert plan_of(mesh, [R], [P], (n,)).total_bytes == 0
    assert plan_of(mesh, [S0], [R], (n,)).total_bytes == (p - 1) * n * 8
    assert plan_of(mesh, [P], [S0], (n,)).total_bytes == (p - 1) * n * 8
    assert plan_of(mesh, [P], [P], (n,)).total_bytes == 0
    two = plan_of(mesh, [P], [R], (n,))
    assert two.total_bytes == 2 * (p - 1) * n * 8
    assert len(two.stages) == (2 if n else 1)
    one = plan_of(mesh, [P], [R], (n,), 2**20)
    assert (one.total_bytes, len(one.stages)) == (p * (p - 1) * n * 8, 1)


@pytest.mark.parametrize(
    ("mesh_shape", "a", "b", "most"),
    [
        ((2, 4), [S0, S0], [R, S0], 0.25),
        ((2, 4), [S0, S1], [S1, S0], 0.125),
        ((2, 4), [S0, S0], [S1, S1], 7 / 64),
        ((2, 4), [R, S0], [S0, S0], 0.125),
        ((2, 4), [R, S0], [S0, R], 0.5),
        ((2, 4), [S0, R], [R, S0], 0.25),
        ((2, 4), [P, P], [R, R], 1.75),
        ((2, 4), [P, P], [R, S0], 1.0),
        ((2, 4), [P, S0], [S0, S0], 0.25),
        ((2, 4), [S0, P], [R, S0], 0.625),
        ((2, 2, 2), [P, P, P], [R, S0, R], 1.25),
        ((2, 2, 2), [S0, S1, S2], [S2, S0, S1], 0.125),
    ],
)
def test_bytes_received_by_the_busiest_rank(mesh_shape: Any, a: Placements, b: Placements, most: float) -> None:
    """In units of the whole array: the least that a direct exchange can do, or less than the best chain of collectives."""
    plan = plan_of(init_mesh(mesh_shape), a, b, (16, 16, 16))
    assert max(plan.received.values()) / plan.source.nbytes == most


def test_a_mesh_with_other_names_moves_nothing() -> None:
    for placements in itertools.product((S0, R, P, MAX), repeat=2):
        a, b = (make_layout(init_mesh((2, 3), names), placements, (7,), "f8") for names in (["x", "y"], ["u", "v"]))
        plan = make_plan(a, b, 0)
        oracle.check_bytes(plan)
        assert plan.total_bytes == 0


def test_readers_outside_the_mesh_spread_over_the_replicas() -> None:
    a = make_layout(init_mesh(3), [R], (12,), "f8")
    b = make_layout(ProcessMesh([10, 11, 12, 13, 14, 15]), [R], (12,), "f8")
    plan = make_plan(a, b)
    sent = dict.fromkeys(range(3), 0)
    for (source, _), n in plan.pairs.items():
        sent[source] += n
    assert set(sent.values()) == {2 * 12 * 8}


def test_many_ranks_have_few_loads() -> None:
    """Loads are made on demand, by rank: nothing of the size of all pairs is built."""
    mesh = init_mesh((32, 32), ["x", "y"])
    source, target = (make_layout(mesh, p, (4096, 4096), "f8") for p in ([S0, S1], [S1, S0]))
    plan = make_plan(source, target)
    assert [len(plan.stages[0].loads(r)) for r in (0, 33, 700)] == [1, 1, 1]
    assert plan.total_bytes == 4096 * 4096 * 8 * 31 // 32
    assert plan.stages[0].loads(5000) == ()


# Words


def test_text_of_one_stage() -> None:
    plan = plan_of(init_mesh(2, ["x"]), [S0], [S1], (4, 4))
    assert plan.text == (
        "float64 (4, 4): [Shard(0)] -> [Shard(1)]\n"
        "moves 64 B in 1 stage, at most 32 B to one rank (each rank loads the views it lacks)\n"
        "  rank 0 receives 32 B\n"
        "  rank 1 receives 32 B"
    )


def test_text_says_which_road_and_why() -> None:
    mesh = init_mesh(4, ["x"])
    one = plan_of(mesh, [P], [R], (100,), 2**20)
    assert one.text.splitlines()[1] == (
        "moves 9.375 KiB in 1 stage, at most 2.344 KiB to one rank (each rank loads the 4 terms of what it needs and "
        "folds them: a rank holds 800 B, no more than two-stage-bytes 1 MiB)"
    )
    two = plan_of(mesh, [P], [R], (100,), 0)
    assert two.text.splitlines()[1] == (
        "moves 4.688 KiB in 2 stages, at most 1.172 KiB to one rank (reduce-scatter, then all-gather: a rank holds "
        "800 B, more than two-stage-bytes 0 B; in one stage 9.375 KiB would move)"
    )
    cut = plan_of(mesh, [P], [S0], (100,), 0)
    assert "in 1 stage" in cut.text
    assert "two stages would not move less" in cut.text


def test_text_of_many_ranks_is_cut() -> None:
    text = plan_of(init_mesh(12, ["x"]), [S0], [R], (12,)).text
    assert text.splitlines()[-1] == "  ... and 4 more ranks"


def test_layouts_that_do_not_fit() -> None:
    mesh = init_mesh(2)
    a = make_layout(mesh, [R], (3,), "f8")
    with pytest.raises(ValueError, match=r"\(3,\) float64 cannot become \(4,\) float64"):
        make_plan(a, make_layout(mesh, [R], (4,), "f8"))
    with pytest.raises(ValueError, match=r"\(3,\) float64 cannot become \(3,\) float32"):
        make_plan(a, make_layout(mesh, [R], (3,), "f4"))


@pytest.mark.parametrize("op", [ANY, ALL])
def test_numbers_do_not_become_truth_values(op: Partial) -> None:
    mesh = init_mesh((2, 2), ["x", "y"])
    whole, last, first = (make_layout(mesh, p, (3,), "f8") for p in ([R, R], [R, op], [op, P]))
    text = rf"^reshard: cannot place float64 values as Partial\('{op.op}'\) on mesh dim 'y' of size 2.*place x != 0"
    with pytest.raises(TypeError, match=text):
        make_plan(whole, last)
    assert make_plan(last, last).total_bytes == 0
    # A sum of truth values is a number again.
    with pytest.raises(TypeError, match="mesh dim 'x'"):
        make_plan(first, make_layout(mesh, [op, R], (3,), "f8"))
