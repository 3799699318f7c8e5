"""Placements: what one mesh dim does to an array, and the table of reductions behind `Partial`.

A placement is a value. ``Shard(d)`` cuts tensor dim ``d`` over the mesh dim, ``Replicate()`` keeps a full copy on every
coordinate, ``Partial(op)`` holds terms whose reduction by ``op`` over the coordinates is the value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Partial", "Placement", "PlacementError", "ReduceType", "Reduction", "Replicate", "Shard", "reduction"]

Array = Any


class PlacementError(ValueError):
    """A placement, mesh dim or layout that cannot be.

    Examples
    --------
    >>> import daskmesh as dm
    >>> issubclass(dm.PlacementError, ValueError)
    True
    """


class ReduceType(Enum):
    """How the terms of a `Partial` combine.

    Examples
    --------
    >>> import daskmesh as dm
    >>> [t.value for t in dm.ReduceType]
    ['sum', 'max', 'min', 'prod', 'avg', 'any', 'all']
    """

    kRedSum = "sum"
    kRedMax = "max"
    kRedMin = "min"
    kRedProd = "prod"
    kRedAvg = "avg"
    kRedAny = "any"
    kRedAll = "all"


class _Predicates:
    """The questions every placement answers, as the pages ask them."""

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        return isinstance(self, Shard) and (dim is None or self.dim == dim)

    def is_replicated(self) -> bool:
        return isinstance(self, Replicate)

    def is_partial(self) -> bool:
        return isinstance(self, Partial)


@dataclass(frozen=True, slots=True)
class Shard(_Predicates):
    """Cut tensor dim `dim` over the mesh dim.

    Parameters
    ----------
    dim : int
        Tensor dim; negative ones are counted from the end once the array is known.

    Examples
    --------
    >>> import daskmesh as dm
    >>> dm.Shard(0)
    Shard(0)
    """

    dim: int

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, (int, np.integer)):
            raise TypeError(f"Shard(dim) takes an int, got {self.dim!r}; write e.g. Shard(0)")
        object.__setattr__(self, "dim", int(self.dim))

    def get_dim(self) -> int:
        return self.dim

    def __repr__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True, slots=True)
class Replicate(_Predicates):
    """Keep a full copy on every coordinate of the mesh dim.

    Examples
    --------
    >>> import daskmesh as dm
    >>> dm.Replicate() == dm.Replicate()
    True
    """

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True, init=False)
class Partial(_Predicates):
    """Hold terms; the value is their reduction over the mesh dim.

    Parameters
    ----------
    reduce_type : ReduceType or str
        One of the seven members, or its string: sum max min prod avg any all.

    Examples
    --------
    >>> import daskmesh as dm
    >>> dm.Partial(), dm.Partial("max") == dm.Partial(dm.ReduceType.kRedMax)
    (Partial('sum'), True)
    """

    reduce_type: ReduceType

    def __init__(self, reduce_type: ReduceType | str = ReduceType.kRedSum) -> None:
        names = [t.value for t in ReduceType]
        if not isinstance(reduce_type, (ReduceType, str)):
            raise TypeError(f"Partial(reduce_type) takes a ReduceType or one of {names}, got {reduce_type!r}")
        if isinstance(reduce_type, str) and reduce_type not in names:
            raise PlacementError(f"Partial({reduce_type!r}): unknown reduce type; known: {', '.join(names)}")
        object.__setattr__(self, "reduce_type", ReduceType(reduce_type))

    @property
    def op(self) -> str:
        """The reduction's name, one of the seven strings."""
        return self.reduce_type.value

    def __repr__(self) -> str:
        return f"Partial({self.op!r})"


Placement = Shard | Replicate | Partial


class Reduction(NamedTuple):
    """One row of the reduction table.

    ``kinds``: the kinds of dtype that it takes. ``copies``: placing a value keeps a copy on every coordinate; otherwise
    coordinate 0 holds the value and the others the neutral element. ``begin(x, n)`` makes the state of a fold of ``n``
    terms from the first one (a fresh, writable array, which the fold may overwrite with its result), ``add(state, x, n)``
    takes the next term, ``end(state, n)`` gives the value in the dtype given. Later terms are only read.
    """

    op: str
    kinds: str
    copies: bool
    neutral: Callable[[np.dtype[Any]], Any]
    begin: Callable[[Array, int], Any]
    add: Callable[[Any, Array, int], Any]
    end: Callable[[Any, int], Array]

    def takes(self, dtype: np.dtype[Any]) -> bool:
        """Whether values of a dtype can be reduced: no sum of dates, nor of strings. Dtypes that others made are trusted."""
        return dtype.kind in self.kinds or dtype.isbuiltin == 2

    def fold(self, terms: Iterable[Array], n: int) -> Array:
        """Reduce `n` terms in the order given, over the first one; the same order gives the same bits."""
        state: Any = None
        for i, x in enumerate(terms):
            state = self.add(state, x, n) if i else self.begin(x, n)
        return self.end(state, n)


def _zero(dtype: np.dtype[Any]) -> Any:
    return np.zeros((), dtype)[()]


def _one(dtype: np.dtype[Any]) -> Any:
    return np.ones((), dtype)[()]


def _lowest(dtype: np.dtype[Any]) -> Any:
    if dtype.kind in "iu":
        return dtype.type(np.iinfo(dtype).min)
    if dtype.kind == "c":
        return dtype.type(complex(-np.inf, -np.inf))
    if dtype.kind in "mM":  # the lowest number is NaT, which wins every comparison
        return np.int64(np.iinfo(np.int64).min + 1).view(dtype)
    return dtype.type(-np.inf) if dtype.kind == "f" else _zero(dtype)


def _highest(dtype: np.dtype[Any]) -> Any:
    if dtype.kind in "iu":
        return dtype.type(np.iinfo(dtype).max)
    if dtype.kind == "c":
        return dtype.type(complex(np.inf, np.inf))
    if dtype.kind in "mM":
        return np.int64(np.iinfo(np.int64).max).view(dtype)
    return dtype.type(np.inf) if dtype.kind == "f" else _one(dtype)


def _keep(x: Array, n: int) -> Array:
    return x


def _into(ufunc: np.ufunc, state: Array, x: Array) -> Array:
    return ufunc(state, x) if isinstance(state, np.generic) else ufunc(state, x, out=state)


def _by(ufunc: np.ufunc) -> dict[str, Callable[..., Any]]:
    """Fold by a ufunc that keeps the dtype, in place of the first term (a NumPy scalar has no place)."""

    def add(state: Array, x: Array, n: int) -> Array:
        return _into(ufunc, state, x)

    return {"begin": _keep, "add": add, "end": _keep}


def _truth(ufunc: np.ufunc) -> dict[str, Callable[..., Any]]:
    """Fold of truth values: numbers count as ``x != 0`` and come back as 0 or 1 in their dtype."""

    def begin(x: Array, n: int) -> Any:
        return x != 0, x.dtype

    def add(state: Any, x: Array, n: int) -> Any:
        return ufunc(state[0], x != 0), state[1]

    def end(state: Any, n: int) -> Array:
        return state[0].astype(state[1])

    return {"begin": begin, "add": add, "end": end}


def _divided(x: Array, n: int) -> Any:
    """Floats: x / n. Integers: floor quotient and remainder, so that the sum is never formed."""
    if x.dtype.kind in "fc":
        return (x / x.dtype.type(n)).astype(x.dtype, copy=False)
    if x.dtype.kind == "m":  # NaT is the lowest integer: it has to be told apart
        return (*_divided(x.astype(np.int64), n)[:2], x.dtype, np.isnat(x))
    wide = x.astype(np.uint64 if x.dtype.kind == "u" else np.int64)
    return (*np.divmod(wide, wide.dtype.type(n)), x.dtype)


def _add_divided(state: Any, x: Array, n: int) -> Any:
    term = _divided(x, n)
    if not isinstance(term, tuple):
        return _into(np.add, state, term)
    missing = (state[3] | term[3],) if len(state) > 3 else ()
    return _into(np.add, state[0], term[0]), _into(np.add, state[1], term[1]), state[2], *missing


def _end_divided(state: Any, n: int) -> Array:
    if not isinstance(state, tuple):
        return state
    quotient, remainder, dtype, *missing = state
    # The floor quotients of terms near the lowest integer may wrap; the remainders bring the sum back. Ufuncs on
    # integers wrap silently, operators on NumPy scalars warn.
    floor = np.add(quotient, remainder // remainder.dtype.type(n))
    inexact = remainder % remainder.dtype.type(n) != 0
    whole = (floor + ((floor < 0) & inexact).astype(floor.dtype)).astype(dtype)
    return np.where(missing[0], dtype.type("NaT"), whole) if missing else whole


_TABLE = {
    r.op: r
    for r in (
        Reduction("sum", "biufcm", False, _zero, **_by(np.add)),
        Reduction("prod", "biufc", False, _one, **_by(np.multiply)),
        Reduction("max", "biufcmM", True, _lowest, **_by(np.maximum)),
        Reduction("min", "biufcmM", True, _highest, **_by(np.minimum)),
        Reduction("any", "biufc", False, _zero, **_truth(np.logical_or)),
        Reduction("all", "biufc", True, _one, **_truth(np.logical_and)),
        Reduction("avg", "biufcm", True, _zero, begin=_divided, add=_add_divided, end=_end_divided),
    )
}


def reduction(op: str) -> Reduction:
    """The row of the reduction table for one of the seven strings.

    Examples
    --------
    >>> from daskmesh.placement import reduction
    >>> import numpy as np
    >>> int(reduction("avg").fold([np.int64(-1), np.int64(-2)], 2))
    -1
    """
    try:
        return _TABLE[op]
    except KeyError:
        raise PlacementError(f"unknown reduction {op!r}; known: {', '.join(_TABLE)}") from None
