"""The adjoint of indexing: a cotangent of ``x[key]`` put back into zeros of the layout of `x`.

Slices cut every rank's part into a run of the result, so the cotangent is laid out by those runs and nothing else moves.
Integer arrays scatter: where the cotangent is cut along the dims of the indices, each rank adds up its own and the result is
Partial(sum); where it is not, a rank adds what falls into its box::

    x (V, d)  ids (b,)        cotangent of x[ids]        result
    any       cut over dp     (b, d) cut over dp         Partial(sum) over dp
    Shard(0)  Replicate       Replicate over tp          Shard(0) over tp: ids outside the own rows are left out
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from autograd.extend import defvjp
from autograd.tracer import getval

from daskmesh.algebra import Flow
from daskmesh.cotangents import relaid, whole
from daskmesh.dtensor import DTensor
from daskmesh.layout import Coord, Layout
from daskmesh.ops.kinds import operand, prepare
from daskmesh.placement import Partial, Placement, Replicate, Shard
from daskmesh.routes import primitive, refuse
from daskmesh.rules import Signature

__all__ = ["item"]

Array = Any


@primitive
def item(x: DTensor, key: Any) -> DTensor:
    """``x[key]``."""
    return x[key]


defvjp(item, lambda ans, x, key: lambda g: _put_back(g, key, getval(x).layout))


def _put_back(g: Any, key: Any, layout: Layout) -> Any:
    """The adjoint of ``x[key]`` for an `x` of a layout."""
    keys = _spelled_out(key, layout)
    arrays = [k for k in keys if _is_array(k)]
    if not arrays:
        return _basic(g, keys, layout)
    if None in [k for k in keys if not _is_array(k)]:
        refuse("x[key] with both index arrays and np.newaxis")
    keys = [np.asarray(k) if isinstance(k, (int, np.integer)) else k for k in keys]
    slices: list[Any] = [slice(None) if _is_array(k) else k for k in keys]
    sizes = tuple(len(range(*k.indices(n))) for k, n in zip(slices, layout.shape, strict=True))
    inner = layout if sizes == layout.shape else _sliced(layout, slices)
    g = _scattered_back(g, keys, inner)
    return g if inner is layout else _basic(g, slices, layout)


def _is_array(k: Any) -> bool:
    return isinstance(k, (np.ndarray, DTensor))


def _spelled_out(key: Any, layout: Layout) -> list[Any]:
    """One entry per tensor dim, and None for each new dim: masks as index arrays, no Ellipsis."""
    given: list[Any] = []
    for k in key if isinstance(key, tuple) else (key,):
        k = getval(k)
        if isinstance(k, (list, range)):
            k = np.asarray(k, dtype=None if len(k) else np.intp)
        if isinstance(k, DTensor) and k.dtype == np.bool_:
            refuse("x[mask] with a mask that is a DTensor")
        given.extend(np.nonzero(k) if isinstance(k, np.ndarray) and k.dtype == np.bool_ else (k,))
    taken = sum(k is not None and k is not Ellipsis for k in given)
    at = next((i for i, k in enumerate(given) if k is Ellipsis), len(given))
    given[at : at + 1] = [slice(None)] * (layout.ndim - taken)
    return given


# -- slices -------------------------------------------------------------------------------------------------------------


def _basic(g: Any, keys: Sequence[Any], layout: Layout) -> Any:
    """Back from ints, slices and new dims."""
    new = tuple(i for i, k in enumerate(k for k in keys if not isinstance(k, (int, np.integer))) if k is None)
    g = np.squeeze(g, new) if new else g
    kept = [k for k in keys if k is not None]
    lost = tuple(d for d, k in enumerate(kept) if isinstance(k, (int, np.integer)))
    g = np.expand_dims(g, lost) if lost else g
    cuts: list[range] = []
    backwards = []
    for d, (k, n) in enumerate(zip(kept, layout.shape, strict=True)):
        cut = range(n)[k] if isinstance(k, slice) else range(k % n, k % n + 1)
        if cut.step < 0:
            backwards.append(d)
            cut = cut[::-1]
        cuts.append(cut)
    g = np.flip(g, tuple(backwards)) if backwards else g
    return _embedded(g, tuple(cuts), whole(layout))


@primitive
def _embedded(g: DTensor, cuts: tuple[range, ...], layout: Layout) -> DTensor:
    """Zeros with `g` at the product of some ranges."""
    target = layout.replace(dtype=g.dtype)
    parts = tuple(_counts(cut, ends) for cut, ends in zip(cuts, layout.offsets, strict=True))
    source = target.replace(shape=g.shape, chunks=parts)
    laid = relaid(g, source)
    labels: tuple[Any, ...] = tuple(range(layout.ndim))
    ready = prepare(Signature((labels,), labels, None), (laid,), g.dtype)
    return ready.local(_embed, {"layout": target, "cuts": cuts}, located=True, layout=target)


defvjp(_embedded, lambda ans, g, cuts, layout: lambda gg: item(gg, tuple(map(_as_slice, cuts))))


def _as_slice(cut: range) -> slice:
    return slice(cut.start, cut.stop, cut.step)


def _counts(cut: range, ends: Sequence[int]) -> tuple[int, ...]:
    """How many elements of a range lie in each part."""
    marks = [bisect_left(cut, end) for end in ends]
    return tuple(b - a for a, b in pairwise(marks))


def _embed(coord: Coord, g: Array, layout: Layout, cuts: tuple[range, ...]) -> Array:
    out = np.zeros_like(g, shape=layout.local_shape(coord))
    at = []
    for cut, box, n in zip(cuts, layout.box(coord), g.shape, strict=True):
        first = cut[bisect_left(cut, box.start)] - box.start if n else 0
        at.append(slice(first, first + (n - 1) * cut.step + 1 if n else 0, cut.step))
    out[tuple(at)] = g
    return out


def _sliced(layout: Layout, slices: Sequence[slice]) -> Layout:
    """The layout of what slices leave: the runs of every part."""
    cuts = [range(n)[k] for k, n in zip(slices, layout.shape, strict=True)]
    parts = tuple(_counts(cut if cut.step > 0 else cut[::-1], ends) for cut, ends in zip(cuts, layout.offsets, strict=True))
    return layout.replace(shape=tuple(map(sum, parts)), chunks=parts)


# -- index arrays -------------------------------------------------------------------------------------------------------


def _scattered_back(g: Any, keys: Sequence[Any], layout: Layout) -> Any:
    """Back from index arrays and whole dims. The dims of the indices come first in `g`, or where arrays side by side are."""
    dims = tuple(d for d, k in enumerate(keys) if _is_array(k))
    arrays = [keys[d] for d in dims]
    width = max(a.ndim for a in arrays)
    first = dims[0] if dims == tuple(range(dims[0], dims[0] + len(dims))) else 0
    if first:
        g = np.moveaxis(g, tuple(range(first, first + width)), tuple(range(width)))
    return _scattered(g, whole(layout), dims, *arrays)


@primitive
def _scattered(g: DTensor, layout: Layout, dims: tuple[int, ...], *indices: Any) -> DTensor:
    """Zeros with ``g[i]`` added at ``indices[i]``; the dims of the indices lead in `g`."""
    width = max(a.ndim for a in indices)
    lead = tuple(f"b{i}" for i in range(width))
    kept = [d for d in range(layout.ndim) if d not in dims]
    labels: tuple[Any, ...] = (*lead, *kept)
    shape = g.shape[:width]
    each = [tuple(x if n == s else None for x, n, s in zip(lead[width - a.ndim :], a.shape, shape[width - a.ndim :], strict=True))
            for a in indices]  # fmt: skip
    flow = Flow(("sum", *(None,) * len(indices)), "sum", "ring")
    extents = tuple((d, layout.shape[d]) for d in dims)
    signature = Signature((labels, *each), tuple(range(layout.ndim)), "sum", (flow,), extents=extents)
    target = _scatter_layout(operand(g), layout, kept, width, dims)
    ready = prepare(signature, (g, *indices), g.dtype, target)
    return ready.local(_scatter, {"layout": ready.decision.output, "dims": dims}, located=True)


def _scatter_layout(g: Any, layout: Layout, kept: Sequence[int], width: int, dims: tuple[int, ...]) -> Layout:
    placements: list[Placement] = []
    for p, own in zip(g.placements, layout.placements, strict=True):
        if isinstance(p, Shard):
            placements.append(Partial() if p.dim < width else Shard(kept[p.dim - width]))
        elif isinstance(p, Partial):
            placements.append(p if p.op == "sum" else Replicate())
        else:
            placements.append(own if isinstance(own, Shard) and own.dim in dims else Replicate())
    frame = layout.replace(placements=tuple(placements), dtype=g.dtype)
    chunks = list(layout.chunks)
    for d in range(layout.ndim):
        if frame.shard_axes[d] != layout.shard_axes[d]:
            chunks[d] = g.chunks[width + kept.index(d)] if d in kept and frame.shard_axes[d] else (layout.shape[d],)
    return frame.replace(chunks=tuple(chunks))


def _scatter(coord: Coord, g: Array, *indices: Array, layout: Layout, dims: tuple[int, ...]) -> Array:
    shape = layout.local_shape(coord)
    box = layout.box(coord)
    out = np.zeros_like(g, shape=(*(shape[d] for d in dims), *(n for d, n in enumerate(shape) if d not in dims)))
    width = g.ndim - (len(shape) - len(dims))
    at = []
    inside: Any = np.ones(g.shape[:width], bool)
    for d, index in zip(dims, indices, strict=True):
        own = np.where(index < 0, index + layout.shape[d], index) - box[d].start
        inside = inside & (own >= 0) & (own < shape[d])
        at.append(np.broadcast_to(own, g.shape[:width]))
    np.add.at(out, tuple(a[inside] for a in at), g[inside])
    return np.ascontiguousarray(np.moveaxis(out, tuple(range(len(dims))), dims))


def _gathered(gg: Any, layout: Layout, dims: tuple[int, ...], indices: Sequence[Any]) -> Any:
    """The adjoint of the scatter: the elements at the indices, their dims first."""
    key: list[Any] = [slice(None)] * layout.ndim
    for d, index in zip(dims, indices, strict=True):
        key[d] = index
    g: Any = item(gg, tuple(key))
    width = max(a.ndim for a in indices)
    first = dims[0] if dims == tuple(range(dims[0], dims[0] + len(dims))) else 0
    return np.moveaxis(g, tuple(range(first, first + width)), tuple(range(width))) if first else g


defvjp(_scattered, lambda ans, g, layout, dims, *indices: lambda gg: _gathered(gg, layout, dims, indices))
