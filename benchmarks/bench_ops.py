"""Operations beside plain dask.array on one cluster, as ratios: a product, a chain of ufuncs, reductions, and recording.

Both sides hold the same blocks, persisted, and compute the same result, which stays on the workers. Run with
``python benchmarks/bench_ops.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import dask.array as da
import numpy as np
from distributed import Client, LocalCluster, wait

import daskmesh as dm

TOY: dict[str, Any] = {"size": 32, "repeats": 1, "records": 20, "processes": False}

S0, S1 = dm.Shard(0), dm.Shard(1)


def chain(x: Any) -> Any:
    """Eight ufuncs."""
    return np.sqrt(np.abs(((x * 2 + 1) ** 2 - x) * 3 + 0.5))


CASES: dict[str, Callable[[Any, Any], Any]] = {
    "matmul": lambda x, y: x @ y,
    "chain of 8 ufuncs": lambda x, y: chain(x),
    "sum of all": lambda x, y: np.sum(x),
    "mean of rows": lambda x, y: np.mean(x, axis=1),
    "var of columns": lambda x, y: np.var(x, axis=0),
    "argmax of columns": lambda x, y: np.argmax(x, axis=0),
    "cumsum of columns": lambda x, y: np.cumsum(x, axis=0),
    "x + x.sum(0)": lambda x, y: x + np.sum(x, axis=0),
}


def seconds(client: Client, function: Callable[[], Any], repeats: int) -> float:
    """Median time until the result is on the workers; a run starts when the one before, of the same name, is forgotten."""
    times = []
    held = known(client)
    for _ in range(repeats):
        start = perf_counter()
        result = function().persist()
        wait(result)
        times.append(perf_counter() - start)
        del result
        while known(client) > held:
            pass
    return median(times)


def known(client: Client) -> int:
    """Tasks that the scheduler knows."""
    return int(client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)))


def recording(x: Any, y: Any, records: int) -> float:
    """Microseconds to record one ufunc on the client."""
    z = x + y
    start = perf_counter()
    for _ in range(records):
        z = x + y
    took = perf_counter() - start
    del z
    return took / records * 1e6


def tasks(x: Any) -> int:
    """Tasks in the graph, those of the operands included."""
    return len(dict(x.__dask_graph__()))


def main(size: int = 4096, repeats: int = 5, records: int = 2000, processes: bool = True) -> None:
    """Print a row for each case: both times, their ratio, and the tasks of both graphs."""
    cluster = LocalCluster(
        n_workers=2, threads_per_worker=1, processes=processes, dashboard_address="127.0.0.1:0",
        scheduler_kwargs={"dashboard": False},
    )  # fmt: skip
    with cluster, Client(cluster) as client:
        mesh = dm.init_mesh((2, 2), ("x", "y"))
        a, b = (da.random.default_rng(i).random((size, size), chunks=(size // 2, size // 2)).persist() for i in (0, 1))
        x, y = (dm.shard_tensor(v, mesh, [S0, S1]).persist() for v in (a, b))
        wait([a, b, x, y])
        print(f"{size} x {size} float64, 2 x 2 blocks, 2 workers")
        print(f"{'case':<20}{'daskmesh':>12}{'dask.array':>12}{'ratio':>8}{'tasks':>8}{'tasks':>8}")
        for name, function in CASES.items():
            mine, theirs = (seconds(client, lambda f=function, p=p: f(*p), repeats) for p in ((x, y), (a, b)))
            counts = tasks(function(x, y)), tasks(function(a, b))
            print(f"{name:<20}{mine * 1e3:9.1f} ms{theirs * 1e3:9.1f} ms{mine / theirs:8.2f}{counts[0]:8}{counts[1]:8}")
        mine, theirs = recording(x, y, records), recording(a, b, records)
        print(f"{'recording x + y':<20}{mine:9.1f} us{theirs:9.1f} us{mine / theirs:8.2f}")
        dm.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--records", type=int, default=2000)
    arguments = parser.parse_args()
    main(arguments.size, arguments.repeats, arguments.records)
