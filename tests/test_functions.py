"""NumPy's less common functions against NumPy: values, dtypes, and the bytes of the plan, in several layouts each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import ops_oracle as oracle
import pytest
from numpy.lib.stride_tricks import sliding_window_view
from ops_oracle import LINE, TABLE, lines, placed, tables

import daskmesh as dm
from daskmesh.placement import Partial, Replicate, Shard
from daskmesh.testing import assert_layout

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("in_this_thread")]

TWO, THREE, SQUARE, _ = oracle.MESHES
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
Call = Callable[[Any], Any]


# -- sliding windows --------------------------------------------------------------------------------------------------

WINDOWS: dict[str, Call] = {
    "rows": lambda x: sliding_window_view(x, 3, 0),
    "columns": lambda x: sliding_window_view(x, (2,), -1),
    "both": lambda x: sliding_window_view(x, (2, 3)),
    "of one": lambda x: sliding_window_view(x, 1, 0),
    "whole": lambda x: sliding_window_view(x, 5, 0),
    "twice": lambda x: sliding_window_view(x, (2, 2), (0, 0)),
    "sums": lambda x: sliding_window_view(x, 3, 0).sum(-1),
    "too long": lambda x: sliding_window_view(x, 6, 0),
    "negative": lambda x: sliding_window_view(x, -1, 0),
    "two for one": lambda x: sliding_window_view(x, (1, 2), 0),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_sliding_windows(name: str) -> None:
    for case in tables(TABLE):
        oracle.agree(WINDOWS[name], case)


def test_a_window_loads_what_reaches_beyond_its_part() -> None:
    x = dm.shard_tensor(np.arange(9), THREE, [S0])
    y = sliding_window_view(x, 3)
    assert_layout(y, [S0], chunks=[(3, 3, 1), None])
    assert y.explain().received == {0: 16, 1: 16, 2: 0}
    with pytest.raises(TypeError, match="writeable=True"):
        sliding_window_view(x, 3, writeable=True)


# -- padding ----------------------------------------------------------------------------------------------------------

PADS: dict[str, Call] = {
    "linear_ramp": lambda x: np.pad(x, ((2, 3), (0, 1)), "linear_ramp"),
    "linear_ramp ends": lambda x: np.pad(x, 3, "linear_ramp", end_values=((-5, 4), (2, 7))),
    "maximum": lambda x: np.pad(x, ((1, 2), (3, 0)), "maximum"),
    "maximum of some": lambda x: np.pad(x, 2, "maximum", stat_length=((2, 1), (1, 3))),
    "minimum": lambda x: np.pad(x, 1, "minimum", stat_length=2),
    "mean": lambda x: np.pad(x, ((2, 2), (0, 0)), "mean"),
    "mean of some": lambda x: np.pad(x, 2, "mean", stat_length=3),
    "median": lambda x: np.pad(x, ((0, 0), (2, 1)), "median", stat_length=4),
    "reflect odd": lambda x: np.pad(x, ((2, 3), (1, 0)), "reflect", reflect_type="odd"),
    "reflect odd, laps": lambda x: np.pad(x, 11, "reflect", reflect_type="odd"),
    "symmetric odd": lambda x: np.pad(x, ((2, 1), (0, 3)), "symmetric", reflect_type="odd"),
    "symmetric odd, laps": lambda x: np.pad(x, ((14, 7), (0, 12)), "symmetric", reflect_type="odd"),
    "no statistic": lambda x: np.pad(x, 1, "maximum", stat_length=0),
    "option of another mode": lambda x: np.pad(x, 1, "mean", end_values=1),
}


@pytest.mark.parametrize("name", PADS)
def test_pad(name: str) -> None:
    for case in (*tables(TABLE)[1:], *tables((TABLE + 7).astype("u1"))[:2], tables(TABLE[:1])[2]):
        oracle.agree(PADS[name], case)


def test_an_end_of_a_pad_moves_a_row() -> None:
    x = dm.shard_tensor(TABLE, TWO, [S0])
    y = np.pad(x, ((2, 1), (0, 0)), "linear_ramp")
    assert_layout(y, [S0], chunks=[(5, 3), None])
    assert y.explain().total_bytes <= 2 * TABLE[:1].nbytes
    with pytest.raises(TypeError, match="linear_ramp"):
        np.pad(x, 1, lambda *a: None)
    with pytest.raises(ValueError, match="empty axis 0"):
        np.pad(x[:0], 1, "mean")


# -- quantiles --------------------------------------------------------------------------------------------------------

QS: list[Any] = [0.3, 1, [0.1, 0.5, 1.0], np.float32(0.4), np.array([[0.2], [0.9]])]
CDF = {"method": "inverted_cdf"}
WEIGHTS = np.array([0, 1, 2.5, 0, 3])
QUANTILES: dict[str, Callable[[Any, Any], Any]] = {
    "quantile": lambda x, q: np.quantile(x, q, axis=0),
    "percentile": lambda x, q: np.percentile(x, q, axis=1, keepdims=True),
    "nanquantile": lambda x, q: np.nanquantile(x, q, axis=(0, 1)),
    "weighted": lambda x, q: np.quantile(x, q, axis=0, weights=WEIGHTS, **CDF),
    "weighted columns": lambda x, q: np.quantile(x, q, axis=1, weights=WEIGHTS, keepdims=True, **CDF),
    "weighted without nan": lambda x, q: np.nanquantile(np.where(x == 5, np.nan, x), q, axis=1, weights=abs(x) + 1, **CDF),
    "weighted all": lambda x, q: np.percentile(x, q, weights=np.arange(25).reshape(5, 5), **CDF),
    "weighted dims turned": lambda x, q: np.nanpercentile(x, q, axis=(1, 0), weights=np.arange(25).reshape(5, 5).T, **CDF),
    "weighted by itself": lambda x, q: np.quantile(x, q, axis=0, weights=abs(x), **CDF),
    "negative weights": lambda x, q: np.quantile(x, q, axis=0, weights=-WEIGHTS, **CDF),
    "weights of another shape": lambda x, q: np.quantile(x, q, axis=0, weights=WEIGHTS[1:], **CDF),
    "weights without an axis": lambda x, q: np.quantile(x, q, weights=WEIGHTS, **CDF),
    "weights by another method": lambda x, q: np.quantile(x, q, axis=0, weights=WEIGHTS),
}


@pytest.mark.parametrize("name", QUANTILES)
def test_quantiles(name: str) -> None:
    for i, q in enumerate(QS):
        values = TABLE.astype(["f8", "f4", "i4", "f2"][i % 4])
        cases = tables(values)
        for case in (cases[i % 4], cases[(i + 1) % 4]):
            oracle.agree(lambda x, q=q: QUANTILES[name](x, q), case)


# -- histograms -------------------------------------------------------------------------------------------------------

FLAT = {"i8": LINE, "f8": LINE / 4.0, "f4": (LINE / 4).astype("f4"), "u1": LINE.astype("u1"), "?": LINE > 3}
HISTOGRAMS: dict[str, Call] = {
    "histogram": np.histogram,
    "histogram 3": lambda x: np.histogram(x, 3),
    "histogram range": lambda x: np.histogram(x, 4, (1, 5)),
    "histogram edges": lambda x: np.histogram(x, [1, 2, 4, 9]),
    "histogram density": lambda x: np.histogram(x, 3, density=True),
    "histogram weights": lambda x: np.histogram(x, 3, weights=np.arange(8.0)),
    "histogram density of weights": lambda x: np.histogram(x, [0, 1, 9], weights=np.arange(8), density=True),
    "histogram of nothing": lambda x: np.histogram(x[:0], 2),
    "histogram of equals": lambda x: np.histogram(x[:1], 2),
    "bin_edges": lambda x: np.histogram_bin_edges(x, 5),
    "histogram2d": lambda x: np.histogram2d(x, x * 2),
    "histogram2d bins": lambda x: np.histogram2d(x, x[::-1], [2, [0, 3, 9]], density=True),
    "histogram2d same edges": lambda x: np.histogram2d(x, x, [0, 1, 5, 9], weights=np.arange(8.0)),
    "histogramdd": lambda x: np.histogramdd(np.stack([x, x * x], 1), (2, 3), range=((0, 4), None))[0],
    "decreasing edges": lambda x: np.histogram(x, [4, 1]),
    "no bins": lambda x: np.histogram(x, 0),
    "weights of another shape": lambda x: np.histogram(x, 2, weights=[1]),
}


@pytest.mark.filterwarnings("ignore:Converting input from bool")
@pytest.mark.parametrize("name", HISTOGRAMS)
def test_histograms(name: str) -> None:
    for i, values in enumerate(FLAT.values()):
        for case in lines(values)[i % 2 :: 2]:
            oracle.agree(HISTOGRAMS[name], case)


BINS: dict[str, Call] = {
    "bincount": np.bincount,
    "bincount weights": lambda x: np.bincount(x, np.arange(8.0), 3),
    "bincount minlength": lambda x: np.bincount(x, minlength=20),
    "bincount of nothing": lambda x: np.bincount(x[:0], minlength=2),
    "bincount negative": lambda x: np.bincount(x - 4),
    "bincount floats": lambda x: np.bincount(x / 2),
}


@pytest.mark.parametrize("name", BINS)
def test_bincount(name: str) -> None:
    for case in lines(LINE):
        oracle.agree(BINS[name], case)


def test_counts_are_terms() -> None:
    x = dm.shard_tensor(LINE, TWO, [S0])
    counts, edges = np.histogram(x, [0, 3, 9])
    assert_layout(counts, [P], dtype=np.intp)
    assert counts.explain().total_bytes == 0
    assert isinstance(edges, np.ndarray)
    assert isinstance(np.histogram(x)[1], dm.DTensor)
    with pytest.raises(TypeError, match="give a number or the edges"):
        np.histogram(x, "auto")


# -- covariances and filters ------------------------------------------------------------------------------------------

FREQUENCIES = np.array([1, 0, 2, 1, 1])
COVARIANCES: dict[str, Call] = {
    "cov": np.cov,
    "cov of columns": lambda x: np.cov(x, rowvar=False, bias=True),
    "cov of two": lambda x: np.cov(x, x[:2] * x[1:3], ddof=0),
    "cov of one": lambda x: np.cov(x[0]),
    "cov fweights": lambda x: np.cov(x, fweights=FREQUENCIES),
    "cov both weights": lambda x: np.cov(x, fweights=FREQUENCIES, aweights=FREQUENCIES + 0.5),
    "cov aweights of its own": lambda x: np.cov(x, aweights=abs(x[0]) + 1),
    "cov complex": lambda x: np.cov(x * (1 + 2j) + x.T),
    "cov f4": lambda x: np.cov(x, dtype="f4"),
    "corrcoef": np.corrcoef,
    "corrcoef of one": lambda x: np.corrcoef(x[1]),
    "corrcoef complex": lambda x: np.corrcoef(x * (1 + 2j) + x.T),
    "negative weights": lambda x: np.cov(x, aweights=-FREQUENCIES),
    "broken weights": lambda x: np.cov(x, fweights=FREQUENCIES + 0.5),
    "unwrap": np.unwrap,
    "unwrap period": lambda x: np.unwrap(x, axis=0, period=4, discont=3),
    "unwrap integers": lambda x: np.unwrap(x.astype("i8"), period=5),
}


@pytest.mark.parametrize("name", COVARIANCES)
def test_covariances_and_phases(name: str) -> None:
    for case in tables(TABLE):
        oracle.agree(COVARIANCES[name], case)


FILTERS: dict[str, Callable[..., Any]] = {
    "convolve": np.convolve,
    "convolve same": lambda a, v: np.convolve(a, v, "same"),
    "convolve valid": lambda a, v: np.convolve(a, v, "valid"),
    "correlate": np.correlate,
    "correlate same": lambda a, v: np.correlate(a, v, "same"),
    "correlate full": lambda a, v: np.correlate(a, v, "full"),
    "other way round": lambda a, v: np.convolve(v, a, "same"),
    "correlate other way round": lambda a, v: np.correlate(v, a, "same"),
    "unknown": lambda a, v: np.convolve(a, v, "all"),
}


@pytest.mark.parametrize("name", FILTERS)
def test_filters(name: str) -> None:
    for i, n in enumerate((1, 3, 4, 8)):
        v = (np.arange(n) - 1.5) * (1j if n == 3 else 1)
        case = lines(LINE)[i % 4]
        oracle.agree(lambda x, v=v: FILTERS[name](x, v), case)
        oracle.agree(FILTERS[name], case, placed(v, case.x.process_mesh, [S0]))
        oracle.agree(lambda x, w=v[::-1]: FILTERS[name](w, x), case)


def test_a_filter_loads_what_reaches_beyond_the_parts() -> None:
    x = dm.shard_tensor(np.arange(9.0), THREE, [S0])
    y = np.convolve(x, [1, 2, 1], "valid")
    assert_layout(y, [S0], chunks=[(3, 3, 1)])
    assert y.explain().total_bytes == 4 * 8


# -- along a dim, and place by place ----------------------------------------------------------------------------------

ALONG: dict[str, Call] = {
    "apply_along_axis": lambda x: np.apply_along_axis(np.sum, 0, x),
    "apply_along_axis lines": lambda x: np.apply_along_axis(lambda v, k: np.stack([v[:2], v[-2:] * k]), 1, x, 3),
    "apply_along_axis keyword": lambda x: np.apply_along_axis(np.percentile, 0, x, q=40),
    "apply_over_axes": lambda x: np.apply_over_axes(np.sum, x, (0, -1)),
    "piecewise": lambda x: np.piecewise(x, [x < 0, x > 3], [-1, lambda v: v * 2]),
    "piecewise else": lambda x: np.piecewise(x, [x < 0], [lambda v, k: v - k, 1], 4),
    "piecewise wrong": lambda x: np.piecewise(x, [x < 0], [1, 2, 3]),
    "cross": lambda x: np.cross(x[:, 1:4], x[:, 2:]),
    "cross broadcast": lambda x: np.cross(x[:3], np.arange(3), 0, 0),
    "cross axes": lambda x: np.cross(x[:3], x[:, :3], axisa=0, axisb=1, axisc=0),
    "polyval": lambda x: np.polyval([1, -2, 3], x),
    "linspace": lambda x: np.linspace(x, x * 2, 4),
    "linspace step": lambda x: np.linspace(0, x, 3, endpoint=False, retstep=True, axis=-1),
    "logspace": lambda x: np.logspace(x / 9, 1, 3, base=2),
    "geomspace": lambda x: np.geomspace(abs(x) + 1, 100, 3, axis=1),
    "sliced unravel": lambda x: np.unravel_index(x.astype("i8") % 12, (3, 4)),
    "ravel_multi_index": lambda x: np.ravel_multi_index((x.astype("i8") % 3, 1), (3, 4)),
    "ravel_multi_index wrap": lambda x: np.ravel_multi_index(x.astype("i8")[:2], (3, 4), mode="wrap", order="F"),
    "packbits": lambda x: np.packbits(x > 1),
    "packbits axis": lambda x: np.packbits(x > 1, axis=0, bitorder="little"),
    "unpackbits": lambda x: np.unpackbits((x + 9).astype("u1")),
    "unpackbits axis": lambda x: np.unpackbits((x + 9).astype("u1"), axis=1, count=-3),
    "unpackbits more": lambda x: np.unpackbits((x + 9).astype("u1"), axis=0, count=50),
    "unpackbits floats": lambda x: np.unpackbits(x),
    "ix_": lambda x: np.ix_(x[0], x[:, 1] > 0),
    "tril_indices_from": np.tril_indices_from,
    "triu_indices_from": lambda x: np.triu_indices_from(x, 1),
    "diag_indices_from": np.diag_indices_from,
    "partition": lambda x: np.sort(np.partition(x, 2, axis=0)[:2], axis=0),
    "argpartition": lambda x: np.argpartition(np.arange(25.0).reshape(5, 5) + x * 0, 1, None),
    "lexsort": lambda x: np.lexsort((x, abs(x)), axis=0),
    "lexsort rows": lambda x: np.lexsort(x),
    "sort_complex": lambda x: np.sort_complex(x.astype("f4")),
    "trim_zeros": lambda x: np.trim_zeros(np.where(x > 5, x, 0)),
    "trim_zeros of rows": lambda x: np.trim_zeros(x * (x > 20), "f", axis=0),
    "unique rows": lambda x: np.unique((x > 2).astype("i4"), axis=0, return_index=True, return_inverse=True, return_counts=True),
    "unique columns": lambda x: np.unique(np.concatenate([x, x], 1), axis=1, return_counts=True),
    "unique of three dims": lambda x: np.unique(np.stack([x, x * 0, x]), axis=0),
    "union1d": lambda x: np.union1d(x, [3, 100]),
    "intersect1d": lambda x: np.intersect1d(x, [100, 3, 5, 5]),
    "intersect1d the other": lambda x: np.intersect1d([100, 3, 5, 5], x),
    "intersect1d indices": lambda x: np.intersect1d(x[0], x[:, 1], return_indices=True),
    "setdiff1d": lambda x: np.setdiff1d(x, [3, 100, 0]),
    "setdiff1d the other": lambda x: np.setdiff1d([3, 100, 0, 100], x),
    "setxor1d": lambda x: np.setxor1d(x, [3, 100, 0]),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ALONG)
def test_along_and_place_by_place(name: str) -> None:
    for case in tables(TABLE)[-3:]:
        oracle.agree(ALONG[name], case)


OF_LINES: dict[str, Call] = {
    "vander": np.vander,
    "vander increasing": lambda x: np.vander(x, 3, increasing=True),
    "packbits": lambda x: np.packbits(x),
    "packbits of many": lambda x: np.packbits(np.tile(x, 5) > 3),
    "trim_zeros": lambda x: np.trim_zeros(x * (x > 3)),
    "is_busday": lambda x: np.is_busday(x.astype("M8[D]")),
    "busday_count": lambda x: np.busday_count(x.astype("M8[D]"), np.datetime64("1970-02-01")),
    "busday_offset": lambda x: np.busday_offset(x.astype("M8[D]"), 2, roll="forward"),
    "intersect1d": lambda x: np.intersect1d(np.unique(x), [2, 9], assume_unique=True),
}


@pytest.mark.parametrize("name", OF_LINES)
def test_of_one_dim(name: str) -> None:
    for case in lines(LINE):
        oracle.agree(OF_LINES[name], case)
