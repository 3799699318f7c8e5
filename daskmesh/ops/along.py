"""Functions of one dim at a time, or of a few arrays place by place: what is worked along is whole on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from daskmesh.dtensor import DTensor, implements
from daskmesh.graph import Local
from daskmesh.layout import Coord, Layout
from daskmesh.ops.gathers import laid_out, renumbered
from daskmesh.ops.kinds import aligned, dtype_of, operand, prepare, record
from daskmesh.rules import Signature, elementwise

__all__: list[str] = []

Array = Any
Shape = tuple[int, ...]
_np: Any = np  # typed for arrays of its own, not for those that speak its protocols


def _given(x: Any) -> Any:
    return x if isinstance(x, DTensor) else np.asarray(x)


def _unfolded(x: DTensor, d: int, new: Shape, dtype: Any, func: Callable[..., Array], options: dict[str, Any]) -> DTensor:
    """Record ``func(local, **options)``, where `new` dims stand for dim `d`, which is whole on every rank."""
    x = aligned(x, (d,))
    layout, k = x.layout, len(new)
    places = {i: i if i < d else i + k - 1 for i in range(x.ndim) if i != d}
    chunks = (*layout.chunks[:d], *((n,) for n in new), *layout.chunks[d + 1 :])
    target = laid_out(layout, renumbered(layout.placements, places), chunks, dtype)
    how = {"func": func, "options": options, "layout": target}
    return DTensor(Local(target, x._node.world, _where_there_is_any, (x._node,), how, located=True))


def _where_there_is_any(
    coord: Coord, local: Array, func: Callable[..., Array], options: dict[str, Any], layout: Layout
) -> Array:
    shape = layout.local_shape(coord)
    if 0 in shape:
        return np.empty_like(local, shape=shape, dtype=layout.dtype)
    return func(local, **options).astype(layout.dtype, copy=False)


@implements(np.apply_along_axis)
def apply_along_axis(func1d: Callable[..., Any], axis: int, arr: DTensor, *args: Any, **kwargs: Any) -> DTensor:
    """Apply a function to each line along a dim. It is called once more, on a line of ones, to learn what it makes of one.

    **Communication**: all-to-all if `axis` is cut and other dims can be cut instead, else all-gather.
    """
    d = normalize_axis_index(axis, arr.ndim)
    if 0 in arr.shape[:d] + arr.shape[d + 1 :]:
        raise ValueError("Cannot apply_along_axis when any iteration dimensions are 0")
    made = np.asanyarray(func1d(np.ones(arr.shape[d], arr.dtype), *args, **kwargs))
    line = _Line(func1d, args, kwargs)
    return _unfolded(arr, d, made.shape, made.dtype, _each_line, {"func1d": line, "axis": d})


class _Line:
    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs

    def __call__(self, line: Array) -> Any:
        return self.func(line, *self.args, **self.kwargs)


def _each_line(local: Array, func1d: Callable[..., Any], axis: int) -> Array:
    return np.apply_along_axis(func1d, axis, local)


@implements(np.apply_over_axes)
def apply_over_axes(func: Callable[..., Any], a: Any, axes: Any) -> Any:
    """Apply ``func(x, axis)`` over some dims in turn; those that it reduces stay with size 1."""
    x = a
    for axis in np.atleast_1d(axes).tolist():
        d = normalize_axis_index(axis, a.ndim)
        made = func(x, d)
        made = made if made.ndim == x.ndim else _np.expand_dims(made, d)
        if made.ndim != x.ndim:
            raise ValueError("function is not returning an array of the correct shape")
        x = made
    return x


@implements(np.piecewise)
def piecewise(x: Any, condlist: Any, funclist: Sequence[Any], *args: Any, **kw: Any) -> DTensor:
    """Functions of the elements where conditions hold. Each is called by every rank with the elements that it holds.

    **Communication**: none where the conditions are cut as `x` is.
    """
    x = _given(x)
    if isinstance(condlist, DTensor) and condlist.ndim == x.ndim + 1:
        conditions = [condlist[i] for i in np.arange(condlist.shape[0])]
    elif isinstance(condlist, (list, tuple)) and not (condlist and isinstance(condlist[0], (bool, np.bool_)) and x.ndim):
        conditions = [_given(c) for c in condlist]
    else:
        conditions = [_given(condlist)]
    if len(funclist) not in (len(conditions), len(conditions) + 1):
        raise ValueError(
            f"with {len(conditions)} condition(s), either {len(conditions)} or {len(conditions) + 1} functions are expected"
        )
    for c in conditions:
        if c.shape not in (x.shape, ()):
            raise ValueError(f"np.piecewise: a condition of shape {c.shape} for x of shape {x.shape}")
    if any(isinstance(f, DTensor) for f in funclist):
        raise TypeError("np.piecewise: a value that is a DTensor; use np.select, which takes DTensors as choices")
    signature = elementwise((x.shape, *(c.shape for c in conditions)))
    how = {"funclist": tuple(funclist), "args": args, "kw": kw}
    return record(_by_pieces, signature, (x, *conditions), x.dtype, how)


def _by_pieces(x: Array, *conditions: Array, funclist: Sequence[Any], args: tuple[Any, ...], kw: dict[str, Any]) -> Array:
    full = [np.broadcast_to(np.asarray(c, bool), x.shape) for c in conditions]
    return np.piecewise(x, full, list(funclist), *args, **kw)


# -- vectors and polynomials ------------------------------------------------------------------------------------------


@implements(np.cross)
def cross(a: Any, b: Any, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: int | None = None) -> DTensor:
    """Products of vectors of three elements, which are whole on every rank.

    **Communication**: the dim of the vectors is gathered where it is cut.
    """
    if axis is not None:
        axisa = axisb = axisc = axis
    a, b = _given(a), _given(b)
    if not a.ndim or not b.ndim:
        raise ValueError("At least one array has zero dimension")
    a = _np.moveaxis(a, normalize_axis_index(axisa, a.ndim, "axisa"), -1)
    b = _np.moveaxis(b, normalize_axis_index(axisb, b.ndim, "axisb"), -1)
    if a.shape[-1] != 3 or b.shape[-1] != 3:
        raise ValueError(
            f"np.cross: incompatible dimensions for cross product\n(the dims of the vectors have sizes {a.shape[-1]} and "
            f"{b.shape[-1]}; on DTensors they must be 3)"
        )
    front = elementwise((a.shape[:-1], b.shape[:-1]))
    signature = Signature(
        tuple((*labels, "vector") for labels in front.operands), (*front.output, "vector"), whole=frozenset({"vector"})
    )
    made = record(np.cross, signature, (a, b), dtype_of(np.multiply, a, b))
    return _np.moveaxis(made, -1, normalize_axis_index(axisc, made.ndim, "axisc"))  # type: ignore[no-any-return]


@implements(np.vander)
def vander(x: DTensor, N: int | None = None, increasing: bool = False) -> DTensor:
    """Powers of the elements, cut as `x` is."""
    if x.ndim != 1:
        raise ValueError("x must be a one-dimensional array or sequence.")
    n = len(x) if N is None else int(N)
    dtype = np.promote_types(x.dtype, int)
    ready = prepare(elementwise((x.shape,)), (x,), dtype)
    layout = ready.decision.output
    target = laid_out(layout, layout.placements, (*layout.chunks, (n,)))
    return ready.local(np.vander, {"N": n, "increasing": increasing}, layout=target)


@implements(np.polyval)
def polyval(p: Any, x: Any) -> Any:
    """A polynomial by Horner's rule; few coefficients of many, highest first."""
    coefficients, x = _given(p), _given(x)
    if coefficients.ndim != 1:
        raise ValueError(f"np.polyval: coefficients of shape {coefficients.shape}; they must have one dim")
    y = _np.zeros_like(x)
    for i in np.arange(coefficients.shape[0]):
        y = y * x + coefficients[i]
    return y


# -- lines between arrays ---------------------------------------------------------------------------------------------


def _between(func: Callable[..., Array], start: Any, stop: Any, num: Any, axis: int, options: dict[str, Any]) -> DTensor:
    """``linspace`` and its kin, from arrays to arrays; the new dim is not cut."""
    n = int(num)
    if n < 0:
        raise ValueError(f"Number of samples, {n}, must be non-negative.")
    ends = [_given(x) for x in (start, stop)]
    dtype = dtype_of(func, *ends, num=2, **options)
    ready = prepare(elementwise(tuple(operand(x).shape for x in ends)), ends, dtype)
    layout = ready.decision.output
    places = {d: d + 1 for d in range(layout.ndim)}
    target = laid_out(layout, renumbered(layout.placements, places), ((n,), *layout.chunks))
    made = ready.local(func, {"num": n, **options}, layout=target)
    return _np.moveaxis(made, 0, normalize_axis_index(axis, made.ndim))  # type: ignore[no-any-return]


@implements(np.linspace)
def linspace(
    start: Any, stop: Any, num: int = 50, endpoint: bool = True, retstep: bool = False, dtype: Any = None, axis: int = 0, *,
    device: Any = None,
) -> Any:  # fmt: skip
    options = {"endpoint": endpoint, **({} if dtype is None else {"dtype": np.dtype(dtype)})}
    made = _between(np.linspace, start, stop, num, axis, options)
    if not retstep:
        return made
    gaps = int(num) - 1 if endpoint else int(num)
    return made, (stop - start) / gaps if gaps > 0 else (stop - start) * math.nan


@implements(np.logspace)
def logspace(
    start: Any, stop: Any, num: int = 50, endpoint: bool = True, base: Any = 10.0, dtype: Any = None, axis: int = 0
) -> DTensor:
    if np.ndim(base):
        raise TypeError("np.logspace(base=...): an array of bases is not defined on DTensors; write base ** np.linspace(...)")
    options = {"endpoint": endpoint, "base": base, **({} if dtype is None else {"dtype": np.dtype(dtype)})}
    return _between(np.logspace, start, stop, num, axis, options)


@implements(np.geomspace)
def geomspace(start: Any, stop: Any, num: int = 50, endpoint: bool = True, dtype: Any = None, axis: int = 0) -> DTensor:
    options = {"endpoint": endpoint, **({} if dtype is None else {"dtype": np.dtype(dtype)})}
    return _between(np.geomspace, start, stop, num, axis, options)
