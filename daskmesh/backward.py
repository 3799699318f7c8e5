"""The backward function of a region: what every rank runs to pull cotangents back through its own function.

It is itself a function of local arrays, given to `local_map` as any other: it runs the region's function again on the same
inputs, follows it, and returns one cotangent for each input asked for. So the derivative of a derivative needs nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.numpy.numpy_vjps import unbroadcast

from daskmesh.duals import together
from daskmesh.gang import CURRENT_GANG
from daskmesh.placement import Placement
from daskmesh.running import Declared, Input, argument
from daskmesh.tape import LocalArray, as_local, cast, followed
from daskmesh.trees import Tree, build, count

__all__ = ["Backward"]

Array = Any


@dataclass(frozen=True)
class Backward:
    """Of a region: ``backward(local inputs, local cotangents)`` gives the local cotangents of some inputs.

    A function with a method ``pulled(args, kwargs, cotangents)`` says itself what the cotangents of its arguments are; it gets
    those of the flat outputs by their numbers.

    Attributes
    ----------
    func, title, tree, leaves, declared
        Of the region's call.
    wrt : tuple of int
        The inputs whose cotangents are wanted, and the factors of these.
    outs : tuple of int
        The flat outputs that have cotangents, and the factors of these.
    kept : tuple
        Per input wanted, the placements of its gradient that the user declared; None if none.
    """

    func: Callable[..., Any]
    title: str
    tree: Tree
    leaves: tuple[Any, ...]
    declared: Declared
    wrt: tuple[int, ...]
    factors: tuple[float, ...]
    outs: tuple[int, ...]
    scales: tuple[float, ...]
    kept: tuple[tuple[Placement, ...] | None, ...]
    writeable: bool = False

    @property
    def __name__(self) -> str:
        return "backward"

    def __call__(self, inputs: Sequence[Array], cotangents: Sequence[Array]) -> Any:
        cots = [g if s == 1 else g * s for g, s in zip(cotangents, self.scales, strict=True)]
        pull = self._asked if hasattr(self.func, "pulled") else self._followed
        grads = [
            _like(g, inputs[i], factor) for g, i, factor in zip(pull(inputs, cots), self.wrt, self.factors, strict=True)
        ]
        return grads[0] if len(grads) == 1 else tuple(grads)

    def _bound(self, locals_: Sequence[Array]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = [argument(locals_[v.index] if isinstance(v, Input) else v, writeable=self.writeable) for v in self.leaves]
        args, kwargs = build(self.tree, leaves)
        return args, kwargs

    def _followed(self, inputs: Sequence[Array], cotangents: Sequence[Array]) -> Sequence[Array]:
        def run(*boxes: Any) -> list[Any]:
            locals_ = [as_local(x) for x in inputs]
            for i, box in zip(self.wrt, boxes, strict=True):
                locals_[i] = box
            args, kwargs = self._bound(locals_)
            leaves = self.declared.read(self.title, self.func(*args, **kwargs))[1]
            return [leaves[i] for i in self.outs]

        try:
            outputs, pull = followed(run, [inputs[i] for i in self.wrt], together)
            return pull([cast(g, np.result_type(y)) for g, y in zip(cotangents, outputs, strict=True)])
        except NotImplementedError as error:
            raise TypeError(
                f"{self.title} cannot be differentiated: {error}; write it with functions that autograd follows, or as a "
                "LocalLayer with a backward(self, *grads) of its own"
            ) from error

    def _asked(self, inputs: Sequence[Array], cotangents: Sequence[Array]) -> Sequence[Array]:
        """What the function's own backward says."""
        args, kwargs = self._bound(inputs)
        with _no_side_effects():
            given = self.func.pulled(args, kwargs, dict(zip(self.outs, cotangents, strict=True)))  # type: ignore[attr-defined]
        wanted = count(self.tree.branches[0])
        grads = list(given) if isinstance(given, (tuple, list)) else [given]
        if len(grads) != wanted:
            raise ValueError(
                f"{self.title}: backward returned {len(grads)} gradients for {wanted} inputs; return one for each, None for an "
                "input that has none"
            )
        at = {v.index: p for p, v in enumerate(self.leaves[:wanted]) if isinstance(v, Input)}
        for i, p in at.items():
            if grads[p] is not None and np.shape(grads[p]) != np.shape(inputs[i]):
                raise ValueError(
                    f"{self.title}: backward returned a gradient of shape {np.shape(grads[p])} for input {p} of local shape "
                    f"{np.shape(inputs[i])}; both must be equal"
                )
        return [grads[at[i]] if i in at else None for i in self.wrt]


@contextmanager
def _no_side_effects() -> Iterator[None]:
    """Refuse what a region must not do twice; collectives go on as they are."""
    gang = CURRENT_GANG.get()
    if gang is None or gang.around is not None:
        yield
        return
    gang.around = lambda func, args, kwargs: func(*args, **kwargs)
    try:
        yield
    finally:
        gang.around = None


def _like(g: Any, x: Array, factor: float) -> Array:
    """A cotangent in the shape and dtype of what it belongs to."""
    if g is None:
        return np.zeros(np.shape(x), np.result_type(x))
    if np.shape(g) != np.shape(x):  # autograd's rules for some functions forget to sum over what was broadcast
        g = unbroadcast(g, anp.metadata(x))
    if anp.iscomplexobj(g) and not anp.iscomplexobj(x):
        g = anp.real(g)
    g = cast(as_local(g) if isinstance(g, (np.ndarray, np.generic, float)) else g, np.result_type(x))
    g = g if factor == 1 else g * factor
    return g.view(np.ndarray) if isinstance(g, LocalArray) else g
