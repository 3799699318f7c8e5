"""Keys of ``x[key]``: what each entry asks of which dim, and where the dims of the result stand."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from daskmesh.dtensor import DTensor
from daskmesh.graph import Local
from daskmesh.layout import Coord, Layout
from daskmesh.ops.gathers import recut, regathered
from daskmesh.regather import Stretch

__all__ = ["Key", "Steps", "forward", "mask_alone", "parse", "parts_of", "settled", "sliced"]

Array = Any
_np: Any = np


class Steps(NamedTuple):
    """A slice of a dim, with all of its numbers: `size` elements from `start` on."""

    start: int
    step: int
    size: int


class Key(NamedTuple):
    """A key taken apart.

    Attributes
    ----------
    steps : dict
        Tensor dim -> its slice; every dim that no integer and no array takes.
    ints : dict
        Tensor dim -> the integer, non-negative; only where there are no arrays, for with arrays integers count as arrays.
    arrays : dict
        Tensor dim -> the integer array that picks from it, plain or a DTensor.
    order : tuple
        The result's dims in order: a tensor dim that is sliced, None for a new one, "picked" for those of the arrays together.
    """

    steps: dict[int, Steps]
    ints: dict[int, int]
    arrays: dict[int, Any]
    order: tuple[Any, ...]

    @property
    def picked_shape(self) -> tuple[int, ...]:
        """Shape of the arrays together."""
        return _together(tuple(a.shape for a in self.arrays.values()))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        out: list[int] = []
        for o in self.order:
            if o == "picked":
                out.extend(self.picked_shape)
            else:
                out.append(1 if o is None else self.steps[o].size)
        return tuple(out)

    @property
    def place(self) -> int:
        """Where the picked dims stand among the sliced ones."""
        before = itertools.takewhile(lambda o: o != "picked", self.order)
        return sum(o is not None for o in before)


@lru_cache(1024)
def _together(shapes: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    return np.broadcast_shapes(*shapes)


def _entries(key: Any) -> list[Any]:
    """The entries, with everything that is to become an array made one."""
    out: list[Any] = []
    for e in key if isinstance(key, tuple) else (key,):
        if e is None or e is Ellipsis or isinstance(e, (slice, DTensor)):
            out.append(e)
        elif isinstance(e, (bool, np.bool_)):
            out.append(np.asarray(e))
        elif isinstance(e, (int, np.integer)):
            out.append(int(e))
        elif hasattr(e, "__array_function__") and hasattr(e, "dtype"):
            out.append(int(e) if e.ndim == 0 and e.dtype.kind in "iu" else e)
        elif hasattr(e, "__index__"):
            out.append(operator.index(e))
        else:
            a = np.asarray(e)
            out.append(a.astype(np.intp) if a.size == 0 and isinstance(e, (list, tuple)) else a)
    for e in out:
        if hasattr(e, "dtype") and e.dtype.kind not in "biu":
            raise IndexError(f"arrays used as indices must be of integer (or boolean) type, got {e.dtype}")
    return out


def _width(e: Any) -> int:
    """How many dims of the array an entry takes."""
    if e is None or e is Ellipsis:
        return 0
    return int(e.ndim) if hasattr(e, "dtype") and e.dtype == np.bool_ else 1


def _filled(entries: list[Any], ndim: int) -> list[Any]:
    """One entry per dim: the ellipsis, there or at the end, stands for full slices."""
    dots = [i for i, e in enumerate(entries) if e is Ellipsis]
    if len(dots) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    width = sum(map(_width, entries))
    if width > ndim:
        raise IndexError(f"too many indices for array: array is {ndim}-dimensional, but {width} were indexed")
    i = dots[0] if dots else len(entries)
    return [*entries[:i], *(slice(None),) * (ndim - width), *entries[i + 1 :]]


def mask_alone(x: DTensor, key: Any) -> DTensor | None:
    """The mask of ``x[mask]`` or ``x[mask, ...]`` that is a DTensor; None for other keys."""
    entries = [e for e in (key if isinstance(key, tuple) else (key,)) if e is not Ellipsis]
    full = all(isinstance(e, slice) and e == slice(None) for e in entries[1:])
    if entries and full and isinstance(entries[0], DTensor) and entries[0].dtype == np.bool_:
        leading = not (isinstance(key, tuple) and key[0] is Ellipsis and entries[0].ndim < x.ndim)
        return entries[0] if leading else None
    return None


def parse(x: DTensor, key: Any) -> Key:
    """Take a key apart and check it against the shape; plain arrays become non-negative indices.

    **Communication**: none, but for a mask that is a DTensor: how many elements it selects is found out at once.
    """
    steps: dict[int, Steps] = {}
    ints: dict[int, int] = {}
    arrays: dict[int, Any] = {}
    order: list[Any] = []
    d = 0
    for e in _filled(_entries(key), x.ndim):
        if e is None:
            order.append(None)
        elif isinstance(e, slice):
            start, stop, step = e.indices(x.shape[d])
            steps[d] = Steps(start, step, len(range(start, stop, step)))
            order.append(d)
            d += 1
        elif isinstance(e, int):
            ints[d] = _within(e, x.shape[d], d)
            order.append("picked")
            d += 1
        else:
            taken = _as_indices(x, e, d)
            arrays |= taken
            order.append("picked")
            d += len(taken)
    if not arrays:
        return Key(steps, ints, {}, tuple(o for o in order if o != "picked"))
    arrays |= {i: np.asarray(at) for i, at in ints.items()}
    try:
        _together(tuple(a.shape for a in arrays.values()))
    except ValueError:
        shown = " ".join(str(a.shape) for _, a in sorted(arrays.items()))
        raise IndexError(f"shape mismatch: indexing arrays could not be broadcast together with shapes {shown}") from None
    return Key(steps, {}, dict(sorted(arrays.items())), _with_one_place(order))


def _with_one_place(order: Sequence[Any]) -> tuple[Any, ...]:
    """NumPy's rule: the picked dims stand where the arrays stand, if these stand together; else first."""
    places = [i for i, o in enumerate(order) if o == "picked"]
    rest = [o for o in order if o != "picked"]
    at = places[0] if places[-1] - places[0] + 1 == len(places) else 0
    return (*rest[:at], "picked", *rest[at:])


def _as_indices(x: DTensor, e: Any, d: int) -> dict[int, Any]:
    if e.dtype != np.bool_:
        return {d: e if isinstance(e, DTensor) else settled(e, x.shape[d], d)}
    if e.ndim == 0:
        raise IndexError("a 0-d mask can only stand alone: x[mask]; use np.where(mask, x, other)")
    for i, n in enumerate(e.shape):
        if n != x.shape[d + i]:
            raise IndexError(
                f"boolean index did not match indexed array along axis {d + i}; size of axis is {x.shape[d + i]} but size of "
                f"corresponding boolean axis is {n}"
            )
    found = _np.nonzero(e)
    return {d + i: a for i, a in enumerate(found)}


def _within(at: int, n: int, d: int) -> int:
    if not -n <= at < n:
        raise IndexError(f"index {at} is out of bounds for axis {d} with size {n}")
    return at + n if at < 0 else at


def settled(index: Array, n: int, d: int) -> Array:
    """A copy of a plain index array, with no negative entries.

    Raises
    ------
    IndexError
        An entry is out of bounds for dim `d` of size `n`.
    """
    index = index.astype(np.int64)  # a copy: it is looked at again when the graph is made
    if index.size and index.view(np.uint64).max() >= n:  # negative ones are large so
        bad = (index < -n) | (index >= n)
        if bad.any():
            raise IndexError(f"index {int(index[bad].flat[0])} is out of bounds for axis {d} with size {n}")
        index[index < 0] += n
    return index


# -- slices -----------------------------------------------------------------------------------------------------------


def parts_of(layout: Layout, d: int, steps: Steps) -> tuple[slice, ...]:
    """What each part of a dim holds of a slice, in its own numbers; the step must be positive if the dim is cut."""
    start, step, size = steps
    if step < 0 and len(layout.chunks[d]) == 1:
        end = start + step * size
        return (slice(start, None if end < 0 else end, step) if size else slice(0, 0),)
    if not size:
        return (slice(0, 0),) * len(layout.chunks[d])
    out = []
    last = start + step * (size - 1)
    for lo, hi in itertools.pairwise(layout.offsets[d]):
        first = start + max(0, -(-(lo - start) // step)) * step
        stop = min(hi, last + 1)
        out.append(slice(first - lo, stop - lo, step) if first < stop else slice(0, 0))
    return tuple(out)


def forward(steps: Steps) -> Steps:
    """The same elements from the first one on."""
    start, step, size = steps
    return Steps(start + step * (size - 1), -step, size) if step < 0 and size else steps


def sliced(x: DTensor, steps: Mapping[int, Steps], ints: Mapping[int, int] | None = None) -> DTensor:
    """Slices of some dims; integers give dims of size 1.

    **Communication**: none where steps are positive or the dim is not cut: each rank slices its own part. A cut dim read
    backwards is then reversed.
    """
    layout = x.layout
    wanted = dict(steps) | {d: Steps(i, 1, 1) for d, i in (ints or {}).items()}
    wanted = {d: s for d, s in wanted.items() if s != (0, 1, x.shape[d])}
    if not wanted:
        return DTensor(x._node)
    cut = _cut(layout, tuple(wanted.items()))
    turned = cut.turned
    index = {"layout": layout, "parts": cut.parts}
    y = DTensor(Local(cut.target, x._node.world, slice_local, (x._node,), index, located=True))
    if turned:
        y = regathered(y, {d: (Stretch(y.shape[d] - 1, -1, y.shape[d]),) for d in turned}, why="slice with a negative step")
    return y


class _Cut(NamedTuple):
    """How slices of some dims come out: the layout, each part's own slice, and the cut dims that are still to be reversed."""

    target: Layout
    parts: dict[int, tuple[slice, ...]]
    turned: tuple[int, ...]


@lru_cache(4096)
def _cut(layout: Layout, wanted: tuple[tuple[int, Steps], ...]) -> _Cut:
    turned = tuple(d for d, s in wanted if s.step < 0 and s.size and layout.shard_axes[d])
    parts = {d: parts_of(layout, d, forward(s) if d in turned else s) for d, s in wanted}
    sizes = {d: tuple(_length(s, n) for s, n in zip(parts[d], layout.chunks[d], strict=True)) for d in parts}
    return _Cut(recut(layout, sizes), parts, turned)


def _length(s: slice, n: int) -> int:
    return len(range(*s.indices(n)))


def slice_local(coord: Coord, local: Array, layout: Layout, parts: Mapping[int, tuple[slice, ...]]) -> Array:
    """A rank's part of some slices; a copy where a view would keep much more memory than it shows."""
    at = layout.part_index(coord)
    out = local[tuple(parts[d][at[d]] if d in parts else slice(None) for d in range(local.ndim))]
    return out.copy() if 2 * out.nbytes < local.nbytes else out
