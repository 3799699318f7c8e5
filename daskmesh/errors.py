"""Errors on their way from one process to another."""

from __future__ import annotations

from collections.abc import Callable

from distributed.protocol import pickle

__all__ = ["packed_error", "unpacked_error"]

# Dask's pickle, not the standard one: an error's class may have been defined in a notebook.
_dumps: Callable[[BaseException], bytes] = pickle.dumps
_loads: Callable[[bytes | bytearray], BaseException] = pickle.loads


def packed_error(error: BaseException) -> bytes:
    """An error as bytes, or where it cannot be pickled, one that says the same.

    Examples
    --------
    >>> class Local(Exception):
    ...     def __reduce__(self):
    ...         raise TypeError("no")
    >>> unpacked_error(packed_error(Local("boom")))
    RuntimeError('Local: boom')
    """
    try:
        packed = _dumps(error)
        _loads(packed)
    except Exception:
        return _dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return packed


def unpacked_error(packed: bytes | bytearray) -> BaseException:
    """The error that `packed_error` packed, notes included.

    Examples
    --------
    >>> unpacked_error(packed_error(KeyError("x")))
    KeyError('x')
    """
    return _loads(packed)
