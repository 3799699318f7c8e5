"""Conjugate gradients for Poisson's equation on a grid: one halo and two global dot products in each turn."""

from __future__ import annotations

from typing import Any

import numpy as np

import daskmesh as dm
from daskmesh.collectives import all_reduce, halo_exchange

ROWS = 32  # handled at once, so that what is read and written stays in the cache


def solve(b: dm.DTensor, tolerance: float = 1e-8, turns: int = 1000) -> tuple[dm.DTensor, dm.DTensor]:
    """Solve 4x - (the four neighbours of x) = b, with x = 0 around the grid; also the norm of the residual after each turn.

    Stops when that norm is `tolerance` times the one of `b`, or after so many turns.
    """
    mesh = b.process_mesh
    cut = {placement.dim: name for name, placement in zip(mesh.dim_names, b.placements, strict=True)}

    def program(b: Any) -> tuple[Any, Any]:
        padded = np.zeros((b.shape[0] + 2, b.shape[1] + 2))
        p = padded[1:-1, 1:-1]
        x, r, ap = np.zeros_like(b), b.copy(), np.empty_like(b)
        p[...] = b
        norms = [all_reduce(np.vdot(r, r))]
        # The sums have the same bits on every rank, so all ranks leave the loop in the same turn.
        while norms[-1] > tolerance**2 * norms[0] and len(norms) <= turns:
            halo_exchange(p, (1, 1), cut, 0.0, out=padded)
            alpha = norms[-1] / all_reduce(apply(padded, ap))
            norms.append(all_reduce(step(alpha, x, r, p, ap)))
            turn(norms[-1] / norms[-2], r, p)
        return x, np.sqrt(norms)

    return dm.local_map(program, [b.placements, [dm.Replicate()] * mesh.ndim])(b)


def blocks(*arrays: Any) -> Any:
    """The arrays, some rows at a time."""
    return zip(*([array[i : i + ROWS] for i in range(0, len(array), ROWS)] for array in arrays), strict=True)


def apply(padded: Any, out: Any) -> float:
    """The matrix times p, from a padded p into `out`; their dot product."""
    total = 0.0
    for i in range(0, len(out), ROWS):
        ap = out[i : i + ROWS]
        stop = i + len(ap)
        p = padded[i + 1 : stop + 1, 1:-1]
        np.multiply(p, 4.0, out=ap)
        ap -= padded[i:stop, 1:-1]
        ap -= padded[i + 2 : stop + 2, 1:-1]
        ap -= padded[i + 1 : stop + 1, :-2]
        ap -= padded[i + 1 : stop + 1, 2:]
        total += np.vdot(p, ap)
    return total


def step(alpha: float, x: Any, r: Any, p: Any, ap: Any) -> float:
    """Go along p; the square of the norm of what remains."""
    total = 0.0
    for x_, r_, p_, ap_ in blocks(x, r, p, ap):
        x_ += alpha * p_
        r_ -= alpha * ap_
        total += np.vdot(r_, r_)
    return total


def turn(beta: float, r: Any, p: Any) -> None:
    """The next direction."""
    for r_, p_ in blocks(r, p):
        p_ *= beta
        p_ += r_
