"""NumPy's array methods: each is NumPy's function of the same name, which comes back through the operator table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import numpy as np

__all__ = ["ArrayMethods"]

_np: Any = np  # typed for arrays of its own, not for those that speak its protocols
_UNSET: Any = np._NoValue


class ArrayMethods:
    """Methods of ``np.ndarray`` that make another array; a class that speaks NumPy's protocols inherits them."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        rows: Any = self
        return (rows[i] for i in range(len(rows)))

    def __contains__(self, value: Any) -> bool:
        return bool(_np.any(self == value))

    def __round__(self: Any, ndigits: int | None = None) -> Any:
        if ndigits is None:
            return round(self.item())
        return _np.round(self, ndigits)

    @property
    def itemsize(self: Any) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize  # type: ignore[no-any-return]

    def view(self, type: Any = np.ndarray) -> Self:
        """The array itself: there are no views. autograd asks its results for one of the plain type."""
        if type is not np.ndarray:
            raise TypeError(f"view({type!r}): there are no views; use astype for another dtype")
        return self

    # -- reductions ---------------------------------------------------------------------------------------------------

    def sum(
        self, axis: Any = None, dtype: Any = None, out: None = None, keepdims: bool = False, *,
        initial: Any = _UNSET, where: Any = True,
    ) -> Self:  # fmt: skip
        """``np.sum``."""
        return _np.sum(self, axis, dtype, out, keepdims, initial, where)  # type: ignore[no-any-return]

    def prod(
        self, axis: Any = None, dtype: Any = None, out: None = None, keepdims: bool = False, *,
        initial: Any = _UNSET, where: Any = True,
    ) -> Self:  # fmt: skip
        """``np.prod``."""
        return _np.prod(self, axis, dtype, out, keepdims, initial, where)  # type: ignore[no-any-return]

    def max(
        self, axis: Any = None, out: None = None, keepdims: bool = False, *, initial: Any = _UNSET, where: Any = True
    ) -> Self:
        """``np.max``."""
        return _np.max(self, axis, out, keepdims, initial, where)  # type: ignore[no-any-return]

    def min(
        self, axis: Any = None, out: None = None, keepdims: bool = False, *, initial: Any = _UNSET, where: Any = True
    ) -> Self:
        """``np.min``."""
        return _np.min(self, axis, out, keepdims, initial, where)  # type: ignore[no-any-return]

    def mean(self, axis: Any = None, dtype: Any = None, out: None = None, keepdims: bool = False, *, where: Any = True) -> Self:
        """``np.mean``."""
        return _np.mean(self, axis, dtype, out, keepdims, where=where)  # type: ignore[no-any-return]

    def var(
        self, axis: Any = None, dtype: Any = None, out: None = None, ddof: float = 0, keepdims: bool = False, *,
        where: Any = True,
    ) -> Self:  # fmt: skip
        """``np.var``."""
        return _np.var(self, axis, dtype, out, ddof, keepdims, where=where)  # type: ignore[no-any-return]

    def std(
        self, axis: Any = None, dtype: Any = None, out: None = None, ddof: float = 0, keepdims: bool = False, *,
        where: Any = True,
    ) -> Self:  # fmt: skip
        """``np.std``."""
        return _np.std(self, axis, dtype, out, ddof, keepdims, where=where)  # type: ignore[no-any-return]

    def any(self, axis: Any = None, out: None = None, keepdims: bool = False, *, where: Any = True) -> Self:
        """``np.any``."""
        return _np.any(self, axis, out, keepdims, where=where)  # type: ignore[no-any-return]

    def all(self, axis: Any = None, out: None = None, keepdims: bool = False, *, where: Any = True) -> Self:
        """``np.all``."""
        return _np.all(self, axis, out, keepdims, where=where)  # type: ignore[no-any-return]

    def argmax(self, axis: Any = None, out: None = None, *, keepdims: bool = False) -> Self:
        """``np.argmax``."""
        return _np.argmax(self, axis, out, keepdims=keepdims)  # type: ignore[no-any-return]

    def argmin(self, axis: Any = None, out: None = None, *, keepdims: bool = False) -> Self:
        """``np.argmin``."""
        return _np.argmin(self, axis, out, keepdims=keepdims)  # type: ignore[no-any-return]

    def cumsum(self, axis: Any = None, dtype: Any = None, out: None = None) -> Self:
        """``np.cumsum``."""
        return _np.cumsum(self, axis, dtype, out)  # type: ignore[no-any-return]

    def cumprod(self, axis: Any = None, dtype: Any = None, out: None = None) -> Self:
        """``np.cumprod``."""
        return _np.cumprod(self, axis, dtype, out)  # type: ignore[no-any-return]

    def trace(self, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None, out: None = None) -> Self:
        """``np.trace``."""
        return _np.trace(self, offset, axis1, axis2, dtype, out)  # type: ignore[no-any-return]

    def dot(self, b: Any) -> Self:
        """``np.dot``."""
        return _np.dot(self, b)  # type: ignore[no-any-return]

    # -- elementwise --------------------------------------------------------------------------------------------------

    @property
    def real(self) -> Self:
        """``np.real``."""
        return _np.real(self)  # type: ignore[no-any-return]

    @property
    def imag(self) -> Self:
        """``np.imag``."""
        return _np.imag(self)  # type: ignore[no-any-return]

    def conj(self) -> Self:
        """``np.conjugate``."""
        return _np.conjugate(self)  # type: ignore[no-any-return]

    def conjugate(self) -> Self:
        """``np.conjugate``."""
        return _np.conjugate(self)  # type: ignore[no-any-return]

    def clip(self, min: Any = None, max: Any = None, out: None = None, **kwargs: Any) -> Self:
        """``np.clip``."""
        return _np.clip(self, min, max, out, **kwargs)  # type: ignore[no-any-return]

    def round(self, decimals: int = 0, out: None = None) -> Self:
        """``np.round``."""
        return _np.round(self, decimals, out)  # type: ignore[no-any-return]

    def copy(self, order: str = "C") -> Self:
        """``np.copy``: the same value behind another handle."""
        return _np.copy(self)  # type: ignore[no-any-return]

    # -- shapes and order ---------------------------------------------------------------------------------------------

    @property
    def T(self) -> Self:
        """``np.transpose``."""
        return _np.transpose(self)  # type: ignore[no-any-return]

    @property
    def mT(self) -> Self:
        """``np.matrix_transpose``."""
        return _np.matrix_transpose(self)  # type: ignore[no-any-return]

    def transpose(self, *axes: Any) -> Self:
        """``np.transpose``; the axes one by one or as a tuple."""
        given = None if not axes or axes[0] is None else axes[0] if isinstance(axes[0], (tuple, list)) else axes
        return _np.transpose(self, given)  # type: ignore[no-any-return]

    def swapaxes(self, axis1: int, axis2: int) -> Self:
        """``np.swapaxes``."""
        return _np.swapaxes(self, axis1, axis2)  # type: ignore[no-any-return]

    def reshape(self, *shape: Any, order: str = "C") -> Self:
        """``np.reshape``; the sizes one by one or as a tuple."""
        return _np.reshape(self, shape[0] if len(shape) == 1 else shape, order=order)  # type: ignore[no-any-return]

    def ravel(self, order: str = "C") -> Self:
        """``np.ravel``."""
        return _np.ravel(self, order)  # type: ignore[no-any-return]

    def flatten(self, order: str = "C") -> Self:
        """``np.ravel``: nothing is a view of anything here."""
        return _np.ravel(self, order)  # type: ignore[no-any-return]

    def squeeze(self, axis: Any = None) -> Self:
        """``np.squeeze``."""
        return _np.squeeze(self, axis)  # type: ignore[no-any-return]

    def repeat(self, repeats: Any, axis: Any = None) -> Self:
        """``np.repeat``."""
        return _np.repeat(self, repeats, axis)  # type: ignore[no-any-return]

    def take(self, indices: Any, axis: Any = None, out: None = None, mode: str = "raise") -> Self:
        """``np.take``."""
        return _np.take(self, indices, axis, out, mode)  # type: ignore[no-any-return]

    def diagonal(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Self:
        """``np.diagonal``."""
        return _np.diagonal(self, offset, axis1, axis2)  # type: ignore[no-any-return]

    def nonzero(self) -> Any:
        """``np.nonzero``."""
        return _np.nonzero(self)

    def argsort(self, axis: Any = -1, kind: Any = None, order: Any = None, *, stable: Any = None) -> Self:
        """``np.argsort``."""
        return _np.argsort(self, axis, kind, order, stable=stable)  # type: ignore[no-any-return]

    def argpartition(self, kth: Any, axis: Any = -1, kind: str = "introselect", order: Any = None) -> Self:
        """``np.argpartition``."""
        return _np.argpartition(self, kth, axis, kind, order)  # type: ignore[no-any-return]

    def compress(self, condition: Any, axis: Any = None, out: None = None) -> Self:
        """``np.compress``."""
        return _np.compress(condition, self, axis, out)  # type: ignore[no-any-return]

    def choose(self, choices: Any, out: None = None, mode: str = "raise") -> Self:
        """``np.choose``."""
        return _np.choose(self, choices, out, mode)  # type: ignore[no-any-return]

    def searchsorted(self, v: Any, side: str = "left", sorter: Any = None) -> Self:
        """``np.searchsorted``."""
        return _np.searchsorted(self, v, side, sorter)  # type: ignore[no-any-return]

    # -- other contents behind the same handle ------------------------------------------------------------------------

    def sort(self: Any, axis: int = -1, kind: Any = None, order: Any = None, *, stable: Any = None) -> None:
        """Put ``np.sort(self, axis)`` behind the handle."""
        self[...] = _np.sort(self, axis, kind, order, stable=stable)

    def partition(self: Any, kth: Any, axis: int = -1, kind: str = "introselect", order: Any = None) -> None:
        """Put ``np.partition(self, kth, axis)`` behind the handle."""
        self[...] = _np.partition(self, kth, axis, kind, order)

    def fill(self: Any, value: Any) -> None:
        """Put one value everywhere behind the handle."""
        self[...] = value

    def put(self, indices: Any, values: Any, mode: str = "raise") -> None:
        """``np.put``."""
        _np.put(self, indices, values, mode)
