"""Medians, percentiles and quantiles: the reduced dims are made whole on every rank, and kept dims are cut instead.

Order statistics of parts say little about those of the whole, so the data move; ``explain()`` tells how much. NumPy does the
rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

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


def _record(func: Callable[..., Array], a: DTensor, axes: tuple[int, ...], keepdims: Any, options: dict[str, Any]) -> DTensor:
    keepdims = keepdims is not UNSET and bool(keepdims)
    q = options.get("q")
    sample = {k: v for k, v in options.items() if k != "q"}
    dtype = dtype_of(_applied, a, 0.5, func=func, **sample) if q is not None else dtype_of(func, a)
    ready = prepare(reduction_signature(a.shape, axes, None, keepdims, ()), (_whole(a, axes),), dtype)
    layout = ready.decision.output
    kwargs = {"axis": axes, "keepdims": keepdims, **options}
    if q is None or not q.ndim:
        return ready.local(func, kwargs)
    return ready.local(func, kwargs, layout=_with_leading(layout, q.shape))


def _applied(a: Array, q: Any, func: Callable[..., Array], **options: Any) -> Array:
    return func(a, q, **options)


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
        if weights is not None:
            raise TypeError(f"np.{name}(weights=...) is not defined on DTensors; gather with np.asarray(x) first")
        if isinstance(q, DTensor):
            raise TypeError(f"np.{name}: q must be plain numbers, not a DTensor; pass np.asarray(q)")
        q = np.asarray(q)
        if q.size and not (np.min(q) >= 0 and np.max(q) <= top):
            raise ValueError(f"np.{name}: q must lie between 0 and {top:g}")
        return _record(func, a, axes_of(axis, a.ndim), keepdims, {"q": q, "method": method})

    return reduce


for _func in (np.median, np.nanmedian):
    implements(_func)(_median(_func))
for _by in (np.percentile, np.nanpercentile):
    implements(_by)(_quantile(_by, 100.0))
for _by in (np.quantile, np.nanquantile):
    implements(_by)(_quantile(_by, 1.0))
