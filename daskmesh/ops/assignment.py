"""Assignment: ``x[key] = value`` puts new contents behind the same handle; layout, shape and dtype stay.

Each rank copies its local array and writes into it what the key selects of its own box, so nothing of `x` moves. The value comes
to where it is written: cut as the selection is, or picked for the elements of an integer array.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from daskmesh.dtensor import DTensor, implements
from daskmesh.eager import index_parts
from daskmesh.graph import Local, Node, plain
from daskmesh.layout import Chunks, Coord, Layout
from daskmesh.moves import moved
from daskmesh.ops.cells import Cells, cells_of, flat_of_cells
from daskmesh.ops.gathers import fillable, laid_out, placed, recut, refuse_plain
from daskmesh.ops.keys import Key, Steps, forward, mask_alone, parse, parts_of
from daskmesh.ops.picks import gathered, index_layout
from daskmesh.placement import Placement, Replicate, Shard

__all__: list[str] = []

Array = Any
Shape = tuple[int, ...]
_np: Any = np


@implements(operator.setitem)
def setitem(x: DTensor, key: Any, value: Any) -> None:
    """``x[key] = value`` with NumPy's rules: the value is broadcast and cast; of repeated indices the last wins.

    **Communication**: none of `x`. A DTensor value is brought to the ranks that it is written to; a mask is cut as `x` is;
    indices that are a DTensor, and the value that belongs to them, go to every rank.
    """
    if isinstance(value, DTensor) and value.process_mesh != x.process_mesh:
        raise ValueError(f"x[key] = value: x lies on {x.process_mesh!r}, the value on {value.process_mesh!r}; reshard it first")
    value = _cast(value, x.dtype)
    base = fillable(x)
    mask = mask_alone(x, key)
    if mask is not None and mask.ndim and value.ndim <= x.ndim - mask.ndim:
        x._rebind(_under_mask(base, mask, value))
        return
    scalar = isinstance(key, (bool, np.bool_)) or (getattr(key, "dtype", None) == np.bool_ and np.ndim(key) == 0)
    if scalar and (x.ndim == 0 or (isinstance(key, DTensor) and value.ndim == 0)):
        x._rebind(_np.where(key, value, base))
        return
    k = parse(base, (_positions(mask) if mask is not None else key))
    value = _shaped(value, k)
    if not k.arrays:
        x._rebind(_sliced_in(base, k, value))
    elif any(isinstance(a, DTensor) for a in k.arrays.values()):
        x._rebind(_by_values(base, k, value))
    else:
        x._rebind(_picked_in(base, k, value))


def _cast(value: Any, dtype: np.dtype[Any]) -> Any:
    """The value in the dtype of what it is written to, with NumPy's own complaints about scalars that do not fit."""
    if isinstance(value, DTensor) or (hasattr(value, "dtype") and hasattr(value, "astype") and np.ndim(value)):
        return value if value.dtype == dtype else value.astype(dtype)
    array = np.asarray(value)
    out = np.empty(array.shape, dtype)
    out[...] = value
    return out


def _positions(mask: DTensor) -> tuple[Any, ...]:
    """Where a mask holds, on the client: each of these elements gets its own element of the value."""
    return tuple(np.asarray(a) for a in _np.nonzero(mask))


def _shaped(value: Any, k: Key) -> Any:
    """The value with as many dims as ``x[key]``, each of that size or 1."""
    shape = k.shape
    if value.ndim > len(shape):
        extra = value.ndim - len(shape)
        if any(n != 1 for n in value.shape[:extra]):
            raise ValueError(f"could not broadcast input array from shape {value.shape} into shape {shape}")
        value = _np.reshape(value, value.shape[extra:])
    try:
        fits = np.broadcast_shapes(value.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"could not broadcast input array from shape {value.shape} into shape {shape}")
    return _np.reshape(value, (1,) * (len(shape) - value.ndim) + value.shape)


def _without_new(value: Any, k: Key) -> Any:
    """The value without the dims that the key adds, which have size 1."""
    kept: list[int] = []
    at = 0
    for o in k.order:
        width = len(k.picked_shape) if o == "picked" else 1
        kept.extend(range(at, at + width) if o is not None else ())
        at += width
    if len(kept) == value.ndim:
        return value
    return _np.reshape(value, tuple(value.shape[d] for d in kept))


def _turned(value: Any, dims: Sequence[int]) -> Any:
    """The value read backwards along some dims where it has more than one element."""
    dims = [d for d in dims if value.shape[d] > 1]
    return _np.flip(value, dims) if dims else value


def _cut_like(value: Any, selection: Layout, shared: Sequence[int] = ()) -> Layout:
    """The layout in which a value is written to a selection: cut as that is, but along dims where one element serves all."""
    return _cut_alike(value.shape, selection, tuple(shared))


@lru_cache(1024)
def _cut_alike(shape: Shape, selection: Layout, shared: Shape) -> Layout:
    broad = {d for d, (n, s) in enumerate(zip(shape, selection.shape, strict=True)) if n == 1 and s != 1} | set(shared)
    placements: list[Placement] = [
        Replicate() if isinstance(p, Shard) and p.dim in broad else p for p in selection.placements
    ]
    chunks: Chunks = tuple((n,) if d in broad else selection.chunks[d] for d, n in enumerate(shape))
    return laid_out(selection, placements, chunks)


# -- slices and integers ----------------------------------------------------------------------------------------------


def _sliced_in(x: DTensor, k: Key, value: Any) -> DTensor:
    layout = x.layout
    steps = k.steps | {d: Steps(i, 1, 1) for d, i in k.ints.items()}
    value = _without_new(value, k)
    value = _turned(value, [i for i, d in enumerate(k.steps) if k.steps[d].step < 0])
    sizes = iter(value.shape)
    value = _np.reshape(value, tuple(1 if d in k.ints else next(sizes) for d in range(x.ndim)))
    selection, parts = _sliced(layout, tuple(steps.items()))
    world = x._node.world
    node = placed(value, _cut_like(value, selection), world, "assignment: the value goes to where it is written")
    return DTensor(Local(layout, world, _write_slices, (x._node, node), {"layout": layout, "parts": parts}, located=True))


@lru_cache(1024)
def _sliced(layout: Layout, steps: tuple[tuple[int, Steps], ...]) -> tuple[Layout, dict[int, tuple[slice, ...]]]:
    """The layout of a selection by slices, and what each part of a dim holds of it."""
    parts = {d: parts_of(layout, d, forward(s)) for d, s in steps}
    return recut(layout, {d: tuple(map(_length, parts[d], layout.chunks[d])) for d, _ in steps}), parts


def _length(s: slice, n: int) -> int:
    return len(range(*s.indices(n)))


def _write_slices(coord: Coord, local: Array, value: Array, layout: Layout, parts: Mapping[int, tuple[slice, ...]]) -> Array:
    at = layout.part_index(coord)
    out = plain(local).copy()
    out[tuple(parts[d][at[d]] for d in range(local.ndim))] = value
    return out


# -- integer arrays ---------------------------------------------------------------------------------------------------


def _picked_last(value: Any, k: Key) -> Any:
    """The value as (elements picked, sliced dims in order), elements in row-major order; 1 where one serves all."""
    if value.size == 1:
        return _np.reshape(value, (1,) * (1 + len(k.steps)))
    value = _without_new(value, k)
    new, at = len(k.picked_shape), k.place
    value = _np.moveaxis(value, range(at, at + new), range(new)) if new else _np.reshape(value, (1, *value.shape))
    if new:
        alike = all(n == 1 for n in value.shape[:new])
        if not alike:
            value = _np.broadcast_to(value, (*k.picked_shape, *value.shape[new:]))
        count = 1 if alike else math.prod(k.picked_shape)
        value = _np.reshape(value, (count, *value.shape[new:]))
    return _turned(value, [1 + i for i, d in enumerate(k.steps) if k.steps[d].step < 0])


@lru_cache(1024)
def _selected(
    layout: Layout, steps: tuple[tuple[int, Steps], ...], first: Shape, axes: Shape
) -> tuple[Layout, dict[int, tuple[slice, ...]]]:
    """The layout of (elements picked, sliced dims), and the parts of the sliced dims."""
    parts = {d: parts_of(layout, d, forward(s)) for d, s in steps}
    chunks = [tuple(_length(s, n) for s, n in zip(parts[d], layout.chunks[d], strict=True)) for d, _ in steps]
    places = {d: 1 + i for i, (d, _) in enumerate(steps)}
    placements: list[Placement] = []
    for m, p in enumerate(layout.placements):
        if isinstance(p, Shard):
            placements.append(Shard(0) if m in axes else Shard(places[p.dim]))
        else:
            placements.append(p)
    return laid_out(layout, placements, (first, *chunks)), parts


def _picked_in(x: DTensor, k: Key, value: Any) -> DTensor:
    layout, world = x.layout, x._node.world
    dims = tuple(k.arrays)
    arrays = list(k.arrays.values())
    cells = cells_of(layout, dims, [a.reshape(-1) for a in (arrays if len(arrays) == 1 else np.broadcast_arrays(*arrays))])

    def written() -> list[Array]:  # later elements of a cell are written later
        return flat_of_cells(layout, dims, cells, cells.elements)

    where = index_parts(index_layout(layout, cells.axes, cells.counts), written, world)
    selection, parts = _selected(layout, tuple(k.steps.items()), cells.counts, cells.axes)
    node = _brought(_picked_last(value, k), selection, cells, world)
    extra = {"layout": layout, "parts": parts, "dims": dims}
    return DTensor(Local(layout, world, _write_picked, (x._node, node, where), extra, located=True))


def _brought(value: Any, selection: Layout, cells: Cells, world: str) -> Node:
    """The value as the selection is cut: every cell gets the elements that are written there, in order."""
    why = "assignment: the value goes to where it is written"
    if value.shape[0] == 1 and selection.shape[0] != 1:
        return placed(value, _cut_like(value, selection), world, why)
    order = cells.order
    if not isinstance(value, DTensor):
        value = value[order]
        return placed(value, _cut_like(value, selection), world, why)
    if not cells.axes:
        value = value if np.array_equal(order, np.arange(len(order))) else value[order]
        return placed(value, _cut_like(value, selection), world, why)
    broad = _cut_like(value, selection)
    even = recut(broad, {0: _even(value.shape[0], len(broad.chunks[0]))})
    base = DTensor(moved(value._node, even, why))
    wanted = cells_of(even, (0,), [order])
    return gathered(base, (0,), wanted, selection.chunks[0], why=why)._node


def _even(n: int, parts: int) -> Shape:
    each, more = divmod(n, parts)
    return tuple(each + (i < more) for i in range(parts))


def _write_picked(
    coord: Coord, local: Array, value: Array, flat: Array, layout: Layout, parts: Mapping[int, tuple[slice, ...]], dims: Shape
) -> Array:
    at = layout.part_index(coord)
    out = plain(local).copy()
    index = np.unravel_index(flat, tuple(local.shape[d] for d in dims)) if len(dims) > 1 and len(flat) else (flat,) * len(dims)
    front = np.moveaxis(out, dims, range(len(dims)))
    rest = tuple(parts[d][at[d]] for d in range(local.ndim) if d not in dims)
    front[(*(slice(None),) * len(dims), *rest)][index] = value
    return out


def _by_values(x: DTensor, k: Key, value: Any) -> DTensor:
    """Indices that are known when they are used: every rank looks at all of them, and writes what falls into its box."""
    layout, world = x.layout, x._node.world
    dims = tuple(k.arrays)
    shape = k.picked_shape
    axes = tuple(sorted(m for d in dims for m in layout.shard_axes[d]))
    why = "assignment: indices, and what belongs to them, go to every rank"
    nodes = []
    for a in k.arrays.values():
        a = _np.reshape(_np.broadcast_to(a.astype(np.int64), shape), (-1,))
        nodes.append(placed(a, index_layout(layout, (), (math.prod(shape),)), world, why))
    value = _picked_last(value, k)
    selection, parts = _selected(layout, tuple(k.steps.items()), (math.prod(shape),), axes)
    whole: list[Placement] = [Replicate() if m in axes else p for m, p in enumerate(selection.placements)]
    selection = laid_out(selection, whole, selection.chunks)
    node = placed(value, _cut_like(value, selection), world, why)
    extra = {"layout": layout, "parts": parts, "dims": dims}
    return DTensor(Local(layout, world, _write_by_values, (x._node, node, *nodes), extra, located=True))


def _write_by_values(
    coord: Coord, local: Array, value: Array, *index: Array, layout: Layout, parts: Mapping[int, tuple[slice, ...]], dims: Shape
) -> Array:
    box = layout.box(coord)
    inside = np.ones(index[0].shape, bool)
    within = []
    for d, at in zip(dims, index, strict=True):
        n = layout.shape[d]
        bad = (at < -n) | (at >= n)
        if bad.any():
            raise IndexError(f"index {int(at[bad][0])} is out of bounds for axis {d} with size {n}")
        at = np.where(at < 0, at + n, at) - box[d].start
        inside &= (at >= 0) & (at < local.shape[d])
        within.append(at)
    out = plain(local).copy()
    place = layout.part_index(coord)
    front = np.moveaxis(out, dims, range(len(dims)))
    rest = tuple(parts[d][place[d]] for d in range(local.ndim) if d not in dims)
    picked = tuple(at[inside] for at in within)
    front[(*(slice(None),) * len(dims), *rest)][picked] = value if value.shape[0] == 1 != len(inside) else value[inside]
    return out


# -- masks ------------------------------------------------------------------------------------------------------------


def _under_mask(x: DTensor, mask: DTensor, value: Any) -> DTensor:
    """One value for all elements that a mask of the first dims selects."""
    layout, world = x.layout, x._node.world
    if mask.shape != x.shape[: mask.ndim]:
        raise IndexError(f"a mask of shape {mask.shape} does not fit the first dims of an array of shape {x.shape}")
    n = mask.ndim
    cuts: list[Placement] = [p if isinstance(p, Shard) and p.dim < n else Replicate() for p in layout.placements]
    held = moved(mask._node, laid_out(layout, cuts, layout.chunks[:n], np.bool_), "a mask is cut as the array")
    wide = _np.reshape(value, (1,) * (x.ndim - value.ndim) + value.shape)
    if any(v not in (1, s) for v, s in zip(wide.shape, x.shape, strict=True)):
        raise ValueError(f"could not broadcast input array from shape {value.shape} into the rows {x.shape[n:]} under the mask")
    node = placed(wide, _cut_like(wide, layout, range(n)), world, "assignment: the value goes to where it is written")
    return DTensor(Local(layout, world, _write_masked, (x._node, held, node), {"n": n}))


def _write_masked(local: Array, mask: Array, value: Array, n: int) -> Array:
    out = plain(local).copy()
    out[mask] = value[(0,) * n]
    return out


# -- NumPy's functions that write into their first argument -----------------------------------------------------------


@implements(np.copyto)
def copyto(dst: DTensor, src: Any, casting: Any = "same_kind", where: Any = True) -> None:
    """``np.copyto``: other contents behind the handle `dst`."""
    if not isinstance(dst, DTensor):
        raise TypeError(f"np.copyto(dst, ...): dst is a {type(dst).__name__}; a DTensor cannot be written into it")
    given = src.dtype if hasattr(src, "dtype") else np.asarray(src).dtype
    if not np.can_cast(given, dst.dtype, casting):
        raise TypeError(f"np.copyto: cannot cast {given} to {dst.dtype} under the rule {casting!r}")
    if where is True:
        setitem(dst, Ellipsis, src)
    else:
        putmask(dst, where, _np.broadcast_to(src, dst.shape))


@implements(np.putmask)
def putmask(a: DTensor, mask: Any, values: Any) -> None:
    """``np.putmask`` with one value, or as many as `a` has elements."""
    refuse_plain(a, "putmask")
    values = values if isinstance(values, DTensor) else np.asarray(values)
    if values.size != 1 and values.shape != a.shape:
        raise ValueError(f"np.putmask: values of shape {values.shape} for an array of shape {a.shape}; give one, or one each")
    a._rebind(_np.where(mask, _np.reshape(values, ()) if values.size == 1 else values, a).astype(a.dtype))


@implements(np.put_along_axis)
def put_along_axis(arr: DTensor, indices: Any, values: Any, axis: int | None) -> None:
    """``np.put_along_axis``: other contents behind the handle `arr`."""
    refuse_plain(arr, "put_along_axis")
    if axis is None:
        flat = _np.ravel(arr)
        setitem(flat, indices, values)
        arr._rebind(_np.reshape(flat, arr.shape))
        return
    d = axis % arr.ndim
    shape = tuple(indices.shape)
    key = tuple(
        indices if i == d else np.arange(n).reshape((-1,) + (1,) * (arr.ndim - 1 - i)) for i, n in enumerate(arr.shape)
    )
    if len(shape) != arr.ndim:
        raise ValueError("`indices` and `arr` must have the same number of dimensions")
    setitem(arr, key, values)


@implements(np.put)
def put(a: DTensor, ind: Any, v: Any, mode: str = "raise") -> None:
    """``np.put``: other contents behind the handle `a`."""
    refuse_plain(a, "put")
    if mode not in ("raise", "wrap", "clip"):
        raise ValueError(f"np.put(mode={mode!r}): mode must be one of 'raise', 'wrap', 'clip'")
    flat = _np.ravel(a)
    index = ind if isinstance(ind, DTensor) else np.asarray(ind).reshape(-1)
    if mode != "raise":
        index = index % flat.size if mode == "wrap" else _np.clip(index, 0, flat.size - 1)
    setitem(flat, index, v if isinstance(v, DTensor) else np.resize(v, index.shape))
    a._rebind(_np.reshape(flat, a.shape))


@implements(np.fill_diagonal)
def fill_diagonal(a: DTensor, val: Any, wrap: bool = False) -> None:
    """``np.fill_diagonal``: other contents behind the handle `a`."""
    if a.ndim < 2:
        raise ValueError("array must be at least 2-d")
    if wrap:
        raise TypeError("np.fill_diagonal(wrap=True) is not defined on DTensors")
    if a.ndim > 2 and len(set(a.shape)) > 1:
        raise ValueError("All dimensions of input must be of equal length")
    at = np.arange(min(a.shape))
    setitem(a, (at,) * a.ndim, val if isinstance(val, DTensor) or np.ndim(val) == 0 else np.resize(val, at.shape))
