"""Contractions against NumPy in all layouts, what they move, and what streaming them holds in memory."""

from __future__ import annotations

import itertools
import threading
import tracemalloc
from typing import Any

import dask
import numpy as np
import ops_oracle as oracle
import pytest
from distributed import Client
from hypothesis import given
from hypothesis import strategies as st
from ops_oracle import cases, few

import daskmesh as dm
from daskmesh import summa
from daskmesh.layout import make_layout
from daskmesh.placement import Partial, Placement, Replicate, Shard
from daskmesh.summa import Streamed

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("threads")]

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
LINE, THREE, SQUARE, ODD = oracle.MESHES
FOUR = dm.init_mesh(4, ["x"])

SHAPES = [
    (np.matmul, (4, 5), (5, 3)), (np.matmul, (5,), (5, 3)), (np.matmul, (4, 5), (5,)), (np.matmul, (5,), (5,)),
    (np.matmul, (2, 4, 5), (5, 3)), (np.matmul, (2, 1, 4, 5), (3, 5, 2)), (np.matmul, (1, 3), (3, 1)),
    (np.matmul, (0, 3), (3, 2)), (np.matmul, (3, 0), (0, 2)), (np.matmul, (9, 7), (7, 8)), (np.vecdot, (3, 4), (4,)),
    (np.matvec, (2, 3, 4), (4,)), (np.vecmat, (3,), (2, 3, 4)), (np.dot, (4, 5), (5, 3)), (np.dot, (2, 3, 4), (5, 4, 2)),
    (np.dot, (3,), ()), (np.inner, (3, 4), (2, 4)), (np.vdot, (3, 4), (3, 4)), (np.outer, (3,), (4,)), (np.kron, (3, 2), (2, 2)),
    (np.kron, (3,), (2, 2)), (np.tensordot, (5, 3, 4), (3, 4, 2)),
    (lambda a, b: np.tensordot(a, b, ([1, 0], [0, 1])), (3, 4), (4, 3)),
    (lambda a, b: np.tensordot(a, b, 0), (2, 3), (4,)), (np.matmul, (4, 5), (4, 3)), (np.dot, (4, 5), (4, 3)),
]  # fmt: skip
EINSUMS = [
    ("ij,jk", (3, 4), (4, 2)), ("ij,jk->ki", (3, 4), (4, 2)), ("...ij,...j->...i", (2, 3, 4), (2, 4)),
    ("ii,ij->j", (3, 3), (3, 2)),
    ("ij,ij->", (3, 4), (3, 4)), ("i,j", (3,), (4,)), ("bij,bjk->bik", (2, 3, 4), (2, 4, 5)), ("i,i->i", (5,), (5,)),
    ("ij,kj->ik", (3, 4), (5, 4)), ("ba,bc", (3, 4), (3, 2)), ("ij,j->i", (3, 1), (4,)), (" i j , j k -> i k ", (3, 4), (4, 2)),
]  # fmt: skip
ALONE = [
    ("ij->ji", (3, 4)), ("ii", (4, 4)), ("ii->i", (4, 4)), ("ij->", (3, 4)), ("ijk->k", (2, 3, 4)), ("...i->...", (2, 3)),
    ("...i->i", (2, 3)),
    ("ba", (2, 3)),
]  # fmt: skip
DTYPES = ("f8", "i4", "c16", "f4", "?")


def pair(data: Any, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[Any, Any]:
    mesh = data.draw(st.sampled_from(oracle.MESHES))
    return tuple(data.draw(cases(mesh, shape, DTYPES)) for shape in (a, b))


@few(300)
@given(st.sampled_from(range(len(SHAPES))), st.data())
def test_products(which: int, data: Any) -> None:
    function, a, b = SHAPES[which]
    oracle.agree(function, *pair(data, a, b))


@few(150)
@given(st.sampled_from(EINSUMS), st.data())
def test_einsum(which: Any, data: Any) -> None:
    text, a, b = which
    oracle.agree(lambda x, y: np.einsum(text, x, y), *pair(data, a, b))


@few(40)
@given(st.sampled_from(ALONE), st.data())
def test_einsum_of_one(which: Any, data: Any) -> None:
    text, shape = which
    oracle.agree(lambda x: np.einsum(text, x), data.draw(cases(shape=shape, dtypes=DTYPES)))


@few(25)
@given(st.data())
def test_einsum_of_many(data: Any) -> None:
    mesh = data.draw(st.sampled_from(oracle.MESHES))
    chain = [data.draw(cases(mesh, s, ("f8", "i8"))) for s in ((3, 4), (4, 5), (5, 2), (2,))]
    want = np.einsum("ij,jk,kl,l->i", *(c.a for c in chain))
    oracle.same(np.einsum("ij,jk,kl,l->i", *(c.x for c in chain)).compute(scheduler="sync"), want)
    oracle.agree(lambda x, y: np.einsum(x, [0, 1], y, [1, 2], [2, 0]), *chain[:2])


@few(60)
@given(cases(dtypes=("f8", "i4", "c16"), low=2), st.integers(-4, 4), st.booleans())
def test_trace(case: Any, offset: int, turned: bool) -> None:
    oracle.agree(lambda a: np.trace(a, offset, *((1, 0) if turned else (0, 1))), case)


@few(40)
@given(cases(dtypes=("f8", "c16", "i4"), shape=(4, 3)), st.data())
def test_norms(case: Any, data: Any) -> None:
    call = data.draw(st.sampled_from([
        np.linalg.norm, lambda a: np.linalg.norm(a, axis=0), lambda a: np.linalg.norm(a, np.inf), lambda a: np.linalg.norm(a, 1),
        lambda a: np.linalg.norm(a, 3, axis=1, keepdims=True), lambda a: np.linalg.norm(a, 0, axis=1),
        lambda a: np.linalg.norm(a, -1),
        np.linalg.matrix_norm, lambda a: np.linalg.vector_norm(a, ord=1),
    ]))  # fmt: skip
    oracle.agree(call, case)


# -- the table of placements ------------------------------------------------------------------------------------------

TABLE = {
    (R, R): R, (R, S0): P, (R, S1): S1, (R, P): P,
    (S0, R): S0, (S0, S0): S0, (S0, S1): None, (S0, P): None,
    (S1, R): P, (S1, S0): P, (S1, S1): None, (S1, P): None,
    (P, R): P, (P, S0): None, (P, S1): None, (P, P): None,
}  # fmt: skip


def eight(placements: tuple[Placement, ...], mesh: Any = FOUR, seed: int = 0) -> oracle.Case:
    return oracle.made(make_layout(mesh, placements, (8, 8), "f8"), np.random.default_rng(seed))


@pytest.mark.parametrize(("a", "b"), list(itertools.product((R, S0, S1, P), repeat=2)))
def test_every_pair_of_layouts(a: Placement, b: Placement) -> None:
    """Nothing moves where nothing has to; one operand at most moves where one is enough."""
    x, y = eight((a,)), eight((b,), seed=1)
    z = x.x @ y.x
    oracle.same(z, x.a @ y.a)
    free = {(R, R), (R, S0), (R, S1), (R, P), (S0, R), (S1, R), (S1, S0), (P, R)}
    assert (z.explain().total_bytes == 0) == ((a, b) in free)
    assert TABLE[a, b] in (None, z.placements[0])


@pytest.mark.parametrize(
    ("a", "b", "out"),
    [((S0, R), (R, S1), (S0, S1)), ((S0, S0), (R, R), (S0, S0)), ((S0, S1), (R, S0), (S0, P)), ((P, S0), (R, R), (P, S0))],
)
def test_two_mesh_dims_without_a_move(a: Any, b: Any, out: Any) -> None:
    x, y = eight(a, SQUARE), eight(b, SQUARE, 1)
    z = x.x @ y.x
    assert z.placements == out
    assert z.explain().total_bytes == 0
    oracle.same(z, x.a @ y.a)


# -- streaming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [SQUARE, ODD, dm.init_mesh((3, 1), ("x", "y"))], ids=lambda mesh: str(mesh.shape))
def test_summa(mesh: Any) -> None:
    rng = np.random.default_rng(0)
    x, y = (oracle.made(make_layout(mesh, (S0, S1), s, "f8"), rng) for s in ((19, 13), (13, 17)))
    z = x.x @ y.x
    assert isinstance(z._node, Streamed)
    assert z.placements == (S0, S1)
    oracle.same(z, x.a @ y.a)


def test_panels_are_cut_where_they_would_be_large(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x, y = (oracle.made(make_layout(SQUARE, (S0, S1), s, "f8"), rng) for s in ((40, 30), (30, 20)))
    monkeypatch.setattr(summa.config, "nbytes", lambda name: 4 * 8 * 30)
    monkeypatch.setattr(summa, "_TEMPORARY_BYTES", 200)
    oracle.same(x.x @ y.x, x.a @ y.a)


def test_replicas_of_a_streamed_product_agree_to_the_last_bit() -> None:
    mesh = dm.init_mesh((2, 3), ("x", "y"))
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(40, 31)), rng.normal(size=(31, 50))
    x, y = dm.shard_tensor(a, mesh, [S1, S0]), dm.shard_tensor(b, mesh, [S1, R])
    oracle.value(x @ y)


def test_a_streamed_product_holds_two_panels() -> None:
    """Peak: the result, its temporary and two panels of each operand, not the gathered operands."""
    mesh = dm.init_mesh(8, ["x"])
    layouts = [make_layout(mesh, (S0,), s, "f8") for s in ((2048, 2048), (2048, 512))]
    x, y = (oracle.held(layout, np.ones(layout.shape)).persist(scheduler="sync") for layout in layouts)
    z = x @ y
    assert isinstance(z._node, Streamed)
    graph, (key, *_) = z.__dask_graph__(), z.__dask_keys__()
    tracemalloc.start()
    try:
        dask.get(graph, key)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    gathered = 2048 * 512 * 8
    assert peak < gathered * 0.6


def test_the_next_panel_is_loaded_while_one_is_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 begins with the panel that it holds; that product waits here until the load of the other panel has begun."""
    loads, waited = threading.Semaphore(0), []
    load_all, add_product = summa.load_all, summa._add_product

    def load(jobs: Any) -> None:
        loads.release()
        load_all(jobs)

    def multiply(stream: Any, out: Any, a: Any, b: Any) -> None:
        waited.append(len(waited) > 0 or loads.acquire(timeout=20))
        add_product(stream, out, a, b)

    monkeypatch.setattr(summa, "load_all", load)
    monkeypatch.setattr(summa, "_add_product", multiply)
    x, y = (oracle.made(make_layout(LINE, (S0,), s, "f8"), np.random.default_rng(0)) for s in ((40, 10), (10, 4)))
    z = x.x @ y.x
    assert isinstance(z._node, Streamed)
    dask.get(z.__dask_graph__(), z.__dask_keys__()[1])
    assert waited == [True, True]


def test_a_matrix_may_meet_itself() -> None:
    for mesh, placements in ((SQUARE, (S0, S1)), (THREE, (S0,)), (THREE, (P,))):
        x = oracle.made(make_layout(mesh, placements, (6, 6), "f8"), np.random.default_rng(0))
        oracle.same(x.x @ x.x, x.a @ x.a)


@pytest.mark.parametrize(
    ("a", "b", "mesh", "left", "right"),
    [
        ((3, 5, 4), (4, 6), LINE, (S1,), (S1,)), ((2, 2, 3), (3, 1), SQUARE, (S0, S1), (R, R)),
        ((4, 3), (3, 4), FOUR, (S1,), (S0,)),
    ],
)  # fmt: skip
def test_products_of_uneven_parts(a: Any, b: Any, mesh: Any, left: Any, right: Any) -> None:
    x, y = (oracle.made(make_layout(mesh, p, s, "f8"), np.random.default_rng(0)) for p, s in ((left, a), (right, b)))
    oracle.same(x.x @ y.x, x.a @ y.a)
    if mesh is SQUARE:
        assert (x.x @ y.x).explain().total_bytes == 0
        assert (x.x @ y.x).placements == (S0, S1)


def test_errors_say_what_does_not_fit() -> None:
    x = dm.zeros((3, 4), mesh=LINE, placements=[S0])
    with pytest.raises(ValueError, match=r"last dim of shape \(3, 4\)"):
        x @ x
    with pytest.raises(ValueError, match="use \\* instead"):
        np.matmul(x, 2)
    with pytest.raises(ValueError, match=r"dim 1 of shape \(3, 4\) meets dim 0 of shape \(3, 4\)"):
        np.dot(x, x)
    with pytest.raises(ValueError, match="does not fit an operand of 2 dims"):
        np.einsum("ijk->i", x)
    with pytest.raises(TypeError, match="singular values"):
        np.linalg.norm(x, 2)
    with pytest.raises(ValueError, match="lies on"):
        x @ dm.zeros((4, 3), mesh=THREE)
    with pytest.raises(TypeError, match="no buffer"):
        np.dot(x, np.ones((4, 2)), out=np.zeros((3, 2)))


@pytest.mark.processes
def test_on_worker_processes(processes: Client) -> None:
    rng = np.random.default_rng(0)
    mesh = dm.init_mesh((2, 2), ("x", "y"))
    a, b = rng.normal(size=(30, 21)), rng.normal(size=(21, 25))
    x, y = dm.shard_tensor(a, mesh, [S0, S1]), dm.shard_tensor(b, mesh, [S0, S1])
    np.testing.assert_allclose((x @ y).compute(), a @ b, rtol=1e-12)
    np.testing.assert_allclose(np.einsum("ij,jk->k", x, y).compute(), (a @ b).sum(0), rtol=1e-10)


@pytest.mark.parametrize("n", [0, 2, 4])
def test_ranks_without_a_part_of_the_result_load_nothing(n: int) -> None:
    """More ranks than rows: the operands do not travel to those whose block is empty, and the plan knows."""
    mesh = dm.init_mesh(3, ["x"])
    a, b = np.arange(n * 5.0).reshape(n, 5), np.arange(15.0).reshape(5, 3)
    x, y = (dm.shard_tensor(v, mesh, [dm.Shard(0)]).persist(scheduler="sync") for v in (a, b))
    np.testing.assert_array_equal(oracle.value(x @ y), a @ b)
