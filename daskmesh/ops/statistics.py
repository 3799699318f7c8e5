"""Covariances, and filters of one dim: convolution and correlation.

A covariance is a product of matrices, so it keeps to the rules of `np.dot`. A filter needs beyond each part as many elements as
it is long, less one, which are loaded once; the filter itself is whole on every rank.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from daskmesh.conversion import shard_tensor
from daskmesh.dtensor import DTensor, implements
from daskmesh.graph import Local
from daskmesh.layout import Coord, Layout
from daskmesh.ops.gathers import laid_out, placed, recut
from daskmesh.ops.kinds import aligned
from daskmesh.ops.reaching import begun, reaching
from daskmesh.placement import Replicate

__all__: list[str] = []

Array = Any
_np: Any = np  # typed for arrays of its own, not for those that speak its protocols


def _given(x: Any) -> Any:
    return x if isinstance(x, DTensor) else np.asarray(x)


# -- covariances ------------------------------------------------------------------------------------------------------


def _variables(x: Any, rowvar: bool, dtype: Any, name: str) -> Any:
    """One variable per row."""
    if x.ndim > 2:
        raise ValueError(f"{name} has more than 2 dimensions")
    table = _np.astype(x, dtype)
    table = _np.reshape(table, (1, -1)) if x.ndim < 2 else table
    return table.T if not rowvar and x.ndim == 2 and (name == "m" or x.shape[0] != 1) else table


def _weights(given: Any, n: int, name: str) -> Any:
    """Weights of the observations; what they hold is looked at if they are plain."""
    w = _np.astype(_given(given), np.float64)
    if w.ndim > 1:
        raise RuntimeError(f"cannot handle multidimensional {name}")
    if w.shape[0] != n:
        raise RuntimeError(f"incompatible numbers of samples and {name}")
    if not isinstance(w, DTensor):
        if name == "fweights" and not np.all(w == np.around(w)):
            raise TypeError("fweights must be integer")
        if np.any(w < 0):
            raise ValueError(f"{name} cannot be negative")
    return w


@implements(np.cov)
def cov(
    m: Any, y: Any = None, rowvar: bool = True, bias: bool = False, ddof: Any = None, fweights: Any = None, aweights: Any = None,
    *, dtype: Any = None,
) -> Any:  # fmt: skip
    """Covariances of variables in rows.

    **Communication**: that of a mean along the observations and of ``x @ x.T``.
    """
    if ddof is not None and ddof != int(ddof):
        raise ValueError("ddof must be integer")
    given = [_given(x) for x in (m, y) if x is not None]
    dtype = np.result_type(*(x.dtype for x in given), np.float64) if dtype is None else np.dtype(dtype)
    x = _variables(given[0], rowvar, dtype, "m")
    if x.shape[0] == 0:
        return np.zeros((0, 0))
    if y is not None:
        x = _np.concatenate((x, _variables(given[1], rowvar, dtype, "y")), axis=0)
    ddof = int(not bias) if ddof is None else int(ddof)
    n = x.shape[1]
    frequencies = None if fweights is None else _weights(fweights, n, "fweights")
    relative = None if aweights is None else _weights(aweights, n, "aweights")
    w = frequencies if relative is None else relative if frequencies is None else frequencies * relative
    if w is None:
        total: Any = n
        centred = x - _np.mean(x, axis=1, keepdims=True)
    else:
        total = _np.sum(w)
        centred = x - _np.sum(x * w, axis=1, keepdims=True) / total
    fact = total - ddof if relative is None or not ddof else total - ddof * _np.sum(w * relative) / total
    if not isinstance(fact, DTensor) and fact <= 0:
        warnings.warn("Degrees of freedom <= 0 for slice", RuntimeWarning, stacklevel=2)
        fact = 0.0
    other = centred if w is None else centred * w
    product = _np.dot(centred, _np.conj(other.T))
    return _np.squeeze(_np.astype(product * _np.true_divide(1, fact), product.dtype))


@implements(np.corrcoef)
def corrcoef(x: Any, y: Any = None, rowvar: bool = True, *, dtype: Any = None) -> Any:
    """Correlations of variables in rows; see `cov`."""
    c = cov(x, y, rowvar, dtype=dtype)
    if not c.ndim:
        return c / c
    deviation = _np.sqrt(_np.real(_np.diagonal(c)))
    c = c / deviation[:, None] / deviation[None, :]
    if c.dtype.kind != "c":
        return _np.clip(c, -1, 1)
    return _np.clip(_np.real(c), -1, 1) + 1j * _np.clip(_np.imag(c), -1, 1)


# -- filters ----------------------------------------------------------------------------------------------------------


@implements(np.convolve)
def convolve(a: Any, v: Any, mode: str = "full") -> DTensor:
    """Convolution of one dim; the shorter operand is whole on every rank.

    **Communication**: the shorter operand to all ranks, and of the longer what reaches beyond the parts.
    """
    a, v = _lines(a, v, mode, "convolve")
    return _convolved(a, v, mode) if len(a) >= len(v) else _convolved(v, a, mode)


@implements(np.correlate)
def correlate(a: Any, v: Any, mode: str = "valid") -> DTensor:
    """Cross-correlation of one dim; see `convolve`."""
    a, v = _lines(a, v, mode, "correlate")
    v = _np.conj(v)
    if len(a) >= len(v):
        return _convolved(a, v[::-1], mode)
    return _convolved(v, a[::-1], mode)[::-1]


def _lines(a: Any, v: Any, mode: Any, name: str) -> tuple[Any, Any]:
    a, v = _np.atleast_1d(_given(a)), _np.atleast_1d(_given(v))
    if a.ndim > 1 or v.ndim > 1:
        raise ValueError("object too deep for desired array")
    if not len(a) or not len(v):
        raise ValueError(f"{'a' if not len(a) else 'v'} cannot be empty")
    if mode not in ("full", "same", "valid"):
        raise ValueError(f"np.{name}(mode={mode!r}): mode must be one of 'valid', 'same', or 'full'")
    return a, v


def _convolved(x: Any, short: Any, mode: str) -> DTensor:
    if not isinstance(x, DTensor):
        x = shard_tensor(x, short.process_mesh, ())
    dtype = np.convolve(np.ones(1, x.dtype), np.ones(1, short.dtype)).dtype
    n, reach = len(x), len(short) - 1
    x = aligned(x)
    if mode == "same":
        before = reach - (reach - reach // 2)
        x = _np.pad(x, (reach - before, before))
    elif mode == "full":
        x = _np.pad(x, reach)
    why = f"convolution of {n} elements by {reach + 1}"
    layout, world = x.layout, x._node.world
    whole = laid_out(layout, [Replicate()] * layout.mesh.ndim, ((reach + 1,),), short.dtype)
    target = recut(layout, {0: begun(layout, 0, reach)}).replace(dtype=dtype)
    args = (reaching(x._node, {0: reach}, why), placed(short, whole, world, why))
    return DTensor(Local(target, world, _filtered, args, {"layout": target}, located=True))


def _filtered(coord: Coord, local: Array, short: Array, layout: Layout) -> Array:
    n = layout.local_shape(coord)[0]
    if not n:
        return np.empty_like(local, shape=(0,), dtype=layout.dtype)
    return np.convolve(local, short, "valid")


# -- phases -----------------------------------------------------------------------------------------------------------


@implements(np.unwrap)
def unwrap(p: DTensor, discont: Any = None, axis: int = -1, *, period: Any = 2 * np.pi) -> DTensor:
    """Phases without jumps of more than half a period.

    **Communication**: that of differences and of a cumulative sum along the dim.
    """
    steps = _np.diff(p, axis=axis)
    discont = period / 2 if discont is None else discont
    dtype = np.result_type(steps.dtype, period)
    if dtype.kind in "iu":
        high, rest = divmod(period, 2)
        ambiguous = rest == 0
    else:
        high, ambiguous = period / 2, True
    short = _np.mod(steps + high, period) - high
    if ambiguous:
        short = _np.where((short == -high) & (steps > 0), high, short)
    correction = _np.where(abs(steps) < discont, 0, short - steps)
    d = axis % p.ndim
    first = _np.astype(p[(*(slice(None),) * d, slice(0, 1))], dtype)
    rest_ = _np.astype(p[(*(slice(None),) * d, slice(1, None))], dtype)
    return _np.concatenate([first, _np.astype(rest_ + _np.cumsum(correction, axis=d), dtype)], axis=d)  # type: ignore[no-any-return]
