"""How fast one-sided loads of symmetric buffers are on one host, and a reshard against Dask's rechunk.

Run with ``python benchmarks/bench_shmem.py [--mib 64] [--side 4096] [--rounds 15] [--malloc daskmesh]``. All runs in one go on
two worker processes; rounds are interleaved, so that whatever else the machine does falls on all alike. Medians decide; minima
are printed, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter, sleep
from typing import Any

import dask
import dask.array as da
import numpy as np
from bench_transport import MALLOC, first, make, timed
from distributed import Client, LocalCluster, get_worker, wait

import daskmesh as dm
from daskmesh import peers
from daskmesh.cli import ENVIRON

TOY = {"nbytes": 2**16, "side": 64, "rounds": 2}  # the arguments with which the tests run `main`

SETTLE_SECONDS = 0.1  # Dask's client bundles what it sends for 10 ms: the end of one result would delay the next graph

Seconds = dict[str, list[float]]


class Boxed:
    """What a rank returns that is no array."""

    def __init__(self, value: Any) -> None:
        self.value = value


def loads(tensor: dm.ShmemTensor, element: dm.ShmemTensor, rounds: int) -> Boxed:
    """Seconds of each round on PE 0, which loads from PE 1."""
    seconds: Seconds = {}
    if dm.my_pe() == 0:
        (size,) = tensor.shape
        local, kept = make(8 * size), np.ones(size)
        worker = get_worker()
        entry = peers.entry_of(worker, tensor.id, tensor.title)
        cases: dict[str, Callable[[], Any]] = {
            "memcpy, fresh": lambda: np.copyto(np.empty(size), local),
            "load, fresh": lambda: dm.shmem_load(tensor, 1),
            "memcpy, kept": lambda: np.copyto(kept, local),
            "load, kept": lambda: peers.load_view(worker, entry, 1, ((0, size),), kept),
            "load 8 bytes": lambda: dm.shmem_load(element, 1),
            "put 8 bytes": lambda: dm.shmem_put(local[:1], (0,), element, 1),
            "fetch_add": lambda: dm.shmem_atomic_fetch_add(element, 0, 1.0, 1),
        }
        for _ in range(rounds + 1):
            for name, run in cases.items():
                seconds.setdefault(name, []).append(timed(run))
    dm.shmem_barrier_all(tensor)
    return Boxed({name: values[1:] for name, values in seconds.items()})


def dependency(client: Client, nbytes: int, rounds: int, owner: str, reader: str) -> list[float]:
    """Seconds in which a task gets an array of another worker the usual way."""
    seconds = []
    for _ in range(rounds):
        whole = client.submit(make, nbytes, workers=[owner], pure=False)
        wait(whole)
        use = client.submit(first, whole, workers=[reader], pure=False)
        seconds.append(timed(use.result))
    return seconds


def reshards(side: int, rounds: int) -> Seconds:
    """Seconds of Shard(0) -> Shard(1), source and result persisted, and of the same rechunk."""
    mesh = dm.init_mesh(2, ["x"])
    x = dm.ones((side, side), mesh=mesh, placements=[dm.Shard(0)]).persist()
    a = da.ones((side, side), chunks=(side // 2, side)).persist()
    wait([x, a])

    def rechunk(method: str) -> Any:
        with dask.config.set({"array.rechunk.method": method}):
            return a.rechunk((side, side // 2))

    cases: dict[str, Callable[[], Any]] = {
        "reshard": lambda: x.reshard([dm.Shard(1)]),
        "rechunk, tasks": lambda: rechunk("tasks"),
        "rechunk, p2p": lambda: rechunk("p2p"),
    }
    seconds: Seconds = {name: [] for name in cases}
    order = list(cases.items())
    for _ in range(rounds + 1):
        order.append(order.pop(0))  # so that none always comes after the same one
        for name, record in order:
            begin = perf_counter()
            made = record().persist()
            wait(made)
            seconds[name].append(perf_counter() - begin)
            del made
            sleep(SETTLE_SECONDS)
    return {name: values[1:] for name, values in seconds.items()}


def measure(nbytes: int, side: int, rounds: int, malloc: dict[str, int]) -> Seconds:
    """Seconds of each round, by what was done."""
    seconds: Seconds = {}
    with (
        dask.config.set({ENVIRON: {**dask.config.get(ENVIRON), **malloc}}),
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        dm.shutdown()
        table = dm.init_parallel_env().table()
        part = max(1, rounds // 3)
        with (
            dm.create_shmem_tensor("pair", 2, "f8", [nbytes // 8]) as tensor,
            dm.create_shmem_tensor("pair", 2, "f8", [1]) as element,
        ):
            program = dm.local_map(loads, [None], process_mesh=tensor.mesh, out_shapes=[None])
            for _ in range(3):
                values = dask.compute(*program(tensor, element, part))
                for name, found in values[0].value.items():
                    seconds.setdefault(name, []).extend(found)
                seconds.setdefault("dask dependency", []).extend(dependency(client, nbytes, part, table[1], table[0]))
        seconds |= reshards(side, rounds)
        dm.shutdown()
    return seconds


def main(nbytes: int = 64 * 2**20, side: int = 4096, rounds: int = 15, malloc: str = "dask") -> dict[str, float]:
    """Print medians, minima and the ratios the project holds itself to; the ratios, by name."""
    seconds = measure(nbytes, side, rounds, MALLOC[malloc])
    print(f"two worker processes of this host, {nbytes / 2**20:g} MiB, {side} x {side} float64; allocator as {malloc} sets it")
    print(f"  {'':<20} {'median':>12} {'minimum':>12}")
    for name, values in seconds.items():
        print(f"  {name:<20} {median(values) * 1e3:9.3f} ms {min(values) * 1e3:9.3f} ms")
    ratios = {}
    for what, of in (("medians", median), ("minima", min)):
        got = {name: of(values) for name, values in seconds.items()}
        best = min(got["rechunk, tasks"], got["rechunk, p2p"])
        ratios |= {
            f"load / memcpy, fresh (0.7), {what}": got["memcpy, fresh"] / got["load, fresh"],
            f"load / memcpy, kept (0.9), {what}": got["memcpy, kept"] / got["load, kept"],
            f"load / dask dependency (2.5), {what}": got["dask dependency"] / got["load, fresh"],
            f"reshard / best rechunk (2), {what}": best / got["reshard"],
        }
    for name, value in ratios.items():
        print(f"  {name:<40} {value:6.2f} times as fast")
    return ratios


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=float, default=64)
    parser.add_argument("--side", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--malloc", choices=sorted(MALLOC), default="dask")
    arguments = parser.parse_args()
    main(int(arguments.mib * 2**20), arguments.side, arguments.rounds, arguments.malloc)
