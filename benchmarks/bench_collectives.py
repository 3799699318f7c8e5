"""How long collectives take on two ranks, in a loop inside a region, beside a bare socket and, where it is installed, mpi4py.

Run with ``python benchmarks/bench_collectives.py [--rounds 7] [--calls 1000] [--mib 64] [--without mpi4py]``. Two worker
processes with one thread each. Cases take turns in each round; medians and least times of a call are printed. The socket is the
floor of what sleeps while it waits: two processes that write 64 bytes to each other and read what came.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import subprocess
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from bench_regions import installed, peer_line, two_workers

import daskmesh as dm
from daskmesh import collectives

TOY = {"rounds": 2, "calls": 5, "mib": 0.5, "without": ("mpi4py",)}  # the arguments with which the tests run `main`
TARGET = 0.06e-3  # seconds of an all-reduce of 8 bytes
SMALL = "all_reduce 8 B"

Seconds = dict[str, list[float]]


def cases(mib: float) -> dict[str, tuple[float, Callable[[], Any]]]:
    """The calls, and how many times fewer of them are made than of the smallest."""
    row, grid = np.ones((1, 2048)), np.zeros((66, 2048))
    mid, large = np.ones(2**17), np.ones((2, int(mib * 2**16)))
    return {
        SMALL: (1, lambda: collectives.all_reduce(1.0)),
        "barrier": (1, collectives.barrier),
        "shift 16 KiB": (1, lambda: collectives.shift(row)),
        "halo_exchange 16 KiB": (1, lambda: collectives.halo_exchange(grid[1:-1], 1, 0, 0.0, out=grid)),
        "all_reduce 1 MiB": (20, lambda: collectives.all_reduce(mid)),
        "all_reduce large": (500, lambda: collectives.all_reduce(large)),
        "all_gather large": (500, lambda: collectives.all_gather(large)),
        "all_to_all large": (500, lambda: collectives.all_to_all(large, split_dim=1, concat_dim=0)),
    }


def measure(x: Any, rounds: int, calls: int, mib: float) -> tuple[Any, str]:
    """Runs on each rank: seconds of a call, by case and round."""
    seconds: Seconds = {}
    for _ in range(rounds + 1):
        for name, (fewer, call) in cases(mib).items():
            n = max(1, int(calls / fewer))
            collectives.barrier()
            start = perf_counter()
            for _ in range(n):
                call()
            seconds.setdefault(name, []).append((perf_counter() - start) / n)
    return x, json.dumps({name: values[1:] for name, values in seconds.items()})


def exchange(end: socket.socket, calls: int) -> float:
    """Seconds of writing and reading once, at one end."""
    start = perf_counter()
    for _ in range(calls):
        end.sendall(bytes(64))
        end.recv(64, socket.MSG_WAITALL)
    return (perf_counter() - start) / calls


def bare_socket(rounds: int, calls: int) -> list[float]:
    """Seconds of an exchange between two processes that do nothing else."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = multiprocessing.get_context("spawn").Process(target=exchange, args=(theirs, (rounds + 1) * calls))
        process.start()
        found = [exchange(ours, calls) for _ in range(rounds + 1)]
        process.join()
    return found[1:]


def main(rounds: int = 7, calls: int = 1000, mib: float = 64, without: Sequence[str] = ()) -> dict[str, float]:
    """Print the times of a call; the medians, by case, in seconds."""
    with two_workers():
        x = dm.zeros((2,), mesh=dm.init_mesh(2, ["x"]), placements=[dm.Shard(0)])
        region = dm.local_map(measure, [[dm.Shard(0)], None], out_shapes=((2,), None))
        _, reports = region(x, rounds, calls, mib)
        ours: Seconds = json.loads(reports[0].compute())
    floor = bare_socket(rounds, calls)
    theirs: Seconds = {}
    if "mpi4py" not in without and installed("mpi4py"):
        line, environ = peer_line("mpi4py", "collectives", json.dumps({"calls": calls, "mib": mib}), str(rounds))
        done = subprocess.run(line, env=environ, check=True, stdout=subprocess.PIPE, text=True)
        theirs = json.loads(done.stdout)
    print(f"a call on two ranks, median (least) of {rounds} rounds; large is {mib:g} MiB on each rank")
    print(f"  {'an exchange over a bare socket':<32} {_shown(floor)}")
    for name, values in ours.items():
        peer = f", mpi4py {_shown(theirs[name])}" if name in theirs else ""
        print(f"  {name:<32} {_shown(values)}{peer}")
    verdict = "within" if median(ours[SMALL]) <= TARGET else "above"
    print(f"  {SMALL}: {verdict} {TARGET * 1e3:.2g} ms")
    return {name: median(values) for name, values in ours.items()}


def _shown(values: list[float]) -> str:
    return f"{median(values) * 1e3:9.4f} ms ({min(values) * 1e3:.4f})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--mib", type=float, default=64)
    parser.add_argument("--without", nargs="+", default=())
    arguments = parser.parse_args()
    main(arguments.rounds, arguments.calls, arguments.mib, arguments.without)
