"""The programs that are measured: sizes, and the rows of the data that each of two ranks has. The programs too."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "docs" / "examples"))
cg, fft2, jacobi, kmeans, logreg, tsqr = map(import_module, ("cg", "fft2", "jacobi", "kmeans", "logreg", "tsqr"))

RANKS = 2
NAMES = ("jacobi", "cg", "kmeans", "logreg", "fft2", "tsqr")
SIZES = {"grid": 2048, "sweeps": 200, "points": 1_000_000, "fft": 4096, "tall": 1_000_000, "means": 10, "descents": 50}
CENTRES, DIMS, FEATURES, COLUMNS = 8, 16, 16, 32
TURNS = {"jacobi": "sweeps", "cg": "sweeps", "kmeans": "means", "logreg": "descents"}  # which size says how many


def shape(name: str, sizes: dict[str, int]) -> tuple[int, int]:
    """The shape of the array that a program works on."""
    return {
        "jacobi": (sizes["grid"], sizes["grid"]),
        "cg": (sizes["grid"], sizes["grid"]),
        "kmeans": (sizes["points"], DIMS),
        "logreg": (sizes["points"], FEATURES),
        "fft2": (sizes["fft"], sizes["fft"]),
        "tsqr": (sizes["tall"], COLUMNS),
    }[name]


def turns(name: str, sizes: dict[str, int]) -> tuple[int, ...]:
    """How often a program goes round its loop, if it has one."""
    return (sizes[TURNS[name]],) if name in TURNS else ()


def part(name: str, rank: int, sizes: dict[str, int]) -> Any:
    """The rows of a rank: one half of the array."""
    rows, columns = shape(name, sizes)
    random, size = np.random.default_rng([7, rank]), (rows // RANKS, columns)
    if name == "kmeans":
        points = random.standard_normal(size, "f4")
        points += centres()[np.arange(len(points)) % CENTRES]
        return points
    if name == "fft2":
        return random.random(size) + 1j * random.random(size)
    return random.standard_normal(size)


def centres() -> Any:
    """Where the points of k-means lie."""
    return np.random.default_rng(5).random((CENTRES, DIMS), "f4") * 20


def guess() -> Any:
    """Where k-means begins."""
    return centres() + np.float32(3)


def labels(rank: int, sizes: dict[str, int]) -> Any:
    """The labels of a rank's samples."""
    x = part("logreg", rank, sizes)
    return (x @ np.linspace(-1, 1, FEATURES) + np.random.default_rng([8, rank]).standard_normal(len(x)) > 0).astype(float)
