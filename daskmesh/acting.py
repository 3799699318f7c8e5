"""One call, two modes: inside a region an operation is done at once, on the client it is recorded for the PEs to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import dask
import numpy as np
from dask._task_spec import TaskRef

from daskmesh.dtensor import DTensor
from daskmesh.gang import CURRENT_GANG, Gang, current_gang
from daskmesh.graph import block_key
from daskmesh.layout import Layout, make_layout
from daskmesh.mesh import CURRENT_RANK, ProcessMesh
from daskmesh.placement import Shard
from daskmesh.recorded import Token, act, act_block, act_on_local, fresh_name, recorded, source, tokens_of
from daskmesh.shmem import ShmemSignal, ShmemTensor
from daskmesh.shmem_ops import Done
from daskmesh.windows import one_pe, per_rank

__all__ = ["Acting", "answers", "array_of", "done", "region", "remember", "settle", "tokened", "tokened_local"]

Handle = ShmemTensor | ShmemSignal


def region(call: str) -> Gang | None:
    """The region that is running, for an operation on symmetric tensors; None on the client.

    Raises
    ------
    RuntimeError
        On a rank, but not in a region; or in one whose ranks were not seen to use symmetric tensors when shapes were inferred.
    """
    if CURRENT_GANG.get() is None:
        if CURRENT_RANK.get() is not None:
            raise RuntimeError(f"{call}: works on the client, or inside a function given to local_map")
        return None
    gang = current_gang(call)
    if gang.trace is not None:
        gang.communicates, gang.on_lost = True, _inferring
    elif gang.apart:
        raise RuntimeError(
            f"{call}: rank {gang.rank} uses a symmetric tensor, but those on which shapes were inferred did not; make the call "
            "on every rank, with by= for the PEs that shall act, or pass out_shapes= to local_map"
        )
    return gang


def _inferring(error: Exception) -> NoReturn:
    raise error


class Acting:
    """Who carries out an operation: the ranks of a handle, or those of its PEs that `by` names."""

    def __init__(self, call: str, handle: Handle, by: Any) -> None:
        self.call = call
        self.handle = handle
        if by is None:
            self.pes = list(range(handle.n_pes))
        elif isinstance(by, (Sequence, np.ndarray)) and not isinstance(by, (str, bytes)):
            self.pes = [one_pe(call, f"by[{i}]", pe, handle.n_pes) for i, pe in enumerate(by)]
        else:
            self.pes = [one_pe(call, "by", by, handle.n_pes)]
        if not self.pes:
            raise ValueError(f"{call}: by={by!r} names nobody; give the PEs that are to act, or leave it out for all")
        self.one = by is not None and not isinstance(by, (Sequence, np.ndarray))
        self.ranks = [handle.mesh.process_ids[pe] for pe in self.pes]

    def includes(self, rank: int) -> bool:
        """Whether a rank takes part."""
        return rank in self.ranks

    def of(self, what: str, value: Any, gang: Gang | None) -> int | list[int]:
        """An argument that is a PE for all or one for each rank: this rank's own inside a region, else one per rank that acts."""
        found = per_rank(self.call, what, value, self.handle.mesh.process_ids, self.handle.n_pes)
        if gang is None:
            return found if isinstance(found, int) else [found[pe] for pe in self.pes]
        if isinstance(found, int):
            return found
        return found[self.handle.pe_of(gang.rank, self.call)]

    def each(self, value: int | list[int]) -> list[int]:
        """One PE per rank that acts."""
        return [value] * len(self.pes) if isinstance(value, int) else value

    @property
    def mesh(self) -> ProcessMesh:
        """The mesh of those that act."""
        if self.pes == list(range(self.handle.n_pes)):
            return self.handle.mesh
        if len(set(self.pes)) < len(self.pes):
            raise ValueError(f"{self.call}: by={self.pes} names a PE twice, each can give its value once; name every PE once")
        return ProcessMesh(self.ranks, self.handle.mesh.dim_names[:1])


def done(handle: Handle, pe: int = -1) -> Done:
    """The token of an operation in which this rank has no part, or of one while shapes are inferred."""
    return Done(handle.id, pe, None)


def tokened(acting: Acting, method: str, args: Callable[[int], tuple[Any, ...]], pred: Any, *, changes: bool = True) -> Token:
    """Record an operation of the ranks that act; `args` gives the arguments of the i-th of them."""
    handle = acting.handle
    name = fresh_name(acting.call.replace("_", "-"))
    jobs = [((name, i), rank, act, (method, *args(i))) for i, rank in enumerate(acting.ranks)]
    token = recorded(name, handle.world, jobs, tokens_of(acting.call, pred))
    if changes:
        remember(handle, token, pred)
    return token


Args = Callable[[int], tuple[Any, ...]]


def tokened_local(acting: Acting, method: str, x: DTensor, before: Args, after: Args, pred: Any) -> Token:
    """The same for an operation that takes each rank's local array of a DTensor, between other arguments."""
    handle, node = acting.handle, x._node.as_boundary()
    layout = node.layout
    name = fresh_name(acting.call.replace("_", "-"))
    jobs = []
    for i, rank in enumerate(acting.ranks):
        block = TaskRef(block_key(node, layout.mesh.coordinate(rank)))
        jobs.append(((name, i), rank, act_on_local, (layout, method, block, before(i), *after(i))))
    token = recorded(name, handle.world, jobs, tokens_of(acting.call, pred), [x])
    remember(handle, token, pred)
    return token


def remember(handle: Handle, token: Token, pred: Any) -> None:
    """Keep a token for `sync`, in place of those that come before it."""
    before = pred if isinstance(pred, (list, tuple)) else [pred]
    handle.pending = [old for old in handle.pending if not any(old is one for one in before)] + [token]


def array_of(
    acting: Acting, layout: Layout, method: str, args: Callable[[int], tuple[Any, ...]], pred: Any, *, changes: bool = False
) -> DTensor:
    """Record an operation whose answers are the blocks of an array."""
    handle = acting.handle
    name = fresh_name(acting.call.replace("_", "-"))
    jobs = [
        ((name, *layout.block_index(coord)), layout.mesh.rank_at(coord), act_block, (layout, coord, method, *args(i)))
        for i, coord in enumerate(layout.coords())
    ]
    token = recorded(name, handle.world, jobs, tokens_of(acting.call, pred))
    if changes:
        remember(handle, token, pred)
    return DTensor(source(layout, handle.world, name, token))


def answers(
    acting: Acting, dtype: Any, method: str, args: Callable[[int], tuple[Any, ...]], pred: Any, *, changes: bool
) -> DTensor:
    """Record an operation with one number as answer: an array of one for each rank that acts, 0-d if `by` is one PE."""
    mesh = acting.mesh
    if acting.one:
        layout = make_layout(mesh, (), (), dtype)
    else:
        n = len(acting.pes)
        cut = make_layout(mesh, [Shard(0)] * mesh.ndim, (n,), dtype)
        layout = cut.replace(chunks=((1,) * n,))
    return array_of(acting, layout, method, args, pred, changes=changes)


def settle(handle: Handle) -> None:
    """Compute what was recorded for a handle and is not known to have happened."""
    todo, handle.pending = handle.pending, []
    if todo:
        dask.compute(*todo, scheduler=handle.client())
