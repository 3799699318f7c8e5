"""Elementwise operations: every NumPy ufunc, by one rule."""

from __future__ import annotations

import numpy as np

from daskmesh.dtensor import UFUNC_METHODS, implements
from daskmesh.ops.kinds import apply_ufunc, astype

__all__: list[str] = []

UFUNC_METHODS["__call__"] = apply_ufunc
implements(np.astype)(astype)
implements(np.shape)(lambda a: a.shape)
implements(np.ndim)(lambda a: a.ndim)
implements(np.size)(lambda a, axis=None: a.size if axis is None else a.shape[axis])
