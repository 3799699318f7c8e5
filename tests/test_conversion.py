"""Placing data on a mesh, joining local arrays, and back."""

from __future__ import annotations

from functools import partial
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, get_worker, wait

import daskmesh as dm
from daskmesh import transport
from daskmesh.mesh import ProcessMesh, init_mesh
from daskmesh.placement import Partial, PlacementError, Replicate, Shard
from daskmesh.tasks import RankTask
from daskmesh.world import world_for

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("threads")]

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
LINE, GRID = init_mesh(3, ["x"]), init_mesh((2, 3), ("x", "y"))
TABLE = np.arange(35.0).reshape(5, 7)


class Frame:
    """Like a pandas object: it has a shape and `__array__`, and is no NumPy array."""

    shape = (2, 3)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.arange(6).reshape(2, 3).astype(dtype or float)


MASKED = np.ma.masked_array([1, 2, 3], [0, 1, 0])
DATA: list[Any] = [
    TABLE, TABLE.T, TABLE[::2, ::-1], np.asfortranarray(TABLE), [[1, 2], [3, 4]], (1.5, 2.5), 3, True, 2.5j, np.float32(1),
    np.int8(4), Frame(), np.array(["a", "bcd"]), np.array([], "i2"), range(4), MASKED.filled(0), memoryview(b"abc"),
]  # fmt: skip


@pytest.mark.parametrize("data", DATA, ids=range(len(DATA)))
def test_anything_that_numpy_takes(data: Any) -> None:
    want = np.asarray(data)
    placements: list[Any] = [[R], [S0]] if want.ndim else [[R]]
    if want.dtype.kind != "U":
        placements.append([P])
    for p in placements:
        x = dm.shard_tensor(data, LINE, p)
        got = x.compute(scheduler="sync")
        assert (x.dtype, x.shape, got.dtype) == (want.dtype, want.shape, want.dtype)
        np.testing.assert_array_equal(got, want)


PLACEMENTS: list[Any] = [
    [S0, S1], [S1, S0], [S0, S0], [R, S1], [S1, P], [P, P], [Partial("max"), Partial("prod")], [Partial("avg"), S0],
    {"y": Shard(-1)},
]  # fmt: skip


@pytest.mark.parametrize("placements", PLACEMENTS)
def test_placements(placements: Any) -> None:
    x = dm.shard_tensor(TABLE, GRID, placements)
    np.testing.assert_array_equal(x.compute(), TABLE)
    assert x.local_value(0).shape == x.layout.local_shape((0, 0))
    np.testing.assert_array_equal(x.local_value(0), TABLE[x.layout.box((0, 0))])


def test_terms_are_the_value_and_neutral_elements() -> None:
    x = dm.shard_tensor([2, 3], GRID, [P, Partial("prod")])
    locals_ = [x.local_value(r).tolist() for r in range(6)]
    assert locals_ == [[2, 3], [1, 1], [1, 1], [0, 0], [0, 0], [0, 0]]
    for op, truth in (("any", [[True], [False], [False]]), ("all", [[True]] * 3)):
        y = dm.shard_tensor([True], LINE, [Partial(op)])
        assert [y.local_value(r).tolist() for r in range(3)] == truth


def test_dtype_and_dtensors() -> None:
    x = dm.shard_tensor(TABLE, GRID, [S0], dtype="f4")
    assert x.dtype == np.float32
    y = dm.shard_tensor(x, GRID, [S1])
    assert (y.dtype, y.placements) == (np.dtype("f4"), (S1, R))
    z = dm.shard_tensor(x, LINE, [S0], dtype="i8")
    assert (z.dtype, z.process_mesh) == (np.dtype("i8"), LINE)
    np.testing.assert_array_equal(z.compute(), TABLE.astype("i8"))


def test_the_callers_array_may_change_afterwards() -> None:
    data, local = TABLE.copy(), [np.ones(2), np.ones(2), np.ones(2)]
    x, y = dm.shard_tensor(data, LINE, [S0]), dm.dtensor_from_local(local, LINE, [S0])
    z = dm.shard_tensor(1, LINE, [R]) + dm.shard_tensor(data, LINE, [R])
    data[:] = -1
    local[0][:] = -1
    np.testing.assert_array_equal(x.compute(), TABLE)
    np.testing.assert_array_equal(y.compute(), np.ones(6))
    np.testing.assert_array_equal(z.compute(), TABLE + 1)


def test_each_part_travels_once_and_then_from_worker_to_worker(threads: Client) -> None:
    """The graph holds one copy of the data, for the first rank of each part; replicas load it from there."""
    x = dm.shard_tensor(TABLE, GRID, [R, S1])
    made = [t for t in x.__dask_graph__().values() if isinstance(t, RankTask) and any(isinstance(a, np.ndarray) for a in t.args)]
    assert sum(a.nbytes for t in made for a in t.args if isinstance(a, np.ndarray)) == TABLE.nbytes
    assert {t.rank for t in made} == {0, 1, 2}
    assert x.explain().total_bytes == TABLE.nbytes
    transport.reset_stats()
    wait(x.persist())
    assert sum(road["bytes"] for road in transport.stats().values()) == TABLE.nbytes


WHERE: list[str] = []


def where_it_runs(block: np.ndarray) -> np.ndarray:
    WHERE.append(get_worker().address)
    return block


def test_a_dask_array_is_not_computed_on_the_client(threads: Client) -> None:
    WHERE.clear()
    data = da.from_array(TABLE, chunks=(2, 3)).map_blocks(where_it_runs, dtype=float, meta=np.empty((0, 0)))
    for mesh, placements in ((LINE, [S0]), (GRID, [S1, S0]), (GRID, [P, S1]), (GRID, [])):
        x = dm.shard_tensor(data, mesh, placements)
        assert not WHERE
        np.testing.assert_array_equal(x.compute(), TABLE)
        assert set(WHERE) <= set(threads.scheduler_info()["workers"])
        assert WHERE
        WHERE.clear()
    same_chunks = da.from_array(np.arange(6), chunks=2)
    assert dm.shard_tensor(same_chunks, LINE, [S0]).compute().tolist() == list(range(6))
    assert dm.shard_tensor(da.from_array(np.array(3)), LINE, [R]).compute() == 3
    empty = da.zeros((0, 4), chunks=(2, 2))
    assert dm.shard_tensor(empty, LINE, [S0]).compute().shape == (0, 4)
    assert dm.shard_tensor(da.arange(5, chunks=2), LINE, [S0], dtype="f4").dtype == np.float32
    unknown = da.arange(5, chunks=2)
    with pytest.raises(ValueError, match="compute_chunk_sizes"):
        dm.shard_tensor(unknown[unknown > 1], LINE, [S0])


def test_a_persisted_dask_array_is_shared(threads: Client) -> None:
    data = da.ones((6, 4), chunks=(2, 4)).persist()
    x = dm.shard_tensor(data, LINE, [S0]) + 1
    assert x.compute().sum() == 48
    total, back = dask.compute(data.sum(), x)
    assert (total, back.sum()) == (24, 48)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: dm.shard_tensor(np.ones, LINE, [S0]), TypeError, "dtensor_from_fn"),
        (lambda: dm.shard_tensor([1, 2], LINE, [], dtype=object), TypeError, r"^shard_tensor\(data\).* objects"),
        (lambda: dm.shard_tensor([[1], [1, 2]], LINE, [S0]), ValueError, r"^shard_tensor\(data\): .*inhomogeneous"),
        (lambda: dm.shard_tensor(MASKED, LINE, [S0]), TypeError, r"^shard_tensor\(data\): a masked array .* x\.filled"),
        (lambda: dm.dtensor_from_local([[1], [1], MASKED], LINE, [S0]), TypeError, r"^dtensor_from_local.*rank 2: a masked"),
        (lambda: dm.dtensor_from_local(lambda r: MASKED, LINE, [S0]), TypeError, "a masked array"),
        (lambda: dm.from_callback(3, int, LINE, [], lambda box: MASKED).compute(scheduler="sync"), TypeError, "masked array"),
        (lambda: dm.dtensor_from_fn(np.ones, LINE, [S1], 3), PlacementError, r"^dtensor_from_fn: Shard\(1\)"),
        (lambda: dm.shard_tensor([object()], LINE, [S0]), TypeError, "objects"),
        (lambda: dm.shard_tensor([1, 2], LINE, [Partial("any")]), TypeError, "x != 0"),
        (lambda: dm.shard_tensor([1, 2], LINE, [S1]), PlacementError, r"^shard_tensor: Shard\(1\).*'x' of size 3.*out of range"),
        (lambda: dm.shard_tensor(1, LINE, [S0]), PlacementError, "0-d"),
        (lambda: dm.shard_tensor([1, 2], LINE, [S0, S0]), PlacementError, r"2 placements \[Shard\(0\), Shard\(0\)\]"),
        (lambda: dm.shard_tensor([1, 2], LINE, {"z": S0}), PlacementError, "'z'"),
        (lambda: dm.shard_tensor([1, 2], LINE, S0), TypeError, r"write \[Shard\(0\)\]"),
        (lambda: dm.shard_tensor([1, 2], LINE, "S"), TypeError, "sequence or a mapping"),
        (lambda: dm.shard_tensor([1, 2], [0, 1], [S0]), TypeError, "expected a ProcessMesh"),
        (lambda: dm.dtensor_from_local(np.ones(3), LINE, [S0]), TypeError, "lambda rank"),
        (lambda: dm.dtensor_from_local([1, 2], LINE, [R]), ValueError, r"2 arrays for 3 ranks \[0, 1, 2\]"),
        (lambda: dm.dtensor_from_local([np.ones(2), np.ones(3), np.ones(2)], LINE, [R]), ValueError, "ranks 0 and 1"),
        (lambda: dm.dtensor_from_local([np.ones(2), np.ones(2), np.ones((2, 1))], LINE, [S0]), ValueError, "rank 2 has shape"),
        (lambda: dm.dtensor_from_local([[1], [1.5], [2]], LINE, [S0]), ValueError, "rank 1 has .*float64"),
        (lambda: dm.dtensor_from_local([[1]] * 3, LINE, [S0], shape=(3,)), TypeError, "function of the rank"),
        (lambda: dm.dtensor_from_local([[1]] * 3, LINE, [S0, S0]), PlacementError, "2 placements"),
        (lambda: dm.dtensor_from_fn(3, LINE, [S0]), TypeError, "shard_tensor"),
        (lambda: dm.dtensor_to_local(TABLE), TypeError, r"dtensor_to_local\(x\): expected a DTensor"),
        (lambda: dm.unshard_dtensor(TABLE), TypeError, "plain array already"),
        (lambda: dm.reshard(TABLE, LINE, [S0]), TypeError, r"reshard\(x, \.\.\.\): expected a DTensor"),
    ],
)
def test_bad_input(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


# -- local arrays


def test_a_list_of_local_arrays_of_real_sizes() -> None:
    x = dm.dtensor_from_local([np.zeros((2, 2)), np.ones((0, 2)), np.full((3, 2), 2.0)], LINE, [S0])
    assert (x.shape, x.layout.chunks) == ((5, 2), ((2, 0, 3), (2,)))
    np.testing.assert_array_equal(x.compute(), [[0, 0]] * 2 + [[2, 2]] * 3)
    assert [a.shape for a in dm.dtensor_to_local(x)] == [(2, 2), (0, 2), (3, 2)]
    y = dm.dtensor_from_local([[1, 2], [3, 4], [5, 6]], LINE, [Partial("max")])
    assert y.compute().tolist() == [5, 6]
    z = dm.dtensor_from_local([2, 3, 4], LINE, [Partial("prod")])
    assert (z.shape, int(z)) == ((), 24)


def test_ranks_that_share_a_part_must_agree_in_its_size() -> None:
    sizes = [(2, 1), (2, 3), (2, 0), (3, 1), (3, 3), (3, 0)]
    x = dm.dtensor_from_local([np.full(s, i) for i, s in enumerate(sizes)], GRID, [S0, S1])
    assert x.layout.chunks == ((2, 3), (1, 3, 0))
    sizes[4] = (3, 2)
    with pytest.raises(ValueError, match=r"ranks 1 and 4 hold the same part of tensor dim 1.*sizes 3 and 2"):
        dm.dtensor_from_local([np.zeros(s) for s in sizes], GRID, [S0, S1])


def test_a_function_of_the_rank_number_runs_on_that_rank() -> None:
    mesh = ProcessMesh([4, 2, 7])
    x = dm.dtensor_from_local(lambda rank: np.full(rank, [rank, dm.get_rank()][1]), mesh, [S0])
    assert x.layout.chunks == ((4, 2, 7),)
    assert x.compute().tolist() == [4] * 4 + [2] * 2 + [7] * 7
    y = dm.dtensor_from_local(lambda rank: 2.0 * rank, mesh, [P])
    assert (y.shape, float(y)) == ((), 26.0)


CALLS: list[int] = []


def local_rows(rank: int) -> np.ndarray:
    CALLS.append(rank)
    return np.full((2, 3), rank, "i4")


def offset_rows(by: int, rank: int) -> np.ndarray:
    return local_rows(rank) + by


def test_with_shape_nothing_runs_until_it_is_computed() -> None:
    CALLS.clear()
    x = dm.dtensor_from_local(local_rows, LINE, [S0], shape=((6, 3), "i4"))
    assert (x.shape, x.dtype, CALLS) == ((6, 3), np.dtype("i4"), [])
    assert x.compute().sum() == 18
    assert sorted(CALLS) == [0, 1, 2]
    CALLS.clear()
    y = dm.dtensor_from_local(local_rows, LINE, [S0], shape=(6, 3))
    assert (y.shape, y.dtype) == ((6, 3), np.dtype("i4"))
    y = dm.dtensor_from_local(local_rows, LINE, [S0])
    assert (y.shape, y.compute().sum()) == ((6, 3), 18)
    assert dm.dtensor_from_local(np.ones, LINE, [S0], shape=3).shape == (3,)
    with pytest.raises(ValueError, match=r"shape=\(5, 3\).*\(6, 3\)"):
        dm.dtensor_from_local(local_rows, LINE, [S0], shape=(5, 3))
    with pytest.raises(ValueError, match=r"rank \d.*layout says"):
        dm.dtensor_from_local(local_rows, LINE, [S0], shape=((9, 3), "i4")).compute()


def test_a_function_runs_once_per_rank_whoever_asks() -> None:
    CALLS.clear()
    x = dm.dtensor_from_local(partial(offset_rows, 1), LINE, [S0])
    for y in (x + 1, x.reshard([S1]), x):
        y.compute()
    x.local_value(1)
    assert sorted(CALLS) == [0, 1, 2]


def test_a_failing_rank_is_named(threads: Client) -> None:
    def fails(rank: int) -> np.ndarray:
        return np.ones(2)[rank : rank + 1] / np.ones(2)[rank]

    for shape in (None, ((3,), float)):
        with pytest.raises(IndexError) as caught:
            dm.dtensor_from_local(fails, LINE, [S0], shape=shape).compute()
        assert any("rank 2 at coordinate (2,)" in note for note in caught.value.__notes__)


def test_from_fn_runs_once_and_is_placed() -> None:
    CALLS.clear()
    x = dm.dtensor_from_fn(local_rows, LINE, [S1], 5)
    assert (x.shape, x.placements, x.compute().tolist()) == ((2, 3), (S1,), [[5] * 3] * 2)
    assert CALLS == [5]
    y = dm.dtensor_from_fn(np.full, GRID, [P, S0], (2, 3), fill_value=7)
    assert (y.compute() == 7).all()


def test_local_arrays_stay_on_their_ranks(threads: Client) -> None:
    x = dm.shard_tensor(TABLE, GRID, [S0, P]).persist()
    arrays = dm.dtensor_to_local(x)
    assert [type(a) for a in arrays] == [da.Array] * 6
    assert [a.numblocks for a in arrays] == [(1, 1)] * 6
    for rank, got in zip(GRID.process_ids, dask.compute(*arrays), strict=True):
        np.testing.assert_array_equal(got, x.local_value(rank))
    assert sum(a.sum() for a in arrays).compute() == TABLE.sum()
    table = world_for(GRID).table()
    held = dask.persist(*arrays)
    wait(held)
    assert [[list(w) for w in threads.who_has(a).values()] for a in held] == [[[table[r]]] for r in GRID.process_ids]
    back = dm.dtensor_from_local([a.compute() for a in arrays], GRID, [S0, P])
    np.testing.assert_array_equal(back.compute(), TABLE)


def test_back_to_plain_arrays() -> None:
    x = dm.shard_tensor(TABLE, GRID, [S1, Partial("avg")])
    for value in (dm.unshard_dtensor(x), np.asarray(x)):
        np.testing.assert_array_equal(value, TABLE)
        assert value.flags.writeable
    assert np.asarray(dm.shard_tensor(3, LINE, [P])).shape == ()
