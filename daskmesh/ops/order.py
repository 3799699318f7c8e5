"""Partitions, orders by several keys, and sets.

Sets are made of their distinct values, which every rank merges (see `daskmesh.ops.sets`); their sizes depend on the values, so
these functions compute when they are called.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from daskmesh.conversion import shard_tensor
from daskmesh.dtensor import DTensor, implements
from daskmesh.ops.kinds import aligned, record
from daskmesh.rules import Signature, elementwise

__all__: list[str] = []

Array = Any
_np: Any = np  # typed for arrays of its own, not for those that speak its protocols


def _given(x: Any) -> Any:
    return x if isinstance(x, DTensor) else np.asarray(x)


# -- order ------------------------------------------------------------------------------------------------------------


def _split(a: Any, kth: Any, axis: int | None, order: Any, func: Any, dtype: Any) -> DTensor:
    if order is not None:
        raise TypeError(f"np.{func.__name__}(order=...): DTensors have no fields to sort by")
    x, axis = (_np.ravel(a), 0) if axis is None else (a, axis)
    d = normalize_axis_index(axis, x.ndim)
    places = np.asarray(kth)
    if places.dtype.kind not in "iu":
        raise TypeError("Partition index must be integer")
    if np.any((places < -x.shape[d]) | (places >= x.shape[d])):
        raise ValueError(f"kth(={kth}) out of bounds ({x.shape[d]})")
    return record(func, elementwise((x.shape,)), (aligned(x, (d,)),), dtype, {"kth": kth, "axis": d})


@implements(np.partition)
def partition(a: DTensor, kth: Any, axis: int | None = -1, kind: str = "introselect", order: Any = None) -> DTensor:
    """Smaller elements before the `kth`, greater ones after it.

    **Communication**: all-to-all if `axis` is cut and other dims can be cut instead, else all-gather.
    """
    return _split(a, kth, axis, order, np.partition, a.dtype)


@implements(np.argpartition)
def argpartition(a: DTensor, kth: Any, axis: int | None = -1, kind: str = "introselect", order: Any = None) -> DTensor:
    """The indices that would partition; see `partition`."""
    return _split(a, kth, axis, order, np.argpartition, np.dtype(np.intp))


@implements(np.lexsort)
def lexsort(keys: Any, axis: int = -1) -> DTensor:
    """The indices that sort by several keys, the last one first.

    **Communication**: as `np.argsort`, for each key.
    """
    arrays = [keys[i] for i in np.arange(keys.shape[0])] if isinstance(keys, DTensor) else [_given(k) for k in keys]
    if not arrays:
        raise TypeError("need sequence of keys with len > 0 in lexsort")
    shape = arrays[0].shape
    if any(k.shape != shape for k in arrays):
        raise ValueError("all keys need to be the same shape")
    if not shape:
        return _np.zeros_like(arrays[-1], dtype=np.intp)  # type: ignore[no-any-return]
    d = normalize_axis_index(axis, len(shape))
    labels = tuple(range(len(shape)))
    signature = Signature((labels,) * len(arrays), labels, whole=frozenset({d}))
    return record(_lexsorted, signature, arrays, np.dtype(np.intp), {"axis": d})


def _lexsorted(*keys: Array, axis: int) -> Array:
    return np.lexsort(keys, axis=axis)


@implements(np.sort_complex)
def sort_complex(a: DTensor) -> DTensor:
    """Sorted along the last dim, as complex numbers."""
    real: Any = np.complex64 if a.dtype.char in "bhBH" else np.clongdouble if a.dtype.char == "g" else np.complex128
    dtype = a.dtype if a.dtype.kind == "c" else real
    return _np.astype(_np.sort(a), dtype)  # type: ignore[no-any-return]


@implements(np.trim_zeros)
def trim_zeros(filt: DTensor, trim: str = "fb", axis: Any = None) -> DTensor:
    """Without the zeros at the ends. Runs at once, to learn how many there are; the rest stays where it is.

    **Communication**: of each part the places of its first and last element that is not zero; the rest stays.
    """
    if not trim or set(trim.lower()) - set("fb"):
        raise ValueError(f"unexpected character(s) in `trim`: {trim!r}")
    dims = range(filt.ndim) if axis is None else {normalize_axis_index(d, filt.ndim) for d in np.atleast_1d(axis).tolist()}
    key = [slice(None)] * filt.ndim
    for d in dims:
        kept = _np.any(filt != 0, axis=tuple(i for i in range(filt.ndim) if i != d))
        n = kept.shape[0]
        first, last = (int(_np.argmax(k)) if n else 0 for k in (kept, kept[::-1]))
        if n and not first and not bool(kept[0]):
            key[d] = slice(0, 0)
            continue
        key[d] = slice(first if "f" in trim.lower() else 0, n - last if "b" in trim.lower() else n)
    return filt[tuple(key)]


# -- sets -------------------------------------------------------------------------------------------------------------


def _both(a: Any, b: Any) -> tuple[DTensor, DTensor]:
    """Two arrays of which at least one is a DTensor; a plain one as copies on the mesh of the other."""
    mesh = (a if isinstance(a, DTensor) else b).process_mesh
    placed = [x if isinstance(x, DTensor) else shard_tensor(x, mesh, ()) for x in (a, b)]
    return placed[0], placed[1]


@implements(np.union1d)
def union1d(ar1: Any, ar2: Any) -> DTensor:
    """The distinct values of both."""
    return _np.unique(_np.concatenate((_given(ar1), _given(ar2)), axis=None))  # type: ignore[no-any-return]


@implements(np.intersect1d)
def intersect1d(ar1: Any, ar2: Any, assume_unique: bool = False, return_indices: bool = False) -> Any:
    """The distinct values that both have, and where each has them first."""
    given = _both(ar1, ar2)
    dtype = np.result_type(*(x.dtype for x in given))
    (a, place), (b, other) = (_distinct(_np.astype(x, dtype), assume_unique) for x in given)
    mine, theirs = _np.isin(a, b), _np.isin(b, a)
    common = a[mine]
    if not return_indices:
        return common
    return common, place[mine], other[theirs]


def _distinct(x: Any, already: bool) -> tuple[Any, Any]:
    """Distinct values in order, and their first places."""
    x = _np.ravel(x)
    if not already:
        return _np.unique(x, return_index=True)  # type: ignore[no-any-return]
    place = _np.argsort(x, stable=True)
    return _np.take(x, place), place


@implements(np.setdiff1d)
def setdiff1d(ar1: Any, ar2: Any, assume_unique: bool = False) -> Any:
    """The distinct values of the first that the second has not."""
    a, b = _both(ar1, ar2)
    a, b = (_np.ravel(a), b) if assume_unique else (_np.unique(a), _np.unique(b))
    return a[_np.isin(a, b, invert=True)]


@implements(np.setxor1d)
def setxor1d(ar1: Any, ar2: Any, assume_unique: bool = False) -> DTensor:
    """The values that one has and the other has not."""
    a, b = setdiff1d(ar1, ar2, assume_unique), setdiff1d(ar2, ar1, assume_unique)
    return _np.sort(_np.concatenate((a, b)))  # type: ignore[no-any-return]
