"""What NumPy's functions may be given: answers without a computation, refusals before anything is gathered, methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import ops_oracle as oracle
import pytest
from ops_oracle import LINE, TABLE, tables

import daskmesh as dm
from daskmesh.placement import Shard

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("in_this_thread")]

TWO = oracle.MESHES[0]
S0 = Shard(0)
Call = Callable[[Any], Any]


# -- what needs no values, and what is refused --------------------------------------------------------------------------

ANSWERS: dict[str, Call] = {
    "common_type": lambda x: np.zeros(0, np.common_type(x, np.float32(1))),
    "min_scalar_type": lambda x: np.zeros(0, np.min_scalar_type(x)),
    "min_scalar_type of one": lambda x: np.zeros(0, np.min_scalar_type((x[0, 0] * 20).astype("i8"))),
    "einsum_path": lambda x: np.zeros(len(np.einsum_path("ij,jk", x, x)[0])),
    "may_share_memory": lambda x: np.array([np.may_share_memory(x, x), np.shares_memory(x, x + 1)]),
    "resize": lambda x: np.resize(x, (7, 4)),
    "resize of nothing": lambda x: np.resize(x[:0], 3),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name: str) -> None:
    for case in tables(TABLE)[:2]:
        oracle.agree(ANSWERS[name], case)


@pytest.mark.parametrize("values", [[8], [-1, -2, -3]])
def test_place(values: list[int]) -> None:
    for case in tables(TABLE):
        wanted = case.a.copy()
        np.place(wanted, wanted > 3, values)
        np.place(case.x, case.x > 3, values)
        oracle.same(case.x, wanted)


def test_texts_of_numpy_are_those_of_python() -> None:
    x = dm.shard_tensor(TABLE, TWO, [S0])
    assert np.array_repr(x) == np.array2string(x) == np.array_str(x) == repr(x)


REFUSED: dict[str, tuple[Call, str]] = {
    "save": (lambda x: np.save("never.npy", x), r"daskmesh\.save"),
    "roots": (np.roots, "coefficients"),
    "polyfit": (lambda x: np.polyfit(x, x, 1), "normal equations"),
    "real_if_close": (np.real_if_close, r"np\.real\(x\)"),
    "tile": (lambda x: np.tile(LINE, x), r"np\.tile: the array is a ndarray"),
    "insert": (lambda x: np.insert(x, x, 1), r"np\.insert\(obj\)"),
    "delete": (lambda x: np.delete(x, x), r"np\.delete\(obj\)"),
    "gradient": (lambda x: np.gradient(x, x), "pass np.asarray"),
    # What NumPy does not dispatch on
    "take": (lambda x: np.take(LINE, x), r"np\.take does not know DTensors.*place the other arrays"),
    "subscript": (lambda x: LINE[x], "NumPy array indexed by a DTensor"),
    "subscript among others": (lambda x: TABLE[x, 0], "NumPy array indexed by a DTensor"),
    "masked array": (np.ma.masked_array, r"np\.ma.*have no masks"),
    "masked sum": (np.ma.sum, r"np\.ma.*have no masks"),
    "vectorize": (np.vectorize(abs), r"np\.vectorize.*np\.piecewise"),
    "as_strided": (np.lib.stride_tricks.as_strided, "as_strided does not know"),
    "frompyfunc": (np.frompyfunc(abs, 1, 1), "objects"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_gathered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = dm.shard_tensor(LINE, TWO, [S0])
    monkeypatch.setattr(dm.DTensor, "compute", None)
    call, text = REFUSED[name]
    with pytest.raises(TypeError, match=text):
        call(x)


def test_a_value_put_into_a_plain_array_must_be_asked_for() -> None:
    x, plain = dm.shard_tensor(LINE, TWO, [S0]), np.zeros(8)
    with pytest.raises(TypeError, match=r"np\.asarray"):
        plain[:] = x
    plain[:] = np.asarray(x)
    plain[0] = x[5]  # one number
    np.testing.assert_array_equal(x, LINE)
    assert plain[0] == 9
    assert np.asarray_chkfinite(x).tolist() == LINE.tolist()


# -- methods ----------------------------------------------------------------------------------------------------------

METHODS: dict[str, Call] = {
    "sort": lambda x: x.sort(axis=0),
    "partition": lambda x: x.partition(4, axis=1),
    "fill": lambda x: x.fill(3),
    "put": lambda x: x.put([0, 99, -3], [7, 8, 9], mode="wrap"),
    "put clip": lambda x: np.put(x, [0, 99, -3], 7, mode="clip"),
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_that_change_the_contents(name: str) -> None:
    for case in tables(TABLE):
        wanted = case.a.copy()
        METHODS[name](wanted)
        METHODS[name](case.x)
        if name == "partition":
            wanted = np.sort(wanted, 1)
            oracle.same(np.sort(case.x, 1), wanted)
        else:
            oracle.same(case.x, wanted)


def test_other_methods() -> None:
    x = dm.shard_tensor(TABLE, TWO, [S0])
    assert (x.itemsize, 9 in x, 77 in x, round(x[0, 0]), float(round(x[0, 0], 0))) == (8, True, False, 2, 2.0)
    oracle.same(x.compress([True, False, True], axis=0), TABLE.compress([True, False, True], axis=0))
    oracle.same((x > 0).astype(int).choose([x, 7]), np.where(TABLE > 0, 7, TABLE))
