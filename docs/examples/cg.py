"""Conjugate gradients for Poisson's equation on a grid: one halo and two global dot products in each turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import daskmesh as dm
from daskmesh.collectives import all_reduce, halo_exchange

ROWS = 64  # handled at once, so that what is read and written stays in the cache


def solve(b: dm.DTensor, tolerance: float = 1e-8, turns: int = 1000) -> tuple[dm.DTensor, dm.DTensor]:
    """Solve 4x - (the four neighbours of x) = b, with x = 0 around the grid; also the norm of the residual after each turn.

    Stops when that norm is `tolerance` times the one of `b`, or after so many turns.
    """
    mesh = b.process_mesh
    cut = {placement.dim: name for name, placement in zip(mesh.dim_names, b.placements, strict=True)}

    def program(b: Any) -> tuple[Any, Any]:
        r = np.pad(b, 1)
        p, x, ap, space = r.copy(), np.zeros_like(r), np.zeros_like(r), workspace(r)
        norms = [all_reduce(np.vdot(r, r))]
        # The sums have the same bits on every rank, so all ranks leave the loop in the same turn.
        while norms[-1] > tolerance**2 * norms[0] and len(norms) <= turns:
            halo_exchange(p[1:-1, 1:-1], (1, 1), cut, 0.0, out=p)
            alpha = norms[-1] / all_reduce(apply(p, ap, space))
            norms.append(all_reduce(step(alpha, x, r, p, ap, space)))
            turn(norms[-1] / norms[-2], r, p)
        return x[1:-1, 1:-1], np.sqrt(norms)

    return dm.local_map(program, [b.placements, [dm.Replicate()] * mesh.ndim])(b)


def workspace(grid: Any) -> Any:
    """What is needed besides, for some rows of a padded grid."""
    return np.empty((2, (ROWS + 1) * grid.shape[1] + 1))


def blocks(grid: Any) -> Iterator[tuple[int, int]]:
    """Where some rows at a time of a padded grid begin and end, in one long line of all rows: such NumPy adds fastest."""
    inner, width = len(grid) - 2, grid.shape[1]
    for row in range(1, inner + 1, ROWS):
        yield row * width, min(row + ROWS, inner + 1) * width


def apply(p: Any, ap: Any, space: Any) -> float:
    """The matrix times `p`, into `ap`; their dot product. All grids are padded, `ap` and `r` with zeros."""
    total, width, line, out = 0.0, p.shape[1], p.reshape(-1), ap.reshape(-1)
    for start, stop in blocks(p):
        pairs, four, into = space[0, : stop - start + width + 1], space[1, : stop - start], out[start:stop]
        np.add(line[start - width : stop + 1], line[start - 1 : stop + width], out=pairs)  # upper and right, left and lower
        np.add(pairs[: stop - start], pairs[width + 1 :], out=four)
        np.multiply(line[start:stop], 4.0, out=into)
        into -= four
        into[::width] = into[width - 1 :: width] = 0
        total += np.vdot(line[start:stop], into)
    return total


def step(alpha: float, x: Any, r: Any, p: Any, ap: Any, space: Any) -> float:
    """Go along p; the square of the norm of what remains."""
    total, (x_, r_, p_, ap_) = 0.0, (grid.reshape(-1) for grid in (x, r, p, ap))
    for start, stop in blocks(x):
        at, moved = slice(start, stop), space[0, : stop - start]
        x_[at] += np.multiply(p_[at], alpha, out=moved)
        r_[at] -= np.multiply(ap_[at], alpha, out=moved)
        total += np.vdot(r_[at], r_[at])
    return total


def turn(beta: float, r: Any, p: Any) -> None:
    """The next direction."""
    r_, p_ = r.reshape(-1), p.reshape(-1)
    for start, stop in blocks(p):
        p_[start:stop] *= beta
        p_[start:stop] += r_[start:stop]
