"""The kinds of operations: from a NumPy call to a recorded node, by the one propagation rule.

Every row of the operator table comes down to `record`: the rule decides what layouts the operands need and what layout the result
has, operands that lie elsewhere are moved, and a pure function of local arrays is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from daskmesh.algebra import carried, ufunc_flows
from daskmesh.conversion import shard_tensor
from daskmesh.creation import build_box
from daskmesh.dtensor import DTensor
from daskmesh.graph import Local, local_of
from daskmesh.layout import Coord, Layout
from daskmesh.moves import moved
from daskmesh.rules import Dense, Signature, decide, elementwise

__all__ = ["apply_ufunc", "astype", "operand", "record"]

Array = Any
_SCALARS = (bool, int, float, complex)
_EMBED_SIZE = 2**13  # elements of a plain operand that travel with the program, instead of as an array of their own


def record(
    func: Callable[..., Array],
    signature: Signature,
    operands: Sequence[Any],
    dtype: np.dtype[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    output: Layout | None = None,
) -> DTensor:
    """Record ``func(*locals of the operands, **kwargs)`` with the layouts that the propagation rule chooses.

    Parameters
    ----------
    operands : sequence
        DTensors, NumPy arrays and scalars; at least one DTensor.
    dtype : dtype
        Of the result.
    output : Layout, optional
        The layout that the result must have.
    """
    known = tuple(operand(x) for x in operands)
    decision = decide(signature, known, dtype, output)
    world = next(x._node.world for x in operands if isinstance(x, DTensor))
    args = []
    for x, target in zip(operands, decision.operands, strict=True):
        if isinstance(x, DTensor):
            args.append(x._node if x.layout == target else moved(x._node, target, decision.text))
        else:
            args.append(_constant(x, target, world))
    node = Local(decision.output, world, func, args, kwargs)
    return DTensor(node if decision.result == decision.output else moved(node, decision.result, decision.text))


def operand(x: Any) -> Layout | Dense:
    """What the propagation rule wants to know of an operand."""
    if isinstance(x, DTensor):
        return x.layout
    if isinstance(x, _SCALARS):
        return Dense((), np.dtype(type(x)))
    return Dense(x.shape, x.dtype)


def _constant(x: Any, target: Layout, world: str) -> Any:
    """A plain operand in the layout wanted: embedded as it is where every rank uses all of it, else a node that takes its part."""
    if not target.partial_axes and not any(target.shard_axes):
        if np.size(x) <= _EMBED_SIZE:
            return x
        return shard_tensor(x, target.mesh, target.placements)._node
    array = np.asarray(x, target.dtype) if isinstance(x, _SCALARS) else x
    if np.size(x) > _EMBED_SIZE:
        return moved(shard_tensor(array, target.mesh, target.placements)._node, target)
    return Local(target, world, _part, (array, target), located=True)


def _part(coord: Coord, array: Array, target: Layout) -> Array:
    return local_of(build_box(array.__getitem__, target, coord), target)


def apply_ufunc(ufunc: np.ufunc, *inputs: Any, dtype: Any = None, casting: str = "same_kind", **kwargs: Any) -> Any:
    """Record an elementwise ufunc with NumPy's own promotion and broadcasting."""
    if kwargs:
        raise TypeError(f"np.{ufunc.__name__}: the arguments {sorted(kwargs)} are not defined on DTensors")
    operands = [x if isinstance(x, (DTensor, *_SCALARS)) or hasattr(x, "dtype") else np.asarray(x) for x in inputs]
    known = [operand(x) for x in operands]
    kinds = tuple(type(x) if type(x) in (int, float, complex) else k.dtype for x, k in zip(operands, known, strict=True))
    wanted = None if dtype is None else np.dtype(dtype)
    results = _result_dtypes(ufunc, kinds, wanted, casting)
    constants = tuple(x if isinstance(x, (*_SCALARS, np.generic)) else None for x in operands)
    signature = elementwise(tuple(k.shape for k in known), ufunc_flows(ufunc.__name__, constants))
    extra = {} if wanted is None else {"dtype": wanted, "casting": casting}
    if len(results) == 1:
        return record(ufunc, signature, operands, results[0], extra)
    return tuple(record(partial(_nth, ufunc, i), signature, operands, r, extra) for i, r in enumerate(results))


@lru_cache(4096)
def _result_dtypes(ufunc: np.ufunc, kinds: tuple[Any, ...], dtype: Any, casting: str) -> tuple[np.dtype[Any], ...]:
    wanted = {} if dtype is None else {"signature": (None,) * ufunc.nin + (dtype,) * ufunc.nout}
    known = ufunc.resolve_dtypes((*kinds, *(None,) * ufunc.nout), casting=casting, **wanted)
    return tuple(known[ufunc.nin :])


def _nth(ufunc: np.ufunc, i: int, *args: Array, **kwargs: Any) -> Array:
    return ufunc(*args, **kwargs)[i]


def astype(x: DTensor, dtype: Any, *, copy: bool = True) -> DTensor:
    """Cast; a Partial whose reduction the cast would change is reduced first."""
    dtype = np.dtype(dtype)
    if dtype == x.dtype:
        return DTensor(x._node)
    return record(_cast, elementwise((x.shape,), carried(1)), (x,), dtype, {"dtype": dtype})


def _cast(array: Array, dtype: np.dtype[Any]) -> Array:
    return array.astype(dtype)
