"""Who asks for an array: the caller of ``np.asarray(x)``, or NumPy on behalf of a function that knows no other arrays.

NumPy's functions hand over to the arrays that they dispatch on. A few arguments are not among them, such as the indices of
``np.take(plain, indices)``, and ``np.ma`` and ``np.vectorize`` dispatch on nothing: these call ``__array__``, which would gather
in silence. The frame that calls tells them from ``np.asarray`` and its kin, which are written in C and have no frame, so that it
is their caller's. Methods of plain arrays, such as ``plain.take(x)``, have none either, and cannot be told.
"""

from __future__ import annotations

import dis
import sys
from types import FrameType
from typing import Any

__all__ = ["refuse_unasked"]

# Functions of NumPy's that are asked for an array and are written in Python.
_EXPLICIT = {"asarray_chkfinite", "require"}
_SUBSCRIPTS = {"BINARY_SUBSCR", "STORE_SUBSCR", "BINARY_SLICE", "STORE_SLICE"}
_WAY_OUT = "gather with np.asarray(x) if that is meant"


def refuse_unasked(x: Any, depth: int = 2) -> None:
    """Raise TypeError where nobody asked for the value of `x` as an array.

    Parameters
    ----------
    depth : int
        How many frames up the caller of ``__array__`` is.
    """
    if not x.ndim:  # one number, as item() and float() give it
        return
    frame = sys._getframe(depth)
    module = frame.f_globals.get("__name__", "")
    if module.startswith("numpy.") and not module.startswith("numpy.testing"):
        name = _public(frame)
        if name.rpartition(".")[2] not in _EXPLICIT:
            raise TypeError(f"{name} does not know DTensors and would gather one of shape {x.shape}; {_remedy(name)}")
    elif _operation(frame) in _SUBSCRIPTS:
        raise TypeError(
            f"a NumPy array indexed by a DTensor of shape {x.shape}, or with one put into it, would gather that; place the array "
            f"as well, dm.shard_tensor(a, x.process_mesh, []), or {_WAY_OUT}"
        )


def _public(frame: FrameType) -> str:
    """The name of the outermost function of NumPy's, as its users write it."""
    while frame.f_back is not None and frame.f_back.f_globals.get("__name__", "").startswith("numpy."):
        frame = frame.f_back
    module, code = frame.f_globals["__name__"], frame.f_code
    name = getattr(code, "co_qualname", code.co_name).partition(".")[0]
    inner = ("_core", "core", "lib")
    home = ".".join(part for part in module.split(".")[1:-1] if part not in inner)
    return ".".join(filter(None, ("np", home, "" if name.startswith("_") else name)))


def _remedy(name: str) -> str:
    if f"{name}.".startswith("np.ma."):
        return f"DTensors have no masks: keep one in a DTensor of its own, for where=, np.where or nan functions; or {_WAY_OUT}"
    if name == "np.vectorize":
        return f"write a function of arrays and record it with np.piecewise, np.select or a local_map; or {_WAY_OUT}"
    return f"place the other arrays as well, dm.shard_tensor(a, x.process_mesh, []), or {_WAY_OUT}"


def _operation(frame: FrameType) -> str:
    """What the interpreter is about in a frame."""
    name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    if name == "BINARY_OP" and sys.version_info >= (3, 14):  # subscripts are among the operators from then on
        return {"[]": "BINARY_SUBSCR"}.get(dis._nb_ops[frame.f_code.co_code[frame.f_lasti + 1]][1], name)  # type: ignore[attr-defined]
    return name
