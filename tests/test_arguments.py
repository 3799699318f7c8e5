"""Plain arrays among the arguments: what counts is what they hold at the call, though it runs later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import daskmesh as dm

pytestmark = pytest.mark.usefixtures("in_this_thread")
VALUES = np.array([5.0, 1, 3, 2, 4, 0])
RNG = dm.random.default_rng
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, w: x + w,
    "add in place": lambda x, w: x.__iadd__(w),
    "outer": lambda x, w: np.maximum.outer(x, w),
    "where": lambda x, w: np.where(w > 2, x, w),
    "sum where": lambda x, w: np.sum(x, where=w.astype(bool)),
    "choose": lambda x, w: np.choose(x.astype(int) % 2, [w, w]),
    "concatenate": lambda x, w: np.concatenate([x, w]),
    "diff": lambda x, w: np.diff(x, prepend=w),
    "average": lambda x, w: np.average(x, weights=w),
    "quantile": lambda x, w: np.quantile(x, w / 10) + np.quantile(x, 0.5) * w[0],
    "histogram weights": lambda x, w: np.histogram(x, 3, weights=w)[0],
    "searchsorted": lambda x, w: np.searchsorted(w, x),
    "isin": lambda x, w: np.isin(x, w),
    "interp": lambda x, w: np.interp(x, np.arange(6.0), w),
    "repeat": lambda x, w: np.repeat(x, w.astype(int)),
    "matmul": lambda x, w: x @ w,
    "einsum": lambda x, w: np.einsum("i,i->", x, w),
    "convolve": lambda x, w: np.convolve(x, w),
    "clip": lambda x, w: x.clip(w, 9),
    "polyval": lambda x, w: np.polyval(w, x),
    "local_map": lambda x, w: dm.local_map(lambda part, v: part * v[:1], out_placements=[[dm.Shard(0)]])(x, w),
    "normal": lambda x, w: RNG(0).normal(w, mesh=x.process_mesh, placements=[dm.Shard(0)]),
    "choice": lambda x, w: RNG(0).choice(w, 4, mesh=x.process_mesh),
    "choice p": lambda x, w: RNG(0).choice(6, 4, p=w / 15 if w.sum() == 15 else w, mesh=x.process_mesh),
    "shard_tensor": lambda x, w: dm.shard_tensor(w, x.process_mesh, [dm.Shard(0)]),
}


@pytest.mark.parametrize("placement", [dm.Shard(0), dm.Replicate(), dm.Partial(), dm.Partial("max")], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_an_array_may_be_written_to_after_the_call(name: str, placement: dm.Placement) -> None:
    call, mesh = CALLS[name], dm.init_mesh(3, ["x"])

    def x() -> dm.DTensor:
        return dm.shard_tensor(np.arange(6.0), mesh, [dm.Shard(0) if name == "local_map" else placement])

    given = VALUES.copy()
    result = call(x(), given)
    given[:] = 7
    np.testing.assert_array_equal(np.asarray(result), np.asarray(call(x(), VALUES)))


@pytest.mark.parametrize("size", [2, 10_000])
@pytest.mark.parametrize("key", ["slice", "integers", "mask", "DTensor of bool", "DTensor of int"])
def test_what_is_assigned_may_be_written_to_afterwards(key: str, size: int) -> None:
    mesh = dm.init_mesh(3, ["x"])
    x = dm.shard_tensor(np.arange(3.0 * size), mesh, [dm.Shard(0)])
    mask = np.arange(3 * size) % 3 == 1
    place: Any = {"slice": slice(1, None, 3), "integers": np.flatnonzero(mask), "mask": mask}.get(key)
    if place is None:
        place = dm.shard_tensor(mask if key == "DTensor of bool" else np.flatnonzero(mask), mesh, [dm.Shard(0)])
    want, value = np.arange(3.0 * size), np.linspace(5, 6, size)
    want[mask] = value
    x[place] = value
    value[:] = 0
    np.testing.assert_array_equal(np.asarray(x), want)


def test_an_element_keeps_its_width_and_order_of_bytes() -> None:
    mesh = dm.init_mesh(3, ["x"])

    def placed(value: Any) -> dm.DTensor:
        return dm.shard_tensor(np.asarray(value), mesh, [dm.Shard(0)] if np.ndim(value) else [])

    words = np.array(["a", "bcd", "e"], "U3")
    one = placed(words[2:].reshape(()))
    assert (np.asarray(one[()]), one[()].dtype) == ("e", words.dtype)
    x = placed(words)
    x[1] = one
    assert np.asarray(x).tolist() == ["a", "e", "e"]
    assert np.asarray(dm.shard_tensor(words, mesh, [])[placed(np.array(1))]) == "bcd"
    big = placed(np.array(5, ">i4"))
    assert (np.asarray(big[()]), big[()].dtype) == (5, ">i4")


def test_small_cases_of_functions() -> None:
    mesh = dm.init_mesh(3, ["x"])
    x = dm.shard_tensor(np.arange(6.0), mesh, [dm.Shard(0)])
    np.testing.assert_array_equal(np.delete(x, []), np.arange(6.0))
    for truth, want in ((False, np.arange(6.0)), (True, np.full(6, 3.0))):
        x[dm.shard_tensor(np.array(truth), mesh, [])] = 3.0
        np.testing.assert_array_equal(x, want)
    days = np.full((2, 3), "2020-01-01", "M8[D]")
    for cut in (np.tril, np.triu):
        np.testing.assert_array_equal(cut(dm.shard_tensor(days, mesh, [dm.Shard(1)])), cut(days))
