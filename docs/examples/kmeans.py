"""k-means: each rank sums its own points by the nearest centre; one all-reduce of k x (dims + 1) numbers per turn."""

from __future__ import annotations

from typing import Any

import numpy as np

import daskmesh as dm
from daskmesh.collectives import all_reduce

ROWS = 4096  # points handled at once, so that their distances stay in the cache


def kmeans(points: dm.DTensor, centres: Any, turns: int = 10) -> dm.DTensor:
    """The centres after so many turns, beginning with `centres`; `points` are cut along their rows."""

    def program(points: Any, centres: Any) -> Any:
        for _ in range(turns):
            total = all_reduce(sums(points, centres))
            centres = moved(centres, total)
        return centres

    return dm.local_map(program, [[dm.Replicate()] * points.process_mesh.ndim], out_shapes=[centres.shape])(points, centres)


def sums(points: Any, centres: Any) -> Any:
    """For each centre the sum of the points that are nearest to it, and how many they are."""
    k, dims = centres.shape
    out = np.zeros((k, dims + 1))
    scaled, squares, numbers = -2 * centres.T, (centres * centres).sum(1), np.arange(k)
    for i in range(0, len(points), ROWS):
        block = points[i : i + ROWS]
        distances = block @ scaled
        distances += squares
        own = (distances.argmin(1)[:, None] == numbers).astype(points.dtype)
        out[:, :-1] += own.T @ block
        out[:, -1] += own.sum(0)
    return out


def moved(centres: Any, total: Any) -> Any:
    """The means of the points; a centre without points stays."""
    counts = total[:, -1:]
    return np.where(counts > 0, total[:, :-1] / np.maximum(counts, 1), centres).astype(centres.dtype)
