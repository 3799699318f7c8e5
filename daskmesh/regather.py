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

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

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
    def _flat_runs(self) -> tuple[tuple[Any, Any, Any] | None, ...]:
        """Per tensor dim with runs, those of all parts: where each part's begin among them, their starts, their stops."""
        out: list[tuple[Any, Any, Any] | None] = []
        for given in self.runs:
            if given is None:
                out.append(None)
                continue
            first = np.array([0, *itertools.accumulate(map(len, given))], np.int64)
            ends = np.array([run for runs in given for run in runs if run[0] < run[1]], np.int64).reshape(-1, 2)
            if len(ends) < first[-1]:
                first = np.array([0, *itertools.accumulate(sum(a < b for a, b in runs) for runs in given)], np.int64)
            out.append((first, ends[:, 0], ends[:, 1]))
        return tuple(out)

    def _runs_of(self, d: int, parts: Any) -> tuple[Any, Any, Any] | None:
        """The runs of every target part in an array: (place in the array, start, stop); None for a dim without runs."""
        flat = self._flat_runs[d]
        if flat is None:
            return None
        first, starts, stops = flat
        counts = first[parts + 1] - first[parts]
        which = np.repeat(np.arange(len(parts)), counts)
        at = np.arange(len(which)) + np.repeat(first[parts] - np.cumsum(counts) + counts, counts)
        return which, starts[at], stops[at]

    def _runs_met(self, d: int, parts: Any) -> tuple[Any, Any, Any]:
        runs = self._runs_of(d, parts)
        if runs is None:
            return super()._runs_met(d, parts)
        which, starts, stops = runs
        offsets = np.array(self.source.offsets[d])
        return which, np.searchsorted(offsets, starts, "right") - 1, np.searchsorted(offsets, stops, "left")

    def _common(self, d: int, target: Any, source: Any) -> Any:
        runs = self._runs_of(d, target)
        if runs is None:
            return super()._common(d, target, source)
        which, starts, stops = runs
        offsets = np.array(self.source.offsets[d])
        both = np.minimum(stops, offsets[source + 1][which]) - np.maximum(starts, offsets[source][which])
        common = np.zeros(len(target), np.int64)
        np.add.at(common, which, np.maximum(both, 0))
        return common
