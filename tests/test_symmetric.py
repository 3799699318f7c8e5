"""Buffers without a cluster: operations, marks, versions, waiting, and what stays after the end."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from daskmesh import vm
from daskmesh.buffers import Buffer, Claim, PELostError
from daskmesh.store import close_store, open_store
from daskmesh.symmetric import INLINE_BYTES, Entry, SymmetricStore, close_symmetric, handlers, open_symmetric, symmetric_at

ALL = ((0, 3), (0, 4))


@pytest.fixture
def buffer() -> Iterator[Buffer]:
    buffer = Buffer((3, 4), np.dtype("f8"))
    yield buffer
    buffer.close(RuntimeError("over"))


def version(buffer: Buffer) -> int:
    return vm.read_word(vm.this_process(), buffer.claim("").word)


@pytest.mark.parametrize("dtype", ["?", "i1", "u8", "f2", "c16", "M8[s]", "U3", "S5", [("a", "i2"), ("b", "f8", (2,))]])
@pytest.mark.parametrize("shape", [(), (1,), (3, 2), (2, 1, 3, 2)])
def test_zeroed_and_read_back(dtype: Any, shape: tuple[int, ...]) -> None:
    buffer = Buffer(shape, np.dtype(dtype))
    span = tuple((0, n) for n in shape)
    zero = np.zeros(shape, dtype)
    assert buffer.perform("read", (span,)).tobytes() == zero.tobytes()
    bits = np.arange(zero.nbytes, dtype="u1") % 2 if dtype == "?" else np.arange(zero.nbytes, dtype="u1")
    value = zero if dtype == "U3" else np.frombuffer(bits.tobytes(), zero.dtype).reshape(shape)
    buffer.perform("put", (span, value, "set"), ("k", 0))
    assert buffer.perform("read", (span,)).tobytes() == value.tobytes()
    buffer.perform("clear_data", (span,), ("k", 1))
    assert buffer.perform("read", (span,)).tobytes() == zero.tobytes()
    buffer.close(RuntimeError("over"))


@pytest.mark.parametrize(
    ("how", "want"), [("set", [5.0, -5.0]), ("add", [8.0, -2.0]), ("max", [5.0, 3.0]), ("min", [3.0, -5.0])]
)
def test_puts(buffer: Buffer, how: str, want: list[float]) -> None:
    span = ((1, 2), (1, 3))
    buffer.perform("put", (ALL, np.full((3, 4), 3.0), "set"), ("k", 0))
    buffer.perform("put", (span, np.array([[5.0, -5.0]]), how), ("k", 1))
    expected = np.full((3, 4), 3.0)
    expected[1, 1:3] = want
    np.testing.assert_array_equal(buffer.perform("read", (ALL,)), expected)


def test_integers_wrap_around_and_floats_overflow_silently() -> None:
    small = Buffer((), np.dtype("i1"))
    small.perform("put", ((), np.array(127, "i1"), "set"), ("k", 0))
    small.perform("put", ((), np.array(1, "i1"), "add"), ("k", 1))
    assert small.perform("read", ((),)) == -128
    large = Buffer((1,), np.dtype("f4"))
    for i in range(2):
        large.perform("put", (((0, 1),), np.full(1, 3e38, "f4"), "add"), ("k", i))
    assert np.isinf(large.perform("read", (((0, 1),),)))[0]
    for buffer in small, large:
        buffer.close(RuntimeError("over"))


def test_what_comes_again_is_answered_as_it_was(buffer: Buffer) -> None:
    one = np.float64(1).tobytes()
    first = [buffer.perform("atomic", ("fetch_add", (0, 0), one), ("a", i)) for i in range(3)]
    again = [buffer.perform("atomic", ("fetch_add", (0, 0), one), ("a", i)) for i in range(3)]
    other = buffer.perform("atomic", ("fetch_add", (0, 0), one), ("b", 0))
    assert first == again
    assert [np.frombuffer(raw)[0] for raw in [*first, other]] == [0, 1, 2, 3]
    assert buffer.perform("read", (ALL,))[0, 0] == 4
    fresh = buffer.perform("epoch", ((0, 1),), ("a", 3)), buffer.perform("epoch", ((0, 1),), ("a", 3))
    assert fresh == (1, 1)


def test_an_operation_that_fails_is_not_remembered(buffer: Buffer) -> None:
    with pytest.raises(TypeError):
        buffer.perform("put", (ALL, np.full((3, 4), "x"), "set"), ("k", 0))
    buffer.perform("put", (ALL, np.ones((3, 4)), "set"), ("k", 0))
    assert buffer.perform("read", (ALL,)).sum() == 12
    assert version(buffer) % 2 == 0


def test_versions(buffer: Buffer) -> None:
    before = version(buffer)
    assert before % 2 == 0
    assert before > 0
    buffer.perform("put", (ALL, np.ones((3, 4)), "add"), ("k", 0))
    buffer.perform("put", (ALL, np.ones((3, 4)), "add"), ("k", 0))
    assert version(buffer) == before + 2
    buffer.perform("signal", ((0, None), 1, "set"), ("k", 1))
    buffer.perform("read", (ALL,))
    assert version(buffer) == before + 2
    word = buffer.claim("").word
    buffer.close(RuntimeError("over"))
    assert vm.read_word(vm.this_process(), word) == 0


def test_compare_swap_compares_values(buffer: Buffer) -> None:
    def swap(cond: float, value: float, i: int) -> float:
        operands = (np.float64(cond).tobytes(), np.float64(value).tobytes())
        raw = buffer.perform("atomic", ("compare_swap", (0, 0), *operands), ("k", i))
        return float(np.frombuffer(raw)[0])

    assert [swap(-0.0, 5, 0), swap(4, 6, 1), swap(5, np.nan, 2), swap(np.nan, 1, 3)][:3] == [0, 5, 5]
    assert np.isnan(buffer.perform("read", (ALL,))[0, 0])


@pytest.mark.parametrize(("value", "how", "want"), [(5, "set", 5), (5, "add", 12), (2**63 - 1, "add", -(2**63) + 6)])
def test_signals(buffer: Buffer, value: int, how: str, want: int) -> None:
    slot = (2, None)
    buffer.perform("signal", (slot, 7, "set"), ("k", 0))
    buffer.perform("signal", (slot, value, how), ("k", 1))
    assert buffer.perform("fetch_signal", (slot,)) == want
    buffer.perform("signal", ((-1, (0, 1)), 3, "add"), ("k", 2))
    buffer.perform("clear_signal", (), ("k", 3))
    assert buffer.perform("fetch_signal", (slot,)) == 0
    assert buffer.perform("fetch_signal", ((-1, (0, 1)),)) == 3  # barriers are no signals


def test_a_waiter_is_woken_and_remembers(buffer: Buffer) -> None:
    idle = threading.Event()
    found: list[int] = []
    tests = [((0, None), ">=", 2), ((1, None), "==", 7)]
    thread = threading.Thread(target=lambda: found.append(buffer.wait(tests, ("w", 0), 30, idle.set, every=False, clear=True)))
    thread.start()
    assert idle.wait(10)  # it has made room
    buffer.perform("signal", ((0, None), 1, "add"), ("k", 0))
    buffer.perform("signal", ((1, None), 7, "set"), ("k", 1))
    thread.join(10)
    assert found == [1]
    assert [buffer.perform("fetch_signal", ((row, None),)) for row in (0, 1)] == [1, 0]
    assert buffer.wait(tests, ("w", 0), 0, idle.set, every=False, clear=True) == 1  # it comes again
    with pytest.raises(TimeoutError, match="the slot of PE 0 is 1, wanted >= 2; the slot of PE 1 is 0, wanted == 7"):
        buffer.wait(tests, ("w", 1), 0, idle.set)


@pytest.mark.parametrize("why", [RuntimeError("freed"), PELostError("PE 3 is lost", 3)])
def test_the_end_wakes_who_waits_and_is_final(buffer: Buffer, why: Exception) -> None:
    idle, raised = threading.Event(), []

    def wait() -> None:
        try:
            buffer.wait([((0, None), "==", 1)], ("w", 0), 30, idle.set)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert idle.wait(10)
    buffer.close(why)
    thread.join(10)
    assert raised == [why]
    for kind, args in [("read", (ALL,)), ("signal", ((0, None), 1, "set"))]:
        with pytest.raises(type(why), match=str(why)):
            buffer.perform(kind, args)
    assert buffer.nbytes == 0


def test_a_busy_buffer_is_not_waited_for_on_an_event_loop(buffer: Buffer) -> None:
    with buffer.changed, pytest.raises(BlockingIOError):
        buffer.perform("read", (ALL,), block=False)


def test_errors_survive_a_pickle() -> None:
    error = pickle.loads(pickle.dumps(PELostError("PE 2 of 'tp' is lost", 2)))
    assert (str(error), error.pe) == ("PE 2 of 'tp' is lost", 2)


# -- stores and handlers --------------------------------------------------------------------------------------------------


@pytest.fixture
def store() -> Iterator[SymmetricStore]:
    shards = open_store("tcp://test:1")
    yield open_symmetric("tcp://test:1")
    close_symmetric("tcp://test:1")
    assert len(shards) == 0
    close_store("tcp://test:1")
    assert symmetric_at("tcp://test:1") is None


def ask(store: SymmetricStore, **message: Any) -> Any:
    return asyncio.run(handlers(store)["daskmesh_symmetric"](**message))


def test_a_store_counts_and_frees(store: SymmetricStore) -> None:
    claims = [store.make("t", "'tp'", pe, (2, 3), np.dtype("f4")) for pe in (0, 2)]
    assert (len(store), store.nbytes) == (2, 48)
    entry = store.open(Entry("t", "'tp'", (2, 3), np.dtype("f4"), tuple(claims)))
    assert store.find("t") is entry
    assert Claim.unpacked([*claims[0][:4], list(claims[0].process)]) == claims[0]
    store.free("t")
    store.free("t")
    assert (len(store), store.nbytes) == (0, 0)
    with pytest.raises(RuntimeError, match="'tp' was freed"):
        store.find("t")
    assert store.find("never there") is None


def test_a_lost_pe_ends_all_buffers(store: SymmetricStore, eventually: Callable[..., Any]) -> None:
    store.make("t", "'tp'", 0, (2,), np.dtype("f4"))
    store.lose("t", PELostError("PE 1 is lost", 1))
    store.lose("t", PELostError("PE 2 is lost", 2))  # the first one counts
    eventually(lambda: store.nbytes == 0)
    with pytest.raises(PELostError, match="PE 1"):
        store.buffer("t", 0)
    answer = ask(store, tensor="t", pe=0, kind="read", args=(((0, 2),),))
    assert answer["status"] == "gone"
    assert pickle.loads(answer["error"]).pe == 1


def test_handlers(store: SymmetricStore) -> None:
    store.make("t", "'tp'", 0, (3, 4), np.dtype("f8"))
    put = {"tensor": "t", "pe": 0, "kind": "put", "args": (ALL, "add"), "mark": ("k", 0)}
    for _ in range(2):
        assert ask(store, **put, data=np.ones((3, 4)))["status"] == "OK"
    small = ask(store, tensor="t", pe=0, kind="take", args=(((0, 1), (1, 3)), INLINE_BYTES))["answer"]
    np.testing.assert_array_equal(small.data, [[1, 1]])
    assert ask(store, tensor="t", pe=1, kind="read", args=(ALL,))["status"] == "unknown"
    wrong = ask(store, tensor="t", pe=0, kind="put", args=(ALL, "set"), data=np.ones(5), mark=("k", 1))
    assert wrong["status"] == "failed"
    assert isinstance(pickle.loads(wrong["error"]), ValueError)


def test_large_views_are_copied_aside_and_dropped(store: SymmetricStore) -> None:
    shards = open_store("tcp://test:1")
    store.make("t", "'tp'", 0, (3, 4), np.dtype("f8"))
    ticket = pickle.loads(ask(store, tensor="t", pe=0, kind="take", args=(ALL, 0))["answer"])
    assert (ticket.shape, shards.nbytes) == ((3, 4), 96)
    ask(store, tensor="t", pe=0, kind="put", args=(ALL, "set"), data=np.ones((3, 4)), mark=("k", 0))
    assert not shards.get(ticket.id).any()  # as it was at one moment
    ask(store, tensor="t", pe=0, kind="dropped", args=(ticket.key,))
    assert shards.nbytes == 0
