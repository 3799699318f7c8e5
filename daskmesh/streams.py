"""Random numbers by place: a function of the seed, the number of the call and the place in the whole array.

The whole array is cut into *tiles* of at most 65,536 elements, about as long along every dim; the shape alone decides how. Each
tile has a bit generator of its own, seeded with (seed, call, tile), so a rank draws just the tiles that its box meets::

    shape (600, 500), tiles of (256, 256)        box of rank 1 of Shard(1) on 2 ranks
    0 1                                          . 1      columns 250 to 499: of tile 0 it draws all and keeps 6 columns
    2 3                                          2 3
    4 5

Cost: that of NumPy's own generator for the tiles met, plus some 15 microseconds a tile. A box much longer than a tile along each
dim that is cut wastes little; parts narrower than a tile each draw the whole tiles that they share.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from daskmesh.layout import Box

__all__ = ["Stream", "Vectors", "draw", "draw_vectors", "places", "tile_shape"]

Array = Any
Shape = tuple[int, ...]

TILE_SIZE = 2**16
_WHOLE_PERMUTATION = 2**20  # up to so many elements, every rank shuffles all of them
_ROUNDS = 12


class Stream(NamedTuple):
    """The seed of one call."""

    entropy: Any
    key: Shape

    def generator(self, tile: int = 0) -> np.random.Generator:
        """NumPy's generator for one tile."""
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence(self.entropy, spawn_key=(*self.key, tile))))


@lru_cache(1024)
def tile_shape(shape: Shape, width: int = 1) -> Shape:
    """Sizes of the tiles of an array of elements that are `width` numbers each.

    They are powers of two, as equal as they can be, and a tile has at most `TILE_SIZE` numbers.

    Examples
    --------
    >>> from daskmesh.streams import tile_shape
    >>> tile_shape((600, 500)), tile_shape((10**6,)), tile_shape((3, 10**6))
    ((256, 256), (65536,), (4, 16384))
    """
    sizes = [1] * len(shape)
    while True:
        short = [d for d, n in enumerate(shape) if sizes[d] < n]
        if not short or 2 * math.prod(sizes) * max(width, 1) > TILE_SIZE:
            return tuple(sizes)
        sizes[min(short, key=lambda d: (sizes[d], -d))] *= 2


def _tiles_in(shape: Shape, tile: Shape, box: Box) -> Iterator[tuple[int, Box, Box, Box]]:
    """The tiles that a box meets: (number, place in the whole, what is kept of the tile, its place in the box)."""
    if any(b.stop <= b.start for b in box):
        return
    grid = tuple(-(-n // t) for n, t in zip(shape, tile, strict=True))
    met = (range(b.start // t, -(-b.stop // t)) for b, t in zip(box, tile, strict=True))
    for at in itertools.product(*met):
        number = 0
        for i, n in zip(at, grid, strict=True):
            number = number * n + i
        whole = tuple(slice(i * t, min((i + 1) * t, n)) for i, t, n in zip(at, tile, shape, strict=True))
        both = [slice(max(s.start, b.start), min(s.stop, b.stop)) for s, b in zip(whole, box, strict=True)]
        src = tuple(slice(c.start - s.start, c.stop - s.start) for c, s in zip(both, whole, strict=True))
        dst = tuple(slice(c.start - b.start, c.stop - b.start) for c, b in zip(both, box, strict=True))
        yield number, whole, src, dst


def draw(
    stream: Stream, method: str, shape: Shape, args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: Any, box: Box
) -> Array:
    """The numbers in a box of an array of `shape`."""
    out = np.empty(tuple(b.stop - b.start for b in box), dtype)
    for number, whole, src, dst in _tiles_in(shape, tile_shape(shape), box):
        given = [np.broadcast_to(a, shape)[whole] if np.ndim(a) else a for a in args]
        size = tuple(s.stop - s.start for s in whole)
        out[dst] = getattr(stream.generator(number), method)(*given, size=size, **kwargs)[src]
    return out


class Vectors(NamedTuple):
    """How vectors are drawn.

    Attributes
    ----------
    sample : callable
        ``sample(generator, size, *args)``: vectors, of shape ``(*size, width)``.
    args : tuple of (array, int)
        Parameters, and how many of their last dims belong to one vector; the others broadcast to the size.
    """

    sample: Callable[..., Array]
    args: tuple[tuple[Array, int], ...]
    dtype: Any


def draw_vectors(stream: Stream, vectors: Vectors, shape: Shape, box: Box) -> Array:
    """What a box of an array of vectors, which are its last dim, has of them; tiles are of whole vectors."""
    *sizes, width = shape
    size, line = tuple(sizes), box[-1]
    out = np.empty(tuple(b.stop - b.start for b in box), vectors.dtype)
    if line.stop <= line.start:
        return out
    for number, whole, src, dst in _tiles_in(size, tile_shape(size, width), box[:-1]):
        given = [np.broadcast_to(a, size + a.shape[a.ndim - n :])[whole] if a.ndim > n else a for a, n in vectors.args]
        extent = tuple(s.stop - s.start for s in whole)
        out[dst] = vectors.sample(stream.generator(number), extent, *given)[(*src, line)]
    return out


def places(stream: Stream, n: int, index: Array) -> Array:
    """The elements number `index` of a random permutation of n.

    Short ones are shuffled whole. For a long one each element is worked out by itself, by a Feistel network over pairs (i, j)
    that number a few more elements than n: a round adds to one half a number that depends on the other, which can be undone, so
    the network is a permutation of the pairs. Where it leads beyond n, it is followed on until it leads back.
    """
    rng = stream.generator()
    if n <= _WHOLE_PERMUTATION:
        return rng.permutation(n)[index]
    rows = math.isqrt(n - 1) + 1
    columns = -(-n // rows)
    keys = rng.integers(0, 2**64, size=_ROUNDS, dtype=np.uint64)
    out = _network(index.astype(np.uint64), rows, columns, keys)
    while (beyond := np.flatnonzero(out >= n)).size:
        out[beyond] = _network(out[beyond], rows, columns, keys)
    return out.astype(np.int64)


def _network(at: Array, rows: int, columns: int, keys: Array) -> Array:
    i, j = at // np.uint64(columns), at % np.uint64(columns)
    for round_, key in enumerate(keys):
        if round_ % 2:
            j = (j + _mixed(i + key) % np.uint64(columns)) % np.uint64(columns)
        else:
            i = (i + _mixed(j + key) % np.uint64(rows)) % np.uint64(rows)
    return i * np.uint64(columns) + j


def _mixed(x: Array) -> Array:
    """The finaliser of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
