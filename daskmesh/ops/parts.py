"""Reductions whose parts do not fold by one of the seven reductions: argmax, variances, sums that skip nan.

Every rank summarises its part of the reduced dims into a few arrays; these travel in one small exchange and are combined::

    x  [Shard(0)]        summaries                        gathered            result
    part 0   ----->   [mean, sum of squares]  ----.
    part 1   ----->   [mean, sum of squares]  -----+-->  all summaries  -->  combined on every rank
    part 2   ----->   [mean, sum of squares]  ----'

The arrays of a summary travel as the bytes of one array (part, *kept dims, bytes), so that each keeps its own dtype. Large
summaries are exchanged so that every rank combines a share of the result, which then is cut.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from daskmesh import config
from daskmesh.algebra import Flow
from daskmesh.dtensor import DTensor
from daskmesh.graph import Local
from daskmesh.layout import Coord, Layout
from daskmesh.moves import moved
from daskmesh.ops.kinds import Prepared, operand, prepare, record
from daskmesh.placement import Placement, Replicate, Shard
from daskmesh.rules import Signature, elementwise, reducing

__all__ = [
    "REGROUPING", "UNSET", "Summary", "accumulator", "axes_of", "by_parts", "cut_dims", "given_options", "masked",
    "mean_of_sums", "no_out", "reduced_whole", "reduction_signature", "with_mask",
]  # fmt: skip

# Associative and commutative, so that the parts may be reduced apart.
REGROUPING = {
    np.fmax, np.fmin, np.bitwise_or, np.bitwise_and, np.bitwise_xor, np.logical_xor, np.gcd, np.lcm, np.logaddexp,
    np.logaddexp2, np.hypot,
}  # fmt: skip

UNSET: Any = np._NoValue  # NumPy's own mark of an argument that was not given

Array = Any
Dtype = np.dtype[Any]
Axes = tuple[int, ...]


def axes_of(axis: Any, ndim: int) -> Axes:
    """The reduced dims, none negative, in order; None means all."""
    return tuple(range(ndim)) if axis is None else tuple(sorted(normalize_axis_tuple(axis, ndim)))


def no_out(out: Any, name: str) -> None:
    """Raise TypeError where NumPy would be given a buffer."""
    if out is not None:
        raise TypeError(f"np.{name}(out=...): a DTensor is no buffer; write y = np.{name}(...)")


@lru_cache(4096)
def reduction_signature(
    shape: tuple[int, ...],
    axes: Axes,
    op: str | None,
    keepdims: bool = False,
    flows: tuple[Flow, ...] | None = None,
    mask: tuple[int, ...] | None = None,
) -> Signature:
    """A reduction in index notation, of an operand and, if its shape is given, a mask that broadcasts to it."""
    if mask is None:
        return reducing(len(shape), axes, op, keepdims=keepdims, flows=flows)
    fits = len(mask) <= len(shape) and all(k in (1, n) for n, k in zip(shape[::-1], mask[::-1], strict=False))
    if not fits:
        raise ValueError(f"where= of shape {mask} does not broadcast to the shape {shape} of the operand")
    both = elementwise((shape, mask))
    plain = reducing(len(shape), axes, op, keepdims=keepdims, flows=flows)
    passing = tuple(Flow((*f.inputs, None), f.output, f.rule) for f in plain.flows)
    return Signature(both.operands, plain.output, op, passing)


def with_mask(a: Any, where: Any) -> tuple[tuple[Any, Any], tuple[int, ...]]:
    mask = where if isinstance(where, DTensor) else np.asarray(where)
    if mask.dtype != np.bool_:
        raise TypeError(f"where=: the mask is {mask.dtype}; it must be bool")
    return (a, mask), mask.shape


def given_options(**options: Any) -> dict[str, Any]:
    """The options that were given; dtypes as dtypes, so that they can be remembered."""
    given = {k: v for k, v in options.items() if v is not None and v is not UNSET}
    if "dtype" in given:
        given["dtype"] = np.dtype(given["dtype"])
    return given


def accumulator(source: Dtype, dtype: Dtype | None) -> Dtype | None:
    """The dtype in which NumPy sums for a mean or a variance; None for the operand's own."""
    if dtype is not None:
        return dtype
    if source.kind in "biu":
        return np.dtype(np.float64)
    return np.dtype(np.float32) if source == np.float16 else None


def mean_of_sums(sums: Array, counts_: Array, result: Dtype, **_: Any) -> Array:
    with np.errstate(all="ignore"):
        return (np.sum(sums, axis=0) / np.sum(counts_, axis=0)).astype(result, copy=False)


def masked(x: Array, mask: Array, func: Callable[..., Array], **kwargs: Any) -> Array:
    """``func(x, where=mask)`` with both as operands."""
    return func(x, where=mask, **kwargs)


def reduced_whole(
    func: Callable[..., Array], operands: Sequence[Any], axes: Axes, dtype: Dtype, kwargs: Mapping[str, Any], keepdims: bool
) -> DTensor:
    """Record a reduction that NumPy itself does on every rank: the reduced dims are not cut."""
    mask = operand(operands[1]).shape if len(operands) > 1 else None
    signature = reduction_signature(operand(operands[0]).shape, axes, None, keepdims, (), mask)
    return record(func, signature, operands, dtype, kwargs)


def cut_dims(layout: Layout, axes: Axes) -> Axes:
    """The mesh dims that cut any of the tensor dims `axes`."""
    return tuple(m for m, p in enumerate(layout.placements) if isinstance(p, Shard) and p.dim in axes)


class Summary(NamedTuple):
    """How a reduction by parts is made up.

    Attributes
    ----------
    dtypes : tuple of dtype
        Of the arrays of a summary; each has the shape of the kept dims.
    summarise : callable
        ``summarise(*locals, coord=, layout=, axes=, **kwargs)``: the arrays of the summary of a part that is not empty.
    combine : callable
        ``combine(*arrays, counts=, **kwargs)``: the result; the arrays are those of all parts that are not empty, stacked in the
        order of the parts, and `counts` has the elements reduced in each.
    kwargs : mapping
        Given to both.
    """

    dtypes: tuple[Dtype, ...]
    summarise: Callable[..., tuple[Array, ...]]
    combine: Callable[..., Array]
    kwargs: Mapping[str, Any] = {}


def by_parts(operands: Sequence[Any], axes: Axes, dtype: Dtype, summary: Summary, keepdims: bool = False) -> DTensor:
    """Reduce the tensor dims `axes` of the first operand, which are cut; the others broadcast to it.

    **Communication**: an all-gather of the summaries over the mesh dims that cut `axes`; all-to-all where they are large.
    """
    shapes = tuple(operand(x).shape for x in operands)
    source = prepare(elementwise(shapes), operands, operand(operands[0]).dtype)
    layout = source.decision.output
    cut = cut_dims(layout, axes)
    packed = _packed_layout(layout, cut, axes, sum(d.itemsize for d in summary.dtypes))
    extra = {"layout": layout, "axes": axes, "summary": summary, "packed": packed}
    parts = _summarised(source, packed, extra)
    gathered = _gathered_layout(packed, cut, config.nbytes("two-stage-bytes"))
    node = moved(parts, gathered, f"the parts of the reduced dims {list(axes)} are combined")
    result = _result_layout(gathered, axes, dtype, keepdims)
    how = {"summary": summary, "counts": _counts(layout, cut, axes), "axes": axes if keepdims else ()}
    return DTensor(Local(result, source.world, _combined, (node,), how))


@lru_cache(4096)
def _packed_layout(layout: Layout, cut: Axes, axes: Axes, nbytes: int) -> Layout:
    kept = [d for d in range(layout.ndim) if d not in axes]
    parts = math.prod(layout.mesh.shape[m] for m in cut)
    placements = tuple(_renumbered(p, m in cut, kept) for m, p in enumerate(layout.placements))
    shape = (parts, *(layout.shape[d] for d in kept), nbytes)
    chunks = ((1,) * parts, *(layout.chunks[d] for d in kept), (nbytes,))
    return Layout(layout.mesh, placements, shape, np.dtype(np.uint8), chunks)


def _renumbered(p: Placement, cut: bool, kept: list[int]) -> Placement:
    if cut:
        return Shard(0)
    return Shard(1 + kept.index(p.dim)) if isinstance(p, Shard) else p


def _summarised(source: Prepared, packed: Layout, extra: Mapping[str, Any]) -> Local:
    return Local(packed, source.world, _summarise, source.args, extra, located=True)


def _summarise(coord: Coord, *arrays: Array, layout: Layout, axes: Axes, summary: Summary, packed: Layout) -> Array:
    shape = packed.local_shape(coord)
    local = layout.local_shape(coord)
    if any(local[d] == 0 for d in axes):
        like = next(x for x in arrays if hasattr(x, "shape"))
        return np.zeros_like(like, shape=shape, dtype=np.uint8)
    made = summary.summarise(*arrays, coord=coord, layout=layout, axes=axes, **summary.kwargs)
    columns = [_bytes_of(_array(x).astype(d, copy=False)) for x, d in zip(made, summary.dtypes, strict=True)]
    return np.concatenate(columns, axis=-1).reshape(shape)


def _array(x: Any) -> Array:
    """NumPy's reductions to a single element give scalars; those of arrays on a device do not."""
    return np.asarray(x) if isinstance(x, (np.generic, int, float)) else x


def _bytes_of(x: Array) -> Array:
    return np.ascontiguousarray(x[..., None]).view(np.uint8)


@lru_cache(4096)
def _gathered_layout(packed: Layout, cut: Axes, limit: int) -> Layout:
    """All parts on every rank; or, where that is much, on each rank those of a share of the longest kept dim."""
    goal: Placement = Replicate()
    share = packed.shape[0] * math.prod(max(c) for c in packed.chunks[1:])
    if share > limit and packed.ndim > 2:
        longest = max(range(1, packed.ndim - 1), key=lambda d: max(packed.chunks[d]))
        if not packed.shard_axes[longest] and packed.shape[longest] >= packed.shape[0]:
            goal = Shard(longest)
    placements = tuple(goal if m in cut else p for m, p in enumerate(packed.placements))
    chunks = list(packed.chunks)
    chunks[0] = (packed.shape[0],)
    if isinstance(goal, Shard):
        d, n = goal.dim, packed.shape[goal.dim]
        parts = -(-n // packed.shape[0])
        chunks[d] = tuple(min(parts, max(0, n - i * parts)) for i in range(packed.shape[0]))
    return packed.replace(placements=placements, chunks=tuple(chunks))


@lru_cache(4096)
def _result_layout(gathered: Layout, axes: Axes, dtype: Dtype, keepdims: bool) -> Layout:
    """The layout of the combined parts: the dims of the packed array without its first and its last."""
    ndim = gathered.ndim - 2 + (len(axes) if keepdims else 0)
    places = [d for d in range(ndim) if not (keepdims and d in axes)]
    shape = [1] * ndim
    chunks: list[tuple[int, ...]] = [(1,)] * ndim
    for d, n, c in zip(places, gathered.shape[1:-1], gathered.chunks[1:-1], strict=True):
        shape[d], chunks[d] = n, c
    placements = tuple(Shard(places[p.dim - 1]) if isinstance(p, Shard) else p for p in gathered.placements)
    return Layout(gathered.mesh, placements, tuple(shape), dtype, tuple(chunks))


@lru_cache(4096)
def _counts(layout: Layout, cut: Axes, axes: Axes) -> tuple[int, ...]:
    """Elements reduced in each part, in the order of the parts."""
    coord = [0] * layout.mesh.ndim
    counts = []
    for at in itertools.product(*(range(layout.mesh.shape[m]) for m in cut)):
        for m, i in zip(cut, at, strict=True):
            coord[m] = i
        local = layout.local_shape(tuple(coord))
        counts.append(math.prod(local[d] for d in axes))
    return tuple(counts)


def _combined(packed: Array, summary: Summary, counts: tuple[int, ...], axes: Axes) -> Array:
    filled = [i for i, n in enumerate(counts) if n]
    packed = packed if len(filled) == len(counts) else packed[filled]
    arrays = []
    start = 0
    for dtype in summary.dtypes:
        column = np.ascontiguousarray(packed[..., start : start + dtype.itemsize])
        arrays.append(column.view(dtype)[..., 0])
        start += dtype.itemsize
    result = summary.combine(*arrays, counts=tuple(counts[i] for i in filled), **summary.kwargs)
    return np.expand_dims(result, axes) if axes else result
