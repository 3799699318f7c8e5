"""The kinds of operations: from a NumPy call to a recorded node, by the one propagation rule.

Every row of the operator table comes down to `prepare`: the rule decides what layouts the operands need and what layout the
result has, and operands that lie elsewhere are moved. What is left is a pure function of local arrays, which `Prepared.local`
(one result) or `Prepared.several` records. `record` is both halves in one.

A function that must know where it runs is recorded as ``located``: it gets the coordinate first, and layouts by keyword.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import getitem
from typing import Any, NamedTuple

import numpy as np

from daskmesh.algebra import Flow, carried, ufunc_flows
from daskmesh.conversion import shard_tensor
from daskmesh.creation import build_box
from daskmesh.dtensor import DTensor
from daskmesh.graph import Local, local_of
from daskmesh.layout import Coord, Layout
from daskmesh.moves import moved
from daskmesh.placement import Partial, reduction
from daskmesh.rules import Decision, Dense, Signature, decide, elementwise

__all__ = ["GUFUNCS", "Prepared", "aligned", "apply_ufunc", "astype", "cast", "dtype_of", "operand", "prepare",
           "record", "selected"]  # fmt: skip

Array = Any
Dtype = np.dtype[Any]
_EMBED_SIZE = 2**13  # elements of a plain operand that travel with the program, instead of as an array of their own
_SCALAR_DTYPES = {t: np.dtype(t) for t in (bool, int, float, complex)}
_SCALARS = {t: Dense((), d) for t, d in _SCALAR_DTYPES.items()}

# Generalised ufuncs, whose operands have core dims: ufunc -> its meaning on DTensors.
GUFUNCS: dict[Callable[..., Any], Callable[..., Any]] = {}


class Prepared(NamedTuple):
    """An operation that is decided: its operands are nodes, or constants, where the rule wants them."""

    decision: Decision
    args: tuple[Any, ...]
    world: str

    def local(
        self,
        func: Callable[..., Array],
        kwargs: Mapping[str, Any] | None = None,
        *,
        located: bool = False,
        layout: Layout | None = None,
    ) -> DTensor:
        """Record ``func(*locals of the operands, **kwargs)``.

        Parameters
        ----------
        located : bool
            `func` takes the coordinate first.
        layout : Layout, optional
            Of what `func` yields, if it is not the one decided.
        """
        decision = self.decision
        node = Local(layout or decision.output, self.world, func, self.args, kwargs, located=located)
        if layout is not None or decision.result == decision.output:
            return DTensor(node)
        return DTensor(moved(node, decision.result, lambda: decision.text))

    def several(
        self,
        func: Callable[..., tuple[Array, ...]],
        layouts: Sequence[Layout],
        kwargs: Mapping[str, Any] | None = None,
        *,
        located: bool = False,
    ) -> tuple[DTensor, ...]:
        """Record a function that returns one local array per layout; it runs once in every program that reads any of them."""
        node = Local(layouts[0], self.world, func, self.args, kwargs, located=located)
        return tuple(DTensor(Local(layout, self.world, getitem, (node, i))) for i, layout in enumerate(layouts))


def prepare(signature: Signature, operands: Sequence[Any], dtype: Dtype, output: Layout | None = None) -> Prepared:
    """Decide an operation and bring its operands to where it needs them.

    **Communication**: none here; operands that are moved are moved when the result is computed, as ``explain()`` says.

    Parameters
    ----------
    operands : sequence
        DTensors, NumPy arrays and scalars; at least one DTensor.
    dtype : dtype
        Of the result.
    output : Layout, optional
        The layout that the result must have.
    """
    facts = tuple(map(operand, operands))
    # Without an output as everywhere else: the cache of `decide` goes by the arguments as they are written.
    decision = decide(signature, facts, dtype) if output is None else decide(signature, facts, dtype, output)
    return _prepared(decision, operands)


def _prepared(decision: Decision, operands: Sequence[Any]) -> Prepared:
    world = next(x._node.world for x in operands if isinstance(x, DTensor))
    args: list[Any] = []
    for x, target in zip(operands, decision.operands, strict=True):
        if isinstance(x, DTensor):
            node = x._node
            args.append(node if node.layout is target or node.layout == target else moved(node, target, lambda: decision.text))
        elif type(x) in _SCALARS and not target.partial_axes:
            args.append(x)
        else:
            args.append(_constant(x, target, world))
    return Prepared(decision, tuple(args), world)


def record(
    func: Callable[..., Array],
    signature: Signature,
    operands: Sequence[Any],
    dtype: Dtype,
    kwargs: Mapping[str, Any] | None = None,
    *,
    output: Layout | None = None,
    located: bool = False,
) -> DTensor:
    """Record ``func(*locals of the operands, **kwargs)`` with the layouts that the propagation rule chooses.

    **Communication**: none here; what has to move is moved when the result is computed, as ``explain()`` says.

    Parameters
    ----------
    operands : sequence
        DTensors, NumPy arrays and scalars; at least one DTensor.
    dtype : dtype
        Of the result.
    output : Layout, optional
        The layout that the result must have.
    located : bool
        `func` takes the coordinate first.
    """
    return prepare(signature, operands, dtype, output).local(func, kwargs, located=located)


@lru_cache(4096)
def _keeping(ndim: int, whole: tuple[int, ...], flows: tuple[Flow, ...]) -> Signature:
    labels = tuple(range(ndim))
    return Signature((labels,), labels, None, flows, frozenset(whole))


def aligned(x: DTensor, whole: Sequence[int] = (), flows: tuple[Flow, ...] = ()) -> DTensor:
    """The same value with the tensor dims `whole` not cut, and no Partial but those that `flows` let pass.

    **Communication**: what the redistribution moves; none if `x` is so already.
    """
    target = decide(_keeping(x.ndim, tuple(whole), flows), (x.layout,), x.dtype)
    return x if target.operands[0] == x.layout else DTensor(moved(x._node, target.operands[0], target.text))


def operand(x: Any) -> Layout | Dense:
    """What the propagation rule wants to know of an operand."""
    if isinstance(x, DTensor):
        return x._node.layout
    return _SCALARS.get(type(x)) or Dense(x.shape, x.dtype)


def _constant(x: Any, target: Layout, world: str) -> Any:
    """A plain operand in the layout wanted: embedded where every rank uses all of it, else a node that takes its part.

    In either case a copy: the caller may go on to write into the array.
    """
    if type(x) in _SCALARS:  # a Python scalar must stay one, or it would take part in promotion
        return Local(target, world, _scalar_part, (x, target), located=True)
    whole = not target.partial_axes and not any(target.shard_axes)
    if np.size(x) > _EMBED_SIZE:
        node = shard_tensor(x, target.mesh, target.placements)._node
        return node if whole else moved(node, target)
    return x.copy() if whole else Local(target, world, _part, (x.copy(), target), located=True)


def _part(coord: Coord, array: Array, target: Layout) -> Array:
    return local_of(build_box(array.__getitem__, target, coord), target)


def _scalar_part(coord: Coord, x: Any, target: Layout) -> Any:
    """A scalar placed as terms: itself, or the neutral element as a Python number of the same type."""
    for m in target.partial_axes:
        p = target.placements[m]
        if isinstance(p, Partial) and coord[m] and not reduction(p.op).copies:
            return type(x)(reduction(p.op).neutral(target.dtype))
    return x


class _Call(NamedTuple):
    """What is known of a ufunc call from the dtypes and shapes of its operands."""

    signature: Signature
    results: tuple[Dtype, ...]


def apply_ufunc(
    ufunc: np.ufunc, *inputs: Any, dtype: Any = None, casting: str = "same_kind", where: Any = True, **kwargs: Any
) -> Any:
    """Record a ufunc with NumPy's own promotion and broadcasting.

    Where `where` is False the result is 0; NumPy leaves such elements undefined unless it is given `out`.
    """
    if ufunc.signature is not None:
        if any(not isinstance(x, (DTensor, np.ndarray, np.generic)) and _foreign(x) for x in inputs):
            return NotImplemented
        return _gufunc(ufunc)(*inputs, **_given(dtype, casting, where, kwargs))
    if kwargs and not kwargs.keys() <= {"order", "subok"}:
        raise TypeError(f"np.{ufunc.__name__}: the arguments {sorted(kwargs)} are not defined on DTensors")
    operands = []
    known: list[Layout | Dense] = []
    kinds: list[Any] = []
    constants: list[Any] = []
    for x in inputs:
        if isinstance(x, DTensor):
            layout = x._node.layout
            operands.append(x)
            known.append(layout)
            kinds.append(layout.dtype)
            constants.append(None)
            continue
        if type(x) not in _SCALARS and not isinstance(x, (np.ndarray, np.generic)):
            if _foreign(x):
                return NotImplemented
            x = np.asarray(x)
        facts = _SCALARS.get(type(x)) or Dense(x.shape, x.dtype)
        operands.append(x)
        known.append(facts)
        kinds.append(type(x) if type(x) in (int, float, complex) else facts.dtype)
        constants.append(x if facts.dtype.kind in "biufc" and not isinstance(x, np.ndarray) else None)
    wanted = None if dtype is None else np.dtype(dtype)
    shapes = tuple(k.shape for k in known)
    if where is not True:
        return _where_true(ufunc, operands, tuple(kinds), where, wanted, casting)
    call = _call(ufunc, tuple(kinds), shapes, tuple(constants), wanted, casting)
    extra = None if wanted is None else {"dtype": wanted, "casting": casting}
    prepared = _prepared(decide(call.signature, tuple(known), call.results[0]), operands)
    if len(call.results) == 1:
        return prepared.local(ufunc, extra)
    output = prepared.decision.output
    return prepared.several(ufunc, [output.replace(dtype=r) for r in call.results], extra)


@lru_cache(16384)
def _call(
    ufunc: np.ufunc, kinds: tuple[Any, ...], shapes: tuple[Any, ...], constants: tuple[Any, ...], dtype: Any, casting: str
) -> _Call:
    signature = elementwise(shapes, ufunc_flows(ufunc.__name__, constants))
    return _Call(signature, _result_dtypes(ufunc, kinds, dtype, casting))


@lru_cache(4096)
def _result_dtypes(ufunc: np.ufunc, kinds: tuple[Any, ...], dtype: Any, casting: Any) -> tuple[Dtype, ...]:
    if len(kinds) != ufunc.nin:
        raise TypeError(f"np.{ufunc.__name__} takes {ufunc.nin} operands, got {len(kinds)}; out= is not defined on DTensors")
    wanted: Any = (None,) * ufunc.nin + (dtype,) * ufunc.nout
    known = ufunc.resolve_dtypes((*kinds, *(None,) * ufunc.nout), casting=casting, signature=wanted)
    if any(d == np.object_ for d in known):
        raise TypeError(f"{ufunc.__name__}: it gives or takes objects, and DTensors hold none; write a local_map")
    return tuple(known[ufunc.nin :])


def _foreign(x: Any) -> bool:
    """Whether another library's array type should answer instead; arrays on a device are chunks, not rivals."""
    return hasattr(x, "__array_ufunc__") and not hasattr(x, "__cuda_array_interface__")


def _gufunc(ufunc: np.ufunc) -> Callable[..., Any]:
    if ufunc not in GUFUNCS:
        raise TypeError(
            f"{ufunc.__name__}, a ufunc over the core dims {ufunc.signature}, is not defined on DTensors; "
            f"gather with np.asarray(x) first, or write a local_map"
        )
    return GUFUNCS[ufunc]


def _given(dtype: Any, casting: str, where: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    given = {"dtype": dtype, "casting": casting, "where": where}
    defaults = {"dtype": None, "casting": "same_kind", "where": True}
    return {**kwargs, **{k: v for k, v in given.items() if v is not defaults[k]}}


def _where_true(ufunc: np.ufunc, operands: list[Any], kinds: tuple[Any, ...], mask: Any, dtype: Any, casting: str) -> Any:
    mask = mask if isinstance(mask, DTensor) else np.asarray(mask)
    if mask.dtype != np.bool_:
        raise TypeError(f"np.{ufunc.__name__}(where=...): the mask is {mask.dtype}; it must be bool")
    results = _result_dtypes(ufunc, kinds, dtype, casting)
    signature = elementwise(tuple(operand(x).shape for x in (mask, *operands)))
    extra = {"ufunc": ufunc, "results": results, "keywords": {} if dtype is None else {"dtype": dtype, "casting": casting}}
    prepared = prepare(signature, (mask, *operands), results[0])
    if len(results) == 1:
        return prepared.local(selected, extra)
    return prepared.several(selected, [prepared.decision.output.replace(dtype=r) for r in results], extra)


def selected(mask: Array, *args: Array, ufunc: np.ufunc, results: tuple[Dtype, ...], keywords: Mapping[str, Any]) -> Any:
    """A ufunc where `mask` is True, 0 elsewhere."""
    shape = np.broadcast_shapes(*(np.shape(x) for x in (mask, *args)))
    like = next((x for x in (*args, mask) if hasattr(x, "shape")), None)
    out = tuple(np.zeros_like(like, shape=shape, dtype=dtype, subok=False) for dtype in results)
    return ufunc(*args, out=out, where=mask, **keywords)


def dtype_of(func: Callable[..., Any], /, *operands: Any, **kwargs: Any) -> Dtype:
    """The dtype of ``func(*operands, **kwargs)``, from NumPy itself on operands of one element; errors are NumPy's own."""
    facts = tuple(x if type(x) in _SCALARS else (operand(x).dtype, len(operand(x).shape)) for x in operands)
    return _dtype_of(func, facts, tuple((type(x), x) for x in facts), tuple(kwargs.items()))


@lru_cache(4096)
def _dtype_of(
    func: Callable[..., Any], facts: tuple[Any, ...], key: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]
) -> Dtype:
    samples = [np.ones((1,) * x[1], x[0]) if isinstance(x, tuple) else x for x in facts]
    with np.errstate(all="ignore"):
        return np.asarray(func(*samples, **dict(kwargs))).dtype


def astype(x: DTensor, dtype: Any, *, copy: bool = True) -> DTensor:
    """Cast; a Partial whose reduction the cast would change is reduced first."""
    dtype = np.dtype(dtype)
    if dtype == x.dtype:
        return DTensor(x._node)
    return record(cast, elementwise((x.shape,), carried(1)), (x,), dtype, {"dtype": dtype})


def cast(array: Array, dtype: Dtype) -> Array:
    """The local function of `astype`."""
    return array.astype(dtype)
