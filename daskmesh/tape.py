"""Following a rank's function: its local arrays become boxes, its collectives are chained, and cotangents are pulled back.

Each rank of a region differentiates its own run, all of them together: the *product* of the ranks is one function of all local
arrays. A collective is a node of it on every rank at once, so in the backward pass all ranks must call the adjoint collectives,
in one order. They do: each collective takes the *token* that the one before gave, whether a rank's result depends on it or not::

    x ──────── all_reduce ── y ──── ... ──── out          backward: from `out` and the last token, so every
                 │      └─ token ─┐                       node is reached, the last collective first
    0.0 ─ token ─┘                └─ scan ── token ── end

Nested runs (the derivative of a derivative) work as autograd does it: boxes in boxes, the inner token in the outer one's box.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
from autograd.core import add_outgrads, toposort
from autograd.extend import VJPNode, VSpace, defvjp
from autograd.numpy.numpy_vspaces import ArrayVSpace, ComplexArrayVSpace
from autograd.tracer import isbox, new_box

from daskmesh import compositions as _compositions  # noqa: F401  fills the table of routes
from daskmesh.gang import CURRENT_GANG
from daskmesh.routes import Followed, primitive, refuse

__all__ = ["LocalArray", "LocalBox", "Tape", "as_local", "cast", "followed"]

Array = Any


class LocalArray(np.ndarray[Any, Any]):
    """A rank's local array while its function is followed: an ndarray whose kin are of the same type, 0-d ones too.

    Examples
    --------
    >>> type(np.sum(as_local(np.ones(3)))).__name__, type(np.where([True], as_local(np.ones(1)), 0)).__name__
    ('LocalArray', 'LocalArray')
    """

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return array.view(LocalArray)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        result = super().__array_function__(func, types, args, kwargs)
        return result if result is NotImplemented else as_local(result)

    def __getitem__(self, index: Any) -> Any:
        return as_local(super().__getitem__(index))

    def dot(self, other: Any, out: Any = None) -> Any:
        """``np.dot``, which asks `other` first."""
        return np.dot(self, other) if out is None else np.dot(self, other, out)


def as_local(value: Any) -> Any:
    """A value with its arrays and NumPy scalars as `LocalArray`."""
    if isinstance(value, LocalArray):
        return value
    if isinstance(value, np.ndarray):
        return value.view(LocalArray)
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return np.asarray(value).view(LocalArray)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(as_local, value))
    return type(value)(map(as_local, value)) if type(value) in (list, tuple) else value


class LocalBox(Followed):
    """The box of a `LocalArray`."""

    __slots__ = ()

    @staticmethod
    def __daskmesh_function__(func: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(func, "__name__", "local_map")
        if CURRENT_GANG.get() is not None:
            refuse(f"{name}() inside a function that runs on a rank")
        refuse(f"{name}() of a NumPy array, which is no DTensor yet: place it with shard_tensor outside; so it")


class _Adding:
    """Cotangents of a NumPy array may be DTensors, which no NumPy array can take in place; those of integers may be numbers."""

    def _mut_add(self, x: Any, y: Any) -> Any:
        ours = isinstance(x, np.ndarray) and isinstance(y, (np.ndarray, np.generic, float, complex))
        if ours and np.result_type(x, y) == x.dtype:
            x += y
            return x
        return x + y


class _RealSpace(_Adding, ArrayVSpace):  # type: ignore[misc]
    pass


class _ComplexSpace(_Adding, ComplexArrayVSpace):  # type: ignore[misc]
    pass


def _vspace(value: Array) -> VSpace:
    return _ComplexSpace(value) if np.iscomplexobj(value) else _RealSpace(value)


LocalBox.register(LocalArray)
VSpace.register(LocalArray, _vspace)


@primitive
def cast(x: Array, dtype: Any) -> Array:
    """``x.astype(dtype)``, nothing if it has it."""
    return as_local(np.asarray(x).astype(dtype, copy=False))


defvjp(cast, lambda ans, x, dtype: lambda g: cast(g, x.dtype))


# autograd numbers its traces in one counter per process, which ranks on threads would share; an inner trace must have the higher
# number. These, by depth in this thread, are below all of autograd's own, which a rank's function may start inside.
_DEPTH: ContextVar[int] = ContextVar("daskmesh_trace_depth", default=0)


@contextmanager
def _trace() -> Iterator[float]:
    depth = _DEPTH.get()
    token = _DEPTH.set(depth + 1)
    try:
        yield -1 / (depth + 2)
    finally:
        _DEPTH.reset(token)


class Tape:
    """The collectives of one followed run, in the order of their calls; the gang's `around` while it runs."""

    def __init__(self, together: Callable[..., Any]) -> None:
        self.together = together
        self.token: Any = 0.0

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out, self.token = self.together(func, args, kwargs, self.token)
        return out

    @contextmanager
    def following(self, trace: float) -> Iterator[Any]:
        """Take the collective calls of the block; yields the root of the chain."""
        gang = CURRENT_GANG.get()
        outer = gang.around if gang is not None else None
        root = VJPNode.new_root()
        self.token = new_box(outer.token if isinstance(outer, Tape) else 0.0, trace, root)
        if gang is not None:
            gang.around = self
        try:
            yield root
        finally:
            if gang is not None:
                gang.around = outer
        if isinstance(outer, Tape):
            outer.token = self.token._value


def followed(
    func: Callable[..., Sequence[Any]], values: Sequence[Array], together: Callable[..., Any]
) -> tuple[Sequence[Any], Callable[[Sequence[Any]], list[Any]]]:
    """Run ``func(*boxes of the values)``; its outputs, and what pulls their cotangents back to the values.

    Parameters
    ----------
    func : callable
        Returns a sequence of outputs.
    together : callable
        ``together(collective, args, kwargs, token)`` carries a collective out and returns its result and the next token.

    Returns
    -------
    outputs : sequence
    pull : callable
        ``pull(cotangents)``, None for an output without, gives a cotangent per value, None for one that nothing depends on.

    Examples
    --------
    >>> (y,), pull = followed(lambda a, b: [np.sum(a * b)], [np.array([1.0, 2.0]), np.array([3.0, 4.0])], None)
    >>> [g.tolist() for g in pull([1.0])]
    [[3.0, 4.0], [1.0, 2.0]]
    """
    roots = [VJPNode.new_root() for _ in values]
    tape = Tape(together)
    with _trace() as trace:
        boxes = [new_box(v if isbox(v) else as_local(v), trace, root) for v, root in zip(values, roots, strict=True)]
        with tape.following(trace) as chain:
            outputs = func(*boxes)
        end = tape.token
        mine = [v if isbox(v) and v._trace == trace else None for v in outputs]

    def pull(cotangents: Sequence[Any]) -> list[Any]:
        seeds = [(b._node, g) for b, g in zip(mine, cotangents, strict=True) if b is not None and g is not None]
        found = _pulled([*seeds, (end._node, 0.0)], {*roots, chain})
        return [found.get(root, (None,))[0] for root in roots]

    return [v if b is None else b._value for v, b in zip(outputs, mine, strict=True)], pull


class _Ends:
    """One node over all that have a cotangent, for the sake of the order."""

    def __init__(self, parents: list[Any]) -> None:
        self.parents = parents


def _pulled(seeds: list[tuple[Any, Any]], roots: set[Any]) -> dict[Any, Any]:
    """The cotangents of the roots: autograd's backward pass, for several ends and several roots."""
    grads: dict[Any, Any] = {}
    for node, g in seeds:
        grads[node] = add_outgrads(grads.get(node), g)
    top = _Ends([node for node, _ in seeds])
    for node in toposort(top):
        if node is top or node in roots:
            continue
        grad = grads.pop(node)[0]
        for parent, g in zip(node.parents, node.vjp(grad), strict=True):
            grads[parent] = add_outgrads(grads.get(parent), g)
    return {root: grads[root] for root in roots if root in grads}
