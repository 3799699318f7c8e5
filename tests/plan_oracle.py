"""A redistribution worked out by NumPy alone: what every rank has to hold, written without the planner.

Terms of a layout are one array: an axis for every Partial mesh dim, then the global array. Locals are cut out of it by the split
rule, or from sizes given; the value is the terms reduced over the first axis, then the next.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from daskmesh.layout import Layout
from daskmesh.placement import Partial, Shard, reduction
from daskmesh.plan import Plan, Stage, make_plan

Coord = tuple[int, ...]
Locals = dict[Coord, np.ndarray]


def box(layout: Layout, coord: Coord) -> tuple[slice, ...]:
    """The slices of the global array that a coordinate holds."""
    cuts = tuple(p.dim if isinstance(p, Shard) else None for p in layout.placements)
    return _box(layout.mesh.shape, cuts, layout.shape, layout.chunks, coord)


@lru_cache(20000)
def _box(
    mesh_shape: Coord, cuts: tuple[int | None, ...], shape: Coord, chunks: tuple[Coord, ...], coord: Coord
) -> tuple[slice, ...]:
    """The split rule, mesh dim by mesh dim; explicit sizes by the number of the part."""
    out = []
    for d, n in enumerate(shape):
        lo, hi, number, ruled = 0, n, 0, [n]
        for m, cut_dim in enumerate(cuts):
            if cut_dim == d:
                k, i = mesh_shape[m], coord[m]
                c = -(-(hi - lo) // k)
                lo, hi = min(lo + i * c, hi), min(lo + (i + 1) * c, hi)
                number = number * k + i
                ruled = [max(0, min(r, (j + 1) * -(-r // k)) - j * -(-r // k)) for r in ruled for j in range(k)]
        if tuple(ruled) != chunks[d]:
            lo = sum(chunks[d][:number])
            hi = lo + chunks[d][number]
        out.append(slice(lo, hi))
    return tuple(out)


def partials(layout: Layout) -> list[int]:
    return [m for m, p in enumerate(layout.placements) if isinstance(p, Partial)]


def reduce_axis(op: str, terms: np.ndarray, axis: int) -> np.ndarray:
    """One reduction in the dtype given; integer averages exactly, toward zero."""
    if op in ("any", "all"):
        return getattr(terms != 0, op)(axis=axis).astype(terms.dtype)
    if op != "avg":
        ufunc = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}[op]
        return ufunc.reduce(terms, axis=axis, dtype=terms.dtype)
    n = terms.shape[axis]
    if terms.dtype.kind in "fc":
        return (terms / n).sum(axis=axis, dtype=terms.dtype)
    total = terms.astype(object).sum(axis=axis)
    exact = [abs(int(s)) // n * (1 if s >= 0 else -1) for s in np.ravel(total)]
    return np.array(exact, dtype=object).reshape(np.shape(total)).astype(terms.dtype)


def reduce_dims(layout: Layout, terms: np.ndarray, dims: Sequence[int]) -> np.ndarray:
    """Reduce some Partial mesh dims of a term array, the first mesh dim first."""
    axes = partials(layout)
    for m in sorted(dims):
        terms = reduce_axis(layout.placements[m].op, terms, axes.index(m))
        axes.remove(m)
    return terms


def value(layout: Layout, terms: np.ndarray) -> np.ndarray:
    return reduce_dims(layout, terms, partials(layout))


def terms_shape(layout: Layout) -> tuple[int, ...]:
    return (*(layout.mesh.shape[m] for m in partials(layout)), *layout.shape)


def random_terms(layout: Layout, rng: np.random.Generator) -> np.ndarray:
    """Small numbers; floats such that every average is exact."""
    shape, dtype = terms_shape(layout), layout.dtype
    if dtype.kind == "b":
        return rng.random(shape) < 0.6
    numbers = rng.integers(0 if dtype.kind == "u" else -3, 4, size=shape)
    if dtype.kind in "fc" and any(p == Partial("avg") for p in layout.placements):
        numbers *= 60
    if dtype.kind == "c":
        return (numbers + 1j * rng.integers(-3, 4, size=shape)).astype(dtype)
    return numbers.astype(dtype)


def cut(layout: Layout, terms: np.ndarray) -> Locals:
    """What every coordinate holds."""
    dims = partials(layout)
    out = {}
    for coord in itertools.product(*map(range, layout.mesh.shape)):
        local = terms[tuple(coord[m] for m in dims)][box(layout, coord)]
        local = np.array(local)
        local.flags.writeable = False
        out[coord] = local
    return out


def joined(layout: Layout, held: Locals) -> np.ndarray:
    """The term array that locals are cut from; replicas must agree, and nothing may be missing."""
    dims = partials(layout)
    terms = np.zeros(terms_shape(layout), layout.dtype)
    seen = np.zeros(terms.shape, bool)
    for coord, local in held.items():
        at = tuple(coord[m] for m in dims)
        where = box(layout, coord)
        assert local.shape == tuple(s.stop - s.start for s in where)
        assert local.dtype == layout.dtype
        old = seen[at][where]
        if old.any():
            assert old.all()
            assert np.array_equal(terms[at][where], local, equal_nan=layout.dtype.kind in "fc"), f"replica at {coord}"
        terms[(*at, *where)] = local
        seen[(*at, *where)] = True
    assert seen.all()
    return terms


def carry_out(stage: Stage, held: Locals) -> Locals:
    """Do what a stage says, as its tasks do: load the terms of every region, fold them, the first folded mesh dim innermost.

    The bytes that the stage says move must be those of the loads.
    """
    out = {}
    moved = {}
    flat = {coord: i for i, coord in enumerate(stage.source.coords())}
    for coord in stage.target.coords():
        block = np.zeros(stage.target.local_shape(coord), stage.target.dtype)
        written = np.zeros(block.shape, np.int8)
        rank = stage.target.mesh.rank_at(coord)
        moved[rank] = 0
        if not stage.makes(coord):
            continue
        op = stage.neutral_op(coord)
        if op is not None:
            block[...] = reduction(op).neutral(block.dtype)
            written[...] = 1
        for dst, loads in stage.regions(coord):
            size = loads[0].size
            assert size > 0
            for load in loads:
                assert load.rank == stage.source.mesh.process_ids[flat[load.coord]]
                assert load.dst == dst
                moved[rank] += size * block.itemsize * (load.rank != rank)
            terms = [np.array(held[load.coord][load.src]) for load in loads]
            for m in stage.folded:
                n = stage.source.mesh.shape[m]
                row = reduction(stage.source.placements[m].op)
                terms = [row.fold(terms[i : i + n], n) for i in range(0, len(terms), n)]
            (block[dst],) = terms
            written[dst] += 1
        assert (written == 1).all(), f"{coord} is written {written} times"
        out[coord] = block
    assert stage.received == moved
    return out


def check_bytes(plan: Plan, pairs: bool = True) -> None:
    """Totals and bytes by pair are the sums over ranks; what needs no fold moves the missing elements, no more."""
    received = dict.fromkeys(plan.target.mesh.process_ids, 0)
    for stage in plan.stages:
        assert stage.total_bytes == sum(stage.received.values())
        for rank, n in stage.received.items():
            received[rank] = received.get(rank, 0) + n
    assert plan.received == received
    assert plan.total_bytes == sum(received.values())
    if pairs:
        got = dict.fromkeys(received, 0)
        for (source, target), n in plan.pairs.items():
            assert source != target
            assert n > 0
            got[target] += n
        assert got == received
    if not partials(plan.source) and not partials(plan.target):
        assert plan.received == missing(plan.source, plan.target)


def missing(source: Layout, target: Layout) -> dict[int, int]:
    """Bytes of every rank's target box that its own source box does not hold: no way of moving can do with less."""
    out = {}
    for coord in target.coords():
        rank = target.mesh.rank_at(coord)
        wanted = box(target, coord)
        have = box(source, source.mesh.coordinate(rank)) if rank in source.mesh else None
        total = prod(s.stop - s.start for s in wanted)
        if have is not None:
            total -= prod(max(0, min(a.stop, b.stop) - max(a.start, b.start)) for a, b in zip(wanted, have, strict=True))
        out[rank] = total * target.dtype.itemsize
    return out


def commute(layout: Layout, m: int, d: int) -> bool:
    a, b = layout.placements[m].op, layout.placements[d].op
    return (a == b != "avg") or (layout.dtype.kind in "fc" and {a, b} <= {"sum", "avg"})


def check_kept(source: Layout, target: Layout, before: np.ndarray, after: np.ndarray) -> bool:
    """Terms of a mesh dim that is the same Partial on both sides stay as they are; False where that cannot be asked for."""
    if source.mesh.shape != target.mesh.shape:
        return False
    kept = [m for m in partials(source) if source.placements[m] == target.placements[m]]
    folded = [m for m in partials(source) if m not in kept]
    if not kept or not all(commute(source, m, d) for m in kept for d in folded if m < d):
        return False
    new = tuple(slice(None) if m in kept else 0 for m in partials(target))
    assert_same(after[new], reduce_dims(source, before, folded))
    return True


def assert_same(got: np.ndarray, want: Any) -> None:
    """Equal; floats within rounding of the largest number met."""
    assert got.dtype == want.dtype
    if np.array_equal(got, want):
        return
    if got.dtype.kind not in "fc":
        np.testing.assert_array_equal(got, want)
        return
    scale = max(1.0, float(np.abs(want).max()))
    np.testing.assert_allclose(got, want, rtol=0, atol=scale * 64 * float(np.finfo(got.dtype).eps))


def check(source: Layout, target: Layout, two_stage_bytes: int, rng: np.random.Generator) -> None:
    """Plan, carry out and compare one redistribution, in values and in bytes; bytes by pair one time in four."""
    plan = make_plan(source, target, two_stage_bytes)
    terms = random_terms(source, rng)
    held = cut(source, terms)
    for stage in plan.stages:
        held = carry_out(stage, held)
    result = joined(target, held)
    assert_same(value(target, result), value(source, terms))
    check_kept(source, target, terms, result)
    check_bytes(plan, rng.random() < 0.25)
