"""What libraries that know Dask's arrays ask of an array that is a Dask collection: xarray above all.

They speak of chunks. Here these are the parts into which the placements cut each dim; empty parts count.
"""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np

from daskmesh.moves import moved

__all__ = ["ChunkedArray", "Chunks"]

_np: Any = np  # typed for arrays of its own, not for those that speak its protocols


class Chunks(tuple[tuple[int, ...], ...]):
    """The chunks of an array that is cut over a mesh; by them `rechunk` knows that it is asked for the parts of another one."""

    __slots__ = ()


class ChunkedArray:
    """Chunks of an array that is cut over a mesh, as ``dask.array`` names things."""

    __slots__ = ()

    @property
    def chunks(self: Any) -> Chunks:
        """Per tensor dim, the sizes of its parts."""
        return Chunks(self.layout.chunks)

    @property
    def chunksize(self: Any) -> tuple[int, ...]:
        """Per tensor dim, the size of its largest part."""
        return tuple(max(c) for c in self.layout.chunks)

    @property
    def numblocks(self: Any) -> tuple[int, ...]:
        """Per tensor dim, the number of its parts."""
        return tuple(map(len, self.layout.chunks))

    def rechunk(self: Any, chunks: Any = "auto", **kwargs: Any) -> Any:
        """``x.rechunk(y.chunks)`` of a DTensor `y` cuts `x` into the same parts; any other chunks make it a dask array.

        Dask's own functions ask for chunks before they go on with a dask array. On the mesh, `reshard` says how to cut.

        **Communication**: what the redistribution moves; a dask array moves its pieces as Dask does.
        """
        layout = self.layout
        if not isinstance(chunks, Chunks):
            return self.to_dask().rechunk(chunks, **kwargs)
        if tuple(map(len, chunks)) != self.numblocks or tuple(map(sum, chunks)) != self.shape:
            raise ValueError(
                f"rechunk(chunks): parts of sizes {tuple(chunks)} for shape {self.shape} cut into {self.numblocks} parts by "
                f"{list(self.placements)}; cut it otherwise first: x.reshard(placements)"
            )
        return type(self)(moved(self._node, layout.replace(chunks=tuple(chunks)), "rechunk"))

    def to_dask_array(self: Any) -> da.Array:
        """`to_dask`, by the name under which ``dask.array``'s own functions look for it."""
        return self.to_dask()  # type: ignore[no-any-return]

    @property
    def vindex(self: Any) -> _Pointwise:
        """Pointwise indexing: ``x.vindex[i, :, j]`` has the dims of the index arrays first."""
        return _Pointwise(self)


class _Pointwise:
    def __init__(self, array: Any) -> None:
        self._array = array

    def __getitem__(self, key: Any) -> Any:
        key = key if isinstance(key, tuple) else (key,)
        key = tuple(k if isinstance(k, slice) or hasattr(k, "ndim") else np.asarray(k) for k in key)
        places = [i for i, k in enumerate(key) if not isinstance(k, slice)]
        picked = self._array[key]
        n = len(np.broadcast_shapes(*(key[i].shape for i in places))) if places else 0
        if not places or places[-1] - places[0] + 1 != len(places):
            return picked  # as NumPy: index arrays with a slice between them come first
        return _np.moveaxis(picked, range(places[0], places[0] + n), range(n))
