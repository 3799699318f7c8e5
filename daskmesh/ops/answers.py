"""NumPy's functions that a DTensor answers from its shape and dtype alone, and those that it refuses, each with the way out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from daskmesh.dtensor import WAYS_OUT, DTensor, implements
from daskmesh.ops.gathers import refuse_plain

__all__: list[str] = []

Array = Any
_np: Any = np  # typed for arrays of its own, not for those that speak its protocols


def _sample(x: Any) -> Any:
    """An array of the shape and dtype of `x` that takes no memory."""
    return np.broadcast_to(np.zeros((), x.dtype), x.shape) if isinstance(x, DTensor) else x


@implements(np.common_type)
def common_type(*arrays: Any) -> Any:
    return np.common_type(*map(_sample, arrays))


@implements(np.einsum_path)
def einsum_path(*operands: Any, optimize: Any = "greedy", einsum_call: bool = False) -> Any:
    return np.einsum_path(*map(_sample, operands), optimize=optimize)


@implements(np.min_scalar_type)
def min_scalar_type(a: DTensor) -> np.dtype[Any]:
    """The dtype; of a 0-d DTensor the smallest that holds its value, which travels to the client."""
    return a.dtype if a.ndim else np.min_scalar_type(a.compute()[()])


@implements(np.may_share_memory, np.shares_memory)
def shares_memory(a: Any, b: Any, max_work: Any = None) -> bool:
    """Whether both are one handle: nothing is a view of anything here."""
    return a is b


@implements(np.array_repr, np.array2string)
def array_repr(arr: DTensor, *args: Any, **kwargs: Any) -> str:
    """As ``repr(x)``: the layout, not the value."""
    return repr(arr)


@implements(np.array_str)
def array_str(a: DTensor, *args: Any, **kwargs: Any) -> str:
    """As ``str(x)``."""
    return str(a)


@implements(np.resize)
def resize(a: DTensor, new_shape: Any) -> DTensor:
    """The elements over and over until they fill a shape; see `np.tile`."""
    refuse_plain(a, "resize")
    shape = (int(new_shape),) if np.ndim(new_shape) == 0 else tuple(int(n) for n in new_shape)
    if any(n < 0 for n in shape):
        raise ValueError("all elements of `new_shape` must be non-negative")
    flat, n = _np.ravel(a), math.prod(shape)
    if not n or not flat.size:
        return _np.zeros_like(a, shape=shape)  # type: ignore[no-any-return]
    return _np.reshape(_np.tile(flat, -(-n // flat.size))[:n], shape)  # type: ignore[no-any-return]


@implements(np.place)
def place(arr: DTensor, mask: Any, vals: Any) -> None:
    """Other contents behind the handle `arr`, the values in turn where the mask holds.

    **Communication**: with several values, a cumulative sum of the mask, and the values to all ranks.
    """
    refuse_plain(arr, "place")
    mask = (mask if isinstance(mask, DTensor) else np.asarray(mask)).astype(bool)
    vals = _np.ravel(vals if isinstance(vals, DTensor) else np.asarray(vals))
    if mask.shape != arr.shape:
        raise ValueError(f"np.place: a mask of shape {mask.shape} for an array of shape {arr.shape}; it must have the same")
    if not vals.size:
        if bool(_np.any(mask)):
            raise ValueError("Cannot insert from an empty array!")
        return
    turn = (_np.cumsum(_np.ravel(mask)) - 1) % vals.size
    given = _np.take(vals, turn) if isinstance(vals, DTensor) else _np.choose(turn, list(vals))
    arr._rebind(_np.where(mask, _np.reshape(given, arr.shape), arr).astype(arr.dtype))


# -- what is refused --------------------------------------------------------------------------------------------------

_COEFFICIENTS = "coefficients are few and belong on the client, np.asarray(p); np.polyval(p, x) takes a DTensor x"
_FILES = "daskmesh.save(x, path) writes each rank's part; or gather with np.asarray(x) first"
WAYS_OUT.update({
    **dict.fromkeys(
        (np.poly, np.polyadd, np.polyder, np.polydiv, np.polyint, np.polymul, np.polysub, np.roots), _COEFFICIENTS
    ),
    np.polyfit: "solve the normal equations: V = np.vander(x, deg + 1), then np.linalg.solve of np.asarray(V.T @ V) and "
    "np.asarray(V.T @ y), which are small",
    **dict.fromkeys((np.save, np.savetxt, np.savez, np.savez_compressed), _FILES),
    np.real_if_close: "its dtype depends on the values; write np.real(x)",
})  # fmt: skip
