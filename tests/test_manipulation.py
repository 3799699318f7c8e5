"""Shapes, order, joining, repeating and padding against NumPy: values, dtypes, replicas that agree, and the bytes of the plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import ops_oracle as oracle
import pytest
from distributed import Client
from hypothesis import given
from hypothesis import strategies as st
from ops_oracle import Case, cases, few

import daskmesh as dm
from daskmesh import transport
from daskmesh.dtensor import DTensor
from daskmesh.layout import make_layout
from daskmesh.mesh import init_mesh
from daskmesh.placement import Partial, Replicate, Shard
from daskmesh.regather import Stretch, ascending, counts, cut, relative, spans

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("threads")]

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
LINE, THREE, SQUARE, _ = oracle.MESHES
FOUR = init_mesh(4, ["x"])

# name -> (least number of dims, function of an array)
FUNCTIONS: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "transpose": (0, np.transpose),
    "transpose axes": (3, lambda x: np.transpose(x, (1, -1, 0))),
    "permute_dims": (2, lambda x: np.permute_dims(x, tuple(reversed(range(x.ndim))))),
    "T": (0, lambda x: x.T),
    "mT": (2, lambda x: x.mT),
    "swapaxes": (2, lambda x: np.swapaxes(x, 0, -1)),
    "moveaxis": (2, lambda x: np.moveaxis(x, 0, -1)),
    "moveaxis several": (3, lambda x: np.moveaxis(x, (0, 1), (-1, 0))),
    "rollaxis": (2, lambda x: np.rollaxis(x, -1)),
    "expand_dims": (0, lambda x: np.expand_dims(x, (0, -1))),
    "squeeze": (0, np.squeeze),
    "squeeze axis": (1, lambda x: np.squeeze(x, 0)),
    "broadcast_to": (0, lambda x: np.broadcast_to(x, (3, *x.shape))),
    "broadcast_arrays": (1, lambda x: tuple(np.broadcast_arrays(x, np.zeros((2, *x.shape)), x[:1]))),
    "atleast_1d": (0, np.atleast_1d),
    "atleast_2d": (0, np.atleast_2d),
    "atleast_3d": (0, np.atleast_3d),
    "ravel": (0, np.ravel),
    "ravel F": (0, lambda x: np.ravel(x, "F")),
    "flatten": (0, lambda x: x.flatten()),
    "reshape -1": (1, lambda x: np.reshape(x, (x.shape[-1], -1))),
    "reshape wrong": (1, lambda x: np.reshape(x, (7, 11))),
    "flip": (0, np.flip),
    "flip axis": (1, lambda x: np.flip(x, -1)),
    "fliplr": (1, np.fliplr),
    "flipud": (0, np.flipud),
    "rot90": (1, np.rot90),
    "rot90 twice": (2, lambda x: np.rot90(x, 2)),
    "rot90 back": (2, lambda x: np.rot90(x, -1, (1, 0))),
    "roll": (0, lambda x: np.roll(x, 2)),
    "roll axis": (1, lambda x: np.roll(x, -3, 0)),
    "roll axes": (2, lambda x: np.roll(x, (1, 2), (0, -1))),
    "tile": (0, lambda x: np.tile(x, 2)),
    "tile more": (0, lambda x: np.tile(x, (2, 1, 3))),
    "tile none": (1, lambda x: np.tile(x, 0)),
    "repeat": (0, lambda x: np.repeat(x, 2)),
    "repeat axis": (1, lambda x: np.repeat(x, 3, 0)),
    "repeat each": (1, lambda x: np.repeat(x, np.arange(x.shape[-1]) % 3, -1)),
    "concatenate": (0, lambda x: np.concatenate([x, x])),
    "concatenate last": (1, lambda x: np.concatenate([x, x, x], -1)),
    "concatenate flat": (0, lambda x: np.concatenate([x, x], axis=None)),
    "concatenate plain": (1, lambda x: np.concatenate([np.ones((2, *x.shape[1:]), "f4"), x])),
    "concatenate dtype": (1, lambda x: np.concatenate([x, x], dtype="c16")),
    "concatenate turned": (2, lambda x: np.concatenate([x, np.swapaxes(x, 0, 1)], 1)),
    "stack": (0, lambda x: np.stack([x, x], -1)),
    "vstack": (0, lambda x: np.vstack([x, x])),
    "hstack": (0, lambda x: np.hstack([x, x])),
    "dstack": (0, lambda x: np.dstack([x, x])),
    "column_stack": (0, lambda x: np.column_stack([x, x])),
    "block": (0, lambda x: np.block([[x, x], [x, x]])),
    "append": (0, lambda x: np.append(x, x)),
    "split": (1, lambda x: tuple(np.split(x, 2))),
    "split at": (1, lambda x: tuple(np.split(x, [1, 3], -1))),
    "array_split": (1, lambda x: tuple(np.array_split(x, 3))),
    "vsplit": (1, lambda x: tuple(np.vsplit(x, [1]))),
    "hsplit": (1, lambda x: tuple(np.hsplit(x, [1]))),
    "dsplit": (2, lambda x: tuple(np.dsplit(x, [1]))),
    "unstack": (1, lambda x: np.unstack(x, axis=-1)),
    "pad": (0, lambda x: np.pad(x, 2)),
    "pad constants": (1, lambda x: np.pad(x, (1, 3), constant_values=(1, 0))),
    "pad edge": (1, lambda x: np.pad(x, (2, 1), "edge")),
    "pad wrap": (1, lambda x: np.pad(x, (3, 1), "wrap")),
    "pad reflect": (1, lambda x: np.pad(x, (2, 9), "reflect")),
    "pad symmetric": (1, lambda x: np.pad(x, (7, 2), "symmetric")),
    "tril": (1, lambda x: np.tril(x, 1)),
    "triu": (1, np.triu),
    "diag": (1, lambda x: np.diag(x, -1)),
    "diagflat": (0, lambda x: np.diagflat(x[..., :3] if x.ndim else x, 1)),
    "diagonal": (2, lambda x: np.diagonal(x, 1)),
    "diagonal axes": (3, lambda x: np.diagonal(x, -1, 2, 0)),
}


def check(function: Callable[[Any], Any], case: Case) -> None:
    """NumPy's value or error; errors that concern an index too."""
    with np.errstate(all="ignore"):
        try:
            want = function(case.a)
        except IndexError:
            with pytest.raises(IndexError):
                function(case.x)
            return
        except np.exceptions.AxisError:
            with pytest.raises(np.exceptions.AxisError):
                function(case.x)
            return
        except ValueError:
            with pytest.raises(ValueError):  # noqa: PT011
                function(case.x)
            return
        got = function(case.x)
    if not isinstance(want, tuple):
        got, want = (got,), (want,)
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        oracle.same(g, w)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_agree_with_numpy(name: str) -> None:
    low, function = FUNCTIONS[name]

    @few(8)
    @given(cases(low=low))
    def run(case: Case) -> None:
        check(function, case)

    run()


SHAPES = [(12,), (3, 4), (4, 3), (2, 6), (1, 12), (12, 1), (2, 2, 3), (3, 2, 2), (2, 1, 3, 2), (6, 1, 2)]


@few(40)
@given(st.data())
def test_any_shape_becomes_any_other(data: st.DataObject) -> None:
    case = data.draw(cases(shape=data.draw(st.sampled_from(SHAPES))))
    to = data.draw(st.sampled_from(SHAPES))
    order = data.draw(st.sampled_from("CCF"))
    check(lambda x: np.reshape(x, to, order=order), case)


@few(40)
@given(st.data())
def test_joining_arrays_of_different_layouts(data: st.DataObject) -> None:
    first = data.draw(cases(low=1))
    d = data.draw(st.integers(0, first.a.ndim - 1))
    size = data.draw(st.integers(0, 5))
    shape = (*first.a.shape[:d], size, *first.a.shape[d + 1 :])
    second = data.draw(cases(first.x.process_mesh, shape))
    third: Any = np.ones(shape, "i2") if data.draw(st.booleans()) else second
    oracle.agree(lambda *arrays: np.concatenate(arrays, axis=d), first, second, third)


# -- what moves -------------------------------------------------------------------------------------------------------


def sharded(shape: tuple[int, ...], placements: Any, mesh: Any = FOUR) -> DTensor:
    return dm.shard_tensor(np.arange(math.prod(shape)).reshape(shape), mesh, placements)


BYTES: dict[str, tuple[Callable[[Any], Any], Any, int]] = {
    "transpose": (lambda x: x.T, [S0], 0),
    "expand_dims": (lambda x: np.expand_dims(x, 0), [S0], 0),
    "ravel": (np.ravel, [S0], 0),  # rows stay rows
    "split the cut dim": (lambda x: np.reshape(x, (4, 2, 8)), [S0], 0),
    "split another dim": (lambda x: np.reshape(x, (8, 2, 4)), [S0], 0),
    "cut beside the group": (lambda x: np.reshape(x, (2, 4, 8)), [S1], 0),
    "few rows": (lambda x: np.reshape(x, (2, 4, 8)), [S0], 256),  # ranks 1 and 2 become whole: one half each from a neighbour
    "flip": (lambda x: np.flip(x, 0), [S0], 512),  # all of it, to the mirror image
    "flip another dim": (lambda x: np.flip(x, 0), [S1], 0),
    "roll": (lambda x: np.roll(x, 1, 0), [S0], 4 * 64),  # a row from each neighbour
    "tile another dim": (lambda x: np.tile(x, (1, 3)), [S0], 0),
    "repeat": (lambda x: np.repeat(x, 3, 0), [S0], 0),
    "pad": (lambda x: np.pad(x, 3), [S0], 0),
    "pad edge": (lambda x: np.pad(x, 3, "edge"), [S0], 0),
    "concatenate another dim": (lambda x: np.concatenate([x, x], 1), [S0], 0),
    "concatenate": (lambda x: np.concatenate([x, x]), [S0], 2 * 512 - 2 * 2 * 64),  # half of the outer parts is there
    "stack": (lambda x: np.stack([x, x]), [S0], 0),
    "split": (lambda x: np.split(x, 2)[1], [S0], 0),
    "tril": (np.tril, [S0], 0),
    "diagonal of rows": (np.diagonal, [S0], 0),
    "diagonal of columns": (np.diagonal, [S1], 0),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes(name: str) -> None:
    function, placements, nbytes = BYTES[name]
    y = function(sharded((8, 8), placements))
    oracle.same(y, function(np.arange(64).reshape(8, 8)))
    assert y.explain().total_bytes == nbytes


def test_a_reshape_moves_only_the_rows_at_the_borders() -> None:
    y = np.reshape(sharded((1000,), [S0]), (10, 100))
    assert y.layout.chunks[0] == (3, 2, 3, 2)
    assert y.explain().total_bytes == 2 * 50 * 8
    assert "whole rows" in y.explain().reason


@pytest.mark.parametrize("mesh", [LINE, THREE, FOUR, SQUARE], ids=str)
def test_cases_of_other_systems(mesh: Any) -> None:
    """A reshape redistributes when it must, and succeeds."""
    for shape, to in [((3, 4), (12,)), ((12,), (3, 4)), ((6, 256), (1536,)), ((12, 8), (16, 6)), ((2, 3, 4), (6, 4))]:
        for placements in ([S0], [S0, S0], [S1], [R, S0]):
            given = placements[: mesh.ndim]
            if any(p == S1 for p in given) and len(shape) < 2:
                continue
            a = np.arange(math.prod(shape)).reshape(shape)
            oracle.same(np.reshape(dm.shard_tensor(a, mesh, given), to), a.reshape(to))


def test_partial_sums_stay_partial() -> None:
    x = dm.shard_tensor(np.arange(6.0).reshape(2, 3), LINE, [P])
    for y in (x.T, np.flip(x), np.roll(x, 1), np.pad(x, 1, constant_values=7), np.tile(x, 2), np.reshape(x, -1), np.tril(x)):
        assert y.placements == (P,)
        assert y.explain().total_bytes == x.explain().total_bytes


def test_more_ranks_than_rows() -> None:
    x = sharded((2, 5), [S0])
    for f in (np.flip, np.ravel, lambda x: np.roll(x, 1, 0), lambda x: np.concatenate([x, x]), lambda x: np.pad(x, 1)):
        oracle.same(f(x), f(np.arange(10).reshape(2, 5)))


ERRORS: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "sizes differ": (lambda x: np.concatenate([x, x[:2]], 1), ValueError, "dim 0 has size 3"),
    "out": (lambda x: np.concatenate([x, x], out=x), TypeError, "out="),
    "size": (lambda x: np.reshape(x, (5, 5)), ValueError, "size 12"),
    "no copy": (lambda x: np.reshape(x, 12, copy=False), ValueError, "no views"),
    "mode": (lambda x: np.pad(x, 1, "spiral"), TypeError, "spiral"),
    "long dim": (lambda x: np.squeeze(x, 0), ValueError, "size 3"),
    "broadcast": (lambda x: np.broadcast_to(x, (3, 5)), ValueError, "broadcast"),
    "repeats": (lambda x: np.repeat(x, [1, 2], 0), ValueError, "dim 0 of size 3"),
    "meshes": (lambda x: np.concatenate([x, sharded((3, 4), [R], LINE)]), ValueError, "different meshes"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_was_wrong(name: str) -> None:
    call, error, words = ERRORS[name]
    with pytest.raises(error, match=words):
        call(sharded((3, 4), [S0]))


def test_on_a_cluster(threads: Client) -> None:
    x = sharded((8, 6), [S0]).persist()
    y = np.concatenate([np.roll(np.flip(x, 0), 3, 0), np.reshape(x, (6, 8)).T])
    a = np.arange(48).reshape(8, 6)
    transport.reset_stats()
    held = y.persist()
    np.testing.assert_array_equal(held.compute(), np.concatenate([np.roll(np.flip(a, 0), 3, 0), np.reshape(a, (6, 8)).T]))
    assert sum(road["bytes"] for road in transport.stats().values()) == y.explain().total_bytes


# -- stretches --------------------------------------------------------------------------------------------------------


def elements(stretches: Any) -> list[int]:
    return [s.start + s.step * i if s.start >= 0 else -1 for s in stretches for i in range(s.size)]


@few(80)
@given(st.data())
def test_stretches(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 9))
    stretches = []
    for _ in range(data.draw(st.integers(0, 4))):
        start, step = data.draw(st.integers(-1, n - 1)), data.draw(st.sampled_from([1, -1, 0]))
        size = data.draw(st.integers(0, 5))
        if start < 0:
            step = 0
        most = {1: n - start, -1: start + 1, 0: 5}[step]
        stretches.append(Stretch(start, step, min(size, most)))
    given_ = tuple(s for s in stretches if s.size)
    every = elements(given_)
    lo = data.draw(st.integers(0, len(every)))
    hi = data.draw(st.integers(lo, len(every)))
    assert elements(cut(given_, lo, hi)) == every[lo:hi]
    real = [e for e in every if e >= 0]
    runs = spans(given_)
    needed = sorted({i for a, b in runs for i in range(a, b)})
    assert needed == sorted(set(real))
    assert elements(relative(given_, runs)) == [needed.index(e) if e >= 0 else -1 for e in every]
    assert ascending(given_) == (real == sorted(real))
    if ascending(given_):
        border = data.draw(st.integers(0, n))
        first, second = counts(given_, (0, border, n))
        assert first + second == len(every)
        assert all(e < border for e in every[:first])
        assert all(e >= border or e < 0 for e in every[first:])


def test_an_uneven_layout_is_kept_by_what_does_not_move() -> None:
    layout = make_layout(LINE, [S0], (5, 2), "i8", [(1, 4), None])
    x = dm.dtensor_from_local([np.ones((1, 2), int), np.ones((4, 2), int)], LINE, [S0])
    assert x.layout == layout
    assert np.repeat(x, 2, 0).layout.chunks[0] == (2, 8)
    assert x.T.layout.chunks[1] == (1, 4)
    assert np.pad(x, 1).layout.chunks[0] == (2, 5)
