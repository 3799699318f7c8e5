"""Placements as values, and every row of the reduction table over every dtype."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import numpy as np
import pytest

from daskmesh.placement import Partial, PlacementError, ReduceType, Replicate, Shard, reduction

OPS = [t.value for t in ReduceType]
DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16", ">i4", ">u8", ">f8"]
EVERY = [Shard(0), Shard(1), Shard(-1), Replicate(), *map(Partial, ReduceType)]


def extremes(dtype: np.dtype[Any]) -> np.ndarray:
    """Numbers where a careless reduction goes wrong."""
    if dtype.kind == "b":
        return np.array([True, False])
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        numbers = [info.min, info.min + 1, info.max, info.max - 1, 0, 1, 2, 5, 7] + [-1, -2, -7] * (dtype.kind == "i")
        return np.array(numbers, dtype)
    numbers = np.array([0.0, -0.0, 1.5, -2.25, 4.0, -3.0])
    return (numbers + 1j * numbers[::-1] if dtype.kind == "c" else numbers).astype(dtype)


# Values


def test_reprs_are_source() -> None:
    assert [repr(p) for p in (Shard(0), Shard(-1), Replicate(), Partial(), Partial("avg"))] == [
        "Shard(0)", "Shard(-1)", "Replicate()", "Partial('sum')", "Partial('avg')",
    ]  # fmt: skip


@pytest.mark.parametrize("p", EVERY, ids=repr)
def test_placements_are_values(p: Any) -> None:
    assert [q for q in EVERY if q == p] == [p]
    for again in (pickle.loads(pickle.dumps(p)), copy.deepcopy(p)):
        assert again == p
        assert hash(again) == hash(p)
        assert repr(again) == repr(p)
    assert p != repr(p)
    with pytest.raises((AttributeError, TypeError)):
        p.dim = 3


def test_partial_spellings() -> None:
    assert Partial() == Partial("sum") == Partial(ReduceType.kRedSum) == Partial(reduce_type="sum")
    assert [Partial(t).op for t in ReduceType] == ["sum", "max", "min", "prod", "avg", "any", "all"]
    assert all(Partial(t).reduce_type is t is Partial(t.value).reduce_type for t in ReduceType)
    assert [t.name for t in ReduceType] == [
        "kRedSum", "kRedMax", "kRedMin", "kRedProd", "kRedAvg", "kRedAny", "kRedAll",
    ]  # fmt: skip


def test_predicates() -> None:
    table = [(p.is_shard(), p.is_shard(1), p.is_replicated(), p.is_partial()) for p in (Shard(1), Replicate(), Partial())]
    assert table == [(True, True, False, False), (False, False, True, False), (False, False, False, True)]
    assert not Shard(0).is_shard(1)
    assert Shard(np.int64(2)).get_dim() == 2
    assert type(Shard(np.int64(2)).dim) is int


# The reduction table


def exact(op: str, terms: np.ndarray) -> np.ndarray:
    """The reduction over axis 0 in the numbers of Python; in float64 for floats."""
    dtype = terms.dtype
    if op in ("any", "all"):
        return getattr(terms != 0, op)(axis=0).astype(dtype)
    if op in ("max", "min"):
        return getattr(terms, op)(axis=0)
    if dtype.kind in "fc":
        wide = terms.astype("c16" if dtype.kind == "c" else "f8")
        return (wide.mean(axis=0) if op == "avg" else getattr(wide, op)(axis=0)).astype(dtype)
    if dtype.kind == "b" and op in ("sum", "prod"):
        return terms.any(axis=0) if op == "sum" else terms.all(axis=0)
    numbers = terms.astype(object)
    if op == "avg":
        quotients = [abs(s) // len(terms) * (-1 if s < 0 else 1) for s in numbers.sum(axis=0)]
        return np.array(quotients, dtype=object).astype(dtype)
    bits = 8 * dtype.itemsize
    wrapped = [int(v) & (2**bits - 1) for v in getattr(numbers, op)(axis=0)]
    return np.array(wrapped, f"u{dtype.itemsize}").view(f"{dtype.kind}{dtype.itemsize}").astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 7])
def test_fold_of_arrays_and_scalars(op: str, dtype: str, n: int) -> None:
    rng = np.random.default_rng(n)
    pool = extremes(np.dtype(dtype))
    terms = pool[rng.integers(0, len(pool), size=(n, 40))]
    want = exact(op, terms)
    row = reduction(op)
    later = [t.copy() for t in terms]
    got = row.fold(iter(later), n)
    assert got.dtype == terms.dtype
    close(got, want)
    assert all(np.array_equal(a, b) for a, b in zip(later[1:], terms[1:], strict=True))  # only the first may be overwritten
    for i in range(0, 40, 13):
        for scalar in (row.fold(list(terms[:, i]), n), row.fold([np.array(t) for t in terms[:, i]], n)):
            assert scalar.dtype.newbyteorder("=") == terms.dtype.newbyteorder("=")
            assert scalar.shape == ()
            assert scalar == got[i]


def close(got: np.ndarray, want: np.ndarray) -> None:
    if got.dtype.kind in "fc":
        np.testing.assert_allclose(got, want, rtol=8 * float(np.finfo(got.dtype).eps), atol=1e-2 if got.dtype == "f2" else 1e-5)
    else:
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_neutral_element(op: str, dtype: str) -> None:
    """Reducing with the neutral element, on either side, changes nothing; an average of copies is the value."""
    row, dt = reduction(op), np.dtype(dtype)
    x = extremes(dt)
    if op in ("any", "all"):
        x = (x != 0).astype(dt)
    e = row.neutral(dt)
    assert e.dtype.newbyteorder("=") == dt.newbyteorder("=")
    other = x if op == "avg" else np.full(x.shape, e, dt)
    for terms in ([x, other], [other, x]):
        np.testing.assert_array_equal(row.fold([t.copy() for t in terms], 2), x)
    if row.copies and (op != "avg" or dt.kind not in "fc"):
        for n in (1, 2, 3, 5, 7):
            np.testing.assert_array_equal(row.fold([x.copy() for _ in range(n)], n), x)


def test_which_reductions_place_copies() -> None:
    assert {op for op in OPS if reduction(op).copies} == {"max", "min", "avg", "all"}


@pytest.mark.parametrize("dtype", ["i1", "i8", "u8", "u1"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_integer_average_of_every_combination(dtype: str, n: int) -> None:
    """The exact quotient toward zero, at the ends of the range too, with no sum that could overflow."""
    pool = [int(v) for v in extremes(np.dtype(dtype))][:: 1 if n < 4 else 2]
    combinations = list(itertools.product(pool, repeat=n))
    terms = np.array(combinations, dtype).T.copy()
    want = [abs(sum(c)) // n * (-1 if sum(c) < 0 else 1) for c in combinations]
    np.testing.assert_array_equal(reduction("avg").fold(terms, n), np.array(want, dtype))


def test_integer_average_of_many_ranks() -> None:
    low, high = np.iinfo("i8").min, np.iinfo("i8").max
    for n in (127, 128, 1000):
        assert reduction("avg").fold(np.full((n, 1), low), n).tolist() == [low]
        assert reduction("avg").fold(np.full((n, 1), high), n).tolist() == [high]
        assert reduction("avg").fold(np.full((n, 1), -1, "i1"), n).tolist() == [-1]
        assert reduction("avg").fold(np.full((n, 1), 255, "u1"), n).tolist() == [255]


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c16"])
def test_average_of_floats_does_not_overflow(dtype: str) -> None:
    top = np.finfo(dtype).max
    for n in (2, 4, 8):
        got = reduction("avg").fold(np.full((n, 3), top, dtype), n)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, np.full(3, top, dtype))


def test_special_floats() -> None:
    nan, inf = np.nan, np.inf
    terms = np.array([[nan, 1, inf, -0.0, -inf], [1, nan, 2, -0.0, 3]])
    expected = {
        "sum": [nan, nan, inf, -0.0, -inf],
        "prod": [nan, nan, inf, 0.0, -inf],
        "max": [nan, nan, inf, -0.0, 3],
        "min": [nan, nan, 2, -0.0, -inf],
        "avg": [nan, nan, inf, -0.0, -inf],
        "any": [1, 1, 1, 0, 1],
        "all": [1, 1, 1, 0, 1],
    }
    for op, want in expected.items():
        got = reduction(op).fold(terms.copy(), 2)
        np.testing.assert_array_equal(got, want)
        assert np.signbit(got[3]) == np.signbit(want[3])


def test_mask_of_truth_values() -> None:
    terms = np.array([[False, True, False], [True, True, False]])
    table = {op: reduction(op).fold(terms.copy(), 2).tolist() for op in OPS}
    either, both = [True, True, False], [False, True, False]
    assert table == {"sum": either, "max": either, "any": either, "prod": both, "min": both, "avg": both, "all": both}


def test_truth_of_numbers_is_0_or_1_in_their_dtype() -> None:
    assert reduction("any").fold(np.array([[0.0], [2.5]]), 2).tolist() == [1.0]
    assert reduction("all").fold(np.array([[0], [2]]), 2).tolist() == [0]
    assert reduction("any").fold(np.array([[300]], "i2"), 1).tolist() == [1]


@pytest.mark.parametrize("dtype", ["M8[s]", "m8[ns]"])
@pytest.mark.parametrize("op", ["max", "min"])
def test_neutral_time(op: str, dtype: str) -> None:
    x = np.array([-5, 0, 10**12]).astype(dtype)
    e = np.full(x.shape, reduction(op).neutral(x.dtype))
    np.testing.assert_array_equal(reduction(op).fold([x.copy(), e], 2), x)


def test_average_of_durations_keeps_what_is_missing() -> None:
    x = np.array([[-5, 7, "NaT"], [-4, "NaT", "NaT"], [3, 2, 1]], "m8[s]")
    for n in (1, 2, 3):
        got = reduction("avg").fold(x[:n].copy(), n)
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got, x[:n].sum(0) / n)
    assert np.isnat(reduction("avg").fold([np.timedelta64("NaT", "s"), np.timedelta64(1, "s")], 2))


def test_which_dtypes_a_reduction_takes() -> None:
    table = {kind: [op for op in OPS if reduction(op).takes(np.dtype(kind))] for kind in ("M8[s]", "m8[s]", "U1", "i4,i4", "O")}
    assert table == {"M8[s]": ["max", "min"], "m8[s]": ["sum", "max", "min", "avg"], "U1": [], "i4,i4": [], "O": []}
    assert all(reduction(op).takes(np.dtype(kind)) for op in OPS for kind in "?bBefdgFD")


def test_read_only_terms() -> None:
    """The first term may take the result, so it has to be writable; the others are only read."""
    terms = [np.ones(3), np.ones(3)]
    terms[1].flags.writeable = False
    assert reduction("sum").fold(terms, 2) is terms[0]
    with pytest.raises(ValueError, match="read-only"):
        reduction("sum").fold([terms[1], terms[0]], 2)


def test_empty_terms() -> None:
    for op in OPS:
        assert reduction(op).fold(np.zeros((3, 0, 2), "i4"), 3).shape == (0, 2)


def test_unknown_reduction() -> None:
    with pytest.raises(PlacementError, match="unknown reduction 'mean'; known: sum, prod, max, min, any, all, avg"):
        reduction("mean")
