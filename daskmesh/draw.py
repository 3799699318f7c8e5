"""Drawings of layouts and plans, as text and as HTML with SVG inside.

A cell of a layout is an expression over the ranks that hold the box: ``0 = 1`` are equal copies (Replicate), ``0 + 1``
or ``max(0, 1)`` are terms still to be reduced (Partial)::

    mesh (2, 2) "x", "y";  shape (10, 4);  [Shard(0), Partial('sum')]

             0:4
    0:5    0 + 1
    5:10   2 + 3

The mesh itself is drawn by `daskmesh.pen`, which stands below it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from daskmesh.layout import Coord, Layout
from daskmesh.pen import (
    GAP,
    Cell,
    Head,
    Heads,
    Page,
    Parts,
    count,
    div,
    format_bytes,
    make_pages,
    page_svg,
    page_text,
    paragraph,
    some,
    table,
)
from daskmesh.placement import Partial, Replicate, Shard

__all__ = ["layout_html", "layout_text", "pairs_text", "plan_html", "visualize_sharding"]

MOST_RANKS = 4  # ranks named in one cell along one mesh dim


class Placed(Protocol):
    """Anything with a layout, as a DTensor has."""

    @property
    def layout(self) -> Layout:
        """Mesh, placements, global shape, dtype and part sizes."""


def visualize_sharding(x: Placed) -> None:
    """Print who holds which box of a DTensor.

    Parameters
    ----------
    x : DTensor
        It is not computed.

    Notes
    -----
    Equal copies are joined by ``=``; the terms of a Partial by ``+``, or the name of its reduction. In a notebook a
    DTensor draws itself.

    **Communication**: none.

    Examples
    --------
    >>> import daskmesh as dm
    >>> mesh = dm.init_mesh((2, 2), ("x", "y"))
    >>> dm.visualize_sharding(dm.zeros((3, 4), mesh=mesh, placements=[dm.Shard(1), dm.Replicate()]))
    float64 (3, 4), 96 B; 48 B a rank
      x=2  Shard(1)     cuts dim 1 into 2, 2
      y=2  Replicate()  2 equal copies
             0:2    2:4
    0:3    0 = 1  2 = 3
    """
    if not hasattr(x, "layout"):
        raise TypeError(f"visualize_sharding(x): expected a DTensor, got {type(x).__name__}")
    print(layout_text(x.layout))


def layout_text(layout: Layout) -> str:
    """A layout as text: the placements in words, then which ranks hold which box.

    Examples
    --------
    >>> import daskmesh as dm
    >>> from daskmesh.draw import layout_text
    >>> from daskmesh.layout import make_layout
    >>> mesh = dm.init_mesh((2, 2), ("x", "y"))
    >>> print(layout_text(make_layout(mesh, [dm.Shard(0), dm.Partial()], (5, 4), "float32")))
    float32 (5, 4), 80 B; 32 B to 48 B a rank
      x=2  Shard(0)        cuts dim 0 into 3, 2
      y=2  Partial('sum')  terms to reduce by sum
           0:4
    0:3  0 + 1
    3:5  2 + 3
    """
    width = max((len(repr(p)) for p in layout.placements), default=0)
    mesh = layout.mesh
    names = [f"{name}={size}" for name, size in zip(mesh.dim_names, mesh.shape, strict=True)]
    wide = max(map(len, names), default=0)
    lines = [_layout_title(layout)]
    for m, (name, placement) in enumerate(zip(names, layout.placements, strict=True)):
        lines.append(f"  {name:<{wide}}  {placement!r:<{width}}  {_in_words(layout, m)}")
    return "\n".join([*lines, *map(page_text, _layout_pages(layout))])


def layout_html(layout: Layout) -> str:
    """A layout as HTML: a table of the placements and an SVG of the boxes, to scale, with the ranks that hold them.

    Examples
    --------
    >>> import daskmesh as dm
    >>> from daskmesh.draw import layout_html
    >>> from daskmesh.layout import make_layout
    >>> "0 = 1" in layout_html(make_layout(dm.init_mesh(2, ["x"]), [dm.Replicate()], (5,), "f8"))
    True
    """
    rows = []
    for m, placement in enumerate(layout.placements):
        name = f"{layout.mesh.dim_names[m]}={layout.mesh.shape[m]}"
        rows.append((name, repr(placement), _in_words(layout, m)))
    return div([paragraph(_layout_title(layout)), table(rows), *map(page_svg, _layout_pages(layout))])


def _layout_title(layout: Layout) -> str:
    item = layout.dtype.itemsize
    least = math.prod(map(min, layout.chunks)) * item
    most = math.prod(map(max, layout.chunks)) * item
    each = " to ".join(dict.fromkeys(map(format_bytes, (least, most))))
    return f"{layout.dtype} {layout.shape}, {format_bytes(layout.nbytes)}; {each} a rank"


def _in_words(layout: Layout, m: int) -> str:
    """What one mesh dim does to the array."""
    placement = layout.placements[m]
    if isinstance(placement, Replicate):
        return count(layout.mesh.shape[m], "equal copy")
    if isinstance(placement, Partial):
        return f"terms to reduce by {placement.op}"
    axes = layout.shard_axes[placement.dim]
    if len(axes) > 1:
        others = " and ".join(layout.mesh.dim_names[a] for a in axes)
        return f"cuts dim {placement.dim}, split by {others} in this order"
    sizes = layout.chunks[placement.dim]
    shown = ", ".join(GAP if i is None else str(sizes[i]) for i in some(len(sizes)))
    return f"cuts dim {placement.dim} into {shown}"


def _layout_pages(layout: Layout) -> list[Page]:
    """Rows are the first tensor dim that is cut, columns the second; a third one and more turn pages.

    Where fewer than two are cut, dims that are whole fill up the drawing.
    """
    cut = [d for d in range(layout.ndim) if layout.shard_axes[d]]
    drawn = sorted((cut + [d for d in range(layout.ndim) if d not in cut])[:2])
    frame: list[int | None] = [*[None] * (2 - len(drawn)), *drawn]
    page_dims = [d for d in cut if d not in drawn]

    def heads(dim: int | None) -> Heads:
        if dim is None:
            return [(0, Head("", 1))]
        sizes, starts = layout.chunks[dim], layout.offsets[dim]
        name = f"dim {dim} " if dim in page_dims else ""
        parts: Heads = []
        for i in some(len(sizes)):
            label = GAP if i is None else f"{name}{starts[i]}:{starts[i + 1]}{'' if sizes[i] else ' empty'}"
            parts.append((i, Head(label, None if i is None else sizes[i])))
        return parts

    dims = [*page_dims, *frame]

    def cell(parts: Parts) -> Cell:
        if None in parts:
            return Cell(GAP, -1)
        at = {d: i for d, i in zip(dims, parts, strict=True) if d is not None and i is not None}
        return _holders(layout, tuple(at.get(d, 0) for d in range(layout.ndim)))

    return make_pages([heads(d) for d in page_dims], heads(frame[0]), heads(frame[1]), cell)


def _holders(layout: Layout, parts: Coord) -> Cell:
    """The ranks that hold the parts, as an expression, and the first of them."""
    shape = layout.mesh.shape
    fixed: dict[int, int] = {}
    for axes, part in zip(layout.shard_axes, parts, strict=True):
        fixed.update(zip(axes, map(int, np.unravel_index(part, [shape[m] for m in axes])), strict=True))

    def expression(m: int, coord: Coord) -> tuple[str, str]:
        """(text, joining sign). Mesh dim 0 is reduced first, so it stands innermost."""
        if m < 0:
            return str(layout.mesh.rank_at(coord)), ""
        if m in fixed:
            return expression(m - 1, (fixed[m], *coord))
        placement = layout.placements[m]
        op = "" if isinstance(placement, Shard | Replicate) else placement.op
        sign = {"": "=", "sum": "+", "prod": "*"}.get(op, ",")
        terms = [(GAP, "") if i is None else expression(m - 1, (i, *coord)) for i in some(shape[m], MOST_RANKS)]
        if sign == ",":
            return f"{op}({', '.join(text for text, _ in terms)})", ""
        return f" {sign} ".join(text if inner in {"", sign} else f"({text})" for text, inner in terms), sign

    first = layout.mesh.rank_at([fixed.get(m, 0) for m in range(layout.mesh.ndim)])
    return Cell(expression(layout.mesh.ndim - 1, ())[0], first)


def pairs_text(pairs: Mapping[tuple[int, int], int]) -> str:
    """The bytes that move from rank to rank as a table.

    Examples
    --------
    >>> from daskmesh.draw import pairs_text
    >>> print(pairs_text({(1, 0): 32, (0, 1): 32}))
            to 0  to 1
    from 0     .  32 B
    from 1  32 B     .
    """
    return page_text(_pairs_page(pairs))


def plan_html(lines: Sequence[str], pairs: Mapping[tuple[int, int], int]) -> str:
    """A plan as HTML: its lines, and the bytes from rank to rank; no pairs, no table.

    Examples
    --------
    >>> from daskmesh.draw import plan_html
    >>> "from 0" in plan_html(["moves 64 B"], {(0, 1): 64})
    True
    """
    return div([*map(paragraph, lines), *([page_svg(_pairs_page(pairs))] if pairs else [])])


def _pairs_page(pairs: Mapping[tuple[int, int], int]) -> Page:
    ranks = sorted({rank for pair in pairs for rank in pair})
    shown = some(len(ranks))

    def heads(word: str) -> list[Head]:
        return [Head(GAP, None) if i is None else Head(f"{word} {ranks[i]}", 1) for i in shown]

    def cell(i: int | None, j: int | None) -> Cell:
        if i is None or j is None:
            return Cell(GAP, -1)
        moved = pairs.get((ranks[i], ranks[j]), 0)
        return Cell(format_bytes(moved), ranks[i]) if moved else Cell(".", -1)

    return Page("", heads("from"), heads("to"), [[cell(i, j) for j in shown] for i in shown])
