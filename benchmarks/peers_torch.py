"""The programs in PyTorch, two processes that speak gloo: ``python peers_torch.py NAME SIZES ROUNDS``.

Local tensors and collectives by hand, as there is no DTensor for halos. Prints a line of JSON: the seconds of each round, and
the answer.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import workloads

RANKS = workloads.RANKS


def summed(x: Any) -> Any:
    """All-reduce, in place."""
    dist.all_reduce(x)
    return x


def halos(u: Any) -> None:
    """Fill the first and the last row of a padded tensor from the neighbours."""
    rank = dist.get_rank()
    moves = []
    for peer, own, halo in ((rank - 1, u[1], u[0]), (rank + 1, u[-2], u[-1])):
        if 0 <= peer < RANKS:
            moves += [dist.isend(own, peer), dist.irecv(halo, peer)]
    for move in moves:
        move.wait()


def around(u: Any) -> Any:
    """The sum of the four neighbours."""
    return u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]


def padded(x: Any) -> Any:
    """With a row and a column of zeros on each side."""
    return torch.nn.functional.pad(x, (1, 1, 1, 1))


def jacobi(f: Any, sweeps: int) -> Any:
    """Two rows to each neighbour and one number to all, each sweep."""
    u, norms = padded(torch.zeros_like(f)), []
    for _ in range(sweeps):
        halos(u)
        new = around(u).add_(f).mul_(0.25)
        change = new - u[1:-1, 1:-1]
        norms.append(4 * summed(torch.linalg.vector_norm(change) ** 2) ** 0.5)
        u[1:-1, 1:-1] = new
    return torch.stack(norms)


def cg(b: Any, turns: int) -> Any:
    """The same with two numbers to all."""
    p, x, r = padded(b), torch.zeros_like(b), b.clone()
    inner = p[1:-1, 1:-1]
    squares = [summed((r * r).sum())]
    for _ in range(turns):
        halos(p)
        ap = 4 * inner - around(p)
        alpha = squares[-1] / summed((inner * ap).sum())
        x.add_(alpha * inner)
        r.sub_(alpha * ap)
        squares.append(summed((r * r).sum()))
        inner.mul_(squares[-1] / squares[-2]).add_(r)
    return torch.stack(squares).sqrt()


def kmeans(points: Any, turns: int) -> Any:
    """One small all-reduce per turn."""
    centres = torch.from_numpy(workloads.guess())
    for _ in range(turns):
        distances = (centres * centres).sum(1) - 2 * (points @ centres.T)
        own = torch.nn.functional.one_hot(distances.argmin(1), len(centres)).to(points.dtype)
        total = summed(torch.cat((own.T @ points, own.sum(0)[:, None]), 1))
        centres = total[:, :-1] / total[:, -1:]
    return centres


def logreg(x: Any, y: Any, turns: int) -> Any:
    """One small all-reduce per turn."""
    w, speed, losses = torch.zeros(x.shape[1], dtype=x.dtype), torch.zeros(x.shape[1], dtype=x.dtype), []
    for _ in range(turns):
        z = x @ w
        loss = torch.nn.functional.binary_cross_entropy_with_logits(z, y, reduction="sum")
        total = summed(torch.cat(((torch.sigmoid(z) - y) @ x, loss[None]))) / (len(x) * RANKS)
        losses.append(total[-1])
        speed = 0.9 * speed - total[:-1]
        w = w + speed
    return torch.stack(losses)


def fft2(x: Any) -> Any:
    """Pack, all-to-all."""
    rows = torch.fft.fft(x, dim=1)
    send = torch.view_as_real(torch.stack(rows.chunk(RANKS, 1))).contiguous()
    columns = torch.empty_like(send)
    dist.all_to_all_single(columns, send)
    return torch.fft.fft(torch.view_as_complex(columns).flatten(0, 1), dim=0)


def tsqr(a: Any) -> Any:
    """One gather of the small factors; blocks of rows that fit the cache, as in the others."""
    tops, r = zip(*map(torch.linalg.qr, a.split(workloads.tsqr.ROWS)), strict=True)
    middle, r = torch.linalg.qr(torch.cat(r))
    stack = [torch.empty_like(r) for _ in range(RANKS)]
    dist.all_gather(stack, r.contiguous())
    q, whole = torch.linalg.qr(torch.cat(stack))
    right = middle @ q.chunk(RANKS)[dist.get_rank()]
    torch.cat([top @ part for top, part in zip(tops, right.chunk(len(tops)), strict=True)])
    return whole


def process(rank: int, store: str, name: str, sizes: dict[str, int], rounds: int) -> None:
    """One of the two processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    arguments: list[Any] = [torch.from_numpy(workloads.part(name, rank, sizes))]
    if name == "logreg":
        arguments.append(torch.from_numpy(workloads.labels(rank, sizes)))
    arguments += workloads.turns(name, sizes)
    seconds = []
    for _ in range(rounds + 1):
        dist.barrier()
        start = perf_counter()
        answer = globals()[name](*arguments)
        dist.barrier()
        seconds.append(perf_counter() - start)
    answer = summed(answer[:4].abs().sum()) if name == "fft2" else answer.abs()
    if rank == 0:
        print(json.dumps({"seconds": seconds[1:], "answer": answer.tolist()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        given = (str(Path(folder, "store")), sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
        processes.spawn(process, given, RANKS)
