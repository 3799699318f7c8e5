"""What a rank does on symmetric tensors: in a region at once, or as a task that the client has recorded.

An `Actor` is one run of a task of a rank. Its operations are numbered; the task's key and the number are the *mark* by which
the target knows an operation that comes again. Keys are never used twice, and do not change from one attempt to the next.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from distributed import Reschedule, Worker, get_worker
from distributed.utils import sync

from daskmesh import config, peers
from daskmesh.buffers import Buffer, Mark, PELostError, Slot, Span, Test
from daskmesh.gang import Gang
from daskmesh.mesh import CURRENT_RANK
from daskmesh.recycling import empty
from daskmesh.shmem import ShmemSignal, ShmemTensor
from daskmesh.symmetric import Entry
from daskmesh.windows import Window

__all__ = ["Actor", "Done", "actor_of", "task_actor"]

Handle = ShmemTensor | ShmemSignal
Array = Any


class Done(NamedTuple):
    """A token inside a region, and what the task of a recorded operation returns: the operation has been applied.

    Examples
    --------
    >>> Done("t", 1, ("task", 0)).pe
    1
    """

    tensor: str
    pe: int
    mark: Any


@dataclass(eq=False)
class Actor:
    """One run of a rank's task, and the operations it makes."""

    worker: Worker
    rank: int
    key: Any
    gang: weakref.ref[Gang] | None = None  # weak, so that the region's actor goes with the region
    count: Iterator[int] = field(default_factory=itertools.count)
    touched: dict[str, Handle] = field(default_factory=dict)

    def mark(self) -> Mark:
        """Of the next operation."""
        return self.key, next(self.count)

    def entry(self, handle: Handle) -> Entry:
        """What this worker knows of a tensor; raises if it is lost or freed."""
        return peers.entry_of(self.worker, handle.id, handle.title)

    def own(self, handle: Handle, call: str) -> tuple[Entry, int, Buffer]:
        """This rank's own buffer."""
        pe = handle.pe_of(self.rank, call)
        entry = self.entry(handle)
        return entry, pe, peers.own_buffer(self.worker, entry, pe)

    def touch(self, handle: Handle) -> None:
        """From here on a lost peer is final: what was done to others is not done again."""
        self.touched[handle.id] = handle
        gang = None if self.gang is None else self.gang()
        if gang is not None:
            gang.on_lost = self._lost

    def _lost(self, error: Exception) -> Exception:
        """A peer of the region is lost after this rank has changed the memory of others."""
        for handle in self.touched.values():
            try:
                self.entry(handle)
                state: Any = sync(self.worker.loop, self.worker.scheduler.daskmesh_symmetric_state, tensor=handle.id)
            except PELostError as lost:
                return lost
            if state["status"] == "lost":
                return PELostError(state["why"], state["pe"])
        why = f"a rank of the region that was changing it is lost ({error})"
        for handle in self.touched.values():
            sync(self.worker.loop, self.worker.scheduler.daskmesh_symmetric_kill, tensor=handle.id, pe=-1, why=why)
        titles = ", ".join(handle.title for handle in self.touched.values())
        return PELostError(f"symmetric tensor {titles} is dead: {why}; create it again")

    def idle(self) -> None:
        """Called while the task waits: it makes room for others, and ends if nobody wants it any more."""
        peers.make_room()
        task = self.worker.state.tasks.get(self.key)
        if task is None or task.state not in ("executing", "long-running"):
            raise Reschedule  # cancelled: what is raised is not looked at

    # -- operations --------------------------------------------------------------------------------------------------

    def load(self, view: Window, pe: int, fill: Any) -> Array:
        """A fresh array with the view of a PE's buffer."""
        tensor = view.tensor
        entry = self.entry(tensor)
        if view.valid == view.shape:
            out = empty(view.shape, tensor.dtype)
            peers.load_view(self.worker, entry, pe, view.span, out)
            return out
        out = np.full(view.shape, fill, tensor.dtype)
        if all(view.valid):
            part = np.empty(view.valid, tensor.dtype)
            peers.load_view(self.worker, entry, pe, view.span, part)
            out[tuple(slice(n) for n in view.valid)] = part
        return out

    def load_box(self, tensor: ShmemTensor, index: Sequence[int | slice]) -> Array:
        """Any box of the global array whose shards the buffers hold, whoever holds them."""
        layout = tensor.layout
        if layout is None:
            raise TypeError(f"{tensor!r} holds no shards")
        wanted = tuple(i if isinstance(i, slice) else slice(i, i + 1) for i in index)
        entry = self.entry(tensor)
        out: Any = empty(tuple(s.stop - s.start for s in wanted), tensor.dtype)
        here = layout.mesh.coordinate(self.rank) if self.rank in layout.mesh else (0,) * layout.mesh.ndim
        for pe, coord in enumerate(layout.coords()):
            if any(coord[m] != here[m] for m in layout.lead_axes):
                continue
            span: list[tuple[int, int]] = []
            place: list[slice] = []
            for want, held in zip(wanted, layout.box(coord), strict=True):
                start, stop = max(want.start, held.start), min(want.stop, held.stop)
                span.append((start - held.start, stop - held.start))
                place.append(slice(start - want.start, stop - want.start))
            if all(stop > start for start, stop in span):
                target = out[(*place, ...)]
                peers.load_view(self.worker, entry, pe, tuple(span), target)
        return out[tuple(0 if not isinstance(i, slice) else slice(None) for i in index)]

    def put(
        self, view: Window, data: Array, pe: int, how: str, signal: tuple[Slot, int, str] | None = None
    ) -> Done:
        """Write `data` into a PE's buffer and, if asked to, set a signal in the same message."""
        entry, mark = self.entry(view.tensor), self.mark()
        kind, args = ("put", (view.span, data, how)) if signal is None else ("put_signal", (view.span, data, how, *signal))
        peers.perform(self.worker, entry, pe, kind, args, mark)
        self.touch(view.tensor)
        return Done(entry.id, pe, mark)

    def signal(self, handle: Handle, slot: Slot, value: int, how: str, targets: Sequence[int]) -> Done:
        """Set or add to a signal slot of some PEs."""
        entry, mark = self.entry(handle), self.mark()
        peers.ask_all(self.worker, entry, [(pe, "signal", (slot, value, how)) for pe in targets], mark)
        self.touch(handle)
        return Done(entry.id, targets[0], mark)

    def wait(
        self,
        handle: Handle,
        tests: Sequence[Test],
        call: str,
        timeout: float | None,
        every: bool = True,
        clear: bool = False,
    ) -> int:
        """Wait until signal slots of this rank's own buffer are as wanted; the index of the one that is, 0 for all."""
        _, pe, buffer = self.own(handle, call)
        limit = config.seconds("collective-timeout") if timeout is None else timeout
        try:
            found = buffer.wait(tests, self.mark(), limit, self.idle, every=every, clear=clear)
        except TimeoutError as error:
            raise TimeoutError(f"{call}: PE {pe} of {handle!r} {error}; give timeout= to wait longer") from None
        if clear:
            self.touch(handle)
        return found

    def wait_any(self, handle: Handle, tests: Sequence[Test], call: str, timeout: float | None, clear: bool) -> Any:
        """Wait until one of some slots is as wanted; the PE whose row it is in."""
        return np.int64(tests[self.wait(handle, tests, call, timeout, every=False, clear=clear)][0][0])

    def fetch_signal(self, handle: Handle, slot: Slot, call: str) -> Any:
        """The value of a slot of this rank's own buffer."""
        return np.int64(self.own(handle, call)[2].perform("fetch_signal", (slot,)))

    def barrier(self, handle: Handle, group: tuple[int, ...], call: str, timeout: float | None) -> Done:
        """Wait until all PEs of a group have come: each adds 1 to an arrival counter of all others.

        The counters grow for ever, and the n-th barrier waits for at least n times the size of the group, so that one who is
        fast and comes again before a slow one has looked does no harm. Who gives up takes back that it has come, so that the next
        barrier begins anew for all.
        """
        entry, pe, buffer = self.own(handle, call)
        slot: Slot = (-1, group)

        def come(step: int) -> int:
            epoch: int = buffer.perform("epoch", (group, step), self.mark())
            peers.ask_all(self.worker, entry, [(other, "signal", (slot, step, "add")) for other in group], self.mark())
            self.touch(handle)
            return epoch

        epoch = come(1)
        try:
            self.wait(handle, [(slot, ">=", epoch * len(group))], call, timeout)
        except PELostError:
            raise  # nobody can use the tensor any more
        except Exception:
            with suppress(PELostError):
                come(-1)
            raise
        return Done(entry.id, pe, (self.key, -1))

    def atomic(self, tensor: ShmemTensor, name: str, index: tuple[int, ...], operands: Sequence[Array], pe: int) -> Any:
        """One operation on one element; the value it had before."""
        mark = None if name == "fetch" else self.mark()
        args = (name, index, *(operand.tobytes() for operand in operands))
        before = peers.perform(self.worker, self.entry(tensor), pe, "atomic", args, mark)
        if mark is not None:
            self.touch(tensor)
        return np.frombuffer(before, tensor.dtype)[0]

    def clear(self, handle: Handle, kind: str, args: tuple[Any, ...], call: str) -> Done:
        """Zero data or signal slots of this rank's own buffer."""
        entry, pe, buffer = self.own(handle, call)
        mark = self.mark()
        buffer.perform(kind, args, mark)
        self.touch(handle)
        return Done(entry.id, pe, mark)

    def fill(self, tensor: ShmemTensor, local: Array) -> None:
        """Copy an array into the front of this rank's own buffer."""
        _, _, buffer = self.own(tensor, "symm_from_dtensor")
        span: Span = tuple((0, n) for n in local.shape)
        buffer.perform("put", (span, local, "set"), self.mark())


_ACTORS: weakref.WeakKeyDictionary[Gang, Actor] = weakref.WeakKeyDictionary()


def actor_of(gang: Gang, call: str) -> Actor:
    """The actor of a region that runs on this worker.

    Raises
    ------
    RuntimeError
        There is no cluster, or shapes were inferred without any operation on symmetric tensors.
    """
    actor = _ACTORS.get(gang)
    if actor is None:
        try:
            worker = get_worker()
        except ValueError:
            raise RuntimeError(
                f"{call}: symmetric tensors live on the workers of a cluster; compute with a distributed Client, not with "
                "Dask's threaded or synchronous scheduler"
            ) from None
        actor = _ACTORS[gang] = Actor(worker, gang.rank, worker.get_current_task(), weakref.ref(gang))
    return actor


def task_actor() -> Actor:
    """The actor of a recorded operation whose task is running."""
    worker, rank = get_worker(), CURRENT_RANK.get()
    if rank is None:
        raise RuntimeError("not in the task of a rank")
    return Actor(worker, rank, worker.get_current_task())
