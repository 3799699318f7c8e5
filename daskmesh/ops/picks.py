"""Elements picked by integer arrays, of dims that may be cut: packed where they lie, loaded once, put in order where wanted.

The dims that are picked count as one. Each element wanted lies with one *cell*: a coordinate along the mesh dims that cut them::

    x 0 1 2 | 3 4 5       x[[5, 0, 4, 1]]            wanted      5 0 | 4 1
                          packed by the cells        0 1 | 5 4
                          loaded by the new parts    0 5 | 1 4
                          put in order               5 0 | 4 1

Every element moves at most once to each rank that wants it, in one run per pair of ranks. Where the elements wanted come in the
order of the cells, as those of a mask do, each rank picks its own and nothing moves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from daskmesh.algebra import carried
from daskmesh.dtensor import DTensor
from daskmesh.eager import index_parts
from daskmesh.exchange import Exchange
from daskmesh.graph import Local, Node
from daskmesh.late import Late
from daskmesh.layout import Coord, Layout
from daskmesh.moves import fits, moved, reduced, refuse_beyond_memory
from daskmesh.ops.cells import Cells, cells_of, cuts_of, flat_of_cells, routes
from daskmesh.ops.gathers import laid_out, placed, renumbered, split_over
from daskmesh.ops.kinds import operand, record
from daskmesh.placement import Partial, Placement, Replicate, Shard
from daskmesh.regather import Regather
from daskmesh.rules import Signature, elementwise

__all__ = ["Frame", "gathered", "index_layout", "picked", "picked_from_parts", "picked_whole"]

Array = Any
Shape = tuple[int, ...]


def picked(x: DTensor, dims: Sequence[int], index: Sequence[Array], at: int, why: str) -> DTensor:
    """``x`` at NumPy arrays of non-negative indices along `dims`; the dims of the index arrays stand at dim `at` of the result.

    The arrays may not be written to any more.

    **Communication**: none if no picked dim is cut, or the elements come in the order of the ranks that hold them; else each rank
    loads the elements that it lacks of its part of the result, once.
    """
    layout = x.layout
    if not any(layout.shard_axes[d] for d in dims):
        return picked_whole(x, dims, index, at)
    arrays = index if len(index) == 1 else np.broadcast_arrays(*index)
    shape = arrays[0].shape
    cells = cells_of(layout, dims, [a.reshape(-1) for a in arrays])
    cut = next((j for j, n in enumerate(shape) if n != 1), 0)
    inner = math.prod(shape[cut + 1 :])
    stays = cells.ordered and (inner < 2 or not any(n % inner for n in cells.counts))
    parts = cells.counts if stays else split_over(shape[cut], cells.axes, layout.mesh, inner)
    return gathered(x, dims, cells, parts, Frame(shape, cut, at), why)


def picked_whole(x: DTensor, dims: Sequence[int], index: Sequence[Any], at: int) -> DTensor:
    """As `picked`, by arrays, plain or not, of indices that are looked at when they are used; picked dims may not be cut.

    **Communication**: an all-gather of `x` along picked dims that are cut; none if none is.
    """
    shapes = tuple(operand(i).shape for i in index)
    signature = _whole_signature(x.ndim, tuple(dims), shapes, at)
    return record(_take, signature, (x, *index), x.dtype, {"dims": tuple(dims), "at": at})


@lru_cache(1024)
def _whole_signature(ndim: int, dims: Shape, shapes: tuple[Shape, ...], at: int) -> Signature:
    labels = elementwise(shapes)
    rename = {k: f"index {k}" for k in range(len(labels.output))}
    given = [tuple(None if k is None else rename[int(k)] for k in op) for op in labels.operands]
    own = tuple(f"picked {d}" if d in dims else d for d in range(ndim))
    rest = [d for d in range(ndim) if d not in dims]
    held = {k for op in given for k in op}
    new = [rename[int(k)] if k is not None and rename[int(k)] in held else None for k in labels.output]
    flows = tuple(f._replace(inputs=f.inputs + (None,) * len(shapes)) for f in carried(1))
    whole = frozenset(k for k in own if isinstance(k, str))
    return Signature((own, *given), (*rest[:at], *new, *rest[at:]), None, flows, whole)


def _take(local: Array, *index: Array, dims: tuple[int, ...], at: int) -> Array:
    if len(dims) == 1 and dims[0] == at:
        return np.take(local, index[0], axis=at)
    front = np.moveaxis(local, dims, range(len(dims)))[index]
    new = np.broadcast(*index).ndim
    return np.moveaxis(front, range(new), range(at, at + new))


def picked_from_parts(x: DTensor, dims: Sequence[int], index: Sequence[Any], at: int) -> DTensor:
    """As `picked`, by arrays of which at least one is a DTensor.

    Either the picked dims are gathered, or every rank picks what it holds and the results are joined: the bits of an element come
    from the one rank that has it, the others add zeros. Whichever moves less.

    **Communication**: none if no picked dim is cut; else an all-gather of those, or a reduce-scatter of the result.
    """
    shape = np.broadcast_shapes(*(operand(i).shape for i in index))
    rest = [n for d, n in enumerate(x.shape) if d not in dims]
    cut = any(x.layout.shard_axes[d] for d in dims)
    if not cut or math.prod(shape) * math.prod(rest) >= x.size:
        return picked_whole(x, dims, index, at)
    x = DTensor(moved(x._node, x.layout.replace(placements=tuple(reduced(x.placements))), "indices that are a DTensor"))
    layout, world = x.layout, x._node.world
    axes = cuts_of(layout, tuple(dims)).axes
    why = "indices that are a DTensor: every rank picks what it holds"
    nodes = []
    for i in index:
        i = i if isinstance(i, DTensor) else np.asarray(i)
        whole: list[Placement] = [Replicate()] * layout.mesh.ndim
        nodes.append(placed(i, laid_out(layout, whole, tuple((n,) for n in i.shape), i.dtype), world, why))
    kept = [d for d in range(x.ndim) if d not in dims]
    places = {d: i if i < at else i + len(shape) for i, d in enumerate(kept)}
    old = [layout.chunks[d] for d in kept]
    bits = _bits(x.dtype)
    chunks = (*old[:at], *((n,) for n in shape), *old[at:], (x.dtype.itemsize // bits.itemsize,))
    free = renumbered(layout.placements, places)
    terms = laid_out(layout, [Partial() if m in axes else p for m, p in enumerate(free)], chunks, bits)
    extra = {"layout": layout, "dims": tuple(dims), "at": at, "bits": bits}
    node: Node = Local(terms, world, _pick_mine, (x._node, *nodes), extra, located=True)
    node = moved(node, _shared_out(terms, axes, range(at, at + len(shape))), why)
    target = laid_out(layout, node.layout.placements, node.layout.chunks[:-1], x.dtype)
    return DTensor(Local(target, world, _from_bits, (node,), {"dtype": x.dtype}))


def _bits(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Unsigned integers that elements of a dtype can be seen as; adding zeros to them changes nothing, not even -0.0 or nan."""
    return np.dtype(f"u{dtype.itemsize}") if dtype.itemsize in (1, 2, 4, 8) else np.dtype(np.uint8)


def _shared_out(terms: Layout, axes: Sequence[int], new: range) -> Layout:
    """The terms summed, and cut along the longest picked dim if that is as long as there are ranks."""
    ranks = math.prod(terms.mesh.shape[m] for m in axes)
    longest = max(new, key=lambda d: terms.shape[d], default=None)
    goal: Placement = Replicate()
    chunks = list(terms.chunks)
    if longest is not None and terms.shape[longest] >= ranks:
        goal = Shard(longest)
        chunks[longest] = split_over(terms.shape[longest], axes, terms.mesh)
    return laid_out(terms, [goal if m in axes else p for m, p in enumerate(terms.placements)], tuple(chunks))


def _pick_mine(
    coord: Coord, local: Array, *index: Array, layout: Layout, dims: Shape, at: int, bits: np.dtype[Any]
) -> Array:
    """The elements that this rank holds, as bits; zeros where another one does."""
    box = layout.box(coord)
    arrays = np.broadcast_arrays(*index)
    inside = np.ones(arrays[0].shape, bool)
    within = []
    for d, i in zip(dims, arrays, strict=True):
        n = layout.shape[d]
        bad = (i < -n) | (i >= n)
        if bad.any():
            raise IndexError(f"index {int(i[bad].flat[0])} is out of bounds for axis {d} with size {n}")
        i = np.where(i < 0, i + n, i).astype(np.int64) - box[d].start
        inside &= (i >= 0) & (i < local.shape[d])
        within.append(i)
    front = np.moveaxis(local, dims, range(len(dims)))
    rest = front.shape[len(dims) :]
    out = np.zeros_like(front, shape=(*inside.shape, *rest, local.dtype.itemsize // bits.itemsize), dtype=bits)
    if inside.any():
        held = np.ascontiguousarray(front[tuple(i[inside] for i in within)])
        out[inside] = held[..., None].view(bits)
    return np.moveaxis(out, range(inside.ndim), range(at, at + inside.ndim))


def _from_bits(local: Array, dtype: np.dtype[Any]) -> Array:
    return np.ascontiguousarray(local).view(dtype)[..., 0]


class Frame(NamedTuple):
    """How the picked elements stand in the result: their shape, which dim of it is cut, and where it stands."""

    shape: Shape
    cut: int
    at: int


@lru_cache(1024)
def index_layout(layout: Layout, axes: Shape, sizes: Shape, dtype: Any = np.int64) -> Layout:
    """A dim cut by the cells into parts of these sizes; the other mesh dims hold copies."""
    placements: list[Placement] = [Shard(0) if m in axes else Replicate() for m in range(layout.mesh.ndim)]
    return laid_out(layout, placements, (sizes,), dtype)


def gathered(x: DTensor, dims: Sequence[int], cells: Cells, parts: Shape, frame: Frame | None = None, why: str = "") -> DTensor:
    """The elements of `cells`, the result being cut into parts of so many elements over the same mesh dims.

    Without a frame the elements make up dim 0.
    """
    layout, world, dims = x.layout, x._node.world, tuple(dims)
    frame = frame or Frame(cells.number.shape, 0, 0)
    target = _target(layout, cells.axes, dims, parts, frame)
    how = {"layout": target, "at": frame.at, "new": len(frame.shape)}
    if cells.ordered and cells.counts == parts:
        ends = [0, *itertools.accumulate(parts)]

        def chosen() -> list[Array]:
            return flat_of_cells(layout, dims, cells, [slice(a, b) for a, b in itertools.pairwise(ends)])

        index = index_parts(index_layout(layout, cells.axes, parts), chosen, world)
        return DTensor(Local(target, world, _pick_here, (x._node, index), {"dims": dims, **how}, located=True))
    source = x._node  # as it is now: `x` may be bound anew before anybody asks
    node = Late(target, world, _unpack, lambda: (_routed(source, dims, cells, parts, why), how), located=True)
    if not fits(math.prod(map(max, target.chunks)) * target.dtype.itemsize):  # no rank loads an element twice: most of it
        needed = node.args[0].layout
        share = max(math.prod(needed.local_shape(c)) for c in needed.coords()) * needed.dtype.itemsize
        refuse_beyond_memory(share, lambda: f"{why or 'picking'} of {x.shape} {x.dtype}")
    return DTensor(node)


def _routed(node: Node, dims: Shape, cells: Cells, parts: Shape, why: str) -> tuple[Node, Node]:
    """The elements that each new part needs, loaded, and the order in which they stand in it."""
    layout, world = node.layout, node.world
    rest = [d for d in range(layout.ndim) if d not in dims]
    packs, runs, order = routes(layout, dims, cells, [0, *itertools.accumulate(parts)])
    chunks = tuple(layout.chunks[d] for d in rest)
    placements = [Shard(0) if m in cells.axes else p for m, p in enumerate(renumbered(layout.placements, _places(rest, 1)))]
    sizes = tuple(map(len, packs))
    packed = laid_out(layout, placements, (sizes, *chunks))
    index = index_parts(index_layout(layout, cells.axes, sizes), packs, world)
    lying: Node = Local(packed, world, _pack, (node, index), {"dims": dims})
    needed = laid_out(layout, placements, (tuple(sum(b - a for a, b in r) for r in runs), *chunks))
    loaded = Exchange(lying, Regather(packed, needed, runs=(runs, *(None,) * len(rest))), why)
    return loaded, index_parts(index_layout(layout, cells.axes, tuple(map(len, order))), order, world)


def _places(rest: Sequence[int], start: int) -> dict[int, int]:
    return {d: start + i for i, d in enumerate(rest)}


@lru_cache(1024)
def _target(layout: Layout, axes: Shape, dims: Shape, parts: Shape, frame: Frame) -> Layout:
    shape, cut, at = frame
    rest = [d for d in range(layout.ndim) if d not in dims]
    new: list[Shape] = [(n,) for n in shape]
    inner = math.prod(shape[cut + 1 :])
    new[cut] = tuple(n // inner for n in parts) if inner else split_over(shape[cut], axes, layout.mesh)
    places = {d: i if i < at else i + len(shape) for i, d in enumerate(rest)}
    placements = [Shard(at + cut) if m in axes else p for m, p in enumerate(renumbered(layout.placements, places))]
    old = [layout.chunks[d] for d in rest]
    return laid_out(layout, placements, (*old[:at], *new, *old[at:]))


def _pack(local: Array, flat: Array, dims: tuple[int, ...]) -> Array:
    """Elements of a local array by flat indices over some dims; they make up dim 0."""
    if len(dims) == 1:
        return np.moveaxis(np.take(local, flat, axis=dims[0]), dims[0], 0)
    sizes = tuple(local.shape[d] for d in dims)
    front = np.moveaxis(local, dims, range(len(dims)))
    if not len(flat):
        return np.empty_like(front, shape=(0, *front.shape[len(dims) :]))
    return front[np.unravel_index(flat, sizes)]


def _pick_here(coord: Coord, local: Array, flat: Array, dims: tuple[int, ...], layout: Layout, at: int, new: int) -> Array:
    return _stood(_pack(local, flat, dims), coord, layout, at, new)


def _unpack(coord: Coord, loaded: Array, order: Array, layout: Layout, at: int, new: int) -> Array:
    return _stood(np.take(loaded, order, axis=0), coord, layout, at, new)


def _stood(elements: Array, coord: Coord, layout: Layout, at: int, new: int) -> Array:
    """Elements along dim 0, given the shape that they have in the result, and put at their place."""
    shape = layout.local_shape(coord)[at : at + new]
    return np.moveaxis(elements.reshape((*shape, *elements.shape[1:])), range(new), range(at, at + new))
