"""The main job: a `local_map` over two ranks, then a table of 200 MB standardised on a two-dimensional mesh."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from distributed import as_completed, futures_of

import daskmesh as dist
from daskmesh.draw import layout_text
from daskmesh.pen import format_bytes

__all__ = ["local_map_page", "measurements", "run", "sensor_table"]

Print = Callable[[str], None]

ROWS, COLUMNS = 1_000_000, 25
DAY = 24 * 60  # one row a minute
BLOCK = 10_000  # rows that one generator makes, so that any box of the table has the same numbers
#                  Celsius  %     hPa   m/s  klx
LEVEL = np.tile([11.0, 72.0, 1013.0, 4.2, 18.0], 5) + np.repeat([0.0, 1.5, -2.0, 3.0, 0.7], 5)
SWING = np.tile([6.0, -14.0, 1.2, 1.1, 17.0], 5)
NOISE = np.tile([0.8, 3.0, 0.4, 1.4, 2.5], 5)


def run(ranks: int = 4, rows: int = ROWS, show: Print = print) -> None:
    """Run both parts on the current cluster.

    Parameters
    ----------
    ranks : int
        Ranks of the second part.
    rows : int
        Rows of its table.
    show : callable
        Takes each line of the report.
    """
    show("A function of plain arrays on two ranks")
    local_map_page(show)
    show("")
    sensor_table(ranks, rows, show)


def local_map_page(show: Print = print) -> None:
    """Each rank averages some of its numbers; the two averages are terms of a sum.

    Examples
    --------
    >>> from daskmesh.demo import local_map_page
    >>> local_map_page()
    [Rank 0] local_value=1.5
    [Rank 1] local_value=6.0
    global_value (distributed)=7.5
    """

    def custom_function(x: Any) -> Any:
        mask = np.zeros_like(x)
        if dist.get_rank() == 0:
            mask[1:3] = 1
        else:
            mask[4:7] = 1
        x = x * mask
        mask_sum = np.sum(x)
        mask_sum = mask_sum / mask.sum()
        return mask_sum

    mesh = dist.ProcessMesh([0, 1], dim_names=["x"])
    input_dist = dist.dtensor_from_local(
        lambda rank: np.arange(0, 10, dtype="float32") + rank, mesh, [dist.Shard(0)]
    )
    wrapped_func = dist.local_map(
        custom_function,
        out_placements=[[dist.Partial(dist.ReduceType.kRedSum)]],
        in_placements=[[dist.Shard(0)]],
        process_mesh=mesh,
    )
    output_dist = wrapped_func(input_dist)
    gathered_values = [output_dist.local_value(r) for r in mesh.process_ids]
    show(f"[Rank 0] local_value={gathered_values[0].item()}")
    show(f"[Rank 1] local_value={gathered_values[1].item()}")
    show(f"global_value (distributed)={output_dist.item()}")


def sensor_table(ranks: int = 4, rows: int = ROWS, show: Print = print) -> None:
    """Standardise the columns of a table, take their medians, and check both against NumPy.

    Parameters
    ----------
    ranks : int
        Ranks, on the squarest two-dimensional mesh that they make.
    rows : int
        Rows of the table.

    Raises
    ------
    RuntimeError
        A value differs from NumPy's.

    Examples
    --------
    >>> from daskmesh.demo import sensor_table
    >>> sensor_table(ranks=2, rows=1000)  # doctest: +SKIP
    """
    inner = max(n for n in range(1, math.isqrt(ranks) + 1) if ranks % n == 0)
    mesh = dist.init_mesh((ranks // inner, inner), ("node", "core"))
    by_rows = [dist.Shard(0), dist.Shard(0)]
    by_columns = [dist.Shard(1), dist.Shard(1)]
    replicas = [dist.Replicate(), dist.Replicate()]
    column_sums = dist.local_map(_column_sums, out_placements=[[dist.Partial(), dist.Partial()]])

    table = dist.from_callback((rows, COLUMNS), "float64", mesh, by_rows, measurements)
    show(f"{rows:,} minutes of {COLUMNS} sensors, {table.nbytes / 1e6:.0f} MB, on a mesh of {mesh.shape}")
    show(layout_text(table.layout))
    with _watched("make the table", show) as watch:
        table = watch(table.persist())

    mean = (column_sums(table) / rows).reshard(replicas)
    centred = table - mean
    deviation = (column_sums(centred * centred) / rows).reshard(replicas) ** 0.5
    scores = centred / deviation
    show(f"to standardise, {format_bytes(scores.explain().total_bytes)} of column sums move; the table stays where it is")
    with _watched("standardise the columns", show) as watch:
        scores = watch(scores.persist())

    columns = scores.reshard(by_columns)
    show(f"to take medians, every rank needs whole columns: {columns.explain()}")
    medians = dist.local_map(_medians, out_placements=[[dist.Shard(0), dist.Shard(0)]])(columns)
    with _watched("take their medians", show) as watch:
        medians = watch(medians.persist())

    with _watched("do the same in NumPy", show):
        whole = measurements((slice(0, rows), slice(0, COLUMNS)))
        whole -= whole.mean(axis=0)
        whole /= np.sqrt((whole * whole).mean(axis=0))
        expected = np.median(whole, axis=0)
    worst = max(np.abs(scores.compute() - whole).max(), np.abs(medians.compute() - expected).max())
    if not worst < 1e-9:
        raise RuntimeError(f"the mesh and NumPy differ by {worst:.3g}")
    show(f"checked {format_bytes(whole.nbytes)} against NumPy: the largest difference is {worst:.1e}")


def measurements(box: tuple[slice, ...]) -> np.ndarray[Any, Any]:
    """A box of the table: a level, a daily swing and noise for each of five quantities at five stations.

    Examples
    --------
    >>> from daskmesh.demo import measurements
    >>> whole = measurements((slice(0, 30), slice(0, 25)))
    >>> bool((measurements((slice(7, 9), slice(2, 4))) == whole[7:9, 2:4]).all())
    True
    """
    rows, columns = box
    out = np.empty((rows.stop - rows.start, columns.stop - columns.start))
    for number in range(rows.start // BLOCK, -(-rows.stop // BLOCK)):
        start = number * BLOCK
        noise = np.random.default_rng([2026, number]).standard_normal((BLOCK, COLUMNS))
        day = np.sin(2 * np.pi * (np.arange(start, start + BLOCK) % DAY / DAY - 0.3))
        values = LEVEL + SWING * day[:, None] + NOISE * noise
        first, last = max(rows.start, start), min(rows.stop, start + BLOCK)
        out[first - rows.start : last - rows.start] = values[first - start : last - start, columns]
    return out


def _column_sums(part: Any) -> Any:
    return part.sum(axis=0)


def _medians(part: Any) -> Any:
    return np.median(part, axis=0)


@contextmanager
def _watched(what: str, show: Print) -> Iterator[Callable[[Any], Any]]:
    """Time a step; on a terminal, count the parts that are ready on one line that is written over."""
    begun = time.perf_counter()
    live = sys.stdout.isatty() and show is print

    def watch(x: Any) -> Any:
        futures = futures_of(x)
        for ready, future in enumerate(as_completed(futures), 1):
            if future.status == "error":
                future.result()
            if live:
                print(f"\r{what:<24} {ready} of {len(futures)} parts", end="", flush=True)
        return x

    yield watch
    show(f"{chr(13) if live else ''}{what:<24} {time.perf_counter() - begun:6.2f} s            ".rstrip(" "))
