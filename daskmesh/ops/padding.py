"""Padding: by constants, edges and statistics where they lie, else by stretches of the array itself.

Dim after dim, as NumPy does: corners hold what padding the padded gives. Where what is put in depends on the array, the outer
parts grow, a row or two (the edges, the means) go to the ranks along the dim, and those that hold an end fill it::

    maximum, 2 before   x      . . 3 1 | 4 1 | 5 9      . of rank 0: the row of maxima, which is 9
    reflect, odd        even   4 1 3 1 | 4 1 | 5 9      turned about the first row: 2 * 3 - 4, 2 * 3 - 1
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from daskmesh.dtensor import DTensor, implements
from daskmesh.graph import Local
from daskmesh.layout import Coord, Layout
from daskmesh.moves import moved
from daskmesh.ops.gathers import recut, regathered
from daskmesh.ops.kinds import aligned
from daskmesh.placement import Replicate, Shard
from daskmesh.regather import Stretch

__all__: list[str] = []

Array = Any
Pair = tuple[Any, Any]
_np: Any = np  # typed for arrays of its own, not for those that speak its protocols

# Mode -> the options that it takes.
_OPTIONS: dict[str, set[str]] = {
    "constant": {"constant_values"}, "empty": set(), "edge": set(), "wrap": set(), "reflect": {"reflect_type"},
    "symmetric": {"reflect_type"}, "linear_ramp": {"end_values"}, "maximum": {"stat_length"}, "minimum": {"stat_length"},
    "mean": {"stat_length"}, "median": {"stat_length"},
}  # fmt: skip
_STATISTICS: dict[str, Callable[..., Any]] = {
    "maximum": _np.max, "minimum": _np.min, "mean": _np.mean, "median": _np.median,
}  # fmt: skip


@implements(np.pad)
def pad(array: DTensor, pad_width: Any, mode: str = "constant", **kwargs: Any) -> DTensor:
    """Pad, in all modes of NumPy's that have a name; "empty" pads with zeros.

    **Communication**: none for constant, empty and edge, since the outer parts grow; for statistics and ramps a row or two to the
    ranks along each dim, and what the statistic itself moves; else what each rank lacks, once.
    """
    _refuse_unknown(mode, kwargs)
    widths = _widths(pad_width, array.ndim)
    ends = np.broadcast_to(np.asarray(kwargs.get("constant_values", kwargs.get("end_values", 0))), (array.ndim, 2))
    lengths = _lengths(kwargs.get("stat_length"), array.ndim)
    odd = kwargs.get("reflect_type", "even") == "odd"
    x = array
    for d, (before, after) in enumerate(widths):
        if not before and not after:
            continue
        if mode in ("constant", "empty"):
            x = _constant_pad(x, d, (before, after), ends[d])
            continue
        if not array.shape[d]:
            raise ValueError(f"can't extend empty axis {d} using modes other than 'constant' or 'empty'")
        if mode == "linear_ramp":
            x = _ramp_pad(x, d, (before, after), ends[d])
        elif mode in _STATISTICS:
            x = _statistic_pad(x, d, (before, after), lengths[d], mode)
        elif odd and x.shape[d] > 1:
            x = _odd_pad(x, d, (before, after), mode)
        else:
            x = regathered(x, {d: _extended(x.shape[d], before, after, mode)}, why=f"pad, {mode}")
    return DTensor(x._node)


def _refuse_unknown(mode: Any, options: Mapping[str, Any]) -> None:
    if mode not in _OPTIONS:
        raise TypeError(f"np.pad(mode={mode!r}) is not defined on DTensors; the modes {', '.join(_OPTIONS)} are")
    if not options.keys() <= _OPTIONS[mode]:
        raise ValueError(f"unsupported keyword arguments for mode {mode!r}: {sorted(options)}")
    if options.get("reflect_type", "even") not in ("even", "odd"):
        raise ValueError(f"np.pad(reflect_type={options['reflect_type']!r}): 'even' or 'odd'")


def _lengths(stat_length: Any, ndim: int) -> list[Pair]:
    """How many elements at each end of each dim the statistic looks at; None for all."""
    if stat_length is None:
        return [(None, None)] * ndim
    given = np.asarray(stat_length)
    if given.dtype.kind not in "iu" or np.any(given < 0):
        raise ValueError(f"np.pad(stat_length={stat_length!r}): integers that are not negative, one, or a pair per dim")
    return [(int(a), int(b)) for a, b in np.broadcast_to(given, (ndim, 2))]


def _widths(pad_width: Any, ndim: int) -> list[list[int]]:
    """How much is added before and after each dim."""
    if isinstance(pad_width, dict):
        given = [pad_width.get(d, pad_width.get(d - ndim, 0)) for d in range(ndim)]
        pad_width = [(w, w) if isinstance(w, (int, np.integer)) else w for w in given]
    widths = np.asarray(pad_width)
    if widths.dtype.kind not in "iu":
        raise TypeError("`pad_width` must be of integral type.")
    if np.any(widths < 0):
        raise ValueError("index can't contain negative values")
    every: list[list[int]] = np.broadcast_to(widths, (ndim, 2)).tolist()
    return every


def _constant_pad(x: DTensor, d: int, widths: tuple[int, int], values: Array) -> DTensor:
    n = x.shape[d]
    first, last = (v.astype(x.dtype)[()] for v in values)
    x = regathered(x, {d: (Stretch(-1, 0, widths[0]), Stretch(0, 1, n))}, first) if widths[0] else x
    return regathered(x, {d: (Stretch(0, 1, x.shape[d]), Stretch(-1, 0, widths[1]))}, last) if widths[1] else x


def _extended(n: int, before: int, after: int, mode: str) -> list[Stretch]:
    """The elements -before to n + after of a dim of size `n`, as the mode goes on beyond the ends."""
    if mode == "edge" or n == 1:
        return [Stretch(0, 0, before), Stretch(0, 1, n), Stretch(n - 1, 0, after)]
    turn = {"wrap": n, "symmetric": n, "reflect": n - 1}[mode]
    out = []
    i = -before
    while i < n + after:
        lap, at = divmod(i, turn)
        size = min(turn - at, n + after - i)
        if mode == "wrap" or lap % 2 == 0:
            out.append(Stretch(at, 1, size))
        else:
            out.append(Stretch(n - 1 - at, -1, size))
        i += size
    return out


# -- what is put in depends on the array ------------------------------------------------------------------------------


def _statistic_pad(x: DTensor, d: int, widths: Pair, lengths: Pair, mode: str) -> DTensor:
    n = x.shape[d]
    rows: list[Any] = []
    for end, (width, length) in enumerate(zip(widths, lengths, strict=True)):
        k = n if length is None else min(length, n)
        if not k and mode in ("maximum", "minimum"):
            raise ValueError("stat_length of 0 yields no value for padding")
        if end and k == n and rows and rows[0] is not None and lengths[0] in (None, length):
            rows.append(rows[0])
            continue
        key = (*(slice(None),) * d, slice(n - k, n) if end else slice(0, k))
        rows.append(_STATISTICS[mode](x[key], axis=d, keepdims=True) if width else None)
    made = [r if r is None or x.dtype.kind not in "iu" else _np.round(r) for r in rows]
    return _filled(aligned(x), d, widths, made, {"func": _repeated}, f"pad, {mode}")


def _ramp_pad(x: DTensor, d: int, widths: Pair, ends: Array) -> DTensor:
    rows = [x[(*(slice(None),) * d, s)] if w else None for s, w in zip((slice(0, 1), slice(-1, None)), widths, strict=True)]
    return _filled(aligned(x), d, widths, rows, {"func": _ramp, "ends": tuple(e[()] for e in ends)}, "pad, linear_ramp")


def _filled(
    x: DTensor, d: int, widths: Pair, rows: list[Any], how: Mapping[str, Any], why: str
) -> DTensor:
    """`x` with its outer parts grown, the new elements made from a row for each end."""
    grown = _constant_pad(x, d, widths, np.zeros(2))
    nodes = [None if r is None else _along_all(r, grown.layout, d, why) for r in rows]
    args = (grown._node, *nodes)
    extra = {"d": d, "widths": tuple(widths), "layout": grown.layout, "how": how}
    return DTensor(Local(grown.layout, grown._node.world, _fill, args, extra, located=True))


def _along_all(row: DTensor, layout: Layout, d: int, why: str) -> Any:
    """A row, a single element of dim `d`, on all ranks along that dim, cut along the others as `layout` is."""
    like = recut(layout, {d: (1,)})
    target = like.replace(
        placements=tuple(Replicate() if isinstance(p, Shard) and p.dim == d else p for p in layout.placements), dtype=row.dtype
    )
    return moved(row._node, target, why)


def _fill(
    coord: Coord, local: Array, first: Array, last: Array, d: int, widths: Pair, layout: Layout, how: Mapping[str, Any]
) -> Array:
    box, n = layout.box(coord)[d], layout.shape[d]
    places = (slice(0, widths[0]), slice(n - widths[1], n))
    options = {k: v for k, v in how.items() if k != "func"}
    out = None
    for end, (row, place) in enumerate(zip((first, last), places, strict=True)):
        lo, hi = max(box.start, place.start), min(box.stop, place.stop)
        if lo >= hi:
            continue
        out = local.copy() if out is None else out
        steps = (lo - place.start, hi - place.start) if not end else (place.stop - hi, place.stop - lo)
        made = how["func"](row, d, widths[end], steps, local.dtype, end, **options)
        out[(*(slice(None),) * d, slice(lo - box.start, hi - box.start))] = np.flip(made, d) if end else made
    return local if out is None else out


def _repeated(row: Array, d: int, width: int, steps: tuple[int, int], dtype: Any, end: int) -> Array:
    return row.astype(dtype)


def _ramp(row: Array, d: int, width: int, steps: tuple[int, int], dtype: Any, end: int, ends: Pair) -> Array:
    """Steps of the way from the value at the end, which is step 0, to the edge, which is not among them."""
    whole = np.linspace(ends[end], row.squeeze(d), num=width, endpoint=False, dtype=dtype, axis=d)
    return whole[(*(slice(None),) * d, slice(*steps))]


def _odd_pad(x: DTensor, d: int, widths: Pair, mode: str) -> DTensor:
    """Reflected, and turned about the edges: each end goes on as the other way up, so that lines stay lines."""
    n = x.shape[d]
    x = aligned(x)
    even = regathered(x, {d: _extended(n, *widths, mode)}, why=f"pad, {mode}")
    rows = [_along_all(x[(*(slice(None),) * d, s)], even.layout, d, f"pad, {mode}") for s in (slice(0, 1), slice(-1, None))]
    extra = {"d": d, "before": widths[0], "turn": n if mode == "symmetric" else n - 1, "layout": even.layout}
    return DTensor(Local(even.layout, even._node.world, _turned, (even._node, *rows), extra, located=True))


def _turned(coord: Coord, local: Array, first: Array, last: Array, d: int, before: int, turn: int, layout: Layout) -> Array:
    box = layout.box(coord)[d]
    out = local.copy()
    at = box.start - before
    while at < box.stop - before:
        lap = at // turn
        stop = min((lap + 1) * turn, box.stop - before)
        key = (*(slice(None),) * d, slice(at - box.start + before, stop - box.start + before))
        if lap % 2:
            made = _times(last, lap + 1, _times(first, 1 - lap)) - local[key]
        else:
            made = _times(last, lap, _times(first, -lap, local[key]))
        out[key] = made
        at = stop
    return out


def _times(x: Array, n: int, to: Array = None) -> Array:
    """``to + n * x``, with nothing of `x` where `n` is 0, and no negative number among unsigned ones."""
    if not n:
        return to
    product = abs(n) * x
    if to is None:
        return product if n > 0 else -product
    return to + product if n > 0 else to - product
