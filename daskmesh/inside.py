"""grad inside a region: of a function of this rank's arrays, collectives included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from autograd.tracer import isbox

from daskmesh.duals import together
from daskmesh.gang import CURRENT_GANG, Gang
from daskmesh.tape import followed
from daskmesh.trees import build, flatten

__all__ = ["followed_inside", "running"]


def running() -> Gang | None:
    """The region that is running here, if one is."""
    return CURRENT_GANG.get()


def followed_inside(gang: Gang, fun: Callable[[Any], Any], x: Any) -> tuple[Any, Callable[[Any], Any]]:
    """``fun(x)`` on this rank, and what pulls a cotangent of it back to `x`, arrays in containers.

    All ranks together are one function, the sum of what each returns: the gradient of an array is that of this rank's copy of it.
    """
    leaves, tree = flatten(x)
    if gang.trace is not None:
        shape_only = gang.trace
        return fun(x), lambda g: build(tree, [shape_only(np.shape(v), np.result_type(v)) for v in leaves])
    (value,), pull = followed(lambda *boxes: [fun(build(tree, boxes))], leaves, together)

    def pulled(g: Any) -> Any:
        grads = [_plain(np.zeros_like(v) if h is None else h) for h, v in zip(pull([g]), leaves, strict=True)]
        return build(tree, grads)

    return _plain(value), pulled


def _plain(x: Any) -> Any:
    """Of NumPy's own types, unless it is followed further out."""
    return x if isbox(x) else np.asarray(x)[()]
