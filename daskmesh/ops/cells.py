"""Where picked elements lie: their cells, what each cell packs, and who loads which runs of it (see `daskmesh.ops.picks`)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from daskmesh.layout import Layout
from daskmesh.regather import Run

__all__ = ["Cells", "cells_of", "cuts_of", "flat_of_cells", "routes"]

Array = Any
Shape = tuple[int, ...]


class Cuts(NamedTuple):
    """How picked dims are cut: the mesh dims that do, in mesh order, and their sizes; where the parts of each picked dim begin.

    Where the parts of a dim are as the split rule makes them, `widths` has the size of the first, which tells the part of an
    element by a division; else 0.
    """

    axes: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[Array, ...]
    widths: tuple[int, ...]


@lru_cache(1024)
def cuts_of(layout: Layout, dims: tuple[int, ...]) -> Cuts:
    axes = tuple(sorted(m for d in dims for m in layout.shard_axes[d]))
    offsets = tuple(np.asarray(layout.offsets[d]) for d in dims)
    widths = [layout.chunks[d][0] for d in dims]
    even = [layout.offsets[d] == tuple(min(i * w, layout.shape[d]) for i in range(len(layout.offsets[d])))
            for d, w in zip(dims, widths, strict=True)]  # fmt: skip
    sizes = tuple(layout.mesh.shape[m] for m in axes)
    return Cuts(axes, sizes, offsets, tuple(w if e else 0 for w, e in zip(widths, even, strict=True)))


@dataclass(frozen=True, eq=False)
class Cells:
    """Where picked elements lie.

    Attributes
    ----------
    axes : tuple of int
        The mesh dims that cut any of the picked dims, in mesh order; a cell is a coordinate along them, in row-major order.
    total : int
        Number of cells.
    number : array
        Per element, the number of its cell.
    index, parts, offsets : tuple
        Per picked dim, the indices of the elements, the numbers of the parts that these lie in (None if the dim is not cut), and
        where the parts begin.
    """

    axes: tuple[int, ...]
    total: int
    number: Array
    index: tuple[Array, ...]
    parts: tuple[Array | None, ...]
    offsets: tuple[Array, ...]

    @cached_property
    def within(self) -> list[Array]:
        """Per picked dim, the index of each element in the local array."""
        return [
            at if part is None else at - offsets[part]
            for at, part, offsets in zip(self.index, self.parts, self.offsets, strict=True)
        ]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many elements each cell has."""
        return tuple(np.bincount(self.number, minlength=self.total).tolist())

    @cached_property
    def ordered(self) -> bool:
        """Whether the elements come in the order of the cells."""
        return bool((self.number[1:] >= self.number[:-1]).all())

    @cached_property
    def order(self) -> Array:
        """The numbers of the elements cell by cell, those of a cell in the order in which they come."""
        return np.argsort(self.number, kind="stable")

    @property
    def elements(self) -> list[Array]:
        """Per cell, the numbers of its elements."""
        return np.split(self.order, np.cumsum(self.counts)[:-1])


def cells_of(layout: Layout, dims: Sequence[int], index: Sequence[Array]) -> Cells:
    """The cells of elements given by flat arrays of non-negative indices, one per picked dim.

    The arrays may not be written to any more.
    """
    axes, sizes, borders, widths = cuts_of(layout, tuple(dims))
    parts: list[Array | None] = []
    for d, at, offsets, width in zip(dims, index, borders, widths, strict=True):
        if not layout.shard_axes[d]:
            parts.append(None)
        else:
            parts.append(at // width if width else offsets[1:-1].searchsorted(at, side="right"))
    cut = [(d, part) for d, part in zip(dims, parts, strict=True) if part is not None]
    if len(cut) == 1:
        number = cut[0][1]
    else:
        coords: dict[int, Array] = {}
        for d, part in cut:
            for m in reversed(layout.shard_axes[d]):
                part, coords[m] = np.divmod(part, layout.mesh.shape[m])
        number = np.zeros(index[0].shape, np.int64)
        for m, n in zip(axes, sizes, strict=True):
            number = number * n + coords[m]
    return Cells(axes, math.prod(sizes), number, tuple(index), tuple(parts), borders)


def _local_sizes(layout: Layout, dims: Sequence[int], cells: Cells, cell: int) -> Shape:
    """Local sizes of the picked dims on the ranks of a cell."""
    coord = [0] * layout.mesh.ndim
    for m in reversed(cells.axes):
        cell, coord[m] = divmod(cell, layout.mesh.shape[m])
    local = layout.local_shape(tuple(coord))
    return tuple(local[d] for d in dims)


def _flat(layout: Layout, dims: Sequence[int], cells: Cells, cell: int, elements: Any) -> Array:
    """Elements of one cell as flat indices over the picked dims of its local array."""
    within = [w[elements] for w in cells.within]
    if len(dims) == 1:
        return within[0].astype(np.int64, copy=False)
    sizes = _local_sizes(layout, dims, cells, cell)
    flat = np.zeros(len(within[0]), np.int64)
    for w, n in zip(within, sizes, strict=True):
        flat = flat * n + w
    return flat


def flat_of_cells(layout: Layout, dims: Sequence[int], cells: Cells, elements: Sequence[Array]) -> list[Array]:
    """Per cell, the flat indices over the picked dims of its local array of the elements that it is given."""
    return [_flat(layout, dims, cells, c, e) for c, e in enumerate(elements)]


def routes(
    layout: Layout, dims: Sequence[int], cells: Cells, ends: Sequence[int]
) -> tuple[list[Array], tuple[tuple[Run, ...], ...], list[Array]]:
    """What each cell packs, which runs of the packed elements each new part loads, and in what order it puts them."""
    flat = np.zeros(len(cells.number), np.int64)
    for c in range(cells.total):
        mine = np.flatnonzero(cells.number == c)
        flat[mine] = _flat(layout, dims, cells, c, mine)
    most = int(flat.max(initial=0)) + 1
    pieces: list[list[Array]] = [[] for _ in range(cells.total)]
    taken: list[list[tuple[int, int]]] = []
    order = []
    for lo, hi in itertools.pairwise(ends):
        wanted, back = np.unique(cells.number[lo:hi] * most + flat[lo:hi], return_inverse=True)
        order.append(back.reshape(-1).astype(np.int64, copy=False))
        borders = np.searchsorted(wanted, np.arange(cells.total + 1) * most)
        taken.append([])
        for c, (a, b) in enumerate(itertools.pairwise(borders)):
            taken[-1].append((sum(map(len, pieces[c])), int(b - a)))
            pieces[c].append(wanted[a:b] - c * most)
    packs = [np.concatenate(p) if p else np.zeros(0, np.int64) for p in pieces]
    starts = [0, *itertools.accumulate(map(len, packs))]
    runs = tuple(tuple((starts[c] + a, starts[c] + a + n) for c, (a, n) in enumerate(row) if n) for row in taken)
    return packs, runs, order
