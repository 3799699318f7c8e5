"""Contractions: matmul, dot, tensordot, einsum and their kin, all by labels.

Where the summed dim is cut alike in both operands nothing moves and the result is Partial(sum). Where the rule would gather along
the summed dim, the operands are streamed instead (see `summa`): the same bytes, without room for more than two panels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from daskmesh.algebra import multilinear
from daskmesh.dtensor import DTensor, implements
from daskmesh.graph import Node
from daskmesh.layout import Coord, Layout
from daskmesh.ops.kinds import GUFUNCS, dtype_of, operand, prepare, record
from daskmesh.ops.parts import axes_of, given_options, no_out, reduction_signature
from daskmesh.placement import Partial
from daskmesh.plan import Stage
from daskmesh.rules import Decision, Signature, contraction, decide, matmul
from daskmesh.summa import Stream, Streamed

__all__ = ["contracted", "spelled_out"]

Array = Any
Labels = tuple[int | str | None, ...]
_PLAIN = (DTensor, np.ndarray, np.generic)


def _operands(*given: Any) -> list[Any]:
    return [x if isinstance(x, _PLAIN) else np.asarray(x) for x in given]


def contracted(
    func: Callable[..., Array],
    signature: Signature,
    operands: Sequence[Any],
    dtype: np.dtype[Any],
    kwargs: Mapping[str, Any] | None = None,
) -> DTensor:
    """Record a contraction, streamed where an operand would be gathered along a dim that is summed.

    Parameters
    ----------
    func : callable
        Of the locals and `kwargs`; linear in each, so that panels of a summed dim may be multiplied apart.
    """
    if len(operands) == 2 and all(isinstance(x, DTensor) for x in operands):
        decision = decide(signature, (operands[0].layout, operands[1].layout), dtype)
        dims = _streamed_dims(signature, decision)
        if dims is not None:
            nodes: tuple[Node, Node] = (operands[0]._node, operands[1]._node)
            stages = tuple(Stage(a, b) for a, b in zip(decision.sources, decision.operands, strict=True))
            stream = Stream(func, dict(kwargs or {}), (stages[0], stages[1]), dims, decision.output)
            return DTensor(Streamed(nodes, stream, lambda: decision.text))
    return record(func, signature, operands, dtype, kwargs)


def _streamed_dims(signature: Signature, decision: Decision) -> tuple[int, int] | None:
    """The dims of both operands that are summed in panels: of a label that an operand has cut and shall have whole."""
    moves = [(k, a, b) for k, (a, b) in enumerate(zip(decision.sources, decision.operands, strict=True)) if a != b]
    if any(isinstance(p, Partial) for _, a, b in moves for p in (*a.placements, *b.placements)):
        return None
    for k, a, b in moves:
        for d, label in enumerate(signature.operands[k]):
            mine, other = signature.operands[k], signature.operands[1 - k]
            if label not in signature.reduced or mine.count(label) != 1 or other.count(label) != 1:
                continue
            if len(a.chunks[d]) > len(b.chunks[d]):
                dims = (d, other.index(label))
                return dims if k == 0 else (dims[1], dims[0])
    return None


# -- matmul and the gufuncs -------------------------------------------------------------------------------------------


def _matmul(x1: Any, x2: Any, *, dtype: Any = None, **unknown: Any) -> DTensor:
    a, b = _operands(x1, x2)
    _refuse(unknown, "matmul")
    options = given_options(dtype=dtype)
    shapes = operand(a).shape, operand(b).shape
    return contracted(np.matmul, matmul(*shapes), (a, b), _core_dtype(np.matmul, (a, b), dtype), options)


def _refuse(unknown: Mapping[str, Any], name: str) -> None:
    left = set(unknown) - {"order", "subok", "casting"}
    if left:
        raise TypeError(f"np.{name}: the arguments {sorted(left)} are not defined on DTensors")


def _core_dtype(ufunc: np.ufunc, operands: Sequence[Any], dtype: Any) -> np.dtype[Any]:
    kinds = [operand(x).dtype for x in operands]
    wanted: Any = (None, None, None if dtype is None else np.dtype(dtype))
    return ufunc.resolve_dtypes((*kinds, None), signature=wanted, casting="same_kind")[2]


def _vectors(ufunc: np.ufunc, left: str, right: str, out: str) -> Callable[..., DTensor]:
    """A gufunc of vectors and matrices; letters are its core dims."""

    def apply(x1: Any, x2: Any, *, axis: int = -1, dtype: Any = None, **unknown: Any) -> DTensor:
        a, b = _operands(x1, x2)
        _refuse(unknown, ufunc.__name__)
        if axis != -1:
            a, b = (np.moveaxis(x, axis, -1) for x in (a, b))
        shapes = operand(a).shape, operand(b).shape
        for shape, core in zip(shapes, (left, right), strict=True):
            if len(shape) < len(core):
                raise ValueError(f"np.{ufunc.__name__}: an operand of shape {shape} must have at least {len(core)} dims")
        stack = max(len(s) - len(c) for s, c in zip(shapes, (left, right), strict=True))
        labels = [_stacked(stack, len(s) - len(c), c) for s, c in zip(shapes, (left, right), strict=True)]
        _check_core(ufunc, labels, shapes)
        signature = contraction((labels[0], labels[1]), (*range(stack), *out), shapes)
        return contracted(ufunc, signature, (a, b), _core_dtype(ufunc, (a, b), dtype), given_options(dtype=dtype))

    return apply


def _stacked(stack: int, own: int, core: str) -> Labels:
    return (*range(stack - own, stack), *core)


def _check_core(ufunc: np.ufunc, labels: Sequence[Labels], shapes: Sequence[tuple[int, ...]]) -> None:
    """Core dims do not broadcast."""
    sizes: dict[Any, int] = {}
    for names, shape in zip(labels, shapes, strict=True):
        for x, n in zip(names, shape, strict=True):
            if isinstance(x, str) and sizes.setdefault(x, n) != n:
                raise ValueError(f"np.{ufunc.__name__}: core dims of {shapes[0]} and {shapes[1]} differ: {sizes[x]} and {n}")


GUFUNCS[np.matmul] = _matmul
GUFUNCS[np.vecdot] = _vectors(np.vecdot, "n", "n", "")
GUFUNCS[np.matvec] = _vectors(np.matvec, "mn", "n", "m")
GUFUNCS[np.vecmat] = _vectors(np.vecmat, "n", "nm", "m")
implements(np.linalg.matmul)(lambda x1, x2, /: np.matmul(x1, x2))
implements(np.linalg.vecdot)(lambda x1, x2, /, *, axis=-1: GUFUNCS[np.vecdot](x1, x2, axis=axis))


# -- sums of products by dims -----------------------------------------------------------------------------------------


@implements(np.tensordot, np.linalg.tensordot)
def tensordot(a: Any, b: Any, axes: Any = 2) -> DTensor:
    a, b = _operands(a, b)
    shapes = operand(a).shape, operand(b).shape
    if np.ndim(axes) == 0:
        left: Sequence[int] = range(len(shapes[0]) - int(axes), len(shapes[0]))
        right: Sequence[int] = range(int(axes))
    else:
        left, right = ((x,) if np.ndim(x) == 0 else tuple(x) for x in axes)
    left, right = normalize_axis_tuple(left, len(shapes[0])), normalize_axis_tuple(right, len(shapes[1]))
    if [shapes[0][d] for d in left] != [shapes[1][d] for d in right]:
        where = f"dims {tuple(left)} of shape {shapes[0]} do not fit dims {tuple(right)} of shape {shapes[1]}"
        raise ValueError(f"np.tensordot: {where}")
    return _summed("tensordot", np.tensordot, a, b, left, right, {"axes": (tuple(left), tuple(right))})


def _summed(
    name: str, func: Callable[..., Array], a: Any, b: Any, left: Sequence[int], right: Sequence[int], kwargs: dict[str, Any]
) -> DTensor:
    """Sum over the dims `left` of `a` and `right` of `b`, pair by pair; the other dims follow one another."""
    shapes = operand(a).shape, operand(b).shape
    pairs = {d: f"s{i}" for i, d in enumerate(left)}
    first: Labels = tuple(pairs.get(d, f"a{d}") for d in range(len(shapes[0])))
    second: Labels = tuple(f"s{list(right).index(d)}" if d in right else f"b{d}" for d in range(len(shapes[1])))
    output = tuple(x for x in (*first, *second) if isinstance(x, str) and x[0] != "s")
    if any(shapes[0][d] != shapes[1][e] for d, e in zip(left, right, strict=True)):
        where = f"dim {left[0]} of shape {shapes[0]} meets dim {right[0]} of shape {shapes[1]}"
        raise ValueError(f"np.{name}: {where}; they must be equal")
    dtype = np.dtype(np.result_type(operand(a).dtype, operand(b).dtype))
    return contracted(func, contraction((first, second), output, shapes), (a, b), dtype, kwargs)


@implements(np.dot)
def dot(a: Any, b: Any, out: Any = None) -> Any:
    no_out(out, "dot")
    a, b = _operands(a, b)
    ndims = len(operand(a).shape), len(operand(b).shape)
    if 0 in ndims:
        return np.multiply(a, b)
    return _summed("dot", np.dot, a, b, (ndims[0] - 1,), (max(ndims[1] - 2, 0),), {})


@implements(np.inner)
def inner(a: Any, b: Any) -> Any:
    a, b = _operands(a, b)
    ndims = len(operand(a).shape), len(operand(b).shape)
    if 0 in ndims:
        return np.multiply(a, b)
    return _summed("inner", np.inner, a, b, (ndims[0] - 1,), (ndims[1] - 1,), {})


@implements(np.vdot)
def vdot(a: Any, b: Any) -> DTensor:
    a, b = _operands(a, b)
    shapes = operand(a).shape, operand(b).shape
    if shapes[0] != shapes[1]:
        a, b = np.ravel(a), np.ravel(b)
        shapes = operand(a).shape, operand(b).shape
    if shapes[0] != shapes[1]:
        raise ValueError(f"np.vdot: the operands have {shapes[0]} and {shapes[1]} elements")
    labels = tuple(range(len(shapes[0])))
    dtype = np.dtype(np.result_type(operand(a).dtype, operand(b).dtype))
    return contracted(np.vdot, contraction((labels, labels), (), shapes), (a, b), dtype)


@implements(np.outer, np.linalg.outer)
def outer(a: Any, b: Any, out: Any = None) -> Any:
    no_out(out, "outer")
    a, b = (np.ravel(x) if len(operand(x).shape) != 1 else x for x in _operands(a, b))
    return np.multiply.outer(a, b)


@implements(np.kron)
def kron(a: Any, b: Any) -> DTensor:
    """Cut as `a` is; `b` is whole on every rank, for each element of `a` meets all of it."""
    a, b = _operands(a, b)
    shapes = operand(a).shape, operand(b).shape
    ndim = max(map(len, shapes))
    first = tuple(range(ndim - len(shapes[0]), ndim))
    second = tuple(f"b{d}" for d in range(len(shapes[1])))
    output = tuple(d if d in first else None for d in range(ndim))
    dtype = np.dtype(np.result_type(operand(a).dtype, operand(b).dtype))
    ready = prepare(Signature((first, second), output, None, multilinear(2)), (a, b), dtype)
    layout = ready.decision.output
    times = (1,) * (ndim - len(second)) + shapes[1]
    shape = tuple(n * k for n, k in zip(layout.shape, times, strict=True))
    chunks = tuple(tuple(n * k for n in c) for c, k in zip(layout.chunks, times, strict=True))
    return ready.local(np.kron, layout=layout.replace(shape=shape, chunks=chunks))


# -- einsum -----------------------------------------------------------------------------------------------------------


@implements(np.einsum)
def einsum(*operands: Any, out: Any = None, optimize: Any = False, dtype: Any = None, **unknown: Any) -> Any:
    """Pair by pair in NumPy's greedy order, each pair one contraction."""
    no_out(out, "einsum")
    _refuse(unknown, "einsum")
    text, arrays = _as_text(operands)
    arrays = _operands(*arrays)
    given, result = _labels(text, tuple(len(operand(x).shape) for x in arrays))
    terms = list(given)
    made = np.dtype(dtype) if dtype is not None else np.dtype(np.result_type(*(operand(x).dtype for x in arrays)))
    arrays = [x if operand(x).dtype == made else np.astype(x, made) for x in arrays]
    while len(arrays) > 2:
        i, j = _cheapest_pair(tuple(operand(x).shape for x in arrays), tuple(terms), result)
        left, right = terms[i], terms[j]
        rest = [k for k in range(len(arrays)) if k not in (i, j)]
        needed = set(result).union(*(terms[k] for k in rest))
        kept = "".join(x for x in dict.fromkeys(left + right) if x in needed)
        pair = _einsum([arrays[i], arrays[j]], [left, right], kept, made)
        arrays, terms = [*(arrays[k] for k in rest), pair], [*(terms[k] for k in rest), kept]
    return _einsum(arrays, terms, result, made)


def _einsum(arrays: list[Any], terms: list[str], result: str, dtype: np.dtype[Any]) -> Any:
    if not any(isinstance(x, DTensor) for x in arrays):
        return np.einsum(",".join(terms) + "->" + result, *arrays, optimize=True)
    shapes = tuple(operand(x).shape for x in arrays)
    signature = contraction(tuple(map(tuple, terms)), tuple(result), shapes)
    return contracted(_einsum_of, signature, arrays, dtype, {"text": ",".join(terms) + "->" + result})


def _einsum_of(*arrays: Array, text: str) -> Array:
    return np.einsum(text, *arrays, optimize=len(arrays) > 1)


def _as_text(operands: Sequence[Any]) -> tuple[str, list[Any]]:
    """Both forms of a call as subscripts and arrays."""
    if isinstance(operands[0], str):
        return operands[0].replace(" ", ""), list(operands[1:])
    arrays, lists = list(operands[0::2]), list(operands[1::2])
    result = None
    if len(arrays) > len(lists):
        result = arrays.pop()
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    text = ",".join("".join("..." if x is Ellipsis else letters[x] for x in s) for s in lists)
    if result is not None:
        text += "->" + "".join("..." if x is Ellipsis else letters[x] for x in result)
    return text, arrays


@lru_cache(1024)
def _labels(text: str, ndims: tuple[int, ...]) -> tuple[tuple[str, ...], str]:
    """The terms and the result, with ellipses written out as letters of their own."""
    before, arrow, result = text.partition("->")
    terms = before.split(",")
    if len(terms) != len(ndims):
        raise ValueError(f"np.einsum: {text!r} has {len(terms)} terms, {len(ndims)} operands were given")
    free = [c for c in map(chr, itertools.chain(range(97, 123), range(65, 91))) if c not in text]
    extra = [n - len(t.replace("...", "")) if "..." in t else 0 for t, n in zip(terms, ndims, strict=True)]
    for term, n, more in zip(terms, ndims, extra, strict=True):
        if more < 0 or len(term.replace("...", "")) + more != n:
            raise ValueError(f"np.einsum: the term {term!r} of {text!r} does not fit an operand of {n} dims")
    dots = "".join(free[: max(extra, default=0)])
    full = [t.replace("...", dots[len(dots) - k :] if k else "") for t, k in zip(terms, extra, strict=True)]
    if not arrow:
        every = "".join(full)
        result = dots + "".join(sorted(x for x in set(every) if every.count(x) == 1 and x not in dots))
    if dots and "..." not in result and arrow:
        raise ValueError(f"np.einsum: {text!r} must keep the dims of its '...' in the result")
    result = result.replace("...", dots)
    unknown = set(result) - set("".join(full))
    if unknown or len(set(result)) != len(result):
        raise ValueError(f"np.einsum: the result of {text!r} names {sorted(unknown) or 'a label twice'}")
    return tuple(full), result


def spelled_out(operands: Sequence[Any]) -> tuple[list[str], str, list[Any]]:
    """The terms, the result and the arrays of a call of ``np.einsum``, all labels written out."""
    text, arrays = _as_text(operands)
    terms, result = _labels(text, tuple(np.ndim(x) for x in arrays))
    return list(terms), result, arrays


@lru_cache(1024)
def _cheapest_pair(shapes: tuple[tuple[int, ...], ...], terms: tuple[str, ...], result: str) -> tuple[int, int]:
    samples = [np.broadcast_to(np.zeros((), np.float64), shape) for shape in shapes]
    path = np.einsum_path(",".join(terms) + "->" + result, *samples, optimize="greedy")[0]
    pair = path[1]
    return (int(pair[0]), int(pair[1])) if len(pair) > 1 else (0, 1)


# -- trace ------------------------------------------------------------------------------------------------------------


@implements(np.trace)
def trace(a: DTensor, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None, out: Any = None) -> DTensor:
    """Every rank sums what it holds of the diagonal."""
    no_out(out, "trace")
    return _traced(a, offset, axis1, axis2, dtype)


def _traced(a: DTensor, offset: int, axis1: int, axis2: int, dtype: Any) -> DTensor:
    if a.ndim < 2:
        raise ValueError(f"np.trace needs at least two dims, the array has shape {a.shape}")
    first, second = normalize_axis_tuple((axis1, axis2), a.ndim)
    axes = (first, second)
    made = dtype_of(np.trace, a, **given_options(dtype=dtype))
    ready = prepare(reduction_signature(a.shape, axes_of(axes, a.ndim), "sum"), (a,), made)
    how = {"layout": ready.decision.operands[0], "offset": offset, "axes": axes, "dtype": made}
    return ready.local(_trace_of_part, how, located=True)


@implements(np.linalg.trace)
def linalg_trace(x: DTensor, /, *, offset: int = 0, dtype: Any = None) -> DTensor:
    return _traced(x, offset, -2, -1, dtype)


def _trace_of_part(
    coord: Coord, x: Array, layout: Layout, offset: int, axes: tuple[int, int], dtype: np.dtype[Any]
) -> Array:
    box = layout.box(coord)
    shift = offset + box[axes[0]].start - box[axes[1]].start
    if abs(shift) >= max(1, *(x.shape[d] for d in axes)):
        return np.zeros_like(x, shape=[n for d, n in enumerate(x.shape) if d not in axes], dtype=dtype)
    return np.trace(x, shift, *axes, dtype=dtype)


