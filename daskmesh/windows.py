"""The arguments of operations on symmetric tensors: which view, which PE, which signal slot.

All checks are here, and all are made before anything is sent or submitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from daskmesh.buffers import Slot, Span
from daskmesh.shmem import ShmemSignal, ShmemTensor, ShmemView, integer

__all__ = ["PerRank", "Window", "box", "choice", "handle_of", "integers", "one_pe", "per_rank", "slot_of", "tensor_of", "window"]

PerRank: TypeAlias = int | Sequence[int] | Callable[[int], int]
Source: TypeAlias = ShmemTensor | ShmemView


class Window(NamedTuple):
    """A view of a PE's buffer: of `shape`, of which the first `valid` of each dim are at `offsets` of the buffer."""

    tensor: ShmemTensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    valid: tuple[int, ...]

    @property
    def span(self) -> Span:
        """Start and stop of the valid part in the buffer, for each dim."""
        return tuple((at, at + n) for at, n in zip(self.offsets, self.valid, strict=True))


def integers(call: str, what: str, values: Any, ndim: int, of: Any) -> tuple[int, ...]:
    """One int per dim."""
    if isinstance(values, (str, bytes)) or not isinstance(values, (Sequence, np.ndarray)):
        raise TypeError(f"{call}: {what} must be a sequence of {ndim} ints, one per dim, got {values!r}")
    found = tuple(integer(call, f"{what}[{d}]", value) for d, value in enumerate(values))
    if len(found) != ndim:
        raise ValueError(f"{call}: {what} {found} has rank {len(found)}, but {of!r} has rank {ndim}; give one int per dim")
    return found


def one_pe(call: str, what: str, value: Any, n_pes: int) -> int:
    """A PE."""
    pe = integer(call, what, value)
    if not 0 <= pe < n_pes:
        raise ValueError(f"{call}: {what} is {pe}, which is no PE of {n_pes}; wanted 0 <= {what} < {n_pes}")
    return pe


def per_rank(call: str, what: str, value: PerRank, ranks: Sequence[int], n_pes: int) -> int | list[int]:
    """A PE for all ranks, or one for each.

    Examples
    --------
    >>> per_rank("shmem_load", "src_pe", lambda rank: (rank + 1) % 3, [0, 1, 2], 3)
    [1, 2, 0]
    """
    if callable(value):
        return [one_pe(call, f"{what}({rank})", value(rank), n_pes) for rank in ranks]
    if isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, (str, bytes)) and np.ndim(value):
        if len(value) != len(ranks):
            raise ValueError(f"{call}: {what} has {len(value)} entries for {len(ranks)} PEs; give one for each, or a function")
        return [one_pe(call, f"{what}[{i}]", pe, n_pes) for i, pe in enumerate(value)]
    return one_pe(call, what, value, n_pes)


def tensor_of(call: str, what: str, src: Any) -> ShmemTensor:
    """The tensor behind a handle with data."""
    if isinstance(src, ShmemView):
        src = src.tensor
    if isinstance(src, ShmemSignal):
        raise TypeError(f"{call}: {what} is {src!r}, which has no data; use create_shmem_tensor")
    if not isinstance(src, ShmemTensor):
        raise TypeError(
            f"{call}: {what} must be a symmetric tensor (create_shmem_tensor, symm_from_dtensor) or a view of one, got "
            f"{type(src).__name__}"
        )
    src.check_open()
    return src


def window(
    call: str,
    src: Source,
    shape: Any = None,
    offsets: Any = None,
    valid_shape: Any = None,
    *,
    pe: int | None = None,
    what: str = "src",
) -> Window:
    """The view that the arguments name, within the bounds of `src`.

    Raises
    ------
    ValueError
        It is not within them.
    """
    tensor = tensor_of(call, what, src)
    base, dims, there = (0,) * tensor.ndim, tensor.bounds(pe), tensor.bounds(pe)
    if isinstance(src, ShmemView):
        base, dims = src.offsets, src.shape
        there = tuple(min(v, n - o) for v, n, o in zip(src.valid, there, base, strict=True))
    wanted, at, valid = box(call, src, dims, shape, offsets, valid_shape)
    # What a view calls valid bounds what can be read through it; the rest is filled.
    reach = tuple(max(0, min(v, t - o)) for v, t, o in zip(valid, there, at, strict=True))
    return Window(tensor, tuple(b + o for b, o in zip(base, at, strict=True)), wanted, reach)


Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def box(call: str, of: Any, dims: tuple[int, ...], shape: Any, offsets: Any, valid_shape: Any) -> Box:
    """Shape, offsets and valid shape of a view of something with these dims, checked.

    Examples
    --------
    >>> box("shmem_load", "t", (4, 6), (4, 4), (2, 4), (2, 2))
    ((4, 4), (2, 4), (2, 2))
    """
    ndim = len(dims)
    if shape is None and offsets is not None:
        raise ValueError(f"{call}: offsets {offsets} without shape; give shape= too, the size of the view")
    wanted = dims if shape is None else integers(call, "shape", shape, ndim, of)
    at = (0,) * ndim if offsets is None else integers(call, "offsets", offsets, ndim, of)
    valid = wanted if valid_shape is None else integers(call, "valid_shape", valid_shape, ndim, of)
    for d, (n, size, o, v) in enumerate(zip(dims, wanted, at, valid, strict=True)):
        if shape is not None and size < 1:
            raise ValueError(f"{call}: shape {wanted} has size {size} along dim {d}; a view has at least 1")
        if shape is not None and not 0 <= o < max(n, 1):
            raise ValueError(f"{call}: offset {o} along dim {d} is outside its size {n}; wanted 0 <= offset < {n}")
        if not 0 <= v <= size:
            raise ValueError(f"{call}: valid_shape {valid} is {v} along dim {d}; wanted 0 <= valid_shape <= shape, {size}")
        if o + v > n:
            what, fix = ("shape", "; give valid_shape= for a view that hangs over the edge") if valid_shape is None else (
                "valid_shape", "")  # fmt: skip
            raise ValueError(f"{call}: offset {o} + {what} {v} along dim {d} goes beyond its size {n}{fix}")
    return wanted, at, valid


def slot_of(call: str, src: Any, row: int, shape: Any, offsets: Any) -> Slot:
    """The signal slot that the arguments name: the row of a PE, and the view it speaks for.

    Raises
    ------
    ValueError
        The view is not one of equal parts that the tensor falls into.
    """
    if isinstance(src, ShmemSignal):
        src.check_open()
        if shape is not None or offsets is not None:
            raise ValueError(f"{call}: {src!r} has no data, so no views; leave out shape and offsets")
        return (row, None)
    found = window(call, src, shape, offsets)
    whole = found.tensor.shape
    if found.shape == whole:
        return (row, None)
    for d, (n, size, at) in enumerate(zip(whole, found.shape, found.offsets, strict=True)):
        if n % size or at % size:
            raise ValueError(
                f"{call}: a view of size {size} at offset {at} along dim {d} is not one of the equal parts of size {n}; signals "
                "speak for equal parts"
            )
    return (row, tuple((at, at + n) for at, n in zip(found.offsets, found.shape, strict=True)))


def choice(call: str, what: str, value: Any, kind: type[Enum], allowed: Sequence[Enum] | None = None) -> str:
    """The value of an enum member."""
    if not isinstance(value, kind):
        example = f"{kind.__name__}.{next(iter(kind)).name}"
        raise TypeError(f"{call}: {what} must be of type {kind.__name__}, got {value!r}; write {example}")
    if allowed is not None and value not in allowed:
        raise ValueError(f"{call}: {what} must be one of {[a.name for a in allowed]}, got {value.name}")
    return str(value.value)


def handle_of(call: str, src: Any) -> ShmemTensor | ShmemSignal:
    """The handle of a tensor or signal."""
    if isinstance(src, ShmemView):
        src = src.tensor
    if not isinstance(src, (ShmemTensor, ShmemSignal)):
        raise TypeError(f"{call}: src must be a symmetric tensor or signal, got {type(src).__name__}")
    src.check_open()
    return src
