"""The operator table: importing this package fills it."""

from __future__ import annotations

from daskmesh.ops import (
    assignment,
    contractions,
    diagonals,
    differences,
    elementwise,
    histograms,
    indexing,
    joining,
    manipulation,
    masks,
    moments,
    norms,
    padding,
    quantiles,
    reductions,
    scans,
    sets,
    sliding,
    standard,
    statistics,
)

__all__ = [
    "assignment",
    "contractions",
    "diagonals",
    "differences",
    "elementwise",
    "histograms",
    "indexing",
    "joining",
    "manipulation",
    "masks",
    "moments",
    "norms",
    "padding",
    "quantiles",
    "reductions",
    "scans",
    "sets",
    "sliding",
    "standard",
    "statistics",
]
