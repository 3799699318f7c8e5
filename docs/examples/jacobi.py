"""Poisson's equation on a grid by Jacobi sweeps: one row of halo from each neighbour, and the global residual, each sweep."""

from __future__ import annotations

from typing import Any

import numpy as np

import daskmesh as dm
from daskmesh.collectives import all_reduce, halo_exchange

ROWS = 32  # handled at once, so that what is read and written stays in the cache


def jacobi(f: dm.DTensor, sweeps: int = 200) -> tuple[dm.DTensor, dm.DTensor]:
    """Solve 4u - (the four neighbours of u) = f, with u = 0 around the grid; also the norm of the residual before each sweep.

    `f` may be cut along one of its dims or both, each over a mesh dim of its own.
    """
    mesh = f.process_mesh
    cut = {placement.dim: name for name, placement in zip(mesh.dim_names, f.placements, strict=True)}

    def program(f: Any) -> tuple[Any, Any]:
        u = np.zeros((f.shape[0] + 2, f.shape[1] + 2))
        new, norms = u.copy(), np.empty(sweeps)
        for turn in range(sweeps):
            halo_exchange(u[1:-1, 1:-1], (1, 1), cut, 0.0, out=u)
            norms[turn] = all_reduce(sweep(u, new, f)) ** 0.5
            u, new = new, u
        return u[1:-1, 1:-1], norms

    out = [f.placements, [dm.Replicate()] * mesh.ndim]
    return dm.local_map(program, out, out_shapes=(f.shape, (sweeps,)))(f)


def sweep(u: Any, new: Any, f: Any) -> float:
    """One sweep over a padded array, from `u` into `new`; the square of the norm of the residual of `u`."""
    total, space = 0.0, np.empty_like(f[:ROWS])
    for i in range(0, len(f), ROWS):
        rows = f[i : i + ROWS]
        stop = i + len(rows)
        mean = np.add(rows, u[i:stop, 1:-1], out=space[: len(rows)])
        mean += u[i + 2 : stop + 2, 1:-1]
        mean += u[i + 1 : stop + 1, :-2]
        mean += u[i + 1 : stop + 1, 2:]
        mean *= 0.25
        new[i + 1 : stop + 1, 1:-1] = mean
        mean -= u[i + 1 : stop + 1, 1:-1]
        total += np.vdot(mean, mean)
    return 16 * total
