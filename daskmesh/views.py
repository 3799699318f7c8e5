"""Views of strided memory: which bytes an index selects."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

__all__ = ["Index", "normal_index", "view_shape"]

Index: TypeAlias = tuple[int | slice, ...]


def normal_index(index: Sequence[Any], shape: tuple[int, ...]) -> Index:
    """`index` with one entry for each axis: an int, or a slice whose start and stop are given.

    Raises
    ------
    IndexError
        An entry is out of bounds, or has a step.

    Examples
    --------
    >>> normal_index((0, slice(1, 3)), (2, 4, 5))
    (0, slice(1, 3, None), slice(0, 5, None))
    """
    if len(index) > len(shape):
        raise IndexError(
            f"load: index {index} has {len(index)} entries, the exposed array {shape} has {len(shape)} dims"
        )
    normal: list[int | slice] = []
    for dim, size in enumerate(shape):
        entry = index[dim] if dim < len(index) else slice(None)
        if isinstance(entry, slice):
            start = 0 if entry.start is None else operator.index(entry.start)
            stop = size if entry.stop is None else operator.index(entry.stop)
            if not (0 <= start <= stop <= size and entry.step in (None, 1)):
                raise IndexError(
                    f"load: {entry} of dim {dim} of size {size}: wanted 0 <= start <= stop <= {size}, step 1"
                )
            normal.append(slice(start, stop))
        else:
            at = operator.index(entry)
            if not 0 <= at < size:
                raise IndexError(f"load: index {at} of dim {dim} of size {size}: wanted 0 <= index < {size}")
            normal.append(at)
    return tuple(normal)


def view_shape(index: Index) -> tuple[int, ...]:
    """Shape of the view a normal index selects.

    Examples
    --------
    >>> view_shape((0, slice(1, 3)))
    (2,)
    """
    return tuple(entry.stop - entry.start for entry in index if isinstance(entry, slice))
