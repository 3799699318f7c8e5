"""The steps of a program over local arrays, long elementwise runs of them tile by tile.

A chain of ufuncs on a large array writes one temporary of its size after the other to memory and reads it back. In tiles it does
not leave the cache::

    y = np.sqrt(x * 2 + z)          plain:  t = x * 2;  u = t + z;  y = sqrt(u)      each as large as x

    for each tile of y:             tiled:  t = x[tile] * 2;  t = t + z[tile];  y[tile] = sqrt(t)

Tiles run along the dims of the longest strides, so that they are as contiguous as the operands are, and every element meets the
same operations in the same order: the bits are those of plain evaluation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from daskmesh.names import named, restored
from daskmesh.recycling import empty

__all__ = ["ELEMENTWISE", "Slot", "Step", "run_steps"]

Array = Any
Shape = tuple[int, ...]
Tile = tuple[slice, ...]

# Functions besides ufuncs that act element by element and broadcast their positional arguments.
ELEMENTWISE: set[Callable[..., Any]] = set()

TILE_ELEMENTS = 2**14  # some arrays of float64 tiles fit the L2 cache together
_WORTH = 4 * TILE_ELEMENTS


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a program: arguments are slot numbers (`Slot`) or constants; the slots in `drop` are not read again."""

    func: Callable[..., Array]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] | None
    located: bool
    drop: tuple[int, ...] = ()

    def __dask_tokenize__(self) -> Any:
        args = tuple(("slot", a.index) if isinstance(a, Slot) else named(a) for a in self.args)
        return (named(self.func), args, _named(self.kwargs), self.located)

    def __reduce__(self) -> Any:
        return _step, (named(self.func), tuple(map(named, self.args)), _named(self.kwargs), self.located, self.drop)


def _named(kwargs: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    return kwargs and {k: named(v) for k, v in kwargs.items()}


def _step(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, located: bool, drop: tuple[int, ...]) -> Step:
    if kwargs:
        kwargs = {k: restored(v) for k, v in kwargs.items()}
    return Step(restored(func), tuple(map(restored, args)), kwargs, located, drop)


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a value while a program runs."""

    index: int


def run_steps(steps: Sequence[Step], slots: list[Any], coord: tuple[int, ...]) -> None:
    """Carry out steps, each of which appends its value to `slots`."""
    i = 0
    while i < len(steps):
        run = _run(steps, i, slots)
        if run is None:
            _single(steps[i], slots, coord)
            i += 1
        else:
            run.evaluate()
            i += len(run.steps)


def _single(step: Step, slots: list[Any], coord: tuple[int, ...]) -> None:
    args = [slots[a.index] if isinstance(a, Slot) else a for a in step.args]
    if step.located:
        args.insert(0, coord)
    slots.append(step.func(*args, **(step.kwargs or {})))
    del args
    for i in step.drop:
        slots[i] = None


def _is_ufunc(func: Callable[..., Any]) -> bool:
    return isinstance(func, np.ufunc) and func.signature is None and func.nout == 1


def _is_elementwise(step: Step) -> bool:
    return not step.located and (_is_ufunc(step.func) or step.func in ELEMENTWISE)


def _run(steps: Sequence[Step], first: int, slots: list[Any]) -> _Run | None:
    """The elementwise steps from `first` on that give arrays of one shape, if they are worth tiling."""
    if not _is_large(steps[first], slots):
        return None
    shape: Shape | None = None
    base = len(slots)
    end = first
    while end < len(steps) and _is_elementwise(steps[end]):
        made = _shape_of(steps[end], slots, base, shape)
        if made is None or (shape is not None and made != shape):
            break
        shape = made
        end += 1
    if end - first < 2 or shape is None or math.prod(shape) < _WORTH:
        return None
    return _Run(steps[first:end], slots, shape)


def _is_large(step: Step, slots: list[Any]) -> bool:
    """Whether the operands of a step could broadcast to something worth tiling; quick, for most steps are small."""
    size = 1
    for a in step.args:
        size *= max(1, getattr(slots[a.index] if isinstance(a, Slot) else a, "size", 1))
    return size >= _WORTH


def _shape_of(step: Step, slots: list[Any], base: int, pending: Shape | None) -> Shape | None:
    """Shape of the result of a step, slots from `base` on being of shape `pending`; None where an operand is no NumPy array."""
    shapes: list[Shape] = []
    for a in step.args:
        if isinstance(a, Slot) and a.index >= base:
            shapes.append(pending or ())
            continue
        value = slots[a.index] if isinstance(a, Slot) else a
        if type(value) is not np.ndarray and not isinstance(value, (bool, int, float, complex, np.generic)):
            return None
        shapes.append(np.shape(value))
    return np.broadcast_shapes(*shapes)


class _Run:
    """A run of elementwise steps of one shape, and the buffers of its tiles."""

    def __init__(self, steps: Sequence[Step], slots: list[Any], shape: Shape) -> None:
        self.steps = steps
        self.slots = slots
        self.shape = shape
        self.base = len(slots)
        dropped = {s for step in steps for s in step.drop}
        mine = range(self.base, self.base + len(steps))
        self.outputs: dict[int, Any] = {s: None for s in mine if s not in dropped}
        # A buffer may be used again once no step reads it, unless a function may have returned a view of it.
        views = {a.index for st in steps for a in st.args if isinstance(a, Slot) and not _is_ufunc(st.func)}
        self.reusable = {s for s, st in zip(mine, steps, strict=True) if s in dropped and s not in views and _is_ufunc(st.func)}
        self.dtypes: dict[int, np.dtype[Any]] = {}
        self.free: dict[tuple[np.dtype[Any], Shape], list[Any]] = {}

    def evaluate(self) -> None:
        """Run all steps, tile by tile, and append their values to the slots; None for those that no later step reads."""
        for tile in _tiles(self.shape, self._order()):
            self._tile(tile)
        self.slots.extend(self.outputs.get(s) for s in range(self.base, self.base + len(self.steps)))
        for step in self.steps:
            for s in step.drop:
                self.slots[s] = None

    def _order(self) -> list[int]:
        """The dims from the longest stride to the shortest, as the first operand of full shape has them."""
        ndim = len(self.shape)
        for step in self.steps:
            for a in step.args:
                x = self.slots[a.index] if isinstance(a, Slot) and a.index < self.base else a
                if isinstance(x, np.ndarray) and x.shape == self.shape:
                    return sorted(range(ndim), key=lambda d: -abs(x.strides[d]))
        return list(range(ndim))

    def _tile(self, tile: Tile) -> None:
        values: dict[int, Any] = {}
        size = tuple(s.stop - s.start for s in tile)
        for s, step in enumerate(self.steps, self.base):
            args = [self._operand(a, values, tile) for a in step.args]
            values[s] = self._value(s, step, args, tile, size)
            for d in step.drop:
                if d in self.reusable:
                    buffer = values.pop(d)
                    self.free.setdefault((buffer.dtype, buffer.shape), []).append(buffer)

    def _operand(self, a: Any, values: dict[int, Any], tile: Tile) -> Any:
        if not isinstance(a, Slot):
            return _cut(a, tile)
        return values[a.index] if a.index >= self.base else _cut(self.slots[a.index], tile)

    def _value(self, s: int, step: Step, args: list[Any], tile: Tile, size: Shape) -> Any:
        kwargs = step.kwargs or {}
        dtype = self.dtypes.get(s)
        if dtype is None:
            value = step.func(*args, **kwargs)
            self.dtypes[s] = value.dtype
            if s in self.outputs:
                order_c = type(value) is np.ndarray and value.flags.c_contiguous
                self.outputs[s] = empty(self.shape, value.dtype) if order_c else np.empty_like(value, shape=self.shape)
        elif _is_ufunc(step.func):
            buffers = self.free.get((dtype, size))
            out = self.outputs[s][tile] if s in self.outputs else buffers.pop() if buffers else None
            return step.func(*args, out=out, **kwargs) if out is not None else step.func(*args, **kwargs)
        else:
            value = step.func(*args, **kwargs)
        if s in self.outputs:
            self.outputs[s][tile] = value
        return value


def _tiles(shape: Shape, order: Sequence[int]) -> Iterator[Tile]:
    """Boxes of at most `TILE_ELEMENTS`, each whole along the last dims of `order`."""
    at, rest = len(shape) - 1, 1
    while at > 0 and rest * shape[order[at]] <= TILE_ELEMENTS:
        rest *= shape[order[at]]
        at -= 1
    step = max(1, TILE_ELEMENTS // rest)
    tile = [slice(0, n) for n in shape]
    d = order[at]
    for lead in itertools.product(*(range(shape[k]) for k in order[:at])):
        for k, i in zip(order, lead, strict=False):
            tile[k] = slice(i, i + 1)
        for start in range(0, shape[d], step):
            tile[d] = slice(start, min(start + step, shape[d]))
            yield tuple(tile)


def _cut(array: Array, tile: Tile) -> Array:
    """The part of an operand that broadcasts to a tile."""
    if not isinstance(array, np.ndarray) or not array.ndim:
        return array
    return array[tuple(slice(None) if n == 1 else s for n, s in zip(array.shape, tile[len(tile) - array.ndim :], strict=True))]
