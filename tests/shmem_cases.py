"""One program, two modes: each case is a function that runs as it is inside a region on every PE, and on the client.

`Mode.then` is what orders two steps: inside a region a barrier, on the client the token that goes to `pred`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask
import numpy as np
from distributed import Client

import daskmesh as dm
from daskmesh import AtomicType, CmpType, DTensor, ShmemSignal, ShmemTensor
from daskmesh.store import store_at
from daskmesh.symmetric import symmetric_at

ADD, MAX, MIN, SET = AtomicType.ADD, AtomicType.MAX, AtomicType.MIN, AtomicType.SET
EQ, NE, LT, LE, GT, GE = CmpType.EQ, CmpType.NE, CmpType.LT, CmpType.LE, CmpType.GT, CmpType.GE
N = 4
MESH = dm.init_mesh(N, ["tp"])
MODES = ["client", "region"]


class PerPE(list[Any]):
    """One expected value for each PE."""


class Boxed:
    """A result that is no array, so that each rank may return another."""

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass
class Mode:
    """How a program runs."""

    name: str
    tensor: ShmemTensor | ShmemSignal
    optimize: bool = True

    def then(self, token: Any) -> Any:
        """What came before has happened on all PEs."""
        if self.name == "region":
            dm.shmem_barrier_all(self.tensor)
        return token

    def value(self, result: Any) -> Any:
        """What PE 0 gets on the client, or what each gets there, one after the other."""
        if isinstance(result, DTensor):
            result = result.compute(optimize_graph=self.optimize)
        return result

    def each(self, result: Any) -> Any:
        """The same for what differs from PE to PE."""
        if not isinstance(result, DTensor):
            return result
        value = self.value(result)
        return PerPE(value[pe : pe + 1] if value.ndim > 1 else value[pe] for pe in range(len(value)))

    def do(self, *tokens: Any) -> Any:
        """Carry out what was recorded."""
        if self.name == "client":
            dask.compute(*tokens, optimize_graph=self.optimize)


def run(mode: str, program: Callable[..., Any], tensor: Any, *, optimize: bool = True) -> Any:
    """The result of a program; of a region's, one for each PE."""
    how = Mode(mode, tensor, optimize)
    if mode == "client":
        return program(how, tensor)
    values = dm.local_map(lambda: Boxed(program(how, tensor)), [None], process_mesh=tensor.mesh)()
    return PerPE(v.value for v in dask.compute(*values))


def check(got: Any, want: Any) -> None:
    """Values, and kinds of number."""
    if isinstance(got, PerPE):
        wanted = want if isinstance(want, PerPE) else [want] * len(got)
        for one, other in zip(got, wanted, strict=True):
            check(one, other)
        return
    if isinstance(want, PerPE):
        want = want[0]
    np.testing.assert_array_equal(got, want)
    if hasattr(want, "dtype"):
        assert got.dtype == want.dtype


def block(pe: int) -> np.ndarray[Any, Any]:
    """What the cases find in the buffer of a PE."""
    i, j = np.indices((4, 6))
    return (100 * pe + 10 * i + j).astype("i4")


def filled(dtype: Any = "i4", group: str = "tp") -> ShmemTensor:
    """The tensor of the cases."""
    tensor = dm.create_shmem_tensor(group, N, dtype, [4, 6])
    everything = dm.dtensor_from_local([block(pe).astype(dtype) for pe in range(N)], tensor.mesh, [dm.Shard(0)])
    dm.shmem_put(everything, [0, 0], tensor, lambda rank: rank)
    dm.sync(tensor)
    return tensor


def i4(*rows: Any) -> np.ndarray[Any, Any]:
    return np.array(rows, "i4")


# -- the cases of the specification, by number; (tensor, program, expected) -----------------------------------------------


def load(*args: Any, **options: Any) -> Callable[..., Any]:
    return lambda m, t: m.value(dm.shmem_load(t, *args, **options))


LOADS: dict[str, tuple[Callable[..., Any], Any]] = {
    "1 whole": (load(1), block(1)),
    "2 view": (load(2, [2, 3], [1, 2]), i4([212, 213, 214], [222, 223, 224])),
    "3 column": (load(3, [4, 1], [0, 5]), i4([305], [315], [325], [335])),
    "5 valid": (load(1, [2, 4], [0, 0], valid_shape=[2, 2]), i4([100, 101, 0, 0], [110, 111, 0, 0])),
    "6 fill": (load(1, [2, 4], [0, 0], valid_shape=[2, 2], fill_value=-1), i4([100, 101, -1, -1], [110, 111, -1, -1])),
    "7 overhang": (
        load(1, [4, 4], [2, 4], valid_shape=[2, 2]),
        i4([124, 125, 0, 0], [134, 135, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]),
    ),
    "9 valid is shape": (load(1, [2, 4], [0, 0], valid_shape=[2, 4]), block(1)[:2, :4]),
    "9 nothing valid": (load(1, [2, 2], [0, 0], valid_shape=[0, 2]), i4([0, 0], [0, 0])),
    "14 shape alone": (load(1, [2, 2]), i4([100, 101], [110, 111])),
    "numpy integers": (load(np.int8(1), np.array([1, 2]), (np.uint8(3), np.int64(4))), i4([134, 135])),
    "36 ring": (
        lambda m, t: m.each(dm.shmem_load(t, lambda rank: (rank + 1) % N, [1, 1])),
        PerPE([[[100]], [[200]], [[300]], [[0]]]),
    ),
    "a sequence": (
        lambda m, t: m.each(dm.shmem_load(t, [3, 2, 1, 0], [1, 1])),
        PerPE([[[300]], [[200]], [[100]], [[0]]]),
    ),
    "a view of a view": (
        lambda m, t: m.value(dm.shmem_load(dm.shmem_view(dm.shmem_view(t, [3, 4], [1, 2]), [2, 2], [1, 1]), 2)),
        i4([223, 224], [233, 234]),
    ),
    "a view over the edge": (
        lambda m, t: m.value(dm.shmem_load(dm.shmem_view(t, [2, 2], [3, 5], valid_shape=[1, 1]), 1, fill_value=7)),
        i4([135, 7], [7, 7]),
    ),
    "get": (lambda m, t: m.value(dm.shmem_get(t, 0, [1, 2])), i4([0, 1])),
}


def case_4(m: Mode, t: Any) -> Any:
    got = m.value(dm.shmem_load(t, 0))
    got[...] = -1
    return m.value(dm.shmem_load(t, 0))


def case_17(m: Mode, t: Any) -> Any:
    done = m.then(dm.shmem_put(i4([1, 2], [3, 4]), [1, 1], t, 2, by=0))
    return [m.value(dm.shmem_load(t, pe, pred=done)) for pe in range(N)]


def want_17() -> list[Any]:
    want = [block(pe) for pe in range(N)]
    want[2][1:3, 1:3] = [[1, 2], [3, 4]]
    return want


def case_19(m: Mode, t: Any) -> Any:
    seen = []
    for value in range(8):
        done = m.then(dm.shmem_put([[value]], [0, 0], t, 1, by=value % N))
        seen.append(int(m.value(dm.shmem_load(t, 1, [1, 1], pred=done))[0, 0]))
        m.then(None)
    return seen


def case_22(m: Mode, t: Any) -> Any:
    clear = m.then(dm.shmem_clear_data(t))
    if m.name == "client":
        x = dm.dtensor_from_local([np.full((2, 2), pe + 1, "i4") for pe in range(N)], t.mesh, [dm.Shard(0)])
        done = dm.shmem_put(x, [0, 0], t, 0, put_op=ADD, pred=clear)
    else:
        done = m.then(dm.shmem_put(np.full((2, 2), dm.my_pe() + 1, "i4"), [0, 0], t, 0, put_op=ADD))
    return [m.value(dm.shmem_load(t, pe, [2, 2], pred=done)) for pe in (0, 1)]


def case_put_ops(m: Mode, t: Any) -> Any:
    one = m.then(dm.shmem_put([[5, -5]], [0, 0], t, 0, put_op=MAX, by=1))
    two = m.then(dm.shmem_put([[-9, 9]], [1, 0], t, 0, put_op=MIN, by=2, pred=one))
    return m.value(dm.shmem_load(t, 0, [2, 2], pred=two))


def case_29(m: Mode, t: Any) -> Any:
    sent = dm.shmem_signal(t, 0, 1, target_pe=0, sig_op=ADD)
    waited = m.then(dm.shmem_wait_until(t, 0, N, cmp=GE, clear_signal=True, by=0, pred=sent))
    return m.each(dm.shmem_signal_fetch(t, 0, pred=waited))


def case_30(m: Mode, t: Any) -> Any:
    sent = m.then(dm.shmem_signal(t, 2, 3, target_pe=-1, by=2))
    return m.each(dm.shmem_signal_fetch(t, 2, pred=sent))


def case_slots(m: Mode, t: Any) -> Any:
    one = dm.shmem_signal(t, 1, 7, [2, 3], [2, 3], target_pe=0, by=1)
    two = m.then(dm.shmem_signal(t, 1, 8, [2, 3], [0, 0], target_pe=0, by=1, pred=one))
    fetched = [dm.shmem_signal_fetch(t, 1, *view, pred=two) for view in [([2, 3], [2, 3]), ([2, 3], [0, 0]), ()]]
    return [m.each(f)[0] if m.name == "client" else int(f) for f in fetched]


def case_34(m: Mode, t: Any) -> Any:
    cleared = m.then(dm.shmem_clear_data(t))
    if m.name == "client":
        x = dm.dtensor_from_local([i4([pe]) for pe in range(N)], t.mesh, [dm.Shard(0)])
        puts = [dm.shmem_put(x, lambda rank: (0, rank), t, to, pred=cleared) for to in range(N)]
        met = dm.shmem_barrier_all(t, puts)
    else:
        me = dm.my_pe()
        for to in range(N):
            dm.shmem_put(i4([me]), [0, me], t, to)
        met = dm.shmem_barrier_all(t)
    return m.value(dm.shmem_load(t, 3, [1, N], pred=met))


def case_40(m: Mode, t: Any) -> Any:
    before = m.then(dm.shmem_clear_data(t))
    got: list[int] = []
    for _ in range(5):
        answer = dm.shmem_atomic_fetch_add(t, (0, 0), 1, 2, pred=before)
        got += answer.tolist() if m.name == "client" else [int(answer)]
    m.then(None)
    final = int(m.value(dm.shmem_atomic_fetch(t, (0, 0), 2, by=0 if m.name == "client" else None)))
    if m.name == "client":
        assert sorted(got) == list(range(5 * N))
    else:
        assert got == sorted(set(got))
    return final


def case_41(m: Mode, t: Any) -> Any:
    before = m.then(dm.shmem_clear_data(t))
    if m.name == "client":
        swaps = [dm.shmem_atomic_compare_swap(t, (1, 1), 0, pe + 1, 3, by=pe, pred=before).item() for pe in range(N)]
        last = dm.shmem_atomic_fetch(t, (1, 1), 3, by=0).item()
        return swaps.count(0), {s for s in swaps if s} == {last}
    swap = int(dm.shmem_atomic_compare_swap(t, (1, 1), 0, dm.my_pe() + 1, 3))
    m.then(None)
    last = int(dm.shmem_atomic_fetch(t, (1, 1), 3))
    return 1, swap in (0, last) and (swap or last) in range(1, N + 1)


def case_swap_and_set(m: Mode, t: Any) -> Any:
    one = m.then(dm.shmem_atomic_set(t, (0, 0), 5, 1, by=0))
    two = m.then(dm.shmem_atomic_add(t, (0, 0), 6, 1, by=0, pred=one))
    old = dm.shmem_atomic_swap(t, (0, 0), 2, 1, by=3, pred=two)
    if m.name == "client":
        return old.item(), dm.shmem_atomic_fetch(t, (0, 0), 1, by=0).item()
    m.then(None)
    now = int(dm.shmem_atomic_fetch(t, (0, 0), 1))
    return (11 if old is None else int(old)), now


def case_43(m: Mode, t: Any) -> Any:
    cleared = m.then(dm.shmem_clear_data(t, [2, 2], [0, 0], by=1))
    return [m.value(dm.shmem_load(t, pe, [2, 3], pred=cleared)) for pe in range(N)]


def case_put_signal(m: Mode, t: Any) -> Any:
    dm.shmem_put_signal([[1, 2, 3, 4, 5, 6]], [3, 0], t, 2, 9, by=1)
    if m.name == "client":
        dm.sync(t)
    seen = m.then(dm.shmem_wait_until(t, 1, 9, by=2))
    return m.value(dm.shmem_load(t, 2, [1, 6], [3, 0], pred=seen))


def case_wait_any_and_all(m: Mode, t: Any) -> Any:
    sent = m.then(dm.shmem_signal(t, 3, 4, target_pe=-1, by=3))
    first = dm.shmem_wait_any(t, [0, 3], 4, pred=sent)
    first = m.each(m.then(first))
    rest = m.then(dm.shmem_signal(t, lambda rank: rank, 4, target_pe=-1))
    both = m.then(dm.shmem_wait_all(t, cmp_value=4, clear_signal=True, timeout=5, pred=rest))
    cleared = m.each(dm.shmem_signal_fetch(t, 3, pred=both))
    return [f + 10 * c for f, c in zip(first, cleared, strict=True)] if m.name == "client" else int(first) + 10 * int(cleared)


def case_clear_signal(m: Mode, t: Any) -> Any:
    sent = m.then(dm.shmem_signal(t, 0, 1, target_pe=-1))
    done = m.then(dm.shmem_clear_signal(t, by=[0, 2], pred=sent))
    return m.each(dm.shmem_signal_fetch(t, 0, pred=done))


PROGRAMS: dict[str, tuple[Callable[..., Any], Any]] = {
    "4 a copy": (case_4, block(0)),
    "17 put": (case_17, want_17()),
    "19 order": (case_19, list(range(8))),
    "22 add": (case_22, [np.full((2, 2), 10, "i4"), np.zeros((2, 2), "i4")]),
    "max and min": (case_put_ops, i4([5, 1], [-9, 9])),
    "29 a counter": (case_29, PerPE([0, 0, 0, 0])),
    "30 to all": (case_30, PerPE([3, 3, 3, 3])),
    "slots of parts": (case_slots, PerPE([[7, 8, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]])),
    "34 barrier": (case_34, i4([0, 1, 2, 3])),
    "40 fetch_add": (case_40, 5 * N),
    "41 compare_swap": (case_41, (1, True)),
    "swap, set, add": (case_swap_and_set, (11, 2)),
    "43 clear": (case_43, [block(0)[:2, :3], i4([0, 0, 102], [0, 0, 112]), block(2)[:2, :3], block(3)[:2, :3]]),
    "put and signal": (case_put_signal, i4([1, 2, 3, 4, 5, 6])),
    "wait for any and all": (case_wait_any_and_all, PerPE([3, 3, 3, 3])),
    "clear signals": (case_clear_signal, PerPE([0, 1, 0, 1])),
}

# Calls that are refused before anything is submitted: function of the tensor, error, message.
REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "8 over the edge": (lambda t: dm.shmem_load(t, 1, [4, 4], [2, 4]), ValueError, r"offset 2 \+ shape 4 along dim 0 .* size 4"),
    "10 too much valid": (lambda t: dm.shmem_load(t, 1, [2, 2], valid_shape=[3, 2]), ValueError, "valid_shape .* 3 along dim 0"),
    "10 negative": (lambda t: dm.shmem_load(t, 1, [2, 2], valid_shape=[1, -1]), ValueError, "valid_shape .* -1 along dim 1"),
    "11 PE 4": (lambda t: dm.shmem_load(t, 4), ValueError, "src_pe is 4.*0 <= src_pe < 4"),
    "11 PE -1": (lambda t: dm.shmem_load(t, -1), ValueError, "src_pe is -1"),
    "11 float": (lambda t: dm.shmem_load(t, 1.0), TypeError, "src_pe must be an int, got 1.0"),
    "11 bool": (lambda t: dm.shmem_load(t, True), TypeError, "src_pe must be an int, got True"),
    "12 offset 4": (lambda t: dm.shmem_load(t, 0, [1, 1], [4, 0]), ValueError, "offset 4 along dim 0"),
    "12 offset 6": (lambda t: dm.shmem_load(t, 0, [1, 1], [0, 6]), ValueError, "offset 6 along dim 1"),
    "12 offset -1": (lambda t: dm.shmem_load(t, 0, [1, 1], [-1, 0]), ValueError, "offset -1 along dim 0"),
    "13 offsets": (lambda t: dm.shmem_load(t, 0, [1, 1], [0]), ValueError, r"offsets \(0,\) has rank 1.* has rank 2"),
    "13 shape": (lambda t: dm.shmem_load(t, 0, [2, 3, 1]), ValueError, r"shape \(2, 3, 1\) has rank 3.* has rank 2"),
    "14 offsets alone": (lambda t: dm.shmem_load(t, 0, offsets=[1, 1]), ValueError, "offsets .* without shape"),
    "14 size 0": (lambda t: dm.shmem_load(t, 0, [0, 2]), ValueError, "size 0 along dim 0"),
    "a sequence too short": (lambda t: dm.shmem_load(t, [0, 1]), ValueError, "2 entries for 4 PEs"),
    "18 put over the edge": (lambda t: dm.shmem_put(np.ones((2, 2), "i4"), [3, 5], t, 0), ValueError, "offset 3 .* dim 0"),
    "24 wrong dtype": (lambda t: dm.shmem_put(np.ones((1, 1), "f4"), [0, 0], t, 0), TypeError, "src is float32"),
    "24 ADD": (lambda t: dm.shmem_put(np.ones((1, 1), "f4"), [0, 0], t, 0, put_op=ADD), TypeError, "src is float32"),
    "put_op": (lambda t: dm.shmem_put([[1]], [0, 0], t, 0, put_op="add"), TypeError, "put_op must be of type AtomicType"),
    "put_op of another kind": (
        lambda t: dm.shmem_put(np.ones((1, 1), "i4"), [0, 0], t, 0, put_op=EQ),
        TypeError,
        "put_op must be of type AtomicType",
    ),
    "sig_op": (lambda t: dm.shmem_signal(t, 0, 1, target_pe=0, sig_op=MAX), ValueError, "sig_op must be one of .*SET.*ADD"),
    "target": (lambda t: dm.shmem_signal(t, 0, 1, target_pe=-2), ValueError, "target_pe is -2"),
    "a part that does not divide": (lambda t: dm.shmem_signal(t, 0, 1, [3, 6], target_pe=0), ValueError, "size 3 .* dim 0"),
    "cmp": (lambda t: dm.shmem_wait_until(t, 0, 1, cmp=ADD), TypeError, "cmp must be of type CmpType"),
    "a fraction of a signal": (lambda t: dm.shmem_signal(t, 0, 1.5, target_pe=0), TypeError, "signal must be an int"),
    "too large a signal": (lambda t: dm.shmem_signal(t, 0, 2**63, target_pe=0), ValueError, "64-bit"),
    "timeout": (lambda t: dm.shmem_wait_until(t, 0, 1, timeout=-1), ValueError, "negative"),
    "element": (lambda t: dm.shmem_atomic_add(t, (0, 6), 1, 0), ValueError, "index 6 along dim 1"),
    "operand": (lambda t: dm.shmem_atomic_add(t, (0, 0), np.float32(1), 0), TypeError, "float32"),
    "by": (lambda t: dm.shmem_clear_data(t, by=4), ValueError, "by is 4"),
    "no tensor": (lambda t: dm.shmem_load(np.ones(3), 0), TypeError, "ndarray"),
    "fill": (lambda t: dm.shmem_load(t, 0, [1, 1], fill_value="x"), TypeError, "fill_value"),
    "mesh dim": (lambda t: dm.shmem_barrier_all(t, mesh_dim="dp"), dm.PlacementError, "'dp'.*'tp2?'"),
}

WAITS = [(EQ, 5), (NE, 0), (GT, 4), (GE, 5), (LT, 6), (LE, 5)]
VAIN = [(EQ, 4), (NE, 5), (GT, 5), (GE, 6), (LT, 5), (LE, 4)]


def force(client: Client, road: str) -> None:
    """Set the road on all workers."""
    client.run(dask.config.set, {"daskmesh.transport": road})


def held(client: Client) -> dict[str, tuple[int, int]]:
    """Bytes in the store of symmetric buffers and in the shard store, by worker."""

    def ask(dask_worker: Any) -> tuple[int, int]:
        symmetric, shards = symmetric_at(dask_worker.address), store_at(dask_worker.address)
        entries = [] if symmetric is None else symmetric.entries.values()
        mine = sum(b.nbytes for e in entries for b in e.buffers.values() if e.title != "'constant'")
        return mine, shards.nbytes if shards else 0

    return client.run(ask)


def segments() -> list[str]:
    return [path.name for path in Path("/dev/shm").glob("daskmesh-*")]


def kill(client: Client, rank: int) -> str:
    """Kill the worker process of a rank; the address it had."""
    address = dm.init_parallel_env().table()[rank]
    (pid,) = client.run(os.getpid, workers=[address]).values()
    os.kill(pid, signal.SIGKILL)
    return address
