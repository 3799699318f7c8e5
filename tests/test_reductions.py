"""Reductions against NumPy: all kinds of layouts, empty parts, weights, nan, ties, dtypes, and the bytes that move."""

from __future__ import annotations

from typing import Any

import numpy as np
import ops_oracle as oracle
import pytest
from distributed import Client
from hypothesis import given
from hypothesis import strategies as st
from ops_oracle import Case, cases, few

import daskmesh as dm
from daskmesh.layout import make_layout
from daskmesh.placement import Partial, Replicate, Shard

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("threads"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's of empty slices are not what is tested
]

FOLDING = ("sum", "prod", "max", "min", "any", "all", "mean", "count_nonzero")
BY_PARTS = ("var", "std", "ptp")
ARG = ("argmax", "argmin")
SKIPPING = ("nansum", "nanprod", "nanmax", "nanmin", "nanmean", "nanvar", "nanstd")
NAN_ARG = ("nanargmax", "nanargmin")
LINE, THREE, SQUARE, _ = oracle.MESHES


@st.composite
def axes_of(draw: Any, ndim: int, several: bool = True) -> Any:
    choices: list[Any] = [None, *range(-ndim, ndim)]
    if several and ndim > 1:
        choices += [(0, 1), (-1, 0), tuple(range(ndim))]
    return draw(st.sampled_from(choices))


def total(name: str, a: Any, *, axis: Any, keepdims: bool) -> Any:
    return getattr(np, name)(a, axis=axis, keepdims=keepdims)


@few(220)
@given(cases(), st.data())
def test_folding_reductions(case: Case, data: Any) -> None:
    name = data.draw(st.sampled_from(FOLDING))
    axis, keepdims = data.draw(axes_of(case.a.ndim)), data.draw(st.booleans())
    oracle.agree(lambda a: total(name, a, axis=axis, keepdims=keepdims), case)


@few(160)
@given(cases(), st.data())
def test_reductions_by_summaries(case: Case, data: Any) -> None:
    name = data.draw(st.sampled_from(BY_PARTS + ARG))
    if name == "ptp" and case.a.dtype.kind == "b":
        name = "var"
    axis, keepdims = data.draw(axes_of(case.a.ndim, name not in ARG)), data.draw(st.booleans())
    oracle.agree(lambda a: total(name, a, axis=axis, keepdims=keepdims), case)


@few(160)
@given(cases(dtypes=("f8", "f4", "c16"), low=1, partial=False), st.data())
def test_reductions_that_meet_nan(case: Case, data: Any) -> None:
    """nan goes through the plain ones, and the others skip it; all-nan slices as NumPy has them."""
    holes = np.random.default_rng(data.draw(st.integers(0, 9))).random(case.a.shape) < 0.4
    a = np.where(holes, np.nan, case.a).astype(case.a.dtype)
    holed = Case(oracle.held(case.x.layout, a), a)
    name = data.draw(st.sampled_from((*SKIPPING, *NAN_ARG, *ARG, "max", "sum", "var", "mean")))
    axis = data.draw(axes_of(a.ndim, "arg" not in name))
    oracle.agree(lambda x: total(name, x, axis=axis, keepdims=False), holed)


@few(80)
@given(cases(dtypes=("f8", "i4", "f2"), low=1), st.data())
def test_options(case: Case, data: Any) -> None:
    """dtype=, initial=, where=, ddof= mean what they mean in NumPy."""
    axis = data.draw(axes_of(case.a.ndim))
    mask = data.draw(st.sampled_from([case.a.shape, case.a.shape[1:], (case.a.shape[0], *(1,) * (case.a.ndim - 1))]))
    where = np.random.default_rng(data.draw(st.integers(0, 9))).random(mask) < 0.6
    call = data.draw(st.sampled_from([
        lambda a: np.sum(a, axis, initial=3), lambda a: np.sum(a, axis, where=where), lambda a: np.sum(a, axis, dtype="f4"),
        lambda a: np.prod(a, axis, initial=2, where=where), lambda a: np.max(a, axis, initial=1),
        lambda a: np.min(a, axis, initial=2, where=where), lambda a: np.any(a, axis, where=where),
        lambda a: np.all(a, axis, where=where, keepdims=True), lambda a: np.mean(a, axis, where=where),
        lambda a: np.mean(a, axis, dtype="f8"), lambda a: np.var(a, axis, ddof=1), lambda a: np.std(a, axis, where=where),
        lambda a: np.var(a, axis, correction=1, dtype="f8"), lambda a: np.nansum(a, axis, where=where),
        lambda a: np.nanmean(a, axis, where=where), lambda a: np.nanmax(a, axis, where=where, initial=-9),
    ]))  # fmt: skip
    oracle.agree(call, case)


@few(80)
@given(cases(dtypes=("i8", "f8", "?"), low=1), st.data())
def test_reduce_of_ufuncs(case: Case, data: Any) -> None:
    names = {
        "f": "add multiply maximum fmax logaddexp subtract hypot logical_or",
        "i": "add gcd bitwise_xor lcm minimum subtract",
        "b": "logical_xor logical_and bitwise_or add",
    }
    ufunc = getattr(np, data.draw(st.sampled_from(names[case.a.dtype.kind].split())))
    axis = data.draw(st.integers(-case.a.ndim, case.a.ndim - 1)) if ufunc is np.subtract else data.draw(axes_of(case.a.ndim))
    if case.a.dtype.kind == "b" and ufunc is np.subtract:
        return
    oracle.agree(lambda a: ufunc.reduce(a, axis=axis), case)


@few(60)
@given(cases(dtypes=("f8", "i4"), low=1), st.data())
def test_quantiles(case: Case, data: Any) -> None:
    axis, keepdims = data.draw(axes_of(case.a.ndim)), data.draw(st.booleans())
    call = data.draw(st.sampled_from([
        lambda a: np.median(a, axis, keepdims=keepdims), lambda a: np.quantile(a, 0.3, axis, keepdims=keepdims),
        lambda a: np.percentile(a, [10, 50], axis, keepdims=keepdims), lambda a: np.nanmedian(a, axis, keepdims=keepdims),
        lambda a: np.quantile(a, [[0.2], [1.0]], axis, method="lower", keepdims=keepdims),
    ]))  # fmt: skip
    if not case.a.size:
        return
    oracle.agree(call, case)


@few(40)
@given(cases(dtypes=("f8", "i4"), shape=(4, 3)), st.data())
def test_average(case: Case, data: Any) -> None:
    weights = np.arange(1.0, 13.0).reshape(4, 3)
    call = data.draw(st.sampled_from([
        lambda a: np.average(a), lambda a: np.average(a, 0), lambda a: np.average(a, 1, weights[0]),
        lambda a: np.average(a, weights=weights), lambda a: np.average(a, 0, weights, keepdims=True),
        lambda a: np.average(a, 0, weights[:, 0], returned=True), lambda a: np.average(a, weights=a * a + 1),
    ]))  # fmt: skip
    oracle.agree(call, case)


@few(40)
@given(cases(dtypes=("f8", "i4"), low=1, partial=False), st.data())
def test_masks_that_are_cut(case: Case, data: Any) -> None:
    """where= may be a DTensor, in whatever layout."""
    mask = data.draw(cases(case.x.process_mesh, case.a.shape, dtypes=("?",)))
    axis = data.draw(axes_of(case.a.ndim))
    call = data.draw(st.sampled_from([
        lambda a, m: np.sum(a, axis, where=m), lambda a, m: np.max(a, axis, where=m, initial=-5),
        lambda a, m: np.mean(a, axis, where=m), lambda a, m: np.var(a, axis, where=m), lambda a, m: np.all(a, axis, where=m),
    ]))  # fmt: skip
    oracle.agree(call, case, mask)


# -- named cases ------------------------------------------------------------------------------------------------------


def whole_numbers(mesh: Any, placements: Any, shape: tuple[int, ...]) -> Any:
    return dm.shard_tensor(np.arange(float(np.prod(shape))).reshape(shape), mesh, placements)


@pytest.mark.parametrize(
    ("call", "want"),
    [
        (lambda x: np.max(x), 11.0), (lambda x: np.min(x), 0.0), (lambda x: np.argmax(x), 11),
        (lambda x: np.max(x, axis=0), [8.0, 9, 10, 11]), (lambda x: np.linalg.norm(x, np.inf), 38.0),
        (lambda x: np.sum(x), 66.0), (lambda x: np.prod(x + 1), 479001600.0), (lambda x: np.linalg.norm(x), np.sqrt(506)),
        (lambda x: np.std(x, ddof=1), np.sqrt(13)), (lambda x: np.mean(x), 5.5),
    ],
)  # fmt: skip
def test_an_empty_part_takes_no_part(call: Any, want: Any) -> None:
    """Three rows over four ranks."""
    oracle.same(call(whole_numbers(dm.init_mesh(4, ["x"]), [Shard(0)], (3, 4))), want)


def test_globally_empty() -> None:
    x = dm.zeros((0, 3), mesh=THREE, placements=[Shard(0)])
    oracle.same(np.sum(x), 0.0)
    oracle.same(np.prod(x, axis=0), np.ones(3))
    oracle.same(np.mean(x), np.nan)
    for name in ("max", "min", "argmax", "argmin", "ptp", "nanmax"):
        with pytest.raises(ValueError, match=r"zero-size|empty sequence"):
            getattr(np, name)(x, axis=0)
    oracle.same(np.max(x, axis=1), np.zeros(0))
    oracle.same(np.max(x, initial=2.0), 2.0)


@pytest.mark.parametrize(("shape", "mesh", "want"), [((3, 4), LINE, 5.5), ((1, 4), LINE, 1.5), ((7,), THREE, 3.0)])
def test_a_mean_weighs_uneven_parts(shape: tuple[int, ...], mesh: Any, want: float) -> None:
    oracle.same(np.mean(whole_numbers(mesh, [Shard(0)], shape)), want)


def test_a_constant_meets_a_sum_once() -> None:
    oracle.same(np.sum(whole_numbers(LINE, [Shard(0)], (10,))) + 10, 55.0)
    x = dm.dtensor_from_local([np.ones(1)] * 4, dm.init_mesh(4, ["x"]), [Shard(0)])
    for i in (1, 2, 3):
        oracle.same(np.mean(x) * i, float(i))
        oracle.same(np.sum(x) * i, 4.0 * i)


def test_terms_are_reduced_before_what_they_do_not_pass() -> None:
    def terms(op: str) -> Any:
        return dm.dtensor_from_local([np.array([1.0]), np.array([2.0])], LINE, [Partial(op)])

    oracle.same(np.sum(terms("max")), 2.0)
    oracle.same(np.max(terms("sum")), 3.0)
    oracle.same(np.linalg.norm(terms("sum")), 3.0)
    oracle.same(np.mean(terms("sum")), 3.0)


def test_ties_and_nan_go_to_the_first_index() -> None:
    a = np.array([3.0, 7, 1, 7, 7, 0, 0])
    for mesh in (LINE, THREE, SQUARE):
        x = dm.shard_tensor(a, mesh, [Shard(0)] * mesh.ndim)
        oracle.same(np.argmax(x), 1)
        oracle.same(np.argmin(x), 5)
    b = np.array([[1.0, np.nan], [np.nan, 9]])
    x = dm.shard_tensor(b, SQUARE, [Shard(1), Shard(0)])
    oracle.same(np.argmax(x), 1)
    oracle.same(np.nanargmax(x), 3)
    oracle.same(np.argmax(dm.shard_tensor(np.array([[10, 5, 3, 8]]), LINE, [Shard(1)]), axis=1), [0])


def test_an_all_nan_slice() -> None:
    x = dm.shard_tensor(np.full((4, 2), np.nan), LINE, [Shard(0)])
    oracle.same(np.nanmax(x, axis=0), [np.nan, np.nan])
    oracle.same(np.nanmean(x), np.nan)
    with pytest.raises(ValueError, match="All-NaN"):
        np.nanargmax(x, axis=0).compute(scheduler="sync")


def test_variance_does_not_cancel() -> None:
    a = 1e9 + np.arange(7.0)
    oracle.same(np.var(dm.shard_tensor(a, THREE, [Shard(0)])), 4.0, factor=4)


def test_a_half_precision_mean_is_rounded_at_the_end() -> None:
    a = np.full(1000, 100, "f2")
    a[::3] = 101
    x = dm.shard_tensor(a, THREE, [Shard(0)])
    got = np.mean(x)
    assert got.compute(scheduler="sync") == np.mean(a)
    assert got.dtype == np.float16


def test_placements_of_results() -> None:
    x = whole_numbers(SQUARE, [Shard(0), Shard(1)], (4, 6))
    assert np.sum(x).placements == (Partial("sum"), Partial("sum"))
    assert np.max(x, axis=0).placements == (Partial("max"), Shard(0))
    assert np.mean(x, axis=1, keepdims=True).placements == (Shard(0), Partial("sum"))
    assert np.any(x).placements == (Partial("any"),) * 2
    assert np.var(x, axis=0).placements == (Replicate(), Shard(0))
    assert np.argmax(x, axis=1).placements == (Shard(0), Replicate())
    assert np.sum(x).explain().total_bytes == 0


def test_large_summaries_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank combines a share of the result, so that less moves."""
    a = np.arange(40.0).reshape(4, 10)
    x = dm.shard_tensor(a, THREE, [Shard(0)])
    small = np.var(x, axis=0)
    monkeypatch.setattr("daskmesh.ops.parts.config.nbytes", lambda name: 16)
    large = np.var(x, axis=0)
    assert large.placements == (Shard(0),)
    assert large.explain().total_bytes < small.explain().total_bytes
    oracle.same(large, a.var(axis=0))


def test_a_quantile_cuts_the_kept_dims_instead() -> None:
    x = whole_numbers(LINE, [Shard(0)], (6, 4))
    assert np.median(x, axis=0).placements == (Shard(0),)
    assert np.median(x, axis=0).explain().total_bytes == 6 * 4 * 8 // 2
    assert np.median(x).placements == (Replicate(),)


@pytest.mark.parametrize("name", ["sum", "max", "any", "mean", "var", "argmax", "ptp", "median", "cumsum"])
def test_out_is_refused(name: str) -> None:
    x = whole_numbers(LINE, [Shard(0)], (6,))
    with pytest.raises(TypeError, match=r"a DTensor is no buffer"):
        getattr(np, name)(x, out=np.zeros(()))


def test_errors_are_numpys() -> None:
    x = whole_numbers(LINE, [Shard(0)], (6,))
    with pytest.raises(np.exceptions.AxisError):
        np.sum(x, axis=1)
    with pytest.raises(ValueError, match="does not broadcast"):
        np.sum(x, where=np.ones(5, bool))
    with pytest.raises(ValueError, match="initial"):
        np.max(x, where=np.ones(6, bool))
    with pytest.raises(TypeError, match="must be bool"):
        np.sum(x, where=np.ones(6))
    with pytest.raises(ZeroDivisionError):
        np.average(x, weights=np.zeros(6))


def test_methods_are_the_functions() -> None:
    a = np.arange(12.0).reshape(3, 4)
    x = dm.shard_tensor(a, THREE, [Shard(0)])
    for name in ("sum", "prod", "max", "min", "mean", "var", "std", "any", "all", "argmax", "argmin", "cumsum"):
        oracle.same(getattr(x, name)(axis=0), getattr(a, name)(axis=0))
    oracle.same(x.sum(axis=1, keepdims=True), a.sum(axis=1, keepdims=True))
    oracle.same(x.std(ddof=1), a.std(ddof=1))


@pytest.mark.processes
def test_on_worker_processes(processes: Client) -> None:
    a = np.random.default_rng(0).normal(size=(5, 6))
    mesh = dm.init_mesh((2, 2), ("x", "y"))
    layout = make_layout(mesh, [Shard(0), Shard(1)], a.shape, a.dtype)
    x = oracle.held(layout, a)
    for name in ("sum", "mean", "var", "argmax", "median", "nanmax"):
        np.testing.assert_allclose(getattr(np, name)(x, axis=0).compute(), getattr(np, name)(a, axis=0), rtol=1e-12)
    assert float(np.std(x)) == pytest.approx(a.std())
