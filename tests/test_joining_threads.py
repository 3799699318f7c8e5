"""Regions on workers that share one process: one endpoint for all, results that nobody else can see."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from distributed import Client

import daskmesh as dm
from daskmesh import Replicate, Shard, collectives, get_rank, local_map

pytestmark = pytest.mark.cluster
M5 = dm.init_mesh(5, ["x"])
M22 = dm.init_mesh((2, 2), ["x", "y"])


def test_values_on_three_workers_of_one_process(threads: Client) -> None:
    def program(a: Any) -> Any:
        wide = collectives.halo_exchange(a, 1, "x", "periodic")
        return (wide[:-2] + wide[2:]) * collectives.all_reduce(1.0)

    x = np.arange(7.0)
    result = local_map(program, out_placements=[Shard(0)])(dm.shard_tensor(x, M5, [Shard(0)]))
    assert np.array_equal(result, 5 * (np.roll(x, 1) + np.roll(x, -1)))


def test_more_ranks_than_threads_do_not_block_each_other(threads: Client) -> None:
    mesh = dm.init_mesh(11, ["x"])

    def program(a: Any) -> Any:
        for _ in range(5):
            a = collectives.shift(a)
        return a

    x = np.arange(22.0)
    result = local_map(program, out_placements=[Shard(0)], out_shapes=((22,),))(dm.shard_tensor(x, mesh, [Shard(0)]))
    assert np.array_equal(result, np.roll(x, 10))


def test_ranks_of_one_process_do_not_share_memory(threads: Client) -> None:
    def program(a: Any) -> Any:
        big = np.full((300, 300), float(get_rank()))
        others = collectives.broadcast(big, "y")
        others += 1000 * get_rank()
        collectives.barrier()
        return a + big.max() + others.max()

    x = dm.shard_tensor(np.zeros(4), M22, [Shard(0), Replicate()])
    result = local_map(program, out_placements=[Shard(0), Replicate()])(x)
    assert [result.local_value(r).tolist() for r in range(4)] == [[0.0] * 2, [1001.0] * 2, [2004.0] * 2, [3005.0] * 2]


def test_an_error_in_one_thread_reaches_the_caller(threads: Client) -> None:
    def program(a: Any) -> Any:
        collectives.barrier()
        if get_rank() == 3:
            raise LookupError("gone")
        return collectives.all_reduce(a)

    region = local_map(program, out_placements=[Replicate()], out_shapes=((5,),))
    with pytest.raises(LookupError, match="gone") as caught:
        region(dm.shard_tensor(np.arange(5.0), M5, [Replicate()])).compute()
    assert any("rank 3 at coordinate (3,)" in note for note in caught.value.__notes__)
