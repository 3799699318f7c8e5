"""Symmetric tensors at their edges: those who act in another order, barriers after failures, 0-d shards, odd dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from distributed import Client

import daskmesh as dm

pytestmark = pytest.mark.usefixtures("threads")
ROWS = [dm.Shard(0)]


def run(function: Any, mesh: dm.ProcessMesh) -> list[Any]:
    return np.asarray(dm.local_map(function, [ROWS], process_mesh=mesh)()).tolist()  # type: ignore[no-any-return]


def test_results_come_in_the_order_of_those_who_act() -> None:
    with dm.create_shmem_signal("trio", 3) as signals:
        for pe in range(3):
            dm.shmem_signal(signals, 0, 10 * pe, target_pe=pe, by=0).compute()
        for by in ([0, 1, 2], [2, 0, 1], [1, 0], [2]):
            assert np.asarray(dm.shmem_signal_fetch(signals, 0, by=by)).tolist() == [10 * pe for pe in by]
        for by, message in (([1, 1], "names a PE twice"), ([1, 1, 2], "names a PE twice"), ([], "names nobody")):
            with pytest.raises(ValueError, match=message):
                dm.shmem_signal_fetch(signals, 0, by=by)


@pytest.mark.parametrize("failure", ["another rank raises", "time is up"])
def test_a_barrier_that_failed_does_not_spoil_the_next(threads: Client, eventually: Any, failure: str) -> None:
    def idle() -> bool:
        busy = threads.run(lambda dask_worker: len(dask_worker.state.executing) + len(dask_worker.state.long_running))
        return not any(busy.values())

    mesh = dm.init_mesh(3, ["x"])
    with dm.create_shmem_tensor("trio", 3, "i4", [3], mesh=mesh) as tensor:

        def fail() -> Any:
            if dm.my_pe() != 1:
                dm.shmem_barrier_all(tensor, timeout=0.2)
            elif failure == "another rank raises":
                raise TimeoutError("raised by PE 1")
            return np.zeros(1)

        def meet() -> Any:  # nobody passes before all have written
            found = []
            for turn in range(1, 4):
                for pe in range(3):
                    dm.shmem_put(np.array([turn], "i4"), [dm.my_pe()], tensor, pe)
                dm.shmem_barrier_all(tensor)
                found.append(dm.shmem_load(tensor, dm.my_pe()).min())
                dm.shmem_barrier_all(tensor)
            return np.array([found])

        for _ in range(2):
            with pytest.raises(TimeoutError):
                run(fail, mesh)
            eventually(idle)  # the error of one rank comes before the others have heard of it
            assert run(meet, mesh) == [[1, 2, 3]] * 3


def test_shards_without_dims_are_loaded() -> None:
    mesh = dm.init_mesh(3, ["x"])
    x = dm.shard_tensor(np.array(3.0), mesh, [dm.Replicate()])
    assert np.asarray(dm.shmem_load(x, 1)) == 3.0
    with dm.symm_from_dtensor(x) as tensor:
        assert np.asarray(tensor.load(())) == 3.0
        assert run(lambda: np.array([tensor.load(()), dm.shmem_load(tensor, 2)]), mesh) == [3.0] * 6


@pytest.mark.parametrize(("dtype", "first", "then"), [(">i4", 0, 5), ("U3", "", "ab"), ("S2", b"", b"x"), ("f2", 0, 1.5)])
def test_atomics_give_elements_of_the_dtype(dtype: str, first: Any, then: Any) -> None:
    with dm.create_shmem_tensor("trio", 3, dtype, [2]) as tensor:
        before = dm.shmem_atomic_swap(tensor, 1, then, 1, by=0)
        assert (np.asarray(before), before.dtype) == (first, np.dtype(dtype))
        assert np.asarray(dm.shmem_atomic_fetch(tensor, 1, 1, by=0)) == then


@pytest.mark.parametrize(("dtype", "message"), [(("f4", (2,)), r"dtype='<f4' and add \(2,\) to shape"), ("S0", "as in 'S8'")])
def test_elements_have_a_size_of_their_own(dtype: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        dm.create_shmem_tensor("trio", 3, dtype, [2])


def test_views_of_uneven_shards_end_where_the_shards_do() -> None:
    mesh = dm.init_mesh(2, ["x"])
    with dm.symm_from_dtensor(dm.arange(5, mesh=mesh, placements=ROWS)) as tensor:
        for view, row in ((dm.shmem_view(tensor, [3], [0]), [3, 4, -1]), (dm.shmem_view(tensor, [1], [2]), [-1])):
            assert np.asarray(dm.shmem_load(view, 1, fill_value=-1)).tolist() == row
        with pytest.raises(ValueError, match="beyond the valid part"):
            dm.shmem_put([1, 2, 3], [0], dm.shmem_view(tensor, [3], [0]), 1)
        assert np.asarray(dm.shmem_load(dm.shmem_view(tensor, [3], [0]), 0)).tolist() == [0, 1, 2]
