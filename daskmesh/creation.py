"""Arrays made on their ranks: each rank builds only the box that it holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from dask.base import tokenize

from daskmesh.dtensor import DTensor
from daskmesh.graph import Source, block_of, errors_named, rank_tasks
from daskmesh.layout import Box, Coord, Layout, make_layout
from daskmesh.mesh import ProcessMesh
from daskmesh.placement import reduction
from daskmesh.plan import neutral_op, refuse_truth
from daskmesh.world import world_for

__all__ = ["arange", "empty", "eye", "from_callback", "full", "linspace", "ones", "zeros"]

Array = Any


def from_callback(
    shape: int | Sequence[int], dtype: Any, mesh: ProcessMesh, placements: Any, fn: Callable[[Box], Array]
) -> DTensor:
    """A DTensor whose boxes a function makes, each rank its own.

    Parameters
    ----------
    shape : int or sequence of int
        Global shape (n, ...).
    fn : callable
        ``fn(box)`` gets the tuple of slices of the global array and returns that part, of shape ``stop - start`` per dim.
        It must be pure: it runs again when a worker is lost.

    Returns
    -------
    DTensor, shape (n, ...)

    Notes
    -----
    **Communication**: none.

    Raises
    ------
    ValueError
        When computed: `fn` returned another shape than its box.
    TypeError
        When computed: `fn` returned values of another kind than `dtype`, such as floats for ints.

    Examples
    --------
    >>> import numpy as np
    >>> import daskmesh as dm
    >>> mesh = dm.init_mesh(2, ["x"])
    >>> x = dm.from_callback(5, int, mesh, [dm.Shard(0)], lambda box: np.arange(box[0].start, box[0].stop) ** 2)
    >>> np.asarray(x)
    array([ 0,  1,  4,  9, 16])
    """
    if not callable(fn):
        raise TypeError(f"from_callback(fn): expected a function of the box, got {fn!r}")
    return _built("from_callback", _Frame(mesh, placements, shape, dtype), fn)


class _Frame(NamedTuple):
    """What the caller asked for."""

    mesh: ProcessMesh
    placements: Any
    shape: Any
    dtype: Any


def _built(call: str, frame: _Frame, fn: Callable[[Box], Array]) -> DTensor:
    shape = frame.shape if isinstance(frame.shape, Iterable) else (frame.shape,)
    layout = make_layout(frame.mesh, frame.placements, tuple(shape), frame.dtype, call=call)
    refuse_truth(layout, call=call)
    world = world_for(layout.mesh).id
    name = f"{call.replace('_', '-')}-{tokenize(layout, world, fn)}"
    return DTensor(Source.from_tasks(layout, world, name, rank_tasks(layout, world, name, build_box, (fn, layout))))


def build_box(fn: Callable[[Box], Array], layout: Layout, coord: Coord) -> Array:
    """The block at `coord` of the value that `fn` makes box by box."""
    op = neutral_op(layout, coord)
    if op is not None:
        return block_of(np.full(layout.local_shape(coord), reduction(op).neutral(layout.dtype), layout.dtype), layout, coord)
    with errors_named(layout.mesh, coord):
        local = fn(layout.box(coord))
        if not hasattr(local, "dtype"):
            local = np.asarray(local)
        return block_of(local.astype(layout.dtype, casting="same_kind", copy=False), layout, coord)


def full(
    shape: int | Sequence[int],
    fill_value: Any,
    dtype: Any = None,
    *,
    mesh: ProcessMesh,
    placements: Any = (),
    like: Any = None,
) -> DTensor:
    """A DTensor of one value.

    Parameters
    ----------
    shape : int or sequence of int
        Global shape (n, ...).
    like : array, optional
        Array whose module makes the blocks (a CuPy array, say).

    Returns
    -------
    DTensor, shape (n, ...)

    Notes
    -----
    **Communication**: none. Placed as Partial it still has the value `fill_value`, not a multiple of it.

    Examples
    --------
    >>> import daskmesh as dm
    >>> x = dm.full(2, 5.0, mesh=dm.init_mesh(2, ["x"]), placements=[dm.Partial()])
    >>> x.local_value(1), dm.unshard_dtensor(x)
    (array([0., 0.]), array([5., 5.]))
    """
    if np.ndim(fill_value):
        raise ValueError(f"full(fill_value): expected a scalar, got an array of shape {np.shape(fill_value)}; use shard_tensor")
    dtype = np.asarray(fill_value).dtype if dtype is None else np.dtype(dtype)
    return _full("full", _Frame(mesh, placements, shape, dtype), fill_value, like)


def _full(call: str, frame: _Frame, value: Any, like: Any) -> DTensor:
    empty_like = None if like is None else like[(slice(0, 0),) * like.ndim]
    return _built(call, frame, partial(_filled, value, np.dtype(frame.dtype), empty_like))


def _filled(value: Any, dtype: np.dtype[Any], like: Array, box: Box) -> Array:
    shape = _extent(box)
    return np.full(shape, value, dtype) if like is None else np.full_like(like, value, dtype=dtype, shape=shape)


def zeros(
    shape: int | Sequence[int], dtype: Any = float, *, mesh: ProcessMesh, placements: Any = (), like: Any = None
) -> DTensor:
    """A DTensor of zeros; see `full`.

    **Communication**: none.

    Examples
    --------
    >>> import daskmesh as dm
    >>> dm.zeros((2, 3), mesh=dm.init_mesh(2, ["x"]), placements=[dm.Shard(0)]).local_value(0)
    array([[0., 0., 0.]])
    """
    return _full("zeros", _Frame(mesh, placements, shape, dtype), 0, like)


def ones(
    shape: int | Sequence[int], dtype: Any = float, *, mesh: ProcessMesh, placements: Any = (), like: Any = None
) -> DTensor:
    """A DTensor of ones; see `full`.

    **Communication**: none.

    Examples
    --------
    >>> import daskmesh as dm
    >>> dm.ones(3, mesh=dm.init_mesh(2, ["x"]), placements=[dm.Shard(0)]).local_value(0)
    array([1., 1.])
    """
    return _full("ones", _Frame(mesh, placements, shape, dtype), 1, like)


def empty(
    shape: int | Sequence[int], dtype: Any = float, *, mesh: ProcessMesh, placements: Any = (), like: Any = None
) -> DTensor:
    """A DTensor whose values are yet to be written; they are zeros here, so that a recomputed block is the same block.

    **Communication**: none.

    Examples
    --------
    >>> import daskmesh as dm
    >>> dm.empty((2, 3), mesh=dm.init_mesh(2, ["x"]), placements=[dm.Shard(0)]).shape
    (2, 3)
    """
    return _full("empty", _Frame(mesh, placements, shape, dtype), 0, like)


def arange(
    start: Any, stop: Any = None, step: Any = 1, dtype: Any = None, *, mesh: ProcessMesh, placements: Any = ()
) -> DTensor:
    """Evenly spaced values, bit for bit those of ``np.arange``.

    Returns
    -------
    DTensor, shape (n,)

    Notes
    -----
    **Communication**: none.

    Examples
    --------
    >>> import daskmesh as dm
    >>> dm.arange(1, 8, 2, mesh=dm.init_mesh(2, ["x"]), placements=[dm.Shard(0)]).compute()
    array([1, 3, 5, 7])
    """
    if stop is None:
        start, stop = 0, start
    if step == 0:
        raise ValueError("arange(step): the step is 0")
    kind: np.dtype[Any] = np.arange(start, start + 0 * stop, step, dtype=dtype).dtype
    n = max(0, math.ceil((stop - start) / step))
    # NumPy fills from the first two values, which it rounds to the dtype.
    first = np.array(start).astype(kind)[()]
    delta = np.subtract(np.array([start + step]).astype(kind), first)[0]  # on arrays: unsigned ones wrap without a warning
    return _built("arange", _Frame(mesh, placements, n, kind), partial(_arange, first, delta))


def _arange(first: Any, delta: Any, box: Box) -> Array:
    return first + np.arange(box[0].start, box[0].stop).astype(np.asarray(first).dtype) * delta


def linspace(
    start: Any, stop: Any, num: int = 50, endpoint: bool = True, dtype: Any = None, *, mesh: ProcessMesh, placements: Any = ()
) -> DTensor:
    """`num` evenly spaced values from `start` to `stop`, bit for bit those of ``np.linspace``.

    Returns
    -------
    DTensor, shape (num,)

    Notes
    -----
    **Communication**: none.

    Examples
    --------
    >>> import daskmesh as dm
    >>> dm.linspace(0, 1, 5, mesh=dm.init_mesh(2, ["x"]), placements=[dm.Shard(0)]).compute()
    array([0.  , 0.25, 0.5 , 0.75, 1.  ])
    """
    num = int(num)
    if num < 0:
        raise ValueError(f"linspace(num): the number of values, {num}, is negative")
    kind = np.linspace(start, stop, 1, dtype=dtype).dtype
    work = np.linspace(start, stop, 1).dtype
    fn = partial(_linspace, work.type(start), work.type(stop), num, endpoint, kind)
    return _built("linspace", _Frame(mesh, placements, num, kind), fn)


def _linspace(start: Any, stop: Any, num: int, endpoint: bool, dtype: np.dtype[Any], box: Box) -> Array:
    index = np.arange(box[0].start, box[0].stop).astype(start.dtype)
    delta, parts = stop - start, num - 1 if endpoint else num
    step = delta / parts if parts > 0 else delta
    # A step that underflows to 0 is multiplied out first, as NumPy does.
    values = index / parts * delta if parts > 0 and step == 0 else index * step
    values = values + start
    if endpoint and num > 1 and box[0].start < num == box[0].stop:
        values[-1] = stop
    return np.floor(values).astype(dtype) if dtype.kind in "iu" else values.astype(dtype)


def eye(n: int, m: int | None = None, k: int = 0, dtype: Any = float, *, mesh: ProcessMesh, placements: Any = ()) -> DTensor:
    """Ones on the `k`-th diagonal, zeros elsewhere.

    Returns
    -------
    DTensor, shape (n, m)

    Notes
    -----
    **Communication**: none.

    Examples
    --------
    >>> import daskmesh as dm
    >>> dm.eye(4, mesh=dm.init_mesh(2, ["x"]), placements=[dm.Shard(0)]).local_value(1)
    array([[0., 0., 1., 0.],
           [0., 0., 0., 1.]])
    """
    return _built("eye", _Frame(mesh, placements, (n, n if m is None else m), dtype), partial(_eye, k, np.dtype(dtype)))


def _eye(k: int, dtype: np.dtype[Any], box: Box) -> Array:
    rows, cols = box
    n, m = _extent(box)
    return np.eye(n, m, k + rows.start - cols.start, dtype=dtype)


def _extent(box: Box) -> tuple[int, ...]:
    return tuple(s.stop - s.start for s in box)
