"""The collectives, over a group of ranks that can send and receive arrays.

Everything is built of one pattern: send what others need, receive what I need, settle. Ranks are *indices* of the group
here, in the order of their coordinates. Reductions fold the terms in that order on whoever needs the result, so the
bits do not depend on who comes first.

::

    all_reduce, small      everybody sends its term to everybody, each folds all of them
    all_reduce, large      index i folds part i (reduce-scatter), then everybody sends its part (all-gather)
    all_reduce, many ranks terms travel in log2(size) rounds, doubling each time, then as small

Large terms are folded piece by piece, straight into the result: a piece that was loaded is folded while it is in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any

import numpy as np

from daskmesh.layout import split_sizes
from daskmesh.parcels import Group, Mismatch
from daskmesh.placement import reduction
from daskmesh.recycling import empty

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "along",
    "barrier",
    "broadcast",
    "permute",
    "reduce_scatter",
    "resized",
    "scan",
    "single",
    "written",
]

Array = Any

#: All terms to everybody up to this many bytes per rank; above, each rank folds a part.
WHOLE_BYTES = 2**16
#: Bytes of each term that are folded at once.
PIECE_BYTES = 2**20
#: Up to this many ranks a message to each is cheaper than rounds.
FEW_RANKS = 8


@lru_cache(4096)
def written(name: str, label: str, dtype: np.dtype[Any] | None, shape: tuple[Any, ...], options: str = "") -> str:
    """Write a call out, as peers compare it and messages quote it."""
    what = f"{dtype} ({', '.join(map(str, shape))}{',' * (len(shape) == 1)}), " if dtype is not None else ""
    return f"{name}({what}{label}{options})"


def _free(shape: tuple[int, ...], dim: int) -> tuple[int | str, ...]:
    """A shape in which one dim may differ from rank to rank."""
    return (*shape[:dim], "*", *shape[dim + 1 :])


def _others(group: Group) -> Iterator[int]:
    """The other indices, each rank beginning after itself, so that not all load from the same one."""
    return ((group.index + step) % group.size for step in range(1, group.size))


def _cuts(n: int, parts: int) -> list[slice]:
    ends = np.cumsum((0, *split_sizes(n, parts))).tolist()
    return [slice(start, stop) for start, stop in pairwise(ends)]


def along(dim: int, cut: slice) -> tuple[slice, ...]:
    """The index that takes `cut` of one dim and all of those before and after it."""
    return (*(slice(None),) * dim, cut)


def _fold(op: str, terms: Iterable[Array], size: int) -> Array:
    return reduction(op).fold(terms, size)


def _terms(group: Group, mine: Array, call: str) -> Iterator[Array]:
    """The terms of all indices in order, one at a time; what the fold may overwrite is fresh."""
    for index in range(group.size):
        yield mine.copy() if index == group.index else group.receive(index, call).take()


def _fold_into(out: Array, group: Group, mine: Array, op: str, call: str) -> None:
    """Fold the terms of all indices in order, each of the shape of `out`, a piece at a time."""
    parcels = [None if index == group.index else group.receive(index, call) for index in range(group.size)]
    rows = max(1, PIECE_BYTES // max(1, out[:1].nbytes))
    loaded = empty((min(rows, len(out)), *out.shape[1:]), out.dtype)
    for start in range(0, len(out), rows):
        piece = slice(start, min(start + rows, len(out)))
        place, spare = out[piece], loaded[: len(out[piece])]

        def terms(piece: slice = piece, place: Array = place, spare: Array = spare) -> Iterator[Array]:
            for index, parcel in enumerate(parcels):
                if parcel is None:
                    if not index:
                        place[...] = mine[piece]
                    yield mine[piece] if index else place
                else:
                    parcel.into(spare if index else place, (piece,))
                    yield spare if index else place

        folded = _fold(op, terms(), group.size)
        if folded is not place:
            place[...] = folded


def all_reduce(group: Group, x: Array, op: str) -> Array:
    """Reduce `x` over the group; everybody gets the result."""
    call = written("all_reduce", group.label, x.dtype, x.shape, f", op={op!r}")
    flat = x.reshape(-1)
    if group.size > FEW_RANKS and x.nbytes <= WHOLE_BYTES:
        out = _fold(op, _doubled(group, flat, call), group.size)
    elif x.nbytes * (group.size - 1) <= WHOLE_BYTES or x.size < group.size:
        for other in _others(group):
            group.send(other, call, flat)
        out = _fold(op, _terms(group, flat, call), group.size)
        group.settle()
    else:
        out = _all_reduce_by_parts(group, flat, op, call)
    return out.reshape(x.shape)


def _all_reduce_by_parts(group: Group, flat: Array, op: str, call: str) -> Array:
    cuts = _cuts(flat.size, group.size)
    for other in _others(group):
        group.send(other, call, flat[cuts[other]])
    out = empty(flat.shape, flat.dtype)
    mine = cuts[group.index]
    part = out[mine]
    _fold_into(part, group, flat[mine], op, call)
    for other in _others(group):
        group.send(other, call, part)
    for other in _others(group):
        group.receive(other, call).into(out[cuts[other]])
    group.settle()
    return out


def _doubled(group: Group, flat: Array, call: str) -> list[Array]:
    """All terms, in rounds: after each one every rank holds twice as many, its own and those of the indices after it."""
    held = flat.reshape(1, -1)
    while len(held) < group.size:
        step = len(held)
        group.send((group.index - step) % group.size, call, held[: group.size - step])
        held = np.concatenate([held, group.receive((group.index + step) % group.size, call).take()])
    group.settle()
    return list(np.roll(held, group.index, axis=0))


def barrier(group: Group) -> None:
    """Wait until every rank of the group is here."""
    call = written("barrier", group.label, None, ())
    step = 1
    while step < group.size:
        group.send((group.index - step) % group.size, call, _NOTHING)
        group.receive((group.index + step) % group.size, call)
        step *= 2


def scan(group: Group, x: Array, op: str) -> Array:
    """Reduce the `x` of this index and all before it."""
    call = written("scan", group.label, x.dtype, x.shape, f", op={op!r}")
    flat = x.reshape(-1)
    for later in range(group.index + 1, group.size):
        group.send(later, call, flat)
    earlier = (group.receive(index, call).take() for index in range(group.index))
    out = _fold(op, chain(earlier, (flat.copy(),)), group.index + 1)
    group.settle()
    return out.reshape(x.shape)


def all_gather(group: Group, x: Array, dim: int, tiled: bool) -> Array:
    """Concatenate (`tiled`) or stack the `x` of all ranks along `dim`."""
    shape = _free(x.shape, dim) if tiled else x.shape
    call = written("all_gather", group.label, x.dtype, shape, f", dim={dim}, tiled={tiled}")
    for other in _others(group):
        group.send(other, call, x)
    return _joined(group, x, call, dim, tiled)


def _joined(group: Group, mine: Array, call: str, dim: int, tiled: bool = True) -> Array:
    """Receive a piece of every rank and write them one after another along `dim`, in order."""
    parcels = {other: group.receive(other, call) for other in _others(group)}
    pieces = [mine if index == group.index else parcels[index] for index in range(group.size)]
    ends = np.cumsum([0] + [piece.shape[dim] if tiled else 1 for piece in pieces]).tolist()
    rest = mine.shape[dim + 1 :] if tiled else mine.shape[dim:]
    out = empty((*mine.shape[:dim], ends[-1], *rest), mine.dtype)
    for index in range(group.size):
        place = out[along(dim, slice(ends[index], ends[index + 1]))]
        if not tiled:
            place = place.squeeze(dim)
        if index == group.index:
            place[...] = mine
        else:
            parcels[index].into(place)
    group.settle()
    return out


def reduce_scatter(group: Group, x: Array, op: str, dim: int) -> Array:
    """Reduce `x` over the group; index i gets part i of the result, cut along `dim`."""
    call = written("reduce_scatter", group.label, x.dtype, x.shape, f", op={op!r}, dim={dim}")
    cuts = _cuts(x.shape[dim], group.size)
    for other in _others(group):
        group.send(other, call, x[along(dim, cuts[other])])
    mine = x[along(dim, cuts[group.index])]
    out = empty(mine.shape, mine.dtype)
    _fold_into(out, group, mine, op, call)
    group.settle()
    return out


def all_to_all(group: Group, x: Array, split_dim: int, concat_dim: int) -> Array:
    """Cut `x` along `split_dim`, part i to index i; concatenate what comes along `concat_dim`."""
    shape = _free(x.shape, concat_dim)
    call = written("all_to_all", group.label, x.dtype, shape, f", split_dim={split_dim}, concat_dim={concat_dim}")
    cuts = _cuts(x.shape[split_dim], group.size)
    for other in _others(group):
        group.send(other, call, x[along(split_dim, cuts[other])])
    return _joined(group, x[along(split_dim, cuts[group.index])], call, concat_dim)


def broadcast(group: Group, x: Array | None, root: int) -> Array:
    """Everybody gets the `x` of the index `root`; the others give one of the same shape and dtype, or None."""
    call = written("broadcast", group.label, None, (), f", root={root}")
    if group.index == root and x is not None:
        for other in _others(group):
            group.send(other, call, x)
        group.settle()
        return x.copy()
    parcel = group.receive(root, call)
    if x is not None and (parcel.shape, parcel.dtype) != (x.shape, x.dtype):
        raise Mismatch(
            f"{call}: rank {group.ranks[root]} sends {parcel.dtype} {parcel.shape}, but rank {group.ranks[group.index]} "
            f"gave {x.dtype} {x.shape}; give the same on all ranks, or None where the value does not matter"
        )
    out = parcel.take()
    group.settle()
    return out


def permute(group: Group, x: Array, pairs: Sequence[tuple[int, int]], name: str, options: str) -> Array:
    """Send `x` along the pair that begins here; get what the pair that ends here brings, or zeros.

    Sizes may differ from rank to rank: what is received has the shape it was sent with.
    """
    call = written(name, group.label, x.dtype, ("*",) * x.ndim, options)
    targets = dict(pairs)
    sources = {target: source for source, target in pairs}
    me = group.index
    source = sources.get(me)
    if me in targets and targets[me] != me:
        group.send(targets[me], call, x)
    if source is None:
        out = np.zeros_like(x)
    elif source == me:
        out = x.copy()
    else:
        out = group.receive(source, call).take()
    group.settle()
    return out


_NOTHING = np.empty(0)


def single(array: Array, op: str) -> Array:
    """The reduction of a single term."""
    return reduction(op).fold((array.reshape(-1).copy(),), 1).reshape(array.shape)


def resized(array: Array, dim: int, size: int) -> tuple[int, ...]:
    """The shape of an array with another size of one dim."""
    return (*array.shape[:dim], size, *array.shape[dim + 1 :])
