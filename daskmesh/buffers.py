"""The memory of one PE of a symmetric tensor, for any PE to read and write one-sidedly.

A buffer has, next to its array:

- a *version word*, eight bytes in memory that is never unmapped: even while the array is at rest, odd while an operation
  changes it, zero once it is gone. Whoever reads another process's memory believes what it read only if the word was the
  same even number before and after.
- a lock, which each operation holds as a whole, so that operations on one buffer happen one after the other;
- *signal slots*, integers that ranks set, add to and wait for;
- a memory of the operations that changed it, by *mark*: the key of the task that asked and the number of the operation
  within it, without the attempt. One that comes again is not applied again, but answered as it was.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from daskmesh import vm

__all__ = ["COMPARE", "Buffer", "Claim", "Mark", "PELostError", "Slot", "Span", "Test"]

Array: TypeAlias = np.ndarray[Any, Any]
Span: TypeAlias = tuple[tuple[int, int], ...]  # start and stop for each dim
Slot: TypeAlias = tuple[int, Any]  # the PE whose row it is, and the span it speaks for; (-1, ranks) counts a barrier
Mark: TypeAlias = tuple[Any, int]
Test: TypeAlias = tuple[Slot, str, int]

FIRST_WAIT = 0.005  # seconds that a waiting thread keeps its place on the worker
NEXT_WAIT = 0.25

COMPARE: dict[str, Callable[[int, int], bool]] = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}
UPDATE: dict[str, Callable[..., Any]] = {"add": np.add, "max": np.maximum, "min": np.minimum}


class PELostError(RuntimeError):
    """A PE of a symmetric tensor is lost, and what its memory held with it; the tensor is dead until it is created again.

    Attributes
    ----------
    pe : int
        Which one; -1 if that is not known.

    Examples
    --------
    >>> import daskmesh as dm
    >>> raise dm.PELostError("PE 2 of 'tp' is lost: worker tcp://10.0.0.2:4000 is gone", 2)
    Traceback (most recent call last):
    daskmesh.buffers.PELostError: PE 2 of 'tp' is lost: worker tcp://10.0.0.2:4000 is gone
    """

    def __init__(self, message: str, pe: int = -1) -> None:
        super().__init__(message, pe)
        self.pe = pe

    def __str__(self) -> str:
        return str(self.args[0])


class Claim(NamedTuple):
    """A buffer as other PEs know it: which worker has it, and where it lies in the memory of which process.

    Examples
    --------
    >>> Claim("tcp://10.0.0.1:4000", 4096, (24, 8), 8192, vm.this_process()).strides
    (24, 8)
    """

    address: str
    pointer: int
    strides: tuple[int, ...]
    word: int
    process: vm.Process

    @classmethod
    def unpacked(cls, parts: Sequence[Any]) -> Claim:
        """From the sequence that it becomes in a message."""
        address, pointer, strides, word, process = parts
        return cls(address, pointer, tuple(strides), word, vm.Process(*process))


@dataclass(slots=True)
class _Done:
    """What one task has done to a buffer: operations up to number `last`, and what those that answer answered."""

    last: int = -1
    answers: dict[int, Any] = field(default_factory=dict)


class Buffer:
    """The memory of one PE of a symmetric tensor.

    Examples
    --------
    >>> buffer = Buffer((2, 3), np.dtype("i4"))
    >>> buffer.perform("put", (((0, 1), (1, 3)), np.array([[7, 8]]), "set"), ("task", 0))
    >>> buffer.perform("put", (((0, 1), (1, 3)), np.array([[9, 9]]), "set"), ("task", 0))  # it comes again
    >>> buffer.perform("read", (((0, 2), (0, 3)),))
    array([[0, 7, 8],
           [0, 0, 0]], dtype=int32)
    >>> buffer.close(RuntimeError("freed"))
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.array: Any = np.zeros(shape, dtype)
        self.slots: dict[Slot, int] = {}
        self.epochs: dict[Any, int] = {}
        self.gone: Exception | None = None
        self.changed = threading.Condition(threading.Lock())
        self._done: dict[Any, _Done] = {}
        self._word = vm.Word()
        # Begins anywhere, so that no earlier version of another buffer that had this word reads as one of this one.
        self._word.value = 2 * (secrets.randbits(60) + 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return 0 if self.array is None else int(self.array.nbytes)

    def claim(self, address: str) -> Claim:
        """How others find it, held by the worker at `address`."""
        at = self.array.__array_interface__["data"][0]
        return Claim(address, at, self.array.strides, self._word.address, vm.this_process())

    def close(self, why: Exception) -> None:
        """Let go of the memory; whoever waits here, or comes later, gets `why`."""
        with self.changed:
            if self.gone is None:
                self.gone = why
                self._word.value = 0
                self.array = None
                self._word.give_back()
                self._done.clear()
            self.changed.notify_all()

    # -- operations --------------------------------------------------------------------------------------------------

    def perform(self, kind: str, args: Sequence[Any], mark: Mark | None = None, *, block: bool = True) -> Any:
        """Do one operation as a whole; what it answers.

        Raises
        ------
        BlockingIOError
            Another one is under way, and `block` is false.
        PELostError, RuntimeError
            The buffer is lost, or freed.
        """
        if not self.changed.acquire(blocking=block):
            raise BlockingIOError
        try:
            self._check()
            if mark is None:
                return _KINDS[kind](self, *args)
            known, answer = self._known(mark)
            if not known:
                answer = _KINDS[kind](self, *args)
                self._remember(mark, answer)
            return answer
        finally:
            self.changed.release()

    def read_into(self, span: Span, out: Array) -> None:
        """Copy a view into `out`."""
        with self.changed:
            self._check()
            np.copyto(out, self._view(span))

    def _check(self) -> None:
        if self.gone is not None:
            raise self.gone.with_traceback(None)

    def _known(self, mark: Mark) -> tuple[bool, Any]:
        done = self._done.get(mark[0])
        if done is None or mark[1] > done.last:
            return False, None
        return True, done.answers.get(mark[1])

    def _remember(self, mark: Mark, answer: Any) -> None:
        done = self._done.setdefault(mark[0], _Done())
        done.last = mark[1]
        if answer is not None:
            done.answers[mark[1]] = answer

    def _view(self, span: Span) -> Array:
        view: Array = self.array[(*(slice(*part) for part in span), ...)]
        return view

    def _write(self, write: Callable[[], None]) -> None:
        self._word.value += 1
        try:
            with np.errstate(all="ignore"):
                write()
        finally:
            self._word.value += 1

    def _read(self, span: Span) -> Array:
        return self._view(span).copy()

    def _put(self, span: Span, data: Array, how: str) -> None:
        view = self._view(span)
        if how == "set":
            self._write(lambda: np.copyto(view, data, casting="same_kind"))
        else:
            self._write(lambda: UPDATE[how](view, data.astype(view.dtype, copy=False), out=view))

    def _signal(self, slot: Slot, value: int, how: str) -> None:
        self.slots[slot] = _wrapped(value + (self.slots.get(slot, 0) if how == "add" else 0))
        self.changed.notify_all()

    def _put_signal(self, span: Span, data: Array, how: str, slot: Slot, value: int, sig: str) -> None:
        self._put(span, data, how)
        self._signal(slot, value, sig)

    def _atomic(self, name: str, index: Sequence[int], *operands: bytes) -> bytes:
        """The element as it was before; elements travel as their bytes."""
        place = self.array[(*index, ...)]
        before: bytes = place.tobytes()
        values = [np.frombuffer(raw, place.dtype).reshape(()) for raw in operands]
        if name in ("set", "swap"):
            self._write(lambda: np.copyto(place, values[0]))
        elif name in ("add", "fetch_add"):
            self._write(lambda: np.add(place, values[0], out=place))
        elif name == "compare_swap" and place == values[0]:
            self._write(lambda: np.copyto(place, values[1]))
        return before

    def _clear_data(self, span: Span) -> None:
        view = self._view(span)
        self._write(lambda: np.copyto(view, np.zeros((), view.dtype)))

    def _clear_signal(self) -> None:
        for slot in [slot for slot in self.slots if slot[0] >= 0]:
            del self.slots[slot]

    def _fetch_signal(self, slot: Slot) -> int:
        return self.slots.get(slot, 0)

    def _epoch(self, group: Any, step: int = 1) -> int:
        self.epochs[group] = self.epochs.get(group, 0) + step
        return self.epochs[group]

    # -- waiting -----------------------------------------------------------------------------------------------------

    def wait(
        self,
        tests: Sequence[Test],
        mark: Mark,
        timeout: float,
        idle: Callable[[], None],
        *,
        every: bool = True,
        clear: bool = False,
    ) -> int:
        """Wait until all `tests` of slots hold, or any; the index of the one that did (0 for all). Not for an event loop.

        `idle` is called, without the lock, when the wait turns out to take a while, and then again and again.

        Raises
        ------
        TimeoutError
            They do not hold after `timeout` seconds.
        """
        end, step = monotonic() + timeout, FIRST_WAIT
        while True:
            with self.changed:
                late = min(end, monotonic() + step)
                while True:
                    self._check()
                    known, found = self._known(mark)
                    if not known:
                        found = self._held(tests, every=every)
                    if found is not None:
                        if not known:
                            if clear:
                                self._reset(tests, None if every else found)
                            self._remember(mark, found)
                        return int(found)
                    left = late - monotonic()
                    if left <= 0:
                        break
                    self.changed.wait(left)
                if monotonic() >= end:
                    raise TimeoutError(self._unmet(tests, timeout, every=every))
            step = NEXT_WAIT
            idle()

    def _held(self, tests: Sequence[Test], *, every: bool) -> int | None:
        holds = [COMPARE[compare](self.slots.get(slot, 0), value) for slot, compare, value in tests]
        if every:
            return 0 if all(holds) else None
        return holds.index(True) if any(holds) else None

    def _reset(self, tests: Sequence[Test], only: int | None) -> None:
        for slot, _, _ in tests if only is None else [tests[only]]:
            self.slots[slot] = 0

    def _unmet(self, tests: Sequence[Test], timeout: float, *, every: bool) -> str:
        said = [
            f"{'arrivals' if slot[0] < 0 else f'the slot of PE {slot[0]}'} is {self.slots.get(slot, 0)}, wanted {compare} {value}"
            for slot, compare, value in tests
            if not COMPARE[compare](self.slots.get(slot, 0), value)
        ]
        return f"waited {timeout:g} s for {'' if every else 'one of '}a signal: {'; '.join(said)}"


_KINDS: dict[str, Callable[..., Any]] = {
    "read": Buffer._read,
    "put": Buffer._put,
    "signal": Buffer._signal,
    "put_signal": Buffer._put_signal,
    "atomic": Buffer._atomic,
    "clear_data": Buffer._clear_data,
    "clear_signal": Buffer._clear_signal,
    "fetch_signal": Buffer._fetch_signal,
    "epoch": Buffer._epoch,
}


def _wrapped(value: int) -> int:
    """As a 64-bit signed integer would be."""
    return (value + 2**63) % 2**64 - 2**63
