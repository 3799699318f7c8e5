"""Waiting for signals and for each other; in two modes, as in `onesided`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from daskmesh.acting import Acting, answers, done, region, tokened
from daskmesh.buffers import Test
from daskmesh.gang import Gang, MeshDim
from daskmesh.shmem import CmpType, ShmemSignal, ShmemTensor
from daskmesh.shmem_ops import actor_of
from daskmesh.signals import Source, value_of
from daskmesh.windows import PerRank, choice, handle_of, one_pe, slot_of

__all__ = ["shmem_barrier_all", "shmem_wait_all", "shmem_wait_any", "shmem_wait_until"]


def shmem_wait_until(
    src: Source,
    src_pe: PerRank,
    cmp_value: int = 0,
    shape: Any = None,
    offsets: Any = None,
    *,
    cmp: CmpType = CmpType.EQ,
    clear_signal: bool = False,
    timeout: float | None = None,
    by: Any = None,
    pred: Any = None,
) -> Any:
    """Wait until a signal slot of this rank's own memory compares with a value as wanted.

    Parameters
    ----------
    src, src_pe, shape, offsets
        The slot, as for `shmem_signal`.
    cmp_value : int
        What it is compared with.
    cmp : CmpType
        EQ, NE, LT, LE, GT or GE. For a counter use GE: it may have moved past the value.
    clear_signal : bool
        Zero the slot then.
    timeout : float, optional
        Seconds; by default `daskmesh.collective-timeout`.
    by, pred
        As for `shmem_put`.

    Returns
    -------
    Token
        What comes after it sees what the signal stands for, on third PEs, too.

    Notes
    -----
    A task that waits makes room for another on its worker.

    **Communication**: none.

    Raises
    ------
    TimeoutError
        With the value that the slot has.
    PELostError
        A PE of the tensor is lost meanwhile.

    Examples
    --------
    >>> import daskmesh as dm
    >>> with dm.create_shmem_signal("tp", 2) as ready:
    ...     _ = dm.shmem_signal(ready, 0, 5, target_pe=1)
    ...     dm.sync(ready)
    ...     dm.shmem_wait_until(ready, 0, 4, cmp=dm.CmpType.GT, by=1).compute()
    ...     dm.shmem_wait_until(ready, 0, 4, by=1, timeout=0.01).compute()
    Traceback (most recent call last):
    ...
    TimeoutError: shmem_wait_until: PE 1 of ShmemSignal('tp', n_pes=2) waited 0.01 s for a signal: the slot of PE 0 is 5, ...
    """
    call = "shmem_wait_until"
    gang = region(call)
    handle = handle_of(call, src)
    acting = Acting(call, handle, by)
    compare, value = choice(call, "cmp", cmp, CmpType), value_of(call, "cmp_value", cmp_value)
    rows = acting.each(acting.of("src_pe", src_pe, gang))
    tests: list[list[Test]] = [[(slot_of(call, src, row, shape, offsets), compare, value)] for row in rows]
    return _wait(call, handle, acting, tests, (_seconds(call, timeout), True, bool(clear_signal)), (gang, pred))


def shmem_wait_all(
    src: Source,
    src_pes: Sequence[int] | None = None,
    cmp_value: int = 0,
    *,
    cmp: CmpType = CmpType.EQ,
    clear_signal: bool = False,
    timeout: float | None = None,
    by: Any = None,
    pred: Any = None,
) -> Any:
    """Wait until the slots in the rows of several PEs all compare as wanted, at one moment.

    Parameters
    ----------
    src_pes : sequence of int, optional
        The rows; by default all.
    src, cmp_value, cmp, clear_signal, timeout, by, pred
        As for `shmem_wait_until`.

    Returns
    -------
    Token

    Notes
    -----
    **Communication**: none.

    Examples
    --------
    >>> import daskmesh as dm
    >>> with dm.create_shmem_signal("tp", 2) as ready:
    ...     sent = dm.shmem_signal(ready, lambda rank: rank, 1, target_pe=-1)
    ...     dm.shmem_wait_all(ready, cmp_value=1, pred=sent).compute()
    """
    call = "shmem_wait_all"
    gang = region(call)
    handle = handle_of(call, src)
    acting = Acting(call, handle, by)
    tests = [_rows(call, src, src_pes, cmp, cmp_value)] * (1 if gang is not None else len(acting.pes))
    return _wait(call, handle, acting, tests, (_seconds(call, timeout), True, bool(clear_signal)), (gang, pred))


def shmem_wait_any(
    src: Source,
    src_pes: Sequence[int] | None = None,
    cmp_value: int = 0,
    *,
    cmp: CmpType = CmpType.EQ,
    clear_signal: bool = False,
    timeout: float | None = None,
    by: Any = None,
    pred: Any = None,
) -> Any:
    """Wait until the slot in the row of one of several PEs compares as wanted.

    Parameters
    ----------
    src, src_pes, cmp_value, cmp, clear_signal, timeout, by, pred
        As for `shmem_wait_all`; `clear_signal` zeroes the slot that is reported.

    Returns
    -------
    int or DTensor
        The PE whose row it is. On the client an array with one for each PE that acts.

    Notes
    -----
    **Communication**: none.

    Examples
    --------
    >>> import daskmesh as dm
    >>> with dm.create_shmem_signal("tp", 2) as ready:
    ...     sent = dm.shmem_signal(ready, 1, 1, target_pe=-1, by=1)
    ...     dm.shmem_wait_any(ready, cmp_value=1, pred=sent).compute()
    array([1, 1])
    """
    call = "shmem_wait_any"
    gang = region(call)
    handle = handle_of(call, src)
    acting = Acting(call, handle, by)
    tests = _rows(call, src, src_pes, cmp, cmp_value)
    seconds, clear = _seconds(call, timeout), bool(clear_signal)
    if gang is None:
        args = (handle, tests, call, seconds, clear)
        return answers(acting, np.int64, "wait_any", lambda i: args, pred, changes=clear)
    handle.pe_of(gang.rank, call)
    if gang.trace is not None:
        return gang.traced((), np.dtype(np.int64))
    return int(actor_of(gang, call).wait_any(handle, tests, call, seconds, clear)) if acting.includes(gang.rank) else None


def _rows(call: str, src: Source, src_pes: Any, cmp: Any, cmp_value: Any) -> list[Test]:
    handle = handle_of(call, src)
    compare, value = choice(call, "cmp", cmp, CmpType), value_of(call, "cmp_value", cmp_value)
    if src_pes is None:
        src_pes = range(handle.n_pes)
    if not isinstance(src_pes, (Sequence, np.ndarray)) or not len(src_pes):
        raise TypeError(f"{call}: src_pes must be a sequence of PEs, got {src_pes!r}")
    rows = [one_pe(call, f"src_pes[{i}]", row, handle.n_pes) for i, row in enumerate(src_pes)]
    return [(slot_of(call, src, row, None, None), compare, value) for row in rows]


def _seconds(call: str, timeout: Any) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float, np.number)):
        raise TypeError(f"{call}: timeout is a number of seconds, got {timeout!r}")
    if not timeout >= 0:
        raise ValueError(f"{call}: timeout is {timeout} s; it must not be negative")
    return float(timeout)


def _wait(
    call: str,
    handle: ShmemTensor | ShmemSignal,
    acting: Acting,
    tests: list[list[Test]],
    how: tuple[float | None, bool, bool],
    where: tuple[Gang | None, Any],
) -> Any:
    seconds, every, clear = how
    gang, pred = where
    if gang is None:
        return tokened(acting, "wait", lambda i: (handle, tests[i], call, seconds, every, clear), pred, changes=clear)
    handle.pe_of(gang.rank, call)
    if gang.trace is None and acting.includes(gang.rank):
        actor_of(gang, call).wait(handle, tests[0], call, seconds, every, clear)
    return done(handle)


def shmem_barrier_all(src: Source, pred: Any = None, *, mesh_dim: MeshDim = None, timeout: float | None = None) -> Any:
    """Wait until all PEs have come here, or those that differ only along `mesh_dim`.

    Parameters
    ----------
    src : ShmemTensor, ShmemView or ShmemSignal
        Whose PEs meet.
    pred : token, collection, or list of these, optional
        What must have happened before a PE has come; other recorded operations are covered by ``pred=shmem_quiet(src)``.
    mesh_dim : str, tuple of str, or None
        Mesh dims of the group of `src`; None for all.
    timeout : float, optional
        Seconds; by default `daskmesh.collective-timeout`.

    Returns
    -------
    Token

    Notes
    -----
    **Communication**: one message from each PE to each.

    Raises
    ------
    TimeoutError
        Says how many have come.

    Examples
    --------
    >>> import daskmesh as dm
    >>> with dm.create_shmem_tensor("tp", 2, "i4", [2]) as t:
    ...     put = dm.shmem_put([1, 2], [0], t, lambda rank: 1 - rank)
    ...     met = dm.shmem_barrier_all(t, pred=put)
    ...     dm.shmem_load(t, lambda rank: rank, pred=met).compute()
    array([1, 2, 1, 2], dtype=int32)
    """
    call = "shmem_barrier_all"
    gang = region(call)
    handle = handle_of(call, src)
    acting = Acting(call, handle, None)
    seconds = _seconds(call, timeout)
    if gang is None:
        groups = [_group(handle, rank, mesh_dim) for rank in acting.ranks]
        return tokened(acting, "barrier", lambda i: (handle, groups[i], call, seconds), pred, changes=False)
    handle.pe_of(gang.rank, call)
    group = _group(handle, gang.rank, mesh_dim)
    return done(handle) if gang.trace is not None else actor_of(gang, call).barrier(handle, group, call, seconds)


def _group(handle: ShmemTensor | ShmemSignal, rank: int, mesh_dim: MeshDim) -> tuple[int, ...]:
    """The PEs of a barrier."""
    ranks = Gang(handle.mesh, rank).group(mesh_dim, join=False).ranks
    return tuple(handle.mesh.process_ids.index(other) for other in ranks)
