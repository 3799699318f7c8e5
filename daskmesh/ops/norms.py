"""Vector norms, and the matrix norms that are sums and maxima; the others need singular values."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from daskmesh.dtensor import DTensor, implements

__all__: list[str] = []

Axes = tuple[int, ...]


def _inexact(x: DTensor) -> DTensor:
    return x if x.dtype.kind in "fc" else x.astype(np.float64)


def _vector(x: DTensor, order: Any, axes: Axes, keepdims: bool) -> Any:
    size = np.abs(x)
    if order is None or order == 2:
        square = x * x if x.dtype.kind == "f" else np.real(x) ** 2 + np.imag(x) ** 2
        return np.sqrt(np.sum(square, axis=axes, keepdims=keepdims))
    if order in (np.inf, -np.inf):
        return (np.max if order > 0 else np.min)(size, axis=axes, keepdims=keepdims)
    if order == 0:
        return np.sum((x != 0).astype(size.dtype), axis=axes, keepdims=keepdims)
    if order == 1:
        return np.sum(size, axis=axes, keepdims=keepdims)
    if isinstance(order, str):
        raise ValueError(f"Invalid norm order {order!r} for vectors")
    return np.sum(size**order, axis=axes, keepdims=keepdims) ** (1 / order)


def _matrix(x: DTensor, order: Any, axes: Axes, keepdims: bool) -> Any:
    rows, columns = axes
    if order in (None, "fro", "f"):
        return _vector(x, 2, axes, keepdims)
    if order in (1, -1, np.inf, -np.inf):
        summed, left = (rows, columns) if abs(order) == 1 else (columns, rows)
        sums = np.sum(np.abs(x), axis=summed, keepdims=True)
        value = (np.max if order > 0 else np.min)(sums, axis=left, keepdims=True)
        return value if keepdims else np.sum(value, axis=axes)
    if order in (2, -2, "nuc"):
        raise TypeError(f"np.linalg.norm(ord={order!r}) needs singular values; gather the matrix with np.asarray(x) first")
    raise ValueError("Invalid norm order for matrices.")


@implements(np.linalg.norm)
def norm(x: DTensor, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    x = _inexact(x)
    if axis is None and (ord is None or x.ndim == 1):
        return _vector(x, ord, tuple(range(x.ndim)), keepdims)
    axes = normalize_axis_tuple(range(x.ndim) if axis is None else axis, x.ndim)
    if len(axes) == 1:
        return _vector(x, ord, axes, keepdims)
    if len(axes) == 2:
        return _matrix(x, ord, axes, keepdims)
    raise ValueError("Improper number of dimensions to norm.")


@implements(np.linalg.vector_norm)
def vector_norm(x: DTensor, /, *, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> Any:
    axes = tuple(range(x.ndim)) if axis is None else normalize_axis_tuple(axis, x.ndim)
    return _vector(_inexact(x), ord, axes, keepdims)


@implements(np.linalg.matrix_norm)
def matrix_norm(x: DTensor, /, *, keepdims: bool = False, ord: Any = "fro") -> Any:
    return _matrix(_inexact(x), ord, (x.ndim - 2, x.ndim - 1), keepdims)
