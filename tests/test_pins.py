"""The table of ranks and workers as a pure value."""

from __future__ import annotations

import pytest

from daskmesh.pins import Table, WorkerId


def worker(i: int, *, nanny: bool = True, again: int = 0, name: str | None = None) -> WorkerId:
    """The worker of host i; `again` counts its restarts, which change address and process but not the nanny."""
    return WorkerId(f"tcp://h{i}:{again}", f"h{i}", f"tcp://h{i}:nanny" if nanny else None, name or f"n{i}")


def table(size: int, workers: list[WorkerId], grace: float = 10) -> Table:
    made = Table("w", "client", grace)
    made.grow(size, workers, now=0)
    return made


@pytest.mark.parametrize(
    ("ranks", "workers", "dealt"),
    [(1, 1, [0]), (3, 2, [0, 1, 0]), (5, 3, [0, 1, 2, 0, 1]), (2, 3, [0, 1]), (12, 11, [*range(11), 0])],
)
def test_ranks_are_dealt_round_robin_in_host_order_with_numbers_as_numbers(ranks, workers, dealt):
    ids = [worker(i) for i in range(workers)]
    assert table(ranks, ids[::-1]).addresses() == [ids[i].address for i in dealt]


def test_workers_of_one_host_go_by_nanny_address_then_name():
    same = [WorkerId(f"tcp://h:{9 - i}", "h", None, name) for i, name in enumerate(["10", "9", "tcp://h:5"])]
    assert table(3, same).addresses() == [same[i].address for i in (1, 0, 2)]


def test_growth_keeps_old_ranks_and_evens_out_the_load():
    a, b, c = map(worker, range(3))
    grown = table(3, [a, b])
    grown.grow(6, [a, b, c], now=0)
    assert grown.addresses() == [w.address for w in (a, b, a, c, b, c)]
    grown.grow(2, [a, b, c], now=0)
    assert grown.size == 6


def test_a_pin_is_one_set_for_good_and_never_empty():
    a, b = map(worker, range(2))
    ranks = table(2, [a, b])
    pin = ranks.pin(1)
    assert pin == {b.address}
    ranks.leave(b.address, now=1)
    assert len(pin) == 1
    assert not pin & {a.address, b.address}
    ranks.arrive(worker(1, again=1), now=2)
    assert pin == {worker(1, again=1).address}
    assert ranks.pin(1) is pin


def test_home_is_found_by_nanny_whatever_the_new_name():
    a, b = map(worker, range(2))
    ranks = table(2, [a, b])
    ranks.leave(a.address, now=1)
    ranks.leave(b.address, now=1)
    back = worker(1, again=1, name="renamed")
    assert ranks.arrive(back, now=2)
    assert ranks.addresses() == ["", back.address]


def test_home_is_found_by_name_when_the_nanny_is_new():
    a, b = map(worker, range(2))
    ranks = table(2, [a, b])
    ranks.leave(a.address, now=1)
    ranks.leave(b.address, now=1)
    back = worker(7, name="n1")
    assert ranks.arrive(back, now=2)
    assert ranks.addresses() == ["", back.address]


def test_a_stranger_takes_a_lost_slot_and_nothing_from_others():
    a, b = map(worker, range(2))
    ranks = table(2, [a, b])
    assert not ranks.arrive(worker(5), now=1)
    assert ranks.addresses() == [a.address, b.address]
    ranks.leave(b.address, now=1)
    assert ranks.arrive(worker(6, nanny=False), now=2)
    assert ranks.addresses() == [a.address, "tcp://h6:0"]


def test_a_stranger_takes_the_folded_slot_before_one_that_may_come_back():
    a, b, c = map(worker, range(3))
    ranks = table(3, [a, b, c])
    ranks.leave(c.address, now=0)
    assert ranks.fold([a, b], now=10)
    ranks.leave(b.address, now=11)
    ranks.arrive(worker(8), now=12)
    assert ranks.addresses() == [a.address, "", "tcp://h8:0"]


def test_folding_waits_for_the_grace_time_and_spreads_over_survivors():
    a, b, c = map(worker, range(3))
    ranks = table(9, [a, b, c])
    ranks.leave(c.address, now=5)
    assert not ranks.fold([a, b], now=14.9)
    assert ranks.fold([a, b], now=15)
    assert sorted(ranks.addresses()) == sorted([a.address] * 5 + [b.address] * 4)
    assert not ranks.fold([a, b], now=16)


def test_a_worker_without_ranks_takes_a_lost_slot_whole():
    a, b, spare = map(worker, range(3))
    ranks = table(4, [a, b])
    ranks.leave(b.address, now=0)
    assert ranks.fold([a, spare], now=10)
    assert ranks.addresses() == [a.address, spare.address] * 2


def test_folded_ranks_follow_their_host_home_and_go_home_themselves():
    a, b = map(worker, range(2))
    ranks = table(2, [a, b])
    ranks.leave(b.address, now=0)
    ranks.fold([a], now=10)
    assert ranks.addresses() == [a.address] * 2
    ranks.leave(a.address, now=11)
    assert ranks.addresses() == ["", ""]
    again = worker(0, again=1)
    ranks.arrive(again, now=12)
    assert ranks.addresses() == [again.address] * 2
    home = worker(1, again=1)
    ranks.arrive(home, now=13)
    assert ranks.addresses() == [again.address, home.address]


def test_with_no_survivor_ranks_wait():
    a = worker(0)
    ranks = table(2, [a])
    ranks.leave(a.address, now=0)
    assert not ranks.fold([], now=99)
    assert ranks.addresses() == ["", ""]
    assert ranks.arrive(worker(3), now=100)
    assert ranks.addresses() == ["tcp://h3:0"] * 2


def test_a_world_made_before_any_worker_is_dealt_as_they_come():
    ranks = table(3, [])
    assert ranks.addresses() == ["", "", ""]
    a, b = map(worker, range(2))
    ranks.arrive(a, now=1)
    ranks.arrive(b, now=2)
    assert ranks.addresses() == [a.address, b.address, ""]
    assert ranks.fold([a, b], now=10)
    assert "" not in ranks.addresses()


def test_a_restart_that_the_scheduler_noticed_late_is_no_loss():
    a, b = map(worker, range(2))
    ranks = table(2, [a, b])
    new = worker(1, again=1)
    ranks.arrive(new, now=1)
    assert not ranks.leave(b.address, now=2)
    assert ranks.addresses() == [a.address, new.address]
