"""The pens: small tables written as text or as SVG. Meshes, layouts and plans are drawn with them.

A drawing is a few pages of one table. Long rows are drawn as their first parts and their last one, so that a drawing
stays small whatever the mesh. Nothing here knows the classes above: a mesh comes as its names, sizes and ranks.
"""

from __future__ import annotations

import colorsys
import html
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = ["GAP", "Cell", "Head", "Heads", "Page", "Parts", "count", "div", "format_bytes", "make_pages", "mesh_html",
           "mesh_text", "page_svg", "page_text", "paragraph", "some", "table"]  # fmt: skip

MOST_PARTS = 8  # rows and columns drawn before the middle is left out
MOST_PAGES = 4
CHAR = 6.7  # pixels a letter takes in the SVG
GAP = "\N{HORIZONTAL ELLIPSIS}"

Parts = Sequence[int | None]


class Head(NamedTuple):
    """A row or column: its label and its size, which the SVG draws to scale; size None is the part left out."""

    label: str
    size: int | None


class Cell(NamedTuple):
    """One cell: its text and the rank that gives the colour, -1 for none."""

    text: str
    rank: int


class Page(NamedTuple):
    """One drawn table; without rows it stands for the pages left out."""

    title: str
    rows: list[Head]
    columns: list[Head]
    cells: list[list[Cell]]


Heads = list[tuple[int | None, Head]]  # the part's number, None for the parts left out, and its head


def some(n: int, most: int = MOST_PARTS) -> list[int | None]:
    """The numbers 0 to n-1; of more than `most` the first ones, None, and the last."""
    return list(range(n)) if n <= most else [*range(most - 2), None, n - 1]


def make_pages(pages: list[Heads], rows: Heads, columns: Heads, cell: Callable[[Parts], Cell]) -> list[Page]:
    """One page for each combination of the page parts, the middle of many left out."""
    turns = list(itertools.product(*pages))
    drawn = []
    for turn in [None if i is None else turns[i] for i in some(len(turns), MOST_PAGES)]:
        if turn is None or any(i is None for i, _ in turn):
            drawn.append(Page(GAP, [], [], []))
            continue
        at = [i for i, _ in turn]
        cells = [[cell([*at, r, c]) for c, _ in columns] for r, _ in rows]
        title = ", ".join(head.label for _, head in turn)
        drawn.append(Page(title, [head for _, head in rows], [head for _, head in columns], cells))
    return [page for page, before in zip(drawn, [None, *drawn], strict=False) if page.rows or page != before]


def page_text(page: Page) -> str:
    """A page as lines of text, labels left and cells right."""
    title = [page.title] if page.title else []
    if not page.rows:
        return page.title
    left = max(len(head.label) for head in page.rows)
    columns = range(len(page.columns))
    wide = [max(len(page.columns[c].label), *(len(row[c][0]) for row in page.cells)) for c in columns]
    lines = [[page.columns[c].label for c in columns], *([text for text, _ in row] for row in page.cells)]
    names = ["", *(head.label for head in page.rows)]
    body = [
        "  ".join([f"{name:<{left}}", *(f"{text:>{wide[c]}}" for c, text in enumerate(line))]).rstrip()
        for name, line in zip(names, lines, strict=True)
    ]
    return "\n".join([*title, *(line for line in body if line)])


def page_svg(page: Page) -> str:
    """Boxes to scale: the colour is the first rank's, an empty part is a dashed sliver."""
    if not page.rows:
        return paragraph(page.title)
    chars = max(len(text) for row in page.cells for text, _ in row)
    heads = max(len(head.label) for head in page.columns)
    widths = _lengths(page.columns, total=360, least=CHAR * max(min(chars, 24), heads) + 8)
    heights = _lengths(page.rows, total=min(160, 48 * len(page.rows)), least=22)
    left = CHAR * max(len(head.label) for head in page.rows) + 8
    xs = list(itertools.accumulate(widths, initial=left))
    ys = list(itertools.accumulate(heights, initial=18))
    parts = [_label(xs[c] + widths[c] / 2, 12, head.label) for c, head in enumerate(page.columns)]
    parts += [_label(left / 2, ys[r] + heights[r] / 2 + 4, head.label) for r, head in enumerate(page.rows)]
    for (r, row), (c, column) in itertools.product(enumerate(page.rows), enumerate(page.columns)):
        text, rank = page.cells[r][c]
        empty = row.size == 0 or column.size == 0
        where = f"{row.label} {column.label}{' (empty)' if empty else ''}: {text}".strip()
        parts.append(_rect((xs[c], ys[r], widths[c], heights[r]), rank, where, empty))
        shown = text if len(text) * CHAR <= widths[c] else f"{text[: max(int(widths[c] / CHAR) - 1, 0)]}{GAP}"
        parts.append(_label(xs[c] + widths[c] / 2, ys[r] + heights[r] / 2 + 4, shown))
    size = f'width="{xs[-1] + 2:.0f}" height="{ys[-1] + 2:.0f}"'
    svg = f'<svg {size} xmlns="http://www.w3.org/2000/svg" style="font: 11px monospace">{"".join(parts)}</svg>'
    return (paragraph(page.title) if page.title else "") + svg


def _lengths(heads: list[Head], total: float, least: float) -> list[float]:
    """Pixels of each row or column: to scale, but no shorter than a label needs."""
    whole = sum(head.size or 0 for head in heads) or 1
    return [20.0 if head.size is None else max(total * head.size / whole, least) for head in heads]


def _rect(box: tuple[float, float, float, float], rank: int, title: str, empty: bool) -> str:
    x, y, width, height = box
    rgb = colorsys.hls_to_rgb(rank * 0.382 % 1, 0.55, 0.6)  # steps of the golden angle keep neighbours apart
    filled = not empty and rank >= 0
    fill = "#" + "".join(f"{round(255 * part):02x}" for part in rgb) if filled else "none"
    style = ' fill-opacity="0.35"' if filled else ' stroke-dasharray="3 3"'
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}" stroke="currentColor"'
        f"{style}><title>{html.escape(title)}</title></rect>"
    )


def _label(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle" fill="currentColor">{html.escape(text)}</text>'


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text as an HTML table."""
    cells = ("".join(f"<td>{html.escape(text)}</td>" for text in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def paragraph(text: str) -> str:
    """A line as an HTML paragraph."""
    return f"<p>{html.escape(text)}</p>"


def div(parts: Sequence[str]) -> str:
    """Parts of HTML as one."""
    return f'<div class="daskmesh">{"".join(parts)}</div>'


def count(n: int, noun: str) -> str:
    """A number with its noun: ``1 rank``, ``2 copies``."""
    plural = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{n} {noun if n == 1 else plural}"


def format_bytes(n: float) -> str:
    """Bytes for people: ``128 B``, ``1.5 KiB``.

    Examples
    --------
    >>> from daskmesh.pen import format_bytes
    >>> format_bytes(128), format_bytes(1536), format_bytes(2**30)
    ('128 B', '1.5 KiB', '1 GiB')
    """
    size, unit = float(n), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.4g} {unit}"


def mesh_text(dim_names: Sequence[str], shape: Sequence[int], ranks: Sequence[int]) -> str:
    """A mesh as text: its named dims and the rank at every coordinate.

    Examples
    --------
    >>> from daskmesh.pen import mesh_text
    >>> print(mesh_text(["dp", "tp"], [2, 3], range(6)))
    6 ranks on dp=2, tp=3
          tp 0  tp 1  tp 2
    dp 0     0     1     2
    dp 1     3     4     5
    """
    return "\n".join([_mesh_title(dim_names, shape, ranks), *map(page_text, _mesh_pages(dim_names, shape, ranks))])


def mesh_html(dim_names: Sequence[str], shape: Sequence[int], ranks: Sequence[int]) -> str:
    """A mesh as HTML: the drawing of `mesh_text` in SVG.

    Examples
    --------
    >>> from daskmesh.pen import mesh_html
    >>> "<svg" in mesh_html(["x"], [2], [0, 1])
    True
    """
    return div([paragraph(_mesh_title(dim_names, shape, ranks)), *map(page_svg, _mesh_pages(dim_names, shape, ranks))])


def _mesh_title(dim_names: Sequence[str], shape: Sequence[int], ranks: Sequence[int]) -> str:
    sizes = ", ".join(f"{name}={size}" for name, size in zip(dim_names, shape, strict=True))
    return f"{count(len(ranks), 'rank')} on {sizes}"


def _mesh_pages(dim_names: Sequence[str], shape: Sequence[int], ranks: Sequence[int]) -> list[Page]:
    def heads(dim: int) -> Heads:
        if dim < 0:  # a mesh of one dim is one row
            return [(0, Head("rank", 1))]
        parts = some(shape[dim])
        return [(i, Head(GAP, None) if i is None else Head(f"{dim_names[dim]} {i}", 1)) for i in parts]

    def cell(parts: Parts) -> Cell:
        flat = 0
        for i, n in zip(parts[len(parts) - len(shape) :], shape, strict=True):
            if i is None:
                return Cell(GAP, -1)
            flat = flat * n + i
        return Cell(str(ranks[flat]), ranks[flat])

    *turns, rows, columns = range(min(0, len(shape) - 2), len(shape))
    return make_pages([heads(d) for d in turns], heads(rows), heads(columns), cell)
