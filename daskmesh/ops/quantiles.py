"""Medians, percentiles and quantiles: the reduced dims are made whole on every rank, and kept dims are cut instead.

Order statistics of parts say little about those of the whole, so the data move; ``explain()`` tells how much. Weights go
where the data go. NumPy does the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from daskmesh.dtensor import DTensor, implements
from daskmesh.layout import Layout
from daskmesh.ops.kinds import aligned, dtype_of, prepare
from daskmesh.ops.parts import UNSET, axes_of, no_out, reduction_signature
from daskmesh.placement import Replicate, Shard

__all__: list[str] = []

Array = Any


def _whole(a: DTensor, axes: tuple[int, ...]) -> DTensor:
    """`a` with the dims `axes` not cut; a mesh dim that cut one cuts the longest kept dim instead, if there is any."""
    layout = aligned(a).layout
    kept = [d for d in range(a.ndim) if d not in axes]
    cut = [m for m, p in enumerate(layout.placements) if isinstance(p, Shard) and p.dim in axes]
    if not cut:
        return aligned(a)
    placements = list(layout.placements)
    free = [d for d in kept if not layout.shard_axes[d]]
    for m in cut:
        best = max(free, key=lambda d: a.shape[d], default=None)
        if best is not None and a.shape[best] > 1:
            placements[m] = Shard(best)
        else:
            placements[m] = Replicate()
    return a.reshard(placements)


def _record(
    func: Callable[..., Array], a: DTensor, axes: tuple[int, ...], keepdims: Any, options: dict[str, Any], weights: Any = None
) -> DTensor:
    keepdims = keepdims is not UNSET and bool(keepdims)
    operands = (_whole(a, axes),) if weights is None else (_whole(a, axes), weights)
    q = options.get("q")
    plain = {k: v for k, v in options.items() if k != "q"}
    dtype = dtype_of(func, a) if q is None else dtype_of(_sample, a, func=func, kind=_kind(q), heavy=weights is not None, **plain)
    mask = None if weights is None else weights.shape
    ready = prepare(reduction_signature(a.shape, axes, None, keepdims, (), mask), operands, dtype)
    layout = ready.decision.output
    kwargs = {"axis": axes, "keepdims": keepdims, **options}
    if q is None:
        return ready.local(func, kwargs)
    return ready.local(_of_part, {**kwargs, "func": func, "dtype": dtype}, layout=_with_leading(layout, np.shape(q)))


def _kind(q: Any) -> Any:
    """What of `q` decides the dtype of the result: Python's own numbers leave it to the array."""
    return type(q) if type(q) in (int, float) else q.dtype


def _sample(a: Array, func: Callable[..., Array], kind: Any, heavy: bool, **options: Any) -> Array:
    q = kind(0) if isinstance(kind, type) else np.zeros((), kind)
    return func(a, q, weights=np.ones(a.shape), **options) if heavy else func(a, q, **options)


def _of_part(
    a: Array, *weights: Array, func: Callable[..., Array], q: Any, axis: tuple[int, ...], keepdims: bool, dtype: Any,
    **options: Any,
) -> Array:  # fmt: skip
    kept = [1 if d in axis else n for d, n in enumerate(a.shape) if keepdims or d not in axis]
    if 0 in kept:  # nothing to do; NumPy's nan functions would forget the dims of q
        return np.empty_like(a, shape=(*np.shape(q), *kept), dtype=dtype)
    if weights:
        options["weights"] = np.broadcast_to(weights[0], a.shape)
    return func(a, q, axis=axis, keepdims=keepdims, **options)


def _weights_of(a: DTensor, weights: Any, axis: Any, name: str) -> Any:
    """The weights, plain or not, in a shape that broadcasts to `a`."""
    w = weights if isinstance(weights, DTensor) else np.asarray(weights)
    if w.shape != a.shape:
        if axis is None:
            raise TypeError("Axis must be specified when shapes of a and weights differ.")
        dims = normalize_axis_tuple(axis, a.ndim, "axis")
        if w.shape != tuple(a.shape[d] for d in dims):
            raise ValueError(
                f"Shape of weights must be consistent with shape of a along specified axis: np.{name} got weights of shape "
                f"{w.shape} for dims {dims} of shape {a.shape}"
            )
        turned: Any = np.transpose(w, np.argsort(dims))
        w = np.reshape(turned, tuple(n if d in dims else 1 for d, n in enumerate(a.shape)))
    if not isinstance(w, DTensor) and np.any(w < 0):
        raise ValueError("Weights must be non-negative.")
    return w


def _with_leading(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """The layout with new leading dims that are not cut."""
    n = len(shape)
    placements = tuple(Shard(p.dim + n) if isinstance(p, Shard) else p for p in layout.placements)
    chunks = (*((k,) for k in shape), *layout.chunks)
    return layout.replace(placements=placements, shape=(*shape, *layout.shape), chunks=chunks)


def _median(func: Callable[..., Array]) -> Callable[..., DTensor]:
    def reduce(
        a: DTensor, axis: Any = None, out: Any = None, overwrite_input: bool = False, keepdims: Any = False
    ) -> DTensor:
        no_out(out, func.__name__)
        return _record(func, a, axes_of(axis, a.ndim), keepdims, {})

    return reduce


def _quantile(func: Callable[..., Array], top: float) -> Callable[..., DTensor]:
    name = func.__name__

    def reduce(
        a: DTensor,
        q: Any,
        axis: Any = None,
        out: Any = None,
        overwrite_input: bool = False,
        method: str = "linear",
        keepdims: Any = False,
        *,
        weights: Any = None,
    ) -> DTensor:
        no_out(out, name)
        if isinstance(q, DTensor):
            raise TypeError(f"np.{name}: q must be plain numbers, not a DTensor; pass np.asarray(q)")
        if not isinstance(a, DTensor):
            raise TypeError(f"np.{name}: the weights are a DTensor, the values are not; place these too: dm.shard_tensor")
        q = q if type(q) in (int, float) else np.asarray(q)
        if np.size(q) and not (np.min(q) >= 0 and np.max(q) <= top):
            raise ValueError(f"np.{name}: q must lie between 0 and {top:g}")
        if weights is not None:
            if method != "inverted_cdf":
                raise ValueError(f"Only method 'inverted_cdf' supports weights. Got: {method}.")
            weights = _weights_of(a, weights, axis, name)
        return _record(func, a, axes_of(axis, a.ndim), keepdims, {"q": q, "method": method}, weights)

    return reduce


for _func in (np.median, np.nanmedian):
    implements(_func)(_median(_func))
for _by in (np.percentile, np.nanpercentile):
    implements(_by)(_quantile(_by, 100.0))
for _by in (np.quantile, np.nanquantile):
    implements(_by)(_quantile(_by, 1.0))
