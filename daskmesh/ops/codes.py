"""Elements as other elements: bits in bytes, places as numbers, dates; and the tables of indices that follow from a shape."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from daskmesh.dtensor import DTensor, implements
from daskmesh.graph import Local
from daskmesh.moves import moved
from daskmesh.ops.gathers import recut
from daskmesh.ops.kinds import aligned, dtype_of, operand, prepare, record
from daskmesh.rules import elementwise

__all__: list[str] = []

Array = Any
_np: Any = np  # typed for arrays of its own, not for those that speak its protocols


def _given(x: Any) -> Any:
    return x if isinstance(x, DTensor) else np.asarray(x)


# -- bits -------------------------------------------------------------------------------------------------------------


@implements(np.packbits)
def packbits(a: DTensor, /, axis: int | None = None, bitorder: Any = "big") -> DTensor:
    """Eight elements to a byte.

    **Communication**: where a cut dim is packed, what makes its parts whole bytes: fewer than 8 elements at each border.
    """
    if a.dtype.kind not in "biu":
        raise TypeError("Expected an input array of integer or boolean data type")
    a, axis = (_np.ravel(a), 0) if axis is None else (_np.atleast_1d(a), axis)
    d = normalize_axis_index(axis, a.ndim)
    x = aligned(a)
    rows = _whole_bytes(x.layout.chunks[d])
    node = moved(x._node, recut(x.layout, {d: rows}), "packbits: parts of whole bytes")
    target = recut(x.layout, {d: tuple(-(-k // 8) for k in rows)}).replace(dtype=np.dtype(np.uint8))
    return DTensor(Local(target, node.world, np.packbits, (node,), {"axis": d, "bitorder": bitorder}))


def _whole_bytes(chunks: Sequence[int]) -> tuple[int, ...]:
    """The same parts with their borders moved to the next multiples of 8."""
    ends = [0, *(min(sum(chunks), -(-end // 8) * 8) for end in itertools.accumulate(chunks))]
    return tuple(b - a for a, b in itertools.pairwise(ends))


@implements(np.unpackbits)
def unpackbits(a: DTensor, /, axis: int | None = None, count: Any = None, bitorder: Any = "big") -> DTensor:
    """Eight elements from each byte; cut where the bytes are cut.

    **Communication**: none, unless `axis` is None and the array has several dims.
    """
    if a.dtype != np.uint8:
        raise TypeError("Expected an input array of unsigned byte data type")
    a, axis = (_np.ravel(a), 0) if axis is None else (_np.atleast_1d(a), axis)
    d = normalize_axis_index(axis, a.ndim)
    x = aligned(a)
    target = recut(x.layout, {d: tuple(8 * k for k in x.layout.chunks[d])})
    y = DTensor(Local(target, x._node.world, np.unpackbits, (x._node,), {"axis": d, "bitorder": bitorder}))
    if count is None:
        return y
    n = y.shape[d]
    wanted = int(count) if count >= 0 else n + int(count)
    if wanted < 0:
        raise ValueError(f"-count larger than number of elements: np.unpackbits(count={count}) of {n} bits")
    if wanted <= n:
        return y[(*(slice(None),) * d, slice(0, wanted))]
    return _np.pad(y, [(0, wanted - n) if i == d else (0, 0) for i in range(y.ndim)])  # type: ignore[no-any-return]


# -- places as numbers ------------------------------------------------------------------------------------------------


@implements(np.ravel_multi_index)
def ravel_multi_index(multi_index: Any, dims: Any, mode: Any = "raise", order: Any = "C") -> DTensor:
    """Numbers of places, cut as the indices are; whether they lie inside is told when the result is computed."""
    if isinstance(multi_index, DTensor):
        multi_index = [multi_index[i] for i in np.arange(multi_index.shape[0])]
    arrays = [_given(x) for x in multi_index]
    how = {"dims": tuple(np.atleast_1d(dims).tolist()), "mode": mode, "order": order}
    if len(arrays) != len(how["dims"]):
        raise ValueError(f"parameter multi_index must be a sequence of length {len(how['dims'])}")
    return record(_numbered, elementwise(tuple(x.shape for x in arrays)), arrays, np.dtype(np.intp), how)


def _numbered(*index: Array, **how: Any) -> Array:
    return np.ravel_multi_index(index, **how)


@implements(np.unravel_index)
def unravel_index(indices: DTensor, shape: Any, order: Any = "C") -> tuple[DTensor, ...]:
    """The places of numbers, one array per dim; cut as the numbers are."""
    if indices.dtype.kind not in "iu":
        raise TypeError("only int indices permitted")
    sizes = tuple(np.atleast_1d(shape).tolist())
    ready = prepare(elementwise((indices.shape,)), (indices,), np.dtype(np.intp))
    return ready.several(np.unravel_index, [ready.decision.output] * len(sizes), {"shape": sizes, "order": order})


@implements(np.ix_)
def ix_(*args: Any) -> tuple[Any, ...]:
    """Index arrays that span a grid; masks become the places where they hold, at once."""
    out = []
    for i, x in enumerate(map(_given, args)):
        if x.ndim != 1:
            raise ValueError("Cross index must be 1 dimensional")
        line = _np.nonzero(x)[0] if x.dtype == np.bool_ else x
        out.append(_np.reshape(line, tuple(-1 if i == j else 1 for j, _ in enumerate(args))))
    return tuple(out)


@implements(np.diag_indices_from)
def diag_indices_from(arr: DTensor) -> tuple[Array, ...]:
    if arr.ndim < 2:
        raise ValueError("input array must be at least 2-d")
    if len(set(arr.shape)) > 1:
        raise ValueError("All dimensions of input must be of equal length")
    return np.diag_indices(arr.shape[0], arr.ndim)


@implements(np.tril_indices_from)
def tril_indices_from(arr: DTensor, k: int = 0) -> tuple[Array, ...]:
    return _of_square(np.tril_indices, arr, k)


@implements(np.triu_indices_from)
def triu_indices_from(arr: DTensor, k: int = 0) -> tuple[Array, ...]:
    return _of_square(np.triu_indices, arr, k)


def _of_square(func: Callable[..., Any], arr: DTensor, k: int) -> tuple[Array, ...]:
    if arr.ndim != 2:
        raise ValueError("input array must be 2-d")
    found: tuple[Array, ...] = func(arr.shape[0], k=k, m=arr.shape[1])
    return found


# -- dates ------------------------------------------------------------------------------------------------------------


def _dates(func: Callable[..., Array], arrays: int) -> None:
    def apply(*args: Any, **kwargs: Any) -> DTensor:
        if kwargs.pop("out", None) is not None:
            raise TypeError(f"np.{func.__name__}(out=...): a DTensor is no buffer; write y = np.{func.__name__}(...)")
        operands = [_given(x) for x in args[:arrays]]
        how = {"func": func, "rest": args[arrays:], "more": kwargs}
        shapes = tuple(operand(x).shape for x in operands)
        return record(_dated, elementwise(shapes), operands, dtype_of(_on_a_day, *operands, func=func, **kwargs), how)

    implements(func)(apply)


def _on_a_day(*samples: Array, func: Callable[..., Array], **more: Any) -> Array:
    """The function at the first days, of which one is a business day, so that none is refused."""
    return func(*(np.full_like(x, "1970-01-01") if x.dtype.kind == "M" else x for x in samples), **more)


def _dated(*locals_: Array, func: Callable[..., Array], rest: tuple[Any, ...], more: dict[str, Any]) -> Array:
    return func(*locals_, *rest, **more)


_dates(np.is_busday, 1)
_dates(np.busday_count, 2)
_dates(np.busday_offset, 2)
