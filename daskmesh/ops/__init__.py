"""The operator table: importing this package fills it."""

from __future__ import annotations

from daskmesh.ops import elementwise, reductions

__all__ = ["elementwise", "reductions"]
