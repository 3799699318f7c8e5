"""Diagonals and triangles: what stands where row and column numbers of the global array compare."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from daskmesh.dtensor import DTensor, implements
from daskmesh.graph import Local
from daskmesh.layout import Box, Coord, Layout
from daskmesh.ops.gathers import laid_out, rearranged, regathered
from daskmesh.ops.picks import picked
from daskmesh.regather import Stretch

__all__: list[str] = []

Array = Any
_np: Any = np


@implements(np.diagonal)
def diagonal(a: DTensor, offset: int = 0, axis1: int = 0, axis2: int = 1) -> DTensor:
    """Diagonals, as the last dim.

    **Communication**: none if at most one of the two dims is cut; else what the ranks lack of their parts.
    """
    i, j = normalize_axis_tuple((axis1, axis2), a.ndim)
    size = max(0, min(a.shape[i] + min(offset, 0), a.shape[j] - max(offset, 0)))
    at = np.arange(size)
    pairs = sorted([(i, at - min(offset, 0)), (j, at + max(offset, 0))], key=lambda p: p[0])
    return picked(a, [d for d, _ in pairs], [index for _, index in pairs], a.ndim - 2, "diagonal")


@implements(np.diag)
def diag(v: DTensor, k: int = 0) -> DTensor:
    """The diagonal of a matrix, or a matrix with a vector on its diagonal, its rows cut as the vector is.

    **Communication**: that of `diagonal`; none for a vector.
    """
    if v.ndim == 2:
        return diagonal(v, k)
    if v.ndim != 1:
        raise ValueError("Input must be 1- or 2-d.")
    k = operator.index(k)
    n = v.shape[0]
    rows = regathered(v, {0: (Stretch(-1, 0, max(-k, 0)), Stretch(0, 1, n), Stretch(-1, 0, max(k, 0)))}, v.dtype.type(0))
    layout = rows.layout
    target = laid_out(layout, layout.placements, (layout.chunks[0], (n + abs(k),)))
    return DTensor(Local(target, v._node.world, _on_diagonal, (rows._node,), {"layout": target, "k": k}, located=True))


def _on_diagonal(coord: Coord, rows: Array, layout: Layout, k: int) -> Array:
    out = np.zeros_like(rows, shape=layout.local_shape(coord))
    at = np.arange(len(rows))
    column = at + layout.box(coord)[0].start + k
    inside = (column >= 0) & (column < out.shape[1])
    out[at[inside], column[inside]] = rows[inside]
    return out


@implements(np.diagflat)
def diagflat(v: DTensor, k: int = 0) -> DTensor:
    return diag(_np.ravel(v), k)


@implements(np.tril)
def tril(m: DTensor, k: int = 0) -> DTensor:
    """Zeros above the `k`-th diagonal.

    **Communication**: none.
    """
    return _triangle(m, k, lower=True)


@implements(np.triu)
def triu(m: DTensor, k: int = 0) -> DTensor:
    """Zeros below the `k`-th diagonal.

    **Communication**: none.
    """
    return _triangle(m, k, lower=False)


def _triangle(m: DTensor, k: int, lower: bool) -> DTensor:
    if m.ndim == 1:  # as NumPy: a matrix whose rows are all `m`
        m = _np.broadcast_to(rearranged(m, (None, 0)), (m.shape[0], m.shape[0]))
    if m.ndim == 0:
        raise ValueError("a 0-d array has no triangles; it must have at least one dim")
    layout = m.layout
    extra = {"layout": layout, "k": operator.index(k), "lower": lower}
    return DTensor(Local(layout, m._node.world, _zeroed, (m._node,), extra, located=True))


def _zeroed(coord: Coord, local: Array, layout: Layout, k: int, lower: bool) -> Array:
    # Zero is zero among the terms of every reduction: a sum or product of zeros, their maximum, their average.
    return np.where(_below(layout.box(coord), k, lower), local, np.zeros((), local.dtype))


def _below(box: Box, k: int, lower: bool) -> Array:
    rows = np.arange(box[-2].start, box[-2].stop)[:, None]
    columns = np.arange(box[-1].start, box[-1].stop)
    return columns - rows <= k if lower else columns - rows >= k
