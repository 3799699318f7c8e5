"""LocalLayer: the page's example, state on every rank, a backward of one's own, mistakes."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import daskmesh as dm
from daskmesh import LocalLayer, Partial, PlacementError, Replicate, Shard, collectives
from daskmesh.checks import gradient_check

pytestmark = pytest.mark.cluster
M2, M4 = (dm.init_mesh(n, ["x"]) for n in (2, 4))
M22 = dm.init_mesh((2, 2), ("x", "y"))
SUM = [(M2, [Partial(dm.ReduceType.kRedSum)])]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    dm.shutdown()
    yield
    dm.shutdown()


class PageLayer(LocalLayer):
    """The layer of Paddle's page."""

    def __init__(self, out_dist_attrs: Any, grad_dist_attrs: Any) -> None:
        super().__init__(out_dist_attrs, grad_dist_attrs)
        self.local_result = np.array(0.0)

    def forward(self, x: Any) -> Any:
        mask = np.zeros_like(x)
        if dm.get_rank() == 0:
            mask[1:3] = 1
        else:
            mask[4:7] = 1
        x = x * mask
        mask_sum = np.sum(x)
        mask_sum = mask_sum / mask.sum()
        self.local_result = mask_sum
        return mask_sum


def page_input() -> dm.DTensor:
    return dm.dtensor_from_local(lambda rank: np.arange(0, 10, dtype="float32") + rank, M2, [Shard(0)])


def test_the_example_of_the_page() -> None:
    layer = PageLayer(SUM, [None])
    assert float(layer.local_result) == 0.0
    output = layer(page_input())
    assert [float(v) for v in layer.local_result] == [1.5, 6.0]
    assert f"{output}" == "7.5"
    assert output.placements == (Partial(),)
    gradient = dm.grad(layer)(page_input())
    np.testing.assert_array_equal(gradient.local_value(0), np.array([0, 1, 1, 0, 0, 0, 0, 0, 0, 0], "f4") / 2)
    np.testing.assert_array_equal(gradient.local_value(1), np.array([0, 0, 0, 0, 1, 1, 1, 0, 0, 0], "f4") / np.float32(3))
    average = PageLayer([(M2, [Partial("avg")])], None)
    assert float(average(page_input())) == 3.75
    with pytest.raises(PlacementError, match=r"in_grad_placements of argument .* has Partial\('sum'\) on mesh dim 'x'"):
        PageLayer(SUM, SUM)(page_input())  # the page says so, but the gradient of a part is a part


class Counting(LocalLayer):
    def __init__(self) -> None:
        super().__init__([(M2, [Shard(0)])])
        self.calls, self.buffer, self.name = 0, np.zeros(2), "counting"

    def forward(self, x: Any, *, scale: float = 1.0) -> Any:
        self.calls += 1
        self.buffer[dm.get_rank()] += 1
        self.name = "ran"
        if dm.get_rank() == 1:
            self.only_here = np.max(x)
        return x * scale


def test_every_call_begins_anew_and_runs_once_per_rank() -> None:
    layer = Counting()
    x = dm.shard_tensor(np.arange(4.0), M2, [Shard(0)])
    for _ in range(2):
        y = layer(x, scale=2.0)
        np.testing.assert_array_equal(np.asarray(y), 2 * np.arange(4.0))
        assert layer.calls == [1, 1]
        np.testing.assert_array_equal(layer.buffer, [[1, 0], [0, 1]])
        assert layer.name == "counting"
        assert [v if v is None else float(v) for v in layer.only_here] == [None, 3.0]
    with pytest.raises(AttributeError, match="'Counting' object has no attribute 'nothing'"):
        _ = layer.nothing
    layer.calls = 10
    layer(x)
    assert layer.calls == [11, 11]
    assert pickle.loads(pickle.dumps(Counting())).calls == 0


class Needy(LocalLayer):
    def forward(self, x: Any) -> Any:
        self.largest = float(np.max(x))
        return x * self.largest


def test_a_layer_that_needs_values() -> None:
    layer = Needy([(M2, [Shard(0)])])
    x = dm.shard_tensor(np.arange(4.0), M2, [Shard(0)])
    np.testing.assert_array_equal(np.asarray(layer(x)), [0, 1, 6, 9])
    assert layer.largest == [1.0, 3.0]


class Containers(LocalLayer):
    def forward(self, a: Any, b: Any, power: int) -> Any:
        return {"z": a * b**power, "a": (np.sum(a * b), collectives.all_reduce(np.sum(b)))}


def test_several_outputs_in_containers() -> None:
    a, b = dm.shard_tensor(np.arange(1.0, 5.0), M2, [Shard(0)]), dm.shard_tensor(np.array([2.0, 3.0]), M2, [])
    layer = Containers([(M2, [Partial()]), (M2, [Replicate()]), (M2, [Shard(0)])], [None, (M2, [Partial()]), None])
    out = layer(a, b, 2)
    assert list(out) == ["z", "a"]
    np.testing.assert_array_equal(np.asarray(out["z"]), [4, 18, 12, 36])
    assert (float(out["a"][0]), float(out["a"][1])) == (26, 10)
    ga, gb = dm.grad(lambda a, b: np.sum(layer(a, b, 2)["z"]) * layer(a, b, 2)["a"][0], (0, 1))(a, b)
    z, s, u, v = 70.0, 26.0, np.arange(1.0, 5.0), np.array([2.0, 3.0, 2.0, 3.0])
    np.testing.assert_allclose(np.asarray(ga), v**2 * s + v * z)
    np.testing.assert_allclose(np.asarray(gb), np.reshape(2 * u * v * s + u * z, (2, 2)).sum(0))
    gradient_check(lambda a, b: layer(a, b, 1)["a"][1] ** 2 + np.sum(layer(a, b, 1)["z"]), a, b, argnum=1)


class Straight(LocalLayer):
    """A step forward, a straight line backward: autograd would say 0."""

    def forward(self, x: Any, w: Any) -> Any:
        self.x = x
        return np.sign(x) * w

    def backward(self, grad: Any) -> Any:
        return grad * (np.abs(self.x) < 1), np.sum(grad * np.sign(self.x), axis=0)


def test_a_backward_of_its_own() -> None:
    x, w = dm.shard_tensor(np.array([[0.5], [-2.0], [0.25], [3.0]]), M2, [Shard(0)]), dm.shard_tensor(np.array([3.0]), M2, [])
    layer = Straight([(M2, [Shard(0)])])
    gx, gw = dm.grad(lambda x, w: np.sum(layer(x, w) ** 2), (0, 1))(x, w)
    np.testing.assert_array_equal(np.asarray(gx), [[6], [0], [6], [0]])
    np.testing.assert_array_equal(np.asarray(gw), [24])
    np.testing.assert_array_equal(np.asarray(dm.grad(lambda x: np.sum(layer(x, w) ** 2))(x)), [[6], [0], [6], [0]])
    assert [v.tolist() for v in layer.x] == [[[0.5], [-2.0]], [[0.25], [3.0]]]


class Wrong(Straight):
    def backward(self, grad: Any) -> Any:
        return grad


class Misshaped(Straight):
    def backward(self, grad: Any) -> Any:
        return np.sum(grad), None


def test_mistakes_in_a_backward() -> None:
    x, w = dm.ones((4, 1), mesh=M2, placements=[Shard(0)]), dm.ones(1, mesh=M2)
    for kind, message in ((Wrong, "backward returned 1 gradients for 2 inputs"), (Misshaped, r"of shape \(\) for input 0")):
        gradient = dm.grad(lambda x, kind=kind: np.sum(kind([(M2, [Shard(0)])])(x, w)))(x)
        with pytest.raises(ValueError, match=message):
            gradient.compute()


def test_mistakes() -> None:
    mesh = dm.init_mesh(2, ["z"])
    for given in (SUM[0], [M2], [(M2,)], [], [None], [Shard(0)]):
        with pytest.raises(TypeError, match=r"LocalLayer: out_dist_attrs: .*write \[\(mesh, \[Shard\(0\)\]\)\]"):
            LocalLayer(given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a layer runs on one mesh"):
        LocalLayer([(M2, []), (mesh, [])])
    with pytest.raises(NotImplementedError, match="LocalLayer has no forward"):
        LocalLayer(SUM)(page_input())
    layer = Straight([(M2, [Shard(0)])], [None])
    layer.weight = dm.ones(1, mesh=M2)  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"the attribute 'weight' is a DTensor.*pass it as an input"):
        layer(page_input(), 1.0)
    with pytest.raises(ValueError, match="in_grad_placements has 1 entries for 2 positional arguments"):
        Straight([(M2, [Shard(0)])], [None])(page_input(), 1.0)
    with pytest.raises(ValueError, match="out_placements has 3 entries, the function returned 2 outputs"):
        Straight([(M2, [Shard(0)])] * 2)(page_input(), 1.0)
