"""Saving and loading with Zarr, version 3: each rank writes and reads only its own box.

Two ranks must not write to one chunk of the file, since a chunk is rewritten whole. So the parts of the array are cut where the
chunks are, and where they are not, they are moved first::

    24 rows over 3 ranks       0 ... 7 | 8 ... 15 | 16 ... 23     chunks of 8 rows, one per rank: nothing moves
    parts of 1, 18 and 5 rows  0 | 1 ... 18 | 19 ... 23           rank 0 loads rows 1-7 and rank 2 rows 16-18 from rank 1
"""

from __future__ import annotations

import importlib
import math
import os
import shutil
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from daskmesh.creation import from_callback
from daskmesh.dtensor import DTensor
from daskmesh.graph import Local
from daskmesh.layout import Box, Coord, Layout, make_layout
from daskmesh.mesh import ProcessMesh
from daskmesh.moves import moved
from daskmesh.placement import Partial, Placement, Replicate, Shard

__all__ = ["load", "save"]

Array = Any
_CHUNK_BYTES = 32 * 2**20  # a chunk is read and written whole, and compressed in one piece


def save(
    x: DTensor, path: str | os.PathLike[str], *, chunks: Sequence[int | None] | None = None, overwrite: bool = False
) -> None:
    """Write a DTensor as a Zarr array (version 3), each rank its own part; returns when all is written.

    Parameters
    ----------
    x : DTensor, shape (n, ...)
        A Partial is reduced first. Of replicas each writes a share.
    path : str or path
        A directory that client and workers all see, or a URL that Zarr understands. A directory appears under this name when
        it is complete.
    chunks : sequence of int, optional
        Chunk sizes of the file per tensor dim, None for one that follows the parts. A chunk is never written by two ranks.
    overwrite : bool
        Replace what is there.

    Notes
    -----
    **Communication**: none where the parts begin at chunk borders, which the default sees to, unless the sizes of the parts are
    very uneven. Otherwise the rows that lie on another rank than their chunk, and the reduction of a Partial. Nothing but a
    byte per rank comes to the client.

    Raises
    ------
    FileExistsError
        There is something at `path`.
    ImportError
        Zarr is not installed.

    Examples
    --------
    >>> import tempfile
    >>> import daskmesh as dm
    >>> x = dm.arange(5, mesh=dm.init_mesh(3, ["x"]), placements=[dm.Shard(0)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     dm.save(x, f"{folder}/x.zarr")
    ...     y = dm.load(f"{folder}/x.zarr", mesh=dm.init_mesh((2, 2), ("x", "y")), placements=[dm.Replicate(), dm.Shard(0)])
    ...     np.asarray(y)
    array([0, 1, 2, 3, 4])
    """
    if not isinstance(x, DTensor):
        raise TypeError(f"save(x, path): expected a DTensor, got {type(x).__name__}; place it with shard_tensor first")
    zarr = _zarr()
    place = _location(path)
    local = "://" not in place
    if not overwrite and (os.path.lexists(place) if local else _holds_array(zarr, place)):
        raise FileExistsError(f"save(path): there is something at {place}; pass overwrite=True to replace it")
    target, grid = _writing(x.layout, chunks)
    at = f"{place}.{uuid.uuid4().hex[:12]}.partial" if local else place
    frame = {"shape": target.shape, "chunks": grid, "dtype": target.dtype, "zarr_format": 3}
    try:
        zarr.create_array(at, **frame, overwrite=overwrite)
        _written(moved(x._node, target, "parts are cut where the chunks of the file are"), at)
        if local:
            _replace(at, place)
    finally:
        if local:
            shutil.rmtree(at, ignore_errors=True)


def load(path: str | os.PathLike[str], *, mesh: ProcessMesh, placements: Any = ()) -> DTensor:
    """A DTensor of a Zarr array, on any mesh and in any layout: each rank reads the box that it holds, when it is asked for.

    Parameters
    ----------
    path : str or path
        Of an array that `save` or any other program wrote, version 2 or 3.

    Returns
    -------
    DTensor, shape (n, ...)

    Notes
    -----
    The file is read again where a block is lost, so it must not change as long as the DTensor is used.

    **Communication**: none between ranks. Chunks of the file that several ranks hold a part of are read by each of them.

    Raises
    ------
    FileNotFoundError
        There is no Zarr array at `path`.
    ImportError
        Zarr is not installed.

    Examples
    --------
    See `save`.

    >>> import daskmesh as dm
    >>> dm.load("nothing.zarr", mesh=dm.init_mesh(2, ["x"]))
    Traceback (most recent call last):
    FileNotFoundError: load(path): there is no Zarr array at ...nothing.zarr
    """
    place = _location(path)
    try:
        array = _zarr().open_array(place, mode="r")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"load(path): there is no Zarr array at {place}") from error
    # A number of its own for each call: the file may have changed since the last, so blocks of that must not be taken for these.
    return from_callback(array.shape, array.dtype, mesh, placements, partial(_read, place, uuid.uuid4().hex))


def _zarr() -> Any:
    try:
        return importlib.import_module("zarr")
    except ImportError as error:
        raise ImportError("daskmesh.save and load need Zarr: pip install 'daskmesh[io]', here and on the workers") from error


def _location(path: str | os.PathLike[str]) -> str:
    """The same place for every process, whatever its working directory."""
    place = os.fspath(path)
    if not isinstance(place, str):
        raise TypeError(f"path: expected a str or path, got {path!r}")
    place = place.removeprefix("file://")
    return place if "://" in place else str(Path(place).absolute())


def _holds_array(zarr: Any, place: str) -> bool:
    try:
        zarr.open_array(place, mode="r")
    except FileNotFoundError:
        return False
    return True


def _replace(made: str, place: str) -> None:
    if os.path.lexists(place):
        old = made.removesuffix(".partial") + ".old"
        os.replace(place, old)
        os.replace(made, place)
        if os.path.isdir(old) and not os.path.islink(old):
            shutil.rmtree(old)
        else:
            os.remove(old)
    else:
        os.replace(made, place)


# -- who writes what --------------------------------------------------------------------------------------------------


def _writing(layout: Layout, chunks: Sequence[int | None] | None) -> tuple[Layout, tuple[int, ...]]:
    """The layout in which `layout` is written, and the chunks of the file: no chunk has a part in two boxes."""
    if chunks is not None and len(chunks) != layout.ndim:
        raise ValueError(f"save(chunks): {len(chunks)} sizes for a tensor of {layout.ndim} dims, of shape {layout.shape}")
    spread = _spread(layout)
    sizes = [_follows(spread, d) for d in range(spread.ndim)]
    free = [d for d in range(spread.ndim) if chunks is None or chunks[d] is None]
    for d in set(range(spread.ndim)) - set(free):
        sizes[d] = int(chunks[d])  # type: ignore[index, arg-type]
        if sizes[d] < 1:
            raise ValueError(f"save(chunks): the chunk size {sizes[d]} of tensor dim {d} is not positive")
    while free and math.prod(sizes) * layout.dtype.itemsize > _CHUNK_BYTES and max(sizes[d] for d in free) > 1:
        d = max(free, key=lambda d: sizes[d])
        factor = next((m for m in range(2, 17) if sizes[d] % m == 0), 2)  # a divisor, so that the parts stay where they are
        sizes[d] = -(-sizes[d] // factor)
    cut = tuple(_cut(spread, d, sizes[d]) for d in range(spread.ndim))
    return spread.replace(chunks=cut), tuple(sizes)


def _spread(layout: Layout) -> Layout:
    """Replicas and terms become shares of the longest dim that is whole: all ranks write, and reducing moves least."""
    placements: list[Placement] = list(layout.placements)
    whole = [d for d in range(layout.ndim) if not layout.shard_axes[d] and layout.shape[d] > 1]
    if whole:
        longest = max(whole, key=lambda d: layout.shape[d])
        placements = [p if isinstance(p, Shard) else Shard(longest) for p in placements]
    placements = [Replicate() if isinstance(p, Partial) else p for p in placements]
    chunks = [None if whole and d == longest else c for d, c in enumerate(layout.chunks)]
    return make_layout(layout.mesh, placements, layout.shape, layout.dtype, chunks)


def _follows(layout: Layout, d: int) -> int:
    """The chunk size that lets the parts of a dim stay where they are, unless that were much too small."""
    n, even = layout.shape[d], max(1, -(-layout.shape[d] // len(layout.chunks[d])))
    border = math.gcd(*(o for o in layout.offsets[d] if 0 < o < n))
    return border if 4 * border >= even else even


def _cut(layout: Layout, d: int, chunk: int) -> tuple[int, ...]:
    """The sizes of the parts of a dim, as they are if they begin at borders of chunks."""
    n, parts = layout.shape[d], len(layout.chunks[d])
    if all(o % chunk == 0 or o == n for o in layout.offsets[d]):
        return layout.chunks[d]
    part = -(-n // (chunk * parts)) * chunk
    return tuple(min((i + 1) * part, n) - min(i * part, n) for i in range(parts))


# -- on the ranks -----------------------------------------------------------------------------------------------------


def _written(node: Any, place: str) -> None:
    layout = node.layout
    done = make_layout(layout.mesh, [Shard(0)] * layout.mesh.ndim, (layout.mesh.size,), np.uint8)
    DTensor(Local(done, node.world, _write, (node,), {"place": place, "layout": layout}, located=True)).compute()


def _write(coord: Coord, local: Array, place: str, layout: Layout) -> Array:
    first = not any(coord[m] for m in layout.lead_axes)  # of the replicas of an array too small to share
    if first and local.size:
        array = _zarr().open_array(place, mode="r+", config={"write_empty_chunks": True})  # -0.0 is not 0.0
        array[layout.box(coord)] = local
    return np.zeros(1, np.uint8)


def _read(place: str, token: str, box: Box) -> Array:
    return _zarr().open_array(place, mode="r")[box]
