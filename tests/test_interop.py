"""Other libraries over DTensors: xarray, scipy.special, DLPack, scikit-learn. Nothing is computed unasked."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
import scipy.special
import sklearn
import xarray as xr
from dask.base import tokenize
from distributed import Client
from distributed.protocol.pickle import dumps
from sklearn.metrics import mean_squared_error
from sklearn.preprocessing import MaxAbsScaler, MinMaxScaler, Normalizer, StandardScaler

import daskmesh as dm
from daskmesh.placement import Partial, Replicate, Shard
from daskmesh.testing import assert_layout
from daskmesh.tiles import Step

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("threads")]

MESH, GRID = dm.init_mesh(3, ["x"]), dm.init_mesh((2, 2), ("x", "y"))
VALUES = np.linspace(-2, 3, 35).reshape(7, 5)


@pytest.fixture
def lazily(threads: Client) -> Any:
    """Nothing may be computed in a test that asks for this."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was computed")

    return lambda: dask.config.set(scheduler=refuse)


def labelled(values: np.ndarray = VALUES, data: Any = None) -> xr.DataArray:
    coords = {"time": np.arange(values.shape[0]) * 10, "space": list("abcde")}
    return xr.DataArray(values if data is None else data, dims=("time", "space"), coords=coords, name="v")


CALLS: dict[str, Callable[[Any], Any]] = {
    "mean": lambda a: a.mean("time"),
    "mean of all": lambda a: a.mean(),
    "sum of a cut dim": lambda a: a.sum("time", skipna=False),
    "std": lambda a: a.std("space"),
    "max": lambda a: a.max("time"),
    "count": lambda a: a.count("time"),
    "argmax": lambda a: a.argmax("time"),
    "median": lambda a: a.median("time"),
    "cumsum": lambda a: a.cumsum("time"),
    "diff": lambda a: a.diff("time"),
    "arithmetic": lambda a: (a - a.mean("time")) / a.std("time"),
    "broadcasting": lambda a: a + xr.DataArray(np.arange(5), dims="space"),
    "comparison": lambda a: (a > 0) & ~(a < 1),
    "where": lambda a: a.where(a > 0, 7.0),
    "isnull": lambda a: a.isnull(),
    "fillna": lambda a: a.fillna(0),
    "clip": lambda a: a.clip(0, 1),
    "isel slice": lambda a: a.isel(time=slice(1, 6, 2)),
    "isel int": lambda a: a.isel(time=3),
    "sel": lambda a: a.sel(time=[50, 10], space="b"),
    "transpose": lambda a: a.T,
    "stack": lambda a: a.stack(z=("time", "space")),
    "concat": lambda a: xr.concat([a, a], "time"),
    "dot": lambda a: a.dot(a, dim="time"),
    "astype": lambda a: a.astype("f4"),
    "expand_dims": lambda a: a.expand_dims("run"),
    "ufunc": lambda a: np.sqrt(abs(a)),
    "groupby": lambda a: a.groupby(a.time // 30).mean(),
    "roll": lambda a: a.roll(time=2),
    "shift": lambda a: a.shift(time=-1),
    "isel pointwise": lambda a: a.isel(time=xr.DataArray([0, 2], dims="p"), space=xr.DataArray([1, 3], dims="p")),
    "reindex": lambda a: a.reindex(time=[0, 5, 10]),
    "coarsen": lambda a: a.coarsen(time=2, boundary="trim").mean(),
    "pad": lambda a: a.pad(time=(1, 2), mode="edge"),
    "differentiate": lambda a: a.differentiate("time"),
    "weighted": lambda a: a.weighted(xr.DataArray(np.arange(7.0), dims="time")).mean("time"),
    "windows": lambda a: xr.apply_ufunc(
        lambda v: np.lib.stride_tricks.sliding_window_view(v, 3, -1).mean(-1), a, input_core_dims=[["time"]],
        output_core_dims=[["begin"]], dask="allowed",
    ),
}  # fmt: skip

# xarray gives these to functions of dask.array: what comes back is one of its arrays, on no mesh.
LEAVING: dict[str, Callable[[Any], Any]] = {
    "rolling mean": lambda a: a.rolling(time=3).mean(),
    "rolling max": lambda a: a.rolling(time=3, min_periods=1, center=True).max(),
    "rolling over two dims": lambda a: a.rolling(time=3, space=2).sum(),
    "rolling construct": lambda a: a.rolling(time=2).construct("window"),
    "chunk": lambda a: a.chunk(time=2),
    "first": lambda a: a.groupby(a.time // 30).first(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    ("mesh", "placements"), [(MESH, [Shard(0)]), (GRID, [Shard(0), Shard(1)]), (GRID, [Partial(), Shard(0)])], ids=str
)
def test_xarray_wraps_a_dtensor_without_computing(call: Any, mesh: Any, placements: Any, lazily: Any) -> None:
    x = dm.shard_tensor(VALUES, mesh, placements)
    with lazily():
        got = call(labelled(data=x))
        assert isinstance(got.data, dm.DTensor)
        assert got.data.process_mesh == mesh
        repr(got)
    want = call(labelled())
    xr.testing.assert_allclose(got.compute(), want)
    assert got.dtype == want.dtype


@pytest.mark.parametrize("call", LEAVING.values(), ids=LEAVING)
def test_what_xarray_leaves_to_dask_is_a_dask_array(call: Any, lazily: Any) -> None:
    x = dm.shard_tensor(VALUES, MESH, [Shard(0)])
    with lazily():
        got = call(labelled(data=x))
        assert isinstance(got.data, da.Array)
    xr.testing.assert_allclose(got.compute(), call(labelled()))


def test_chunks_are_the_parts_that_the_placements_cut(lazily: Any) -> None:
    x = dm.shard_tensor(VALUES, GRID, [Shard(0), Partial()])
    assert (x.chunks, x.chunksize, x.numblocks) == (((4, 3), (5,)), (4, 5), (2, 1))
    y = x[1:].rechunk(x[:6].chunks)
    assert_layout(y, [Shard(0), Partial()], chunks=[(4, 2), None])
    np.testing.assert_array_equal(y.compute(), VALUES[1:])
    with pytest.raises(ValueError, match=r"rechunk.*x\.reshard\(placements\)"):
        x.rechunk(x.T.chunks)
    with lazily():
        assert isinstance(x.rechunk((7, 5)), da.Array)
        assert isinstance(da.concatenate([x, x]), da.Array)


def test_xarray_keeps_what_is_cut_where_it_is(lazily: Any) -> None:
    x = dm.shard_tensor(VALUES, MESH, [Shard(0)])
    with lazily():
        assert_layout((labelled(data=x) * 2).data, [Shard(0)])
        assert_layout(labelled(data=x).isel(time=slice(1, None)).data, [Shard(0)], chunks=[(2, 3, 1), None])
        assert (labelled(data=x) + 1).data.explain().total_bytes == 0


def test_xarray_computes_persists_and_shows() -> None:
    a = labelled(data=dm.shard_tensor(VALUES, MESH, [Shard(0)]))
    assert isinstance(a.compute().data, np.ndarray)
    assert isinstance(a.persist().data, dm.DTensor)
    np.testing.assert_array_equal(a.values, VALUES)
    data = xr.Dataset({"v": a, "w": a * 2}).mean("time").compute()
    np.testing.assert_allclose(data.w, VALUES.mean(0) * 2)
    assert "DTensor" in repr(a)
    assert "svg" in a._repr_html_()


# -- scipy.special ----------------------------------------------------------------------------------------------------

SPECIAL = ["erf", "gammaln", "expit", "j0", "ndtri", "xlogy", "hyp2f1", "sici", "logit"]


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning")
def test_ufuncs_of_scipy(name: str, lazily: Any) -> None:
    func = getattr(scipy.special, name)
    v = np.linspace(0.05, 0.95, 12).reshape(4, 3)
    x = dm.shard_tensor(v, GRID, [Shard(0), Shard(1)])
    with lazily():
        got = func(*[x] * func.nin)
    want = func(*[v] * func.nin)
    for g, w in zip(got if func.nout > 1 else [got], want if func.nout > 1 else [want], strict=True):
        assert_layout(g, [Shard(0), Shard(1)], dtype=w.dtype)
        assert g.explain().total_bytes == 0
        np.testing.assert_array_equal(g.compute(), w)


def test_ufuncs_of_scipy_reach_workers_as_themselves() -> None:
    """By module and name: some are called as NumPy's own are."""
    found = {name: f for name, f in vars(scipy.special).items() if isinstance(f, np.ufunc)}
    assert {"expm1", "log1p", "exp2", "cbrt"} <= found.keys()
    steps = [Step(f, (), {"ufunc": f}, False) for f in found.values()]
    for step in steps:
        sent = pickle.loads(dumps(step))
        assert sent.func is step.func is sent.kwargs["ufunc"]
    assert len({tokenize(step) for step in steps}) == len(set(found.values()))
    assert tokenize(Step(np.expm1, (), None, False)) != tokenize(Step(scipy.special.expm1, (), None, False))


@pytest.mark.parametrize("name", ["expm1", "log1p", "exp2", "cbrt"])
def test_ufuncs_of_scipy_that_numpy_has_too(name: str) -> None:
    func = getattr(scipy.special, name)
    x = dm.shard_tensor(abs(VALUES), MESH, [Shard(0)])
    np.testing.assert_array_equal(func(x).compute(), func(abs(VALUES)))
    np.testing.assert_array_equal(func(x, where=x > 1).compute(), np.where(abs(VALUES) > 1, func(abs(VALUES)), 0))


def test_a_nonlinear_ufunc_of_scipy_reduces_terms_first() -> None:
    x = dm.shard_tensor(VALUES, MESH, [Partial()])
    np.testing.assert_array_equal(scipy.special.expit(x).compute(), scipy.special.expit(VALUES))


# -- DLPack and conversions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placements", [[Shard(0)], [Replicate()], [Partial()]], ids=str)
def test_dlpack_is_a_gather(placements: Any) -> None:
    x = dm.shard_tensor(VALUES, MESH, placements)
    np.testing.assert_array_equal(np.from_dlpack(x), VALUES)
    assert x.__dlpack_device__() == np.zeros(1).__dlpack_device__()


def test_dlpack_refuses_what_cannot_be() -> None:
    x = dm.shard_tensor(VALUES, MESH, [Shard(0)])
    with pytest.raises(BufferError, match="its value is always a copy"):
        x.__dlpack__(copy=False)
    with pytest.raises(BufferError, match="has no streams"):
        x.__dlpack__(stream=1)


def test_to_device_is_a_reshard_to_another_mesh() -> None:
    x = dm.shard_tensor(VALUES, MESH, [Shard(0)])
    assert x.to_device(x.device) is not None
    other = dm.init_mesh(2, ["x"])
    y = x.to_device(other)
    assert_layout(y, [Shard(0)], mesh=other)
    np.testing.assert_array_equal(y.compute(), VALUES)
    assert x.to_device(MESH).explain().total_bytes == 0
    with pytest.raises(ValueError, match="gather with np"):
        x.to_device("cpu")
    with pytest.raises(ValueError, match=r"placements over 1 mesh dim\(s\) do not fit one of 2"):
        x.to_device(GRID)
    with pytest.raises(ValueError, match="no streams"):
        x.to_device(MESH, stream=0)


# -- scikit-learn -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning")  # it asks NumPy here to be quiet about them
def test_scikit_learn_through_the_array_api(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCIPY_ARRAY_API", "1")
    x, y = dm.shard_tensor(VALUES, MESH, [Shard(0)]), dm.shard_tensor(VALUES[:, 0], MESH, [Shard(0)])
    for scaler in (StandardScaler(), MinMaxScaler(), MaxAbsScaler(), Normalizer()):
        want = scaler.fit_transform(VALUES)
        with sklearn.config_context(array_api_dispatch=True):
            got = scaler.fit_transform(x)
        assert_layout(got, [Shard(0)])
        np.testing.assert_allclose(got.compute(), want, atol=1e-14)
    with sklearn.config_context(array_api_dispatch=True):
        error = mean_squared_error(y, y * 2)
    assert error == pytest.approx(np.mean(VALUES[:, 0] ** 2))
