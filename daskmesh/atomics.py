"""Atomics on single elements of symmetric tensors, and who is which PE; in two modes, as in `onesided`."""

from __future__ import annotations

from typing import Any

import numpy as np
from distributed import get_worker
from distributed.utils import sync

from daskmesh.acting import Acting, answers, done, region, tokened
from daskmesh.gang import CURRENT_GANG
from daskmesh.mesh import CURRENT_RANK, ProcessMesh
from daskmesh.region import get_rank
from daskmesh.shmem import ShmemSignal, ShmemTensor
from daskmesh.shmem_ops import actor_of
from daskmesh.tasks import CURRENT_WORLD
from daskmesh.windows import PerRank, integers, tensor_of
from daskmesh.world import world_for

__all__ = [
    "my_pe",
    "n_pes",
    "shmem_atomic_add",
    "shmem_atomic_compare_swap",
    "shmem_atomic_fetch",
    "shmem_atomic_fetch_add",
    "shmem_atomic_set",
    "shmem_atomic_swap",
]

Group = str | ProcessMesh | ShmemTensor | ShmemSignal | None


def shmem_atomic_fetch(src: ShmemTensor, index: Any, src_pe: PerRank, *, by: Any = None, pred: Any = None) -> Any:
    """One element of a PE's buffer.

    Parameters
    ----------
    src : ShmemTensor
    index : int or sequence of int
        Of the element, one int for each dim.
    src_pe, by, pred
        As for `shmem_put`.

    Returns
    -------
    scalar or DTensor
        A NumPy scalar; on the client an array with one for each PE that acts, 0-d if `by` is one PE.

    Notes
    -----
    **Communication**: one message to the PE and one back.

    Examples
    --------
    >>> import daskmesh as dm
    >>> with dm.create_shmem_tensor("tp", 2, "i4", [3]) as t:
    ...     dm.shmem_atomic_fetch(t, 1, 0).compute()
    array([0, 0], dtype=int32)
    """
    return _atomic("shmem_atomic_fetch", src, index, (), src_pe, (by, pred))


def shmem_atomic_set(dst: ShmemTensor, index: Any, value: Any, dst_pe: PerRank, *, by: Any = None, pred: Any = None) -> Any:
    """Set one element of a PE's buffer.

    Parameters
    ----------
    dst, index, dst_pe, by, pred
        As for `shmem_atomic_fetch`.
    value : scalar
        Of the tensor's dtype, or a Python number that it can hold.

    Returns
    -------
    Token

    Notes
    -----
    **Communication**: one message to the PE and one back.

    Examples
    --------
    >>> import daskmesh as dm
    >>> with dm.create_shmem_tensor("tp", 2, "i4", [3]) as t:
    ...     put = dm.shmem_atomic_set(t, 1, 5, 0)
    ...     dm.shmem_atomic_fetch(t, 1, 0, by=1, pred=put).item()
    5
    """
    return _atomic("shmem_atomic_set", dst, index, (value,), dst_pe, (by, pred))


def shmem_atomic_add(dst: ShmemTensor, index: Any, value: Any, dst_pe: PerRank, *, by: Any = None, pred: Any = None) -> Any:
    """Add to one element of a PE's buffer.

    Parameters
    ----------
    dst, index, value, dst_pe, by, pred
        As for `shmem_atomic_set`.

    Returns
    -------
    Token

    Notes
    -----
    **Communication**: one message to the PE and one back.

    Examples
    --------
    >>> import daskmesh as dm
    >>> with dm.create_shmem_tensor("tp", 2, "i4", [3]) as t:
    ...     added = dm.shmem_atomic_add(t, 1, 5, 0)
    ...     dm.shmem_atomic_fetch(t, 1, 0, by=1, pred=added).item()
    10
    """
    return _atomic("shmem_atomic_add", dst, index, (value,), dst_pe, (by, pred))


def shmem_atomic_fetch_add(
    dst: ShmemTensor, index: Any, value: Any, dst_pe: PerRank, *, by: Any = None, pred: Any = None
) -> Any:
    """Add to one element of a PE's buffer; what it was before.

    Parameters
    ----------
    dst, index, value, dst_pe, by, pred
        As for `shmem_atomic_set`.

    Returns
    -------
    scalar or DTensor
        As `shmem_atomic_fetch`.

    Notes
    -----
    **Communication**: one message to the PE and one back.

    Examples
    --------
    >>> import daskmesh as dm
    >>> with dm.create_shmem_tensor("tp", 2, "i4", [3]) as t:
    ...     sorted(dm.shmem_atomic_fetch_add(t, 1, 5, 0).tolist())
    [0, 5]
    """
    return _atomic("shmem_atomic_fetch_add", dst, index, (value,), dst_pe, (by, pred))


def shmem_atomic_swap(dst: ShmemTensor, index: Any, value: Any, dst_pe: PerRank, *, by: Any = None, pred: Any = None) -> Any:
    """Set one element of a PE's buffer; what it was before.

    Parameters
    ----------
    dst, index, value, dst_pe, by, pred
        As for `shmem_atomic_set`.

    Returns
    -------
    scalar or DTensor
        As `shmem_atomic_fetch`.

    Notes
    -----
    **Communication**: one message to the PE and one back.

    Examples
    --------
    >>> import daskmesh as dm
    >>> with dm.create_shmem_tensor("tp", 2, "i4", [3]) as t:
    ...     sorted(dm.shmem_atomic_swap(t, 1, 5, 0).tolist())
    [0, 5]
    """
    return _atomic("shmem_atomic_swap", dst, index, (value,), dst_pe, (by, pred))


def shmem_atomic_compare_swap(
    dst: ShmemTensor, index: Any, cond: Any, value: Any, dst_pe: PerRank, *, by: Any = None, pred: Any = None
) -> Any:
    """Set one element of a PE's buffer if it equals `cond`; what it was before.

    Parameters
    ----------
    cond : scalar
        What the element is compared with.
    dst, index, value, dst_pe, by, pred
        As for `shmem_atomic_set`.

    Returns
    -------
    scalar or DTensor
        As `shmem_atomic_fetch`.

    Notes
    -----
    **Communication**: one message to the PE and one back.

    Examples
    --------
    >>> import daskmesh as dm
    >>> with dm.create_shmem_tensor("tp", 2, "i4", [3]) as t:
    ...     sorted(dm.shmem_atomic_compare_swap(t, 1, 0, 7, 0).tolist())
    [0, 7]
    """
    return _atomic("shmem_atomic_compare_swap", dst, index, (cond, value), dst_pe, (by, pred))


def _atomic(call: str, dst: ShmemTensor, index: Any, values: tuple[Any, ...], dst_pe: PerRank, who: tuple[Any, Any]) -> Any:
    by, pred = who
    name = call.removeprefix("shmem_atomic_")
    gang = region(call)
    tensor = tensor_of(call, "src" if name == "fetch" else "dst", dst)
    if tensor is not dst:
        raise TypeError(f"{call}: works on elements of a symmetric tensor, not of a view; give {tensor!r} and the index in it")
    acting = Acting(call, tensor, by)
    place = _index(call, index, tensor)
    operands = [_operand(call, value, tensor.dtype) for value in values]
    if "add" in name:
        _check_add(call, tensor)
    found = acting.of("src_pe" if name == "fetch" else "dst_pe", dst_pe, gang)
    silent = name in ("set", "add")
    if gang is None:
        pes = acting.each(found)
        if silent:
            return tokened(acting, "atomic", lambda i: (tensor, name, place, operands, pes[i]), pred)
        changes = name != "fetch"
        return answers(acting, tensor.dtype, "atomic", lambda i: (tensor, name, place, operands, pes[i]), pred, changes=changes)
    if gang.trace is not None:
        return done(tensor) if silent else gang.traced((), tensor.dtype)
    if not acting.includes(gang.rank):
        return done(tensor) if silent else None
    before = actor_of(gang, call).atomic(tensor, name, place, operands, acting.each(found)[0])
    return done(tensor) if silent else before


def _index(call: str, index: Any, tensor: ShmemTensor) -> tuple[int, ...]:
    given = (index,) if isinstance(index, (int, np.integer)) else index
    place = integers(call, "index", given, tensor.ndim, tensor)
    for d, (at, n) in enumerate(zip(place, tensor.shape, strict=True)):
        if not 0 <= at < n:
            raise ValueError(f"{call}: index {at} along dim {d} is outside its size {n}; wanted 0 <= index < {n}")
    return place


def _operand(call: str, value: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    if isinstance(value, (bool, int, float, complex, str, bytes)):
        try:
            return np.full((), value, dtype)
        except (TypeError, ValueError, OverflowError) as error:
            raise TypeError(f"{call}: {value!r} is no {dtype}: {error}") from None
    array = np.asarray(value)
    if array.dtype != dtype or array.size != 1:
        raise TypeError(f"{call}: expected one {dtype}, got {array.dtype} of shape {array.shape}; convert it with {dtype}")
    return array.reshape(())


def _check_add(call: str, tensor: ShmemTensor) -> None:
    try:
        np.add(np.zeros(1, tensor.dtype), np.zeros(1, tensor.dtype))
    except TypeError:
        raise TypeError(f"{call}: adding is not defined for {tensor.dtype}") from None


# -- who am I -----------------------------------------------------------------------------------------------------------


def my_pe(group: Group = None) -> int:
    """Which PE this rank is.

    Parameters
    ----------
    group : str, ProcessMesh or handle, optional
        Of which group; by default of the mesh of the region that is running.

    Notes
    -----
    **Communication**: one message to the scheduler for a name, the first time.

    Raises
    ------
    RuntimeError
        On the client, which is no PE.
    ValueError
        This rank is none of the group.

    Examples
    --------
    >>> import daskmesh as dm
    >>> me = dm.local_map(lambda: dm.my_pe() * 10 + dm.n_pes(), [[dm.Shard(0)]], process_mesh=dm.init_mesh(2, ["x"]))
    >>> dm.my_pe()
    Traceback (most recent call last):
    ...
    RuntimeError: get_rank() has no answer on the client, which drives all ranks and is none of them; call it inside ...
    """
    rank = get_rank()
    ranks = _ranks("my_pe", group)
    if rank not in ranks:
        raise ValueError(f"my_pe: rank {rank} is no PE of {group!r}, whose ranks are {list(ranks)}")
    return ranks.index(rank)


def n_pes(group: Group = None) -> int:
    """How many PEs there are.

    Parameters
    ----------
    group : str, ProcessMesh or handle, optional
        Of which group; by default of the mesh of the region that is running.

    Notes
    -----
    **Communication**: one message to the scheduler for a name, the first time.

    Raises
    ------
    RuntimeError
        On the client without a group.
    ValueError
        No group of that name was used.

    Examples
    --------
    >>> import daskmesh as dm
    >>> with dm.create_shmem_signal("tp", 2) as ready:
    ...     dm.n_pes("tp"), dm.n_pes(ready), dm.n_pes(dm.init_mesh((2, 2), ("x", "y")))
    (2, 2, 4)
    """
    return len(_ranks("n_pes", group))


_SIZES: dict[tuple[str, str], int] = {}


def _ranks(call: str, group: Group) -> tuple[int, ...]:
    gang = CURRENT_GANG.get()
    if gang is not None and gang.trace is not None:
        region(call)  # what follows may differ from rank to rank
    if isinstance(group, ProcessMesh):
        return group.process_ids
    if isinstance(group, (ShmemTensor, ShmemSignal)):
        return group.mesh.process_ids
    if isinstance(group, str):
        return tuple(range(_size(call, group)))
    if group is not None:
        raise TypeError(f"{call}: group must be a name, a ProcessMesh or a handle, got {type(group).__name__}")
    if gang is None:
        raise RuntimeError(f"{call}(): no region is running, so say of which group: {call}('tp'), or {call}(mesh)")
    return gang.mesh.process_ids


def _size(call: str, name: str) -> int:
    world = CURRENT_WORLD.get()
    client = None
    if world is None or CURRENT_RANK.get() is None:
        here = world_for(ProcessMesh([0]))
        world, client = here.id, here.client
    if (world, name) not in _SIZES:
        if client is not None:
            scheduler: Any = client.scheduler
            known = client.sync(scheduler.daskmesh_symmetric_group, world=world, name=name)
        else:
            worker: Any = get_worker()
            known = sync(worker.loop, worker.scheduler.daskmesh_symmetric_group, world=world, name=name)
        if not known:
            raise ValueError(f"{call}: no group {name!r} was used yet; create_shmem_tensor({name!r}, n_pes=...) names one")
        _SIZES[world, name] = known
    return _SIZES[world, name]
