"""Gradients where ranks are processes: functions, layers and their backward travel, ranks of a backward meet."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import daskmesh as dm
from daskmesh import LocalLayer, Partial, Replicate, Shard, collectives, local_map

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("processes")]
X = np.random.default_rng(5).normal(size=(7, 3))
W = np.random.default_rng(6).normal(size=(3, 2))


def normalised(t: Any, w: Any) -> Any:
    y = t @ w
    mean = collectives.all_reduce(np.sum(y, axis=0), "x") / 7
    return collectives.shift(np.tanh(y - mean)[:1], "x", 1), np.sum((y - mean) ** 3)


def on_one_array(x: Any, w: Any, firsts: list[int]) -> Any:
    y = x @ w
    y = y - np.sum(y, axis=0) / 7
    return np.sum(np.tanh(y)[firsts] ** 2) * np.sum(y**3)


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_and_second_derivatives(size: int) -> None:
    mesh = dm.init_mesh(size, ["x"])
    x, w = dm.shard_tensor(X, mesh, [Shard(0)]), dm.shard_tensor(W, mesh, [])
    f = local_map(normalised, out_placements=[[Shard(0)], [Partial()]])

    def total(x: Any, w: Any) -> Any:
        firsts, cubes = f(x, w)
        return np.sum(firsts**2) * cubes

    starts = [s.start for s in (x.layout.box(c)[0] for c in x.layout.coords())]
    value, (gx, gw) = dm.value_and_grad(total, (0, 1))(x, w)
    want, (wx, ww) = dm.value_and_grad(lambda x, w: on_one_array(x, w, starts), (0, 1))(X, W)
    assert float(value) == pytest.approx(want)
    np.testing.assert_allclose(np.asarray(gx), wx, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(np.asarray(gw), ww, rtol=1e-10, atol=1e-12)
    assert (gx.placements, gw.placements) == ((Shard(0),), (Replicate(),))
    second = dm.grad(lambda w: np.sum(dm.grad(total, 1)(x, w) ** 2))(w)
    plain = dm.grad(lambda w: np.sum(dm.grad(lambda w: on_one_array(X, w, starts))(w) ** 2))(W)
    np.testing.assert_allclose(np.asarray(second), plain, rtol=1e-9)


class Halves(LocalLayer):
    def forward(self, x: Any) -> Any:
        self.largest = np.max(x)
        return np.round(x)

    def backward(self, grad: Any) -> Any:
        return grad / 2


def test_a_layer_with_a_backward() -> None:
    mesh = dm.init_mesh(2, ["x"])
    layer = Halves([(mesh, [Shard(0)])])
    x = dm.shard_tensor(X, mesh, [Shard(0)])
    np.testing.assert_array_equal(np.asarray(layer(x)), np.round(X))
    assert [float(v) for v in layer.largest] == [X[:4].max(), X[4:].max()]
    np.testing.assert_array_equal(np.asarray(dm.grad(lambda x: np.sum(layer(x)))(x)), np.full(X.shape, 0.5))
