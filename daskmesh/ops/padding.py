"""Padding: by constants and edges where they lie, else by stretches of the array itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from daskmesh.dtensor import DTensor, implements
from daskmesh.ops.gathers import regathered
from daskmesh.regather import Stretch

__all__: list[str] = []

Array = Any

# Mode -> the options that it takes.
_OPTIONS: dict[str, set[str]] = {
    "constant": {"constant_values"}, "empty": set(), "edge": set(), "wrap": set(), "reflect": {"reflect_type"},
    "symmetric": {"reflect_type"},
}  # fmt: skip


@implements(np.pad)
def pad(array: DTensor, pad_width: Any, mode: str = "constant", **kwargs: Any) -> DTensor:
    """Pad; modes constant, empty (zeros), edge, wrap, reflect, symmetric.

    **Communication**: none for constant, empty and edge, since the outer parts grow; else what each rank lacks, once.
    """
    _refuse_unknown(mode, kwargs)
    widths = _widths(pad_width, array.ndim)
    values = np.broadcast_to(np.asarray(kwargs.get("constant_values", 0)), (array.ndim, 2))
    x = array
    for d, (before, after) in enumerate(widths):
        if not before and not after:
            continue
        if mode in ("constant", "empty"):
            x = _constant_pad(x, d, (before, after), values[d])
            continue
        if not array.shape[d]:
            raise ValueError(f"can't extend empty axis {d} using modes other than 'constant' or 'empty'")
        x = regathered(x, {d: _extended(x.shape[d], before, after, mode)}, why=f"pad, {mode}")
    return DTensor(x._node)


def _refuse_unknown(mode: str, options: Mapping[str, Any]) -> None:
    if mode not in _OPTIONS:
        raise TypeError(f"np.pad(mode={mode!r}) is not defined on DTensors; the modes {', '.join(_OPTIONS)} are")
    if not options.keys() <= _OPTIONS[mode]:
        raise ValueError(f"unsupported keyword arguments for mode {mode!r}: {sorted(options)}")
    if options.get("reflect_type", "even") != "even":
        raise TypeError("np.pad(reflect_type='odd') is not defined on DTensors; 'even' is")


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
