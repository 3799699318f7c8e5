"""Handing over: a function lets the type of one of its arguments answer in its stead, as NumPy's functions do.

Arguments that are plain arrays are taken over as they are at the call, for the caller may go on to write into them.

A type that wants to be asked has ``__daskmesh_function__(func, args, kwargs)``, a static method. So functions on lower floors
know nothing of those who follow what is computed, to differentiate it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import numpy as np

__all__ = ["handing_over", "overriding", "own"]

F = TypeVar("F", bound=Callable[..., Any])


def overriding(values: Iterable[Any]) -> Callable[..., Any] | None:
    """The ``__daskmesh_function__`` of the first value whose type has one.

    Examples
    --------
    >>> overriding([1, "a"]) is None
    True
    """
    for value in values:
        answer: Callable[..., Any] | None = getattr(type(value), "__daskmesh_function__", None)
        if answer is not None:
            return answer
    return None


def handing_over(func: F) -> F:
    """Let a type among the arguments answer for `func`.

    Examples
    --------
    >>> class Loud:
    ...     @staticmethod
    ...     def __daskmesh_function__(func, args, kwargs):
    ...         return func.__name__.upper()
    >>> @handing_over
    ... def reshard(x):
    ...     return x
    >>> reshard(1), reshard(Loud())
    (1, 'RESHARD')
    """

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        answer = overriding((*args, *kwargs.values()))
        return func(*args, **kwargs) if answer is None else answer(call, args, kwargs)

    return cast(F, call)


def own(value: Any) -> Any:
    """An argument that is a plain array, or a list or tuple of some, as a copy; others as they are.

    Examples
    --------
    >>> weights = np.ones(2)
    >>> kept = own([weights, 3])
    >>> weights[:] = 0
    >>> kept
    [array([1., 1.]), 3]
    """
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in (list, tuple) and any(isinstance(x, np.ndarray | list | tuple) for x in value):
        return type(value)(map(own, value))
    return value
