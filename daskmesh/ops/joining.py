"""Joining, splitting, repeating and turning: results whose dims are made of stretches of the operands' dims."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index, normalize_axis_tuple

from daskmesh.algebra import carried
from daskmesh.dtensor import DTensor, implements
from daskmesh.graph import Local
from daskmesh.layout import Coord, Layout
from daskmesh.ops.gathers import as_operand, laid_out, placed, recut, refuse_plain, regathered, split_over
from daskmesh.ops.kinds import operand, record
from daskmesh.placement import Replicate, Shard
from daskmesh.regather import Stretch
from daskmesh.rules import Dense, Signature

__all__: list[str] = []

Array = Any
_np: Any = np  # typed for arrays of its own, not for those that speak its protocols


# -- joining ----------------------------------------------------------------------------------------------------------


@implements(np.concatenate)
def concatenate(arrays: Sequence[Any], /, axis: int | None = 0, out: None = None, *, dtype: Any = None,
                casting: Any = "same_kind") -> DTensor:  # fmt: skip
    """Join arrays along a dim.

    **Communication**: none along a dim that no operand has cut. Else the joined dim is cut by the split rule and each rank
    loads what it lacks of each operand, once.
    """
    if out is not None:
        raise TypeError("np.concatenate(out=...): a DTensor is no buffer; write y = np.concatenate(...)")
    operands = [as_operand(x) for x in arrays]
    if axis is None:
        operands = [_np.ravel(x) for x in operands]
        axis = 0
    if any(x.ndim == 0 for x in operands):
        raise ValueError("zero-dimensional arrays cannot be concatenated")
    d, kind = _checked(tuple(map(operand, operands)), axis, None if dtype is None else np.dtype(dtype), casting)
    operands = [x if x.dtype == kind else x.astype(kind) for x in operands]
    facts = tuple(map(operand, operands))
    model = next(x for x in operands if isinstance(x, DTensor))
    if any(x.shard_axes[d] for x in facts if isinstance(x, Layout)):
        target, pieces = _pieces(facts, d)
        world, why = model._node.world, "concatenate: parts of the joined dim"
        nodes = [placed(x, piece, world, why) for x, piece in zip(operands, pieces, strict=True)]
        return DTensor(Local(target, world, _concatenate, nodes, {"axis": d}))
    signature = _joining(model.ndim, tuple(x.shape[d] for x in facts), d)
    return record(_concatenate, signature, operands, kind, {"axis": d})


@lru_cache(1024)
def _checked(facts: tuple[Layout | Dense, ...], axis: int, dtype: Any, casting: Any) -> tuple[int, np.dtype[Any]]:
    """The joined dim and the dtype of the result.

    Raises
    ------
    ValueError
        Shapes or meshes that do not fit.
    TypeError
        A cast that is not allowed.
    """
    d = normalize_axis_index(axis, len(facts[0].shape))
    _refuse_unequal(facts, d)
    kind = np.dtype(np.result_type(*(x.dtype for x in facts))) if dtype is None else dtype
    for x in facts:
        if not np.can_cast(x.dtype, kind, casting):
            raise TypeError(f"np.concatenate: cannot cast {x.dtype} to {kind} under the rule {casting!r}")
    return d, kind


def _refuse_unequal(facts: Sequence[Layout | Dense], d: int) -> None:
    first = facts[0].shape
    meshes = {x.mesh for x in facts if isinstance(x, Layout)}
    if len(meshes) > 1:
        raise ValueError(f"np.concatenate: the operands lie on different meshes {sorted(map(repr, meshes))}; reshard them first")
    for k, x in enumerate(facts):
        if len(x.shape) != len(first):
            raise ValueError(f"np.concatenate: operand 0 has {len(first)} dim(s), operand {k} has {len(x.shape)}")
        for i, (m, n) in enumerate(zip(first, x.shape, strict=True)):
            if i != d and m != n:
                raise ValueError(f"np.concatenate: dim {i} has size {m} in operand 0 and {n} in operand {k}; they must agree")


@lru_cache(1024)
def _joining(ndim: int, sizes: tuple[int, ...], d: int) -> Signature:
    """Joining along a dim that nobody has cut."""
    labels = tuple(tuple(f"joined {k}" if i == d else i for i in range(ndim)) for k in range(len(sizes)))
    output = tuple("joined" if i == d else i for i in range(ndim))
    return Signature(labels, output, None, carried(len(sizes)), frozenset(x[d] for x in labels), (("joined", sum(sizes)),))


@lru_cache(1024)
def _pieces(facts: tuple[Layout | Dense, ...], d: int) -> tuple[Layout, tuple[Layout, ...]]:
    """The joined dim is cut: the result's layout, and where every operand goes, to the ranks that hold its stretch of it."""
    tensors = [x for x in facts if isinstance(x, Layout)]
    model = max(tensors, key=lambda x: x.nbytes)
    cuts = next(x for x in (model, *tensors) if x.shard_axes[d])
    placements = []
    for m, p in enumerate(cuts.placements):
        alike = all(x.placements[m] == p for x in tensors) and len(tensors) == len(facts)
        placements.append(p if isinstance(p, Shard) or alike else Replicate())
    axes = [m for m, p in enumerate(placements) if p == Shard(d)]
    chunks = [c if cuts.shard_axes[i] else (n,) for i, (n, c) in enumerate(zip(cuts.shape, cuts.chunks, strict=True))]
    chunks[d] = split_over(sum(x.shape[d] for x in facts), axes, cuts.mesh)
    target = laid_out(cuts, placements, tuple(chunks))
    pieces = []
    start = 0
    for x in facts:
        stop = start + x.shape[d]
        sizes = tuple(max(0, min(stop, b) - max(start, a)) for a, b in itertools.pairwise(target.offsets[d]))
        pieces.append(recut(target, {d: sizes}))
        start = stop
    return target, tuple(pieces)


def _concatenate(*locals_: Array, axis: int) -> Array:
    filled = [x for x in locals_ if x.shape[axis]]
    return np.concatenate(filled or locals_[:1], axis=axis) if len(filled) != 1 else filled[0]


@implements(np.stack)
def stack(arrays: Sequence[Any], axis: int = 0, out: None = None, *, dtype: Any = None, casting: Any = "same_kind") -> DTensor:
    operands = [as_operand(x) for x in arrays]
    if len({x.shape for x in operands}) != 1:
        raise ValueError(f"np.stack: all arrays must have the same shape, got {[x.shape for x in operands]}")
    d = normalize_axis_index(axis, operands[0].ndim + 1)
    return concatenate([_np.expand_dims(x, d) for x in operands], d, out, dtype=dtype, casting=casting)


@implements(np.vstack)
def vstack(tup: Sequence[Any], *, dtype: Any = None, casting: Any = "same_kind") -> DTensor:
    return concatenate([_np.atleast_2d(x) for x in tup], 0, dtype=dtype, casting=casting)


@implements(np.hstack)
def hstack(tup: Sequence[Any], *, dtype: Any = None, casting: Any = "same_kind") -> DTensor:
    operands = [_np.atleast_1d(x) for x in tup]
    return concatenate(operands, 0 if operands[0].ndim == 1 else 1, dtype=dtype, casting=casting)


@implements(np.dstack)
def dstack(tup: Sequence[Any]) -> DTensor:
    return concatenate([_np.atleast_3d(x) for x in tup], 2)


@implements(np.column_stack)
def column_stack(tup: Sequence[Any]) -> DTensor:
    operands = [as_operand(x) for x in tup]
    return concatenate([_np.expand_dims(_np.atleast_1d(x), 1) if x.ndim < 2 else x for x in operands], 1)


@implements(np.block)
def block(arrays: Any) -> Any:
    """Nested lists of arrays, the innermost joined along the last dim."""

    def depth(x: Any) -> int:
        return 1 + max(map(depth, x)) if isinstance(x, list) else 0

    def joined(x: Any, level: int, ndim: int) -> Any:
        if not isinstance(x, list):
            x = as_operand(x)
            return x if x.ndim >= ndim else _np.reshape(x, (1,) * (ndim - x.ndim) + x.shape)
        return _np.concatenate([joined(y, level - 1, ndim) for y in x], axis=-level)

    def most(x: Any) -> int:
        return max(map(most, x)) if isinstance(x, list) else as_operand(x).ndim

    levels = depth(arrays)
    return joined(arrays, levels, max(levels, most(arrays)))


@implements(np.append)
def append(arr: Any, values: Any, axis: int | None = None) -> DTensor:
    if axis is None:
        arr, values, axis = _np.ravel(as_operand(arr)), _np.ravel(as_operand(values)), 0
    return concatenate((arr, values), axis)


# -- splitting --------------------------------------------------------------------------------------------------------


@implements(np.array_split)
def array_split(ary: DTensor, indices_or_sections: Any, axis: int = 0) -> list[DTensor]:
    """Slices, which stay where they are; parts on some ranks may be empty.

    **Communication**: none.
    """
    d = normalize_axis_index(axis, ary.ndim)
    n = ary.shape[d]
    if isinstance(indices_or_sections, (int, np.integer)):
        k = int(indices_or_sections)
        if k <= 0:
            raise ValueError("number sections must be larger than 0.")
        each, more = divmod(n, k)
        borders = [0, *itertools.accumulate([each + 1] * more + [each] * (k - more))]
    else:
        borders = [0, *(int(i) for i in indices_or_sections), n]
    lead = (slice(None),) * d
    return [ary[(*lead, slice(a, b))] for a, b in itertools.pairwise(borders)]


@implements(np.split)
def split(ary: DTensor, indices_or_sections: Any, axis: int = 0) -> list[DTensor]:
    if isinstance(indices_or_sections, (int, np.integer)):
        n = ary.shape[normalize_axis_index(axis, ary.ndim)]
        if n % int(indices_or_sections):
            raise ValueError(f"np.split: dim {axis} of size {n} does not divide into {indices_or_sections} equal parts")
    return array_split(ary, indices_or_sections, axis)


@implements(np.vsplit)
def vsplit(ary: DTensor, indices_or_sections: Any) -> list[DTensor]:
    if ary.ndim < 2:
        raise ValueError("vsplit only works on arrays of 2 or more dimensions")
    return split(ary, indices_or_sections, 0)


@implements(np.hsplit)
def hsplit(ary: DTensor, indices_or_sections: Any) -> list[DTensor]:
    if ary.ndim == 0:
        raise ValueError("hsplit only works on arrays of 1 or more dimensions")
    return split(ary, indices_or_sections, 0 if ary.ndim == 1 else 1)


@implements(np.dsplit)
def dsplit(ary: DTensor, indices_or_sections: Any) -> list[DTensor]:
    if ary.ndim < 3:
        raise ValueError("dsplit only works on arrays of 3 or more dimensions")
    return split(ary, indices_or_sections, 2)


@implements(np.unstack)
def unstack(x: DTensor, /, *, axis: int = 0) -> tuple[DTensor, ...]:
    if x.ndim == 0:
        raise ValueError("Input array must be at least 1-d.")
    d = normalize_axis_index(axis, x.ndim)
    return tuple(x[(*(slice(None),) * d, i)] for i in range(x.shape[d]))


# -- repeating --------------------------------------------------------------------------------------------------------


@implements(np.tile)
def tile(A: DTensor, reps: Any) -> DTensor:
    """Copies side by side.

    **Communication**: none along dims that are not cut; else what each rank lacks of its part of the result, once.
    """
    refuse_plain(A, "tile")
    times = (int(reps),) if isinstance(reps, (int, np.integer)) else tuple(int(r) for r in reps)
    x = A if A.ndim >= len(times) else _np.reshape(A, (1,) * (len(times) - A.ndim) + A.shape)
    times = (1,) * (x.ndim - len(times)) + times
    return regathered(x, {d: (Stretch(0, 1, x.shape[d]),) * r for d, r in enumerate(times) if r != 1}, why="tile")


@implements(np.repeat)
def repeat(a: DTensor, repeats: Any, axis: int | None = None) -> DTensor:
    """Repeat elements where they lie; the parts grow.

    **Communication**: none. A DTensor of repeats travels to the client, for it decides the shape.
    """
    x = _np.ravel(a) if axis is None else a
    d = normalize_axis_index(0 if axis is None else axis, x.ndim)
    each = np.asarray(repeats)
    if each.size != 1 and each.shape != (x.shape[d],):
        n = x.shape[d]
        raise ValueError(f"np.repeat: repeats of shape {each.shape} do not fit dim {d} of size {n}; give one, or {n}")
    if not np.can_cast(each.dtype, np.int64, "safe"):
        raise TypeError(f"np.repeat: repeats are {each.dtype}; they must be integers")
    if each.size and each.min() < 0:
        raise ValueError("np.repeat: repeats may not be negative")
    layout = x.layout
    every = np.broadcast_to(each.reshape(-1), x.shape[d : d + 1])
    sizes = tuple(int(every[lo:hi].sum()) for lo, hi in itertools.pairwise(layout.offsets[d]))
    target = recut(layout, {d: sizes})
    times = int(each.reshape(())) if each.size == 1 else each
    return DTensor(Local(target, x._node.world, _repeat, (x._node,), {"layout": layout, "d": d, "times": times}, located=True))


def _repeat(coord: Coord, local: Array, layout: Layout, d: int, times: Any) -> Array:
    return np.repeat(local, times if isinstance(times, int) else times[layout.box(coord)[d]], axis=d)


# -- turning ----------------------------------------------------------------------------------------------------------


@implements(np.flip)
def flip(m: DTensor, axis: Any = None) -> DTensor:
    """Reverse the order of elements.

    **Communication**: none along dims that are not cut; else each rank loads the part that mirrors its own.
    """
    dims = range(m.ndim) if axis is None else normalize_axis_tuple(axis, m.ndim, "axis")
    return regathered(m, {d: (Stretch(m.shape[d] - 1, -1, m.shape[d]),) for d in dims if m.shape[d]}, why="flip")


@implements(np.fliplr)
def fliplr(m: DTensor) -> DTensor:
    if m.ndim < 2:
        raise ValueError("Input must be >= 2-d.")
    return flip(m, 1)


@implements(np.flipud)
def flipud(m: DTensor) -> DTensor:
    if m.ndim < 1:
        raise ValueError("Input must be >= 1-d.")
    return flip(m, 0)


@implements(np.rot90)
def rot90(m: DTensor, k: int = 1, axes: Any = (0, 1)) -> DTensor:
    if len(tuple(axes)) != 2:
        raise ValueError("len(axes) must be 2.")
    i, j = (normalize_axis_index(d, m.ndim) for d in axes)
    if i == j:
        raise ValueError("Axes must be different.")
    k %= 4
    if k == 2:
        return flip(m, (i, j))
    if k == 0:
        return DTensor(m._node)
    return _np.swapaxes(flip(m, j), i, j) if k == 1 else flip(_np.swapaxes(m, i, j), j)


@implements(np.roll)
def roll(a: DTensor, shift: Any, axis: Any = None) -> DTensor:
    """Shift elements round the ends.

    **Communication**: none along dims that are not cut; else what each rank lacks of its part, `shift` rows as a rule.
    """
    if axis is None:
        return _np.reshape(roll(_np.ravel(a), np.sum(shift), 0), a.shape)  # type: ignore[no-any-return]
    dims = normalize_axis_tuple(axis, a.ndim, allow_duplicate=True)
    shifts: dict[int, int] = dict.fromkeys(dims, 0)
    for by, d in np.broadcast(shift, dims):
        shifts[int(d)] += int(by)
    maps = {}
    for d, by in shifts.items():
        n = a.shape[d]
        if n and by % n:
            maps[d] = (Stretch(n - by % n, 1, by % n), Stretch(0, 1, n - by % n))
    return regathered(a, maps, why="roll")
