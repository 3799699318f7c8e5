"""How fast a view of another worker's array is loaded on one host, against a plain copy and against a Dask dependency.

Run with ``python benchmarks/bench_transport.py [--mib 64] [--rounds 15] [--malloc daskmesh]``. All figures are ratios of
medians of interleaved rounds of one run, so that whatever else the machine does falls on all of them alike.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import dask
import numpy as np
from distributed import Client, LocalCluster, wait

from daskmesh import cli, transport
from daskmesh.cli import ENVIRON

TOY = {"nbytes": 2**16, "rounds": 2}  # the arguments with which the tests run `main`

# Under Dask's setting a large array is new memory each time; under that of daskmesh's own clusters, memory used before.
MALLOC = {"dask": {"MALLOC_TRIM_THRESHOLD_": 65536}, "daskmesh": cli.MALLOC}
QUIET: dict[str, Any] = {"dashboard_address": "127.0.0.1:0", "scheduler_kwargs": {"dashboard": False}}


def setup(dask_worker: Any) -> None:
    """Give the worker its shard store."""
    transport.setup_worker(dask_worker)


def make(nbytes: int) -> np.ndarray[Any, Any]:
    """The array to be loaded."""
    return np.random.default_rng(0).random(nbytes // 8)


def expose(nbytes: int) -> transport.Ticket:
    """Expose it."""
    return transport.expose(make(nbytes))


def first(array: np.ndarray[Any, Any]) -> float:
    """What the task that depends on the whole array makes of it."""
    return float(array[0])


def timed(run: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = perf_counter()
    run()
    return perf_counter() - start


def read(ticket: transport.Ticket, rounds: int) -> dict[str, list[float]]:
    """Runs on the reader: seconds of each round, by what was done."""
    size = ticket.shape[0]
    local, kept = make(ticket.nbytes), np.ones(size)

    def load_on(road: str, out: np.ndarray[Any, Any]) -> None:
        with dask.config.set({"daskmesh.transport": road}):
            transport.load_into(ticket, (), out)

    cases: dict[str, Callable[[], Any]] = {
        "memcpy, fresh": lambda: np.copyto(np.empty(size), local),
        "memcpy, kept": lambda: np.copyto(kept, local),
        "load, fresh": lambda: transport.load(ticket),
        "load, kept": lambda: transport.load_into(ticket, (), kept),
        "load by shm, kept": lambda: load_on("shm", kept),
        "load by rpc, kept": lambda: load_on("rpc", kept),
        "load 8 bytes": lambda: transport.load_into(ticket, (slice(0, 1),), kept[:1]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds + 1):
        for name, run in cases.items():
            seconds[name].append(timed(run))
    return {name: values[1:] for name, values in seconds.items()}


def measure(nbytes: int, rounds: int, malloc: dict[str, int]) -> dict[str, list[float]]:
    """Seconds of each round on two worker processes that start with these settings of the allocator."""
    seconds: dict[str, list[float]] = {"dask dependency": []}
    with (
        dask.config.set({ENVIRON: {**dask.config.get(ENVIRON), **malloc}}),
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        client.run(setup)
        owner, reader = list(client.scheduler_info()["workers"])
        ticket = client.submit(expose, nbytes, workers=[owner], pure=False)
        wait(ticket)
        for _ in range(3):
            part = client.submit(read, ticket, max(1, rounds // 3), workers=[reader], pure=False).result()
            for name, values in part.items():
                seconds.setdefault(name, []).extend(values)
            for _ in range(max(1, rounds // 3)):
                whole = client.submit(make, nbytes, workers=[owner], pure=False)
                wait(whole)
                use = client.submit(first, whole, workers=[reader], pure=False)
                seconds["dask dependency"].append(timed(use.result))
    return seconds


def main(nbytes: int = 64 * 2**20, rounds: int = 15, malloc: str = "dask") -> dict[str, float]:
    """Print the medians and the ratios the project holds itself to; the ratios, by name."""
    seconds = measure(nbytes, rounds, MALLOC[malloc])
    middle = {name: median(values) for name, values in seconds.items()}
    print(f"{nbytes / 2**20:g} MiB between two worker processes of this host, allocator as {malloc} sets it")
    for name, value in sorted(middle.items(), key=lambda item: item[1]):
        print(f"  {name:<20} {value * 1e3:9.3f} ms")
    ratios = {
        "load / memcpy, fresh (0.7)": middle["memcpy, fresh"] / middle["load, fresh"],
        "load / memcpy, kept (0.9)": middle["memcpy, kept"] / middle["load, kept"],
        "load / dask dependency (2.5)": middle["dask dependency"] / middle["load, fresh"],
    }
    for name, value in ratios.items():
        print(f"  {name:<28} {value:6.2f} times as fast")
    return ratios


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=float, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--malloc", choices=sorted(MALLOC), default="dask")
    arguments = parser.parse_args()
    main(int(arguments.mib * 2**20), arguments.rounds, arguments.malloc)
