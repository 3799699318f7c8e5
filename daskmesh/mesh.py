"""The process mesh: a named n-D array of ranks. A pure value; it needs no cluster."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import numpy as np

from daskmesh.pen import mesh_html
from daskmesh.placement import PlacementError

__all__ = ["CURRENT_RANK", "ProcessMesh", "init_mesh"]

# Set by a rank's task while it runs: the only way in which code on a rank learns who it is.
CURRENT_RANK: ContextVar[int | None] = ContextVar("daskmesh_rank", default=None)

Coord = tuple[int, ...]


class ProcessMesh:
    """A named n-D array of ranks.

    Parameters
    ----------
    mesh : nested list or array of int
        Distinct, non-negative ranks. A rank's *coordinate*, not its number, decides which shard it holds.
    dim_names : sequence of str, optional
        One name per mesh dim; ``d0, d1, ...`` by default.

    Notes
    -----
    Immutable and hashable. Two meshes are equal when shape, ranks and names are.

    **Communication**: none.

    Raises
    ------
    ValueError
        Ranks that repeat or are negative, names that repeat or whose number is not the number of mesh dims.
    TypeError
        Ranks that are not integers.

    Examples
    --------
    >>> import daskmesh as dm
    >>> mesh = dm.ProcessMesh([[2, 4, 5], [0, 1, 3]], dim_names=["x", "y"])
    >>> mesh.shape, mesh.get_dim_size("y"), mesh[0]
    ((2, 3), 3, ProcessMesh([2, 4, 5], dim_names=['y']))
    """

    def __init__(self, mesh: Any, dim_names: Sequence[str] | None = None) -> None:
        ranks = _ranks(mesh)
        names = tuple(f"d{i}" for i in range(ranks.ndim)) if dim_names is None else _names(dim_names, ranks.shape)
        self._shape: Coord = ranks.shape
        self._ids: Coord = tuple(ranks.ravel().tolist())
        self._names: tuple[str, ...] = names
        self._hash = hash((self._shape, self._ids, self._names))

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, "_hash"):
            raise AttributeError(f"ProcessMesh is immutable; build a new one instead of setting {name!r}")
        object.__setattr__(self, name, value)

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each mesh dim."""
        return self._shape

    @property
    def ndim(self) -> int:
        """Number of mesh dims."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._ids)

    @property
    def dim_names(self) -> tuple[str, ...]:
        """Name of each mesh dim."""
        return self._names

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The ranks in row-major mesh order."""
        return self._ids

    @property
    def mesh(self) -> np.ndarray[Any, Any]:
        """The ranks as an array; a fresh copy."""
        return np.array(self._ids, dtype=np.int64).reshape(self._shape)

    @cached_property
    def _coords(self) -> dict[int, Coord]:
        return dict(zip(self._ids, itertools.product(*map(range, self._shape)), strict=True))

    def __contains__(self, rank: object) -> bool:
        return rank in self._coords

    def coordinate(self, rank: int) -> Coord:
        """The coordinate of `rank`.

        Raises
        ------
        ValueError
            `rank` is not in the mesh.
        """
        try:
            return self._coords[rank]
        except KeyError:
            raise ValueError(f"rank {rank} is not in {self!r}; its ranks are {list(self._ids)}") from None

    def rank_at(self, coord: Sequence[int]) -> int:
        """The rank at a coordinate.

        Raises
        ------
        IndexError
            The coordinate lies outside the mesh.
        """
        flat = 0
        for i, n in zip(coord, self._shape, strict=True):
            if not 0 <= i < n:
                raise IndexError(f"coordinate {tuple(coord)} lies outside a mesh of shape {self._shape}")
            flat = flat * n + i
        return self._ids[flat]

    def dim_index(self, dim: str | int) -> int:
        """The index of a mesh dim given by name, or by index (negative ones from the end).

        Raises
        ------
        PlacementError
            No such mesh dim; the message quotes the names there are.
        """
        if isinstance(dim, str):
            if dim in self._names:
                return self._names.index(dim)
            close = difflib.get_close_matches(dim, self._names, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise PlacementError(f"mesh has no dim named {dim!r}, its dims are {list(self._names)}{hint}")
        if isinstance(dim, bool) or not isinstance(dim, (int, np.integer)):
            raise TypeError(f"a mesh dim is a name or an int, got {dim!r}; the names are {list(self._names)}")
        if not -self.ndim <= dim < self.ndim:
            raise PlacementError(f"mesh dim {dim} is out of range for a mesh of {self.ndim} dims {list(self._names)}")
        return int(dim) % self.ndim

    def get_dim_size(self, dim: str | int) -> int:
        """Size of a mesh dim, by name or index."""
        return self._shape[self.dim_index(dim)]

    def get_rank_by_dim_and_process_id(self, dim: str | int, process_id: int) -> int:
        """Coordinate of a rank along a mesh dim; -1 when the rank is not in the mesh."""
        axis = self.dim_index(dim)
        return self.coordinate(process_id)[axis] if process_id in self else -1

    def get_mesh_with_dim(self, dim_name: str, index: int | None = None) -> ProcessMesh:
        """Move a mesh dim to the front; with `index`, take that slice of it and drop the name.

        Examples
        --------
        >>> import daskmesh as dm
        >>> dm.init_mesh((2, 2), ("x", "y")).get_mesh_with_dim("y", 1)
        ProcessMesh([1, 3], dim_names=['x'])
        """
        axis = self.dim_index(dim_name)
        names = (self._names[axis], *(n for i, n in enumerate(self._names) if i != axis))
        moved = ProcessMesh(np.moveaxis(self.mesh, axis, 0), names)
        if index is None:
            return moved
        if isinstance(index, bool) or not isinstance(index, (int, np.integer)):
            raise TypeError(f"get_mesh_with_dim(index) takes an int, got {index!r}; write mesh[...] for a slice")
        size = moved.shape[0]
        if not -size <= index < size:
            raise IndexError(f"get_mesh_with_dim: index {index} is outside mesh dim {dim_name!r} of size {size}")
        return ProcessMesh([moved.process_ids[index]], names) if self.ndim == 1 else moved[index]

    def get_submesh_with_dim(self, dim_name: str | Sequence[str]) -> ProcessMesh:
        """The mesh along the named dims that holds the calling rank; inside a region.

        Raises
        ------
        RuntimeError
            Called on the client, which is no rank, or on a rank outside the mesh.
        """
        names = [dim_name] if isinstance(dim_name, str) else list(dim_name)
        axes = [self.dim_index(name) for name in names]
        if len(set(axes)) != len(axes):
            raise PlacementError(f"get_submesh_with_dim: a mesh dim is named twice in {names}")
        rank = CURRENT_RANK.get()
        if rank is None or rank not in self:
            if rank is None:
                who, way_out = "the client, which is no rank", "call it inside a local_map function, or slice: mesh[0]"
            else:
                who, way_out = f"rank {rank}, which is not in {self!r}", "check `get_rank() in mesh` first"
            raise RuntimeError(f"get_submesh_with_dim({dim_name!r}) was called on {who}; {way_out}")
        coord = self.coordinate(rank)
        index = tuple(slice(None) if i in axes else c for i, c in enumerate(coord))
        kept = sorted(axes)
        ranks = np.transpose(self.mesh[index], [kept.index(a) for a in axes])
        return ProcessMesh(ranks, [self._names[a] for a in axes])

    def __getitem__(self, index: Any) -> ProcessMesh:
        if isinstance(index, str) or (isinstance(index, tuple) and index and all(isinstance(i, str) for i in index)):
            return self.get_submesh_with_dim(index)
        parts = index if isinstance(index, tuple) else (index,)
        if any(i is Ellipsis for i in parts):
            at = [i is Ellipsis for i in parts].index(True)
            parts = parts[:at] + (slice(None),) * (self.ndim - len(parts) + 1) + parts[at + 1 :]
        if any(isinstance(i, bool) or not isinstance(i, (int, np.integer, slice)) for i in parts):
            raise TypeError(f"a mesh is indexed by ints, slices and dim names, got {index!r}")
        if len(parts) > self.ndim:
            raise IndexError(f"too many indices for a mesh of {self.ndim} dims {list(self._names)}: {index!r}")
        parts = parts + (slice(None),) * (self.ndim - len(parts))
        ranks = self.mesh[parts]
        names = [n for n, i in zip(self._names, parts, strict=True) if isinstance(i, slice)]
        return ProcessMesh(np.atleast_1d(ranks), names or None)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProcessMesh):
            return NotImplemented
        return (self._shape, self._ids, self._names) == (other._shape, other._ids, other._names)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        return ProcessMesh, (self.mesh, self._names)

    def __dask_tokenize__(self) -> Any:
        return ("ProcessMesh", self._shape, self._ids, self._names)

    def __repr__(self) -> str:
        return f"ProcessMesh({self.mesh.tolist()}, dim_names={list(self._names)})"

    def _repr_html_(self) -> str:
        return mesh_html(self._names, self._shape, self._ids)


def init_mesh(shape: int | Sequence[int], dim_names: Sequence[str] | None = None) -> ProcessMesh:
    """A mesh of the given shape over ranks 0..n-1 in row-major order.

    **Communication**: none.

    Examples
    --------
    >>> import daskmesh as dm
    >>> dm.init_mesh((2, 2), ("dp", "tp"))
    ProcessMesh([[0, 1], [2, 3]], dim_names=['dp', 'tp'])
    """
    sizes = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    if not sizes or any(isinstance(n, bool) or not isinstance(n, (int, np.integer)) for n in sizes):
        raise TypeError(f"init_mesh(shape) takes a sequence of ints, one per mesh dim, got {shape!r}")
    if min(sizes) < 1:
        raise ValueError(f"init_mesh(shape): every mesh dim needs at least one rank, got {tuple(sizes)}")
    return ProcessMesh(np.arange(math.prod(sizes)).reshape(sizes), dim_names)


def _ranks(mesh: Any) -> np.ndarray[Any, Any]:
    try:
        ranks = np.asarray(mesh)
    except ValueError as error:
        raise ValueError(f"ProcessMesh(mesh): the rows of a nested list must be equally long, got {mesh!r}") from error
    if ranks.dtype == object:
        raise TypeError(f"ProcessMesh(mesh): expected a nested list or an array of ranks, got {mesh!r}; write e.g. [0, 1]")
    if ranks.ndim == 0 or ranks.size == 0:
        raise ValueError(f"ProcessMesh(mesh): a mesh has at least one dim and one rank, got {mesh!r}; write e.g. [0]")
    if ranks.dtype.kind not in "iu":
        raise TypeError(f"ProcessMesh(mesh): ranks are integers, got {ranks.dtype} in {mesh!r}")
    flat = ranks.ravel().tolist()
    if min(flat) < 0:
        raise ValueError(f"ProcessMesh(mesh): rank {min(flat)} is negative")
    if len(set(flat)) != len(flat):
        twice = sorted({r for r in flat if flat.count(r) > 1})
        raise ValueError(f"ProcessMesh(mesh): rank(s) {twice} appear twice; every rank has one coordinate")
    return ranks


def _names(dim_names: Iterable[str], shape: Coord) -> tuple[str, ...]:
    if isinstance(dim_names, str):
        raise TypeError(f"ProcessMesh(dim_names) takes one name per mesh dim, got the string {dim_names!r}; "
                        f"write [{dim_names!r}]")  # fmt: skip
    names = tuple(dim_names)
    if not all(isinstance(n, str) and n for n in names):
        raise TypeError(f"ProcessMesh(dim_names): names are non-empty strings, got {list(names)!r}")
    if len(names) != len(shape):
        raise ValueError(f"ProcessMesh(dim_names): {len(names)} names {list(names)} for a mesh of shape {shape}")
    if len(set(names)) != len(names):
        raise PlacementError(f"ProcessMesh(dim_names): a name appears twice in {list(names)}")
    return names
