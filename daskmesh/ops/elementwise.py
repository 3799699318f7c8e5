"""Elementwise operations: every ufunc by one rule, and NumPy's functions that act element by element."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from daskmesh.algebra import Flow, carried, ufunc_flows
from daskmesh.dtensor import FUNCTIONS, UFUNC_METHODS, DTensor, implements
from daskmesh.graph import Local
from daskmesh.layout import Coord, Layout, make_layout
from daskmesh.moves import reduced
from daskmesh.ops.kinds import apply_ufunc, astype, cast, dtype_of, operand, record
from daskmesh.rules import Signature, elementwise
from daskmesh.tiles import ELEMENTWISE

__all__: list[str] = []

Array = Any
_PLAIN = (DTensor, bool, int, float, complex, np.ndarray, np.generic)

UFUNC_METHODS["__call__"] = apply_ufunc
implements(np.astype)(astype)
implements(np.shape)(lambda a: a.shape)
implements(np.ndim)(lambda a: a.ndim)
implements(np.size)(lambda a, axis=None: a.size if axis is None else a.shape[axis])
implements(np.iscomplexobj)(lambda x: x.dtype.kind == "c")
implements(np.isrealobj)(lambda x: x.dtype.kind != "c")
implements(np.copy)(lambda a, order="K", subok=False: DTensor(a._node))


def _applied(func: Callable[..., Array], operands: Sequence[Any], flows: tuple[Flow, ...] = (), /, **kwargs: Any) -> DTensor:
    """Record a NumPy function that acts element by element and broadcasts its operands."""
    given = [x if isinstance(x, _PLAIN) else np.asarray(x) for x in operands]
    dtype = dtype_of(func, *given, **kwargs)
    signature = elementwise(tuple(operand(x).shape for x in given), flows)
    return record(func, signature, given, dtype, kwargs or None)


def _row(func: Callable[..., Array], operands: int = 1, flows: tuple[Flow, ...] = ()) -> None:
    """Enter a function whose first arguments are its operands and whose others are plain options."""
    ELEMENTWISE.add(func)

    def apply(*args: Any, **kwargs: Any) -> DTensor:
        options = {k: v for k, v in kwargs.items() if k not in ("subok", "order", "copy")}
        if options.pop("out", None) is not None:
            raise TypeError(f"np.{func.__name__}(out=...): a DTensor is no buffer; write y = np.{func.__name__}(...)")
        if len(args) > operands:
            return _applied(_positional, args[:operands], flows, func=func, rest=args[operands:], **options)
        return _applied(func, args, flows, **options)

    implements(func)(apply)


def _positional(*args: Array, func: Callable[..., Array], rest: tuple[Any, ...], **options: Any) -> Array:
    return func(*args, *rest, **options)


_row(np.real, flows=ufunc_flows("real"))
_row(np.imag, flows=ufunc_flows("imag"))
for _func in (np.angle, np.sinc, np.i0, np.nan_to_num, np.fix, np.isreal, np.iscomplex, np.isposinf, np.isneginf):
    _row(_func)
_row(np.isclose, 2)


@implements(np.round, np.around)
def round_(a: DTensor, decimals: int = 0, out: Any = None) -> DTensor:
    if out is not None:
        raise TypeError("np.round(out=...): a DTensor is no buffer; write y = np.round(...)")
    return _applied(np.round, (a,), decimals=int(decimals))


ELEMENTWISE.update((np.round, np.where, np.clip, cast, _positional))


@implements(np.clip)
def clip(
    a: Any, a_min: Any = np._NoValue, a_max: Any = np._NoValue, out: Any = None, *, min: Any = None, max: Any = None,
    dtype: Any = None, casting: str = "same_kind",
) -> Any:  # fmt: skip
    if out is not None:
        raise TypeError("np.clip(out=...): a DTensor is no buffer; write y = np.clip(...)")
    low = min if a_min is np._NoValue else a_min
    high = max if a_max is np._NoValue else a_max
    more = {} if dtype is None else {"dtype": np.dtype(dtype), "casting": casting}
    if low is None and high is None:
        return np.positive(a, **more)
    if low is None:
        return np.minimum(a, high, **more)
    if high is None:
        return np.maximum(a, low, **more)
    return _applied(np.clip, (a, low, high), ufunc_flows("clip"), **more)


def choose(condition: Any, *values: Any) -> Any:
    """``np.where``: terms of the two values alike pass; without them, the indices where the condition holds."""
    if not values:
        return np.nonzero(condition)
    if len(values) != 2:
        raise ValueError("either both or neither of x and y should be given")
    return _applied(np.where, (condition, *values), carried(2, 1))


FUNCTIONS[np.where] = choose


@implements(np.select)
def select(condlist: Sequence[Any], choicelist: Sequence[Any], default: Any = 0) -> Any:
    if len(condlist) != len(choicelist) or not condlist:
        raise ValueError(f"np.select takes as many choices as conditions, got {len(choicelist)} and {len(condlist)}")
    result = default
    dtype = np.result_type(*(_type_of(x) for x in (*choicelist, default)))
    for condition, choice in zip(reversed(condlist), reversed(choicelist), strict=True):
        result = np.where(condition, choice, result)
    return np.astype(result, dtype)


def _type_of(x: Any) -> Any:
    return x if isinstance(x, (bool, int, float, complex)) else operand(x if hasattr(x, "dtype") else np.asarray(x)).dtype


@implements(np.result_type)
def result_type(*arrays_and_dtypes: Any) -> np.dtype[Any]:
    return np.result_type(*(x.dtype if isinstance(x, DTensor) else x for x in arrays_and_dtypes))


@implements(np.can_cast)
def can_cast(from_: Any, to: Any, casting: Any = "safe") -> bool:
    return bool(np.can_cast(from_.dtype if isinstance(from_, DTensor) else from_, to, casting))


@implements(np.allclose)
def allclose(a: Any, b: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Any:
    """A 0-d DTensor of bool, not computed before someone asks for its truth."""
    return np.all(np.isclose(a, b, rtol=rtol, atol=atol, equal_nan=equal_nan))


@implements(np.array_equal)
def array_equal(a1: Any, a2: Any, equal_nan: bool = False) -> Any:
    if np.shape(a1) != np.shape(a2):
        return False
    return array_equiv(a1, a2) if not equal_nan else np.all((a1 == a2) | ((a1 != a1) & (a2 != a2)))


@implements(np.array_equiv)
def array_equiv(a1: Any, a2: Any) -> Any:
    try:
        np.broadcast_shapes(np.shape(a1), np.shape(a2))
    except ValueError:
        return False
    return np.all(np.equal(a1, a2))


@implements(np.interp)
def interp(x: Any, xp: Any, fp: Any, left: Any = None, right: Any = None, period: Any = None) -> DTensor:
    """Elementwise in `x`; the table, plain or a DTensor, is whole on every rank."""
    table = [v if isinstance(v, _PLAIN) else np.asarray(v) for v in (xp, fp)]
    x = x if isinstance(x, _PLAIN) else np.asarray(x)
    options = {k: v for k, v in (("left", left), ("right", right), ("period", period)) if v is not None}
    dtype = np.dtype(np.complex128 if operand(table[1]).dtype.kind == "c" else np.float64)
    labels = tuple(range(len(operand(x).shape)))
    signature = Signature((labels, ("table",), ("table",)), labels)
    return record(np.interp, signature, (x, *table), dtype, options)


@implements(np.digitize)
def digitize(x: DTensor, bins: Any, right: bool = False) -> DTensor:
    """Elementwise in `x`; the bins are whole on every rank."""
    bins = bins if isinstance(bins, DTensor) else np.asarray(bins)
    labels = tuple(range(x.ndim))
    return record(np.digitize, Signature((labels, ("bins",)), labels), (x, bins), np.dtype(np.intp), {"right": right})


# -- ufunc.outer ------------------------------------------------------------------------------------------------------


def ufunc_outer(ufunc: np.ufunc, a: Any, b: Any, *, dtype: Any = None) -> DTensor:
    """``ufunc.outer``: all pairs; cut along the dims of one operand, or of both on a mesh of several dims."""
    operands = [x if isinstance(x, _PLAIN) else np.asarray(x) for x in (a, b)]
    shapes = [operand(x).shape for x in operands]
    left = tuple(range(len(shapes[0])))
    right = tuple(range(len(left), len(left) + len(shapes[1])))
    constants = tuple(x if isinstance(x, (bool, int, float, complex, np.number)) else None for x in operands)
    signature = Signature((left, right), left + right, None, ufunc_flows(ufunc.__name__, constants))
    options = {} if dtype is None else {"dtype": np.dtype(dtype)}
    if ufunc.nin != 2 or ufunc.nout != 1:
        raise TypeError(f"np.{ufunc.__name__}.outer: only ufuncs of two operands and one result have an outer on DTensors")
    return record(_outer, signature, operands, dtype_of(ufunc, *operands, **options), {"ufunc": ufunc, **options})


def _outer(a: Array, b: Array, ufunc: np.ufunc, **options: Any) -> Array:
    return ufunc.outer(a, b, **options)


UFUNC_METHODS["outer"] = ufunc_outer


# -- arrays like others -----------------------------------------------------------------------------------------------


def _like(a: DTensor, dtype: Any, shape: Any, func: Callable[..., Array], *args: Any) -> DTensor:
    """A constant array in the layout of `a`, where that fits the shape; terms become copies."""
    dtype = a.dtype if dtype is None else np.dtype(dtype)
    layout = a.layout
    size = layout.shape if shape is None else ((shape,) if isinstance(shape, int) else tuple(shape))
    placements = tuple(reduced(layout.placements))
    if size == layout.shape:
        layout = layout.replace(placements=placements, dtype=dtype)
    else:
        layout = make_layout(layout.mesh, placements if len(size) == layout.ndim else (), size, dtype)
    return DTensor(Local(layout, a._node.world, _local_like, (), {"layout": layout, "func": func, "args": args}, located=True))


def _local_like(coord: Coord, layout: Layout, func: Callable[..., Array], args: tuple[Any, ...]) -> Array:
    return func(layout.local_shape(coord), *args, dtype=layout.dtype)


@implements(np.zeros_like)
def zeros_like(a: DTensor, dtype: Any = None, order: Any = "K", subok: bool = True, shape: Any = None, **_: Any) -> DTensor:
    return _like(a, dtype, shape, np.zeros)


@implements(np.ones_like)
def ones_like(a: DTensor, dtype: Any = None, order: Any = "K", subok: bool = True, shape: Any = None, **_: Any) -> DTensor:
    return _like(a, dtype, shape, np.ones)


@implements(np.empty_like)
def empty_like(a: DTensor, dtype: Any = None, order: Any = "K", subok: bool = True, shape: Any = None, **_: Any) -> DTensor:
    """Zeros: replicas must agree, and undefined memory does not."""
    return _like(a, dtype, shape, np.zeros)


@implements(np.full_like)
def full_like(
    a: Any, fill_value: Any, dtype: Any = None, order: Any = "K", subok: bool = True, shape: Any = None, **_: Any
) -> DTensor:
    if math.prod(np.shape(fill_value)) == 1 and not isinstance(fill_value, DTensor):
        value = np.asarray(fill_value).reshape(())[()]
        return _like(a, dtype, shape, np.full, value)
    frame = _like(a, dtype, shape, np.zeros)
    fill = fill_value if isinstance(fill_value, DTensor) else np.asarray(fill_value)
    return record(_filled, elementwise((frame.shape, fill.shape)), (frame, fill), frame.dtype)


def _filled(frame: Array, fill: Array) -> Array:
    return np.full_like(frame, fill)
