"""Joining arrays that are followed: autograd's own functions for it ask their results for a view of the plain type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from autograd.extend import defvjp_argnum

from daskmesh.routes import composes, primitive

__all__ = ["concatenate"]


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
