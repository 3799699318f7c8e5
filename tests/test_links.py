"""Direct connections: order, many ranks over one socket, full sockets, stale attempts, aborts, losses."""

from __future__ import annotations

import multiprocessing
import socket
import threading
from typing import Any

import pytest
from gangs import KEY, close, lines

from daskmesh import wires
from daskmesh.links import Endpoint, RankLeft, Tag
from daskmesh.mesh import ProcessMesh
from daskmesh.wires import Address, PeerLost, Watch, dial


def test_messages_between_two_ranks_keep_their_order() -> None:
    table = lines(ProcessMesh([0, 1]), endpoints=2)
    for i in range(100):
        table[0].send(1, b"%d" % i)
    assert [bytes(table[1].receive(0)) for _ in range(100)] == [b"%d" % i for i in range(100)]
    close(table)


@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize("endpoints", [1, 2, 3, 5])
def test_every_rank_hears_every_other(endpoints: int, tcp: bool) -> None:
    table = lines(ProcessMesh(list(range(5))), endpoints=endpoints, tcp=tcp)
    heard: dict[tuple[int, int, int], bytes] = {}

    def talk(rank: int) -> None:
        for turn in range(20):
            for other in range(5):
                table[rank].send(other, b"%d %d %d" % (rank, other, turn))
            for other in range(5):
                heard[other, rank, turn] = bytes(table[rank].receive(other))

    threads = [threading.Thread(target=talk, args=(rank,)) for rank in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(heard) == 500
    assert all(text == b"%d %d %d" % key for key, text in heard.items())
    close(table)


def test_two_that_send_more_than_a_socket_holds_do_not_wait_for_each_other() -> None:
    table = lines(ProcessMesh([0, 1]), endpoints=2)
    body = bytes(8 * 2**20)
    got: dict[int, int] = {}

    def talk(rank: int) -> None:
        for _ in range(3):
            table[rank].send(1 - rank, body)
        got[rank] = sum(len(table[rank].receive(1 - rank)) for _ in range(3))

    threads = [threading.Thread(target=talk, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {0: 3 * len(body), 1: 3 * len(body)}
    close(table)


def test_a_ring_that_sends_more_than_a_socket_holds_goes_round() -> None:
    table = lines(ProcessMesh([0, 1, 2]), endpoints=3)
    got: dict[int, int] = {}

    def talk(rank: int) -> None:
        table[rank].send((rank + 1) % 3, bytes(2**22))
        got[rank] = len(table[rank].receive((rank + 2) % 3))

    threads = [threading.Thread(target=talk, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == dict.fromkeys(range(3), 2**22)
    close(table)


def raised_by(wait: threading.Thread, caught: list[BaseException]) -> BaseException:
    wait.join(20)
    assert not wait.is_alive()
    return caught[0]


def waiting(line: Any, source: int) -> tuple[threading.Thread, list[BaseException]]:
    """A thread that waits for a message that never comes, and what it will have caught."""
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            line.receive(source)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not line.endpoint.waiting():  # it is on its way to the lock, no more
        threading.Event().wait(0.001)
    return thread, caught


@pytest.mark.parametrize("endpoints", [1, 2])
def test_an_abort_wakes_who_waits_and_who_waits_later(endpoints: int) -> None:
    table = lines(ProcessMesh([0, 1, 2]), endpoints=endpoints)
    wait = waiting(table[1], 2)
    table[0].close(KeyError("rank 0 is out"))
    error = raised_by(*wait)
    assert isinstance(error, KeyError)
    with pytest.raises(KeyError, match="rank 0 is out"):
        table[2].receive(1)
    close(table)


def test_an_error_that_cannot_be_pickled_still_arrives() -> None:
    class Stubborn(Exception):
        def __reduce__(self) -> Any:
            raise TypeError("no")

    table = lines(ProcessMesh([0, 1]), endpoints=2)
    wait = waiting(table[1], 0)
    table[0].close(Stubborn("boom"))
    error = raised_by(*wait)
    assert isinstance(error, RuntimeError)
    assert str(error) == "Stubborn: boom"
    close(table)


@pytest.mark.parametrize("endpoints", [1, 2])
def test_a_rank_that_left_is_not_waited_for_but_what_it_sent_counts(endpoints: int) -> None:
    table = lines(ProcessMesh([0, 1]), endpoints=endpoints)
    table[0].send(1, b"last words")
    table[0].close()
    assert table[1].receive(0) == b"last words"
    with pytest.raises(RankLeft, match="rank 0 has returned from the region, but rank 1 waits for it"):
        table[1].receive(0)
    close(table)


def test_a_closed_endpoint_is_a_lost_peer() -> None:
    table = lines(ProcessMesh([0, 1]), endpoints=2)
    table[0].send(1, b"hello")
    assert table[1].receive(0) == b"hello"
    wait = waiting(table[1], 0)
    table[0].endpoint.close()
    assert isinstance(raised_by(*wait), PeerLost)
    with pytest.raises(PeerLost):
        table[1].send(0, b"are you there?")
    close(table)


def _die(pipe: Any, address: Address) -> None:
    end = Endpoint(KEY)
    end.send(address, Tag(7, 0, 1, 0), b"hello")
    pipe.send(end.address)
    pipe.recv()


@pytest.mark.processes
def test_a_killed_process_is_a_lost_peer() -> None:
    ours, theirs = multiprocessing.Pipe()
    end = Endpoint(KEY)
    child = multiprocessing.get_context("spawn").Process(target=_die, args=(theirs, end.address))
    child.start()
    address = ours.recv()
    assert end.receive(Tag(7, 0, 1, 0), address) == b"hello"
    child.kill()
    with pytest.raises(PeerLost):
        end.receive(Tag(7, 0, 1, 0), address, 20)
    child.join()
    end.close()


def test_messages_of_an_attempt_that_is_over_are_dropped() -> None:
    table = lines(ProcessMesh([0, 1]), endpoints=2)
    receiver, sender = table[1].endpoint, table[0].endpoint
    receiver.leave(7, 0)
    table[0].send(1, b"stale")
    sender.send(receiver.address, Tag(7, 1, 0, 1), b"fresh")
    assert receiver.receive(Tag(7, 1, 0, 1), sender.address, 20) == b"fresh"
    assert not any(tag.attempt == 0 for tag in receiver._mail)
    close(table)


def test_waiting_ends_with_the_timeout() -> None:
    table = lines(ProcessMesh([0, 1]), endpoints=2, timeout=0.05)
    with pytest.raises(TimeoutError, match=r"rank 1 has waited 0\.05 s for rank 0"):
        table[1].receive(0)
    close(table)


def test_a_timeout_of_months_is_one() -> None:
    table = lines(ProcessMesh([0, 1]), endpoints=2, timeout=1e8)
    table[0].endpoint._watch._credit = table[1].endpoint._watch._credit = 0
    timer = threading.Timer(0.05, table[0].send, (1, b"late"))
    timer.start()
    assert table[1].receive(0) == b"late"
    timer.join()
    close(table)


def test_one_that_does_not_know_the_key_gets_nowhere() -> None:
    end = Endpoint(KEY)
    assert dial(end.address, b"another key", "stranger") is None
    # One that says nothing keeps nobody waiting.
    mute = socket.socket(socket.AF_UNIX)
    mute.connect(end.address.local)
    friend = Endpoint(KEY)
    friend.send(end.address, Tag(1, 0, 0, 1), b"hello")
    assert end.receive(Tag(1, 0, 0, 1), friend.address, 20) == b"hello"
    for it in (mute, end, friend):
        it.close()


def test_where_no_road_holds_the_relay_carries_the_message() -> None:
    end = Endpoint(KEY)
    there = Address(end.address.name, "another machine")
    far = Endpoint(KEY, relay=lambda to, frame: end.deliver(frame))
    far.send(there, Tag(1, 0, 0, 1), b"by relay")
    assert end.receive(Tag(1, 0, 0, 1), far.address, 20) == b"by relay"
    with pytest.raises(PeerLost, match="no road"):
        end.send(Address("nobody", "another machine"), Tag(1, 0, 1, 0), b"")
    end.close()
    far.close()


class Clock:
    """Stands in for the time of `wires`: it goes on only while a CPU is given away, and this thread runs `share` of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, share: float, send_at: int | None = None) -> None:
        self.looks, self.share, self.send_at = 0, share, send_at
        self.watch, (self.near, self.far) = Watch(), socket.socketpair()
        self.watch.add(self.near)
        monkeypatch.setattr(wires, "time", self)
        monkeypatch.setattr(wires, "_yield", self.give_way)

    def perf_counter(self) -> float:
        return self.looks * wires.LOOK_SECONDS / 4

    def thread_time(self) -> float:
        return self.perf_counter() * self.share

    def give_way(self) -> None:
        self.looks += 1
        if self.looks == self.send_at:
            self.far.send(b"!")

    def close(self) -> None:
        self.near.close()
        self.far.close()


@pytest.mark.parametrize(
    ("share", "send_at", "credit", "after"),
    [
        (1.0, 3, 2, 3),  # it paid
        (1.0, 3, wires.CREDIT, wires.CREDIT),
        (0.5, 3, 2, 1),  # others had the CPU meanwhile
        (0.5, 3, 0, 0),
        (1.0, None, 2, 1),  # nothing came
    ],
)
def test_a_look_that_paid_makes_the_next_ones_longer(
    share: float, send_at: int | None, credit: int, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, share, send_at)
    clock.watch._credit, clock.watch._waits = credit, wires.TRY_AGAIN - 1
    assert clock.watch.wait(1e-3) == ([clock.near.fileno()] if send_at else [])
    assert clock.watch._credit == after
    assert clock.looks == (send_at or 40)  # all of the millisecond that was asked for, and no more
    clock.close()


def test_without_credit_it_looks_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 1.0)
    clock.watch._credit = 0
    for _ in range(2 * wires.TRY_AGAIN):
        assert clock.watch.wait(0.001) == []
    assert clock.looks == 2 * 4  # of the shortest kind
    clock.close()
