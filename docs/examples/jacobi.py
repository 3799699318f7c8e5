"""Poisson's equation on a grid by Jacobi sweeps: one row of halo from each neighbour, and the global residual, each sweep."""

from __future__ import annotations

from typing import Any

import numpy as np

import daskmesh as dm
from daskmesh.collectives import all_reduce, halo_exchange

ROWS = 64  # handled at once, so that what is read and written stays in the cache
LINE = 8  # numbers in a line of the cache


def jacobi(f: dm.DTensor, sweeps: int = 200) -> tuple[dm.DTensor, dm.DTensor]:
    """Solve 4u - (the four neighbours of u) = f, with u = 0 around the grid; also the norm of the residual before each sweep.

    `f` may be cut along one of its dims or both, each over a mesh dim of its own.
    """
    mesh = f.process_mesh
    cut = {placement.dim: name for name, placement in zip(mesh.dim_names, f.placements, strict=True)}

    def program(f: Any) -> tuple[Any, Any]:
        f = np.pad(f, 1)
        (u, new), space, norms = grids(f), workspace(f), np.empty(sweeps)
        for turn in range(sweeps):
            halo_exchange(u[1:-1, 1:-1], (1, 1), cut, 0.0, out=u)
            norms[turn] = all_reduce(sweep(u, new, f, space)) ** 0.5
            u, new = new, u
        return u[1:-1, 1:-1], norms

    out = [f.placements, [dm.Replicate()] * mesh.ndim]
    return dm.local_map(program, out, out_shapes=(f.shape, (sweeps,)))(f)


def grids(f: Any) -> tuple[Any, Any]:
    """Two grids of zeros like `f` in little more memory than that of one: the other's rows are `ROWS` rows further down."""
    both = zeros(len(f) + ROWS, f.shape[1])
    return both[:-ROWS], both[ROWS:]


def workspace(f: Any) -> Any:
    """What a sweep needs besides, for some rows."""
    return zeros(2, (ROWS + 2) * LINE * -(-f.shape[1] // LINE))


def zeros(rows: int, columns: int) -> Any:
    """Zeros that begin with a line of the cache, which makes the sums a little faster."""
    spare = np.zeros(rows * columns + LINE)
    skip = -spare.ctypes.data % (8 * LINE) // 8
    return spare[skip : skip + rows * columns].reshape(rows, columns)


def sweep(u: Any, new: Any, f: Any, space: Any) -> float:
    """One sweep from `u` into `new`, of `grids`, all padded; the square of the norm of the residual of `u`.

    What is new goes where rows were that have been read: behind, on the way down if `u` is the lower grid, else on the way up. So
    each sweep begins with what the last one has left in the cache. Rows are taken as one long line, the padding too: such arrays
    NumPy adds fastest. What that puts into the padding, the next halo exchange writes over.
    """
    inner, width = len(u) - 2, u.shape[1]
    down = u.ctypes.data > new.ctypes.data
    u, new, f = u.reshape(-1), new.reshape(-1), f.reshape(-1)
    total = 0.0
    for row in range(1, inner + 1, ROWS)[:: 1 if down else -1]:
        start, stop = row * width, min(row + ROWS, inner + 1) * width
        pairs, mean = space[0, : stop - start + width + 1], space[1, : stop - start]
        np.add(u[start - width : stop + 1], u[start - 1 : stop + width], out=pairs)  # upper and right, left and lower
        np.add(pairs[: stop - start], pairs[width + 1 :], out=mean)
        mean += f[start:stop]
        np.multiply(mean, 0.25, out=new[start:stop])
        change = np.subtract(new[start:stop], u[start:stop], out=mean)
        change[::width] = change[width - 1 :: width] = 0
        total += np.vdot(change, change)
    return 16 * total
