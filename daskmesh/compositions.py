"""Functions that autograd has no rule for, or one that asks for more than it needs, written with others that have one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.extend import defvjp_argnum
from autograd.tracer import getval, isbox

from daskmesh.routes import composes, primitive, reduces, refuse

__all__ = ["concatenate"]

# -- joining: autograd's own functions ask their results for a view of the plain type ------------------------------------


@primitive
def concatenate(axis: int, *arrays: Any) -> Any:
    """``np.concatenate(arrays, axis)``."""
    return np.concatenate(arrays, axis)


def _part_of(argnum: int, ans: Any, args: tuple[Any, ...], kwargs: Any) -> Callable[[Any], Any]:
    axis, arrays = args[0], args[1:]
    sizes = [np.shape(a)[axis] for a in arrays[:argnum]]
    key = [slice(None)] * ans.ndim
    key[axis] = slice(sum(sizes[:-1]), sum(sizes))
    return lambda g: g[tuple(key)]


defvjp_argnum(concatenate, _part_of)


@composes(np.concatenate)
def _concatenate(arrays: Sequence[Any], axis: int | None = 0) -> Any:
    if axis is None:
        return concatenate(0, *map(np.ravel, arrays))
    return concatenate(axis % np.ndim(arrays[0]), *arrays)


@composes(np.stack)
def _stack(arrays: Sequence[Any], axis: int = 0) -> Any:
    axis %= np.ndim(arrays[0]) + 1
    return concatenate(axis, *(np.expand_dims(a, axis) for a in arrays))


@composes(np.vstack)
def _vstack(tup: Sequence[Any]) -> Any:
    return concatenate(0, *map(np.atleast_2d, tup))


@composes(np.hstack)
def _hstack(tup: Sequence[Any]) -> Any:
    arrays = [np.atleast_1d(a) for a in tup]
    return concatenate(0 if np.ndim(arrays[0]) == 1 else 1, *arrays)


@composes(np.dstack)
def _dstack(tup: Sequence[Any]) -> Any:
    return concatenate(2, *map(np.atleast_3d, tup))


@composes(np.column_stack)
def _column_stack(tup: Sequence[Any]) -> Any:
    return concatenate(1, *(np.expand_dims(a, 1) if np.ndim(a) == 1 else a for a in tup))


@composes(np.append)
def _append(arr: Any, values: Any, axis: int | None = None) -> Any:
    return _concatenate((arr, values), axis)


# -- the others ---------------------------------------------------------------------------------------------------------



@composes(np.where)
def _where(condition: Any, *values: Any) -> Any:
    if len(values) != 2:
        return anp.where(condition, *values)
    # autograd's rule wants both to have the result's shape.
    shape = np.broadcast_shapes(np.shape(condition), *map(np.shape, values))
    full = [v + np.zeros(shape, v.dtype) if isbox(v) and v.shape != shape else v for v in values]
    return anp.where(condition, *full)


@composes(np.clip)
def _clip(a: Any, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None) -> Any:
    low = a_min if min is None else min
    high = a_max if max is None else max
    if isbox(low) or isbox(high):
        return np.minimum(np.maximum(a, low), high)
    low, high = (-np.inf if low is None else low), (np.inf if high is None else high)
    return np.where(np.logical_and(a >= low, a <= high), a, np.clip(getval(a), low, high))


@composes(np.take)
def _take(a: Any, indices: Any, axis: int | None = None, **unknown: Any) -> Any:
    if unknown:
        refuse(f"np.take({', '.join(unknown)}=...)")
    indices = np.asarray(indices) if isinstance(indices, (list, tuple)) else indices
    if axis is None:
        return np.ravel(a)[indices]
    return a[(*(slice(None),) * (axis % np.ndim(a)), indices)]


@composes(np.flip)
def _flip(m: Any, axis: Any = None) -> Any:
    axes = range(np.ndim(m)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    backwards = {d % np.ndim(m) for d in axes}
    return m[tuple(slice(None, None, -1) if d in backwards else slice(None) for d in range(np.ndim(m)))]


@composes(np.ptp)
def _ptp(a: Any, axis: Any = None, out: Any = None, keepdims: bool = False) -> Any:
    return np.max(a, axis=axis, keepdims=keepdims) - np.min(a, axis=axis, keepdims=keepdims)


@composes(np.average)
def _average(a: Any, axis: Any = None, weights: Any = None) -> Any:
    if weights is None:
        return np.mean(a, axis=axis)
    if np.shape(weights) != np.shape(a):
        weights = np.expand_dims(weights, tuple(d for d in range(np.ndim(a)) if d != axis % np.ndim(a)))
    return np.sum(a * weights, axis=axis) / np.sum(weights * np.ones(np.shape(a)), axis=axis)


@composes(np.broadcast_to)
def _broadcast_to(array: Any, shape: Any) -> Any:
    shape = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    lead = len(shape) - np.ndim(array)
    return anp.broadcast_to(anp.reshape(array, (1,) * lead + np.shape(array)) if lead else array, shape)


@composes(np.vdot)
def _vdot(a: Any, b: Any) -> Any:
    return np.sum(np.ravel(np.conj(a)) * np.ravel(b))


@composes(np.vecdot)
def _vecdot(a: Any, b: Any) -> Any:
    return np.sum(np.conj(a) * b, axis=-1)


@composes(np.positive)
def _same(x: Any) -> Any:
    return x


@composes(np.copy)
def _copied(a: Any) -> Any:
    return a


@composes(np.cbrt)
def _cbrt(x: Any) -> Any:
    return np.sign(x) * np.abs(x) ** (1 / 3)


@composes(np.float_power)
def _float_power(x: Any, y: Any) -> Any:
    return np.power(x, y)


@composes(np.nansum)
def _nansum(a: Any, axis: Any = None, keepdims: bool = False) -> Any:
    return np.sum(np.where(np.isnan(a), 0.0, a), axis=axis, keepdims=keepdims)


@composes(np.nanmean)
def _nanmean(a: Any, axis: Any = None, keepdims: bool = False) -> Any:
    count = np.sum(np.logical_not(np.isnan(a)), axis=axis, keepdims=keepdims)
    return _nansum(a, axis, keepdims) / count


@composes(np.matrix_transpose)
def _matrix_transpose(x: Any) -> Any:
    return np.swapaxes(x, -1, -2)


@composes(np.take_along_axis)
def _take_along_axis(arr: Any, indices: Any, axis: int = -1) -> Any:
    grid: list[Any] = list(np.ogrid[tuple(map(slice, np.shape(indices)))])
    grid[axis] = indices
    return arr[tuple(grid)]


@composes(np.diagonal)
def _diagonal(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
    a = np.moveaxis(a, (axis1, axis2), (-2, -1))
    first, second = max(-offset, 0), max(offset, 0)
    at = np.arange(max(min(a.shape[-2] - first, a.shape[-1] - second), 0))
    return a[..., at + first, at + second]


@composes(np.linalg.multi_dot)
def _multi_dot(arrays: Any) -> Any:
    return list(itertools.accumulate(arrays, np.dot))[-1]


@composes(np.sum)
def _sum(a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False, initial: Any = 0,
         where: Any = True) -> Any:  # fmt: skip
    if out is not None:
        refuse("np.sum(out=...)")
    a = a if where is True or where is np._NoValue else np.where(where, a, np.zeros((), np.result_type(a)))
    a = a if dtype is None else a.astype(dtype)
    total = anp.sum(a, axis=axis, keepdims=keepdims is True)
    return total if initial is np._NoValue or (isinstance(initial, int) and initial == 0) else total + initial


@composes(np.pad)
def _pad(array: Any, pad_width: Any, mode: str = "constant", **options: Any) -> Any:
    if mode != "constant" or isinstance(pad_width, dict):
        refuse(f"np.pad(mode={mode!r}) by widths {pad_width!r}")
    return anp.pad(array, pad_width, "constant", **options)


@composes(np.sort)
def _sort(a: Any, axis: int | None = -1, **options: Any) -> Any:
    if axis is None or np.ndim(a) == 1:
        return anp.sort(np.ravel(a))
    return np.take_along_axis(a, np.argsort(getval(a), axis=axis), axis)


def log_sum_exp(x: Any, axis: Any = 0, keepdims: bool = False) -> Any:
    """``np.logaddexp.reduce``."""
    top = np.max(getval(x), axis=axis, keepdims=True)
    found = np.log(np.sum(np.exp(x - top), axis=axis, keepdims=keepdims))
    return found + (top if keepdims else np.squeeze(top, axis) if axis is not None else np.max(top))


reduces(np.logaddexp, log_sum_exp)
