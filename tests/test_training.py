"""Layers and training: gradients as on a single array, and digits learnt over data parallel x tensor parallel ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import autograd
import autograd.numpy as anp
import dask
import numpy as np
import pytest

import daskmesh as dm
from daskmesh import Partial, Replicate, Shard, collectives, local_map
from daskmesh.checks import gradient_check

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import train_digits as digits

pytestmark = pytest.mark.cluster
M2, M3 = (dm.init_mesh(n, ["x"]) for n in (2, 3))
M22 = dm.init_mesh((2, 2), ("dp", "tp"))
RNG = np.random.default_rng(11)
X, W, U = RNG.normal(size=(6, 4)), RNG.normal(size=(4, 6)), RNG.normal(size=(6, 3))
GAIN, SHIFT = RNG.normal(size=4), RNG.normal(size=4)
TABLE, IDS = RNG.normal(size=(7, 4)), np.array([3, 0, 6, 6, 1, 3])
CLASSES = np.eye(3)[RNG.integers(0, 3, 6)]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    dm.shutdown()
    for mesh in (M2, M3, M22):
        dm.zeros(1, mesh=mesh)
    yield
    dm.shutdown()


def linear(np: Any, x: Any, w: Any) -> Any:
    return np.sum(np.tanh(x @ w) ** 2)


def mlp(np: Any, x: Any, w: Any, u: Any) -> Any:
    return np.mean((np.tanh(x @ w) @ u) ** 2)


def layer_norm(np: Any, x: Any, gain: Any, shift: Any) -> Any:
    mean = np.mean(x, axis=-1, keepdims=True)
    scale = np.sqrt(np.var(x, axis=-1, keepdims=True) + 1e-5)
    return np.sum(((x - mean) / scale * gain + shift) ** 3)


def cross_entropy(np: Any, x: Any, w: Any, u: Any, classes: Any) -> Any:
    z = np.maximum(x @ w, 0) @ u
    z = z - np.max(z, axis=1, keepdims=True)
    return np.mean(np.log(np.sum(np.exp(z), axis=1))) - np.sum(z * classes) / 6


def embedding(np: Any, table: Any, u: Any) -> Any:
    return np.sum((table[IDS] @ u) ** 2)


DP, COLUMN, ROW = {"dp": Shard(0)}, {"tp": Shard(1)}, {"tp": Shard(0)}
MODELS: dict[str, tuple[Callable[..., Any], list[Any], list[Any]]] = {
    "column-parallel linear": (linear, [X, W], [DP, COLUMN]),
    "row-parallel linear": (linear, [X, W], [{"dp": Shard(0), "tp": Shard(1)}, ROW]),
    "both": (mlp, [X, W, U], [DP, COLUMN, ROW]),
    "layer norm": (layer_norm, [X, GAIN, SHIFT], [DP, {}, {}]),
    "layer norm over cut features": (layer_norm, [X, GAIN, SHIFT], [{"dp": Shard(0), "tp": Shard(1)}, ROW, ROW]),
    "cross entropy": (cross_entropy, [X, W, U, CLASSES], [DP, COLUMN, ROW, DP]),
    "embedding by rows": (embedding, [TABLE, U[:4]], [ROW, {}]),
    "embedding by columns": (embedding, [TABLE, U[:4]], [COLUMN, ROW]),
}


@pytest.mark.parametrize("name", MODELS)
def test_layers_on_2_x_2_ranks(name: str) -> None:
    f, arrays, placements = MODELS[name]
    numbers = tuple(range(len(arrays)))
    value, want = autograd.value_and_grad(lambda a: f(anp, *a))(tuple(arrays))
    placed = [dm.shard_tensor(a, M22, p) for a, p in zip(arrays, placements, strict=True)]
    with dask.config.set(scheduler="sync"):
        got_value, got = dm.value_and_grad(lambda *a: f(np, *a), numbers)(*placed)
        assert float(got_value) == pytest.approx(value, abs=1e-12)
        for g, w in zip(dask.compute(*got), want, strict=True):
            np.testing.assert_allclose(g, w, atol=1e-12)
        assert [g.placements for g in got] == [p.placements for p in placed]


@pytest.mark.parametrize("mesh", [M2, M3, M22], ids=str)
def test_finite_differences(mesh: dm.ProcessMesh) -> None:
    first = {mesh.dim_names[0]: Shard(0)}
    last = {mesh.dim_names[-1]: Shard(1)}
    placements = (first, last if mesh.ndim > 1 else {}, {}, first)
    x, w, u, classes = (dm.shard_tensor(a, mesh, p) for a, p in zip((X, W, U, CLASSES), placements, strict=True))
    with dask.config.set(scheduler="sync"):
        for n in range(3):
            gradient_check(lambda *a: cross_entropy(np, *a), x, w, u, classes, argnum=n, elements=4)


def test_a_parallel_mlp_as_local_functions() -> None:
    """Columns, then rows, with a sum over tp: by hand, with collectives, as on one array."""

    def local(x: Any, w: Any, u: Any) -> Any:
        y = collectives.all_reduce(np.tanh(x @ w) @ u, "tp")
        return np.sum(y**2) / 18

    f = local_map(local, out_placements=[[Partial(), Replicate()]])
    x, w, u = dm.shard_tensor(X, M22, DP), dm.shard_tensor(W, M22, COLUMN), dm.shard_tensor(U, M22, ROW)
    value, want = autograd.value_and_grad(lambda a: mlp(anp, *a))((X, W, U))
    got_value, got = dm.value_and_grad(f, (0, 1, 2))(x, w, u)
    assert float(got_value) == pytest.approx(value, abs=1e-13)
    for g, expected, p in zip(got, want, (x, w, u), strict=True):
        np.testing.assert_allclose(np.asarray(g), expected, atol=1e-12)
        assert g.placements == p.placements


def test_gradients_inside_a_region_are_those_of_the_sum_over_ranks() -> None:
    def local(x: Any, w: Any) -> Any:
        def loss(p: dict[str, Any]) -> Any:
            return collectives.all_reduce(np.sum((x @ p["w"]) ** 2), "dp") * (1 + collectives.axis_index("dp"))

        value, gradient = dm.value_and_grad(loss)({"w": w})
        _, pull = dm.vjp(lambda w: x @ w)(w)
        assert type(pull(np.ones((3, 6)))) is np.ndarray
        return value, gradient["w"]

    x, w = dm.shard_tensor(X, M22, DP), dm.shard_tensor(W, M22, [])
    f = local_map(local, out_placements=[[Partial(), Replicate()], [Partial(), Replicate()]])
    value, gradient = f(x, w)
    assert float(value) == pytest.approx(3 * np.sum((X @ W) ** 2))
    np.testing.assert_allclose(np.asarray(gradient), 3 * 2 * X.T @ (X @ W))
    second = dm.grad(lambda w: np.sum(f(x, w)[1] ** 2))(w)
    plain = autograd.grad(lambda w: np.sum((6 * X.T @ (X @ w)) ** 2))(W)
    np.testing.assert_allclose(np.asarray(second), plain, rtol=1e-10)


@pytest.mark.parametrize("rule", [digits.sgd, digits.adam], ids=["SGD", "Adam"])
def test_digits_with_dtensors(rule: Any) -> None:
    plain = digits.with_numpy(rule, 200, count=299)
    with dask.config.set(scheduler="sync"):
        got = digits.with_dtensors(rule, 200, M22, count=299)
    np.testing.assert_allclose(got, plain, atol=1e-9)
    assert plain[-1] < 0.1 < 2 < plain[0]


@pytest.mark.parametrize("rule", [digits.sgd, digits.adam], ids=["SGD", "Adam"])
def test_digits_in_a_region(rule: Any) -> None:
    plain = digits.with_numpy(rule, 200, count=299)
    np.testing.assert_allclose(digits.in_a_region(rule, 200, M22, count=299), plain, atol=1e-9)
    assert plain[-1] < 0.1
