"""What a rank's task of a region does: the function is called on this rank's local arrays, its outputs are looked at.

A task returns the only output, or a tuple of all, or, where ranks talk to each other, tickets for them (see `regions`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import dask.array as da
import numpy as np
from dask.base import is_dask_collection, tokenize
from distributed import get_worker

from daskmesh.exchange import reschedule
from daskmesh.gang import Gang, gang_context
from daskmesh.graph import block_of, local_of
from daskmesh.joining import taking_part
from daskmesh.layout import Coord, Layout, make_layout, normalise_placements
from daskmesh.mesh import ProcessMesh
from daskmesh.placement import Replicate
from daskmesh.store import Ticket, TicketLost, expose_all, local_array, same_process
from daskmesh.transport import load
from daskmesh.trees import Entry, Tree, alike, build, count, entries_for, flatten

__all__ = [
    "Call",
    "Declared",
    "Input",
    "argument",
    "gate_name",
    "is_array",
    "one_per_rank",
    "pass_gate",
    "pick",
    "run_ganged",
    "run_region",
    "run_several",
    "run_single",
]

Array = Any


@dataclass(frozen=True)
class Input:
    """The place of a local array among the arguments of a call."""

    index: int


@dataclass(frozen=True)
class Declared:
    """What the caller says about the outputs: an entry for each array, in containers or flat."""

    entries: tuple[Entry, ...]
    tree: Tree

    def read(self, title: str, value: Any, *, tracing: bool = False) -> tuple[Tree, list[Any], list[Entry]]:
        """The containers of what a function returned, its leaves (numbers under placements made arrays), and their entries.

        Raises
        ------
        ValueError
            There are more or fewer outputs than entries.
        TypeError
            Something that is no array under placements, or a Dask collection.
        """
        leaves, tree = flatten(value)
        entries = entries_for(self.entries, self.tree, tree)
        if entries is None:
            raise ValueError(
                f"{title}: out_placements has {len(self.entries)} entries, the function returned {count(tree)} outputs "
                f"{tree}; give one entry per output, None for one that is no array"
            )
        for i, (leaf, entry) in enumerate(zip(leaves, entries, strict=True)):
            if is_array(leaf, tracing=tracing):
                leaves[i] = np.asarray(leaf) if isinstance(leaf, np.generic) else leaf
            elif is_dask_collection(leaf):
                raise TypeError(
                    f"{title}: output {i} is a {type(leaf).__name__}; the function works on local arrays and returns local arrays"
                )
            elif entry is not None:
                if not isinstance(leaf, (bool, int, float, complex)):
                    raise TypeError(
                        f"{title}: output {i} is {leaf!r} of type {type(leaf).__name__}, which cannot be placed as "
                        f"{_shown(entry)}; give it None in out_placements"
                    )
                leaves[i] = np.asarray(leaf)
        return tree, leaves, entries


def _shown(entry: Entry) -> str:
    return repr(list(entry)) if isinstance(entry, tuple) else repr(entry)


def is_array(leaf: Any, *, tracing: bool = False) -> bool:
    """Whether a value is an array of some kind, a NumPy scalar included; Dask's own arrays count only while tracing."""
    if is_dask_collection(leaf):
        return tracing and isinstance(leaf, da.Array)
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


@dataclass(frozen=True)
class Call:
    """What every rank of a region does.

    Attributes
    ----------
    title : str
        How messages call it: ``local_map(f)``.
    leaves : tuple
        Flat arguments: constants, and `Input` where a local array goes. `tree` holds the containers of (args, kwargs).
    layouts : tuple of Layout
        Of the inputs.
    out_tree, outs : Tree and tuple, optional
        The outputs' containers and layouts, None for an output that is no array; both None if the run shall tell.
    how : str
        Who says so, for messages.
    communicates : bool, optional
        Whether the ranks talk to each other; None if nobody knows.
    """

    title: str
    func: Callable[..., Any]
    mesh: ProcessMesh
    leaves: tuple[Any, ...]
    tree: Tree
    layouts: tuple[Layout, ...]
    declared: Declared
    out_tree: Tree | None = None
    outs: tuple[Layout | None, ...] | None = None
    how: str = ""
    communicates: bool | None = None
    writeable: bool = False
    check_replicas: bool = False


def gate_name(run: str) -> str:
    """Name of the gate behind the run tasks of a name."""
    return "gate-" + run.removeprefix("run-")


def one_per_rank(mesh: ProcessMesh) -> Layout:
    """The layout in which a block's index is its rank's coordinate."""
    return make_layout(mesh, (), (), object)


def run_region(
    call: Call, name: str, coord: Coord, blocks: Sequence[Array], gate: Any = None
) -> tuple[Tree, list[Any], list[Entry]]:
    """Call the function of the region `name` as the rank at `coord`; its outputs, held to what is known of them.

    Whatever it raises says on which rank it was raised, and ends the region on all ranks if they wait for each other; `gate`
    is the key of the task that depends on all of them.
    """
    rank = call.mesh.rank_at(coord)
    part = _apart(call, rank) if call.communicates is False else taking_part(name, call.mesh, rank, gate, call.title)
    with part:
        if call.communicates:
            _need_worker(call.title)
        args, kwargs = bound(call, blocks)
        del blocks
        value = call.func(*args, **kwargs)
        del args, kwargs
        tree, leaves, entries = call.declared.read(call.title, value)
        if call.out_tree is not None and call.outs is not None:
            if not alike(tree, call.out_tree):
                raise ValueError(f"{call.title}: it returned {tree}, not {call.out_tree} as {call.how}")
            _hold(call, call.outs, leaves, rank, coord)
        return tree, [compact(leaf) if is_array(leaf) else leaf for leaf in leaves], entries


@contextmanager
def _apart(call: Call, rank: int) -> Iterator[Gang]:
    """The part of a rank that needs no other: nobody is told that it runs."""

    def join() -> NoReturn:
        raise RuntimeError(
            f"{call.title}: rank {rank} wants to communicate, but those on which shapes were inferred did not; if one rank of a "
            "region uses a collective, all must"
        )

    try:
        with gang_context(Gang(call.mesh, rank, join, apart=True)) as gang:
            yield gang
    except Exception as error:
        error.add_note(f"rank {rank} at coordinate {call.mesh.coordinate(rank)} of {call.mesh!r}, running {call.title}")
        raise


def _need_worker(title: str) -> None:
    try:
        get_worker()
    except ValueError:
        raise RuntimeError(
            f"{title}: its ranks communicate, which needs a cluster; compute with a distributed Client "
            "(daskmesh.init_parallel_env() makes one), not with Dask's threaded or synchronous scheduler"
        ) from None


def bound(call: Call, blocks: Sequence[Array]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of one rank's call, from its blocks."""
    locals_ = [local_of(b, lay) for b, lay in zip(blocks, call.layouts, strict=True)]
    leaves = [argument(locals_[v.index] if isinstance(v, Input) else v, writeable=call.writeable) for v in call.leaves]
    args, kwargs = build(call.tree, leaves)
    return args, kwargs


def argument(value: Any, *, writeable: bool) -> Any:
    """What a function may hold of an array: a view that cannot be written to, or a copy. Other values as they are.

    Blocks are shared: by the tasks that read them and, in a cluster inside one process, by all ranks.
    """
    if isinstance(value, np.generic) or not is_array(value):
        return value
    if writeable:
        return value.copy()
    if isinstance(value, np.ndarray):
        value = value.view()
        value.setflags(write=False)
    return value


def _hold(call: Call, outs: Sequence[Layout | None], leaves: Sequence[Any], rank: int, coord: Coord) -> None:
    for i, (layout, leaf) in enumerate(zip(outs, leaves, strict=True)):
        if layout is None:
            continue
        want = layout.local_shape(coord)
        if not is_array(leaf):
            raise ValueError(f"{call.title}: output {i} of rank {rank} is {leaf!r}, not an array of shape {want} as {call.how}")
        if leaf.shape != want or leaf.dtype != layout.dtype:
            raise ValueError(
                f"{call.title}: output {i} of rank {rank} at coordinate {coord} has shape {leaf.shape} and dtype {leaf.dtype}, "
                f"not {want} and {layout.dtype} as {call.how}"
            )


def compact(array: Array) -> Array:
    """A copy of an array that is a small part of a large one, so that the large one need not be kept; else the array itself."""
    if not isinstance(array, np.ndarray) or array.base is None:
        return array
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return array.copy() if owner.nbytes > 2 * array.nbytes else array


def run_single(call: Call, name: str, coord: Coord, *blocks: Array) -> Any:
    """The only output of one rank, as its block."""
    _, (leaf,), _ = run_region(call, name, coord, blocks)
    layout = call.outs[0] if call.outs else None
    return leaf if layout is None else block_of(leaf, layout, coord)


def run_several(call: Call, name: str, coord: Coord, *blocks: Array) -> tuple[Any, ...]:
    """All outputs of one rank."""
    return tuple(run_region(call, name, coord, blocks)[1])


def run_ganged(call: Call, name: str, coord: Coord, *blocks: Array) -> tuple[Any, ...]:
    """All outputs of one rank, the arrays exposed: tickets and values, containers, entries, and digests of replicas."""
    tree, leaves, entries = run_region(call, name, coord, blocks, (gate_name(name),))
    at = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
    digests = [_digest(leaves[i]) if call.check_replicas and i in at else None for i in range(len(leaves))]
    for i, ticket in zip(at, expose_all([leaves[i] for i in at]), strict=True):
        leaves[i] = ticket
    return tuple(leaves), tree, entries, digests


def pass_gate(call: Call, *parts: tuple[Any, ...]) -> None:
    """Reached when every rank has run; compares the digests of replicas.

    Raises
    ------
    ValueError
        Two ranks hold different values of an output that is declared to be the same on both.
    """
    if not call.check_replicas:
        return
    for i, entry in enumerate(parts[0][2]):
        placed = normalise_placements(entry or (), call.mesh, None)
        seen: dict[Coord, tuple[str, int]] = {}
        for coord, rank, part in zip(one_per_rank(call.mesh).coords(), call.mesh.process_ids, parts, strict=True):
            digest = part[3][i]
            at = tuple(0 if isinstance(p, Replicate) else c for p, c in zip(placed, coord, strict=True))
            known, other = seen.setdefault(at, (digest, rank))
            if known != digest:
                raise ValueError(
                    f"{call.title}: output {i} is declared {list(placed)}, but ranks {other} and {rank}, which hold replicas "
                    f"of it, returned different values; declare it Partial or Shard, or make it the same with a collective"
                )


def _digest(array: Array) -> str:
    if not isinstance(array, np.ndarray) or array.dtype.hasobject:
        return str(tokenize(array))
    digest = hashlib.blake2b(repr((array.dtype, array.shape)).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def pick(layout: Layout | None, index: int, run: Any, coord: Coord, part: Any, *gate: None) -> Any:
    """One output of one rank, from what its run task, of the key `run`, returned."""
    leaf = part[0][index] if gate else part[index]
    if isinstance(leaf, Ticket):
        try:
            leaf = _redeemed(leaf)
        except TicketLost:
            reschedule({run: leaf})
    return leaf if layout is None else block_of(leaf, layout, coord)


def _redeemed(ticket: Ticket) -> Array:
    # Elsewhere only if the rank has moved since: then the array comes from where it was made.
    return local_array(ticket) if same_process(ticket) else load(ticket)
