"""Partial algebra: through which operations the terms of a Partial may pass without being reduced first.

A `Flow` says, for one mesh dim: where these operands hold terms of these reductions (the others hold the same value on every
coordinate), the operation on the locals gives terms of that reduction. It must hold for all values of its dtypes, so the
table below is careful where a reader may not be:

- integers wrap: `-x` and `x + c` keep no order, and a cast to a wider integer or to float does not keep a sum;
- an empty part contributes -inf to a max, so `sqrt` may pass a min but not a max;
- a zero divisor turns the zeros that pad a term into nan, so only a known divisor passes.

One exception, which every such system makes: ``Partial * Replicate`` and matmul stay Partial although an infinite factor meets
those zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

__all__ = ["PLACED", "Flow", "carried", "linear", "multilinear", "passes", "reduction_flows", "ufunc_flows"]

# Reductions for which a Replicate operand must be placed (value on coordinate 0, neutral elsewhere); a copy serves the others.
PLACED = frozenset({"sum", "prod"})

Dtype = np.dtype[Any]


class Flow(NamedTuple):
    """One way for terms to pass: a reduction per operand (None: the same value everywhere), the result's, and a dtype rule."""

    inputs: tuple[str | None, ...]
    output: str
    rule: str


def _ring(source: Dtype, target: Dtype) -> bool:
    """The cast commutes with + and *: no integer widens, for narrow ones wrap and wide ones do not."""
    if source.kind == "m":
        return source == target
    if source.kind in "iu":
        return target.kind in "iu" and target.itemsize <= source.itemsize
    if source.kind == "b":
        return target.kind == "b"
    return source.kind in "fc" and target.kind in ("fc" if source.kind == "f" else "c")


def _field(source: Dtype, target: Dtype) -> bool:
    return source.kind in "fc" and target.kind in "fc"


def _order(source: Dtype, target: Dtype) -> bool:
    """The cast keeps the order."""
    if source.kind in "mM":
        return source == target
    real = source.kind in "biuf" and target.kind in "biuf"
    return real and (target.kind == "f" or np.can_cast(source, target, "safe"))


def _float(source: Dtype, target: Dtype) -> bool:
    return source.kind == target.kind == "f"


def _bool(source: Dtype, target: Dtype) -> bool:
    return source.kind == target.kind == "b"


def _same(source: Dtype, target: Dtype) -> bool:
    return source == target


def _always(source: Dtype, target: Dtype) -> bool:
    return True


def _field_or_same(source: Dtype, target: Dtype) -> bool:
    return source == target or _field(source, target)


def _order_or_same(source: Dtype, target: Dtype) -> bool:
    return source == target or _order(source, target)


_RULES: dict[str, Callable[[Dtype, Dtype], bool]] = {
    "ring": _ring, "field": _field, "order": _order, "float": _float, "bool": _bool, "same": _same, "always": _always,
    "field or same": _field_or_same, "order or same": _order_or_same,
}  # fmt: skip
_CAST = {
    "sum": "ring", "prod": "ring", "avg": "field or same", "max": "order or same", "min": "order or same",
    "any": "same", "all": "same",
}  # fmt: skip


def passes(rule: str, source: Dtype, target: Dtype) -> bool:
    """Whether terms of dtype `source` may pass into a result of dtype `target` under a rule.

    Examples
    --------
    >>> import numpy as np
    >>> from daskmesh.algebra import passes
    >>> passes("ring", np.dtype("f4"), np.dtype("f8")), passes("ring", np.dtype("i4"), np.dtype("i8"))
    (True, False)
    """
    return _RULES[rule](source, target)


@lru_cache(256)
def carried(n: int = 1, fixed: int = 0) -> tuple[Flow, ...]:
    """Moves and casts of `n` operands (after `fixed` ones that select): terms of every reduction pass, all operands alike."""
    return tuple(Flow((None,) * fixed + (op,) * n, op, rule) for op, rule in _CAST.items())


@lru_cache(256)
def linear(n: int = 1) -> tuple[Flow, ...]:
    """Linear in all `n` operands together, such as add."""
    return Flow(("sum",) * n, "sum", "ring"), Flow(("avg",) * n, "avg", "field")


@lru_cache(256)
def multilinear(n: int) -> tuple[Flow, ...]:
    """Linear in each of `n` operands apart, such as multiply and matmul: terms of one pass if the others are whole."""
    return tuple(
        Flow(_only(k, op, n), op, rule) for op, rule in (("sum", "ring"), ("avg", "field")) for k in range(n)
    )


def _only(k: int, op: str, n: int) -> tuple[str | None, ...]:
    return tuple(op if i == k else None for i in range(n))


def reduction_flows(op: str) -> tuple[Flow, ...]:
    """Terms that pass a reduction of tensor dims by `op`."""
    if op == "sum":
        return linear(1)
    return (Flow((op,), op, {"prod": "ring", "max": "order", "min": "order"}.get(op, "always")),)


_UP = (Flow(("max",), "max", "order"), Flow(("min",), "min", "order"))
_SWAP = {"max": "min", "min": "max"}
_UNARY: dict[str, tuple[Flow, ...]] = {
    # Increasing on the whole real line.
    **dict.fromkeys("exp exp2 expm1 tanh sinh arctan arcsinh cbrt floor ceil trunc rint sign".split(), _UP),
    # Increasing from some point on and nan below: the least term is the first to give nan, so a min is right, a max not.
    **dict.fromkeys("sqrt log log2 log10 log1p arccosh".split(), (_UP[1],)),
    **dict.fromkeys("deg2rad rad2deg radians degrees".split(), (Flow(("sum",), "sum", "field"), linear(1)[1], *_UP)),
    "positive": carried(1),
    "conjugate": linear(1),
    "real": (Flow(("sum",), "sum", "field"), linear(1)[1]),
    "imag": (Flow(("sum",), "sum", "field"), linear(1)[1]),
    "negative": (*linear(1), Flow(("max",), "min", "float"), Flow(("min",), "max", "float")),
    "absolute": (Flow(("prod",), "prod", "field"),),
    "square": (Flow(("prod",), "prod", "ring"),),
    "logical_not": (Flow(("any",), "all", "always"), Flow(("all",), "any", "always")),
    "invert": (
        Flow(("any",), "all", "bool"), Flow(("all",), "any", "bool"),
        Flow(("max",), "min", "same"), Flow(("min",), "max", "same"),
    ),
}  # fmt: skip
_UNARY["fabs"] = _UNARY["absolute"]
_CLIP = tuple(Flow((op, None, None), op, "order") for op in ("max", "min"))


def _lattice(join: str, meet: str, rule: str) -> tuple[Flow, ...]:
    """`maximum` joins max with max, and distributes over min; `logical_or` and `logical_and` likewise."""
    return Flow((join, join), join, rule), Flow((meet, None), meet, rule), Flow((None, meet), meet, rule)


_SEVERAL: dict[str, tuple[Flow, ...]] = {
    "add": linear(2),
    "subtract": linear(2),
    "multiply": (*multilinear(2), Flow(("prod", "prod"), "prod", "ring")),
    "maximum": _lattice("max", "min", "order"),
    "minimum": _lattice("min", "max", "order"),
    "logical_or": _lattice("any", "all", "always"),
    "logical_and": _lattice("all", "any", "always"),
    "bitwise_or": _lattice("any", "all", "bool"),
    "bitwise_and": _lattice("all", "any", "bool"),
    "clip": _CLIP,
}

_NUMBERS = (bool, int, float, complex, np.number, np.bool_)
_HUGE = 1e300


@lru_cache(4096)
def ufunc_flows(name: str, constants: tuple[Any, ...] = ()) -> tuple[Flow, ...]:
    """What passes a NumPy ufunc, by its name; empty where every Partial must be reduced first.

    Parameters
    ----------
    constants : tuple
        Per operand the Python or NumPy scalar that it is, None for an array; a known factor or addend lets more pass.

    Examples
    --------
    >>> from daskmesh.algebra import ufunc_flows
    >>> [(f.inputs, f.output) for f in ufunc_flows("negative")]
    [(('sum',), 'sum'), (('avg',), 'avg'), (('max',), 'min'), (('min',), 'max')]
    >>> ufunc_flows("divide"), len(ufunc_flows("divide", (None, 2)))
    ((), 4)
    """
    known = [k for k, c in enumerate(constants) if isinstance(c, _NUMBERS)]
    if len(constants) != 2 or len(known) != 1 or name not in ("add", "subtract", "multiply", "divide"):
        return _UNARY.get(name) or _SEVERAL.get(name, ())
    k = known[0]
    c = constants[k]
    finite = bool(abs(c) < _HUGE)  # False for nan too
    c = complex(c) if finite else complex(math.inf)
    if name in ("add", "subtract"):
        rises = 1 if name == "add" or k == 1 else -1
        return linear(2) + (_monotone(1 - k, rises) if finite and not c.imag else ())
    if not finite or (name == "divide" and (k == 0 or not c)):
        return ()
    scaled = tuple(Flow(_only(1 - k, f.output, 2), f.output, f.rule) for f in linear(1))
    rises = 0 if c.imag else (c.real > 0) - (c.real < 0)
    product = (Flow(("prod", "prod"), "prod", "ring"),) if name == "multiply" else ()
    return scaled + product + (_monotone(1 - k, rises) if rises else ())


def _monotone(k: int, rises: int) -> tuple[Flow, ...]:
    """Operand `k` of two, floats only, the other a finite constant."""
    return tuple(Flow(_only(k, op, 2), op if rises > 0 else other, "float") for op, other in _SWAP.items())
