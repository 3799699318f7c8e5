"""The programs in plain dask.array, one chunk per worker; each gives what it computed last and a small answer to compare."""

from __future__ import annotations

from typing import Any

import dask
import dask.array as da
import numpy as np
import workloads
from distributed import wait
from workloads import kmeans


def jacobi(f: Any, sweeps: int) -> Any:
    """The grid is kept on the workers, the residual is fetched in each sweep."""
    u, norms = da.zeros_like(f), []
    for _ in range(sweeps):
        mean = (neighbours(u) + f) * 0.25
        square = ((mean - u) ** 2).sum()
        u, square = dask.persist(mean, square)
        norms.append(4 * float(square) ** 0.5)
    return np.array(norms)


def neighbours(u: Any) -> Any:
    """The sum of the four neighbours, zero around the grid."""

    def stencil(p: Any) -> Any:
        return p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:]

    padded = da.overlap.overlap(u, depth={0: 1, 1: 1}, boundary=0)
    return padded.map_blocks(stencil, dtype=u.dtype, chunks=u.chunks)


def cg(b: Any, turns: int) -> Any:
    """Everything that the next turn needs is kept on the workers, the residual is fetched in each turn."""
    x, r, p = da.zeros_like(b), b, b
    square = (r * r).sum().persist()
    norms = [float(square) ** 0.5]
    for _ in range(turns):
        ap = 4 * p - neighbours(p)
        alpha = square / (p * ap).sum()
        x, r = x + alpha * p, r - alpha * ap
        following = (r * r).sum()
        p, square = r + (following / square) * p, following
        x, r, p, square = dask.persist(x, r, p, square)
        norms.append(float(square) ** 0.5)
    return np.array(norms)


def kmeans_(points: Any, turns: int) -> Any:
    """A delayed sum of each chunk, gathered in each turn."""
    centres = workloads.guess()
    for _ in range(turns):
        terms = [dask.delayed(kmeans.sums)(chunk, centres) for chunk in points.to_delayed().ravel()]
        centres = kmeans.moved(centres, sum(dask.compute(*terms)))
    return centres


def logreg(x: Any, y: Any, turns: int) -> Any:
    """Gradient and loss as array expressions, computed in each turn."""
    w, speed, losses = np.zeros(x.shape[1]), np.zeros(x.shape[1]), []
    for _ in range(turns):
        z = x @ w
        loss = (da.log1p(da.exp(-abs(z))) + da.maximum(z, 0) - y * z).sum()
        gradient, total = dask.compute((1 / (1 + da.exp(-z)) - y) @ x, loss)
        losses.append(total / len(x))
        speed = 0.9 * speed - gradient / len(x)
        w = w + speed
    return np.array(losses)


def fft2(x: Any) -> Any:
    """Rows, rechunk, columns."""
    y = da.fft.fft(da.fft.fft(x, axis=1).rechunk((-1, x.shape[1] // workloads.RANKS)), axis=0).persist()
    wait(y)
    return y


def tsqr(a: Any) -> Any:
    """dask.array's own."""
    q, r = dask.persist(*da.linalg.qr(a))
    wait((q, r))
    return r
