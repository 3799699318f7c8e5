"""Re-gatherings: a result whose every dim is made of stretches of one source dim.

Reversing, rolling, tiling and most ways of padding say, for each tensor dim, where the elements of the result stand in the
source: a few `Stretch`es, read forwards or backwards, or one element over and over::

    roll by 2 of 6      source 4 5 0 1 2 3      (4, +1, 2) (0, +1, 4)
    reflect, 2 before   source 2 1 0 1 2 3      (2, -1, 2) (0, +1, 4)
    constant, 2 before  source . . 0 1 2 3      fill 2     (0, +1, 4)

Where the stretches of a dim go forwards, each rank picks from its own part, the parts of the result have other sizes, and nothing
moves. Else the dim is cut anew, and a rank needs for its new part some runs of the source. `Regather` is the stage that loads the
product of such runs over all dims, end to end; what is left is to put them in order, which is a local matter.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from daskmesh.layout import Coord
from daskmesh.plan import Stage, meet

__all__ = ["Regather", "Run", "Stretch", "ascending", "counts", "cut", "merged", "relative", "spans"]

Run = tuple[int, int]
Shape = tuple[int, ...]


class Stretch(NamedTuple):
    """`size` elements of a dim, from `start` on by `step` (1, -1 or 0); with `start` -1 it is the fill value, so often."""

    start: int
    step: int
    size: int

    @property
    def span(self) -> Run:
        """Least and greatest element, plus one; empty for the fill value."""
        if self.start < 0 or not self.size:
            return 0, 0
        last = self.start + self.step * (self.size - 1)
        return min(self.start, last), max(self.start, last) + 1


Stretches = tuple[Stretch, ...]


def ascending(stretches: Stretches) -> bool:
    """Whether the elements never go back.

    Examples
    --------
    >>> from daskmesh.regather import Stretch, ascending
    >>> ascending((Stretch(0, 0, 2), Stretch(0, 1, 4))), ascending((Stretch(4, 1, 2), Stretch(0, 1, 4)))
    (True, False)
    """
    at = 0
    for s in stretches:
        if s.start < 0 or not s.size:
            continue
        lo, hi = s.span
        if lo < at or (s.step < 0 and s.size > 1):
            return False
        at = hi - 1
    return True


def cut(stretches: Stretches, lo: int, hi: int) -> Stretches:
    """The elements `lo` to `hi` of the result.

    Examples
    --------
    >>> from daskmesh.regather import Stretch, cut
    >>> cut((Stretch(4, 1, 2), Stretch(0, 1, 4)), 1, 3)
    (Stretch(start=5, step=1, size=1), Stretch(start=0, step=1, size=1))
    """
    out = []
    at = 0
    for s in stretches:
        a, b = max(lo - at, 0), min(hi - at, s.size)
        if a < b:
            out.append(Stretch(s.start + s.step * a if s.start >= 0 else -1, s.step, b - a))
        at += s.size
    return tuple(out)


def counts(stretches: Stretches, offsets: Sequence[int]) -> Shape:
    """How many elements of ascending stretches each source part gives; fill values go with the element before them.

    Examples
    --------
    >>> from daskmesh.regather import Stretch, counts
    >>> counts((Stretch(-1, 0, 2), Stretch(0, 1, 4), Stretch(-1, 0, 1)), (0, 3, 6))
    (5, 2)
    """
    given = [0] * (len(offsets) - 1)
    part, early = -1, 0
    for s in stretches:
        if s.start < 0:
            if part < 0:
                early += s.size
            else:
                given[part] += s.size
            continue
        lo, hi = s.span
        while lo < hi:
            part = bisect_right(offsets, lo) - 1
            stop = min(hi, offsets[part + 1])
            given[part] += s.size if s.step == 0 else stop - lo
            lo = hi if s.step == 0 else stop
            given[part] += early
            early = 0
    if early:
        given[0] += early
    return tuple(given)


def merged(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Runs in order, those that touch or overlap as one."""
    out: list[Run] = []
    for a, b in sorted(r for r in runs if r[0] < r[1]):
        if out and a <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], b))
        else:
            out.append((a, b))
    return tuple(out)


def spans(stretches: Stretches) -> tuple[Run, ...]:
    """The runs of the source that some stretches need."""
    return merged(s.span for s in stretches)


def relative(stretches: Stretches, runs: Sequence[Run]) -> Stretches:
    """Stretches with their elements counted within `runs` laid end to end."""
    starts = [a for a, _ in runs]
    before = [0]
    for a, b in runs:
        before.append(before[-1] + b - a)

    def moved(at: int) -> int:
        i = bisect_right(starts, at) - 1
        return before[i] + at - starts[i]

    return tuple(s if s.start < 0 else Stretch(moved(s.start), s.step, s.size) for s in stretches)


@dataclass(frozen=True)
class Regather(Stage):
    """A stage whose target blocks are no boxes of the source: along some tensor dims, each is several runs laid end to end.

    Attributes
    ----------
    runs : tuple
        Per tensor dim, per part of the target, its runs of the source; None for a dim that is cut in the source as in the target.
    """

    runs: tuple[tuple[tuple[Run, ...], ...] | None, ...] = ()

    def _runs(self, d: int, part: int) -> tuple[Run, ...]:
        given = self.runs[d]
        if given is not None:
            return given[part]
        offsets = self.target.offsets[d]
        return ((offsets[part], offsets[part + 1]),)

    def parts(self, coord: Coord) -> list[Sequence[int]]:
        """Per tensor dim, the numbers of the source parts that the target block at `coord` meets, without their slices."""
        return [tuple(dict.fromkeys(part for part, _, _ in met)) for met in self.meets(coord)]

    def meets(self, coord: Coord) -> list[list[tuple[int, slice, slice]]]:
        """Per tensor dim, the source parts that the target block at `coord` meets: (part, slice in it, slice in the block)."""
        out = []
        for d, part in enumerate(self.target.part_index(coord)):
            at, met = 0, []
            for a, b in self._runs(d, part):
                for i, src, dst in meet(self.source.offsets[d], slice(a, b)):
                    met.append((i, src, slice(dst.start + at, dst.stop + at)))
                at += b - a
            out.append(met)
        return out

    @cached_property
    def received(self) -> dict[int, int]:
        """Bytes that each target rank loads from other ranks."""
        source, target = self.source, self.target
        out = {}
        common: dict[tuple[int, int, int], int] = {}
        for coord in target.coords():
            there = source.part_index(coord)
            own = 1
            for d, part in enumerate(target.part_index(coord)):
                key = d, part, there[d]
                if key not in common:
                    lo, hi = source.offsets[d][there[d] : there[d] + 2]
                    common[key] = sum(max(0, min(b, hi) - max(a, lo)) for a, b in self._runs(d, part))
                own *= common[key]
            need = math.prod(target.local_shape(coord)) * self.terms
            loaded = 0 if self.neutral_op(coord) is not None else need - own
            out[target.mesh.rank_at(coord)] = loaded * target.dtype.itemsize
        return out
