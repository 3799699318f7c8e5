"""Which worker a rank sits on: the table of one world, as a value with no cluster in it.

A world has *slots*, one per worker it was dealt to. A rank has a home slot and a seat, which is its home unless the
home lost its worker for longer than the grace time and the rank was folded onto a survivor:

    rank 0   home A   seat A        A  tcp://...:1
    rank 1   home B   seat A        B  lost            <- a worker that takes slot B brings rank 1 home

The pin of a rank is one set of worker addresses that all tasks of the rank share, so moving a rank is one change,
however many tasks it has. Dask reads an empty set as "anywhere": a rank with no worker is pinned to a sentinel that no
worker bears.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Table", "WorkerId"]


class WorkerId(NamedTuple):
    """What tells a worker from others, and what of it outlives its process: the nanny's address, then the name."""

    address: str
    host: str
    nanny: str | None
    name: str

    @property
    def order(self) -> tuple[object, ...]:
        """Place in the order in which ranks are dealt: host, then nanny address or name; digits count as numbers."""
        return tuple(
            tuple(int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", text)))
            for text in (self.host, self.nanny or self.name)
        )


@dataclass
class _Slot:
    """A place for one worker: who it was, where it is now (None: lost), when it was lost."""

    worker: WorkerId | None
    lost_at: float = 0.0
    alive: bool = True


@dataclass
class Table:
    """The ranks of one world and their workers.

    Parameters
    ----------
    world : str
        Id of the world.
    client : str
        Id of the client that owns it.
    grace : float
        Seconds before a lost rank is folded onto a survivor.

    Examples
    --------
    >>> a, b = (WorkerId(f"tcp://h:{port}", "h", f"tcp://h:9{port}", str(port)) for port in (1, 2))
    >>> table = Table("w", "me", grace=10)
    >>> table.grow(3, [b, a], now=0.0)
    >>> table.addresses()
    ['tcp://h:1', 'tcp://h:2', 'tcp://h:1']
    >>> table.leave("tcp://h:2", now=1.0), table.addresses()[1]
    (True, '')
    >>> table.fold([a], now=11.0), table.addresses()[1]
    (True, 'tcp://h:1')
    >>> table.arrive(b._replace(address="tcp://h:7"), now=12.0), table.addresses()[1]
    (True, 'tcp://h:7')
    """

    world: str
    client: str
    grace: float
    released: bool = False
    _slots: list[_Slot] = field(default_factory=list)
    _homes: list[int] = field(default_factory=list)
    _seats: list[int] = field(default_factory=list)
    _pins: list[set[str]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._homes)

    def pin(self, rank: int) -> set[str]:
        """The set of worker addresses that every task of `rank` shares. Never empty; only this table changes it."""
        return self._pins[rank]

    def addresses(self) -> list[str]:
        """The worker of each rank; an empty string for a rank that has none."""
        return [worker.address if (worker := self._live(self._slots[seat])) else "" for seat in self._seats]

    def seated(self, address: str) -> list[int]:
        """The ranks that sit on a worker."""
        return [rank for rank, where in enumerate(self.addresses()) if where == address]

    def grow(self, size: int, workers: Iterable[WorkerId], now: float) -> None:
        """Deal ranks up to `size` to the workers with the fewest, in their order; ranks that are there stay.

        With no worker at all each new rank gets a slot of its own, which waits for a worker to join.
        """
        self._slots += [_Slot(worker) for worker in self._spares(workers)]
        live = [i for i, slot in enumerate(self._slots) if slot.alive]
        deal = _evenly(live, self._homes) if live else itertools.count(len(self._slots))
        for rank, home in zip(range(self.size, size), deal, strict=False):
            if not live:
                self._slots.append(_Slot(None, now, alive=False))
            self._homes.append(home)
            self._seats.append(home)
            self._pins.append({self._sentinel(rank)})
            self._repin(rank)

    def arrive(self, worker: WorkerId, now: float) -> bool:
        """Give a worker that joined its old slot, or else a free one; True if ranks sit on it now."""
        index = self._slot_for(worker, now)
        return index is not None and self._take(index, worker)

    def leave(self, address: str, now: float) -> bool:
        """Take a worker's address off its ranks; True if any sat there."""
        for index, slot in enumerate(self._slots):
            worker = self._live(slot)
            if worker is not None and worker.address == address:
                slot.alive, slot.lost_at = False, now
                ranks = [rank for rank, seat in enumerate(self._seats) if seat == index]
                for rank in ranks:
                    self._repin(rank)
                return bool(ranks)
        return False

    def fold(self, workers: Iterable[WorkerId], now: float) -> bool:
        """Seat ranks that have been lost for the grace time elsewhere; True if a rank moved.

        A worker that holds no slot takes the lost one whole; else the ranks go to the survivors with the fewest.
        """
        workers = list(workers)
        spares = self._spares(workers)
        here = {worker.address for worker in workers}
        moved = False
        for index in [i for i, slot in enumerate(self._slots) if self._expired(slot, now) and i in self._seats]:
            if spares:
                moved |= self._take(index, spares.pop(0))
                continue
            survivors = [i for i, slot in enumerate(self._slots) if (w := self._live(slot)) and w.address in here]
            if not survivors:
                return moved
            lost = [rank for rank, seat in enumerate(self._seats) if seat == index]
            for rank, seat in zip(lost, _evenly(survivors, self._seats), strict=False):
                self._seats[rank] = seat
                self._repin(rank)
                moved = True
        return moved

    def _take(self, index: int, worker: WorkerId) -> bool:
        """Put a worker in a slot: the ranks at home there come back to it, those folded onto it stay."""
        self._slots[index] = _Slot(worker)
        for rank, home in enumerate(self._homes):
            if home == index:
                self._seats[rank] = index
            if self._seats[rank] == index:
                self._repin(rank)
        return index in self._seats

    def _slot_for(self, worker: WorkerId, now: float) -> int | None:
        # A nanny has one worker: its newest address wins, even if the scheduler has not noticed the old one's death.
        for index, slot in enumerate(self._slots):
            if worker.nanny is not None and slot.worker is not None and slot.worker.nanny == worker.nanny:
                return index
        free = [index for index, slot in enumerate(self._slots) if not slot.alive]
        named = [index for index in free if (was := self._slots[index].worker) is not None and was.name == worker.name]
        # A slot past its grace time is given away before one whose own worker may be on its way back.
        late = sorted(free, key=lambda index: not self._expired(self._slots[index], now))
        return next(iter(named + late), None)

    def _spares(self, workers: Iterable[WorkerId]) -> list[WorkerId]:
        held = {worker.address for slot in self._slots if (worker := self._live(slot)) is not None}
        return sorted((worker for worker in workers if worker.address not in held), key=lambda worker: worker.order)

    def _expired(self, slot: _Slot, now: float) -> bool:
        return not slot.alive and now - slot.lost_at >= self.grace

    def _repin(self, rank: int) -> None:
        worker = self._live(self._slots[self._seats[rank]])
        pin = self._pins[rank]
        pin.clear()
        pin.add(self._sentinel(rank) if worker is None else worker.address)

    def _sentinel(self, rank: int) -> str:
        return f"rank {rank} of world {self.world} has no worker"

    @staticmethod
    def _live(slot: _Slot) -> WorkerId | None:
        return slot.worker if slot.alive else None


def _evenly(slots: list[int], taken: list[int]) -> Iterator[int]:
    """Slots for ever, each time the one with the fewest ranks, then the first; `taken` holds the slot of each rank now."""
    load = Counter(taken)
    heap = [(load[slot], slot) for slot in slots]
    heapq.heapify(heap)
    while True:
        count, slot = heap[0]
        heapq.heapreplace(heap, (count + 1, slot))
        yield slot
