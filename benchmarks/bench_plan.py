"""How long a plan and its totals take, by number of ranks: the client's cost of a redistribution before anything runs.

Run with ``python benchmarks/bench_plan.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from time import perf_counter

from daskmesh.layout import Layout, make_layout
from daskmesh.mesh import ProcessMesh, init_mesh
from daskmesh.placement import Partial, Placement, Replicate, Shard
from daskmesh.plan import format_bytes, make_plan

Case = tuple[str, Sequence[Placement], Sequence[Placement]]

TOY = {"ranks": (4,), "size": 64, "repeats": 1}  # the arguments with which the tests run `main`

R, P = Replicate(), Partial()
CASES: tuple[Case, ...] = (
    ("all-to-all", [Shard(0), Shard(0)], [Shard(1), Shard(1)]),
    ("swap", [Shard(0), Shard(1)], [Shard(1), Shard(0)]),
    ("all-gather", [Shard(0), Shard(1)], [R, R]),
    ("slice", [R, R], [Shard(0), Shard(1)]),
    ("all-reduce", [P, P], [R, R]),
    ("reduce-scatter", [P, Shard(0)], [Shard(1), Shard(0)]),
    ("place terms", [Shard(0), R], [P, Partial("max")]),
)


def measure(mesh: ProcessMesh, case: Case, size: int) -> tuple[float, int]:
    """Seconds for layouts, plan and totals with cold caches, and the bytes it plans."""
    _, source, target = case
    start = perf_counter()
    a, b = (_layout(mesh, p, size) for p in (source, target))
    plan = make_plan.__wrapped__(a, b, 2**20)
    total = sum(plan.received.values())
    return perf_counter() - start, total


def _layout(mesh: ProcessMesh, placements: Sequence[Placement], size: int) -> Layout:
    # A fresh value without its caches, as for a layout never met before.
    layout = make_layout(mesh, placements, (size, size), "f8")
    return layout.replace()


def main(ranks: Sequence[int] = (64, 256, 1024), size: int = 16384, repeats: int = 5) -> None:
    """Print the best of a few runs for each case."""
    print(f"{'case':<16}" + "".join(f"{n:>14} ranks" for n in ranks))
    for case in CASES:
        cells = []
        for n in ranks:
            inner = max(d for d in range(1, n + 1) if n % d == 0 and d * d <= n)
            mesh = init_mesh((n // inner, inner), ("x", "y"))
            runs = [measure(mesh, case, size) for _ in range(repeats)]
            cells.append(f"{min(runs)[0] * 1e3:8.2f} ms {format_bytes(runs[0][1]):>10}")
        print(f"{case[0]:<16}" + " ".join(cells))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--size", type=int, default=16384, help="the array has size x size float64 elements")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    main(arguments.ranks, arguments.size, arguments.repeats)
