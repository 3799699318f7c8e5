"""Histograms: each rank counts its own elements, and the counts are terms of the whole.

Where the bins follow from the least and greatest element, those travel first, and the edges are worked out on every rank::

    part 0   3 1 4       min 1 max 4     edges 1 5 9      counts  3 0
    part 1   1 5 9       min 1 max 9     edges 1 5 9      counts  1 2      Partial('sum')
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from daskmesh.dtensor import DTensor, implements
from daskmesh.ops.gathers import recut
from daskmesh.ops.kinds import prepare
from daskmesh.rules import Signature

__all__: list[str] = []

Array = Any
_np: Any = np  # typed for arrays of its own, not for those that speak its protocols


def _recorded(
    func: Callable[..., Array], signature: Signature, operands: Sequence[Any], dtype: Any, sizes: Sequence[int], /, **options: Any
) -> DTensor:
    """Record a function whose result has new dims, not cut, of these sizes."""
    ready = prepare(signature, operands, np.dtype(dtype))
    layout = recut(ready.decision.output, {d: (n,) for d, n in enumerate(sizes)})
    return ready.local(func, options, layout=layout)


def _given(x: Any) -> Any:
    return x if isinstance(x, DTensor) else np.asarray(x)


def _ends(a: Any, range_: Any) -> tuple[Any, Any]:
    """Where the bins begin and end: as given, or the least and greatest element."""
    if range_ is not None:
        lo, hi = range_
        if lo > hi:
            raise ValueError("max must be larger than min in range parameter.")
        if not (np.isfinite(lo) and np.isfinite(hi)):
            raise ValueError(f"supplied range of [{lo}, {hi}] is not finite")
        return lo, hi
    if not a.size:
        return 0, 1
    if a.dtype == np.bool_:
        a = _np.astype(a, np.uint8)
    return _np.min(a), _np.max(a)


def _number_of(bins: Any) -> int | None:
    """The number of bins; None where their edges are given."""
    if isinstance(bins, str):
        raise TypeError(
            f"np.histogram(bins={bins!r}): the rules that choose bins by themselves are not defined on DTensors; give a number "
            f"or the edges"
        )
    if np.ndim(bins):
        return None
    if isinstance(bins, DTensor) or np.asarray(bins).dtype.kind not in "iu":
        raise TypeError("`bins` must be an integer, a string, or an array")
    if bins < 1:
        raise ValueError("`bins` must be positive, when an integer")
    return int(bins)


def _edges(a: Any, bins: Any, ends: tuple[Any, Any]) -> Any:
    """The edges; plain where nothing about them depends on the data."""
    n = _number_of(bins)
    if n is None:
        edges = _given(bins)
        if edges.ndim != 1:
            raise ValueError("`bins` must be 1d, when an array")
        if not isinstance(edges, DTensor) and np.any(edges[:-1] > edges[1:]):
            raise ValueError("`bins` must increase monotonically, when an array")
        return edges
    dtype = np.dtype(np.uint8) if a.dtype == np.bool_ else a.dtype
    if not any(isinstance(e, DTensor) for e in ends):
        return np.histogram_bin_edges(np.empty(0, dtype), n, ends)
    unit: Any = dtype.type(0), dtype.type(1)
    kind = np.histogram_bin_edges(np.empty(0, dtype), 1, unit).dtype
    return _recorded(_edges_of, Signature(((), ()), (None,)), ends, kind, [n + 1], bins=n, dtype=dtype)


def _edges_of(lo: Array, hi: Array, bins: int, dtype: Any) -> Array:
    return np.histogram_bin_edges(np.empty(0, dtype), bins, (lo[()], hi[()]))


@implements(np.histogram_bin_edges)
def histogram_bin_edges(a: Any, bins: Any = 10, range: Any = None, weights: Any = None) -> Any:
    a = _np.ravel(_given(a))
    return _edges(a, bins, _ends(a, range) if _number_of(bins) is not None else (0, 1))


@implements(np.histogram)
def histogram(a: Any, bins: Any = 10, range: Any = None, density: Any = None, weights: Any = None) -> tuple[DTensor, Any]:
    """Counts per bin, left as terms, and the edges, which are plain unless they depend on the data.

    **Communication**: the least and greatest element, where the bins follow from them; density reduces the counts.
    """
    a = _given(a)
    n = _number_of(bins)
    ends = (0, 1) if n is None else _ends(a, range)
    edges = _edges(a, bins, ends)
    labels = tuple(f"data {d}" for d, _ in enumerate(a.shape))
    operands: list[Any] = [a]
    notes = [labels]
    dtype = np.dtype(np.intp)
    if weights is not None:
        weights = _given(weights)
        if weights.shape != a.shape:
            raise ValueError("weights should have the same shape as a.")
        operands.append(weights)
        notes.append(labels)
        dtype = weights.dtype
    placed = edges if n is None else ends
    for x in [placed] if n is None else placed:
        operands.append(_given(x) if n is None else x)
        notes.append(("edges",) if n is None else ())
    size = (edges.shape[0] if n is None else n + 1) - 1
    signature = Signature(tuple(notes), (None,), "sum", (), frozenset({"edges"}))
    counts = _recorded(_counted, signature, operands, dtype, [size], bins=n, weighted=weights is not None)
    if density:
        widths = _np.astype(_np.diff(edges), np.float64)
        return counts / widths / _np.sum(counts), edges
    return counts, edges


def _counted(local: Array, *rest: Array, bins: int | None, weighted: bool) -> Array:
    weights, *bounds = rest if weighted else (None, *rest)
    if bins is None:
        return np.histogram(local, bounds[0], weights=weights)[0]
    lo, hi = (b[()] if isinstance(b, np.ndarray) else b for b in bounds)
    ends: Any = lo, hi
    return np.histogram(local, bins, ends, weights=weights)[0]


# -- of several dims --------------------------------------------------------------------------------------------------


@implements(np.histogramdd)
def histogramdd(
    sample: Any, bins: Any = 10, range: Any = None, density: Any = None, weights: Any = None
) -> tuple[DTensor, list[Any]]:
    """Counts per cell, left as terms, and the edges of each dim, which are plain unless they depend on the data.

    **Communication**: the least and greatest elements, where the bins follow from them; density reduces the counts.
    """
    columns = _columns(sample)
    d = len(columns)
    number = list(bins) if isinstance(bins, (list, tuple)) or np.ndim(bins) else [bins] * d
    if len(number) != d:
        raise ValueError("The dimension of bins must be equal to the dimension of the sample x.")
    spans = [None] * d if range is None else list(range)
    if len(spans) != d:
        raise ValueError("range argument must have one entry per dimension")
    operands, notes = list(columns), [("rows",)] * d
    if weights is not None:
        operands.append(_given(weights))
        notes.append(("rows",))
    edges, sizes = [], []
    for i, (x, b, span) in enumerate(zip(columns, number, spans, strict=True)):
        made = _edges_of_dim(x, b, span)
        edges.append(made)
        sizes.append(made.shape[0] - 1)
        operands.append(made)
        notes.append((f"edges {i}",))
    whole = frozenset(f"edges {i}" for i, _ in enumerate(columns))
    signature = Signature(tuple(notes), (None,) * d, "sum", (), whole)
    counts = _recorded(_counted_cells, signature, operands, np.float64, sizes, dims=d, weighted=weights is not None)
    if density:
        total = _np.sum(counts)
        for i, e in enumerate(edges):
            counts = counts / _np.reshape(_np.diff(e), [-1 if j == i else 1 for j, _ in enumerate(edges)])
        counts = counts / total
    return counts, edges


def _columns(sample: Any) -> list[Any]:
    if isinstance(sample, DTensor):
        if sample.ndim == 1:
            return [sample]
        return [sample[:, i] for i in np.arange(sample.shape[1])]
    return [_given(x) for x in sample]


def _edges_of_dim(x: Any, bins: Any, span: Any) -> Any:
    """NumPy makes these as ``linspace``, unlike those of ``histogram``."""
    n = _number_of(bins)
    if n is None:
        return _edges(x, bins, (0, 1))
    ends = _ends(x, span)
    if not any(isinstance(e, DTensor) for e in ends):
        return _line(np.asarray(ends[0]), np.asarray(ends[1]), n)
    kind = np.linspace(x.dtype.type(0), x.dtype.type(1), 2).dtype
    return _recorded(_line, Signature(((), ()), (None,)), ends, kind, [n + 1], bins=n)


def _line(lo: Array, hi: Array, bins: int) -> Array:
    lo, hi = lo[()], hi[()]
    if not (np.isfinite(lo) and np.isfinite(hi)):
        raise ValueError(f"autodetected range of [{lo}, {hi}] is not finite")
    if lo == hi:
        lo, hi = lo - 0.5, hi + 0.5
    return np.linspace(lo, hi, bins + 1)


def _counted_cells(*locals_: Array, dims: int, weighted: bool) -> Array:
    weights = locals_[dims] if weighted else None
    return np.histogramdd(locals_[:dims], list(locals_[dims + weighted :]), weights=weights)[0]


@implements(np.histogram2d)
def histogram2d(
    x: Any, y: Any, bins: Any = 10, range: Any = None, density: Any = None, weights: Any = None
) -> tuple[DTensor, Any, Any]:
    """As `histogramdd` of two dims."""
    if np.shape(x) != np.shape(y):
        raise ValueError("x and y must have the same length.")
    if isinstance(bins, (list, tuple, np.ndarray, DTensor)) and len(bins) not in (1, 2):
        bins = [bins, bins]
    elif isinstance(bins, (list, tuple, np.ndarray)) and len(bins) == 1:
        bins = [bins[0], bins[0]]
    counts, edges = histogramdd([x, y], bins, range, density, weights)
    return counts, edges[0], edges[1]


@implements(np.bincount)
def bincount(x: Any, weights: Any = None, minlength: int = 0) -> DTensor:
    """How often each number below the greatest occurs, left as terms.

    **Communication**: runs at once, to learn the greatest number: one element of each part travels.
    """
    x = _given(x)
    if x.ndim != 1:
        raise ValueError("object too deep for desired array" if x.ndim else "object of too small depth for desired array")
    if not np.can_cast(x.dtype, np.intp, "safe"):
        raise TypeError(f"Cannot cast array data from {x.dtype!r} to dtype('int64') according to the rule 'safe'")
    if minlength < 0:
        raise ValueError("'minlength' must not be negative")
    size = max(int(_np.max(x)) + 1, int(minlength)) if x.size else int(minlength)
    if size < 1 and x.size:
        raise ValueError("'list' argument must have no negative elements")
    operands = [x] if weights is None else [x, _given(weights)]
    if weights is not None and operands[1].shape != x.shape:
        raise ValueError("The weights and list don't have the same length.")
    dtype = np.dtype(np.intp if weights is None or not x.size else np.float64)
    signature = Signature((("rows",),) * len(operands), (None,), "sum")
    return _recorded(_binned, signature, operands, dtype, [size], size=size, dtype=dtype)


def _binned(x: Array, weights: Array = None, *, size: int, dtype: Any) -> Array:
    return np.bincount(x, weights, size).astype(dtype, copy=False)  # of nothing NumPy counts in integers, weights or not
