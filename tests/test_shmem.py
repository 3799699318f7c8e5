"""The shmem family on a cluster inside this process: the cases of the specification in both modes."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from conftest import local_cluster
from distributed import Client, Event, get_client, wait
from shmem_cases import ADD, GE, LOADS, MESH, MODES, PROGRAMS, REFUSED, VAIN, WAITS, Boxed, N, block, check, filled, run

import daskmesh as dm
from daskmesh import DTensor, PELostError, Replicate, Shard
from daskmesh.shmem_ops import _ACTORS
from daskmesh.symmetric import _STORES

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Two workers with one thread each: whatever waits must make room."""
    dm.shutdown()
    with (
        local_cluster(n_workers=2, threads_per_worker=1, processes=False, memory_limit=0) as cluster,
        Client(cluster) as client,
    ):
        yield client
        dm.shutdown()


@pytest.fixture
def tensor(client: Client) -> Iterator[dm.ShmemTensor]:
    with filled() as tensor:
        yield tensor
    assert held() == 0


@pytest.fixture(scope="module")
def constant(client: Client) -> Iterator[dm.ShmemTensor]:
    """For tests that change nothing."""
    with filled(group="tp2") as tensor:
        yield tensor


def held() -> int:
    """Bytes of all buffers that are no `constant`'s."""
    return sum(b.nbytes for s in _STORES.values() for e in s.entries.values() for b in e.buffers.values() if e.title != "'tp2'")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOADS)
def test_loads(constant: dm.ShmemTensor, name: str, mode: str) -> None:
    program, want = LOADS[name]
    check(run(mode, program, constant), want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_cases(tensor: dm.ShmemTensor, name: str, mode: str) -> None:
    program, want = PROGRAMS[name]
    check(run(mode, program, tensor), want)


@pytest.mark.parametrize("name", ["2 view", "17 put", "29 a counter", "34 barrier", "40 fetch_add"])
def test_without_graph_optimisation(tensor: dm.ShmemTensor, name: str) -> None:
    program, want = (LOADS | PROGRAMS)[name]
    check(run("client", program, tensor, optimize=False), want)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_the_client_before_anything_is_recorded(constant: dm.ShmemTensor, name: str) -> None:
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call(constant)
    assert constant.pending == []


def test_refused_inside_a_region(constant: dm.ShmemTensor) -> None:
    def program() -> Any:
        said = {}
        for name, (call, _, _) in REFUSED.items():
            try:
                call(constant)
            except Exception as error:
                said[name] = error
        return Boxed(said)

    for value in dask.compute(*dm.local_map(program, [None], process_mesh=constant.mesh)()):
        for name, (_, error, message) in REFUSED.items():
            with pytest.raises(error, match=message):
                raise value.value[name]
    for pe in range(N):
        np.testing.assert_array_equal(dm.shmem_load(constant, pe).compute(), block(pe))


# -- placements and kinds -----------------------------------------------------------------------------------------------


def test_what_loads_give_on_the_client(tensor: dm.ShmemTensor) -> None:
    same = dm.shmem_load(tensor, 1)
    assert (same.placements, same.shape, same.process_mesh) == ((Replicate(),), (4, 6), tensor.mesh)
    for rank in range(N):
        np.testing.assert_array_equal(same.local_value(rank), block(1))
    ring = dm.shmem_load(tensor, lambda rank: (rank + 1) % N, [2, 6], [1, 0])
    assert (ring.placements, ring.shape) == ((Shard(0),), (8, 6))
    np.testing.assert_array_equal(ring, np.concatenate([block((pe + 1) % N)[1:3] for pe in range(N)]))
    assert int(np.sum(same)) == 2820


KINDS = [("?", ()), ("i1", (5,)), ("u8", (2, 3, 2)), ("f2", ()), ("c16", (5,)), ("M8[s]", (1, 1)), ("U3", ()), (">i4", (3,))]


@pytest.mark.parametrize(("dtype", "shape"), KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_16_ranks_and_dtypes(client: Client, dtype: str, shape: tuple[int, ...], mode: str) -> None:
    value = np.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2 + 1).astype(dtype)

    def program(m: Any, t: Any) -> Any:
        done = m.then(dm.shmem_put(value, (0,) * len(shape), t, 1, by=0))
        return m.value(dm.shmem_load(t, 1, pred=done)), m.value(dm.shmem_load(t, 0, pred=done))

    with dm.create_shmem_tensor("two", 2, dtype, shape) as t:
        got = run(mode, program, t)
        for one, other in got if mode == "region" else [got]:
            check(one, value)
            check(other, np.zeros(shape, dtype))


@pytest.mark.parametrize(("small", "large"), [("f2", "f4")])
def test_24_half_floats_add_into_single(client: Client, small: str, large: str) -> None:
    with dm.create_shmem_tensor("two", 2, large, [2]) as t:
        put = dm.shmem_put(np.array([1.5, 2], small), [0], t, 0, put_op=ADD)
        check(dm.shmem_load(t, 0, pred=put).compute(), np.array([3, 4], large))
        with pytest.raises(TypeError, match="float16"):
            dm.shmem_put(np.ones(2, small), [0], t, 0)


def test_zero_d_pieces_are_put_one_after_the_other(client: Client) -> None:
    with dm.create_shmem_tensor("tp", N, "i4", []) as t:
        x = dm.dtensor_from_local([np.array(pe, "i4") for pe in range(N)], t.mesh, [dm.Partial()])
        put = dm.shmem_put(x, [], t, lambda rank: rank)
        check(dm.shmem_load(t, lambda rank: N - 1 - rank, pred=put).compute(), np.array([3, 2, 1, 0], "i4"))


# -- order on the client --------------------------------------------------------------------------------------------------


def test_20_what_may_be_pred(client: Client, tensor: dm.ShmemTensor) -> None:
    token = dm.shmem_put([[7]], [0, 0], tensor, 1)
    big = da.ones((2000, 1000), chunks=(1000, 1000)).persist()
    wait(big)
    before = client.who_has(big)
    x = dm.ones(8, mesh=tensor.mesh, placements=[Shard(0)])
    for pred in (token, [], None, [token, None], big, [big, token], x, [x, dask.delayed(int)()], (token,)):
        dm.shmem_load(tensor, 1, pred=pred).persist()
    assert client.who_has(big) == before
    with pytest.raises(TypeError, match="pred must be a token"):
        dm.shmem_load(tensor, 1, pred=3)
    with pytest.raises(TypeError, match="pred must be a token"):
        dm.shmem_load(tensor, 1, pred=np.ones(3))


def test_many_tokens_are_joined(tensor: dm.ShmemTensor) -> None:
    puts = [dm.shmem_put([[v]], divmod(v, 6), tensor, 1, by=v % N) for v in range(24)]
    check(dm.shmem_load(tensor, 1, pred=puts).compute(), np.arange(24, dtype="i4").reshape(4, 6))


def test_21_a_failing_pred(tensor: dm.ShmemTensor) -> None:
    def fail() -> None:
        raise RuntimeError("x")

    with pytest.raises(RuntimeError, match=r"^x$"):
        dm.shmem_load(tensor, 1, pred=dask.delayed(fail)()).compute()


def test_25_a_put_that_runs_twice_is_applied_once(client: Client) -> None:
    with dm.create_shmem_tensor("tp", N, "f4", [2, 2]) as t:
        x = dm.dtensor_from_local([np.full((2, 2), pe + 1, "f4") for pe in range(N)], t.mesh, [Shard(0)])
        put = dm.shmem_put(x, [0, 0], t, 0, put_op=ADD)
        added = dm.shmem_atomic_fetch_add(t, (1, 1), 1, 1)
        for _ in range(3):  # each time the tasks run again, because nobody kept their results
            put.compute()
            first = added.tolist()
        check(dm.shmem_load(t, 0).compute(), np.full((2, 2), 10, "f4"))
        assert sorted(first) == [0, 1, 2, 3]
        assert dm.shmem_atomic_fetch(t, (1, 1), 1, by=0).item() == N


def test_26_sync_and_quiet(client: Client, tensor: dm.ShmemTensor) -> None:
    dm.shmem_put([[1]], [0, 0], tensor, 1)
    dm.shmem_put([[2]], [0, 1], tensor, 1)
    check(dm.shmem_load(tensor, 1, [1, 2], pred=dm.shmem_quiet(tensor)).compute(), np.array([[1, 2]], "i4"))
    assert len(tensor.pending) == 1
    dm.shmem_put([[3]], [0, 2], tensor, 1, pred=tensor.pending[0])
    assert len(tensor.pending) == 1
    dm.sync(tensor)
    assert tensor.pending == []
    check(dm.shmem_load(tensor, 1, [1, 3]).compute(), np.array([[1, 2, 3]], "i4"))


def test_a_token_is_a_collection(client: Client, tensor: dm.ShmemTensor) -> None:
    token = dm.shmem_put([[5]], [0, 0], tensor, 2)
    assert dask.is_dask_collection(token)
    held_token = token.persist()
    wait(held_token)
    assert dask.compute(token, da.ones(2).sum(), held_token) == (None, 2.0, None)
    check(dm.shmem_load(tensor, 2, [1, 1], pred=held_token).compute(), np.array([[5]], "i4"))


# -- signals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_27_28_comparisons(client: Client, mode: str) -> None:
    def program(m: Any, t: Any) -> Any:
        sent = m.then(dm.shmem_signal(t, 1, 5, target_pe=-1, by=1))
        for cmp, value in WAITS:
            m.do(dm.shmem_wait_until(t, 1, value, cmp=cmp, timeout=5, pred=sent))
        said = []
        for cmp, value in VAIN:
            try:
                m.do(dm.shmem_wait_until(t, 1, value, cmp=cmp, timeout=0.01))
            except TimeoutError as error:
                said.append(f"PE 1 is 5, wanted {cmp.value} {value};" in str(error))
        return said

    with dm.create_shmem_signal("two", 2) as t:
        check(run(mode, program, t), [True] * 6)


def test_31_a_wait_makes_room(client: Client) -> None:
    with dm.create_shmem_signal("tp", N) as ready:
        waiting = dm.shmem_wait_until(ready, 0, 1).persist()
        addresses = list(client.scheduler_info()["workers"])
        others = [client.submit(lambda i: i, i, workers=[a], pure=False) for i, a in enumerate(addresses * 2)]
        assert client.gather(others) == [0, 1, 2, 3]
        assert not any(f.done() for f in dask.base.unpack_collections(waiting)[0] if hasattr(f, "done"))
        dm.shmem_signal(ready, 0, 1, target_pe=-1).compute()
        waiting.compute()


def test_32_a_signal_is_of_one_tensor_and_one_group(client: Client) -> None:
    with (
        dm.create_shmem_signal("tp", N) as one,
        dm.create_shmem_signal("tp", N) as two,
        dm.create_shmem_signal(mesh=dm.init_mesh(2, ["tp"])) as three,
    ):
        dm.shmem_signal(one, 0, 1, target_pe=-1).compute()
        for other in two, three:
            with pytest.raises(TimeoutError, match="is 0, wanted == 1"):
                dm.shmem_wait_until(other, 0, 1, timeout=0.01).compute()


@pytest.mark.parametrize("mode", MODES)
def test_33_who_sees_the_signal_sees_the_data(client: Client, mode: str) -> None:
    def program(m: Any, t: Any) -> Any:
        whole = []
        for turn in range(1, 6):
            data = np.full(2**17, turn, "f8")
            sent = dm.shmem_put_signal(data, [0], t, 1, turn, by=0)
            if m.name == "client":
                sent = sent.persist()
            seen = dm.shmem_wait_until(t, 0, turn, cmp=GE, by=1)
            m.do(seen)
            if m.name == "client" or dm.my_pe() == 1:
                got = m.value(dm.shmem_load(t, 1))
                whole.append(bool((got == got[0]).all() and got[0] >= turn))
            m.do(sent)
        return all(whole)

    with dm.create_shmem_tensor("two", 2, "f8", [2**17]) as t:
        check(run(mode, program, t), True)


ARRIVED: list[int] = []


def meet_again_and_again(ready: dm.ShmemSignal) -> Any:
    """A module's function is pickled by name, so all ranks share the list."""
    rng = np.random.default_rng(dm.get_rank())
    for _ in range(20):
        threading.Event().wait(float(rng.random()) * 0.002)
        ARRIVED.append(dm.get_rank())
        dm.shmem_barrier_all(ready)
    return Boxed([int(dm.shmem_barrier_all(ready, mesh_dim="y").pe) for _ in range(3)])


def test_35_a_barrier_is_used_again(client: Client) -> None:
    mesh = dm.init_mesh((2, 2), ("x", "y"))
    ARRIVED.clear()
    with dm.create_shmem_signal(mesh=mesh) as ready:
        program = dm.local_map(meet_again_and_again, [None], process_mesh=mesh, out_shapes=[None])  # so it is not traced
        values = dask.compute(*program(ready))
    assert [v.value for v in values] == [[pe] * 3 for pe in range(4)]
    counts = [0] * 4
    for rank in ARRIVED:
        counts[rank] += 1
        assert max(counts) - min(counts) <= 1
    assert counts == [20] * 4


def test_derived_39_all_reduce_and_37_all_gather(client: Client) -> None:
    def program(x: Any) -> Any:
        me = dm.my_pe()
        for to in range(N):
            dm.shmem_put(x[:1] * 0 + me + 1, [0], t, to, put_op=ADD)
        dm.shmem_barrier_all(t)
        return dm.shmem_load(t, me, [1]), np.concatenate([dm.shmem_load(held, pe) for pe in range(N)])

    x = dm.arange(2 * N, mesh=MESH, placements=[Shard(0)])
    with dm.create_shmem_tensor("tp", N, x.dtype, [1]) as t, dm.symm_from_dtensor(x) as held:
        total, gathered = dm.local_map(program, [[Replicate()], [Replicate()]])(x)
        assert total.tolist() == [10]
        assert gathered.tolist() == list(range(8))


# -- DTensors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "placements", "shape"),
    [
        (dm.init_mesh(3, ["x"]), [Shard(0)], (7, 3)),
        (dm.init_mesh(5, ["x"]), [Shard(1)], (2, 4)),
        (dm.init_mesh((2, 2), ("x", "y")), [Shard(1), Shard(0)], (5, 3)),
        (dm.init_mesh((2, 2), ("x", "y")), [Replicate(), Shard(0)], (3, 3)),
        (dm.init_mesh((2, 3), ("x", "y")), [Shard(0), Shard(0)], (4, 2)),
        (dm.ProcessMesh([[3, 1], [0, 2]], ["x", "y"]), {"y": Shard(0)}, (4, 2)),
    ],
)
def test_shards_of_a_dtensor(client: Client, mesh: dm.ProcessMesh, placements: Any, shape: tuple[int, int]) -> None:
    value = np.arange(np.prod(shape), dtype="f4").reshape(shape)
    x = dm.shard_tensor(value, mesh, placements)
    layout = x.layout
    shards = [value[layout.box(coord)] for coord in layout.coords()]

    def program() -> Any:
        me = mesh.process_ids.index(dm.get_rank())
        other = (me + 1) % mesh.size
        return Boxed((dm.shmem_load(held, other), [held.load(box) for box in boxes]))

    boxes = [(slice(0, shape[0]), slice(0, shape[1])), (slice(1, shape[0]), slice(1, 2)), (1, slice(0, 2)), (slice(1, 1), 0)]
    with dm.symm_from_dtensor(x) as held:
        for pe, shard in enumerate(shards):
            np.testing.assert_array_equal(dm.shmem_load(x, pe).compute(), shard)
            np.testing.assert_array_equal(dm.shmem_load(held, pe).compute(), shard)
        for pe, box in enumerate(dask.compute(*dm.local_map(program, [None], process_mesh=mesh)())):
            local, parts = box.value
            np.testing.assert_array_equal(local, shards[(pe + 1) % mesh.size])
            for part, box_ in zip(parts, boxes, strict=True):
                np.testing.assert_array_equal(part, value[box_])
        np.testing.assert_array_equal(held.load(boxes[1]).compute(), value[boxes[1]])
        with pytest.raises(IndexError):
            held.load((slice(0, shape[0] + 1), 0))


def test_views_of_shards_have_the_bounds_of_the_shard(client: Client) -> None:
    x = dm.arange(7, mesh=dm.init_mesh(3, ["x"]), placements=[Shard(0)])  # 3, 3, 1
    ring = dm.shmem_load(x, lambda rank: (rank + 1) % 3)
    assert ring.layout.chunks == ((3, 1, 3),)
    assert ring.tolist() == [3, 4, 5, 6, 0, 1, 2]
    assert dm.shmem_load(x, 2, [2], [0], valid_shape=[1], fill_value=9).tolist() == [6, 9]
    with pytest.raises(ValueError, match="offset 0 \\+ shape 2 along dim 0 goes beyond its size 1"):
        dm.shmem_load(x, 2, [2])
    with dm.symm_from_dtensor(x) as held:
        with pytest.raises(ValueError, match="beyond its size 1"):
            dm.shmem_load(held, 2, [2])
        with pytest.raises(ValueError, match="beyond its size 1"):
            dm.shmem_put(np.zeros(2, x.dtype), [0], held, 2)
    after = dm.shmem_load(x, 1, pred=dask.delayed(int)())
    assert after.tolist() == [3, 4, 5]


def test_put_takes_shards_of_a_dtensor(client: Client) -> None:
    mesh = dm.init_mesh(3, ["x"])
    x = dm.arange(4, mesh=mesh, placements=[Shard(0)])  # 2, 2, 0
    with dm.create_shmem_tensor(mesh=mesh, dtype=x.dtype, shape=[2]) as t:
        put = dm.shmem_put(x, [0], t, lambda rank: 2 - rank)
        assert dm.shmem_load(t, lambda rank: rank, pred=put).tolist() == [0, 0, 2, 3, 0, 1]
        y = dm.ones(4, int, mesh=dm.init_mesh(2, ["x"]), placements=[Shard(0)])
        with pytest.raises(ValueError, match="without rank 2"):
            dm.shmem_put(y, [0], t, 0)


# -- life ---------------------------------------------------------------------------------------------------------------


def test_45_free(client: Client) -> None:
    t = filled()
    assert held() == N * 4 * 6 * 4
    lazy = dm.shmem_load(t, 1)
    t.free()
    assert held() == 0
    t.free()
    with pytest.raises(RuntimeError, match="freed; create it again"):
        dm.shmem_load(t, 1)
    with pytest.raises(RuntimeError, match="freed"):
        lazy.compute()
    with pytest.raises(RuntimeError, match="freed"):
        dm.local_map(lambda: dm.shmem_load(t, 0), [[Replicate()]], process_mesh=t.mesh)()


def test_free_wakes_who_waits(client: Client) -> None:
    ready = dm.create_shmem_signal("tp", N)
    waiting = client.compute(dm.shmem_wait_until(ready, 0, 1))
    event = Event("waits")
    client.submit(lambda: Event("waits").set()).result()
    event.wait(5)
    ready.free()
    with pytest.raises(RuntimeError, match="freed"):
        client.gather(waiting)


def test_nothing_is_left_after_an_error(client: Client) -> None:
    def fail(m: Any) -> None:
        dm.shmem_put([[1]], [0, 0], t, 1)
        raise KeyError("mine")

    with filled() as t, pytest.raises(KeyError, match="mine"):
        dm.local_map(lambda: fail(None), [None], process_mesh=t.mesh)()
    assert held() == 0
    with pytest.raises(ZeroDivisionError), filled() as t:
        1 / 0  # noqa: B018
    assert held() == 0


def test_bytes_are_reported(client: Client, tensor: dm.ShmemTensor, eventually: Any) -> None:
    def bytes_held() -> int:
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        return sum(w["metrics"].get("daskmesh-symmetric", {}).get("bytes", 0) for w in workers)

    assert eventually(lambda: bytes_held() == sum(store.nbytes for store in _STORES.values()) > 0)


def test_groups(client: Client) -> None:
    with dm.create_shmem_signal("a group", 3) as one:
        assert (dm.n_pes("a group"), dm.n_pes(one), one.mesh.process_ids) == (3, 3, (0, 1, 2))
    with pytest.raises(ValueError, match="'a group' has 3 PEs, not 2"):
        dm.create_shmem_signal("a group", 2)
    with pytest.raises(ValueError, match="no group 'nobody'"):
        dm.n_pes("nobody")
    other = dm.ProcessMesh([3, 1], ["x"])
    got = dm.local_map(lambda: Boxed((dm.my_pe(), dm.n_pes(), dm.my_pe("tp"), dm.n_pes(MESH))), [None], process_mesh=other)()
    with filled():
        assert [v.value for v in dask.compute(*got)] == [(0, 2, 3, 4), (1, 2, 1, 4)]
    with pytest.raises(RuntimeError, match="no region is running"):
        dm.n_pes()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"group_name": "tp"}, TypeError, "give dtype and shape"),
        ({"group_name": "tp", "n_pes": N, "dtype": object, "shape": [2]}, TypeError, "objects"),
        ({"group_name": "tp", "n_pes": N, "dtype": "f4", "shape": [2, 0]}, ValueError, "size 0 along dim 1"),
        ({"group_name": "tp", "n_pes": 0, "dtype": "f4", "shape": [2]}, ValueError, "n_pes must be at least 1"),
        ({"group_name": "tp", "n_pes": 1.0, "dtype": "f4", "shape": [2]}, TypeError, "n_pes must be an int"),
        ({"group_name": 3, "n_pes": 2, "dtype": "f4", "shape": [2]}, TypeError, "group_name"),
        ({"group_name": "tp", "dtype": "f4", "shape": [2]}, TypeError, "n_pes"),
        ({"mesh": MESH, "n_pes": 3, "dtype": "f4", "shape": [2]}, ValueError, "n_pes is 3"),
        ({"group_name": "tp", "n_pes": N, "dtype": "f4", "shape": 2}, TypeError, "shape must be a sequence"),
    ],
)
def test_create_refuses(client: Client, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dm.create_shmem_tensor(**arguments)
    assert held() == 0


def test_handles_are_led_by_their_client(client: Client, tensor: dm.ShmemTensor) -> None:
    def create() -> None:
        dm.create_shmem_signal("tp", N)

    for call, message in [(tensor.free, "client that created it"), (create, "called on a rank")]:
        with pytest.raises(RuntimeError, match=message):
            dm.local_map(lambda call=call: call(), [None], process_mesh=MESH)()
    with pytest.raises(RuntimeError, match="inside a function given to local_map"):
        dm.dtensor_from_local(lambda rank: dm.shmem_load(tensor, 0), MESH, [Shard(0)])


def test_a_region_whose_traced_rank_has_no_part_says_so(client: Client, tensor: dm.ShmemTensor) -> None:
    def program() -> Any:
        if dm.get_rank() == 1:
            dm.shmem_clear_data(tensor)
        return np.zeros(1)

    with pytest.raises(RuntimeError, match="by= for the PEs that shall act"):
        dm.local_map(program, [[Shard(0)]], process_mesh=MESH)().compute()


def test_regions_are_never_taken_for_the_same(client: Client, tensor: dm.ShmemTensor) -> None:
    def program() -> Any:
        return dm.shmem_load(tensor, 0, [1, 1])

    load = dm.local_map(program, [[Shard(0)]], process_mesh=MESH)
    first = load().persist()
    wait(first)  # else the loads may come after the put
    dm.shmem_put([[77]], [0, 0], tensor, 0).compute()
    assert load().compute().tolist() == [[77]] * N
    assert first.compute().tolist() == [[0]] * N


def test_a_rank_that_has_moved_has_left_its_memory_behind(client: Client, tensor: dm.ShmemTensor) -> None:
    buffers = [store.entries[tensor.id].buffers for store in _STORES.values() if tensor.id in store.entries]
    held_here = next(found for found in buffers if 1 in found)
    moved = held_here.pop(1)
    for call in (dm.shmem_clear_data(tensor, by=1), dm.shmem_wait_until(tensor, 0, 0, by=1)):
        with pytest.raises(PELostError, match="PE 1 of symmetric tensor 'tp' has moved"):
            call.compute()
    held_here[1] = moved


def test_actors_go_with_their_regions(client: Client, tensor: dm.ShmemTensor, eventually: Any) -> None:
    dm.local_map(lambda: Boxed(dm.shmem_load(tensor, 0, [1, 1])), [None], process_mesh=tensor.mesh)()
    check(run("region", PROGRAMS["17 put"][0], tensor), PROGRAMS["17 put"][1])
    eventually(lambda: gc.collect() is not None and len(_ACTORS) == 0)


def test_the_end_of_a_world_frees_its_tensors(client: Client, eventually: Any) -> None:
    dm.shutdown()
    left = dm.create_shmem_tensor("left", 2, "f8", [3])
    assert held() == 48
    dm.shutdown()
    assert eventually(lambda: held() == 0)
    left.free()


def test_a_client_that_leaves_frees_what_it_made(client: Client, eventually: Any) -> None:
    assert isinstance(get_client(), Client)
    dm.shutdown()
    with Client(client.scheduler.address) as other:
        with other.as_current():
            dm.create_shmem_tensor("left", 2, "f8", [3])
        assert held() == 48
        dm.shutdown()
    assert eventually(lambda: held() == 0)
    assert isinstance(dm.shmem_load(dm.ones(2, mesh=MESH, placements=[]), 1), DTensor)
    assert issubclass(PELostError, RuntimeError)
