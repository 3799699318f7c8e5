"""Routes: from plain NumPy calls on autograd's boxes to autograd's primitives.

A *box* stands for a value whose computation is recorded. autograd records calls of its own wrappers in ``autograd.numpy``; here
NumPy's two protocols lead plain ``np.*`` calls on a box to those wrappers, by a table. A few functions that autograd has no
rule for are written with others that have one. What cannot be followed is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NoReturn, TypeVar, cast

import autograd.numpy as anp
import numpy as np
from autograd.extend import primitive as _primitive
from autograd.numpy.numpy_boxes import ArrayBox
from autograd.tracer import isbox, trace_primitives_map

__all__ = ["Followed", "boxes_in", "composes", "has_box", "primitive", "reduces", "refuse"]

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


_REDUCING: dict[np.ufunc, Callable[..., Any]] = {
    np.add: np.sum, np.multiply: np.prod, np.maximum: np.max, np.minimum: np.min,
    np.logical_and: np.all, np.logical_or: np.any,
}  # fmt: skip


def reduces(ufunc: np.ufunc, func: Callable[..., Any]) -> None:
    """Let ``ufunc.reduce`` be ``func(x, axis=, keepdims=)``."""
    _REDUCING[ufunc] = func


def boxes_in(values: Any) -> Iterator[Any]:
    """The boxes among some values, in nested lists and tuples too."""
    for value in values:
        if isbox(value):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from boxes_in(value)


def has_box(values: Any) -> bool:
    """Whether there is a box among some values."""
    return next(boxes_in(values), None) is not None


def _refuse_ignored(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError for options that autograd's rules do not look at."""
    for option, default in (("where", True), ("initial", None), ("out", None)):
        value = kwargs.get(option, default)
        if value is not default and value is not np._NoValue:
            refuse(f"{_name(func)}({option}=...)")


def _name(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", str(func))
    module = getattr(func, "__module__", None) or ("numpy" if getattr(np, name, None) is func else "")
    return f"np.{name}" if module.startswith("numpy") else f"{module}.{name}".lstrip(".")


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
        if ufunc not in self.own and ufunc not in _COMPOSED and (ufunc in _AUTOGRAD or ufunc in trace_primitives_map):
            if given.get("where", True) is not True:
                refuse(f"{_name(ufunc)}(where=...)")
            given["called_by_autograd_dispatcher"] = True
        return self._routed(ufunc, inputs, given)

    def __array_function__(self, func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        return self._routed(func, args, kwargs)

    def _routed(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The last: what autograd wraps besides NumPy, such as the ufuncs of scipy.special once autograd.scipy is imported.
        route: Any = self.own.get(func) or _COMPOSED.get(func) or _AUTOGRAD.get(func) or trace_primitives_map.get(func)
        if route is None:
            refuse(_name(func))
        if route is _AUTOGRAD.get(func):
            if has_box(kwargs.values()):
                args, kwargs = _positional(func, args, kwargs)
            _refuse_ignored(func, kwargs)
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

    def transpose(self, *axes: Any) -> Any:
        """``np.transpose(self, axes)``."""
        return np.transpose(self, axes if len(axes) > 1 else axes[0] if axes else None)


def _method(func: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return func(self, *args, **kwargs)

    call.__name__, call.__doc__ = func.__name__, f"``np.{func.__name__}``."
    return call


# autograd's own methods go past the table.
for _func in (
    np.sum, np.prod, np.mean, np.max, np.min, np.var, np.std, np.ptp, np.any, np.all, np.argmax, np.argmin, np.cumsum, np.cumprod,
    np.clip, np.diagonal, np.trace, np.repeat, np.squeeze, np.swapaxes, np.ravel, np.take, np.argsort, np.round,
):  # fmt: skip
    setattr(Followed, _func.__name__, _method(_func))


def _positional(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with its boxes among the positional arguments: autograd follows no others."""
    try:
        bound = inspect.signature(func).bind(*args, **kwargs)
    except (TypeError, ValueError):
        refuse(f"{_name(func)} of an array given by keyword")
    if has_box(bound.kwargs.values()):
        refuse(f"{_name(func)} of an array given by keyword")
    return bound.args, bound.kwargs
