"""Views of strided memory: which bytes an index selects, in runs and pieces. Addresses are plain integers here."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

__all__ = ["Index", "View", "addresses", "contiguous", "cut", "normal_index", "spanned", "view_of", "view_shape"]

Array: TypeAlias = np.ndarray[Any, Any]
Index: TypeAlias = tuple[int | slice, ...]


def normal_index(index: Sequence[Any], shape: tuple[int, ...]) -> Index:
    """`index` with one entry for each axis: an int, or a slice whose start and stop are given.

    Raises
    ------
    IndexError
        An entry is out of bounds, or has a step.

    Examples
    --------
    >>> normal_index((0, slice(1, 3)), (2, 4, 5))
    (0, slice(1, 3, None), slice(0, 5, None))
    """
    if len(index) > len(shape):
        raise IndexError(f"load: index {index} has {len(index)} entries, the exposed array {shape} has {len(shape)} dims")
    normal: list[int | slice] = []
    for dim, size in enumerate(shape):
        entry = index[dim] if dim < len(index) else slice(None)
        if isinstance(entry, slice):
            start = 0 if entry.start is None else operator.index(entry.start)
            stop = size if entry.stop is None else operator.index(entry.stop)
            if not (0 <= start <= stop <= size and entry.step in (None, 1)):
                raise IndexError(f"load: {entry} of dim {dim} of size {size}: wanted 0 <= start <= stop <= {size}, step 1")
            normal.append(slice(start, stop))
        else:
            at = operator.index(entry)
            if not 0 <= at < size:
                raise IndexError(f"load: index {at} of dim {dim} of size {size}: wanted 0 <= index < {size}")
            normal.append(at)
    return tuple(normal)


def view_shape(index: Index) -> tuple[int, ...]:
    """Shape of the view a normal index selects.

    Examples
    --------
    >>> view_shape((0, slice(1, 3)))
    (2,)
    """
    return tuple(entry.stop - entry.start for entry in index if isinstance(entry, slice))


@dataclass(slots=True)
class View:
    """A strided view of memory that is not ours, and the array it is to be written to, of the same shape.

    Attributes
    ----------
    pointer : int
        Address of the first element.
    strides : tuple of int
        Bytes from one element to the next, for each axis.
    out : ndarray

    Examples
    --------
    >>> View(4096, (24, 8), np.empty((2, 3))).nbytes
    48
    """

    pointer: int
    strides: tuple[int, ...]
    out: Array

    @property
    def nbytes(self) -> int:
        """Bytes to be written."""
        return int(self.out.nbytes)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return int(self.out.itemsize)


def view_of(pointer: int, strides: tuple[int, ...], index: Index, out: Array) -> View:
    """What a normal index selects of the array at `pointer`, in the order of the memory.

    Axes of one element are left out, axes that run backwards are turned round, and the axis with the longest stride comes
    first, in memory and in `out` alike, so that what follows reads the memory from low to high addresses.

    Examples
    --------
    >>> view = view_of(4096, (8, 32), (slice(1, 3), slice(0, 2)), np.empty((2, 2)))
    >>> view.pointer, view.strides, view.out.strides
    (4104, (32, 8), (8, 16))
    """
    kept: list[tuple[int, int]] = []  # stride, and axis of what is left of `out`
    picks: list[Any] = []
    for entry, stride in zip(index, strides, strict=True):
        if not isinstance(entry, slice):
            pointer += stride * entry
            continue
        pointer += stride * entry.start
        extent = entry.stop - entry.start
        if extent == 1:
            picks.append(0)
            continue
        if stride < 0:
            pointer += stride * (extent - 1)
        picks.append(slice(None, None, -1 if stride < 0 else None))
        kept.append((abs(stride), len(kept)))
    kept.sort(key=lambda axis: -axis[0])
    return View(pointer, tuple(stride for stride, _ in kept), out[(*picks, ...)].transpose([axis for _, axis in kept]))


def cut(view: View, limit: int) -> Iterator[View]:
    """`view` in pieces of at most `limit` bytes (one element at least), cut along its first axes.

    Examples
    --------
    >>> [piece.pointer for piece in cut(View(4096, (24, 8), np.empty((3, 3))), 48)]
    [4096, 4144]
    """
    if view.nbytes <= limit or not view.strides:
        yield view
        return
    rows = view.out.shape[0]
    step = limit * rows // view.nbytes
    if step == 0:
        for at in range(rows):
            yield from cut(View(view.pointer + at * view.strides[0], view.strides[1:], view.out[at, ...]), limit)
        return
    for at in range(0, rows, step):
        yield View(view.pointer + at * view.strides[0], view.strides, view.out[at : at + step])


def contiguous(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """How many leading axes are left when the last ones that lie in one run are taken together, and the run's bytes.

    Examples
    --------
    >>> contiguous((4, 2, 3), (100, 24, 8), 8)
    (1, 48)
    """
    length, outer = itemsize, len(shape)
    while outer and strides[outer - 1] == length:
        outer -= 1
        length *= shape[outer]
    return outer, length


def addresses(pointer: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """Addresses of the elements of a view, in C order.

    Examples
    --------
    >>> addresses(4096, (2, 2), (32, 8))
    array([4096, 4104, 4128, 4136])
    """
    at = np.array([pointer], np.int64)
    for extent, stride in zip(shape, strides, strict=True):
        at = (at[:, None] + np.arange(extent, dtype=np.int64) * stride).reshape(-1)
    return at


def spanned(view: View, gap: int) -> tuple[int, int]:
    """How many leading axes are left, and the bytes from the first to the last element of what follows, when axes whose
    elements lie no more than `gap` bytes apart are read in one go.

    Examples
    --------
    >>> spanned(View(4096, (4096, 16), np.empty((2, 3))), gap=8)
    (1, 40)
    """
    extent, outer = view.itemsize, len(view.strides)
    while outer and 0 <= view.strides[outer - 1] - extent <= gap:
        outer -= 1
        extent += view.strides[outer] * (view.out.shape[outer] - 1)
    return outer, extent
