"""Routes: from plain NumPy calls on autograd's boxes to autograd's primitives.

A *box* stands for a value whose computation is recorded. autograd records calls of its own wrappers in ``autograd.numpy``; here
NumPy's two protocols lead plain ``np.*`` calls on a box to those wrappers, by a table. A few functions that autograd has no
rule for are written with others that have one. What cannot be followed is refused by name.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NoReturn, TypeVar, cast

import autograd.numpy as anp
import numpy as np
from autograd.extend import primitive as _primitive
from autograd.numpy.numpy_boxes import ArrayBox
from autograd.tracer import getval, isbox

__all__ = ["Followed", "composes", "primitive", "refuse"]

Array = Any
F = TypeVar("F", bound=Callable[..., Any])
_WAY_OUT = (
    "write it with functions that autograd follows, take it out of the differentiated part, or put it into a LocalLayer with a "
    "backward(self, *grads) of your own"
)


def primitive(func: F) -> F:
    """autograd's decorator of functions that are recorded as one step."""
    return cast(F, _primitive(func))


def refuse(what: str) -> NoReturn:
    """Raise TypeError for something that cannot be differentiated."""
    raise TypeError(f"{what} cannot be differentiated: {_WAY_OUT}")


def _autograds() -> dict[Callable[..., Any], Callable[..., Any]]:
    """NumPy's functions and autograd's of the same names."""
    table: dict[Callable[..., Any], Callable[..., Any]] = {}
    for plain, wrapped in ((np, anp), (np.linalg, anp.linalg), (np.fft, anp.fft)):
        for name, func in vars(plain).items():
            if callable(func) and not isinstance(func, type) and callable(getattr(wrapped, name, None)):
                # By its first name: autograd rewrites some functions, but not their younger aliases.
                table.setdefault(func, getattr(wrapped, getattr(func, "__name__", name), getattr(wrapped, name)))
    return table


_AUTOGRAD = _autograds()
_COMPOSED: dict[Callable[..., Any], Callable[..., Any]] = {}


def composes(*functions: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function, written with others, in the table under the NumPy functions that it stands for."""

    def enter(f: Callable[..., Any]) -> Callable[..., Any]:
        _COMPOSED.update(dict.fromkeys(functions, f))
        return f

    return enter


def boxes_in(values: Any) -> Iterator[Any]:
    """The boxes among some values, in nested lists and tuples too."""
    for value in values:
        if isbox(value):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from boxes_in(value)


def _name(func: Callable[..., Any]) -> str:
    module = getattr(func, "__module__", None) or "numpy"
    return f"{'np' if module.startswith('numpy') else module}.{getattr(func, '__name__', func)}"


class Followed(ArrayBox):  # type: ignore[misc]
    """A box that plain NumPy can work on. Subclasses say what they stand for, and which functions they do otherwise."""

    __slots__ = ()
    own: ClassVar[Mapping[Callable[..., Any], Callable[..., Any]]] = {}

    # -- NumPy's protocols ----------------------------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if kwargs.get("out") is not None:
            refuse(f"np.{ufunc.__name__}(out=...)")
        if method == "reduce" and ufunc in _REDUCING:
            axis = inputs[1] if len(inputs) > 1 else kwargs.pop("axis", 0)
            return _REDUCING[ufunc](inputs[0], axis=axis, **kwargs)
        if method != "__call__":
            refuse(f"np.{ufunc.__name__}.{method}")
        given = {k: v for k, v in kwargs.items() if k != "out"}
        if ufunc in _AUTOGRAD and ufunc not in self.own and ufunc not in _COMPOSED:
            if given.get("where", True) is not True:
                refuse(f"np.{ufunc.__name__}(where=...)")
            given["called_by_autograd_dispatcher"] = True
        return self._routed(ufunc, inputs, given)

    def __array_function__(self, func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        return self._routed(func, args, kwargs)

    def _routed(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        route = self.own.get(func) or _COMPOSED.get(func) or _AUTOGRAD.get(func)
        if route is None:
            refuse(_name(func))
        if any(boxes_in(kwargs.values())) and route is _AUTOGRAD.get(func):
            args, kwargs = _positional(func, args, kwargs)
        primitive = getattr(route, "_is_autograd_primitive", False)
        if primitive and not any(map(isbox, args)):
            refuse(f"{_name(func)} of arrays inside a list")
        try:
            return route(*args, **kwargs)
        except NotImplementedError as error:
            if func in _AUTOGRAD and "not defined" in str(error):
                raise TypeError(f"{_name(func)} cannot be differentiated: autograd has no rule for it; {_WAY_OUT}") from error
            raise

    # -- what NumPy arrays have -----------------------------------------------------------------------------------------

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        refuse("np.asarray of a value, which has to be followed further,")

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise TypeError(
            "x[key] = v cannot be differentiated, where x is or comes from an argument; use np.where, multiply by a mask, or "
            "np.concatenate the parts"
        )

    def __float__(self) -> NoReturn:
        refuse("float(x), a number out of what is followed,")

    __int__ = __complex__ = __index__ = __float__

    def item(self, *index: Any) -> NoReturn:
        """Refused: a number has no history."""
        refuse("x.item(), a number out of what is followed,")

    def tolist(self) -> NoReturn:
        """Refused: numbers have no history."""
        refuse("x.tolist(), numbers out of what is followed,")

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __pos__(self) -> Any:
        return self * 1

    def __floordiv__(self, other: Any) -> Any:
        return anp.floor_divide(self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return anp.floor_divide(other, self)

    @property
    def real(self) -> Any:
        """Real part."""
        return anp.real(self)

    @property
    def imag(self) -> Any:
        """Imaginary part."""
        return anp.imag(self)

    @property
    def mT(self) -> Any:
        """The last two dims swapped."""
        return anp.swapaxes(self, -1, -2)

    @property
    def nbytes(self) -> int:
        """Bytes of the value."""
        return int(self.size * self.dtype.itemsize)

    def conj(self) -> Any:
        """Complex conjugate."""
        return anp.conj(self)

    conjugate = conj

    def dot(self, other: Any) -> Any:
        """``np.dot(self, other)``."""
        return np.dot(self, other)

    def copy(self) -> Any:
        """The value itself: it cannot be written to."""
        return self

    def take(self, indices: Any, axis: int | None = None) -> Any:
        """``np.take(self, indices, axis)``."""
        return np.take(self, indices, axis)

    def ptp(self, axis: Any = None, keepdims: bool = False) -> Any:
        """``np.ptp(self, axis)``."""
        return np.ptp(self, axis, keepdims=keepdims)


def _positional(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with its boxes among the positional arguments: autograd follows no others."""
    try:
        bound = inspect.signature(func).bind(*args, **kwargs)
    except (TypeError, ValueError):
        refuse(f"{_name(func)} of an array given by keyword")
    if any(boxes_in(bound.kwargs.values())):
        refuse(f"{_name(func)} of an array given by keyword")
    return bound.args, bound.kwargs


# -- functions without a rule, written with others ----------------------------------------------------------------------

_REDUCING: dict[np.ufunc, Callable[..., Any]] = {
    np.add: np.sum, np.multiply: np.prod, np.maximum: np.max, np.minimum: np.min,
    np.logical_and: np.all, np.logical_or: np.any,
}  # fmt: skip


@composes(np.where)
def _where(condition: Any, *values: Any) -> Any:
    if len(values) != 2:
        return anp.where(condition, *values)
    # autograd's rule wants both to have the result's shape.
    shape = np.broadcast_shapes(np.shape(condition), *map(np.shape, values))
    full = [v + np.zeros(shape, v.dtype) if isbox(v) and v.shape != shape else v for v in values]
    return anp.where(condition, *full)


@composes(np.clip)
def _clip(a: Any, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None) -> Any:
    low = a_min if min is None else min
    high = a_max if max is None else max
    if isbox(low) or isbox(high):
        return np.minimum(np.maximum(a, low), high)
    low, high = (-np.inf if low is None else low), (np.inf if high is None else high)
    return np.where(np.logical_and(a >= low, a <= high), a, np.clip(getval(a), low, high))


@composes(np.take)
def _take(a: Any, indices: Any, axis: int | None = None, **unknown: Any) -> Any:
    if unknown:
        refuse(f"np.take({', '.join(unknown)}=...)")
    indices = np.asarray(indices) if isinstance(indices, (list, tuple)) else indices
    if axis is None:
        return np.ravel(a)[indices]
    return a[(*(slice(None),) * (axis % np.ndim(a)), indices)]


@composes(np.flip)
def _flip(m: Any, axis: Any = None) -> Any:
    axes = range(np.ndim(m)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    backwards = {d % np.ndim(m) for d in axes}
    return m[tuple(slice(None, None, -1) if d in backwards else slice(None) for d in range(np.ndim(m)))]


@composes(np.ptp)
def _ptp(a: Any, axis: Any = None, out: Any = None, keepdims: bool = False) -> Any:
    return np.max(a, axis=axis, keepdims=keepdims) - np.min(a, axis=axis, keepdims=keepdims)


@composes(np.average)
def _average(a: Any, axis: Any = None, weights: Any = None) -> Any:
    if weights is None:
        return np.mean(a, axis=axis)
    if np.shape(weights) != np.shape(a):
        weights = np.expand_dims(weights, tuple(d for d in range(np.ndim(a)) if d != axis % np.ndim(a)))
    return np.sum(a * weights, axis=axis) / np.sum(weights * np.ones(np.shape(a)), axis=axis)


@composes(np.broadcast_to)
def _broadcast_to(array: Any, shape: Any) -> Any:
    shape = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    lead = len(shape) - np.ndim(array)
    return anp.broadcast_to(anp.reshape(array, (1,) * lead + np.shape(array)) if lead else array, shape)


@composes(np.vdot)
def _vdot(a: Any, b: Any) -> Any:
    return np.sum(np.ravel(np.conj(a)) * np.ravel(b))


@composes(np.vecdot)
def _vecdot(a: Any, b: Any) -> Any:
    return np.sum(np.conj(a) * b, axis=-1)


@composes(np.positive)
def _same(x: Any) -> Any:
    return x


@composes(np.copy)
def _copied(a: Any) -> Any:
    return a


@composes(np.cbrt)
def _cbrt(x: Any) -> Any:
    return np.sign(x) * np.abs(x) ** (1 / 3)


@composes(np.float_power)
def _float_power(x: Any, y: Any) -> Any:
    return np.power(x, y)


@composes(np.nansum)
def _nansum(a: Any, axis: Any = None, keepdims: bool = False) -> Any:
    return np.sum(np.where(np.isnan(a), 0.0, a), axis=axis, keepdims=keepdims)


@composes(np.nanmean)
def _nanmean(a: Any, axis: Any = None, keepdims: bool = False) -> Any:
    count = np.sum(np.logical_not(np.isnan(a)), axis=axis, keepdims=keepdims)
    return _nansum(a, axis, keepdims) / count


@composes(np.matrix_transpose)
def _matrix_transpose(x: Any) -> Any:
    return np.swapaxes(x, -1, -2)


@composes(np.take_along_axis)
def _take_along_axis(arr: Any, indices: Any, axis: int = -1) -> Any:
    grid: list[Any] = list(np.ogrid[tuple(map(slice, np.shape(indices)))])
    grid[axis] = indices
    return arr[tuple(grid)]


@composes(np.diagonal)
def _diagonal(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
    a = np.moveaxis(a, (axis1, axis2), (-2, -1))
    first, second = max(-offset, 0), max(offset, 0)
    at = np.arange(max(min(a.shape[-2] - first, a.shape[-1] - second), 0))
    return a[..., at + first, at + second]


@composes(np.linalg.multi_dot)
def _multi_dot(arrays: Any) -> Any:
    return list(itertools.accumulate(arrays, np.dot))[-1]
