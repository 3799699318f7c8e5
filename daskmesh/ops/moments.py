"""Reductions by summaries: var, std, ptp, argmax, argmin, and the sums and extremes that skip nan.

Where no reduced dim is cut, NumPy itself does the work on every rank. Else variances combine as Chan, Golub and LeVeque do
(count, mean and sum of squares of each part), so that the data are read in one task and nothing cancels; arg-reductions combine
(value, index in the whole array): the first nan or else the best value, ties by index.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from daskmesh.dtensor import FUNCTIONS, DTensor, implements
from daskmesh.layout import Coord, Layout
from daskmesh.ops.kinds import aligned, dtype_of
from daskmesh.ops.parts import (
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
    with_mask,
)

__all__: list[str] = []

Array = Any
Dtype = np.dtype[Any]
_INDEX = np.dtype(np.intp)


def _is_cut(a: DTensor, axes: tuple[int, ...]) -> bool:
    """Whether a reduced dim is cut once the Partials are reduced."""
    return bool(cut_dims(aligned(a).layout, axes)) and all(a.shape[d] for d in axes)


def _kept(keepdims: Any) -> bool:
    return keepdims is not UNSET and bool(keepdims)


# -- variances --------------------------------------------------------------------------------------------------------


def _variance(func: Callable[..., Array]) -> Callable[..., DTensor]:
    name, skips = func.__name__, func in (np.nanvar, np.nanstd)
    root = func in (np.std, np.nanstd)

    def reduce(
        a: Any,
        axis: Any = None,
        dtype: Any = None,
        out: Any = None,
        ddof: Any = 0,
        keepdims: Any = False,
        *,
        where: Any = True,
        mean: Any = UNSET,
        correction: Any = UNSET,
    ) -> DTensor:
        no_out(out, name)
        if mean is not UNSET:
            raise TypeError(f"np.{name}(mean=...) is not defined on DTensors; the mean is found in the same task")
        if correction is not UNSET and ddof != 0:
            raise ValueError("ddof and correction can't be provided simultaneously.")
        ddof = ddof if correction is UNSET else correction
        axes, options = axes_of(axis, a.ndim), given_options(dtype=dtype)
        plain = where is True or where is UNSET
        operands = (a,) if plain else with_mask(a, where)[0]
        how = options if plain else {"func": func, **options}
        result = dtype_of(func if plain else masked, *operands, **how)
        if not _is_cut(a, axes):
            kwargs = {"axis": axes, "keepdims": _kept(keepdims), "ddof": ddof, **how}
            return reduced_whole(func if plain else masked, operands, axes, result, kwargs, _kept(keepdims))
        total = np.result_type(accumulator(a.dtype, options.get("dtype")) or a.dtype)
        real = np.zeros((), total).real.dtype
        facts = {"dtype": total, "ddof": ddof, "root": root, "skips": skips, "result": result}
        summary = Summary((_INDEX, total, real), _moments_of_part, _variance_of_parts, facts)
        return by_parts(operands, axes, result, summary, _kept(keepdims))

    return reduce


def _moments_of_part(x: Array, *mask: Array, axes: Any, dtype: Dtype, skips: bool, **_: Any) -> tuple[Array, ...]:
    """Count, mean and sum of squared distances from the mean."""
    x = x.astype(dtype, copy=False)
    held = np.broadcast_to(mask[0], x.shape) if mask else None
    if skips and x.dtype.kind in "fc":
        held = ~np.isnan(x) if held is None else held & ~np.isnan(x)
    if held is not None:
        x = np.where(held, x, x.dtype.type(0))
        count = np.sum(held, axis=axes, keepdims=True, dtype=np.intp)
    else:
        size = math.prod(x.shape[d] for d in axes)
        count = np.full_like(x, size, shape=[1 if d in axes else n for d, n in enumerate(x.shape)], dtype=np.intp)
    with np.errstate(all="ignore"):
        mean = np.sum(x, axis=axes, keepdims=True) / np.maximum(count, 1).astype(np.zeros((), dtype).real.dtype)
        apart = x - mean
        square = apart.real**2 + apart.imag**2 if apart.dtype.kind == "c" else np.multiply(apart, apart, out=apart)
        if held is not None:
            square = np.where(held, square, square.dtype.type(0))
        spread = np.sum(square, axis=axes)
    return count.reshape(spread.shape), mean.reshape(spread.shape), spread


def _variance_of_parts(
    counts_: Array, means: Array, spreads: Array, ddof: Any, root: bool, skips: bool, result: Dtype, **_: Any
) -> Array:
    real = spreads.dtype.type
    weights = counts_.astype(spreads.dtype)
    with np.errstate(all="ignore"):
        total = np.sum(weights, axis=0)
        held = np.where(counts_ > 0, means, means.dtype.type(0))
        mean = np.sum(held * weights, axis=0) / np.maximum(total, real(1))
        apart = np.abs(held - mean) ** 2
        spread = np.sum(spreads, axis=0) + np.sum(np.where(counts_ > 0, weights * apart, real(0)), axis=0)
        degrees = total - real(ddof)
        value = spread / np.maximum(degrees, real(0))
        if skips:
            value = np.where(degrees <= 0, real(np.nan), value)
        value = np.sqrt(value) if root else value
    return value.astype(result, copy=False)


for _func in (np.var, np.std, np.nanvar, np.nanstd):
    implements(_func)(_variance(_func))


# -- arg-reductions ---------------------------------------------------------------------------------------------------


def _arg(func: Callable[..., Array]) -> Callable[..., DTensor]:
    name = func.__name__
    best = np.argmax if "max" in name else np.argmin
    fill = None if not name.startswith("nan") else (-np.inf if best is np.argmax else np.inf)

    def reduce(a: DTensor, axis: Any = None, out: Any = None, *, keepdims: Any = False) -> DTensor:
        no_out(out, name)
        axes = axes_of(axis, a.ndim)
        if len(axes) != 1 and axis is not None:
            raise TypeError(f"np.{name}: axis must be one int or None, got {axis!r}")
        if any(a.shape[d] == 0 for d in axes):
            raise ValueError(f"attempt to get {best.__name__} of an empty sequence")
        if a.dtype.kind == "V" or a.dtype.hasobject:
            raise TypeError(f"np.{name} of {a.dtype} is not defined on DTensors")
        if not _is_cut(a, axes):
            kwargs = {"axis": None if axis is None else axes[0], "keepdims": _kept(keepdims)}
            return reduced_whole(func, (a,), axes, _INDEX, kwargs, _kept(keepdims))
        facts = {"best": best, "fill": fill if a.dtype.kind in "fc" else None, "shape": a.shape}
        summary = Summary((a.dtype, _INDEX, np.dtype(np.bool_)), _best_of_part, _best_of_parts, facts)
        return by_parts((a,), axes, _INDEX, summary, _kept(keepdims))

    return reduce


def _best_of_part(
    x: Array, coord: Coord, layout: Layout, axes: tuple[int, ...], best: Callable[..., Array], fill: Any, shape: Any
) -> tuple[Array, ...]:
    """The best value of a part, its place in the whole array, and whether there is any."""
    box = layout.box(coord)
    there = np.ones_like(x, dtype=np.bool_) if fill is None else ~np.isnan(x)
    x = x if fill is None else np.where(there, x, x.dtype.type(fill))
    valid = np.any(there, axis=axes)
    if len(axes) == 1:
        (d,) = axes
        at = best(x, axis=d, keepdims=True)
        return np.take_along_axis(x, at, d).squeeze(d), at.squeeze(d) + box[d].start, valid
    at = best(x)
    places = np.unravel_index(at, x.shape)
    index = np.ravel_multi_index(tuple(p + b.start for p, b in zip(places, box, strict=True)), shape)
    return x[places], index, valid


def _best_of_parts(values: Array, indices: Array, valid: Array, best: Callable[..., Array], fill: Any, **_: Any) -> Array:
    if fill is not None and not np.all(np.any(valid, axis=0)):
        raise ValueError("All-NaN slice encountered")
    chosen = np.take_along_axis(values, best(values, axis=0, keepdims=True), 0)
    ties = (values == chosen) | ((values != values) & (chosen != chosen))
    return np.min(np.where(ties, indices, np.iinfo(indices.dtype).max), axis=0)


for _arg_func in (np.argmax, np.argmin, np.nanargmax, np.nanargmin):
    implements(_arg_func)(_arg(_arg_func))


# -- extremes ---------------------------------------------------------------------------------------------------------


@implements(np.ptp)
def ptp(a: DTensor, axis: Any = None, out: Any = None, keepdims: Any = False) -> DTensor:
    no_out(out, "ptp")
    axes = axes_of(axis, a.ndim)
    if any(a.shape[d] == 0 for d in axes):
        raise ValueError("zero-size array to reduction operation maximum which has no identity")
    result = dtype_of(np.ptp, a)
    if not _is_cut(a, axes):
        kwargs = {"axis": axes, "keepdims": _kept(keepdims)}
        return reduced_whole(np.ptp, (a,), axes, result, kwargs, _kept(keepdims))
    return by_parts((a,), axes, result, Summary((a.dtype, a.dtype), _ends_of_part, _range_of_parts), _kept(keepdims))


def _ends_of_part(x: Array, axes: Any, **_: Any) -> tuple[Array, Array]:
    return np.max(x, axis=axes), np.min(x, axis=axes)


def _range_of_parts(high: Array, low: Array, **_: Any) -> Array:
    return np.subtract(np.max(high, axis=0), np.min(low, axis=0))


def _nan_extreme(func: Callable[..., Array], whole: Callable[..., Array], ufunc: np.ufunc) -> Callable[..., DTensor]:
    name = func.__name__

    def reduce(
        a: DTensor, axis: Any = None, out: Any = None, keepdims: Any = False, initial: Any = UNSET, where: Any = True
    ) -> DTensor:
        no_out(out, name)
        if a.dtype.kind not in "fcmM":
            more = {k: v for k, v in (("initial", initial), ("where", where)) if v is not UNSET and v is not True}
            return whole(a, axis=axis, keepdims=_kept(keepdims), **more)  # type: ignore[no-any-return]
        axes, options = axes_of(axis, a.ndim), given_options(initial=initial)
        if any(a.shape[d] == 0 for d in axes) and not options:
            raise ValueError(f"zero-size array to reduction operation {ufunc.__name__} which has no identity")
        plain = where is True or where is UNSET
        operands = (a,) if plain else with_mask(a, where)[0]
        if not plain and not options:
            raise ValueError(f"np.{name}(where=...) needs initial=, the value where no element is selected")
        if not _is_cut(a, axes):
            kwargs = {"ufunc": ufunc, "axis": axes, "keepdims": _kept(keepdims), **options}
            return reduced_whole(_extreme, operands, axes, a.dtype, kwargs, _kept(keepdims))
        summary = Summary((a.dtype,), _extreme_of_part, _extreme_of_parts, {"ufunc": ufunc, "options": options})
        return by_parts(operands, axes, a.dtype, summary, _kept(keepdims))

    return reduce


def _extreme(x: Array, *mask: Array, ufunc: np.ufunc, **kwargs: Any) -> Array:
    """All-nan slices give nan; NumPy warns of them as well."""
    return ufunc.reduce(x, where=mask[0], **kwargs) if mask else ufunc.reduce(x, **kwargs)


def _extreme_of_part(x: Array, *mask: Array, axes: Any, ufunc: np.ufunc, options: Any, **_: Any) -> tuple[Array]:
    return (_extreme(x, *mask, ufunc=ufunc, axis=axes, **options),)


def _extreme_of_parts(x: Array, ufunc: np.ufunc, **_: Any) -> Array:
    return ufunc.reduce(x, axis=0)


implements(np.nanmax)(_nan_extreme(np.nanmax, np.max, np.fmax))
implements(np.nanmin)(_nan_extreme(np.nanmin, np.min, np.fmin))


@implements(np.nanmean)
def nanmean(
    a: DTensor, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False, *, where: Any = True
) -> DTensor:
    no_out(out, "nanmean")
    axes, options = axes_of(axis, a.ndim), given_options(dtype=dtype)
    plain = where is True or where is UNSET
    if a.dtype.kind not in "fc":
        more = {} if plain else {"where": where}
        value: DTensor = FUNCTIONS[np.mean](a, axis=axis, keepdims=_kept(keepdims), **options, **more)
        return value
    operands = (a,) if plain else with_mask(a, where)[0]
    result = dtype_of(np.nanmean, a, **options)
    total = np.result_type(accumulator(a.dtype, options.get("dtype")) or a.dtype)
    how = {"dtype": total, "result": result}
    if not _is_cut(a, axes):
        kwargs = {"axis": axes, "keepdims": _kept(keepdims), **how}
        return reduced_whole(_nanmean, operands, axes, result, kwargs, _kept(keepdims))
    return by_parts(operands, axes, result, Summary((total, _INDEX), _sum_of_numbers, mean_of_sums, how), _kept(keepdims))


def _sum_of_numbers(x: Array, *mask: Array, axes: Any, dtype: Dtype, keepdims: bool = False, **_: Any) -> tuple[Array, Array]:
    held = ~np.isnan(x)
    if mask:
        held = held & mask[0]
    total = np.sum(np.where(held, x, x.dtype.type(0)), axis=axes, dtype=dtype, keepdims=keepdims)
    return total, np.sum(held, axis=axes, dtype=np.intp, keepdims=keepdims)


def _nanmean(x: Array, *mask: Array, axis: Any, dtype: Dtype, result: Dtype, keepdims: bool) -> Array:
    total, count = _sum_of_numbers(x, *mask, axes=axis, dtype=dtype, keepdims=keepdims)
    return mean_of_sums(total[None], count[None], result=result)
