"""Layouts: which box of the global array every rank of a mesh holds.

A layout is a value: mesh, one placement per mesh dim, global shape, dtype, and the sizes of the parts of every tensor
dim. The parts of a tensor dim are numbered by the coordinates of the mesh dims that shard it, in mesh order::

    mesh (2, 2) "x", "y";  shape (5,);  [Shard(0), Shard(0)]

    x splits first      0 1 2 | 3 4        ceil(5 / 2) = 3
    y splits each part  0 1|2 | 3|4        part (i, j) is number 2 * i + j;  chunks[0] == (2, 1, 1, 1)

The *blocks* of a layout have one leading axis of chunk size 1 per mesh dim that is not Shard, then the tensor dims:
the block grid is the mesh: block index <-> coordinate <-> rank.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from daskmesh.mesh import ProcessMesh
from daskmesh.placement import Partial, Placement, PlacementError, Replicate, Shard, reduction
from daskmesh.placing import asked, normalise_placements

__all__ = ["Layout", "layout_of_locals", "make_layout", "normalise_placements", "split_sizes"]

Coord = tuple[int, ...]
Box = tuple[slice, ...]
Chunks = tuple[tuple[int, ...], ...]


@lru_cache(4096)
def split_sizes(n: int, parts: int) -> tuple[int, ...]:
    """Ceil chunks: part i of `n` over `parts` is [i*c, min((i+1)*c, n)) with c = ceil(n / parts), both ends clamped.

    Examples
    --------
    >>> from daskmesh.layout import split_sizes
    >>> split_sizes(5, 4)
    (2, 2, 1, 0)
    """
    c = -(-n // parts)
    return tuple(min((i + 1) * c, n) - min(i * c, n) for i in range(parts))


@dataclass(frozen=True, eq=False)
class Layout:
    """Mesh, placements, global shape, dtype and part sizes; build one with `make_layout`.

    Attributes
    ----------
    placements : tuple of Placement
        One per mesh dim, tensor dims non-negative.
    chunks : tuple of tuple of int
        Per tensor dim, the sizes of its parts.
    """

    mesh: ProcessMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: Chunks

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the global value."""
        return self.size * self.dtype.itemsize

    @cached_property
    def shard_axes(self) -> tuple[tuple[int, ...], ...]:
        """Per tensor dim, the mesh dims that shard it, in mesh order."""
        return tuple(
            tuple(m for m, p in enumerate(self.placements) if isinstance(p, Shard) and p.dim == d)
            for d in range(self.ndim)
        )

    @cached_property
    def lead_axes(self) -> tuple[int, ...]:
        """The mesh dims that are not Shard, in mesh order: the leading axes of the blocks."""
        return tuple(m for m, p in enumerate(self.placements) if not isinstance(p, Shard))

    @cached_property
    def partial_axes(self) -> tuple[int, ...]:
        """The mesh dims that are Partial."""
        return tuple(m for m, p in enumerate(self.placements) if isinstance(p, Partial))

    @property
    def lead(self) -> int:
        """Number of leading block axes."""
        return len(self.lead_axes)

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """The block grid: leading sizes, then the number of parts of each tensor dim."""
        return (*(self.mesh.shape[m] for m in self.lead_axes), *map(len, self.chunks))

    @cached_property
    def offsets(self) -> Chunks:
        """Per tensor dim, where each part starts, and the size at the end."""
        return tuple((0, *itertools.accumulate(c)) for c in self.chunks)

    def part_index(self, coord: Coord) -> tuple[int, ...]:
        """Per tensor dim, the number of the part that `coord` holds."""
        try:
            return self._part_indices[coord]
        except KeyError:
            parts = self._part_indices[coord] = tuple(_flat(coord, axes, self.mesh.shape) for axes in self.shard_axes)
            return parts

    @cached_property
    def _part_indices(self) -> dict[Coord, tuple[int, ...]]:
        return {}  # filled as coordinates are asked for: a rank asks for its own, lowering for all, many times

    def box(self, coord: Coord) -> Box:
        """The slices of the global array that the rank at `coord` holds."""
        parts = self.part_index(coord)
        return tuple(slice(o[i], o[i + 1]) for o, i in zip(self.offsets, parts, strict=True))

    def local_shape(self, coord: Coord) -> tuple[int, ...]:
        """Shape of the local array at `coord`."""
        return tuple(c[i] for c, i in zip(self.chunks, self.part_index(coord), strict=True))

    def block_index(self, coord: Coord) -> tuple[int, ...]:
        """The index in the block grid of the block at `coord`."""
        return (*(coord[m] for m in self.lead_axes), *self.part_index(coord))

    def block_shape(self, coord: Coord) -> tuple[int, ...]:
        """Shape of the block at `coord`: the local shape behind ``lead`` axes of size 1."""
        return (1,) * self.lead + self.local_shape(coord)

    @cached_property
    def block_chunks(self) -> Chunks:
        """Chunks of the dask array behind a DTensor of this layout."""
        return (*((1,) * self.mesh.shape[m] for m in self.lead_axes), *self.chunks)

    @cached_property
    def _coords(self) -> tuple[Coord, ...]:
        return tuple(itertools.product(*map(range, self.mesh.shape)))

    def coords(self) -> tuple[Coord, ...]:
        """All coordinates in row-major mesh order, the order of ``mesh.process_ids``."""
        return self._coords

    def primary(self) -> tuple[Coord, ...]:
        """The coordinates of one replica: 0 along every Replicate mesh dim."""
        rep = [m for m, p in enumerate(self.placements) if isinstance(p, Replicate)]
        return tuple(c for c in self._coords if not any(c[m] for m in rep))

    def replace(self, **changes: Any) -> Layout:
        """The same layout with some fields changed, nothing checked."""
        return Layout(**(self.__getstate__() | changes))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Layout):
            return NotImplemented
        return (  # what differs most often and costs least goes first
            self._hash == other._hash
            and self.placements == other.placements
            and self.chunks == other.chunks
            and self.shape == other.shape
            and self.dtype == other.dtype
            and self.mesh == other.mesh
        )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.mesh, self.placements, self.shape, self.dtype, self.chunks))

    def __getstate__(self) -> dict[str, Any]:
        return {f: getattr(self, f) for f in self.__dataclass_fields__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __dask_tokenize__(self) -> Any:
        return self._token

    @cached_property
    def _token(self) -> str:
        """All of the layout as one string, which Dask's tokenize takes as it is: a graph names the same layouts many times."""
        placed, parts = list(self.placements), (self.shape, self.chunks)
        return f"Layout {self.mesh.__dask_tokenize__()} {placed} {self.dtype.str} {self.dtype!r} {parts}"

    def __repr__(self) -> str:
        return (
            f"Layout({self.mesh!r}, {list(self.placements)!r}, shape={self.shape}, dtype={self.dtype}, "
            f"chunks={self.chunks})"
        )


def make_layout(
    mesh: ProcessMesh,
    placements: Any,
    shape: Sequence[int],
    dtype: Any,
    chunks: Sequence[Sequence[int] | None] | None = None,
    call: str = "",
) -> Layout:
    """Check and complete a layout.

    Parameters
    ----------
    placements : sequence of Placement or mapping
        In mesh-dim order, padded with Replicate; or by mesh-dim name, the rest Replicate.
    chunks : sequence, optional
        Per tensor dim the sizes of its parts, None for the split rule.
    call : str
        What the caller was asked for; messages begin with it.

    Raises
    ------
    PlacementError
        An unknown mesh dim, too many placements, a Shard dim out of range, or part sizes that do not fit.
    TypeError
        A Partial whose reduction the dtype does not have.

    Examples
    --------
    >>> import daskmesh as dm
    >>> from daskmesh.layout import make_layout
    >>> make_layout(dm.init_mesh(4, ["x"]), [dm.Shard(-1)], (2, 5), "f8").chunks
    ((2,), (2, 2, 1, 0))
    """
    with asked(call):
        sizes = tuple(operator.index(n) for n in shape)
        if sizes and min(sizes) < 0:
            raise ValueError(f"a shape has no negative sizes, got {sizes}")
        layout = _ruled(mesh, normalise_placements(placements, mesh, len(sizes)), sizes, np.dtype(dtype))
        return layout if chunks is None else layout.replace(chunks=_checked_chunks(layout, chunks))


@lru_cache(4096)
def _ruled(mesh: ProcessMesh, placements: tuple[Placement, ...], shape: Coord, dtype: np.dtype[Any]) -> Layout:
    for m, p in enumerate(placements):
        if isinstance(p, Partial) and not reduction(p.op).takes(dtype):
            way_out = "place truth values, such as x != 0" if p.op in ("any", "all") else "use Replicate() or Shard(dim)"
            raise TypeError(
                f"{p!r} on mesh dim {mesh.dim_names[m]!r} of size {mesh.shape[m]}: {dtype} values cannot be reduced by {p.op}; "
                f"{way_out}"
            )
    chunks = []
    for d, n in enumerate(shape):
        parts: tuple[int, ...] = (n,)
        for m, p in enumerate(placements):
            if isinstance(p, Shard) and p.dim == d:
                parts = tuple(itertools.chain.from_iterable(split_sizes(k, mesh.shape[m]) for k in parts))
        chunks.append(parts)
    return Layout(mesh, placements, shape, dtype, tuple(chunks))


def _checked_chunks(layout: Layout, chunks: Sequence[Sequence[int] | None]) -> Chunks:
    if len(chunks) != layout.ndim:
        raise PlacementError(f"part sizes for {len(chunks)} tensor dims were given, the shape {layout.shape} has {layout.ndim}")
    out = []
    for d, given in enumerate(chunks):
        if given is None:
            out.append(layout.chunks[d])
            continue
        sizes = tuple(operator.index(n) for n in given)
        want = len(layout.chunks[d])
        names = [layout.mesh.dim_names[m] for m in layout.shard_axes[d]]
        if len(sizes) != want or sum(sizes) != layout.shape[d] or min(sizes) < 0:
            raise PlacementError(
                f"tensor dim {d} of size {layout.shape[d]} is cut over mesh dims {names} into {want} parts; "
                f"the sizes {sizes} (sum {sum(sizes)}) do not fit"
            )
        out.append(sizes)
    return tuple(out)


def layout_of_locals(
    mesh: ProcessMesh,
    placements: Any,
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[Any],
    what: str = "the local arrays",
    call: str = "",
) -> Layout:
    """The layout that local arrays of real sizes make: the sizes of the parts of every tensor dim are summed.

    Parameters
    ----------
    shapes, dtypes : sequence
        One per rank, in row-major mesh order.

    Raises
    ------
    ValueError
        Two ranks that hold the same part of a tensor dim differ in its size, or ranks differ in dtype or number of dims.

    Examples
    --------
    >>> import daskmesh as dm
    >>> from daskmesh.layout import layout_of_locals
    >>> layout_of_locals(dm.init_mesh(2, ["x"]), [dm.Shard(0)], [(2, 3), (1, 3)], ["f8", "f8"]).shape
    (3, 3)
    """
    first, ranks = tuple(shapes[0]), mesh.process_ids
    for rank, shape, dtype in zip(ranks, shapes, dtypes, strict=True):
        if len(shape) != len(first) or np.dtype(dtype) != np.dtype(dtypes[0]):
            raise ValueError(
                f"{what} differ: rank {ranks[0]} has shape {first} and dtype {np.dtype(dtypes[0])}, "
                f"rank {rank} has shape {tuple(shape)} and dtype {np.dtype(dtype)}"
            )
    frame = make_layout(mesh, placements, (0,) * len(first), dtypes[0], call=call)
    sizes: list[dict[int, tuple[int, int]]] = [{} for _ in first]
    for coord, rank, shape in zip(frame.coords(), ranks, shapes, strict=True):
        for d, (i, n) in enumerate(zip(frame.part_index(coord), shape, strict=True)):
            known, other = sizes[d].setdefault(i, (int(n), rank))
            if known != n:
                raise ValueError(
                    f"{what} do not fit {list(frame.placements)}: ranks {other} and {rank} hold the same part of tensor dim "
                    f"{d}, but have sizes {known} and {n} (shapes {_shape_of(other, mesh, shapes)} and {tuple(shape)})"
                )
    chunks = tuple(tuple(part[i][0] for i in range(len(part))) for part in sizes)
    return frame.replace(shape=tuple(map(sum, chunks)), chunks=chunks)


def _shape_of(rank: int, mesh: ProcessMesh, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(shapes[mesh.process_ids.index(rank)])


def _flat(coord: Coord, axes: tuple[int, ...], shape: tuple[int, ...]) -> int:
    i = 0
    for m in axes:
        i = i * shape[m] + coord[m]
    return i
