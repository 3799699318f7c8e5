"""The programs by hand with mpi4py, on the same kernels: ``mpiexec -n 2 python peers_mpi.py NAME SIZES ROUNDS``.

Prints a line of JSON: the seconds of each round, and the answer.
"""

from __future__ import annotations

import json
import sys
from time import perf_counter
from typing import Any

import numpy as np
import workloads
from mpi4py import MPI

COMM = MPI.COMM_WORLD
RANK = COMM.rank
ABOVE = RANK - 1 if RANK else MPI.PROC_NULL
BELOW = RANK + 1 if RANK < COMM.size - 1 else MPI.PROC_NULL


def halos(u: Any) -> None:
    """Fill the first and the last row of a padded array from the neighbours."""
    COMM.Sendrecv(u[1], ABOVE, recvbuf=u[-1], source=BELOW)
    COMM.Sendrecv(u[-2], BELOW, recvbuf=u[0], source=ABOVE)


def summed(x: Any) -> Any:
    """All-reduce."""
    term, out = np.asarray(x), np.empty_like(x)
    COMM.Allreduce(term, out)
    return out[()]


def jacobi(f: Any, sweeps: int) -> Any:
    """Two rows to each neighbour and one number to all, each sweep."""
    f = np.pad(f, 1)
    (u, new), space, norms = workloads.jacobi.grids(f), workloads.jacobi.workspace(f), np.empty(sweeps)
    for turn in range(sweeps):
        u[0] = u[-1] = u[:, 0] = u[:, -1] = 0
        halos(u)
        norms[turn] = summed(workloads.jacobi.sweep(u, new, f, space)) ** 0.5
        u, new = new, u
    return norms


def cg(b: Any, turns: int) -> Any:
    """The same with two numbers to all."""
    r = np.pad(b, 1)
    p, x, ap, space = r.copy(), np.zeros_like(r), np.zeros_like(r), workloads.cg.workspace(r)
    norms = [summed(np.vdot(r, r))]
    for _ in range(turns):
        p[0] = p[-1] = p[:, 0] = p[:, -1] = 0
        halos(p)
        alpha = norms[-1] / summed(workloads.cg.apply(p, ap, space))
        norms.append(summed(workloads.cg.step(alpha, x, r, p, ap, space)))
        workloads.cg.turn(norms[-1] / norms[-2], r, p)
    return np.sqrt(norms)


def kmeans(points: Any, turns: int) -> Any:
    """One small all-reduce per turn."""
    centres = workloads.guess()
    for _ in range(turns):
        centres = workloads.kmeans.moved(centres, summed(workloads.kmeans.sums(points, centres)))
    return centres


def logreg(x: Any, y: Any, turns: int) -> Any:
    """One small all-reduce per turn."""
    samples, features = len(x) * COMM.size, x.shape[1]
    w, speed, losses = np.zeros(features), np.zeros(features), []
    for _ in range(turns):
        total = summed(workloads.logreg.gradient_and_loss(w, x, y)) / samples
        losses.append(total[-1])
        speed = 0.9 * speed - total[:-1]
        w = w + speed
    return np.array(losses)


def fft2(x: Any) -> Any:
    """Pack, Alltoall."""
    rows = np.fft.fft(x, axis=1)
    width = rows.shape[1] // COMM.size
    send = np.ascontiguousarray(rows.reshape(len(rows), COMM.size, width).swapaxes(0, 1))
    columns = np.empty((len(rows) * COMM.size, width), rows.dtype)
    COMM.Alltoall(send, columns)
    return np.fft.fft(columns, axis=0, out=columns)


def tsqr(a: Any) -> Any:
    """One gather of the small factors."""
    tops, r = workloads.tsqr.factor(a)
    stack = np.empty((COMM.size * len(r), len(r)))
    COMM.Allgather(np.ascontiguousarray(r), stack)
    q, whole = np.linalg.qr(stack)
    workloads.tsqr.expand(tops, q[RANK * len(r) : (RANK + 1) * len(r)], len(a))
    return whole


def collectives(calls: int, mib: float, rounds: int) -> dict[str, list[float]]:
    """Seconds of a call, by case and round; the cases and their names are those of bench_collectives."""
    row, grid, got = np.ones((1, 2048)), np.zeros((66, 2048)), np.empty((1, 2048))
    mid, large = np.ones(2**17), np.ones((2, int(mib * 2**16)))
    halves = np.ones((COMM.size, 2, large.shape[1] // COMM.size))

    def gathered() -> Any:
        out = np.empty((2 * COMM.size, large.shape[1]))
        COMM.Allgather(large, out)
        return out

    cases: dict[str, tuple[float, Any]] = {
        "all_reduce 8 B": (1, lambda: summed(1.0)),
        "barrier": (1, COMM.Barrier),
        "shift 16 KiB": (1, lambda: COMM.Sendrecv(row, 1 - RANK, recvbuf=got, source=1 - RANK)),
        "halo_exchange 16 KiB": (1, lambda: halos(grid)),
        "all_reduce 1 MiB": (20, lambda: summed(mid)),
        "all_reduce large": (500, lambda: summed(large)),
        "all_gather large": (500, gathered),
        "all_to_all large": (500, lambda: COMM.Alltoall(halves, np.empty_like(halves))),
    }
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds + 1):
        for name, (fewer, call) in cases.items():
            n = max(1, int(calls / fewer))
            COMM.Barrier()
            start = perf_counter()
            for _ in range(n):
                call()
            seconds.setdefault(name, []).append((perf_counter() - start) / n)
    return {name: values[1:] for name, values in seconds.items()}


def main(name: str, sizes: dict[str, int], rounds: int) -> None:
    """Run one program, or the collectives."""
    if name == "collectives":
        seconds_of = collectives(**sizes, rounds=rounds)
        if RANK == 0:
            print(json.dumps(seconds_of))
        return
    arguments: list[Any] = [workloads.part(name, RANK, sizes)]
    if name == "logreg":
        arguments.append(workloads.labels(RANK, sizes))
    arguments += workloads.turns(name, sizes)
    seconds = []
    for _ in range(rounds + 1):
        COMM.Barrier()
        start = perf_counter()
        answer = globals()[name](*arguments)
        COMM.Barrier()
        seconds.append(perf_counter() - start)
    if name == "fft2":
        answer = COMM.allreduce(np.abs(answer[:4]).sum())
    if RANK == 0:
        print(json.dumps({"seconds": seconds[1:], "answer": np.abs(answer).tolist()}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
