"""The operator table: importing this package fills it."""

from __future__ import annotations

from daskmesh.ops import contractions, elementwise, manipulation, moments, norms, quantiles, reductions, scans

__all__ = ["contractions", "elementwise", "manipulation", "moments", "norms", "quantiles", "reductions", "scans"]
