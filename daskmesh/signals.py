"""Signals between the PEs of symmetric tensors, and what is still on its way; in two modes, as in `onesided`."""

from __future__ import annotations

from typing import Any

import numpy as np

from daskmesh.acting import Acting, answers, done, region, remember, settle, tokened
from daskmesh.buffers import Slot
from daskmesh.gang import CURRENT_GANG
from daskmesh.onesided import put
from daskmesh.recorded import joined, tokens_of
from daskmesh.shmem import AtomicType, ShmemSignal, ShmemTensor, ShmemView, integer
from daskmesh.shmem_ops import actor_of
from daskmesh.windows import PerRank, choice, handle_of, slot_of

__all__ = [
    "shmem_clear_signal",
    "shmem_put_signal",
    "shmem_quiet",
    "shmem_signal",
    "shmem_signal_fetch",
    "sync",
]

Source = ShmemTensor | ShmemView | ShmemSignal
ALL = -1
_SIGNAL_TYPES = (AtomicType.SET, AtomicType.ADD)


def shmem_signal(
    src: Source,
    src_pe: PerRank,
    signal: int,
    shape: Any = None,
    offsets: Any = None,
    *,
    target_pe: PerRank,
    sig_op: AtomicType = AtomicType.SET,
    by: Any = None,
    pred: Any = None,
) -> Any:
    """Set a signal slot of another PE, or add to it.

    Parameters
    ----------
    src : ShmemTensor, ShmemView or ShmemSignal
    src_pe : int, sequence of int, or callable
        Whose row the slot is in: by convention the PE that the signal comes from.
    signal : int
        A 64-bit integer.
    shape, offsets : sequence of int, optional
        A slot of its own for each of the equal parts of this shape that the tensor falls into; by default one for the whole.
    target_pe : int, sequence of int, or callable
        In whose memory the slot is; -1 is every PE.
    sig_op : AtomicType
        SET or ADD. Do not mix them on one slot.
    by, pred
        As for `shmem_put`. A signal is never seen before what its `pred` has put.

    Returns
    -------
    Token

    Notes
    -----
    **Communication**: one message per target.

    Raises
    ------
    TypeError, ValueError
        Of an argument, before anything is submitted.

    Examples
    --------
    >>> import daskmesh as dm
    >>> with dm.create_shmem_tensor("tp", 2, "i4", [3]) as t:
    ...     sent = dm.shmem_signal(t, 0, 1, target_pe=1, sig_op=dm.AtomicType.ADD)
    ...     dm.shmem_signal_fetch(t, 0, pred=sent).compute()
    array([0, 2])
    """
    call = "shmem_signal"
    gang = region(call)
    handle = handle_of(call, src)
    acting = Acting(call, handle, by)
    how = choice(call, "sig_op", sig_op, AtomicType, _SIGNAL_TYPES)
    value = value_of(call, "signal", signal)
    to_all = isinstance(target_pe, (int, np.integer)) and not isinstance(target_pe, bool) and target_pe == ALL
    found = ALL if to_all else acting.of("target_pe", target_pe, gang)
    rows = acting.each(acting.of("src_pe", src_pe, gang))
    slots = [slot_of(call, src, row, shape, offsets) for row in rows]
    targets = [list(range(handle.n_pes))] * len(rows) if to_all else [[pe] for pe in acting.each(found)]
    if gang is None:
        return tokened(acting, "signal", lambda i: (handle, slots[i], value, how, targets[i]), pred)
    if gang.trace is not None or not acting.includes(gang.rank):
        return done(handle)
    return actor_of(gang, call).signal(handle, slots[0], value, how, targets[0])


def value_of(call: str, what: str, value: Any) -> int:
    """A signal's value."""
    number = integer(call, what, value)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{call}: {what} {number} is no 64-bit signed integer")
    return number


def shmem_put_signal(
    src: Any,
    offsets: Any,
    dst: ShmemTensor | ShmemView,
    dst_pe: PerRank,
    signal: int,
    *,
    put_op: AtomicType = AtomicType.SET,
    sig_op: AtomicType = AtomicType.SET,
    by: Any = None,
    pred: Any = None,
) -> Any:
    """A put, and then a signal in the row of the PE that puts, in one message: who sees the signal sees the data.

    Parameters
    ----------
    src, offsets, dst, dst_pe, put_op, by, pred
        As for `shmem_put`.
    signal, sig_op
        As for `shmem_signal`.

    Returns
    -------
    Token

    Notes
    -----
    **Communication**: the elements of `src`, to `dst_pe`.

    Examples
    --------
    >>> import daskmesh as dm
    >>> with dm.create_shmem_tensor("tp", 2, "i4", [2]) as t:
    ...     _ = dm.shmem_put_signal([1, 2], [0], t, 1, 1, by=0)
    ...     dm.sync(t)
    ...     seen = dm.shmem_wait_until(t, 0, 1, by=1)
    ...     dm.shmem_load(t, 1, pred=seen).compute()
    array([1, 2], dtype=int32)
    """
    call = "shmem_put_signal"
    how = choice(call, "put_op", put_op, AtomicType)
    sig = choice(call, "sig_op", sig_op, AtomicType, _SIGNAL_TYPES)
    value = value_of(call, "signal", signal)

    def sent(pe: int) -> tuple[Slot, int, str]:
        return (pe, None), value, sig

    return put(call, src, offsets, dst, dst_pe, (how, sent), (by, pred))


def shmem_signal_fetch(
    src: Source, src_pe: PerRank, shape: Any = None, offsets: Any = None, *, by: Any = None, pred: Any = None
) -> Any:
    """The value of a signal slot of this rank's own memory.

    Parameters
    ----------
    src, src_pe, shape, offsets, by, pred
        As for `shmem_wait_until`.

    Returns
    -------
    int or DTensor
        On the client an array with one for each PE that acts.

    Notes
    -----
    **Communication**: none.

    Examples
    --------
    >>> import daskmesh as dm
    >>> with dm.create_shmem_signal("tp", 2) as ready:
    ...     sent = dm.shmem_signal(ready, 0, 7, target_pe=1)
    ...     dm.shmem_signal_fetch(ready, 0, pred=sent).compute()
    array([0, 7])
    """
    call = "shmem_signal_fetch"
    gang = region(call)
    handle = handle_of(call, src)
    acting = Acting(call, handle, by)
    slots = [slot_of(call, src, row, shape, offsets) for row in acting.each(acting.of("src_pe", src_pe, gang))]
    if gang is None:
        return answers(acting, np.int64, "fetch_signal", lambda i: (handle, slots[i], call), pred, changes=False)
    handle.pe_of(gang.rank, call)
    if gang.trace is not None:
        return gang.traced((), np.dtype(np.int64))
    return int(actor_of(gang, call).fetch_signal(handle, slots[0], call)) if acting.includes(gang.rank) else None


def shmem_clear_signal(src: Source, *, by: Any = None, pred: Any = None) -> Any:
    """Zero all signal slots of this rank's own memory; on the client all PEs, or those in `by`, zero theirs.

    Notes
    -----
    **Communication**: none.

    Examples
    --------
    >>> import daskmesh as dm
    >>> with dm.create_shmem_signal("tp", 2) as ready:
    ...     sent = dm.shmem_signal(ready, 0, 7, target_pe=-1)
    ...     clear = dm.shmem_clear_signal(ready, by=1, pred=sent)
    ...     dm.shmem_signal_fetch(ready, 0, pred=clear).compute()
    array([7, 0])
    """
    call = "shmem_clear_signal"
    gang = region(call)
    handle = handle_of(call, src)
    acting = Acting(call, handle, by)
    if gang is None:
        return tokened(acting, "clear", lambda i: (handle, "clear_signal", (), call), pred)
    handle.pe_of(gang.rank, call)
    if gang.trace is not None or not acting.includes(gang.rank):
        return done(handle)
    return actor_of(gang, call).clear(handle, "clear_signal", (), call)


def shmem_quiet(src: ShmemTensor | ShmemView | ShmemSignal, *, pred: Any = None) -> Any:
    """All changes that were asked for before are applied: a token for those recorded on the client so far.

    Inside a region every operation is applied when its call returns, so there is nothing to wait for.

    Notes
    -----
    **Communication**: none.

    Examples
    --------
    >>> import daskmesh as dm
    >>> with dm.create_shmem_tensor("tp", 2, "i4", [2]) as t:
    ...     for at in 0, 1:
    ...         _ = dm.shmem_put([at + 1], [at], t, 0)
    ...     dm.shmem_load(t, 0, pred=dm.shmem_quiet(t)).compute()
    array([1, 2], dtype=int32)
    """
    call = "shmem_quiet"
    gang = region(call)
    handle = handle_of(call, src)
    if gang is not None:
        return done(handle)
    before = [*handle.pending, *tokens_of(call, pred)]
    token = joined(before, handle.world, handle.mesh.process_ids[0])
    remember(handle, token, before)
    return token


def sync(src: ShmemTensor | ShmemView | ShmemSignal) -> None:
    """Compute what was recorded on the client for a tensor and is not known to have happened; returns when it has.

    Notes
    -----
    **Communication**: that of the operations.

    Raises
    ------
    RuntimeError
        Called inside a region, where nothing is recorded.

    Examples
    --------
    >>> import daskmesh as dm
    >>> with dm.create_shmem_tensor("tp", 2, "i4", [2]) as t:
    ...     _ = dm.shmem_put([3, 4], [0], t, 1)
    ...     dm.sync(t)
    ...     dm.shmem_load(t, 1).compute()
    array([3, 4], dtype=int32)
    """
    if CURRENT_GANG.get() is not None:
        raise RuntimeError("sync: inside a region every operation is applied when its call returns; call it on the client")
    handle = handle_of("sync", src)
    settle(handle)
