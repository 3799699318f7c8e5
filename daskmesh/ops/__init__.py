"""The operator table: importing this package fills it."""

from __future__ import annotations

from daskmesh.ops import (
    contractions,
    elementwise,
    indexing,
    joining,
    manipulation,
    masks,
    moments,
    norms,
    quantiles,
    reductions,
    scans,
    sets,
    standard,
)

__all__ = [
    "contractions",
    "elementwise",
    "indexing",
    "joining",
    "manipulation",
    "masks",
    "moments",
    "norms",
    "quantiles",
    "reductions",
    "scans",
    "sets",
    "standard",
]
