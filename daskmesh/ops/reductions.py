"""Reductions that fold: sum, prod, max, min, any, all, mean, count_nonzero, and `reduce` of the ufuncs.

Where a reduced dim is cut, every rank reduces its part and the result is Partial; nothing moves until it is read. A mean is a sum
of parts that are divided by the global count, so uneven parts weigh what they hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from daskmesh.algebra import linear
from daskmesh.dtensor import UFUNC_METHODS, DTensor, implements
from daskmesh.ops.kinds import aligned, astype, dtype_of, operand, prepare, record
from daskmesh.ops.parts import (
    REGROUPING,
    UNSET,
    Summary,
    accumulator,
    axes_of,
    by_parts,
    cut_dims,
    given_options,
    masked,
    mean_of_sums,
    no_out,
    reduced_whole,
    reduction_signature,
    with_mask,
)
from daskmesh.placement import reduction
from daskmesh.rules import elementwise

__all__: list[str] = []

Array = Any
Dtype = np.dtype[Any]


def _folded(
    func: Callable[..., Array],
    op: str,
    a: Any,
    axis: Any,
    options: dict[str, Any],
    *,
    keepdims: Any = False,
    where: Any = True,
    linear_in_a: bool = True,
) -> DTensor:
    """Record a reduction whose parts fold by `op`; `options` are NumPy's, without the defaults."""
    facts = operand(a)
    axes = axes_of(axis, len(facts.shape))
    keepdims = keepdims is not UNSET and bool(keepdims)
    operands, mask = ((a,), None) if where is True or where is UNSET else with_mask(a, where)
    if mask is None:
        dtype = dtype_of(func, a, **options)
    else:
        dtype = dtype_of(masked, *operands, func=func, **options)
        func, options = masked, {"func": func, **options}
    empty = any(facts.shape[d] == 0 for d in axes)
    signature = reduction_signature(
        facts.shape, axes, None if empty and "initial" in options else op, keepdims, None if linear_in_a else (), mask
    )
    ready = prepare(signature, operands, dtype)
    if ready.decision.may_be_empty and "initial" not in options:
        options = {**options, "initial": reduction(op).neutral(dtype)}
    return ready.local(func, {"axis": axes, "keepdims": keepdims, **options})


def _sum_like(func: Callable[..., Array], op: str, ufunc: np.ufunc, linear_in_a: bool) -> Callable[..., DTensor]:
    name = func.__name__

    def reduce(
        a: Any,
        axis: Any = None,
        dtype: Any = None,
        out: Any = None,
        keepdims: Any = False,
        initial: Any = UNSET,
        where: Any = True,
    ) -> DTensor:
        no_out(out, name)
        given = given_options(dtype=dtype)
        result = _folded(func, op, a, axis, given, keepdims=keepdims, where=where, linear_in_a=linear_in_a)
        if initial is UNSET or initial is None:
            return result
        return ufunc(result, np.asarray(initial).astype(result.dtype)[()])  # type: ignore[no-any-return]

    return reduce


for _func, _op, _ufunc, _linear in (
    (np.sum, "sum", np.add, True),
    (np.prod, "prod", np.multiply, True),
    (np.nansum, "sum", np.add, False),
    (np.nanprod, "prod", np.multiply, False),
):
    implements(_func)(_sum_like(_func, _op, _ufunc, _linear))


def _max_like(func: Callable[..., Array], op: str) -> Callable[..., DTensor]:
    name = func.__name__

    def reduce(
        a: Any, axis: Any = None, out: Any = None, keepdims: Any = False, initial: Any = UNSET, where: Any = True
    ) -> DTensor:
        no_out(out, name)
        # An initial value may meet every part: max and min take it any number of times.
        return _folded(func, op, a, axis, given_options(initial=initial), keepdims=keepdims, where=where)

    return reduce


implements(np.max, np.amax)(_max_like(np.max, "max"))
implements(np.min, np.amin)(_max_like(np.min, "min"))


def _truth_like(func: Callable[..., Array], op: str) -> Callable[..., DTensor]:
    name = func.__name__

    def reduce(a: Any, axis: Any = None, out: Any = None, keepdims: Any = False, *, where: Any = True) -> DTensor:
        no_out(out, name)
        return _folded(func, op, a, axis, {}, keepdims=keepdims, where=where)

    return reduce


implements(np.any)(_truth_like(np.any, "any"))
implements(np.all)(_truth_like(np.all, "all"))


@implements(np.count_nonzero)
def count_nonzero(a: Any, axis: Any = None, *, keepdims: bool = False) -> DTensor:
    signature = reduction_signature(a.shape, axes_of(axis, a.ndim), "sum", keepdims, ())
    kwargs = {"axis": axes_of(axis, a.ndim), "keepdims": keepdims}
    return record(np.count_nonzero, signature, (a,), np.dtype(np.intp), kwargs)


@implements(np.mean)
def mean(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False, *, where: Any = True
) -> DTensor:
    no_out(out, "mean")
    axes = axes_of(axis, a.ndim)
    keepdims = keepdims is not UNSET and bool(keepdims)
    options = given_options(dtype=dtype)
    if where is not True and where is not UNSET:
        return _masked_mean(a, axes, options, keepdims, where)
    result = dtype_of(np.mean, a, **options)
    count = math.prod(a.shape[d] for d in axes)
    if result.kind not in "fc":  # quotients of the terms would be cut off in each
        total = _folded(np.sum, "sum", a, axes, options, keepdims=keepdims)
        return record(_quotient, elementwise((total.shape,)), (total,), result, {"count": count})
    total_dtype = accumulator(a.dtype, options.get("dtype"))
    half = result == np.float16 and total_dtype == np.float32  # NumPy rounds to half precision only at the end
    made = np.dtype(np.float32) if half else result
    how = {"axis": axes, "keepdims": keepdims, "count": count, "result": made, "dtype": total_dtype}
    value = record(_mean_of_part, reduction_signature(a.shape, axes, "sum", keepdims, linear(1)), (a,), made, how)
    return astype(aligned(value), result) if half else value


def _mean_of_part(x: Array, axis: Any, keepdims: bool, count: int, result: Dtype, dtype: Dtype | None) -> Array:
    return _quotient(np.sum(x, axis=axis, dtype=dtype, keepdims=keepdims), count).astype(result, copy=False)


def _quotient(total: Array, count: int) -> Array:
    with np.errstate(all="ignore"):
        return np.true_divide(total, count, casting="unsafe").astype(total.dtype, copy=False)


def _masked_mean(a: Any, axes: tuple[int, ...], options: dict[str, Any], keepdims: bool, where: Any) -> DTensor:
    operands, _ = with_mask(a, where)
    result = dtype_of(masked, *operands, func=np.mean, **options)
    if not cut_dims(aligned(a).layout, axes):
        kwargs = {"func": np.mean, "axis": axes, "keepdims": keepdims, **options}
        return reduced_whole(masked, operands, axes, result, kwargs, keepdims)
    total = np.result_type(accumulator(a.dtype, options.get("dtype")) or a.dtype)
    how = {"dtype": total, "result": result}
    return by_parts(
        operands, axes, result, Summary((total, np.dtype(np.intp)), _sums_of_part, mean_of_sums, how), keepdims
    )


def _sums_of_part(x: Array, mask: Array, axes: Any, dtype: Dtype, **_: Any) -> tuple[Array, Array]:
    count = np.sum(np.broadcast_to(mask, x.shape), axis=axes, dtype=np.intp)
    return np.sum(x, axis=axes, dtype=dtype, where=mask), count


@implements(np.average)
def average(a: Any, axis: Any = None, weights: Any = None, returned: bool = False, *, keepdims: Any = False) -> Any:
    keepdims = keepdims is not UNSET and bool(keepdims)
    axes = axes_of(axis, a.ndim)
    if weights is None:
        mid = mean(a, axes, keepdims=keepdims)
        scale: Any = mid.dtype.type(math.prod(a.shape[d] for d in axes))
    else:
        weights = weights if isinstance(weights, DTensor) else np.asanyarray(weights)
        inexact = a.dtype.kind in "biu"
        dtype = np.result_type(a.dtype, weights.dtype, "f8") if inexact else np.result_type(a.dtype, weights.dtype)
        weights = _spread(weights, a, axis, axes)
        scale = np.sum(weights, axis=axes, dtype=dtype, keepdims=keepdims)
        if not isinstance(scale, DTensor) and np.any(scale == 0):
            raise ZeroDivisionError("np.average: the weights sum to zero and cannot be normalised")
        mid = np.sum(np.multiply(a, weights, dtype=dtype), axis=axes, keepdims=keepdims) / scale
    if not returned:
        return mid
    full = np.zeros_like(mid) + scale
    return mid, full


def _spread(weights: Any, a: Any, axis: Any, axes: tuple[int, ...]) -> Any:
    """The weights in a shape that broadcasts to that of `a`, and as long as it along the averaged dims."""
    if weights.shape == a.shape:
        return weights
    if axis is None:
        raise TypeError("np.average: axis must be given when the shapes of a and weights differ")
    order = [int(d) % a.ndim for d in (axis if isinstance(axis, (tuple, list)) else (axis,))]
    if weights.shape != tuple(a.shape[d] for d in order):
        raise ValueError(f"np.average: weights of shape {weights.shape} do not fit dims {axes} of an array of shape {a.shape}")
    weights = np.transpose(weights, np.argsort(order)) if weights.ndim > 1 else weights
    return np.expand_dims(weights, tuple(d for d in range(a.ndim) if d not in order))


# -- the `reduce` method of ufuncs ------------------------------------------------------------------------------------

_FOLDING: dict[np.ufunc, Callable[..., DTensor]] = {
    np.add: _sum_like(np.sum, "sum", np.add, True),
    np.multiply: _sum_like(np.prod, "prod", np.multiply, True),
}
_ORDER = {np.maximum: _max_like(np.max, "max"), np.minimum: _max_like(np.min, "min")}
_TRUTH = {np.logical_or: _truth_like(np.any, "any"), np.logical_and: _truth_like(np.all, "all")}

def ufunc_reduce(
    ufunc: np.ufunc,
    a: Any,
    axis: Any = 0,
    dtype: Any = None,
    keepdims: bool = False,
    initial: Any = UNSET,
    where: Any = True,
) -> Any:
    """``ufunc.reduce``; ufuncs that do not regroup need the reduced dims whole, and so move them."""
    if not isinstance(a, DTensor):
        raise TypeError(f"np.{ufunc.__name__}.reduce: the array is a {type(a).__name__}, only where= is a DTensor")
    if ufunc in _FOLDING:
        return _FOLDING[ufunc](a, axis, dtype, None, keepdims, initial, where)
    if ufunc in _ORDER and dtype is None:
        return _ORDER[ufunc](a, axis, None, keepdims, initial, where)
    if ufunc in _TRUTH and dtype in (None, bool) and initial is UNSET:
        return _TRUTH[ufunc](a, axis, None, keepdims, where=where)
    axes = axes_of(axis, a.ndim)
    options = given_options(dtype=dtype, initial=initial)
    plain = where is True
    operands = (a,) if plain else with_mask(a, where)[0]
    result = dtype_of(_reduce_of if plain else _masked_reduce, *operands, ufunc=ufunc, axis=axes, **options)
    if plain and not options and ufunc in REGROUPING and cut_dims(a.layout, axes) and all(a.shape[d] for d in axes):
        summary = Summary((result,), _reduced_part, _reduced_parts, {"ufunc": ufunc})
        return by_parts(operands, axes, result, summary, keepdims)
    kwargs = {"ufunc": ufunc, "axis": axes, "keepdims": keepdims, **options}
    return reduced_whole(_reduce_of if plain else _masked_reduce, operands, axes, result, kwargs, keepdims)


def _reduce_of(x: Array, ufunc: np.ufunc, **kwargs: Any) -> Array:
    return ufunc.reduce(x, **kwargs)


def _masked_reduce(x: Array, mask: Array, ufunc: np.ufunc, **kwargs: Any) -> Array:
    return ufunc.reduce(x, where=mask, **kwargs)


def _reduced_part(x: Array, axes: Any, ufunc: np.ufunc, **_: Any) -> tuple[Array]:
    return (ufunc.reduce(x, axis=axes),)


def _reduced_parts(x: Array, ufunc: np.ufunc, **_: Any) -> Array:
    return ufunc.reduce(x, axis=0)


UFUNC_METHODS["reduce"] = ufunc_reduce

