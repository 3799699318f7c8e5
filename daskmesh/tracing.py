"""Shapes without running: a function is called on arrays that have a shape and a dtype and no values.

The arrays are dask arrays of one chunk over a graph that refuses to be looked at, so NumPy functions record on them what they
record on any dask array, and whatever needs a value ends the trace: ``float(x)``, ``if x.any()``, ``np.asarray(x)``.
"""

from __future__ import annotations

import itertools
import math
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

import dask.array as da
import dask.config
import dask.threaded
import numpy as np
from dask.base import get_scheduler
from dask.highlevelgraph import HighLevelGraph, Layer
from distributed import get_client

from daskmesh.gang import Gang, gang_context

__all__ = ["Untraceable", "doubtful", "known", "shape_only", "traced"]

Array = Any


class Untraceable(Exception):
    """What a function returns cannot be learnt from shapes alone; the cause says why."""


class ValueNeeded(RuntimeError):
    """Raised into a function that is being traced, where it asks for a value."""


@dataclass
class _State:
    refused: bool = False


_STATE: ContextVar[_State | None] = ContextVar("daskmesh_trace", default=None)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    state = _STATE.get()
    if state is not None:
        state.refused = True  # remembered: the function may catch the exception and go another way than with values
    raise ValueNeeded("this array stands for a shard while shapes are inferred; it has no values")


class _NoTasks(Layer):
    """A layer whose tasks nobody may see, so that computing, sending or pickling it ends the trace at once."""

    def is_materialized(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return _refuse()

    def __len__(self) -> int:
        return _refuse()

    __getitem__ = get_output_keys = cull = clone = __reduce__ = _refuse


_NUMBERS = itertools.count()


def shape_only(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An array with a shape and a dtype and no values.

    Examples
    --------
    >>> x = shape_only((3, 2), np.dtype("f4"))
    >>> np.sum(x * 2, axis=0).shape, (x @ x.T).dtype
    ((2,), dtype('float32'))
    """
    chunks = tuple((n,) for n in shape)
    name = f"daskmesh-shape-only-{next(_NUMBERS)}"  # one of its own: Dask takes arrays of one name for the same
    return da.Array(HighLevelGraph({name: _NoTasks()}, {name: set()}), name, chunks, meta=np.empty((0,) * len(shape), dtype))


# Dask's choice of scheduler and Python's warning filters belong to the process: one trace at a time sets them.
_LOCK = threading.RLock()


def _usual() -> Callable[..., Any]:
    try:
        return get_client().get
    except ValueError:
        return dask.threaded.get


@contextmanager
def _refusing() -> Iterator[None]:
    """Refuse computing in this thread, before Dask sends anything anywhere; other threads compute as they did."""
    before = dask.config.get("scheduler", None)

    def scheduler(graph: Any, keys: Any, **options: Any) -> Any:
        if _STATE.get() is not None:
            _refuse()
        return (_usual() if before is None else get_scheduler(scheduler=before))(graph, keys, **options)

    with dask.config.set(scheduler=scheduler), warnings.catch_warnings():
        # Dask warns about functions that it would run on real values; here that ends the trace, and is no news to the user.
        warnings.simplefilter("ignore")
        yield


def traced(func: Callable[[], Any], gang: Gang) -> Any:
    """What `func` returns, called as the rank of `gang` with `shape_only` arrays bound to it.

    Raises
    ------
    Untraceable
        It raised, or needed a value.

    Examples
    --------
    >>> from daskmesh.mesh import ProcessMesh
    >>> gang = Gang(ProcessMesh([0, 1], ["x"]), 1, trace=shape_only)
    >>> traced(lambda: np.ones(3) * shape_only((2, 1), np.dtype("f8")), gang).shape
    (2, 3)
    """
    state = _State()
    with _LOCK, _refusing():
        token = _STATE.set(state)
        try:
            with gang_context(gang):
                result = func()
        except Exception as error:
            raise Untraceable(f"{type(error).__name__}: {error}") from error
        finally:
            _STATE.reset(token)
    if state.refused:
        raise Untraceable("it needed values")
    return result


def known(array: Array) -> bool:
    """Whether every size of an array that came out of a trace is known: ``x[x > 0]`` has an unknown one.

    Examples
    --------
    >>> x = shape_only((3,), np.dtype("f8"))
    >>> known(x[1:]), known(x[x > 0])
    (True, False)
    """
    return not any(math.isnan(n) for n in array.shape)


# Where Dask and NumPy promote dtypes of less than 8 bytes in different ways: names of Dask's layers, and kinds of dtypes.
_PROMOTING = {"chunk_einsum": "biu", "tensordot": "biu", "round": "b", "select": "b", "quantile": "f", "_gradient_kernel": "f"}


def doubtful(array: Array, dtypes: Iterable[np.dtype[Any]]) -> bool:
    """Whether the dtype of an array that came out of a trace may be another than NumPy's; `dtypes` are those that went in.

    Examples
    --------
    >>> x, y = (shape_only((3, 3), np.dtype(t)) for t in ("i4", "f4"))
    >>> [doubtful(np.einsum("ij,kj->ik", a, a), [a.dtype]) for a in (x, y)], doubtful(x @ x, [x.dtype])
    ([True, False], False)
    """
    names = {str(name).rsplit("-", 1)[0] for name in getattr(array, "dask", HighLevelGraph({}, {})).layers}
    kinds = {kind for name in names & _PROMOTING.keys() for kind in _PROMOTING[name]}
    if not kinds:
        return False
    return any(t.itemsize < 8 and t.kind in kinds for t in dtypes) or ("astype" in names and array.dtype.kind in kinds)
