"""Collectives: what the ranks of a region do together, by the names of mesh dims.

Inside a function given to `local_map` each of these is called by all ranks of a *group*: the ranks that differ only in
the coordinates along `mesh_dim`, which is a name, a tuple of names in mesh order, or None for the whole mesh. The
group's ranks are counted in row-major order of the named dims. All ranks of a group must make the same calls in the same
order; a rank that does not is found out, and both calls are named.

Results are fresh arrays of the dtype given. A Python scalar counts as a NumPy scalar and gives one. At size 1 nothing is
sent, so a program runs unchanged alone.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from daskmesh import algorithms
from daskmesh.gang import Array, MeshDim, as_array, collective, current_gang, tensor_dim, unknown_shape
from daskmesh.halo import halo_exchange
from daskmesh.layout import split_sizes
from daskmesh.placement import reduction

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "axis_index",
    "axis_size",
    "barrier",
    "broadcast",
    "halo_exchange",
    "permute",
    "reduce_scatter",
    "scan",
    "shift",
]


@collective
def all_reduce(x: Array, mesh_dim: MeshDim = None, *, op: str = "sum") -> Array:
    """Reduce `x` over the ranks of the group; every rank gets the result.

    Parameters
    ----------
    x : array or scalar
        This rank's term, of the same shape and dtype on every rank.
    mesh_dim : str, tuple of str or None
        The group.
    op : {"sum", "max", "min", "prod", "avg", "any", "all"}
        Terms are folded in the order of the ranks, so the result has the same bits on every rank and in every run.

    Notes
    -----
    **Communication**: small `x`, of m elements over n ranks: (n - 1) * m elements received per rank; large ones 2 * m.

    Examples
    --------
    >>> from daskmesh.gang import alone
    >>> with alone():
    ...     all_reduce(np.array([1, 2]), op="max")
    array([1, 2])
    """
    gang = current_gang("all_reduce")
    reduction(op)
    array, scalar = as_array(x)
    group = gang.group(mesh_dim)
    if gang.trace is not None:
        return gang.traced(array.shape, array.dtype)
    out = algorithms.all_reduce(group, array, op) if group.size > 1 else algorithms.single(array, op)
    return out[()] if scalar else out


@collective
def reduce_scatter(x: Array, mesh_dim: MeshDim = None, *, op: str = "sum", dim: int = 0) -> Array:
    """Reduce `x` over the group; rank i of it gets part i of the result, cut along tensor dim `dim` as shards are.

    Parameters
    ----------
    x : array
        This rank's term, of the same shape and dtype on every rank.
    mesh_dim : str, tuple of str or None
        The group.
    op : str
        As for `all_reduce`.
    dim : int
        Tensor dim that is cut.

    Notes
    -----
    **Communication**: m elements received per rank, for `x` of m elements.

    Examples
    --------
    >>> from daskmesh.gang import alone
    >>> with alone():
    ...     reduce_scatter(np.array([1, 2]))
    array([1, 2])
    """
    gang = current_gang("reduce_scatter")
    reduction(op)
    array, _ = as_array(x)
    dim = tensor_dim("reduce_scatter", "dim", dim, array)
    group = gang.group(mesh_dim)
    if gang.trace is not None:
        return gang.traced(algorithms.resized(array, dim, split_sizes(array.shape[dim], group.size)[group.index]), array.dtype)
    return algorithms.reduce_scatter(group, array, op, dim) if group.size > 1 else algorithms.single(array, op)


@collective
def scan(x: Array, mesh_dim: MeshDim = None, *, op: str = "sum") -> Array:
    """Reduce the `x` of this rank and of those before it in the group (an inclusive scan).

    Parameters
    ----------
    x : array or scalar
        This rank's term, of the same shape and dtype on every rank.
    mesh_dim : str, tuple of str or None
        The group.
    op : str
        As for `all_reduce`; "avg" gives the mean of the terms so far.

    Notes
    -----
    **Communication**: i * m elements received by rank i of the group, for `x` of m elements.

    Examples
    --------
    >>> from daskmesh.gang import alone
    >>> with alone():
    ...     scan(3)
    np.int64(3)
    """
    gang = current_gang("scan")
    reduction(op)
    array, scalar = as_array(x)
    group = gang.group(mesh_dim)
    if gang.trace is not None:
        return gang.traced(array.shape, array.dtype)
    out = algorithms.scan(group, array, op) if group.size > 1 else algorithms.single(array, op)
    return out[()] if scalar else out


@collective
def all_gather(x: Array, mesh_dim: MeshDim = None, *, dim: int = 0, tiled: bool = True) -> Array:
    """Put the `x` of all ranks of the group together; every rank gets the result.

    Parameters
    ----------
    x : array or scalar
        Sizes along `dim` may differ from rank to rank if `tiled`. A scalar counts as one element.
    mesh_dim : str, tuple of str or None
        The group.
    dim : int
        Tensor dim along which the pieces lie.
    tiled : bool
        True concatenates along `dim`; False stacks along a new dim there.

    Notes
    -----
    **Communication**: the elements of all other ranks are received by every rank.

    Examples
    --------
    >>> from daskmesh.gang import alone
    >>> with alone():
    ...     all_gather(7.0)
    array([7.])
    """
    gang = current_gang("all_gather")
    array, _ = as_array(x)
    if tiled and array.ndim == 0:
        array = array.reshape(1)
    dim = tensor_dim("all_gather", "dim", dim, array, 0 if tiled else 1)
    group = gang.group(mesh_dim)
    if gang.trace is not None:
        if tiled and not gang.even and np.ndim(x):
            raise unknown_shape("all_gather")
        front, back = array.shape[:dim], array.shape[dim:]
        shape = (*front, back[0] * group.size, *back[1:]) if tiled else (*front, group.size, *back)
        return gang.traced(shape, array.dtype)
    if group.size > 1:
        return algorithms.all_gather(group, array, dim, tiled)
    return array.copy() if tiled else np.expand_dims(array.copy(), dim)


@collective
def all_to_all(x: Array, mesh_dim: MeshDim = None, *, split_dim: int, concat_dim: int) -> Array:
    """Cut `x` along `split_dim`, part i for rank i of the group, and concatenate what comes along `concat_dim`.

    This turns ``Shard(concat_dim)`` into ``Shard(split_dim)``; swapping the two dims turns it back.

    Parameters
    ----------
    x : array
        Sizes along `concat_dim` may differ from rank to rank.
    mesh_dim : str, tuple of str or None
        The group.
    split_dim, concat_dim : int
        Tensor dims.

    Notes
    -----
    **Communication**: (n - 1) / n of the elements of `x` received per rank, over n ranks.

    Examples
    --------
    >>> from daskmesh.gang import alone
    >>> with alone():
    ...     all_to_all(np.ones((2, 3)), split_dim=1, concat_dim=0).shape
    (2, 3)
    """
    gang = current_gang("all_to_all")
    array, _ = as_array(x)
    split_dim = tensor_dim("all_to_all", "split_dim", split_dim, array)
    concat_dim = tensor_dim("all_to_all", "concat_dim", concat_dim, array)
    group = gang.group(mesh_dim)
    if gang.trace is not None:
        if not gang.even:
            raise unknown_shape("all_to_all")
        part = split_sizes(array.shape[split_dim], group.size)[group.index]
        cut = algorithms.resized(array, split_dim, part)
        return gang.traced((*cut[:concat_dim], cut[concat_dim] * group.size, *cut[concat_dim + 1 :]), array.dtype)
    return algorithms.all_to_all(group, array, split_dim, concat_dim) if group.size > 1 else array.copy()


@collective
def broadcast(x: Array, mesh_dim: MeshDim = None, *, root: int | Sequence[int] = 0) -> Array:
    """Give the `x` of one rank of the group to all.

    Parameters
    ----------
    x : array, scalar or None
        The value on `root`; elsewhere one of the same shape and dtype, or None.
    mesh_dim : str, tuple of str or None
        The group.
    root : int or tuple of int
        Which rank of the group, by its place in it or its coordinates along the named dims.

    Notes
    -----
    **Communication**: the elements of `x` received by every rank but `root`.

    Examples
    --------
    >>> from daskmesh.gang import alone
    >>> with alone():
    ...     broadcast(np.arange(3))
    array([0, 1, 2])
    """
    gang = current_gang("broadcast")
    index = gang.place("broadcast", "root", root, mesh_dim)
    group = gang.group(mesh_dim)
    if x is None and group.index == index:
        raise TypeError(f"broadcast: x is None on its root, index {index} of the group; give the value there")
    array, scalar = (None, False) if x is None else as_array(x)
    if gang.trace is not None:
        if array is None:
            raise unknown_shape("broadcast of None")
        return gang.traced(array.shape, array.dtype)
    out = algorithms.broadcast(group, array, index) if group.size > 1 or array is None else array.copy()
    return out[()] if scalar or (x is None and not out.shape) else out


@collective
def permute(x: Array, mesh_dim: MeshDim, pairs: Iterable[tuple[Any, Any]]) -> Array:
    """Send `x` from the source to the target of each pair; who receives nothing gets zeros.

    Parameters
    ----------
    x : array or scalar
        Sizes may differ from rank to rank: what is received has the shape it was sent with.
    mesh_dim : str, tuple of str or None
        The group.
    pairs : iterable of (source, target)
        Places in the group, or coordinates along the named dims; each at most once source and once target.

    Notes
    -----
    **Communication**: the elements of one `x` received by every target.

    Examples
    --------
    >>> from daskmesh.gang import alone
    >>> with alone():
    ...     permute(np.arange(3), None, [(0, 0)]), permute(np.arange(3), None, [])
    (array([0, 1, 2]), array([0, 0, 0]))
    """
    gang = current_gang("permute")
    array, scalar = as_array(x)
    places = [
        (gang.place("permute", "source", source, mesh_dim), gang.place("permute", "target", target, mesh_dim))
        for source, target in pairs
    ]
    for what, ends in zip(("source", "target"), zip(*places, strict=True), strict=False):
        if len(set(ends)) != len(ends):
            raise ValueError(f"permute: a place is {what} twice in {places}; call permute once for each target")
    group = gang.group(mesh_dim)
    if gang.trace is not None:
        return gang.traced_move("permute", array)
    out = algorithms.permute(group, array, places, "permute", f", {places}")
    return out[()] if scalar else out


@collective
def shift(x: Array, mesh_dim: MeshDim = None, by: int = 1, *, wrap: bool = True) -> Array:
    """Get the `x` of the rank `by` places before this one in the group.

    Parameters
    ----------
    x : array or scalar
        Sizes may differ from rank to rank.
    mesh_dim : str, tuple of str or None
        The group.
    by : int
        Places; negative to get from ranks behind.
    wrap : bool
        Whether the first rank comes after the last; otherwise ranks at the end get zeros.

    Notes
    -----
    **Communication**: the elements of one `x` received per rank.

    Examples
    --------
    >>> from daskmesh.gang import alone
    >>> with alone():
    ...     shift(5), shift(5, wrap=False)
    (np.int64(5), np.int64(0))
    """
    gang = current_gang("shift")
    array, scalar = as_array(x)
    group, by = gang.group(mesh_dim), operator.index(by)
    places = range(group.size)
    pairs = [(i, (i + by) % group.size) for i in places if wrap or 0 <= i + by < group.size]
    if gang.trace is not None:
        return gang.traced_move("shift", array)
    out = algorithms.permute(group, array, pairs, "shift", f", by={by}, wrap={wrap}")
    return out[()] if scalar else out


def barrier(mesh_dim: MeshDim = None) -> None:
    """Wait until every rank of the group has called this.

    Notes
    -----
    **Communication**: about log2(n) empty messages per rank, over n ranks.

    Examples
    --------
    >>> from daskmesh.gang import alone
    >>> with alone():
    ...     barrier()
    """
    gang = current_gang("barrier")
    group = gang.group(mesh_dim)
    if gang.trace is not None:
        gang.communicates = True
    elif group.size > 1:
        algorithms.barrier(group)


def axis_index(mesh_dim: MeshDim = None) -> int:
    """The place of this rank in the group: its coordinate along a mesh dim.

    Notes
    -----
    **Communication**: none.

    Examples
    --------
    >>> from daskmesh.gang import alone
    >>> with alone():
    ...     axis_index()
    0
    """
    return current_gang("axis_index").group(mesh_dim, join=False).index


def axis_size(mesh_dim: MeshDim = None) -> int:
    """The number of ranks in the group: the size of a mesh dim.

    Notes
    -----
    **Communication**: none.

    Examples
    --------
    >>> from daskmesh.gang import alone
    >>> with alone():
    ...     axis_size()
    1
    """
    return current_gang("axis_size").group(mesh_dim, join=False).size
