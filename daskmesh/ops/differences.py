"""Differences of neighbours, and what is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index, normalize_axis_tuple

from daskmesh.dtensor import DTensor, implements
from daskmesh.ops.gathers import refuse_plain

__all__: list[str] = []

Array = Any
_np: Any = np


def _along(d: int, *entries: slice) -> list[tuple[slice, ...]]:
    """Keys that slice dim `d`."""
    return [(*(slice(None),) * d, s) for s in entries]


@implements(np.trapezoid)
def trapezoid(y: DTensor, x: Any = None, dx: float = 1.0, axis: int = -1) -> DTensor:
    d = normalize_axis_index(axis, y.ndim)
    ahead, behind = ((*(slice(None),) * d, s) for s in (slice(1, None), slice(None, -1)))
    step: Any = dx
    if x is not None:
        step = _np.diff(x, axis=0 if np.ndim(x) == 1 else d)
        if step.ndim == 1:
            step = step.reshape((-1,) + (1,) * (y.ndim - 1 - d))
    return _np.sum(step * (y[ahead] + y[behind]) / 2.0, axis=d)  # type: ignore[no-any-return]


@implements(np.ediff1d)
def ediff1d(ary: DTensor, to_end: Any = None, to_begin: Any = None) -> DTensor:
    x = _np.ravel(ary)
    pieces = [to_begin, x[1:] - x[:-1], to_end]
    given = [p for p in pieces if p is not None]
    flat = [p if isinstance(p, DTensor) else np.asarray(p, dtype=x.dtype).reshape(-1) for p in given]
    return _np.concatenate(flat)  # type: ignore[no-any-return]


@implements(np.gradient)
def gradient(f: DTensor, *varargs: Any, axis: Any = None, edge_order: int = 1) -> Any:
    """Central differences inside, one-sided ones at the ends.

    Parameters
    ----------
    *varargs : scalar or 1-d array
        None, one for all dims, or one per dim: the distance of neighbours, or the places of all elements.

    Notes
    -----
    **Communication**: the rows at the borders of parts, and where the ends are joined to the inside.
    """
    refuse_plain(f, "gradient")
    dims = tuple(range(f.ndim)) if axis is None else normalize_axis_tuple(axis, f.ndim, "axis")
    if edge_order not in (1, 2):
        raise ValueError("'edge_order' greater than 2 not supported")
    if len(varargs) not in (0, 1, len(dims)) or (len(varargs) == 1 and np.ndim(varargs[0]) and len(dims) > 1):
        raise TypeError(f"np.gradient: {len(varargs)} spacings for {len(dims)} dims; give none, one number, or one per dim")
    spacings = list(varargs) * (len(dims) if len(varargs) == 1 else 1) or [1.0] * len(dims)
    f = f.astype(np.float64) if f.dtype.kind in "biu" else f
    made = [_gradient(f, d, h, edge_order) for d, h in zip(dims, spacings, strict=True)]
    return made[0] if len(made) == 1 else tuple(made)


def _gradient(f: DTensor, d: int, spacing: Any, order: int) -> DTensor:
    n = f.shape[d]
    if n < order + 1:
        raise ValueError(f"np.gradient: dim {d} of size {n} is too short; at least {order + 1} elements are needed")
    steps = _steps(spacing, n, d)
    uniform = not np.ndim(steps) or bool((steps == steps[0]).all())
    if uniform and np.ndim(steps):
        steps = steps[0]
    if uniform:
        ahead, behind = _along(d, slice(2, None), slice(None, -2))
        inside = (f[ahead] - f[behind]) / (2.0 * steps)
    else:
        shape = (-1,) + (1,) * (f.ndim - 1 - d)
        h, g = steps[:-1].reshape(shape), steps[1:].reshape(shape)
        ahead, here, behind = _along(d, slice(2, None), slice(1, -1), slice(None, -2))
        inside = -g / (h * (h + g)) * f[behind] + (g - h) / (h * g) * f[here] + h / (g * (h + g)) * f[ahead]
    first, last = (steps, steps) if uniform else (steps[0], steps[-1])
    rows = [f[key] for key in _along(d, *(slice(i, i + 1) for i in range(order + 1)))]
    ends = [f[key] for key in _along(d, *(slice(n - 1 - i, n - i) for i in range(order + 1)))]
    if order == 1:
        edges = [(rows[1] - rows[0]) / first, (ends[0] - ends[1]) / last]
    else:
        second, before = (steps, steps) if uniform else (steps[1], steps[-2])
        edges = [_three_points(rows, first, second, uniform), -_three_points(ends, last, before, uniform)]
    return _np.concatenate([edges[0], inside, edges[1]], axis=d)  # type: ignore[no-any-return]


def _steps(spacing: Any, n: int, d: int) -> Any:
    if not np.ndim(spacing):
        return spacing
    if isinstance(spacing, DTensor):
        raise TypeError("np.gradient: the places of the elements are a DTensor, but must be known; pass np.asarray(places)")
    places = np.asarray(spacing)
    if places.ndim != 1 or len(places) != n:
        raise ValueError(f"np.gradient: places of shape {places.shape} for dim {d} of size {n}; give a number, or 1-d, one each")
    return np.diff(places.astype(np.float64) if places.dtype.kind in "iu" else places)


def _three_points(rows: Sequence[Any], h: Any, g: Any, uniform: bool) -> Any:
    """The derivative at the first of three rows, `h` and `g` apart."""
    if uniform:
        return -1.5 / h * rows[0] + 2.0 / h * rows[1] - 0.5 / h * rows[2]
    return -(2.0 * h + g) / (h * (h + g)) * rows[0] + (h + g) / (h * g) * rows[1] - h / (g * (h + g)) * rows[2]
