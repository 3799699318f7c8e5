"""Logistic regression by gradient descent with momentum: one all-reduce of the gradient and the loss in each turn."""

from __future__ import annotations

from typing import Any

import numpy as np

import daskmesh as dm
from daskmesh.collectives import all_reduce

ROWS = 4096  # samples handled at once, so that they stay in the cache


def fit(x: dm.DTensor, y: dm.DTensor, turns: int = 50, rate: float = 1.0, momentum: float = 0.9) -> tuple[dm.DTensor, dm.DTensor]:
    """The weights, and the mean loss before each turn; samples `x` and their labels `y` (0 or 1) are cut along their rows."""
    samples, features = x.shape

    def program(x: Any, y: Any) -> tuple[Any, Any]:
        w, speed, losses = np.zeros(features), np.zeros(features), np.empty(turns)
        for turn in range(turns):
            total = all_reduce(gradient_and_loss(w, x, y)) / samples
            losses[turn] = total[-1]
            speed = momentum * speed - rate * total[:-1]
            w = w + speed
        return w, losses

    out = [[dm.Replicate()] * x.process_mesh.ndim] * 2
    return dm.local_map(program, out, out_shapes=((features,), (turns,)))(x, y)


def gradient_and_loss(w: Any, x: Any, y: Any) -> Any:
    """The gradient of the summed loss, and behind it the loss."""
    out = np.zeros(len(w) + 1)
    for i in range(0, len(x), ROWS):
        rows, labels = x[i : i + ROWS], y[i : i + ROWS]
        z = rows @ w
        small = np.exp(-np.abs(z))  # never overflows
        chance = np.where(z < 0, small, 1) / (1 + small)
        out[:-1] += (chance - labels) @ rows
        out[-1] += (np.log1p(small) + np.maximum(z, 0) - labels * z).sum()
    return out
