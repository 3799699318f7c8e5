"""Programs whose whole loop is one region, beside plain dask.array and, where they are installed, mpi4py, PyTorch and JAX.

Run with ``python benchmarks/bench_regions.py [--rounds 3] [--only jacobi cg] [--without torch jax]``. Two worker processes with
one thread each, daskmesh's setting of the allocator for all of them; peers take turns in each round, so that whatever else
the machine does falls on all alike. Per program it prints the median and the least time of each peer, and the ratios. Long
loops of dask.array run a tenth of the turns, and their time is multiplied by ten. All answers are compared.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import dask
import dask.array as da
import numpy as np
import peers_dask
import workloads
from distributed import Client, LocalCluster, wait
from workloads import NAMES, SIZES, cg, fft2, jacobi, kmeans, logreg, tsqr

import daskmesh as dm
from daskmesh.cli import MALLOC

Run = Callable[[], tuple[float, Any]]  # gives seconds and the answer
TOY = {
    "sizes": {"grid": 16, "sweeps": 10, "points": 64, "fft": 8, "tall": 128, "means": 2, "descents": 10},
    "rounds": 1,
    "without": ("mpi4py", "torch", "jax"),
}
FEWER = {"jacobi": 10, "cg": 10, "logreg": 10}  # times fewer turns for dask.array, whose time is multiplied
HERE = Path(__file__).parent
PEERS = {"mpi4py": "peers_mpi.py", "torch": "peers_torch.py", "jax": "peers_jax.py"}


@contextmanager
def two_workers() -> Iterator[Client]:
    """Two worker processes with one thread, under daskmesh's setting of the allocator."""
    environ = {**dask.config.get("distributed.nanny.pre-spawn-environ"), **MALLOC}
    with (
        dask.config.set({"distributed.nanny.pre-spawn-environ": environ}),
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0", scheduler_kwargs={"dashboard": False}) as cluster,
        Client(cluster) as client,
    ):
        # As mpiexec does for its ranks: Linux shares a busy machine out by sessions.
        client.run(os.setsid)
        yield client
        dm.shutdown()


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of one call, and what it gave."""
    start = perf_counter()
    result = run()
    return perf_counter() - start, result


def held(*collections: Any) -> Any:
    """The collections, computed and kept on the workers."""
    kept = dask.persist(*collections)
    wait(kept)
    return kept


def mesh_run(name: str, sizes: dict[str, int]) -> Run:
    """A program on daskmesh, its data in place."""
    mesh, rows = dm.init_mesh(2, ["x"]), [dm.Shard(0)]
    shape, turns = workloads.shape(name, sizes), workloads.turns(name, sizes)
    (x,) = held(dm.dtensor_from_local(lambda rank: workloads.part(name, rank, sizes), mesh, rows, shape=shape))
    if name == "logreg":
        (y,) = held(dm.dtensor_from_local(lambda rank: workloads.labels(rank, sizes), mesh, rows, shape=shape[:1]))
    calls: dict[str, Callable[[], Any]] = {
        "jacobi": lambda: held(*jacobi.jacobi(x, *turns)),
        "cg": lambda: held(*cg.solve(x, 1e-8, *turns)),
        "kmeans": lambda: held(kmeans.kmeans(x, workloads.guess(), *turns)),
        "logreg": lambda: held(*logreg.fit(x, y, *turns)),
        "fft2": lambda: held(fft2.fft2(x)),
        "tsqr": lambda: held(*tsqr.tsqr(x)),
    }

    def run() -> tuple[float, Any]:
        seconds, result = timed(calls[name])
        return seconds, np.abs(result[0][:4]).sum() if name == "fft2" else np.abs(result[-1])

    return run


def dask_run(name: str, sizes: dict[str, int], client: Client) -> Run:
    """A program in dask.array, its data on the same workers."""
    workers = sorted(client.scheduler_info()["workers"])

    def pinned(make: Callable[..., Any], shape: tuple[int, ...], *arguments: Any) -> Any:
        parts = [client.submit(make, *arguments, rank, sizes, workers=[at]) for rank, at in enumerate(workers)]
        dtype = complex if name == "fft2" else "f4" if name == "kmeans" else float
        arrays = [da.from_delayed(dask.delayed(p), (shape[0] // 2, *shape[1:]), dtype) for p in parts]
        return held(da.concatenate(arrays))[0]

    shape, times = workloads.shape(name, sizes), FEWER.get(name, 1)
    turns = tuple(n // times for n in workloads.turns(name, sizes))
    x = pinned(workloads.part, shape, name)
    y = pinned(workloads.labels, shape[:1]) if name == "logreg" else None
    calls: dict[str, Callable[[], Any]] = {
        "jacobi": lambda: peers_dask.jacobi(x, *turns),
        "cg": lambda: peers_dask.cg(x, *turns),
        "kmeans": lambda: peers_dask.kmeans_(x, *turns),
        "logreg": lambda: peers_dask.logreg(x, y, *turns),
        "fft2": lambda: peers_dask.fft2(x),
        "tsqr": lambda: peers_dask.tsqr(x),
    }

    def run() -> tuple[float, Any]:
        seconds, result = timed(calls[name])
        return seconds * times, np.abs(result[:4]).sum() if name == "fft2" else np.abs(result)

    return run


def peer_line(peer: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """The command that runs a peer in processes of its own, and its environment: threads and allocator as the workers have."""
    launcher = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or "mpiexec"
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
    environ = {**os.environ, **threads, **{key: str(value) for key, value in MALLOC.items()}}
    program = [sys.executable, str(HERE / PEERS[peer]), *arguments]
    return [launcher, "-n", "2", *program] if peer == "mpi4py" else program, environ


def peer_run(peer: str, name: str, sizes: dict[str, int]) -> Run:
    """A program of a peer, in processes of its own."""
    line, environ = peer_line(peer, name, json.dumps(sizes), "1")

    def run() -> tuple[float, Any]:
        done = subprocess.run(line, env=environ, check=True, stdout=subprocess.PIPE, text=True)
        answer = json.loads(done.stdout)
        return median(answer["seconds"]), np.array(answer["answer"])

    return run


def settle(client: Client) -> None:
    """Wait until the results of the last round are gone: under the same names they would be taken for those of the next."""

    def tasks(dask_scheduler: Any) -> int:
        return len(dask_scheduler.tasks)

    gc.collect()
    seen = [-1, 0]
    while len(set(seen[-3:])) > 1:
        sleep(0.02)
        seen.append(client.run_on_scheduler(tasks))


def same(name: str, answers: dict[str, Any]) -> None:
    """Compare the answers, as far as each goes."""
    ours = np.asarray(answers["daskmesh"])
    for peer, theirs in answers.items():
        theirs = np.asarray(theirs)
        both = ours[: len(theirs)] if ours.ndim else ours
        if not np.allclose(both, theirs, rtol=1e-3 if name == "kmeans" else 1e-8, atol=1e-8 * np.abs(both).max()):
            raise RuntimeError(f"{name}: daskmesh and {peer} differ: {both} and {theirs}")


def installed(peer: str) -> bool:
    """Whether a peer can be measured; a line says so if not."""
    found = importlib.util.find_spec(peer) is not None
    if not found:
        print(f"{peer} is not installed, and left out")
    return found


def main(
    sizes: dict[str, int] = SIZES, rounds: int = 3, only: Sequence[str] = NAMES, without: Sequence[str] = ()
) -> dict[str, float]:
    """Print the times of all peers; the ratios of medians to daskmesh's, by program and peer."""
    ratios = {}
    others = [peer for peer in PEERS if peer not in without and installed(peer)]
    with two_workers() as client:
        for name in only:
            runs = {"daskmesh": mesh_run(name, sizes), "dask.array": dask_run(name, sizes, client)}
            runs |= {peer: peer_run(peer, name, sizes) for peer in others}
            seconds: dict[str, list[float]] = {peer: [] for peer in runs}
            for turn in range(rounds + 1):
                answers = {}
                for peer, run in runs.items():
                    settle(client)
                    elapsed, answers[peer] = run()
                    if turn:  # the first round warms up
                        seconds[peer].append(elapsed)
                same(name, answers)
            print(f"{name} {workloads.shape(name, sizes)}")
            for peer, values in seconds.items():
                ratio = ratios[f"{name}, {peer}"] = median(values) / median(seconds["daskmesh"])
                least = min(values) / min(seconds["daskmesh"])
                print(
                    f"  {peer:<12} median {median(values) * 1e3:10.1f} ms, least {min(values) * 1e3:10.1f} ms, "
                    f"{ratio:6.2f} ({least:.2f}) times daskmesh's"
                )
            del runs
    return ratios


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--without", nargs="+", default=())
    arguments = parser.parse_args()
    main(SIZES, arguments.rounds, arguments.only, arguments.without)
