"""The shard store and the roads, without worker processes: memory is read from this process as it would be from another."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import mmap
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import dask
import numpy as np
import pytest
from conftest import child_environment, local_cluster
from dask.sizeof import sizeof
from distributed import Client, Worker, get_worker

from daskmesh import config, fetch, segments, store, transport, views, vm
from daskmesh.fetch import Budget, Load

DTYPES = ["?", "i1", "u8", "f2", ">f8", "c16", "M8[ns]", "S3", [("a", "i2"), ("b", "f8", 2)]]


def filled(shape: tuple[int, ...], dtype: Any = "f8") -> np.ndarray[Any, Any]:
    """An array with no two equal neighbours."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    data = np.random.default_rng(count).integers(0, 2, count, np.uint8) if np.dtype(dtype) == bool else None
    raw = np.arange(count, dtype=np.uint32).astype(np.uint8) if data is None else data
    return np.ndarray(shape, dtype, raw)


def same(left: Any, right: Any) -> bool:
    """Equal to the last byte, NaN and padding included."""
    return left.shape == right.shape and left.dtype == right.dtype and left.tobytes() == right.tobytes()


def read_here(array: Any, index: tuple[Any, ...], out: Any, generation: int = 7) -> None:
    """Read a view of an array of this process over the vm road."""
    word = vm.Word()
    word.value = 7
    view = views.view_of(array.ctypes.data, array.strides, views.normal_index(index, array.shape), out)
    try:
        vm.read(vm.this_process(), view, word.address, generation)
    finally:
        word.give_back()


# -- indices ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "normal"),
    [
        ((), (slice(0, 2), slice(0, 5))),
        ((slice(None, 1),), (slice(0, 1), slice(0, 5))),
        ((np.int64(1), slice(2, 2)), (1, slice(2, 2))),
        ((slice(0, 2, 1), 4), (slice(0, 2), 4)),
    ],
)
def test_normal_index(index: tuple[Any, ...], normal: tuple[Any, ...]) -> None:
    assert views.normal_index(index, (2, 5)) == normal


@pytest.mark.parametrize(
    "index", [(2,), (-1,), (slice(-1, 1),), (slice(1, 0),), (slice(0, 3),), (slice(0, 2, 2),), (0, 0, 0)]
)
def test_index_out_of_bounds(index: tuple[Any, ...]) -> None:
    with pytest.raises(IndexError, match="load: "):
        transport.load(transport.expose(np.zeros((2, 5))), index)


# -- the store ----------------------------------------------------------------------------------------------------


def test_a_ticket_outside_workers_holds_the_array() -> None:
    array = filled((3, 4))[:, ::2]
    ticket = transport.expose(array)
    assert transport.local_array(ticket) is array
    assert sizeof(ticket) > array.nbytes
    there = pickle.loads(pickle.dumps(ticket))
    assert same(transport.load(there, (1,)), array[1])


def test_store_entries_live_until_their_key_is_freed() -> None:
    held = store.ShardStore("tcp://a:1")
    first, second = held.put("x", [filled((4,)), filled((2, 3), "f4")])
    (other,) = held.put(("y", 0), [3.0])
    assert (len(held), held.nbytes) == (3, 32 + 24 + 8)
    assert held.get(other.id).shape == ()
    assert len({first.id, second.id, other.id}) == 3
    assert sizeof(first) < 1024
    assert len(pickle.dumps(first)) < 700
    held.free("x")
    held.free("x")
    assert (len(held), held.nbytes) == (1, 8)
    for ticket in (first, second):
        with pytest.raises(transport.TicketLost, match="tcp://a:1"):
            held.get(ticket.id)


def test_exposing_again_kills_the_first_entry() -> None:
    held = store.ShardStore("tcp://a:1")
    (old,) = held.put("x", [filled((4,))])
    (new,) = held.put("x", [filled((4,))])
    assert len(held) == 1
    assert vm.read_word(vm.this_process(), old.word) != old.id
    assert vm.read_word(vm.this_process(), new.word) == new.id
    with pytest.raises(transport.TicketLost):
        held.get(old.id)
    held.clear()
    assert vm.read_word(vm.this_process(), new.word) == 0
    assert len(held) == 0


def test_the_word_is_zero_before_the_array_goes() -> None:
    seen: list[int] = []

    class Watched(np.ndarray):
        def __del__(self) -> None:
            seen.append(vm.read_word(vm.this_process(), word))

    held = store.ShardStore("tcp://a:1")
    (ticket,) = held.put("x", [filled((4,))])
    word = ticket.word
    entry = held._entries[ticket.id]
    entry.array = entry.array.view(Watched)
    del entry
    held.free("x")
    assert seen == [0]


def test_words_are_used_again_with_other_generations() -> None:
    held = store.ShardStore("tcp://a:1")
    tickets = []
    for _ in range(1200):
        tickets += held.put("x", [np.zeros(1)])
    assert len({ticket.word for ticket in tickets}) <= 3
    assert len({ticket.id for ticket in tickets}) == 1200


def test_a_worker_without_a_store_says_what_to_call(embedded: None) -> None:
    with local_cluster(n_workers=1, processes=False) as cluster, Client(cluster) as client:
        with pytest.raises(RuntimeError, match="init_parallel_env"):
            client.submit(transport.expose, np.zeros(3)).result()


# -- same process -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, "O"])
def test_load_every_dtype(dtype: Any) -> None:
    array = np.array([[1, "a", None]], object) if dtype == "O" else filled((3, 5), np.dtype(dtype))
    got = transport.load(transport.expose(array), (slice(0, 1), slice(1, 3)))
    assert same(got, array[0:1, 1:3])


def test_load_edges() -> None:
    scalar = transport.expose(np.array(3.0))
    assert transport.load(scalar, ()) == 3.0
    assert transport.load(transport.expose(np.zeros((0, 4)))).shape == (0, 4)
    out = np.ones((2, 0))
    transport.load_into(transport.expose(np.zeros((2, 5))), (slice(0, 2), slice(3, 3)), out)
    result = transport.load(transport.expose(np.broadcast_to(np.arange(3.0), (4, 3))), (slice(1, 3),))
    assert result.tolist() == [[0, 1, 2]] * 2
    result[...] = 0  # a fresh array, not a view


def test_load_converts_only_within_a_kind() -> None:
    ticket = transport.expose(np.arange(3.5, 6.5))
    out = np.zeros(3, "f4")
    transport.load_into(ticket, (), out)
    assert out.tolist() == [3.5, 4.5, 5.5]
    with pytest.raises(TypeError):
        transport.load_into(ticket, (), np.zeros(3, int))


@pytest.mark.parametrize(
    ("out", "says"), [(np.zeros((2, 4)), r"\(2, 4\)"), (np.broadcast_to(np.zeros(3), (2, 3)), "read-only")]
)
def test_load_checks_out(out: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        transport.load_into(transport.expose(np.zeros((2, 3))), (), out)


def test_masked_arrays_keep_their_mask() -> None:
    array = np.ma.masked_array([1, 2, 3], [False, True, False])
    got = transport.load(transport.expose(array), (slice(1, 3),))
    assert got.mask.tolist() == [True, False]


def test_unknown_road() -> None:
    with dask.config.set({"daskmesh.transport": "pigeon"}), pytest.raises(ValueError, match="auto, vm, shm, rpc"):
        transport.load(transport.expose(np.zeros(3)))


# -- reading memory -----------------------------------------------------------------------------------------------


def some_case(rng: np.random.Generator) -> tuple[Any, tuple[Any, ...], Any]:
    """A strided source, an index of it, and a strided array to write to."""
    ndim = int(rng.integers(0, 5))
    dtype = np.dtype(DTYPES[rng.integers(len(DTYPES))])
    array = filled(tuple(int(n) for n in rng.integers(1, 40 if ndim < 3 else 7, ndim)), dtype)
    steps = [slice(None, None, int(step)) for step in rng.choice([1, 1, 2, -1, -3], ndim)]
    array = array.transpose(rng.permutation(ndim))[(*steps, ...)]
    index: list[Any] = []
    for n in array.shape:
        start = int(rng.integers(0, n))
        index.append(start if rng.random() < 0.2 else slice(start, int(rng.integers(start + 1, n + 1))))
    shape = array[(*index, ...)].shape
    order = rng.permutation(len(shape))
    room = np.zeros(tuple(2 * shape[axis] for axis in order), dtype).transpose(np.argsort(order))
    cuts = [[slice(0, n), slice(0, 2 * n, 2), slice(n - 1, None, -1)][rng.integers(3)] for n in shape]
    return array, tuple(index), room[(*cuts, ...)]


LIMITS = [{}, {"CALL_BYTES": 500, "CALL_RUNS": 5, "BUFFER_BYTES": 90, "MANY_RUNS": 7}, {"GAP_BYTES": 0, "SHORT_RUN": 0}]


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("seed", range(3))
def test_any_view_against_numpy(seed: int, limits: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(vm, name, value)
    rng = np.random.default_rng(seed)
    for _ in range(150):
        array, index, out = some_case(rng)
        read_here(array, index, out)
        assert same(out, array[(*index, ...)]), (array.shape, array.strides, array.dtype, index, out.strides)


def test_broadcast_memory_is_read_once(calls: list[int]) -> None:
    array = np.broadcast_to(filled((3, 1, 2)), (3, 1000, 2))
    out = np.zeros(array.shape)
    read_here(array, (), out)
    assert same(out, array)
    assert sum(calls) < 200


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each call, its runs checked against the kernel's limit."""
    seen: list[int] = []
    call = vm._call

    def counted(pid: int, remote: Any, local: Any) -> int:
        assert max(len(remote), len(local)) <= 1024
        assert remote[:, 1].sum() == local[:, 1].sum()
        seen.append(int(remote[:, 1].sum()))
        return call(pid, remote, local)

    monkeypatch.setattr(vm, "_call", counted)
    return seen


@pytest.mark.parametrize("shape", [(100_000,), (10, 10_000), (50_000, 2)])
def test_views_beyond_what_a_call_reads_are_cut(
    shape: tuple[int, ...], calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vm, "CALL_BYTES", 65_000)
    array, out = filled(shape), np.empty(shape)
    read_here(array, (), out)
    assert same(out, array)
    assert len(calls) >= 12
    assert max(calls) <= 65_008


def test_many_short_runs_are_cut(calls: list[int]) -> None:
    array = filled((6000, 300))  # runs of 8 bytes, too far apart to be read in one go
    out = np.empty(6000)
    read_here(array, (slice(None), 3), out)
    assert same(out, array[:, 3])
    assert len(calls) == 6


def test_a_wrong_word_is_never_data() -> None:
    array, out = filled((100,)), np.empty(100)
    with pytest.raises(vm.Gone):
        read_here(array, (), out, generation=8)


def test_used_again_memory_is_never_data() -> None:
    held = store.ShardStore("tcp://a:1")
    block = np.zeros(1000)  # stands for an address that the allocator hands out again
    (old,) = held.put("x", [block[:]])
    held.free("x")
    block[...] = -1
    (new,) = held.put("y", [block[:]])
    assert (old.pointer, old.word) == (new.pointer, new.word)
    view = views.View(old.pointer, old.strides, np.empty(1000))
    with pytest.raises(vm.Gone):
        vm.read(vm.this_process(), view, old.word, old.id)
    vm.read(vm.this_process(), view, new.word, new.id)
    assert (view.out == -1).all()


def test_memory_that_cannot_be_read_is_not_a_lost_ticket() -> None:
    pages = mmap.mmap(-1, 8192, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(8192), 0) == 0
    word = vm.Word()
    word.value = 7
    view = views.View(address, (8,), np.empty(100))
    with pytest.raises(vm.Unreadable):
        vm.read(vm.this_process(), view, word.address, 7)
    with pytest.raises(vm.Gone):
        vm.read(vm.this_process(), view, word.address, 8)
    word.give_back()


def test_only_the_process_that_announced_itself_is_read() -> None:
    here = vm.this_process()
    assert vm.refusal(here) == ""
    assert "announced" in vm.refusal(here._replace(nonce=b"0" * 16))
    assert "namespace" in vm.refusal(here._replace(pids="pid:[1]"))
    assert "host" in vm.refusal(here._replace(host="elsewhere"))


def test_a_refusal_is_found_out_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[int] = []

    def refused(pid: int, remote: Any, local: Any) -> int:
        tries.append(pid)
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(vm, "_call", refused)
    other = vm.this_process()._replace(nonce=b"1" * 16)
    with caplog.at_level("INFO", "daskmesh"):
        assert vm.refusal(other) == vm.refusal(other) == "process_vm_readv: Operation not permitted"
    assert len(tries) == len(caplog.records) == 1


def test_a_process_that_has_ended_is_gone() -> None:
    child = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    ended = vm.this_process()._replace(pid=int(child.stdout))
    with pytest.raises(vm.Gone):
        vm.refusal(ended)
    with pytest.raises(vm.Gone):
        vm.read_word(ended, 4096)


# -- shared memory ------------------------------------------------------------------------------------------------


def test_segments_are_used_again_and_nameless() -> None:
    here = vm.this_process()
    segments.throw_away()
    mappings = segments.Mappings()
    first = segments.take(here)
    assert mappings.find(first.name) is not None
    segments.give(here, first)
    assert not first.path.exists()
    assert segments.take(here._replace(pid=1)) is not first
    assert segments.take(here) is first
    assert mappings.find(first.name) is not None  # mapped, though it has no name any more
    mappings.clear()
    assert mappings.find(first.name) is None
    with pytest.raises(ValueError, match="not the name"):
        mappings.find("../../etc/passwd")
    for path in segments.DIRECTORY.glob(segments._prefix() + "*"):
        assert segments._left(path.name) is False
        path.unlink()


def test_leftovers_of_a_killed_process_are_removed() -> None:
    code = "from daskmesh.segments import Segment; import os, signal; s = Segment(); print(s.name, flush=True); signal.pause()"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=child_environment())
    assert child.stdout is not None
    name = child.stdout.readline().strip()
    assert name not in segments.remove_leftovers()
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert name in segments.remove_leftovers()
    assert not (segments.DIRECTORY / name).exists()


# -- asking for views ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7, 5), (1, 35), (35,), ()])
def test_pieces_cover_a_load(shape: tuple[int, ...]) -> None:
    array, out = filled(shape), np.zeros(shape)
    load = Load(transport.expose(array), views.normal_index((), shape), out)
    for piece in fetch.pieces(load, 48):
        assert piece.nbytes <= 48
        piece.out[...] = array[(*piece.index, ...)]
    assert same(out, array)


def test_messages_hold_many_small_views_and_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MESSAGE_BYTES", 100)
    ticket = transport.expose(np.zeros(40))
    loads = [Load(ticket, (slice(i, i + n),), np.zeros(n)) for i, n in ((0, 3), (3, 3), (6, 30), (36, 1))]
    messages = fetch.batches(loads)
    assert [batch.nbytes for batch in messages] == [48, 96, 96, 56]
    assert [len(batch.loads) for batch in messages] == [2, 1, 1, 2]


def test_the_budget_is_kept_to() -> None:
    async def main() -> Budget:
        budget = Budget()
        arrived: list[int] = []

        async def message(nbytes: int) -> None:
            await budget.take(nbytes)
            await asyncio.sleep(0)
            arrived.append(nbytes)
            budget.give(nbytes)

        await asyncio.gather(*[message(n) for n in (60, 60, 30, 500, 10, 60)])
        assert sorted(arrived) == [10, 30, 60, 60, 60, 500]
        return budget

    with dask.config.set({"daskmesh.max-inflight-bytes": 100}):
        budget = asyncio.run(main())
    assert (budget.used, budget.messages, budget.peak) == (0, 0, 500)  # one message alone may be larger than all


# -- workers of one process ---------------------------------------------------------------------------------------


def setup(dask_worker: Worker) -> None:
    """Give a worker its store, as the worker plugin does."""
    transport.setup_worker(dask_worker)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Two workers in this process."""
    with local_cluster(n_workers=2, threads_per_worker=1, processes=False) as cluster:
        with Client(cluster, set_as_default=False) as client:
            client.run(setup)
            yield client


def workers(client: Client) -> list[str]:
    """Addresses of the workers."""
    return sorted(client.scheduler_info()["workers"])


def load_on(road: str, ticket: transport.Ticket, index: tuple[Any, ...]) -> tuple[Any, dict[str, Any]]:
    """Load in a task; with what this worker loaded."""
    transport.reset_stats()
    with dask.config.set({"daskmesh.transport": road}):
        got = transport.load(ticket, index)
    moved = transport.stats(get_worker().address)
    return got, {name: road["bytes"] for name, road in moved.items() if road["loads"]}


@pytest.mark.cluster
@pytest.mark.parametrize(("road", "taken"), [("auto", "same"), ("vm", "same"), ("shm", "same"), ("rpc", "rpc")])
@pytest.mark.parametrize("dtype", ["f8", "O", [("a", "i2"), ("b", "f8")]])
def test_workers_of_one_process(client: Client, road: str, taken: str, dtype: Any) -> None:
    owner, reader = workers(client)
    array = np.array([[{1}, "b", None]] * 2) if dtype == "O" else filled((5, 4), np.dtype(dtype))[:, ::2]
    ticket = client.submit(transport.expose, array, workers=[owner], pure=False)
    got, moved = client.submit(load_on, road, ticket, (1,), workers=[reader], pure=False).result()
    assert got.tolist() == array[1].tolist()
    assert moved == {taken: array[1].nbytes}
    got[...] = np.zeros((), got.dtype)  # no part of the exposed array
    _, moved = client.submit(load_on, road, ticket, (1,), workers=[owner], pure=False).result()
    assert moved == {"same": array[1].nbytes}
    assert transport.local_array(ticket.result()).tolist() == array.tolist()


@pytest.mark.cluster
def test_arrays_of_other_kinds_go_by_rpc(client: Client) -> None:
    owner, reader = workers(client)
    array = np.ma.masked_array(np.arange(6), [True, False] * 3)
    ticket = client.submit(transport.expose, array, workers=[owner], pure=False)
    assert ticket.result().kind == "other"
    got, moved = client.submit(load_on, "rpc", ticket, (slice(1, 5),), workers=[reader], pure=False).result()
    assert got.tolist() == [1, None, 3, None]
    assert moved == {"rpc": 32}


@pytest.mark.cluster
def test_load_refuses_to_block_the_event_loop(client: Client) -> None:
    owner, reader = workers(client)
    ticket = client.submit(transport.expose, np.zeros(3), workers=[owner], pure=False).result()

    async def load() -> None:
        load_on("rpc", ticket, ())

    with pytest.raises(RuntimeError, match="from a thread"):
        client.submit(load, workers=[reader], pure=False).result()


@pytest.mark.cluster
def test_metric_and_release(client: Client) -> None:
    owner = workers(client)[0]
    ticket = client.submit(transport.expose, np.zeros(1000), "mine", workers=[owner], pure=False).result()
    held = store.store_at(owner)
    assert held is not None
    assert held.get(ticket.id).nbytes == 8000
    metrics = client.run(lambda dask_worker: dask_worker.metrics["daskmesh"](dask_worker))[owner]
    assert metrics["held"]["bytes"] >= 8000
    transport.release(owner, "mine")
    transport.release(owner, "unknown")
    with pytest.raises(transport.TicketLost):
        transport.local_array(ticket)
    with pytest.raises(transport.TicketLost):
        client.submit(transport.load, ticket, workers=[owner], pure=False).result()


@pytest.mark.cluster
def test_teardown_leaves_nothing(embedded: None) -> None:
    with local_cluster(n_workers=1, processes=False) as cluster, Client(cluster) as client:
        client.run(setup)
        client.run(setup)
        (address,) = workers(client)
        ticket = client.submit(transport.expose, np.zeros(10)).result()
        assert transport.load(ticket).shape == (10,)
        client.run(lambda dask_worker: transport.teardown_worker(dask_worker))
        assert store.store_at(address) is None
        with pytest.raises(transport.TicketLost, match="closed"):
            transport.load(ticket)
    assert config.get("transport") == "auto"
