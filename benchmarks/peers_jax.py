"""The programs in JAX, one process with two devices of the CPU: ``python peers_jax.py NAME SIZES ROUNDS``.

Each program is compiled as a whole, with `shard_map`. Prints a line of JSON: the seconds of each round, and the answer.
"""

from __future__ import annotations

import json
import os
import sys
from time import perf_counter
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false"

import jax
import jax.numpy as jnp
import numpy as np
import workloads
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

RANKS = workloads.RANKS
ROWS = PartitionSpec("x")
AXIS = "x"


def padded(u: Any) -> Any:
    """With a row of each neighbour, and zeros around the grid."""
    above = lax.ppermute(u[-1:], AXIS, [(i, i + 1) for i in range(RANKS - 1)])
    below = lax.ppermute(u[:1], AXIS, [(i + 1, i) for i in range(RANKS - 1)])
    return jnp.pad(jnp.concatenate((above, u, below)), ((0, 0), (1, 1)))


def around(u: Any) -> Any:
    """The sum of the four neighbours."""
    wide = padded(u)
    return wide[:-2, 1:-1] + wide[2:, 1:-1] + wide[1:-1, :-2] + wide[1:-1, 2:]


def total(x: Any) -> Any:
    """Sum over all elements of all ranks."""
    return lax.psum(x.sum(), AXIS)


def jacobi(f: Any, sweeps: int) -> Any:
    """The loop is compiled."""

    def sweep(turn: Any, state: Any) -> Any:
        u, norms = state
        new = (around(u) + f) * 0.25
        return new, norms.at[turn].set(4 * total((new - u) ** 2) ** 0.5)

    return lax.fori_loop(0, sweeps, sweep, (jnp.zeros_like(f), jnp.zeros(sweeps)))


def cg(b: Any, turns: int) -> Any:
    """The same with two sums."""

    def step(turn: Any, state: Any) -> Any:
        x, r, p, squares = state
        ap = 4 * p - around(p)
        alpha = squares[turn] / total(p * ap)
        x, r = x + alpha * p, r - alpha * ap
        squares = squares.at[turn + 1].set(total(r * r))
        return x, r, r + squares[turn + 1] / squares[turn] * p, squares

    squares = jnp.zeros(turns + 1).at[0].set(total(b * b))
    x, _, _, squares = lax.fori_loop(0, turns, step, (jnp.zeros_like(b), b, b, squares))
    return x, squares**0.5


def kmeans(points: Any, turns: int) -> Any:
    """One small sum per turn."""

    def turn(_: Any, centres: Any) -> Any:
        distances = (centres * centres).sum(1) - 2 * points @ centres.T
        own = jax.nn.one_hot(distances.argmin(1), len(centres), dtype=points.dtype)
        sums, counts = lax.psum((own.T @ points, own.sum(0)), AXIS)
        return sums / counts[:, None]

    return points[:0], lax.fori_loop(0, turns, turn, jnp.asarray(workloads.guess()))


def logreg(x: Any, y: Any, turns: int) -> Any:
    """One small sum per turn."""
    samples = len(x) * RANKS

    def turn(i: Any, state: Any) -> Any:
        w, speed, losses = state
        z = x @ w
        loss = (jnp.logaddexp(0, z) - y * z).sum()
        gradient, loss = lax.psum(((jax.nn.sigmoid(z) - y) @ x, loss), AXIS)
        speed = 0.9 * speed - gradient / samples
        return w + speed, speed, losses.at[i].set(loss / samples)

    zeros = jnp.zeros(x.shape[1])
    return x[:0], lax.fori_loop(0, turns, turn, (zeros, zeros, jnp.zeros(turns)))[2]


def fft2(x: Any) -> Any:
    """An all-to-all between the two."""
    columns = lax.all_to_all(jnp.fft.fft(x, axis=1), AXIS, 1, 0, tiled=True)
    y = jnp.fft.fft(columns, axis=0)
    return y, total(jnp.abs(y[:4]))


def tsqr(a: Any) -> Any:
    """One gather of the small factors."""
    q, r = jnp.linalg.qr(a)
    top, whole = jnp.linalg.qr(lax.all_gather(r, AXIS, tiled=True))
    mine = lax.dynamic_slice_in_dim(top, lax.axis_index(AXIS) * len(r), len(r))
    return q @ mine, jnp.abs(whole)


def main(name: str, sizes: dict[str, int], rounds: int) -> None:
    """Run one program."""
    jax.config.update("jax_enable_x64", True)
    mesh = jax.make_mesh((RANKS,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))

    def placed(part: Any) -> Any:
        whole = np.concatenate([part(rank) for rank in range(RANKS)])
        return jax.block_until_ready(jax.device_put(whole, NamedSharding(mesh, ROWS)))

    arguments = [placed(lambda rank: workloads.part(name, rank, sizes))]
    if name == "logreg":
        arguments.append(placed(lambda rank: workloads.labels(rank, sizes)))

    def program(*arrays: Any) -> Any:
        return globals()[name](*arrays, *workloads.turns(name, sizes))

    out = (ROWS, PartitionSpec())
    run = jax.jit(jax.shard_map(program, mesh=mesh, in_specs=ROWS, out_specs=out, check_vma=False))
    seconds = []
    for _ in range(rounds + 1):  # the first one compiles
        start = perf_counter()
        _, answer = jax.block_until_ready(run(*arguments))
        seconds.append(perf_counter() - start)
    print(json.dumps({"seconds": seconds[1:], "answer": np.abs(answer).tolist()}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
