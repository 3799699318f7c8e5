"""A two-dimensional FFT: along the rows that a rank has, then an all-to-all, then along the columns that it got."""

from __future__ import annotations

from typing import Any

import numpy as np

import daskmesh as dm
from daskmesh.collectives import all_to_all


def fft2(x: dm.DTensor) -> dm.DTensor:
    """The transform of `x`, which is cut along its rows over the only mesh dim; the result is cut along its columns."""

    def program(rows: Any) -> Any:
        rows = np.fft.fft(rows, axis=1)
        columns = all_to_all(rows, split_dim=1, concat_dim=0)
        return np.fft.fft(columns, axis=0, out=columns)

    return dm.local_map(program, [[dm.Shard(1)]], out_shapes=[(x.shape, "complex128")])(x)
