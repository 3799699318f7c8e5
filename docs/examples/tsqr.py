"""QR of a tall matrix: each rank factors its own rows, all factor the stack of the small factors."""

from __future__ import annotations

from typing import Any

import numpy as np

import daskmesh as dm
from daskmesh.collectives import all_gather, scan

ROWS = 16384  # factored at once, so that they stay in the cache


def tsqr(a: dm.DTensor) -> tuple[dm.DTensor, dm.DTensor]:
    """Q, cut like `a` along its rows, and R, the same on every rank."""
    rows, columns = a.shape
    inner = min(rows, columns)

    def program(a: Any) -> tuple[Any, Any]:
        tops, r = factor(a)
        start = int(scan(len(r))) - len(r)  # my rows in the stack of all
        q, whole = np.linalg.qr(all_gather(r))
        return expand(tops, q[start : start + len(r)], len(a)), whole

    out = [a.placements, [dm.Replicate()] * a.process_mesh.ndim]
    return dm.local_map(program, out, out_shapes=((rows, inner), (inner, columns)))(a)


def factor(a: Any) -> tuple[list[Any], Any]:
    """Q in two levels, block by block and then of the stacked R's, and R."""
    parts = [np.linalg.qr(a[i : i + ROWS]) for i in range(0, max(len(a), 1), ROWS)]
    q, r = np.linalg.qr(np.concatenate([r for _, r in parts]))
    ends = np.cumsum([len(r) for _, r in parts])[:-1]
    return list(zip([q for q, _ in parts], np.split(q, ends), strict=True)), r


def expand(tops: list[Any], right: Any, rows: int) -> Any:
    """The product of the levels of Q with `right`, from the right to the left because that is narrow."""
    out, start = np.empty((rows, right.shape[1])), 0
    for low, high in tops:
        np.matmul(low, high @ right, out=out[start : start + len(low)])
        start += len(low)
    return out
