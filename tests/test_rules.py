"""Propagation against a simulator: terms are made up for the layouts that a decision asks for, the operation runs on every
coordinate's local, the results are folded as the output layout says, and NumPy on the whole arrays is the judge."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from daskmesh.algebra import carried, linear, ufunc_flows
from daskmesh.layout import Layout, make_layout
from daskmesh.mesh import ProcessMesh, init_mesh
from daskmesh.placement import Partial, Placement, Replicate, Shard, reduction
from daskmesh.plan import make_plan
from daskmesh.rules import (
    Decision,
    Dense,
    Signature,
    broadcasting,
    contraction,
    decide,
    elementwise,
    matmul,
    rearranging,
    reducing,
)

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
OPS = ("sum", "max", "min", "prod", "avg", "any", "all")
PARTIALS = tuple(Partial(op) for op in OPS)
MESHES = [init_mesh((2,)), init_mesh((3,)), init_mesh((2, 2)), init_mesh((2, 3))]
F8 = np.dtype("f8")
Local = Callable[..., Any]


def values(rng: np.random.Generator, shape: Sequence[int], dtype: Any, op: str | None) -> Any:
    """Terms that bring out what a wrong rule overlooks: neutral elements, wrapping integers, zeros."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        wide = rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
        ends = np.where(rng.random(shape) < 0.5, dtype.type(info.min), dtype.type(info.max))
        small = rng.integers(0, 3, shape).astype(dtype)
        return np.where(rng.random(shape) < 0.4, np.where(rng.random(shape) < 0.5, ends, wide), small)
    x = rng.choice([-2.0, -1.0, -0.5, 0.0, 0.0, 0.25, 0.5, 1.0, 3.0], size=shape)
    if op in ("max", "min"):
        x = np.where(rng.random(shape) < 0.3, -np.inf if op == "max" else np.inf, x)
    if dtype.kind == "c":
        x = x + 1j * rng.choice([-1.0, 0.0, 2.0], size=shape)
    return x.astype(dtype)


def ops_of(layout: Layout) -> dict[int, str]:
    return {m: p.op for m, p in enumerate(layout.placements) if isinstance(p, Partial)}


def fold(layout: Layout, terms: dict[tuple[int, ...], Any]) -> dict[tuple[int, ...], Any]:
    """Reduce the Partial mesh dims, dim 0 first; every coordinate then holds the value."""
    for m, op in ops_of(layout).items():
        n = layout.mesh.shape[m]
        rows = {c: [terms[(*c[:m], i, *c[m + 1 :])] for i in range(n)] for c in terms}
        terms = {c: np.asarray(reduction(op).fold([np.array(x) for x in row], n)) for c, row in rows.items()}
    return terms


def made_up(rng: np.random.Generator, layout: Layout, source: Layout) -> tuple[dict[tuple[int, ...], Any], Any]:
    """Locals of every coordinate, and the global value; terms that `source` does not hold are placed ones."""
    ops = ops_of(layout)
    op = next(iter(ops.values()), None)
    placed = {m: reduction(op) for m, op in ops.items() if source.placements[m] != layout.placements[m]}
    free = [m for m in ops if m not in placed]
    keys = itertools.product(*(range(layout.mesh.shape[m]) for m in free))
    whole = {key: values(rng, layout.shape, layout.dtype, op) for key in keys}
    full = {}
    for c in layout.coords():
        off = [row for m, row in placed.items() if c[m] and not row.copies]
        full[c] = np.full(layout.shape, off[0].neutral(layout.dtype)) if off else whole[tuple(c[m] for m in free)]
    value = fold(layout, full)[layout.coords()[0]]
    return {c: x[layout.box(c)] for c, x in full.items()}, value


def check(decision: Decision, local: Local, whole: Local, seed: int = 0) -> None:
    """Run the decision on made-up terms; `local` also gets the local shape of the output."""
    rng = np.random.default_rng(seed)
    made = [made_up(rng, *pair) for pair in zip(decision.operands, decision.sources, strict=True)]
    out = decision.output
    with np.errstate(all="ignore"):
        wanted = np.asarray(whole(*(value for _, value in made)))
        got = fold(out, {c: np.asarray(local(out.local_shape(c), *(m[c] for m, _ in made))) for c in out.coords()})
    assert (wanted.shape, wanted.dtype) == (out.shape, out.dtype)
    for c, x in got.items():
        assert x.dtype == out.dtype
        part = wanted[out.box(c)]
        assert x.shape == part.shape == out.local_shape(c), decision
        rtol = 1e-6 if out.dtype.kind in "fc" else 0
        close = np.isclose(x, part, rtol=rtol, atol=rtol * 10, equal_nan=True) if rtol else x == part
        assert np.all(close), f"{decision.text}\n{x}\n{part}"


def placements(ndim: int, partials: Sequence[Placement] = PARTIALS) -> list[Placement]:
    return [R, *map(Shard, range(ndim)), *partials]


def layouts(rng: random.Random, mesh: ProcessMesh, shape: Sequence[int], dtype: Any, choices: Sequence[Placement]) -> Layout:
    """A random layout, with uneven part sizes every other time."""
    placed = tuple(rng.choice(choices) for _ in mesh.shape)
    layout = make_layout(mesh, placed, shape, dtype)
    if rng.random() < 0.5:
        return layout
    chunks = []
    for n, c in zip(layout.shape, layout.chunks, strict=True):
        cuts = [0, *sorted(rng.randint(0, n) for _ in c[1:]), n]
        chunks.append(tuple(b - a for a, b in itertools.pairwise(cuts)))
    return layout.replace(chunks=tuple(chunks))


def ufunc_case(name: str, operands: Sequence[Layout | Dense], constants: tuple[Any, ...] = ()) -> Decision:
    ufunc = getattr(np, name)
    known = constants or (None,) * len(operands)
    with np.errstate(all="ignore"):
        args = [np.ones((), x.dtype) if c is None else c for x, c in zip(operands, known, strict=True)]
        dtype = np.asarray(ufunc(*args)).dtype
    signature = elementwise(tuple(x.shape for x in operands), ufunc_flows(name, constants))
    return decide(signature, tuple(operands), dtype)


SHAPES = [((4, 5), (4, 5)), ((3, 2), (2,)), ((3, 1), (1, 4)), ((5,), ()), ((0, 3), (3,)), ((1, 2), (2, 2)), ((), ())]
BINARY = ["add", "subtract", "multiply", "divide", "maximum", "minimum", "logical_or", "logical_and", "greater", "power"]
BOOLEAN = ["add", "multiply", "maximum", "minimum", "logical_or", "logical_and", "bitwise_or", "bitwise_and", "equal"]
INTEGER = ["add", "subtract", "multiply", "divide", "maximum", "minimum", "logical_or", "logical_and", "bitwise_or", "less"]
KINDS = [
    *((name, ("f8", "f8")) for name in BINARY),
    *((name, ("f4", "f8")) for name in ("add", "multiply", "maximum")),
    *((name, ("c16", "f8")) for name in ("add", "multiply", "subtract")),
    *((name, ("?", "?")) for name in BOOLEAN),
    *((name, pair) for name in INTEGER for pair in (("i1", "i1"), ("u1", "i4"), ("i8", "i2"))),
    *((name, pair) for name in ("add", "multiply", "maximum", "subtract") for pair in (("i1", "f8"), ("i8", "u8"))),
    *((name, ("?", "i2")) for name in ("add", "multiply", "maximum")),
]


@pytest.mark.parametrize("name", sorted({k for k, _ in KINDS}))
def test_binary_ufuncs_equal_numpy(name: str) -> None:
    rng = random.Random(name)
    for dtypes, mesh, (a, b) in itertools.product([d for k, d in KINDS if k == name], MESHES, SHAPES):
        pair = []
        for shape, dtype in zip((a, b), dtypes, strict=True):
            pair.append(layouts(rng, mesh, shape, dtype, placements(len(shape), rng.choice([PARTIALS, PARTIALS, ()]))))
        if rng.random() < 0.3:
            same = [layout.placements[0] for layout in pair]
            pair = [x.replace(placements=(same[0],) * mesh.ndim) for x in pair] if isinstance(same[0], Partial) else pair
            pair = [make_layout(mesh, x.placements, x.shape, x.dtype) for x in pair]
        ufunc = getattr(np, name)
        check(ufunc_case(name, pair), lambda _, x, y, f=ufunc: f(x, y), ufunc, rng.randrange(99))


@pytest.mark.parametrize("dtype", ["f8", "i1", "u1", "?", "c16"])
@pytest.mark.parametrize("name", ["add", "multiply", "maximum", "logical_or", "logical_and"])
def test_every_pair_of_placements_along_one_mesh_dim(name: str, dtype: str) -> None:
    ufunc = getattr(np, name)
    for i, (a, b) in enumerate(itertools.product(placements(1), repeat=2)):
        pair = [make_layout(MESHES[i % 2], [p], (4,), dtype) for p in (a, b)]
        check(ufunc_case(name, pair), lambda _, x, y: ufunc(x, y), ufunc, i)


UNARY = (
    "exp expm1 tanh sinh arctan cbrt floor ceil trunc rint sign sqrt log log1p arccosh deg2rad positive conjugate negative "
    "absolute square logical_not invert reciprocal sin isnan"
).split()


@pytest.mark.parametrize("name", UNARY)
def test_unary_ufuncs_equal_numpy(name: str) -> None:
    rng, ufunc = random.Random(name), getattr(np, name)
    taken = [d for d in ("f8", "f4", "i1", "u2", "?", "c8") if accepts(ufunc, d)]
    for dtype, mesh in itertools.product(taken, MESHES):
        for p in placements(2):
            shape = rng.choice([(3, 4), (5, 1), (0, 2)])
            layout = make_layout(mesh, [p, rng.choice(placements(2))][: mesh.ndim], shape, dtype)
            check(ufunc_case(name, [layout]), lambda _, x: ufunc(x), ufunc, rng.randrange(99))


def accepts(ufunc: np.ufunc, dtype: str) -> bool:
    try:
        with np.errstate(all="ignore"):
            ufunc(np.ones(1, dtype))
    except TypeError:
        return False
    return True


@pytest.mark.parametrize("constant", [2, -3, 0, 0.5, -1.5, np.inf, -np.inf, np.nan, True, 1j, np.float64(2)])
@pytest.mark.parametrize("name", ["add", "subtract", "multiply", "divide"])
def test_known_constants(name: str, constant: Any) -> None:
    dtype, ufunc = np.result_type(F8, constant), getattr(np, name)
    dense = Dense((), np.asarray(constant).dtype)
    for p, left in itertools.product(placements(1), (False, True)):
        layout = make_layout(MESHES[1], [p], (4,), dtype)
        operands, constants = ((dense, layout), (constant, None)) if left else ((layout, dense), (None, constant))
        decision = decide(elementwise(tuple(x.shape for x in operands), ufunc_flows(name, constants)), operands, dtype)
        whole = (lambda c, x: ufunc(constant, x)) if left else (lambda x, c: ufunc(x, constant))
        # A constant that is placed: the neutral element must take its place, off coordinate 0.
        if ops_of(decision.operands[not left]):
            check_placed(decision, ufunc, constant, left)
        else:
            check(decision, lambda _, a, b, w=whole: w(a, b), whole)


def check_placed(decision: Decision, ufunc: np.ufunc, value: Any, left: bool) -> None:
    k, out = int(left), decision.output
    made, whole = made_up(np.random.default_rng(0), decision.operands[k], decision.sources[k])
    row = reduction(ops_of(decision.operands[1 - k])[0])
    placed = {c: value if c[0] == 0 else row.neutral(np.asarray(value).dtype) for c in out.coords()}
    with np.errstate(all="ignore"):
        terms = {c: ufunc(placed[c], made[c]) if left else ufunc(made[c], placed[c]) for c in out.coords()}
        wanted = ufunc(value, whole) if left else ufunc(whole, value)
    np.testing.assert_allclose(fold(out, terms)[out.coords()[0]], wanted)


def test_a_constant_too_large_for_a_float_counts_as_infinite() -> None:
    assert ufunc_flows("multiply", (None, 10**400)) == ()


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("op", ["sum", "prod", "max", "min", "any", "all"])
def test_reductions_equal_numpy(op: str, keepdims: bool) -> None:
    rng, function = random.Random(op), getattr(np, op)
    for dtype, mesh, shape in itertools.product(["f8", "i1", "i8", "u4", "?"], MESHES, [(3, 4), (5, 1), (2, 0), (1, 7), (4,)]):
        for _ in range(3):
            axes = tuple(d for d in range(len(shape)) if rng.random() < 0.6)
            layout = layouts(rng, mesh, shape, dtype, placements(len(shape)))
            if op in ("max", "min") and any(shape[d] == 0 for d in axes):
                continue
            result = function(np.ones(shape, dtype), axis=axes, keepdims=keepdims).dtype
            decision = decide(reducing(len(shape), axes, op, keepdims=keepdims), (layout,), result)
            start = {}
            if decision.may_be_empty:
                start["initial"] = reduction(op).neutral(layout.dtype)
            check(
                decision,
                lambda _, x, a=axes, s=start: function(x, axis=a, keepdims=keepdims, **s),
                lambda x, a=axes: function(x, axis=a, keepdims=keepdims),
                rng.randrange(99),
            )


def test_a_weighted_mean_is_a_sum_divided_by_the_global_count() -> None:
    for sizes, p in itertools.product([(1, 2), (3, 0), (2, 1)], [S0, P, Partial("avg")]):
        chunks = [sizes] if p == S0 else None
        layout = make_layout(MESHES[0], [p], (3,), F8, chunks)
        decision = decide(reducing(1, (0,), "sum"), (layout,), F8)
        assert decision.total_bytes == 0
        check(decision, lambda _, x: x.sum() / 3, np.mean)


MATMULS = [((3, 4), (4, 2)), ((4,), (4, 3)), ((2, 4), (4,)), ((5,), (5,)), ((2, 3, 4), (4, 5)), ((1, 2, 3), (4, 3, 2)),
           ((2, 0), (0, 3)), ((1, 1), (1, 1)), ((3, 2, 2), (3, 2, 1))]  # fmt: skip


@pytest.mark.parametrize("dtypes", [("f8", "f8"), ("i1", "i8"), ("?", "?"), ("f4", "c16"), ("i4", "i4")])
def test_matmul_equals_numpy(dtypes: tuple[str, str]) -> None:
    rng = random.Random(str(dtypes))
    dtype = np.result_type(*dtypes)
    for mesh, (a, b) in itertools.product(MESHES, MATMULS):
        for _ in range(3):
            pair = tuple(layouts(rng, mesh, s, d, placements(len(s), rng.choice([(P,), PARTIALS])))
                         for s, d in zip((a, b), dtypes, strict=True))  # fmt: skip
            check(decide(matmul(a, b), pair, dtype), lambda _, x, y: x @ y, np.matmul, rng.randrange(99))


@pytest.mark.parametrize("subscripts", ["ij,jk,kl->il", "ij,ij->i", "bij,bjk->bki", "ij->", "ij->ji", "ii->i", "i,j,ij->"])
def test_einsum_equals_numpy(subscripts: str) -> None:
    rng = random.Random(subscripts)
    left, right = subscripts.split("->")
    sizes = {"i": 3, "j": 4, "k": 2, "l": 5, "b": 2}
    operands = tuple(tuple(s) for s in left.split(","))
    shapes = tuple(tuple(3 if left == "ii" else sizes[x] for x in s) for s in operands)
    for mesh in MESHES * 4:
        given = tuple(layouts(rng, mesh, s, F8, placements(len(s), (P, Partial("avg")))) for s in shapes)
        decision = decide(contraction(operands, tuple(right), shapes), given, F8)
        check(decision, lambda _, *x: np.einsum(subscripts, *x), lambda *x: np.einsum(subscripts, *x), rng.randrange(99))


def test_moving_dims_about_keeps_every_placement() -> None:
    orders = [(1, 0), (None, 0, 1), (0, None, 1), (1, None, 0, None)]
    for mesh, dtype, order in itertools.product(MESHES, ["f8", "i2", "?"], orders):
        for p in placements(2):
            layout = make_layout(mesh, [p] * mesh.ndim, (3, 5), dtype)
            decision = decide(rearranging(2, order), (layout,), layout.dtype)
            assert decision.operands == (layout,)
            moved = [order.index(p.dim)] if isinstance(p, Shard) else []
            assert decision.output.placements == tuple(Shard(moved[0]) if moved else p for _ in mesh.shape)
            check(decision, lambda _, x, o=order: rearranged(x, o), lambda x, o=order: rearranged(x, o))


def rearranged(x: Any, order: Sequence[int | None]) -> Any:
    kept = [d for d in order if d is not None]
    return x.transpose(kept)[tuple(None if d is None else slice(None) for d in order)]


def test_a_squeezed_dim_is_not_cut() -> None:
    layout = make_layout(MESHES[0], [S0], (1, 4), F8)
    decision = decide(rearranging(2, (1,)), (layout,), F8)
    assert (decision.output.placements, decision.output.shape, decision.total_bytes) == ((S0,), (4,), 16)
    check(decision, lambda _, x: x.squeeze(0), lambda x: x.squeeze(0))


@pytest.mark.parametrize(("shape", "to"), [((3,), (2, 3)), ((3, 1), (3, 4)), ((), (5,)), ((1, 1), (2, 2)), ((2, 3), (2, 3))])
def test_broadcasting(shape: tuple[int, ...], to: tuple[int, ...]) -> None:
    for mesh, dtype in itertools.product(MESHES, ["f8", "?"]):
        for p in placements(len(shape)):
            layout = make_layout(mesh, [p], shape, dtype)
            decision = decide(broadcasting(shape, to), (layout,), layout.dtype)
            check(decision, lambda s, x: np.broadcast_to(x, s), lambda x: np.broadcast_to(x, to))
            if p == R:
                assert decision.output.placements == (R,) * mesh.ndim
            for fixed in (R, Shard(0)):
                target = make_layout(mesh, [fixed], to, dtype)
                decision = decide(broadcasting(shape, to), (layout,), layout.dtype, target)
                assert decision.result == target
                check(decision, lambda s, x: np.broadcast_to(x, s), lambda x: np.broadcast_to(x, to))


def test_where_and_clip() -> None:
    rng = random.Random(5)
    for mesh, dtype in itertools.product(MESHES, ["f8", "i1", "?"]):
        for p in placements(1):
            cond = layouts(rng, mesh, (4,), "?", [R, R, S0])
            x, y = (make_layout(mesh, [p] * mesh.ndim, (4,), dtype) for _ in range(2))
            signature = elementwise(((4,),) * 3, carried(2, fixed=1))
            check(decide(signature, (cond, x, y), x.dtype), lambda _, *a: np.where(*a), np.where)
            if dtype != "?":
                dense = Dense((), x.dtype)
                decision = decide(elementwise(((4,), (), ()), ufunc_flows("clip")), (x, dense, dense), x.dtype)
                check(decision, lambda _, a, lo, hi: np.clip(a, 0, 1), lambda a, lo, hi: np.clip(a, 0, 1))


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(["f8", "f4", "i8", "i4", "i1", "u1", "?", "c16"], 2)))
def test_casts(source: str, target: str) -> None:
    if source == "c16" and target != "?":
        return
    for i, p in enumerate(PARTIALS):
        if source[0] == "f" and target[0] in "iu":
            continue  # infinities have no integer
        layout = make_layout(MESHES[i % 2], [p], (4,), source)
        decision = decide(elementwise(((4,),), carried()), (layout,), np.dtype(target))
        check(decision, lambda _, x: x.astype(target), lambda x: x.astype(target), i)


@pytest.mark.parametrize(
    ("source", "target", "kept"),
    [
        ("f4", "f8", "sum avg prod max min"), ("f8", "f4", "sum avg prod max min"), ("f8", "c16", "sum avg prod"),
        ("f8", "i8", ""),
        ("f8", "?", ""), ("i8", "?", ""), ("i4", "i8", "max min"), ("i8", "i4", "sum prod"), ("i8", "f8", "max min"),
        ("?", "i8", "max min"), ("?", "?", "sum avg prod max min any all"),
    ],
)  # fmt: skip
def test_which_casts_keep_a_partial(source: str, target: str, kept: str) -> None:
    def stays(op: str) -> bool:
        layout = make_layout(MESHES[0], [Partial(op)], (4,), source)
        return decide(elementwise(((4,),), carried()), (layout,), np.dtype(target)).output.placements == (Partial(op),)

    assert {op for op in OPS if stays(op)} == set(kept.split())


# --- The tables of other systems, 8 x 8 float64 on 4 ranks; bytes in units of the array (512 B). -------------------------

FOUR = init_mesh((4,), ("x",))
UNIT = 512


def eight(p: Placement, shape: tuple[int, ...] = (8, 8), dtype: Any = F8) -> Layout:
    return make_layout(FOUR, [p], shape, dtype)


@pytest.mark.parametrize(
    ("a", "b", "out", "units"),
    [
        (R, R, R, 0), (R, S0, P, 0), (R, S1, S1, 0), (R, P, P, 0),
        (S0, R, S0, 0), (S0, S0, S0, 3), (S0, S1, S0, 3), (S0, P, P, 3),
        (S1, R, P, 0), (S1, S0, P, 0), (S1, S1, S1, 3), (S1, P, P, 3),
        # The last, both Partial: two reduce-scatters, where the table has an all-reduce (12 units when small).
        (P, R, P, 0), (P, S0, P, 3), (P, S1, P, 3), (P, P, P, 6),
    ],
)  # fmt: skip
def test_the_matmul_table(a: Placement, b: Placement, out: Placement, units: int) -> None:
    decision = decide(matmul((8, 8), (8, 8)), (eight(a), eight(b)), F8)
    assert (decision.output.placements, decision.total_bytes) == ((out,), units * UNIT)
    check(decision, lambda _, x, y: x @ y, np.matmul)


@pytest.mark.parametrize(("k", "n"), [(3, 2), (3, 4)])
def test_a_contracted_dim_shorter_than_the_mesh_stays_cut(k: int, n: int) -> None:
    """An empty part adds zero, so there is no reason to gather."""
    mesh = init_mesh((n,))
    a, b = make_layout(mesh, [S1], (2, k), F8), make_layout(mesh, [S0], (k, 2), F8)
    decision = decide(matmul((2, k), (k, 2)), (a, b), F8)
    assert (decision.output.placements, decision.total_bytes) == ((P,), 0)


@pytest.mark.parametrize(
    ("pa", "pb", "out", "moved"),
    [([S0, R], [R, S1], (S0, S1), 0), ([S0, S1], [R, S0], (S0, P), 0), ([R, P], [S0, R], (P, P), 0)],
)
def test_matmul_on_two_mesh_dims(pa: list[Placement], pb: list[Placement], out: tuple[Placement, ...], moved: int) -> None:
    mesh = init_mesh((2, 2))
    a, b = (make_layout(mesh, p, (8, 8), F8) for p in (pa, pb))
    decision = decide(matmul((8, 8), (8, 8)), (a, b), F8)
    assert (decision.output.placements, decision.total_bytes) == (out, moved)


AVG, MAX, MIN, PROD = (Partial(op) for op in ("avg", "max", "min", "prod"))


@pytest.mark.parametrize(
    ("name", "a", "b", "out", "units"),
    [
        ("add", S0, R, S0, 0), ("add", S1, R, S1, 0), ("add", S0, S1, S0, 0.75), ("add", S1, S0, S0, 0.75),
        ("add", S0, P, S0, 3), ("add", MAX, S1, S1, 3), ("add", P, P, P, 0), ("subtract", AVG, AVG, AVG, 0),
        ("add", P, R, P, 0), ("add", R, P, P, 0), ("subtract", R, P, P, 0), ("add", AVG, R, AVG, 0),
        ("multiply", S0, R, S0, 0), ("multiply", P, R, P, 0), ("multiply", AVG, R, AVG, 0), ("multiply", PROD, R, PROD, 0),
        # An infinite addend against the -inf of an empty part is nan, and so is a zero divisor against a zero term: the
        # table keeps the Partial here, we reduce-scatter.
        ("add", MAX, R, S0, 3), ("divide", P, R, S0, 3), ("divide", R, P, S0, 3),
        # Two reduce-scatters and a finished result, where the table has an all-reduce and a Partial.
        ("multiply", P, P, S0, 6), ("add", P, AVG, S0, 6), ("divide", P, P, S0, 6),
        ("greater", P, R, S0, 3), ("maximum", MAX, MAX, MAX, 0), ("maximum", MAX, R, MAX, 0), ("maximum", MIN, R, MIN, 0),
        ("maximum", MIN, MIN, S0, 6), ("multiply", PROD, PROD, PROD, 0),
    ],
)  # fmt: skip
def test_the_elementwise_table(name: str, a: Placement, b: Placement, out: Placement, units: float) -> None:
    decision = ufunc_case(name, (eight(a), eight(b)))
    assert (decision.output.placements, decision.total_bytes) == ((out,), units * UNIT)


@pytest.mark.parametrize(
    ("name", "constants", "a", "out"),
    [
        ("multiply", (None, 2), P, P), ("divide", (None, 2), P, P), ("divide", (None, 2), AVG, AVG), ("divide", (None, 0), P, S0),
        ("add", (None, 1), P, P), ("subtract", (1, None), P, P), ("divide", (1, None), P, S0), ("power", (None, 2), P, S0),
        ("add", (None, 1.0), MAX, MAX), ("subtract", (1.0, None), MAX, MIN), ("multiply", (None, -1), MAX, MIN),
        ("multiply", (None, 0), MAX, S0), ("multiply", (None, np.inf), P, S0), ("add", (None, np.inf), MAX, S0),
    ],
)  # fmt: skip
def test_the_scalar_table(name: str, constants: tuple[Any, ...], a: Placement, out: Placement) -> None:
    operands = tuple(eight(a) if c is None else Dense((), np.asarray(c).dtype) for c in constants)
    decision = ufunc_case(name, operands, constants)
    assert decision.output.placements == (out,)
    assert decision.total_bytes == (0 if isinstance(out, Partial) else 3 * UNIT)


@pytest.mark.parametrize(
    ("name", "a", "out"),
    [
        ("exp", MAX, MAX), ("tanh", MIN, MIN), ("negative", MAX, MIN), ("negative", MIN, MAX), ("negative", P, P),
        ("exp", P, S0), ("absolute", P, S0), ("sqrt", MIN, MIN), ("sqrt", MAX, S0), ("floor", MAX, MAX), ("isnan", P, S0),
        ("logical_not", Partial("any"), Partial("all")), ("logical_not", Partial("all"), Partial("any")),
        ("absolute", PROD, PROD), ("rint", P, S0),
    ],
)  # fmt: skip
def test_the_unary_table(name: str, a: Placement, out: Placement) -> None:
    assert ufunc_case(name, (eight(a),)).output.placements == (out,)


@pytest.mark.parametrize("dtype", ["i8", "u1"])
def test_an_integer_max_is_reduced_before_its_sign_changes(dtype: str) -> None:
    """The neutral element of an empty part is the least integer, and minus that is itself."""
    assert ufunc_case("negative", (eight(MAX, dtype=dtype),)).output.placements == (S0,)


@pytest.mark.parametrize(
    ("op", "axes", "a", "out", "units"),
    [
        ("sum", (0,), S0, P, 0), ("sum", (0,), S1, S0, 0), ("prod", (0, 1), S1, PROD, 0), ("max", (1,), S1, MAX, 0),
        ("min", (1,), S0, S0, 0), ("sum", (0,), P, P, 0), ("max", (0,), MAX, MAX, 0), ("any", (0,), S0, Partial("any"), 0),
        ("all", (0,), S0, Partial("all"), 0), ("sum", (0,), AVG, AVG, 0),
        # Reduced first, and scattered, not gathered.
        ("sum", (1,), MAX, S0, 3), ("max", (1,), P, S0, 3),
    ],
)  # fmt: skip
def test_the_reduction_table(op: str, axes: tuple[int, ...], a: Placement, out: Placement, units: int) -> None:
    dtype = np.dtype("?") if op in ("any", "all") else F8
    decision = decide(reducing(2, axes, op), (eight(a),), dtype)
    assert (decision.output.placements, decision.total_bytes) == ((out,), units * UNIT)


def test_a_reduction_that_cannot_be_split_needs_its_dim_whole() -> None:
    decision = decide(reducing(2, (0,), None), (eight(S0),), F8)
    assert (decision.operands[0].placements, decision.output.placements, decision.total_bytes) == ((S1,), (S0,), 384)


def test_a_whole_label_is_not_cut() -> None:
    scan = Signature(((0, 1),), (0, 1), flows=linear(), whole=frozenset({0}))
    for p, out in ((S0, S1), (S1, S1), (P, P), (R, R)):
        decision = decide(scan, (eight(p),), F8)
        assert decision.output.placements == (out,)
        check(decision, lambda _, x: np.cumsum(x, 0), lambda x: np.cumsum(x, 0))


# --- The choice ---------------------------------------------------------------------------------------------------------


def test_no_aligned_layout_moves_less() -> None:
    """Among those that leave alone the mesh dims where the operands agree already."""
    rng = random.Random(1)
    for mesh in (init_mesh((2, 2)), init_mesh((4,)), init_mesh((2, 4)), init_mesh((2, 2, 2))):
        for _ in range(12):
            a, b = (make_layout(mesh, [rng.choice((R, S0, S1, MAX)) for _ in mesh.shape], (16, 16), F8) for _ in range(2))
            decision = ufunc_case("hypot", (a, b))
            open_dims = [p != q or p == MAX for p, q in zip(a.placements, b.placements, strict=True)]
            choices = [(R, S0, S1) if o else (p,) for p, o in zip(a.placements, open_dims, strict=True)]
            legal = [make_layout(mesh, p, (16, 16), F8) for p in itertools.product(*choices)]
            least = min(sum(make_plan(x, t).total_bytes for x in (a, b)) for t in legal)
            assert decision.total_bytes <= least, f"{a.placements} {b.placements} {least}\n{decision.text}"


def test_thin_dims_are_not_cut_where_another_costs_the_same() -> None:
    assert ufunc_case("exp", (eight(P, (2, 8)),)).output.placements == (S1,)
    assert ufunc_case("exp", (eight(P, (2, 3)),)).output.placements == (S0,)
    assert ufunc_case("exp", (eight(P, ()),)).output.placements == (R,)


def test_uneven_parts_are_kept_and_one_operand_is_aligned() -> None:
    mesh = MESHES[0]
    x = make_layout(mesh, [S0], (4, 3), F8, [(3, 1), (3,)])
    assert ufunc_case("exp", (x,)).output.chunks == ((3, 1), (3,))
    assert decide(reducing(2, (1,), "sum"), (x,), F8).output.chunks == ((3, 1),)
    assert decide(rearranging(2, (1, 0)), (x,), F8).output.chunks == ((3,), (3, 1))
    even = make_layout(mesh, [S0], (4, 3), F8)
    decision = ufunc_case("add", (x, even))
    assert (decision.output.chunks[0], decision.total_bytes) == ((3, 1), 24)
    narrow = make_layout(mesh, [S0], (4, 1), F8)
    decision = ufunc_case("add", (narrow, x))
    assert (decision.output.chunks[0], decision.total_bytes) == ((3, 1), 8)
    dense = ufunc_case("add", (x, Dense((4, 3), F8)))
    assert (dense.output.chunks[0], dense.total_bytes) == ((3, 1), 0)


def test_uneven_parts_nest() -> None:
    mesh = MESHES[2]
    x = make_layout(mesh, [S0, R], (6,), F8, [(5, 1)])
    y = make_layout(mesh, [R, R], (6,), F8)
    both = make_layout(mesh, [S0, S0], (6,), F8)
    assert ufunc_case("add", (x, y)).output.chunks == ((5, 1),)
    decision = decide(elementwise(((6,), (6,))), (x, both), F8)
    assert decision.output.placements == (S0, S0)
    check(decision, lambda _, a, b: a - b, np.subtract)
    wide = make_layout(mesh, [S0, S0], (6,), F8, [(3, 2, 1, 0)])
    decision = decide(elementwise(((6,),)), (wide,), F8, make_layout(mesh, [S0, R], (6,), F8, [(5, 1)]))
    assert (decision.operands[0].chunks, decision.total_bytes) == (((5, 1),), 8 * (2 + 3 + 1))


# --- A fixed output -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["add", "multiply", "maximum", "power"])
def test_in_place_keeps_the_layout(name: str) -> None:
    rng, ufunc = random.Random(name), getattr(np, name)
    for mesh, shape in itertools.product(MESHES, [(4, 3), (5, 1), (0, 2)]):
        for _ in range(12):
            x = layouts(rng, mesh, shape, F8, placements(2, PARTIALS[:5]))
            y = layouts(rng, mesh, rng.choice([shape, shape[1:], ()]), F8, [R, *PARTIALS[:5]])
            decision = decide(elementwise((x.shape, y.shape), ufunc_flows(name)), (x, y), F8, x)
            assert decision.result == x
            out = decision.output
            for m, p in enumerate(x.placements):
                assert out.placements[m] in (p, R)
            assert make_plan(out, x).total_bytes == 0 or out == x or out.partial_axes
            check(decision, lambda _, a, b: ufunc(a, b), ufunc, rng.randrange(99))


@pytest.mark.parametrize(
    ("name", "x", "y", "units"),
    [("add", R, S0, 3), ("add", S0, P, 3), ("add", P, R, 0), ("multiply", P, R, 0), ("add", S1, R, 0), ("exp2", P, None, 12)],
)
def test_in_place_bytes(name: str, x: Placement, y: Placement | None, units: int) -> None:
    operands = tuple(eight(p) for p in (x, y) if p is not None)
    signature = elementwise(tuple(o.shape for o in operands), ufunc_flows(name))
    decision = decide(signature, operands, F8, operands[0])
    assert (decision.result, decision.total_bytes) == (operands[0], units * UNIT)


def test_an_output_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"of shape \(8, 8\), does not fit .* shape \(1, 8\)"):
        decide(elementwise(((1, 8), (8, 8))), (eight(S1, (1, 8)), eight(S1)), F8, eight(S1, (1, 8)))


# --- Partials of several kinds, meshes, errors ------------------------------------------------------------------------


def test_every_kind_passes_apart_on_its_mesh_dim() -> None:
    mesh = MESHES[3]
    x = make_layout(mesh, [P, MAX], (4,), F8)
    assert ufunc_case("negative", (x,)).output.placements == (P, MIN)
    assert ufunc_case("exp", (x,)).output.placements == (S0, MAX) or ufunc_case("exp", (x,)).total_bytes > 0
    y = make_layout(mesh, [R, R], (4,), F8)
    assert ufunc_case("subtract", (y, make_layout(mesh, [P, AVG], (4,), F8))).output.placements == (P, AVG)


def test_empty_parts_are_announced() -> None:
    def announced(op: str, p: Placement, n: int) -> bool:
        return decide(reducing(1, (0,), op), (make_layout(FOUR, [p], (n,), F8),), F8).may_be_empty

    assert announced("max", S0, 5)  # 2 2 1 0
    assert announced("min", S0, 1)
    assert not announced("max", S0, 4)
    assert not announced("max", R, 1)
    assert not announced("sum", S0, 1)
    for op, dtype in itertools.product(("max", "min"), ("f8", "i1", "u1", "?")):
        layout = make_layout(FOUR, [S0], (2,), dtype)
        decision = decide(reducing(1, (0,), op), (layout,), layout.dtype)
        function, initial = getattr(np, op), reduction(op).neutral(layout.dtype)
        check(decision, lambda _, x, f=function, i=initial: f(x, initial=i), function)


@pytest.mark.parametrize(("op", "name"), [("max", "maximum"), ("min", "minimum")])
def test_a_globally_empty_dim_has_no_max(op: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"zero-size array to reduction operation {name} which has no identity"):
        decide(reducing(2, (1,), op), (eight(S0, (3, 0)),), F8)
    assert decide(reducing(2, (1,), op), (eight(S0, (0, 3)),), F8).output.shape == (0,)
    assert decide(reducing(2, (1,), "sum"), (eight(S0, (3, 0)),), F8).output.shape == (3,)


@pytest.mark.parametrize("other", [init_mesh((4,), ("y",)), ProcessMesh([0, 1, 3, 2], ["x"]), init_mesh((2, 2)), init_mesh((3,))])
def test_two_meshes_are_refused(other: ProcessMesh) -> None:
    pair = (eight(S0), make_layout(other, [S0], (8, 8), F8))
    with pytest.raises(ValueError, match=r"operand 1 of shape .* lies on .* another on .* reshard") as caught:
        decide(elementwise(((8, 8), (8, 8))), pair, F8)
    assert repr(FOUR) in str(caught.value)
    assert repr(other) in str(caught.value)
    with pytest.raises(ValueError, match="the output of shape"):
        decide(elementwise(((8, 8),)), pair[:1], F8, pair[1])


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"could not be broadcast together with shapes \(2, 3\) \(4,\)"):
        elementwise(((2, 3), (4,)))
    with pytest.raises(ValueError, match="does not match the contracted dim"):
        matmul((2, 3), (4, 2))
    with pytest.raises(ValueError, match="0-d"):
        matmul((), (2,))
    with pytest.raises(ValueError, match=r"operand 0 of shape .* has 2 dims, the operation takes 1"):
        decide(Signature(((0,),), (0,)), (eight(S0),), F8)
    with pytest.raises(TypeError, match="Layout among the operands"):
        decide(elementwise(((2,),)), (Dense((2,), F8),), F8)


def test_decisions_are_values_and_cached() -> None:
    first = decide(elementwise(((8, 8), (8, 8)), linear(2)), (eight(S0), eight(R)), F8)
    before = decide.cache_info().hits
    fresh = Signature(((0, 1), (0, 1)), (0, 1), flows=linear(2))
    assert decide(fresh, (eight(S0), make_layout(init_mesh((4,), ("x",)), [R], (8, 8), "f8")), F8) is first
    assert decide.cache_info().hits == before + 1


def test_reasons_say_what_moves_and_why() -> None:
    decision = ufunc_case("add", (eight(S0), eight(MAX)))
    assert decision.text.splitlines() == [
        "x: Shard(0), Shard(0) -> Shard(0), cut along output dim 0; operand 1 is reduced: Partial('max') -> Shard(0)",
        "moves 1.5 KiB",
    ]


def test_many_mesh_dims_are_decided_one_by_one() -> None:
    mesh = init_mesh((2,) * 7)
    mixed = [S0, S1, P, R, S0, MAX, S1]
    pair = (make_layout(mesh, mixed, (64, 64), F8), make_layout(mesh, list(reversed(mixed)), (64, 64), F8))
    check(ufunc_case("multiply", pair), lambda _, x, y: x * y, np.multiply)
