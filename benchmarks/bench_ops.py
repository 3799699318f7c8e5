"""Operations beside plain dask.array on one cluster, as ratios: a product, a chain of ufuncs, reductions; and recording.

Both sides hold the same blocks, persisted, and compute the same result, which stays on the workers. Run with
``python benchmarks/bench_ops.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
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


def _changed(x: Any, key: Any) -> Any:
    y = x.copy()
    y[key] = 1.0
    return y


# Operations to record, of x and z [Shard(0)], y [Shard(1)], v a vector [Shard(0)], m a mask [Shard(0)], i NumPy indices.
RECORDED: dict[str, Callable[..., Any]] = {
    "x + z": lambda x, y, z, v, m, i: x + z,
    "sqrt(x)": lambda x, y, z, v, m, i: np.sqrt(x),
    "where(m, x, z)": lambda x, y, z, v, m, i: np.where(m, x, z),
    "sum(x, 0)": lambda x, y, z, v, m, i: np.sum(x, axis=0),
    "mean(x, 0)": lambda x, y, z, v, m, i: np.mean(x, axis=0),
    "reshard": lambda x, y, z, v, m, i: x.reshard({"x": S1}),
    "x + y": lambda x, y, z, v, m, i: x + y,
    "x + x.T": lambda x, y, z, v, m, i: x + x.T,
    "x @ y": lambda x, y, z, v, m, i: x @ y,
    "einsum": lambda x, y, z, v, m, i: np.einsum("ij,jk->ik", x, y),
    "tensordot": lambda x, y, z, v, m, i: np.tensordot(x, y, 1),
    "cumsum(x, 0)": lambda x, y, z, v, m, i: np.cumsum(x, axis=0),
    "concatenate": lambda x, y, z, v, m, i: np.concatenate([x, z]),
    "stack": lambda x, y, z, v, m, i: np.stack([x, z]),
    "roll": lambda x, y, z, v, m, i: np.roll(x, 3, axis=0),
    "flip": lambda x, y, z, v, m, i: np.flip(x, 0),
    "reshape": lambda x, y, z, v, m, i: np.reshape(y, -1),
    "x[2:5]": lambda x, y, z, v, m, i: x[2:5],
    "x[::-1]": lambda x, y, z, v, m, i: x[::-1],
    "x[3]": lambda x, y, z, v, m, i: x[3],
    "x[integers]": lambda x, y, z, v, m, i: x[i],
    "x[integers, integers]": lambda x, y, z, v, m, i: x[i, i],
    "x[booleans]": lambda x, y, z, v, m, i: x[i % 3 == 0],
    "x[DTensor]": lambda x, y, z, v, m, i: x[v.astype(int)],
    "take": lambda x, y, z, v, m, i: np.take(x, i, axis=0),
    "x[2] = 1": lambda x, y, z, v, m, i: _changed(x, 2),
    "x[integers] = 1": lambda x, y, z, v, m, i: _changed(x, i),
    "var(x, 0)": lambda x, y, z, v, m, i: np.var(x, axis=0),
    "std(x)": lambda x, y, z, v, m, i: np.std(x),
    "average": lambda x, y, z, v, m, i: np.average(x, axis=0),
    "nanmean": lambda x, y, z, v, m, i: np.nanmean(x, axis=0),
    "ptp": lambda x, y, z, v, m, i: np.ptp(x, axis=0),
    "argmax": lambda x, y, z, v, m, i: np.argmax(x, axis=0),
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


def recording(function: Callable[[], Any], records: int) -> float:
    """Microseconds to record one operation on the client: the lower quartile, for the machine does other things, too."""
    times = []
    for _ in range(records):
        start = perf_counter()
        result = function()
        times.append(perf_counter() - start)
        del result
    return sorted(times)[records // 4] * 1e6


def first(function: Callable[[int], Any], shapes: int = 8) -> float:
    """The same where no operation of this kind has met these shapes before; `function` is given how much longer dim 0 is."""
    times = []
    for k in range(1, shapes + 1):
        prepared = function(k)
        start = perf_counter()
        result = prepared()
        times.append(perf_counter() - start)
        del result
    return median(times) * 1e6


def tasks(x: Any) -> int:
    """Tasks in the graph, those of the operands included."""
    return len(dict(x.__dask_graph__()))


def main(size: int = 4096, repeats: int = 5, records: int = 400, processes: bool = True) -> None:
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
        record_all(records, lambda: a + b)
        dm.shutdown()


def record_all(records: int, theirs: Callable[[], Any], size: int = 512) -> None:
    """Print what recording costs, for layouts that were met before and for new ones."""
    rng = np.random.default_rng(0)

    def operands(longer: int, mesh: dm.ProcessMesh) -> tuple[Any, ...]:
        n = size + 4 * longer
        x, y, z = (dm.zeros((n, n), mesh=mesh, placements=[p]) for p in (S0, S1, S0))
        v, m = (dm.zeros(s, dtype=d, mesh=mesh, placements=[S0]) for s, d in ((n, "f8"), ((n, n), "?")))
        return x, y, z, v, m, rng.permutation(n)

    meshes = [dm.init_mesh(shape, names) for shape, names in (((4,), ["x"]), ((2, 2), ["x", "y"]))]
    print(f"{'recording, us':<24}{'mesh (4)':>12}{'mesh (2, 2)':>12}{'first time':>12}")
    for name, function in RECORDED.items():
        costs = []
        for mesh in meshes:
            given = operands(0, mesh)
            costs.append(recording(lambda f=function, g=given: f(*g), records))
        fresh = first(lambda k, f=function: partial(f, *operands(k, meshes[0])))
        print(f"{name:<24}{costs[0]:12.1f}{costs[1]:12.1f}{fresh:12.1f}")
    print(f"{'dask.array: a + b':<24}{recording(theirs, records):12.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--records", type=int, default=400)
    arguments = parser.parse_args()
    main(arguments.size, arguments.repeats, arguments.records)
