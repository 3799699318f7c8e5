"""The operator table: importing this package fills it."""

from __future__ import annotations

from daskmesh.ops import contractions, elementwise, joining, manipulation, moments, norms, quantiles, reductions, scans

__all__ = ["contractions", "elementwise", "joining", "manipulation", "moments", "norms", "quantiles", "reductions", "scans"]
