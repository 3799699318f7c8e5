"""Indexing: ``x[key]`` with all of NumPy's keys, and the functions that pick elements by index."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from daskmesh.algebra import Flow, carried
from daskmesh.dtensor import DTensor, implements
from daskmesh.ops.gathers import dropped, rearranged, refuse_plain
from daskmesh.ops.keys import Key, mask_alone, parse, settled, sliced
from daskmesh.ops.kinds import dtype_of, operand, record
from daskmesh.ops.masks import masked
from daskmesh.ops.picks import picked, picked_from_parts
from daskmesh.rules import Signature, elementwise

__all__: list[str] = []

Array = Any
_np: Any = np


@implements(operator.getitem)
def getitem(x: DTensor, key: Any) -> DTensor:
    """``x[key]``: ints, slices, Ellipsis, np.newaxis, integer arrays, masks, and mixtures, with NumPy's rules.

    **Communication**: none for slices with positive steps: each rank slices its part, the parts may be uneven or empty. An
    integer on a cut dim: what one rank holds is shared out. Integer arrays: each element goes once to each rank that wants it;
    indices that are a DTensor are looked at when they are used: every rank picks what it holds, and what comes out is summed; or
    the dims they pick from are gathered, whichever moves less. A mask that is a DTensor: each rank picks its own, at once, for
    the size of the result has to be known; only counts travel.

    Raises
    ------
    IndexError
        Out of bounds, before anything runs (for indices that are a DTensor, when computed); too many indices; a mask of another
        shape.
    """
    mask = mask_alone(x, key)
    if mask is not None:
        return masked(x, mask)
    if x.ndim == 0 or (isinstance(key, (bool, np.bool_)) or getattr(key, "dtype", None) == np.bool_):
        zero_d = _with_scalar_mask(x, key)
        if zero_d is not None:
            return zero_d
    k = parse(x, key)
    y = sliced(x, k.steps, k.ints)
    if k.ints:
        y = dropped(y, tuple(k.ints), "an integer index")
    elif k.arrays:
        y = _picked(y, k)
    order: list[int | None] = []
    at = 0
    for o in k.order:
        if o is None:
            order.append(None)
            continue
        width = len(k.picked_shape) if o == "picked" else 1
        order.extend(range(at, at + width))
        at += width
    return rearranged(y, tuple(order))


def _with_scalar_mask(x: DTensor, key: Any) -> DTensor | None:
    """``x[True]`` and ``x[False]``: a new first dim of size 1 or 0."""
    scalar = key[0] if isinstance(key, tuple) and len(key) == 1 else key
    if isinstance(scalar, (bool, np.bool_)) or (isinstance(scalar, np.ndarray) and scalar.ndim == 0 and scalar.dtype == np.bool_):
        return getitem(rearranged(x, (None, *range(x.ndim))), slice(0, 1 if scalar else 0))
    return None


def _picked(y: DTensor, k: Key) -> DTensor:
    dims, index = list(k.arrays), list(k.arrays.values())
    if any(isinstance(i, DTensor) for i in index):
        return picked_from_parts(y, dims, index, k.place)
    return picked(y, dims, index, k.place, "elements picked by integer arrays")


# -- functions --------------------------------------------------------------------------------------------------------


def _bounded(indices: Any, n: int, d: int, mode: str) -> Any:
    """Indices as `mode` has them: "raise", "wrap" or "clip"."""
    index = indices if isinstance(indices, DTensor) else np.asarray(indices)
    if index.dtype.kind not in "iu" and not (index.size == 0 and not isinstance(indices, DTensor)):
        raise TypeError(f"np.take: the indices are {index.dtype}; they must be integers")
    if not n and index.size:
        raise IndexError(f"cannot take from dim {d}, which is empty")
    if mode == "wrap":
        return index % n
    if mode == "clip":
        return _np.clip(index, 0, n - 1)
    if mode != "raise":
        raise ValueError(f"np.take: mode must be one of 'raise', 'wrap', 'clip', got {mode!r}")
    return index if isinstance(index, DTensor) else settled(index, n, d)


@implements(np.take)
def take(a: DTensor, indices: Any, axis: int | None = None, out: None = None, mode: str = "raise") -> DTensor:
    """Elements along a dim, by an array of indices; see `getitem`."""
    if out is not None:
        raise TypeError("np.take(out=...): a DTensor is no buffer; write y = np.take(...)")
    x = _np.ravel(a) if axis is None else a
    d = normalize_axis_index(0 if axis is None else axis, x.ndim)
    index = _bounded(indices, x.shape[d], d, mode)
    if isinstance(index, DTensor):
        return picked_from_parts(x, [d], [index], d)
    if index.ndim == 0:
        return getitem(x, (*(slice(None),) * d, int(index)))
    return picked(x, [d], [index], d, "take")


@implements(np.take_along_axis)
def take_along_axis(arr: Any, indices: Any, axis: int | None = -1) -> DTensor:
    """Elements along a dim, by an array of indices for each place across it.

    **Communication**: the dim is gathered if it is cut in `arr`; the indices may be cut in any way.
    """
    if axis is None:
        arr, axis = _np.ravel(arr), 0
    arr = arr if isinstance(arr, DTensor) else np.asarray(arr)
    indices = indices if isinstance(indices, DTensor) else np.asarray(indices)
    if indices.dtype.kind not in "iu":
        raise IndexError("`indices` must be an integer array")
    if arr.ndim != indices.ndim:
        raise ValueError("`indices` and `arr` must have the same number of dimensions")
    d = normalize_axis_index(axis, arr.ndim)
    shapes = [tuple(1 if i == d else n for i, n in enumerate(x.shape)) for x in (arr, indices)]
    across = elementwise(tuple(shapes))
    own, given = (list(labels) for labels in across.operands)
    own[d], given[d] = "along", "index"
    output = tuple("index" if i == d else k for i, k in enumerate(across.output))
    flows = tuple(Flow((*f.inputs, None), f.output, f.rule) for f in carried(1))
    signature = Signature((tuple(own), tuple(given)), output, None, flows, frozenset({"along"}))
    return record(np.take_along_axis, signature, (arr, indices), arr.dtype, {"axis": d})


@implements(np.choose)
def choose(a: Any, choices: Any, out: None = None, mode: str = "raise") -> DTensor:
    if out is not None:
        raise TypeError("np.choose(out=...): a DTensor is no buffer; write y = np.choose(...)")
    if isinstance(choices, DTensor):
        choices = list(choices)
    given = [x if isinstance(x, DTensor) else np.asarray(x) for x in (a, *choices)]
    if given[0].dtype.kind not in "biu":
        raise TypeError(f"np.choose: the selector is {given[0].dtype}; it must be an integer array")
    dtype = dtype_of(_maximum, *(x for x in given[1:])) if len(given) == 2 else np.result_type(*(x.dtype for x in given[1:]))
    signature = elementwise(tuple(operand(x).shape for x in given))
    return record(_choose, signature, given, dtype, {"mode": mode})


def _maximum(x: Array) -> Array:
    return x


def _choose(a: Array, *choices: Array, mode: Any) -> Array:
    return np.choose(a, choices, mode=mode)


@implements(np.extract)
def extract(condition: Any, arr: Any) -> DTensor:
    mask = condition if isinstance(condition, DTensor) else np.asarray(condition)
    return _np.ravel(arr)[_np.ravel(mask.astype(bool))]  # type: ignore[no-any-return]


@implements(np.compress)
def compress(condition: Any, a: Any, axis: int | None = None, out: None = None) -> DTensor:
    """Slices along a dim where a condition holds, which travels to the client if it is a DTensor.

    **Communication**: none else; each rank keeps its own.
    """
    if out is not None:
        raise TypeError("np.compress(out=...): a DTensor is no buffer; write y = np.compress(...)")
    where = np.flatnonzero(np.asarray(condition))
    if np.ndim(condition) != 1:
        raise ValueError("condition must be a 1-d array")
    return _np.take(a, where, axis=axis)  # type: ignore[no-any-return]


@implements(np.delete)
def delete(arr: DTensor, obj: Any, axis: int | None = None) -> DTensor:
    """Without some slices along a dim; each rank keeps its own.

    **Communication**: none.
    """
    refuse_plain(arr, "delete")
    if isinstance(obj, DTensor):
        raise TypeError("np.delete(obj): which slices go decides the shape; gather the indices, np.asarray(obj)")
    x = _np.ravel(arr) if axis is None else arr
    d = normalize_axis_index(0 if axis is None else axis, x.ndim)
    kept = np.delete(np.arange(x.shape[d]), obj)
    return take(x, kept, d)


@implements(np.insert)
def insert(arr: DTensor, obj: Any, values: Any, axis: int | None = None) -> DTensor:
    """With slices put in along a dim.

    **Communication**: that of joining `arr` and `values` and of picking from it.
    """
    refuse_plain(arr, "insert")
    if isinstance(obj, DTensor):
        raise TypeError("np.insert(obj): where slices come in must be known; gather the indices, np.asarray(obj)")
    x = _np.ravel(arr) if axis is None else arr
    d = normalize_axis_index(0 if axis is None else axis, x.ndim)
    n = x.shape[d]
    values = values if isinstance(values, DTensor) else np.asarray(values)
    where = np.asarray(range(*obj.indices(n)) if isinstance(obj, slice) else obj)
    scalar = where.ndim == 0
    if scalar and values.ndim:  # as NumPy: the first dim of the values goes along the axis
        values = _np.moveaxis(_np.reshape(values, (1,) * (x.ndim - values.ndim) + values.shape), 0, d)
    rows = values.shape[d - x.ndim] if values.ndim >= x.ndim - d else 1
    count = rows if scalar else max(1, np.count_nonzero(where) if where.dtype == np.bool_ else where.size)
    if not scalar and not (np.count_nonzero(where) if where.dtype == np.bool_ else where.size):
        return DTensor(x._node)
    shape = (*x.shape[:d], count, *x.shape[d + 1 :])
    added = _np.broadcast_to(values.astype(x.dtype), shape)
    at = np.repeat(where, count) if scalar else where
    order = np.insert(np.arange(n), at, n + np.arange(count))
    return take(_np.concatenate([x, added], axis=d), order, d)
