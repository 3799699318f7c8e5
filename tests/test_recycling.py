"""Memory of large arrays used again: what comes back, what is kept, and for how long."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from daskmesh import recycling
from daskmesh.recycling import LEAST, allow, empty, idle, trim


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    trim()
    monkeypatch.setattr(recycling, "IDLE_SECONDS", 3600.0)
    monkeypatch.setattr(recycling, "_allowed", {})
    before = recycling._cap
    allow("a", 16 * LEAST)
    yield
    recycling._cap = before
    trim()


def address(x: np.ndarray) -> int:
    return int(x.__array_interface__["data"][0])


@pytest.mark.parametrize("dtype", ["f8", "?", "c16", ">i4", "U3", "M8[s]", [("a", "i2"), ("b", "f8")]])
def test_arrays_are_ordinary_and_their_memory_comes_back(dtype: Any) -> None:
    n = 2 * LEAST // np.dtype(dtype).itemsize
    x = empty((n, 2), dtype)
    assert type(x) is np.ndarray
    assert (x.shape, x.dtype) == ((n, 2), dtype)
    assert x.flags.c_contiguous
    assert x.flags.writeable
    assert x.flags.aligned
    x[...] = np.zeros((), x.dtype)
    at, nbytes = address(x), x.nbytes
    del x
    assert idle() == nbytes
    y = empty((2, n), dtype)
    assert address(y) == at
    assert idle() == 0


def test_memory_stays_while_any_view_is_left() -> None:
    x = empty((LEAST,), "u1")
    x[:] = 7
    tail = x[5:].reshape(-1, 1)[::3]
    del x
    assert idle() == 0
    other = empty((LEAST,), "u1")
    other[:] = 8
    assert (tail == 7).all()
    del tail
    assert idle() == LEAST


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((), "f8"), ((0, 5), "f8"), ((LEAST - 1,), "u1"), ((17 * LEAST,), "u1"), ((LEAST,), "O")],
    ids=["0-d", "empty", "small", "beyond the cap", "objects"],
)
def test_what_the_allocator_does_as_well_is_left_to_it(shape: tuple[int, ...], dtype: str) -> None:
    x = empty(shape, dtype)
    assert x.shape == shape
    assert x.base is None
    del x
    assert idle() == 0


def test_a_piece_serves_what_is_a_little_smaller_and_the_smallest_that_serves_is_taken() -> None:
    sizes = [7 * LEAST, 4 * LEAST, 4 * LEAST + 64]
    made = {address(x): x.nbytes for x in [empty((n,), "u1") for n in sizes]}
    assert idle() == sum(sizes)
    x = empty((4 * LEAST - 8,), "u1")
    assert made[address(x)] == 4 * LEAST
    y = empty((5 * LEAST,), "u1")  # neither much too large nor too small
    assert address(y) not in made
    assert idle() == 11 * LEAST + 64


def test_the_cap_holds_and_the_oldest_goes_first() -> None:
    held = [empty((6 * LEAST,), "u1") for _ in range(3)]
    places = [address(x) for x in held]
    while held:
        del held[0]
    assert idle() == 12 * LEAST
    x = empty((6 * LEAST,), "u1")
    assert address(x) == places[2]
    del x
    x = empty((6 * LEAST,), "u1")
    y = empty((6 * LEAST,), "u1")
    assert [address(x), address(y)] == [places[2], places[1]]
    del x, y
    x = empty((6 * LEAST,), "u1")
    allow("a", 0)
    assert idle() == 0
    del x
    assert idle() == 0


def test_workers_of_one_process_keep_what_the_strictest_allows_and_nothing_when_all_are_gone() -> None:
    held = [empty((4 * LEAST,), "u1") for _ in range(3)]
    allow("b", 8 * LEAST)
    while held:
        del held[0]
    assert idle() == 8 * LEAST
    allow("b", 0)
    x, y = empty((9 * LEAST,), "u1"), empty((4 * LEAST,), "u1")
    del x
    assert idle() == 13 * LEAST
    allow("a", 0)
    assert idle() == 0
    del y
    assert idle() == 0


def test_what_is_idle_for_long_is_given_back() -> None:
    empty((LEAST,), "u1")
    assert idle() == LEAST
    trim(3600.0)
    assert idle() == LEAST
    trim(0.0)
    assert idle() == 0


def test_arrays_in_cycles_and_on_many_threads_all_come_back() -> None:
    def work() -> None:
        for i in range(20):
            x = empty((LEAST + i % 3,), "u1")
            x[::4096] = i
            loop: list[object] = [x]
            loop.append(loop)
            assert (x[::4096] == i).all()
            if i % 7 == 0:
                gc.collect()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert 0 < idle() <= 16 * LEAST
    trim()
    assert idle() == 0
