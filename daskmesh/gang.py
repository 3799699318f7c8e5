"""The ranks of a region, seen by one of them: what a collective or a one-sided operation finds when it is called.

A `Gang` is set for as long as a rank's function runs. It joins the others only at the first call that needs them, so a
region that never communicates costs nothing, and one that does may begin on each worker when that worker is free.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np

from daskmesh.mesh import CURRENT_RANK, ProcessMesh
from daskmesh.parcels import Group, Line

__all__ = [
    "CURRENT_GANG",
    "Array",
    "Gang",
    "MeshDim",
    "alone",
    "as_array",
    "collective",
    "current_gang",
    "gang_context",
    "tensor_dim",
    "unknown_shape",
]

Array: TypeAlias = Any
MeshDim: TypeAlias = str | int | tuple[str | int, ...] | None
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(eq=False)
class Gang:
    """One run of a region on all ranks of a mesh, seen by `rank`.

    Attributes
    ----------
    mesh, rank
        The region's mesh, and whose function is running.
    join : callable
        Meets the other ranks and gives the line to them; called once, at the first need.
    trace : callable or None
        While shapes are inferred: makes a shape-only array of a shape and dtype. Nothing is sent then.
    even : bool
        While shapes are inferred: whether all ranks have the same local shapes.
    communicates : bool
        Whether a collective was called.
    on_lost : callable or None
        Set where something was done to others that must not be done twice: what to raise when a peer is lost, instead of running
        the region again.
    apart : bool
        Whether this rank runs alone, because no rank was seen to need another while shapes were inferred.
    around : callable or None
        While the function is differentiated: takes every collective call in its stead, as (function, arguments, keywords).
    calling : str
        The function that was called last.

    Examples
    --------
    >>> gang = Gang(ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"]), 2)
    >>> gang.group("tp", join=False).ranks, gang.group(None, join=False).index
    ((2, 3), 2)
    """

    mesh: ProcessMesh
    rank: int
    join: Callable[[], Line] | None = None
    trace: Callable[[tuple[int, ...], np.dtype[Any]], Any] | None = None
    even: bool = True
    communicates: bool = False
    on_lost: Callable[[Exception], Exception] | None = None
    apart: bool = False
    around: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any] | None = None
    calling: str = ""
    line: Line | None = None
    _groups: dict[MeshDim, Group] = field(default_factory=dict)

    def group(self, mesh_dim: MeshDim, *, join: bool = True) -> Group:
        """The ranks that differ from this one only along the named mesh dims.

        Raises
        ------
        PlacementError
            No such mesh dim.
        ValueError
            Mesh dims named twice or out of order.
        """
        group = self._groups.get(mesh_dim)
        if group is None:
            group = self._groups[mesh_dim] = self._make_group(mesh_dim)
        if group.line is None and group.size > 1 and join and self.trace is None:
            if self.line is None:
                self.line = self._join()
            group.line = self.line
        return group

    def _join(self) -> Line:
        self.communicates = True
        if self.join is None:
            raise RuntimeError(
                f"rank {self.rank} of {self.mesh!r} cannot reach the others: collectives need a Dask cluster; "
                "call daskmesh.init_parallel_env() and compute with its client"
            )
        return self.join()

    def _make_group(self, mesh_dim: MeshDim) -> Group:
        mesh = self.mesh
        axes = self.axes(mesh_dim)
        coord = mesh.coordinate(self.rank)
        index = tuple(slice(None) if axis in axes else at for axis, at in enumerate(coord))
        ranks = tuple(np.asarray(mesh.mesh[index]).reshape(-1).tolist())
        names = tuple(mesh.dim_names[axis] for axis in axes)
        return Group(None, ranks, ranks.index(self.rank), repr(names[0]) if len(names) == 1 else repr(names))

    def axes(self, mesh_dim: MeshDim) -> tuple[int, ...]:
        """The mesh dims that `mesh_dim` names, as indices."""
        if mesh_dim is None:
            return tuple(range(self.mesh.ndim))
        named = mesh_dim if isinstance(mesh_dim, tuple) else (mesh_dim,)
        axes = tuple(self.mesh.dim_index(name) for name in named)
        if list(axes) != sorted(set(axes)):
            names = tuple(name for axis, name in enumerate(self.mesh.dim_names) if axis in axes)
            raise ValueError(f"mesh dims {mesh_dim} must be named once, in mesh order; write {names}")
        return axes

    def place(self, call: str, what: str, place: Any, mesh_dim: MeshDim) -> int:
        """A place in a group, given as such or by coordinates along the named dims, for the argument `what` of `call`."""
        sizes = [self.mesh.shape[axis] for axis in self.axes(mesh_dim)]
        size = math.prod(sizes)
        coord = tuple(place) if isinstance(place, tuple | list) else (operator.index(place),)
        if len(coord) == 1:
            sizes = [size]
        if len(coord) != len(sizes) or not all(0 <= at < n for at, n in zip(coord, sizes, strict=True)):
            raise ValueError(
                f"{call}: {what} {place!r} is no place among {size} ranks along mesh dims {mesh_dim!r}; "
                f"give 0..{size - 1} or one coordinate per mesh dim"
            )
        flat = 0
        for at, n in zip(coord, sizes, strict=True):
            flat = flat * n + int(at)
        return flat

    def traced(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """While shapes are inferred: what a collective gives, with nothing but its shape and dtype."""
        self.communicates = True
        if self.trace is None:
            raise RuntimeError("no shapes are being inferred")
        return self.trace(shape, dtype)

    def traced_move(self, call: str, array: Array) -> Array:
        """The same for a call that gives another rank's array, whose sizes are known only if they are the same."""
        if not self.even and array.ndim:
            raise unknown_shape(call)
        return self.traced(array.shape, array.dtype)


CURRENT_GANG: ContextVar[Gang | None] = ContextVar("daskmesh_gang", default=None)
_PASSIVE = ("barrier", "axis_index", "axis_size")  # calls that pass no values


def current_gang(call: str) -> Gang:
    """The gang of the region that is running, for the function `call`.

    Raises
    ------
    RuntimeError
        No region is running.

    Examples
    --------
    >>> with alone():
    ...     current_gang("barrier").rank
    0
    """
    gang = CURRENT_GANG.get()
    if gang is None:
        raise RuntimeError(
            f"{call}() works between the ranks of a region, and none is running here; call it inside a function given "
            "to local_map"
        )
    if gang.around is not None and call not in _PASSIVE:
        raise TypeError(
            f"{call}() in a function that is being differentiated: what it does to other ranks has no derivative; keep it out of "
            "functions under grad, or use collectives, which have one"
        )
    gang.calling = call
    return gang


def collective(func: F) -> F:
    """Let whoever differentiates the running function take the calls of a collective; see `Gang.around`.

    Examples
    --------
    >>> with alone() as gang:
    ...     gang.around = lambda func, args, kwargs: f"{func.__name__}{args}"
    ...     collective(abs)(-3)
    'abs(-3,)'
    """

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        if args and hasattr(args[0], "__cuda_array_interface__"):
            return _by_host(call, *args, **kwargs)
        gang = CURRENT_GANG.get()
        if gang is None or gang.around is None:
            return func(*args, **kwargs)
        around, gang.around = gang.around, None
        try:
            return around(func, args, kwargs)
        finally:
            gang.around = around

    return cast(F, call)


def _by_host(call: Callable[..., Any], x: Array, *args: Any, out: Array | None = None, **kwargs: Any) -> Any:
    """An array on a device travels through the memory of its host, and the result lies on the device again."""
    result = np.asarray(call(x.get(), *args, **kwargs), like=x)
    if out is None:
        return result
    out[...] = result
    return out


def as_array(x: Array) -> tuple[Array, bool]:
    """`x` as an array, and whether it was a scalar, so that results are to be NumPy scalars.

    Examples
    --------
    >>> as_array(3)
    (array(3), True)
    """
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError("a masked array loses its mask on the way to other ranks; send x.filled(...) and np.ma.getmaskarray(x)")
    if isinstance(x, np.ndarray) or (hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, np.generic)):
        return x, False
    array = np.asarray(x)
    return array, array.ndim == 0


def tensor_dim(call: str, what: str, dim: int, array: Array, more: int = 0) -> int:
    """A tensor dim counted from the front, for the argument `what` of `call`; `more` dims are to be added to the array.

    Examples
    --------
    >>> tensor_dim("all_gather", "dim", -1, np.ones((2, 3)))
    1
    """
    ndim: int = array.ndim + more
    if not -ndim <= operator.index(dim) < ndim:
        raise ValueError(f"{call}: {what}={dim} is out of range for an array of shape {array.shape}")
    return dim % ndim


def unknown_shape(call: str) -> RuntimeError:
    """The error that ends the inference of shapes.

    Examples
    --------
    >>> raise unknown_shape("all_gather")
    Traceback (most recent call last):
    RuntimeError: the shape that all_gather gives depends on other ranks, so it is known only once the region runs
    """
    return RuntimeError(f"the shape that {call} gives depends on other ranks, so it is known only once the region runs")


@contextmanager
def gang_context(gang: Gang) -> Iterator[Gang]:
    """Make `gang` the one that collectives find, for as long as the block runs.

    Examples
    --------
    >>> with gang_context(Gang(ProcessMesh([3, 5]), 5)) as gang:
    ...     current_gang("barrier") is gang
    True
    """
    token = CURRENT_GANG.set(gang)
    rank = CURRENT_RANK.set(gang.rank)
    try:
        yield gang
    finally:
        CURRENT_RANK.reset(rank)
        CURRENT_GANG.reset(token)


@contextmanager
def alone() -> Iterator[Gang]:
    """A region of one rank, without any cluster: collectives work and send nothing.

    Examples
    --------
    >>> with alone() as gang:
    ...     gang.group(None).size
    1
    """
    with gang_context(Gang(ProcessMesh([0], ["x"]), 0)) as gang:
        yield gang
