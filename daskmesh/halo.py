"""Halo exchange: each rank gets the rows of its neighbours that border on its own.

One tensor dim after another, each time with the halos of the dims before, so corners come along without messages of
their own. Along one dim, rows move both ways at once::

    index i-1 │ ......aa │        a: my low halo      the last rows of i-1
    index i     aa│ own rows │bb  b: my high halo     the first rows of i+1
    index i+1                │ bb........ │

A shard with fewer rows than the halo is deep has not enough to give: it passes on what it gets from behind, one round
later, until the halo is full or the end of the array is reached. Both sides of a message know that by counting.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count
from types import NoneType
from typing import Any, NamedTuple

import numpy as np

from daskmesh.algorithms import along, written
from daskmesh.gang import MeshDim, as_array, collective, current_gang, unknown_shape
from daskmesh.parcels import Group, Parcel

__all__ = ["halo_exchange", "halo_settings"]

Array = Any
Span = tuple[int, int]  # from, up to
Index = tuple[slice, ...]
BOUNDARIES = ("periodic", "none", "reflect", "nearest")
MOST_KNOWN = 1024  # different calls that are remembered
UP, DOWN = 1, -1  # towards higher indices (fills low halos), towards lower ones


@collective
def halo_exchange(
    x: Array,
    depth: int | Sequence[Any] | Mapping[int, Any],
    mesh_dims: MeshDim | Sequence[MeshDim] | Mapping[int, MeshDim],
    boundary: Any = "none",
    *,
    out: Array | None = None,
) -> Array:
    """Surround `x` with the rows of its neighbours that border on it, corners included.

    Parameters
    ----------
    x : array
        This rank's shard.
    depth : int, or one per tensor dim
        Rows wanted on each side; a pair (below, above) for different ones.
    mesh_dims : str, or one per tensor dim
        The mesh dim over which each tensor dim is cut, None for one that is not (it gets a halo only if `depth` lists it);
        a single name means tensor dim 0. A mapping from tensor dim may be given, here as for the others.
    boundary : str or scalar, or one per tensor dim
        What lies beyond the ends of the array: "periodic" (the other end), "reflect" (mirrored, the end row included),
        "nearest" (the end row again), a value, or "none": nothing, so shards at the ends get no halo there.
    out : array, optional
        Array of the shape with all halos to fill. Where `x` is the inner part of it, only the halos are written, which
        saves a copy in each turn of a loop.

    Notes
    -----
    **Communication**: the elements of the halos that lie on other ranks are received.

    Examples
    --------
    >>> from daskmesh.gang import alone
    >>> with alone():
    ...     halo_exchange(np.arange(4), 1, "x", "periodic"), halo_exchange(np.arange(4), (2,), "x", -1)
    (array([3, 0, 1, 2, 3, 0]), array([-1, -1,  0,  1,  2,  3, -1, -1]))
    """
    gang = current_gang("halo_exchange")
    array, _ = as_array(x)
    names, edges, beyond = _edges(array.ndim, depth, mesh_dims, boundary)
    sizes = tuple(n + edge.low + edge.high for n, edge in zip(array.shape, edges, strict=True))
    if out is not None and (out.shape, out.dtype) != (sizes, array.dtype):
        raise ValueError(f"halo_exchange: out is {out.dtype} {out.shape}, with all halos x is {array.dtype} {sizes}")
    groups = [gang.group(name) for name in names]
    if gang.trace is not None:
        if any(edge.boundary == "none" and edge.low + edge.high for edge in edges):
            raise unknown_shape("halo_exchange with boundary 'none'")
        return gang.traced(sizes, array.dtype)
    out = np.empty(sizes, array.dtype) if out is None else out
    return _surround(array, list(map(_Side, groups, edges, beyond)), out)


def halo_settings(ndim: int, depth: Any, mesh_dims: Any, boundary: Any) -> list[tuple[MeshDim, Any, Any]]:
    """Per tensor dim: the mesh dims over which it is cut (none: an empty tuple), its depth and its boundary.

    Examples
    --------
    >>> halo_settings(2, 1, "x", "none")
    [('x', 1, 'none'), ((), 0, 'none')]
    """
    single = isinstance(mesh_dims, str | int)
    names = _per_dim("mesh_dims", (mesh_dims,) if single else mesh_dims, ndim, None, ())
    depths = _per_dim("depth", depth, ndim, 0, [dim for dim, name in enumerate(names) if name is not None])
    boundaries = _per_dim("boundary", boundary, ndim, "none", range(ndim))
    return list(zip([() if name is None else name for name in names], depths, boundaries, strict=True))


@dataclass(frozen=True, eq=False)
class _Edge:
    """What to do along one tensor dim: rows wanted below and above, and what lies beyond the ends of the array.

    `boundary` is "periodic", "none", "reflect", "nearest", or "value", the value being told apart.
    """

    dim: int
    low: int
    high: int
    boundary: str

    @property
    def periodic(self) -> bool:
        """Whether the last index is the neighbour of the first."""
        return self.boundary == "periodic"

    @cached_property
    def written(self) -> str:
        """What all ranks must ask for alike."""
        return f", dim={self.dim}, depth=({self.low}, {self.high}), boundary={self.boundary!r}"


Edges = tuple[Sequence[MeshDim], Sequence[_Edge], Sequence[Any]]
_KNOWN: dict[Any, Edges] = {}


class _Side(NamedTuple):
    """One tensor dim of a call: the ranks over which it is cut, its edge, and the value beyond the ends if that is one."""

    group: Group
    edge: _Edge
    value: Any


@dataclass(frozen=True)
class _Step:
    """The exchange along one dim among shards that all have enough rows: what index of the array goes where and comes whence.

    `fills` are copied from within the array or, where the source is None, are the value beyond its ends. `known` are the rows
    that are known then; `shape` is what the call has in writing.
    """

    sends: tuple[tuple[int, Index], ...]
    takes: tuple[tuple[int, int, Index], ...]  # with the way that the rows come
    fills: tuple[tuple[Index, Index | None], ...]
    known: Span
    shape: tuple[Any, ...]


def _surround(x: Array, sides: Sequence[_Side], out: Array) -> Array:
    """Write `x` into `out`, of the shape with all halos, and around it the halos of its neighbours.

    With the boundary "none" the result has no halo at the ends of the array.
    """
    valid = [(edge.low, edge.low + n) for (_, edge, _), n in zip(sides, x.shape, strict=True)]
    inner = out[(*_box(valid), ...)]
    if inner.__array_interface__["data"] != x.__array_interface__["data"] or inner.strides != x.strides:
        inner[...] = x
    for side in sides:
        edge, group = side.edge, side.group
        if edge.low or edge.high:
            step = _step(edge, tuple(valid), group.index, group.size)
            valid[edge.dim] = _Extension(side, out, valid).run() if step is None else _follow(step, side, out, valid)
    return out[(*_box(valid), ...)]


def _box(spans: Sequence[Span]) -> Index:
    return tuple([slice(start, stop) for start, stop in spans])


@lru_cache(MOST_KNOWN)
def _step(edge: _Edge, valid: Sequence[Span], index: int, size: int) -> _Step | None:
    """What an index of a group of this size does; None if its own shard has not enough rows. In a loop it is worked out once."""
    dim, (start, stop) = edge.dim, valid[edge.dim]
    if stop - start < max(edge.low, edge.high):
        return None

    def at(first: int, last: int) -> Index:
        """Rows `first` up to `last`, or down to it."""
        rows = slice(first, last) if first <= last else slice(first - 1, last - 1 if last else None, -1)
        return (*_box(valid[:dim]), rows, *_box(valid[dim + 1 :]))

    sends, takes, fills, known = [], [], [], [start, stop]
    for way, deep, end in ((UP, edge.low, 0), (DOWN, edge.high, size - 1)):
        if not deep:
            continue
        halo, far = (start - deep, start), (stop, stop + deep)
        first, last = (start, start + deep), (stop - deep, stop)
        if way == DOWN:
            halo, first, last = far, last, first
        # `first` are the own rows beside this halo, `last` those beside the other side, which the neighbour there wants.
        alone, outermost = size == 1, index == end and not edge.periodic
        if not alone and (edge.periodic or index != size - 1 - end):
            sends.append(((index + way) % size, at(*last)))
        if not alone and not outermost:
            takes.append((way, (index - way) % size, at(*halo)))
        elif edge.boundary == "none":
            continue
        else:
            nearest = (start, start + 1) if way == UP else (stop - 1, stop)
            sources = {"periodic": last, "reflect": first[::-1], "nearest": nearest}
            source = sources.get(edge.boundary)
            fills.append((at(*halo), source and at(*source)))
        known[0 if way == UP else 1] = halo[0 if way == UP else 1]
    sizes = [above - below for below, above in valid]
    return _Step(tuple(sends), tuple(takes), tuple(fills), (known[0], known[1]), (*sizes[:dim], "*", *sizes[dim + 1 :]))


def _follow(step: _Step, side: _Side, out: Array, valid: Sequence[Span]) -> Span:
    """Do what `step` says, or, where a neighbour turns out to have fewer rows, go on from there round by round."""
    group, edge, value = side
    call = written("halo_exchange", group.label, out.dtype, step.shape, edge.written)
    for to, at in step.sends:
        group.send(to, call, out[at])
    parcels = [group.receive(source, call) for _, source, _ in step.takes]
    places = [out[at] for _, _, at in step.takes]
    if any(parcel.shape != place.shape for parcel, place in zip(parcels, places, strict=True)):
        return _Extension(side, out, valid, {way: parcel for (way, _, _), parcel in zip(step.takes, parcels, strict=True)}).run()
    for parcel, place in zip(parcels, places, strict=True):
        parcel.into(place)
    group.settle()
    for at, source in step.fills:
        out[at] = value if source is None else out[source]
    return step.known


class _Extension:
    """The exchange along one dim round by round, where a shard has fewer rows than the halo is deep.

    `buffer` is filled, `valid` says what of it is known so far. With `first`, the first round has been: its sends are done, and
    these have come.
    """

    def __init__(self, side: _Side, buffer: Array, valid: Sequence[Span], first: Mapping[int, Parcel] | None = None) -> None:
        self.group, self.edge, self.value = side
        dim, box = self.edge.dim, _box(valid)
        self.rows = buffer[(*box[:dim], slice(None), *box[dim + 1 :])]
        self.start, self.stop = valid[dim]
        self.want = {UP: self.edge.low, DOWN: self.edge.high}
        self.got = {UP: 0, DOWN: 0}
        self.first = dict(first or {})
        self.sent = dict(self.want) if first else {UP: 0, DOWN: 0}

    def run(self) -> Span:
        """Fill both halos; return the rows that are known then."""
        if self.group.size == 1:
            if self.edge.periodic:
                self._wrap()
        else:
            self._exchange()
            self.group.settle()
        if not self.edge.periodic and self.got != self.want:
            self._beyond()
        return self.start - self.got[UP], self.stop + self.got[DOWN]

    def _at(self, start: int, stop: int) -> Array:
        return self.rows[along(self.edge.dim, slice(start, stop))]

    def _wrap(self) -> None:
        n = self.stop - self.start
        if not n:
            raise _empty(self.edge)
        own = self._at(self.start, self.stop)
        for way, rows in ((UP, range(-self.edge.low, 0)), (DOWN, range(n, n + self.edge.high))):
            for row in rows:
                self._at(self.start + row, self.start + row + 1)[...] = own[along(self.edge.dim, slice(row % n, row % n + 1))]
            self.got[way] = self.want[way]

    def _exchange(self) -> None:
        group, dim, n = self.group, self.edge.dim, self.stop - self.start
        shape = (*self.rows.shape[:dim], "*", *self.rows.shape[dim + 1 :])
        call = written("halo_exchange", group.label, self.rows.dtype, shape, self.edge.written)
        sent = self.sent
        moving = {
            UP: self._at(self.stop - min(n, self.edge.low), self.stop),
            DOWN: self._at(self.start, self.start + min(n, self.edge.high)),
        }
        for turn in count():
            sends = [way for way in (UP, DOWN) if self._moves(group.index, way, turn) and sent[way] < self.want[way]]
            takes = [way for way in (UP, DOWN) if self._moves(group.index - way, way, turn) and self.got[way] < self.want[way]]
            if not sends and not takes:
                return
            if turn == group.size and not n and not any(self.got.values()):
                raise _empty(self.edge)
            for way in sends:
                sent[way] += moving[way].shape[dim]
                group.send((group.index + way) % group.size, call, moving[way])
            for way in takes:
                parcel = self.first.pop(way, None) or group.receive((group.index - way) % group.size, call)
                place = self._next(way, parcel.shape[dim])
                parcel.into(place)
                left = self.want[way] - sent[way]
                length = place.shape[dim]
                keep = slice(max(length - left, 0), length) if way == UP else slice(0, max(min(left, length), 0))
                moving[way] = place[along(dim, keep)]

    def _moves(self, index: int, way: int, turn: int) -> bool:
        """Whether `index` has a neighbour in that direction, and the rows it would pass on then have an origin."""
        if self.edge.periodic:
            return True
        size = self.group.size
        return 0 <= index < size and 0 <= index + way < size and 0 <= index - way * turn < size

    def _next(self, way: int, length: int) -> Array:
        """The next `length` free rows of a halo, counted from the own rows outwards."""
        self.got[way] += length
        if way == UP:
            return self._at(self.start - self.got[UP], self.start - self.got[UP] + length)
        return self._at(self.stop + self.got[DOWN] - length, self.stop + self.got[DOWN])

    def _beyond(self) -> None:
        """Fill what lies beyond the ends of the array."""
        boundary = self.edge.boundary
        if boundary == "none":
            return
        first, last = self.start - self.got[UP], self.stop + self.got[DOWN]
        for way in (UP, DOWN):
            missing = self.want[way] - self.got[way]
            if not missing:
                continue
            place = self._next(way, missing)
            if boundary == "value":
                place[...] = self.value
                continue
            depth = 1 if boundary == "nearest" else missing
            if last - first < depth:
                raise ValueError(
                    f"halo_exchange: boundary {boundary!r} along dim {self.edge.dim} needs {depth} rows at the end of "
                    f"the array, there are {last - first}; use a smaller depth or a value as boundary"
                )
            rows = self._at(first, first + depth) if way == UP else self._at(last - depth, last)
            place[...] = np.flip(rows, self.edge.dim)


def _empty(edge: _Edge) -> ValueError:
    return ValueError(
        f"halo_exchange: boundary 'periodic' along dim {edge.dim} of size 0 has no rows to wrap; use a value as boundary"
    )


def _per_dim(what: str, value: Any, ndim: int, default: Any, dims: Sequence[int]) -> list[Any]:
    """One entry per tensor dim, from a mapping, a sequence (padded with `default`), or a single value for all `dims`."""
    entries = [default] * ndim
    if isinstance(value, Mapping):
        given = {operator.index(dim): entry for dim, entry in value.items()}
    elif isinstance(value, (tuple, list)):
        given = dict(enumerate(value))
    else:
        given = dict.fromkeys(dims, value)
    for dim, entry in given.items():
        if not -ndim <= dim < ndim:
            raise ValueError(f"halo_exchange: {what} has an entry for dim {dim} of an array of {ndim} dims: {value!r}")
        entries[dim] = entry
    return entries


def _edges(*arguments: Any) -> Edges:
    """Mesh dims, edge and value beyond the ends of each tensor dim, for `halo_settings`; in a loop they are worked out once."""
    key = _exact(arguments)
    found = _KNOWN.get(key)
    if found is None:
        names, depths, beyond = zip(*halo_settings(*arguments), strict=True) if arguments[0] else ((), (), ())
        found = names, tuple(map(_make_edge, count(), depths, beyond)), beyond
        if key is not None:
            if len(_KNOWN) >= MOST_KNOWN:
                _KNOWN.clear()
            _KNOWN[key] = found
    return found


def _exact(value: Any) -> Any:
    """A key that tells 1 from 1.0 and True, and 0.0 from -0.0; None for what is more than containers of numbers and names."""
    kind = type(value)
    if kind is dict:
        value = tuple(value.items())
    elif kind not in (tuple, list):
        return (kind, repr(value)) if kind in (int, float, complex, bool, str, NoneType) else None
    keys = tuple(map(_exact, value))
    return None if None in keys else (kind, keys)


def _make_edge(dim: int, depth: Any, boundary: Any) -> _Edge:
    """The edge of one tensor dim as the caller gave it: a depth or a pair, and a boundary."""
    low, high = (operator.index(d) for d in (depth if isinstance(depth, (tuple, list)) else (depth, depth)))
    if low < 0 or high < 0:
        raise ValueError(f"halo_exchange: depth {depth!r} along dim {dim} is negative")
    if isinstance(boundary, str) and boundary not in BOUNDARIES:
        raise ValueError(f"halo_exchange: unknown boundary {boundary!r}; give a value or one of {', '.join(BOUNDARIES)}")
    return _edge(dim, low, high, boundary if isinstance(boundary, str) else "value")


_edge = lru_cache(MOST_KNOWN)(_Edge)  # told apart by identity, as a key of what is worked out for it
