"""A small network learns scikit-learn's digits: with NumPy, with DTensors, and in a loop that runs inside one region.

::

    python benchmarks/train_digits.py            # prints losses and times, writes docs/tutorial/digits.svg

The mesh is 2 x 2: ``dp`` cuts the images, ``tp`` the hidden units. All three ways give the same losses, step by step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import autograd
import autograd.numpy as anp
import dask
import numpy as np
from sklearn.datasets import load_digits

import daskmesh as dm
from daskmesh import Partial, Shard, collectives

Params = dict[str, Any]
HIDDEN = 32
PLACED = {"w1": {"tp": Shard(1)}, "b1": {"tp": Shard(0)}, "w2": {"tp": Shard(0)}, "b2": {}}


def digits(count: int | None = None) -> tuple[Any, Any]:
    """Images of 64 pixels, and their classes as rows of the identity."""
    data = load_digits()
    return data.data[:count] / 16, np.eye(10)[data.target[:count]]


def first_params() -> Params:
    rng = np.random.default_rng(0)
    return {
        "w1": rng.normal(size=(64, HIDDEN)) / 8, "b1": np.zeros(HIDDEN),
        "w2": rng.normal(size=(HIDDEN, 10)) / np.sqrt(HIDDEN), "b2": np.zeros(10),
    }  # fmt: skip


def loss(p: Params, x: Any, y: Any, total: Callable[[Any], Any], n: int, np: Any = np) -> Any:
    """Softmax cross entropy of two layers; `total` makes the sum over the hidden units that tp has cut."""
    z = total(np.tanh(x @ p["w1"] + p["b1"]) @ p["w2"]) + p["b2"]
    z = z - np.max(z, axis=1, keepdims=True)
    return np.sum((np.log(np.sum(np.exp(z), axis=1, keepdims=True)) - z) * y) / n


# -- optimisers: plain arithmetic, on arrays and on DTensors ---------------------------------------------------------------


def sgd(p: Any, g: Any, state: Any, step: int) -> tuple[Any, Any]:
    return p - 0.5 * g, state


def adam(p: Any, g: Any, state: Any, step: int) -> tuple[Any, Any]:
    m, v = (0 * g, 0 * g) if state is None else state
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
    size = 0.01 * np.sqrt(1 - 0.999 ** (step + 1)) / (1 - 0.9 ** (step + 1))
    return p - size * m / (np.sqrt(v) + 1e-8), (m, v)


def updated(rule: Any, params: Params, gradients: Params, states: Params, step: int) -> tuple[Params, Params]:
    pairs = {k: rule(params[k], gradients[k], states.get(k), step) for k in params}
    return {k: p for k, (p, _) in pairs.items()}, {k: s for k, (_, s) in pairs.items()}


# -- three ways to train ----------------------------------------------------------------------------------------------------


def with_numpy(rule: Any, steps: int, mesh: dm.ProcessMesh | None = None, count: int | None = None) -> list[float]:
    x, y = digits(count)
    both = autograd.value_and_grad(lambda p: loss(p, x, y, lambda z: z, len(x), anp))
    params, states, losses = first_params(), {}, []
    for step in range(steps):
        value, gradients = both(params)
        params, states = updated(rule, params, gradients, states, step)
        losses.append(float(value))
    return losses


def with_dtensors(rule: Any, steps: int, mesh: dm.ProcessMesh, count: int | None = None) -> list[float]:
    """One Dask graph per step: forward, backward, all-reduces and update, each array staying on its ranks."""
    x, y = (dm.shard_tensor(a, mesh, {"dp": Shard(0)}).persist() for a in digits(count))
    params = {k: dm.shard_tensor(v, mesh, PLACED[k]).persist() for k, v in first_params().items()}

    def total(z: Any) -> Any:
        return dm.reshard(z, mesh, {"dp": Shard(0)})

    both = dm.value_and_grad(lambda p: loss(p, x, y, total, len(x)))
    states: Params = {}
    losses = []
    for step in range(steps):
        value, gradients = both(params)
        value, params, states = dask.persist(value, *updated(rule, params, gradients, states, step))
        losses.append(value)
    return [float(v) for v in losses]


def in_a_region(rule: Any, steps: int, mesh: dm.ProcessMesh, count: int | None = None) -> list[float]:
    """The loop runs on the ranks, which talk to each other directly; Dask sees one task per rank."""
    images, classes = digits(count)
    n = len(images)

    def train(params: Params, x: Any, y: Any) -> tuple[Any, Params]:
        def total(z: Any) -> Any:
            return collectives.all_reduce(z, "tp")

        # Each rank of a tp group returns the loss of the same images, so their sum counts it twice.
        both = dm.value_and_grad(lambda p: loss(p, x, y, total, n) / collectives.axis_size("tp"))
        states: Params = {}
        losses = np.zeros(steps)
        for step in range(steps):
            value, gradients = both(params)
            losses[step] = value
            axes = {k: "dp" if PLACED[k] else None for k in params}  # b2 is one for all ranks
            gradients = {k: collectives.all_reduce(g, axes[k]) for k, g in gradients.items()}
            params, states = updated(rule, params, gradients, states, step)
        return losses, params

    placements = [[Partial(), Partial()], {k: PLACED[k] for k in PLACED}]
    shapes = [(steps,), *((v.shape, "f8") for _, v in sorted(first_params().items()))]
    trained = dm.local_map(train, out_placements=placements, out_shapes=shapes)
    params = {k: dm.shard_tensor(v, mesh, PLACED[k]) for k, v in first_params().items()}
    x, y = (dm.shard_tensor(a, mesh, {"dp": Shard(0)}) for a in (images, classes))
    losses, _ = trained(params, x, y)
    return [float(v) for v in losses.compute()]


# -- the picture --------------------------------------------------------------------------------------------------------------


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Loss curves as a small SVG, on a logarithmic scale."""
    width, height, left, bottom = 480, 240, 44, 28
    every = [v for c in curves.values() for v in c]
    low, high = np.log10(min(every)), np.log10(max(every))
    longest = max(map(len, curves.values()))

    def at(step: int, value: float) -> str:
        across = left + (width - left - 8) * step / max(longest - 1, 1)
        return f"{across:.1f},{8 + (height - bottom - 8) * (high - np.log10(value)) / (high - low):.1f}"

    size = f'width="{width}" height="{height}"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">']
    lines.append(f'<rect {size} fill="white"/>')
    for tick in (2.0, 1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01):
        if low <= np.log10(tick) <= high:
            y = at(0, tick).split(",")[1]
            lines.append(f'<path d="M{left},{y}H{width - 8}" stroke="#ddd"/><text x="6" y="{float(y) + 4:.1f}">{tick}</text>')
    colours = {"SGD": "#1f77b4", "Adam": "#d62728"}
    for i, (name, curve) in enumerate(curves.items()):
        colour = colours[name.split(",")[0]]
        points = " ".join(at(s, v) for s, v in enumerate(curve))
        plain = name.endswith("NumPy")
        style = f'stroke="{colour}" stroke-width="{5 if plain else 1.5}" stroke-opacity="{0.3 if plain else 1}"'
        lines.append(f'<polyline fill="none" {style} points="{points}"/>')
        lines.append(f'<text x="{width - 190}" y="{22 + 15 * i}" fill="{colour}">{name}{" (wide)" if plain else ""}</text>')
    lines.append(f'<text x="{width // 2}" y="{height - 8}">step</text></svg>')
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(steps: int = 200, picture: str | None = "docs/tutorial/digits.svg") -> dict[str, list[float]]:
    """Train in all ways, print, and draw."""
    mesh = dm.init_mesh((2, 2), ("dp", "tp"))
    curves = {}
    for name, rule in (("SGD", sgd), ("Adam", adam)):
        for way, train in (("NumPy", with_numpy), ("DTensors", with_dtensors), ("in a region", in_a_region)):
            start = time.perf_counter()
            curve = train(rule, steps, mesh)
            curves[f"{name}, {way}"] = curve
            took = time.perf_counter() - start
            plain = curves[f"{name}, NumPy"]
            apart = max(abs(a - b) for a, b in zip(curve, plain, strict=True))
            end = f"loss {curve[0]:.4f} -> {curve[-1]:.4f}, {took / steps * 1e3:6.1f} ms a step, {apart:.0e} from NumPy"
            print(f"{name:5} {way:12} {end}")
    if picture is not None:
        draw({k: c for k, c in curves.items() if not k.endswith("DTensors")}, Path(picture))
    return curves


if __name__ == "__main__":
    main()
