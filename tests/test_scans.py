"""Cumulative operations against NumPy, along cut and whole dims, and what they move."""

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
from daskmesh.placement import Partial, Shard

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("threads")]

LINE, THREE, SQUARE, _ = oracle.MESHES


@few(220)
@given(cases(low=1), st.data())
def test_scans(case: Case, data: Any) -> None:
    axis = data.draw(st.integers(-case.a.ndim, case.a.ndim - 1))
    names = ("maximum", "logical_xor") if case.a.dtype.kind != "c" else ("add", "multiply")
    call = data.draw(st.sampled_from([
        lambda a: np.cumsum(a, axis), lambda a: np.cumprod(a, axis), lambda a: np.cumsum(a, axis, dtype="f8"),
        lambda a: np.cumulative_sum(a, axis=axis, include_initial=True), lambda a: np.cumulative_prod(a, axis=axis),
        *(lambda a, n=n: getattr(np, n).accumulate(a, axis) for n in names),
    ]))  # fmt: skip
    if case.a.dtype.kind == "c" and "f8" in call.__code__.co_consts:
        return
    oracle.agree(call, case)


@few(40)
@given(cases(dtypes=("f8", "c16"), low=1, partial=False), st.data())
def test_scans_that_skip_nan(case: Case, data: Any) -> None:
    holes = np.random.default_rng(data.draw(st.integers(0, 9))).random(case.a.shape) < 0.3
    a = np.where(holes, np.nan, case.a)
    function = data.draw(st.sampled_from([np.nancumsum, np.nancumprod, np.cumsum]))
    axis = data.draw(st.integers(-a.ndim, a.ndim - 1))
    oracle.agree(lambda x: function(x, axis), Case(oracle.held(case.x.layout, a), a))


@pytest.mark.parametrize("ufunc", [np.subtract, np.divide, np.floor_divide])
def test_what_does_not_regroup_is_made_whole(ufunc: np.ufunc) -> None:
    a = np.arange(1.0, 13).reshape(4, 3) / 4
    x = dm.shard_tensor(a, LINE, [Shard(0)])
    with np.errstate(all="ignore"):
        oracle.same(ufunc.accumulate(x), ufunc.accumulate(a))
        oracle.same(ufunc.reduce(x), ufunc.reduce(a))
    assert ufunc.accumulate(x).explain().total_bytes > 0


def test_one_small_exchange() -> None:
    """Totals of three parts go to the two other ranks; the data stay."""
    x = dm.shard_tensor(np.arange(30.0).reshape(10, 3), THREE, [Shard(0)])
    plan = np.cumsum(x, axis=0).explain()
    assert plan.total_bytes == 3 * 2 * 3 * 8
    assert len(plan.stages) == 1
    assert np.cumsum(x, axis=1).explain().total_bytes == 0
    assert np.cumsum(x, axis=0).placements == (Shard(0),)


def test_nested_cuts_and_empty_parts() -> None:
    a = np.arange(5)
    for mesh in (SQUARE, dm.init_mesh(7, ["x"])):
        oracle.same(np.cumsum(dm.shard_tensor(a, mesh, [Shard(0)] * mesh.ndim)), np.cumsum(a))


def test_terms_of_a_sum_pass_a_cumsum() -> None:
    x = dm.dtensor_from_local([np.arange(4.0)] * 2, LINE, [Partial()])
    y = np.cumsum(x)
    assert y.placements == (Partial(),)
    oracle.same(y, np.cumsum(np.arange(4.0) * 2))


def test_without_axis() -> None:
    x = dm.shard_tensor(np.arange(5), LINE, [Shard(0)])
    oracle.same(np.cumsum(x), np.arange(5).cumsum())
    with pytest.raises(ValueError, match="axis must be given"):
        np.cumulative_sum(dm.zeros((2, 2), mesh=LINE))


@pytest.mark.processes
def test_on_worker_processes(processes: Client) -> None:
    a = np.random.default_rng(0).normal(size=(7, 2))
    x = dm.shard_tensor(a, dm.init_mesh(3, ["x"]), [Shard(0)])
    np.testing.assert_allclose(np.cumsum(np.sqrt(x * x), axis=0).compute(), np.cumsum(np.abs(a), axis=0), rtol=1e-12)
