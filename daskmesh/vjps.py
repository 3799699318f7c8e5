"""autograd's rules where they would make arrays of global size, or gather: the same mathematics for DTensors.

autograd's own rule stays in charge wherever no DTensor takes part. For a DTensor, a cotangent of a reduction is *spread*: every
rank repeats its part of it to the shape of its own part of the operand, in the operand's layout; no rank sees the whole.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from autograd.core import primitive_vjps
from autograd.extend import defvjp, defvjp_argnum, defvjp_argnums
from autograd.numpy import numpy_wrapper as anp
from autograd.numpy.numpy_vjps import tensordot_vjp_0, tensordot_vjp_1, unbroadcast, unbroadcast_f
from autograd.tracer import getval
from numpy.lib.array_utils import normalize_axis_tuple

from daskmesh.cotangents import whole
from daskmesh.dtensor import DTensor
from daskmesh.graph import Local
from daskmesh.layout import Coord, Layout
from daskmesh.ops.contractions import spelled_out
from daskmesh.ops.kinds import prepare
from daskmesh.routes import primitive, refuse
from daskmesh.rules import broadcasting

__all__ = ["contract", "spread"]

Array = Any
Axes = tuple[int, ...]
Maker = Callable[..., Callable[[Any], Any]]


@primitive
def spread(g: DTensor, layout: Layout, axes: Axes) -> DTensor:
    """`g`, of size 1 along `axes`, repeated to the shape of `layout` and laid out so.

    **Communication**: what brings the kept dims of `g` into that layout; none along `axes`.
    """
    target = layout.replace(dtype=g.dtype)
    ready = prepare(broadcasting(g.shape, layout.shape), (g,), g.dtype, target)
    return ready.local(_repeated, {"layout": ready.decision.output}, located=True)


def _repeated(coord: Coord, local: Array, layout: Layout) -> Array:
    return np.broadcast_to(local, layout.local_shape(coord)).copy()


defvjp(spread, lambda ans, g, layout, axes: lambda gg: np.sum(gg, axis=axes, keepdims=True) if axes else gg)


def _layout(x: Any) -> Layout:
    return whole(getval(x).layout)


def _for_dtensors(func: Any, make: Maker) -> None:
    """Let ``make(argnum, ans, args, kwargs)`` give the rule of an autograd primitive where a DTensor takes part."""
    plain = primitive_vjps.get(func)

    def maker(argnums: Sequence[int], ans: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(isinstance(getval(a), DTensor) for a in args):
            pulls = [make(n, ans, args, kwargs) for n in argnums]
            return lambda g: tuple(pull(g) for pull in pulls)
        if plain is None:
            raise NotImplementedError(f"VJP of {func.__name__} wrt argnums {argnums} not defined")
        return plain(argnums, ans, args, kwargs)

    defvjp_argnums(func, maker)


# -- reductions ---------------------------------------------------------------------------------------------------------


class _Reduction:
    """How a reduction was called: of what, along which dims."""

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = inspect.signature(func).bind(*args, **{k: v for k, v in kwargs.items() if v is not np._NoValue}).arguments
        for name in ("where", "initial", "out"):
            if bound.get(name, None) not in (None, True, np._NoValue):
                refuse(f"np.{func.__name__}({name}=...)")
        self.x = x = args[0]
        axis = bound.get("axis")
        self.axes: Axes = tuple(range(x.ndim)) if axis is None else tuple(sorted(normalize_axis_tuple(axis, x.ndim)))
        self.keepdims = bound.get("keepdims", False) is True
        self.ddof = bound.get("ddof", 0)
        self.count = math.prod(x.shape[d] for d in self.axes)
        self.axis = axis

    def kept(self, g: Any) -> Any:
        """A cotangent with the reduced dims, of size 1."""
        return g if self.keepdims or not self.axes else np.expand_dims(g, self.axes)

    def spread(self, g: Any) -> Any:
        """A cotangent in the layout of the operand."""
        return spread(self.kept(g), _layout(self.x), self.axes)


def _sum(r: _Reduction, ans: Any) -> Callable[[Any], Any]:
    return r.spread


def _mean(r: _Reduction, ans: Any) -> Callable[[Any], Any]:
    return lambda g: r.spread(g / r.count)


def _prod(r: _Reduction, ans: Any) -> Callable[[Any], Any]:
    return lambda g: r.spread(g * ans) / r.x


def _extreme(r: _Reduction, ans: Any) -> Callable[[Any], Any]:
    def pull(g: Any) -> Any:
        attained = (r.x == r.spread(ans)) * 1.0
        return attained * r.spread(g / np.sum(attained, axis=r.axes, keepdims=r.keepdims))

    return pull


def _centred(r: _Reduction) -> Any:
    return np.conj(r.x - np.mean(r.x, axis=r.axes, keepdims=True))


def _var(r: _Reduction, ans: Any) -> Callable[[Any], Any]:
    return lambda g: r.spread(g * (2 / (r.count - r.ddof))) * _centred(r)


def _std(r: _Reduction, ans: Any) -> Callable[[Any], Any]:
    if r.count <= 1:
        return lambda g: r.spread(g * 0)
    return lambda g: r.spread(g / np.where(ans == 0, 1, ans) / (r.count - r.ddof)) * _centred(r)


def _reducing(func: Callable[..., Any], rule: Callable[[_Reduction, Any], Callable[[Any], Any]]) -> Maker:
    return lambda argnum, ans, args, kwargs: rule(_Reduction(func, args, kwargs), ans)


for _primitive, _func, _rule in (
    (anp.sum, np.sum, _sum), (anp._primitive_mean, np.mean, _mean), (anp.prod, np.prod, _prod), (anp.max, np.max, _extreme),
    (anp.min, np.min, _extreme), (anp.amax, np.amax, _extreme), (anp.amin, np.amin, _extreme),
    (anp._primitive_var, np.var, _var), (anp._primitive_std, np.std, _std),
):  # fmt: skip
    _for_dtensors(_primitive, _reducing(_func, _rule))


def _cumsum(argnum: int, ans: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], Any]:
    x = args[0]
    axis = kwargs.get("axis", args[1] if len(args) > 1 else None)
    if axis is None:
        return lambda g: np.reshape(np.flip(np.cumsum(np.flip(g, 0), 0), 0), x.shape)
    return lambda g: np.flip(np.cumsum(np.flip(g, axis), axis), axis)


_for_dtensors(anp.cumsum, _cumsum)


# -- elementwise and shapes -----------------------------------------------------------------------------------------------


def _where(argnum: int, ans: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], Any]:
    c = args[0]
    if argnum == 1:
        return unbroadcast_f(args[1], lambda g: np.where(c, g, 0))  # type: ignore[no-any-return]
    return unbroadcast_f(args[2], lambda g: np.where(c, 0, g))  # type: ignore[no-any-return]


def _broadcast_to(argnum: int, ans: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], Any]:
    meta = anp.metadata(args[0])
    return lambda g: unbroadcast(g, meta)


def _expand_dims(argnum: int, ans: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], Any]:
    axis = kwargs.get("axis", args[1] if len(args) > 1 else None)
    return lambda g: np.squeeze(g, axis)


def _squeeze(argnum: int, ans: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], Any]:
    axis = kwargs.get("axis", args[1] if len(args) > 1 else None)
    axes = tuple(d for d, n in enumerate(args[0].shape) if n == 1) if axis is None else axis
    axes = normalize_axis_tuple(axes, args[0].ndim)
    return lambda g: np.expand_dims(g, axes) if axes else g


def _transpose(argnum: int, ans: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], Any]:
    axes = kwargs.get("axes", args[1] if len(args) > 1 else None)
    back = None if axes is None else tuple(np.argsort(normalize_axis_tuple(axes, args[0].ndim)).tolist())
    return lambda g: np.transpose(g, back)


def _reshape(argnum: int, ans: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], Any]:
    order = kwargs.get("order", args[2] if len(args) > 2 else "C")
    return lambda g: np.reshape(g, args[0].shape, order=order)


def _ravel(argnum: int, ans: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], Any]:
    order = kwargs.get("order", args[1] if len(args) > 1 else "C")
    return lambda g: np.reshape(g, args[0].shape, order=order)


def _array(argnum: int, ans: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], Any]:
    refuse("autograd.numpy.array of a DTensor, which gathers it (autograd.numpy.stack calls it: use np.stack),")


def _trace(argnum: int, ans: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], Any]:
    x, offset = args[0], kwargs.get("offset", args[1] if len(args) > 1 else 0)
    if x.ndim != 2 or len(args) > 2 or set(kwargs) - {"offset"}:
        refuse("np.trace of more than one matrix")
    layout, world = _layout(x), getval(x)._node.world
    eye = DTensor(Local(layout, world, _ones_on_diagonal, (), {"layout": layout, "offset": offset}, located=True))
    return lambda g: eye * g


def _ones_on_diagonal(coord: Coord, layout: Layout, offset: int) -> Array:
    rows, columns = layout.box(coord)
    n, m = layout.local_shape(coord)
    return np.eye(n, m, k=offset + rows.start - columns.start, dtype=layout.dtype)


for _primitive, _make in (
    (anp.where, _where), (anp.broadcast_to, _broadcast_to), (anp.expand_dims, _expand_dims), (anp.squeeze, _squeeze),
    (anp.transpose, _transpose), (anp.trace, _trace), (anp.reshape, _reshape), (anp.ravel, _ravel),
    (anp._array_from_scalar_or_array, _array),
):  # fmt: skip
    _for_dtensors(_primitive, _make)


# -- contractions ---------------------------------------------------------------------------------------------------------


def _dot(argnum: int, ans: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    a, b = args[:2]
    if not np.ndim(a) or not np.ndim(b):
        return unbroadcast_f(args[argnum], lambda g: g * args[1 - argnum])
    axes = ([np.ndim(a) - 1], [max(np.ndim(b) - 2, 0)])
    return (tensordot_vjp_1 if argnum else tensordot_vjp_0)(ans, a, b, axes)


@primitive
def contract(text: str, *arrays: Any) -> DTensor:
    """``np.einsum`` of subscripts that are spelled out, letters only."""
    return np.einsum(text, *arrays)  # type: ignore[no-any-return]


def _contract(argnum: int, ans: Any, args: tuple[Any, ...], kwargs: Any) -> Callable[[Any], Any]:
    text, *arrays = args
    terms, result = text.split("->")[0].split(","), text.split("->")[1]
    k = argnum - 1
    x, own = arrays[k], terms[k]
    rest = [i for i in range(len(arrays)) if i != k]
    known = set(result).union(*(terms[i] for i in rest))
    if len(set(own)) != len(own):
        refuse(f"np.einsum({text!r}) with a label twice in one term")
    held = "".join(c for c in own if c in known)
    call = ",".join([result, *(terms[i] for i in rest)]) + "->" + held
    alone = tuple(d for d, c in enumerate(own) if c not in known)

    def pull(g: Any) -> Any:
        g = contract(call, g, *(arrays[i] for i in rest))
        g = np.expand_dims(g, alone) if alone else g
        if alone and isinstance(getval(x), DTensor):
            return spread(g, _layout(x), alone)
        return g + np.zeros(x.shape, x.dtype) if alone else unbroadcast(g, anp.metadata(x)) if g.shape != x.shape else g

    return pull


defvjp_argnum(contract, _contract)


def _einsum(argnum: int, ans: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], Any]:
    terms, result, arrays = spelled_out(args)
    place = [id(a) for a in arrays].index(id(args[argnum]))
    return _contract(place + 1, ans, (",".join(terms) + "->" + result, *arrays), {})


_for_dtensors(anp.dot, _dot)
_for_dtensors(anp.einsum, _einsum)
