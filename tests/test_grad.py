"""Gradients of functions of DTensors: autograd's rules on every layout, nothing of global size made, resharding both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import autograd
import autograd.numpy as anp
import dask
import numpy as np
import pytest
from autograd import value_and_grad as plain_value_and_grad

import daskmesh as dm
from daskmesh import Partial, Replicate, Shard
from daskmesh.autograd import DTensorBox
from daskmesh.checks import gradient_check
from daskmesh.cotangents import DTensorVSpace
from daskmesh.exchange import Exchange
from daskmesh.tape import followed
from daskmesh.testing import assert_bytes_moved

pytestmark = pytest.mark.cluster
M2, M3, M4 = (dm.init_mesh(n, ["x"]) for n in (2, 3, 4))
M22 = dm.init_mesh((2, 2), ("x", "y"))
RNG = np.random.default_rng(7)
A, C = RNG.normal(size=(5, 4)), RNG.normal(size=(5, 4))
POSITIVE = np.abs(A) + 0.5
B, V = RNG.normal(size=(4, 3)), RNG.normal(size=4)
IDS = np.array([0, 4, 4, 2, -1, 1, 0])


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    dm.shutdown()
    for mesh in (M2, M3, M4, M22):
        dm.zeros(1, mesh=mesh)
    with dask.config.set(scheduler="sync"):
        yield
    dm.shutdown()


def softmax(x: Any) -> Any:
    e = np.exp(x - np.max(x, axis=1, keepdims=True))
    return e / np.sum(e, axis=1, keepdims=True)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: np.sum(x, axis=0) ** 2,
    "sum to 0-d": lambda x: x.sum() ** 2,
    "sum keepdims": lambda x: x / np.sum(x, axis=1, keepdims=True),
    "mean": lambda x: np.mean(x, axis=1) ** 2 * x.mean(),
    "prod": lambda x: np.prod(x, axis=1),
    "max": lambda x: np.max(x, axis=0) ** 2,
    "min": lambda x: np.min(x) ** 2,
    "var": lambda x: np.var(x, axis=1, ddof=1),
    "std": lambda x: np.std(x, axis=0),
    "exp log": lambda x: np.exp(x) * np.log(x),
    "tanh sqrt": lambda x: np.tanh(np.sqrt(x)),
    "power": lambda x: x**3 + 2**x,
    "divide": lambda x: 1 / x - x / C,
    "maximum": lambda x: np.maximum(x, 1.0) + np.minimum(x, C),
    "abs sign": lambda x: np.abs(x - 1) * np.sign(x),
    "where": lambda x: np.where(x > 1, x, 0.1 * x),
    "where broadcasts": lambda x: np.where(x > 1, np.sum(x, axis=0), 1.0),
    "clip": lambda x: np.clip(x, 0.7, 1.2),
    "floor": lambda x: x // 1 * x,
    "matmul": lambda x: x @ B,
    "matmul vector": lambda x: x @ V,
    "dot": lambda x: np.dot(x, B),
    "inner outer": lambda x: np.inner(x, C) + np.outer(x[:, 0], C[:, 1]),
    "tensordot": lambda x: np.tensordot(x, C, axes=([0], [0])),
    "einsum": lambda x: np.einsum("ij,kj->ik", x, C),
    "einsum sums": lambda x: np.einsum("ij,jk->", x, B) * np.einsum("ij->j", x),
    "transpose": lambda x: x.T @ C,
    "moveaxis swapaxes": lambda x: np.moveaxis(x, 0, 1) ** 2 + np.swapaxes(x, 0, 1),
    "reshape": lambda x: np.reshape(x, (4, 5)) ** 2,
    "ravel": lambda x: np.ravel(x) ** 2,
    "new dims": lambda x: x[:, None, :] * np.expand_dims(x, 0),
    "squeeze": lambda x: np.squeeze(x[:, :1]) ** 2,
    "slice": lambda x: x[1:4] ** 2,
    "strides": lambda x: x[::2, 1] ** 2,
    "backwards": lambda x: x[::-1, ::-2] ** 2 * np.arange(5.0)[:, None],
    "int": lambda x: x[2] ** 2 * x[..., -1, :],
    "rows": lambda x: x[IDS] ** 2,
    "columns": lambda x: x[:, np.array([1, 1, 3])] ** 2,
    "elements": lambda x: x[np.array([0, 1, 1]), np.array([2, 3, 3])] ** 2,
    "rows of slices": lambda x: x[np.array([0, 0, 3]), 1:3] ** 2,
    "mask": lambda x: x[np.array([True, False, True, True, False])] ** 2,
    "take": lambda x: np.take(x, IDS, axis=0) ** 2,
    "concatenate": lambda x: np.concatenate([x, x * 2, C]) ** 2,
    "stack": lambda x: np.stack([x, x * 2]) ** 2,
    "vstack hstack": lambda x: np.hstack([np.vstack([x, x]), np.vstack([C, C])]) ** 2,
    "broadcast_to": lambda x: np.broadcast_to(np.sum(x, axis=0), (5, 4)) * C,
    "bias": lambda x: C + x[0],
    "norm": lambda x: np.linalg.norm(x) * np.linalg.norm(x, axis=1),
    "cumsum": lambda x: np.cumsum(x, axis=0) ** 2,
    "trace": lambda x: np.trace(x @ x.T),
    "diagonal": lambda x: np.diagonal(x) ** 2,
    "repeat tile": lambda x: np.repeat(x, 2, axis=0) ** 2 * np.tile(x, (2, 1)),
    "roll flip": lambda x: np.roll(x, 2, axis=0) * np.flip(x, 0),
    "diff split": lambda x: np.diff(x, axis=0)[:2] ** 2 * np.split(x[:4], 2)[1],
    "options of sum": lambda x: np.sum(x, axis=0, where=C > 0, keepdims=True) ** 2 + np.sum(x, initial=1.0, dtype="f8"),
    "pad": lambda x: np.pad(x, ((1, 0), (0, 2))) ** 2,
    "sort": lambda x: np.sort(x, axis=0) * np.arange(5.0)[:, None],
    "logaddexp.reduce": lambda x: np.logaddexp.reduce(x, axis=1) * np.multiply.reduce(x, axis=1),
    "methods": lambda x: x.max(axis=0) * x.transpose(1, 0).sum(axis=1) + x.std() * x.prod() * x.take([1], axis=0).ravel()[0],
    "nan": lambda x: np.nansum(np.where(C > 0, x, np.nan), axis=0) * np.nanmean(x),
    "averages": lambda x: np.average(x, axis=0, weights=np.arange(1.0, 6.0)) * np.ptp(x, axis=0),
    "vdot vecdot": lambda x: np.vdot(x, C) * np.vecdot(x, C),
    "by keyword": lambda x: np.sum(a=x, axis=0) * np.mean(a=x),
    "softmax": lambda x: softmax(x) * C,
    "logsumexp": lambda x: np.log(np.sum(np.exp(x), axis=1)),
}
LAYOUTS = [(M3, [Shard(0)]), (M22, [Shard(1), Partial()]), (M22, [Shard(0), Shard(1)])]


def rank_gradient(f: Callable[[Any], Any], x: Any, w: Any) -> Any:
    """The gradient as a rank works it out, by plain NumPy on boxes."""
    (_,), pull = followed(lambda x: [np.sum(f(x) * w)], [x], lambda *_: None)
    return np.asarray(pull([1.0])[0])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    f = FUNCTIONS[name]
    w = np.random.default_rng(1).normal(size=np.shape(f(POSITIVE)))
    want = rank_gradient(f, POSITIVE, w)
    differences = np.empty_like(want)
    for at in np.ndindex(POSITIVE.shape):
        step = np.zeros_like(POSITIVE)
        step[at] = 1e-6
        differences[at] = np.sum((f(POSITIVE + step) - f(POSITIVE - step)) * w) / 2e-6
    np.testing.assert_allclose(want, differences, rtol=1e-5, atol=1e-6)
    for mesh, placements in LAYOUTS:
        x = dm.shard_tensor(POSITIVE, mesh, placements)
        got = dm.grad(lambda x: np.sum(f(x) * w))(x)
        np.testing.assert_allclose(np.asarray(got), want, rtol=1e-12, atol=1e-12)
        assert got.placements == tuple(Replicate() if isinstance(p, Partial) else p for p in x.placements)


def test_value_and_gradient_of_a_dictionary_of_parameters() -> None:
    def loss(np: Any, p: dict[str, Any], x: Any) -> Any:
        return np.mean((np.tanh(x @ p["w"][0] + p["b"]) @ p["w"][1]) ** 2)

    plain = {"w": [B, RNG.normal(size=(3, 2))], "b": RNG.normal(size=3)}
    value, want = plain_value_and_grad(lambda p: loss(anp, p, A))(plain)
    placed = {
        "w": [dm.shard_tensor(plain["w"][0], M22, {"y": Shard(1)}), dm.shard_tensor(plain["w"][1], M22, {"y": Shard(0)})],
        "b": dm.shard_tensor(plain["b"], M22, {"y": Shard(0)}),
    }
    x = dm.shard_tensor(A, M22, {"x": Shard(0)})
    got_value, got = dm.value_and_grad(lambda p: loss(np, p, x))(placed)
    assert isinstance(got_value, dm.DTensor)
    assert got_value.shape == ()
    assert float(got_value) == pytest.approx(value, abs=1e-13)
    for g, w, p in zip([*got["w"], got["b"]], [*want["w"], want["b"]], [*placed["w"], placed["b"]], strict=True):
        np.testing.assert_allclose(np.asarray(g), w, atol=1e-13)
        assert g.placements == p.placements


def test_numpy_arrays_beside_dtensors() -> None:
    """By NumPy arrays and numbers, too: the gradient is a replicated DTensor, where DTensors take part."""
    x = dm.shard_tensor(A, M2, [Shard(0)])
    for f in (lambda w: np.sum(x @ w), lambda w: np.sum(np.dot(x, w)), lambda w: np.sum(np.einsum("ij,jk->ik", x, w))):
        got = dm.grad(f)(B)
        np.testing.assert_allclose(np.asarray(got), np.outer(A.sum(0), np.ones(3)), rtol=1e-12)
        assert got.placements == (Replicate(),)
    gb, gs = dm.grad(lambda p: np.sum(p[0] * x * p[1]))((V, 2.0))
    np.testing.assert_allclose(np.asarray(gb), 2 * A.sum(0))
    assert float(gs) == pytest.approx(np.sum(V * A))
    value, plain = dm.value_and_grad(lambda w: np.sum(np.where(w > 0, w**2, 0)))(V)
    assert (type(plain), type(value)) == (np.ndarray, np.float64)
    np.testing.assert_array_equal(plain, np.where(V > 0, 2 * V, 0))
    with pytest.raises(TypeError, match=r"shard_tensor\(\) of a NumPy array.*outside"):
        dm.grad(lambda w: np.sum(x @ dm.shard_tensor(w, M2, [])))(B)


def test_functions_of_autograd_numpy() -> None:
    def f(x: Any) -> Any:
        y = anp.concatenate([anp.tanh(x) @ B, anp.einsum("ij,jk->ik", x, B)])
        return anp.mean(anp.where(y > 0, y**2, 0.1 * y)) + anp.linalg.norm(x[IDS]) * anp.max(anp.sum(x, axis=0))

    want = plain_value_and_grad(f)(A)[1]
    for mesh, placements in LAYOUTS:
        got = autograd.grad(f)(dm.shard_tensor(A, mesh, placements))
        np.testing.assert_allclose(np.asarray(got), want, rtol=1e-12, atol=1e-13)
    with pytest.raises(TypeError, match=r"autograd.numpy.array of a DTensor, which gathers it.*np.stack"):
        autograd.grad(lambda x: anp.sum(anp.stack([x, x])))(dm.shard_tensor(A, M2, []))


def test_several_arguments_and_keywords() -> None:
    x, y = dm.shard_tensor(A, M2, [Shard(0)]), dm.shard_tensor(C, M2, [Shard(1)])
    gx, gy = dm.grad(lambda x, y, *, scale: np.sum(x * y) * scale, argnum=(0, 1))(x, y, scale=2.0)
    np.testing.assert_array_equal(np.asarray(gx), 2 * C)
    np.testing.assert_array_equal(np.asarray(gy), 2 * A)
    assert (gx.placements, gy.placements) == (x.placements, y.placements)
    (last,) = dm.grad(lambda x, y: np.sum(x * y), argnum=(-1,))(x, y)
    np.testing.assert_array_equal(np.asarray(last), A)


@pytest.mark.parametrize("dtype", ["f4", "f8", "c16"])
def test_dtypes_are_kept(dtype: str) -> None:
    x = dm.shard_tensor(POSITIVE.astype(dtype), M2, [Shard(0)])
    got = dm.grad(lambda x: np.sum(np.abs(x) ** 2) * np.float64(1.5))(x)
    assert got.dtype == dtype
    np.testing.assert_allclose(np.asarray(got), 3 * POSITIVE, rtol=1e-6)


def test_vjp_and_jacobian_keep_the_cut() -> None:
    x = dm.shard_tensor(A, M2, [Shard(0)])
    value, pull = dm.vjp(lambda x: x @ B)(x)
    np.testing.assert_allclose(np.asarray(value), A @ B)
    w = RNG.normal(size=(5, 3))
    for placements in ([Replicate()], [Shard(1)], [Partial()]):
        got = pull(dm.shard_tensor(w, M2, placements))
        np.testing.assert_allclose(np.asarray(got), w @ B.T, atol=1e-14)
        assert got.placements == (Shard(0),)
    jacobian = dm.jacobian(lambda x: x @ V)(x)
    want = np.einsum("ik,j->ikj", np.eye(5), V)
    np.testing.assert_allclose(np.asarray(jacobian), want)
    assert (jacobian.shape, jacobian.placements) == ((5, 5, 4), (Shard(1),))
    scalar = dm.jacobian(lambda x: np.sum(x * x))(x)
    np.testing.assert_allclose(np.asarray(scalar), 2 * A)


def test_higher_orders() -> None:
    x = dm.shard_tensor(V, M2, [Shard(0)])
    cubed = dm.grad(lambda x: np.sum(x**3))
    np.testing.assert_allclose(np.asarray(dm.grad(lambda x: np.sum(cubed(x) ** 2))(x)), 36 * V**3, rtol=1e-12)
    hessian = dm.jacobian(dm.grad(lambda x: np.sum(x**3) + np.sum(x) ** 2))(x)
    np.testing.assert_allclose(np.asarray(hessian), np.diag(6 * V) + 2, rtol=1e-12)
    third = dm.grad(lambda x: np.sum(dm.grad(lambda x: np.sum(dm.grad(lambda x: np.sum(x**4))(x)))(x)))(x)
    np.testing.assert_allclose(np.asarray(third), 24 * V, rtol=1e-12)
    gradient_check(lambda x: np.sum(dm.grad(lambda x: np.sum(np.exp(x[1:]) * np.cumsum(x)[0]))(x) ** 2), x)
    gradient_check(lambda x: np.sum(dm.grad(lambda x: np.sum(np.max(np.outer(x, x)[IDS % 4]) * x[1:]))(x) ** 2), x)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Shard(0), Replicate()), (Shard(0), Partial()), (Shard(0), Shard(1)), (Replicate(), Shard(0)), (Replicate(), Partial()),
        (Partial(), Replicate()), (Partial("max"), Shard(0)), (Replicate(), Partial("avg")), (Partial("avg"), Partial("min")),
    ],
)  # fmt: skip
def test_resharding_passes_the_cotangent(source: Any, target: Any) -> None:
    x = dm.shard_tensor(A, M4, [source])
    moves = (lambda x: x.reshard([target]), lambda x: dm.reshard(x, M4, [target]), lambda x: dm.shard_tensor(x, M4, [target]))
    for move in moves:
        got = dm.grad(lambda x, move=move: np.sum(move(x) * C))(x)
        np.testing.assert_allclose(np.asarray(got), C, rtol=1e-15)
        assert got.placements == (Replicate() if isinstance(source, Partial) else source,)


def test_resharding_to_another_mesh() -> None:
    """Case 28 of the specification: a pipeline over the halves of a mesh."""
    whole = dm.ProcessMesh(np.arange(8).reshape(2, 2, 2), ["pp", "dp", "mp"])
    first, second = dm.ProcessMesh([[0, 1], [2, 3]], ["dp", "mp"]), dm.ProcessMesh([[4, 5], [6, 7]], ["dp", "mp"])
    x = dm.ones((6, 8), mesh=whole)

    def total(x: Any) -> Any:
        here = dm.reshard(x, first, [Shard(0), Replicate()]) + 1
        there = dm.reshard(here, second, [Shard(0), Shard(1)])
        return np.sum(there + dm.reshard(x, second, []))

    value, got = dm.value_and_grad(total)(x)
    assert float(value) == 144
    np.testing.assert_array_equal(np.asarray(got), np.full((6, 8), 2.0))
    assert (got.process_mesh, got.placements) == (whole, x.placements)


def exchanges(x: dm.DTensor) -> list[Exchange]:
    found, stack, seen = [], [x._node], set()
    while stack:
        node = stack.pop()
        if id(node) not in seen:
            seen.add(id(node))
            found += [node] if isinstance(node, Exchange) else []
            stack += node.parents()
    return found


@pytest.mark.parametrize("placements", [[Shard(0)], [Shard(1)], [Replicate()]])
def test_elementwise_and_reductions_move_nothing_backward(placements: Any) -> None:
    x = dm.shard_tensor(POSITIVE, M2, placements).persist()
    gradient = dm.grad(lambda x: np.sum(np.exp(x) * C))(x)
    assert not exchanges(gradient)


def test_data_parallel_gradients_cost_one_all_reduce() -> None:
    x, w = dm.shard_tensor(A, M4, [Shard(0)]).persist(), dm.shard_tensor(B, M4, []).persist()
    gradient = dm.grad(lambda w: np.sum((x @ w) ** 2))(w)
    np.testing.assert_allclose(np.asarray(gradient), 2 * A.T @ (A @ B))
    terms = dm.zeros(B.shape, mesh=M4, placements=[Partial()])
    assert gradient.explain().total_bytes == terms.reshard([Replicate()]).explain().total_bytes == 4 * 3 * B.nbytes


PLACED = [
    [Shard(0), Replicate()], [Shard(0), Shard(1)], [Shard(1), Shard(1)], [Replicate(), Replicate()], [Partial(), Shard(0)],
    [Replicate(), Partial("max")], [Partial("avg"), Partial()],
]  # fmt: skip


def cut_of_c(box: Any) -> Any:
    return C[box]


@pytest.mark.parametrize("source", PLACED, ids=str)
@pytest.mark.parametrize("target", PLACED, ids=str)
def test_backward_of_a_reshard_moves_what_the_dual_plan_says(source: Any, target: Any) -> None:
    x = dm.shard_tensor(A, M22, source)
    y, pull = dm.vjp(lambda x: x.reshard(target))(x)
    g = dm.from_callback(C.shape, C.dtype, M22, [Replicate() if isinstance(p, Partial) else p for p in y.placements], cut_of_c)
    goal = [Replicate() if isinstance(p, Partial) else p for p in source]
    gradient = pull(g)
    assert gradient.placements == tuple(goal)
    np.testing.assert_array_equal(assert_bytes_moved(gradient, g.reshard(goal).explain()), C)


@pytest.mark.parametrize(
    ("inputs", "output", "terms"),
    [([Shard(0)], [Shard(0)], 0), ([Replicate()], [Shard(0)], 1), ([Replicate()], [Replicate()], 1)],
)
def test_backward_of_a_region_moves_no_more_than_the_sum_of_replicas(inputs: Any, output: Any, terms: int) -> None:
    f = dm.local_map(lambda t: np.tanh(t) * 2, out_placements=[output])
    x = dm.from_callback(C.shape, C.dtype, M3, inputs, cut_of_c)
    value, pull = dm.vjp(f)(x)
    g = dm.zeros(value.shape, mesh=M3, placements=[p if isinstance(p, Shard) else Replicate() for p in output])
    summed = dm.zeros(A.shape, mesh=M3, placements=[Partial()]).reshard([Replicate()]).explain().total_bytes
    assert_bytes_moved(pull(g), terms * summed)


def test_embedding_lookup_by_ids_that_are_cut() -> None:
    ids = np.array([0, 6, 6, 2, 5, 1, 0, 3])
    table = RNG.normal(size=(7, 3))
    want = np.zeros_like(table)
    np.add.at(want, ids, 2 * table[ids])
    placed = dm.shard_tensor(ids, M22, {"x": Shard(0)})
    for placements in ([], {"y": Shard(1)}, {"y": Shard(0)}, {"x": Shard(0)}):
        t = dm.shard_tensor(table, M22, placements)
        for index in (placed, ids):
            got = dm.grad(lambda t, index=index: np.sum(t[index] ** 2))(t)
            np.testing.assert_allclose(np.asarray(got), want, rtol=1e-13)
            assert got.placements == t.placements


def test_gradient_check_finds_a_wrong_gradient() -> None:
    x = dm.shard_tensor(POSITIVE, M3, [Shard(0)])
    gradient_check(lambda x: np.sum(np.log(x) * x), x)
    gradient_check(lambda y, x: np.sum(np.log(x) * x) + y, 0.0, x, argnum=1)
    with pytest.raises(AssertionError, match=r"gradient_check: element \(\d, \d\) of argument 0 has the gradient"):
        gradient_check(lambda x: np.sum(np.floor(x * 1e6) + x), x)  # flat almost everywhere, and yet it rises
    with pytest.raises(TypeError, match="argument 0 is a float"):
        gradient_check(lambda x: x, 1.0)


def test_the_vector_space_is_made_rank_by_rank() -> None:
    x = dm.shard_tensor(A, M22, [Shard(0), Partial()])
    space = DTensorVSpace(x)
    assert (space.shape, space.size, space.layout.placements) == ((5, 4), 20, (Shard(0), Replicate()))
    np.testing.assert_array_equal(np.asarray(space.zeros()), np.zeros((5, 4)))
    np.testing.assert_array_equal(np.asarray(space.ones()), np.ones((5, 4)))
    basis = [np.asarray(b) for _, b in zip(range(6), space.standard_basis(), strict=False)]
    np.testing.assert_array_equal(basis[5], np.eye(1, 20, 5).reshape(5, 4))
    assert np.std(np.asarray(space.randn())) > 0.3
    assert float(space.inner_prod(x, space.ones())) == pytest.approx(A.sum())
    assert space == DTensorVSpace(x * 2)
    assert space.add(x, space.zeros()) is x


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no number": (lambda x: x * 2, r"returned a value of shape \(5, 4\).*np.sum or np.mean, or use jacobian"),
    "complex": (lambda x: np.sum(x * 1j), "one real number"),
    "median": (lambda x: np.median(x), "np.median cannot be differentiated.*backward"),
    "item": (lambda x: np.sum(x) * x[0, 0].item(), r"x.item\(\)"),
    "float": (lambda x: np.sum(x) * float(x[0, 0]), r"float\(x\)"),
    "asarray": (lambda x: np.sum(np.asarray(x)), "np.asarray"),
    "setitem": (lambda x: x.__setitem__(0, 1), r"x\[key\] = v cannot be differentiated.*np.where"),
    "out": (lambda x: np.sum(np.add(x, 1, out=np.zeros((5, 4)))), "out="),
    "unshard": (lambda x: dm.unshard_dtensor(x), r"unshard_dtensor\(x\) cannot be differentiated"),
    "locals": (lambda x: dm.dtensor_to_local(x), r"dtensor_to_local\(x\) cannot be differentiated"),
    "where": (lambda x: np.sum(np.add(x, 1, where=A > 0)), r"np.add\(where=...\)"),
    "max where": (lambda x: np.max(x, initial=0.0, where=A > 0), r"np.max\(where=...\)"),
    "a list": (lambda x: np.sum(np.linalg.multi_dot([x, B, np.median(x)])), "np.median"),
    "mode": (lambda x: np.sum(np.pad(x, 1, mode="edge")), r"np.pad\(mode='edge'\)"),
    "another ufunc": (lambda x: np.sum(np.frompyfunc(abs, 1, 1)(x)), "abs .* cannot be differentiated"),
    "no rule": (lambda x: np.sum(np.cumprod(x, axis=0)), "np.cumprod cannot be differentiated: autograd has no rule"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_function_and_the_way_out(name: str) -> None:
    f, message = REFUSED[name]
    with pytest.raises(TypeError, match=message):
        dm.grad(f)(dm.shard_tensor(A, M2, [Shard(0)]))


def test_what_is_differentiated_by_must_be_floating_point() -> None:
    x = dm.arange(4, mesh=M2, placements=[Shard(0)])
    with pytest.raises(TypeError, match=r"argument 0 is DTensor of dtype int64; only floating-point arrays.*astype"):
        dm.grad(lambda x: np.sum(x))(x)
    with pytest.raises(ValueError, match=r"argnum=2.* was called with 1 positional"):
        dm.grad(lambda x: np.sum(x), argnum=2)(x)


def test_boxes_say_what_they_stand_for() -> None:
    seen = []

    def look(x: Any) -> Any:
        assert isinstance(x, DTensorBox)
        seen.append((x.shape, x.ndim, x.size, x.dtype, x.placements, x.process_mesh, x.layout, len(x), x.nbytes))
        assert bool(np.sum(x) > -1e9)
        assert x.explain().total_bytes == 0
        return np.sum(x.real) + np.sum(x.imag) + np.sum(x.mT.conj()) + np.sum(+x)

    x = dm.shard_tensor(A, M2, [Shard(0)])
    np.testing.assert_array_equal(np.asarray(dm.grad(look)(x)), np.full((5, 4), 3.0))
    assert seen == [((5, 4), 2, 20, np.dtype("f8"), x.placements, M2, x.layout, 5, A.nbytes)]
