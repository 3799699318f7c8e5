"""Gradients through local functions: what every rank gets of a cotangent and gives back, collectives and their duals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import dask
import numpy as np
import pytest
from gangs import run_ranks

import daskmesh as dm
from daskmesh import Partial, PlacementError, Replicate, Shard, collectives, local_map
from daskmesh.checks import gradient_check
from daskmesh.duals import together
from daskmesh.gang import CURRENT_GANG
from daskmesh.tape import followed

pytestmark = pytest.mark.cluster
M2, M3, M4 = (dm.init_mesh(n, ["x"]) for n in (2, 3, 4))
M22 = dm.init_mesh((2, 2), ("x", "y"))
A = np.arange(1.0, 5.0)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    dm.shutdown()
    for mesh in (M2, M3, M4, M22):
        dm.zeros(1, mesh=mesh)
    yield
    dm.shutdown()


@pytest.fixture
def sync() -> Iterator[None]:
    with dask.config.set(scheduler="sync"):
        yield


def locals_of(x: dm.DTensor) -> list[Any]:
    return [x.local_value(r).tolist() for r in x.process_mesh.process_ids]


def ranked(t: Any) -> Any:
    return t * (dm.get_rank() + 1)


# -- the cases of the specification --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("sync")
def test_case_31_sums_and_averages_of_ranks() -> None:
    a = dm.shard_tensor(A, M2, [Shard(0)])
    for op, want in (("sum", [[2, 4], [6, 8]]), ("avg", [[1, 2], [3, 4]])):
        f = local_map(lambda t: (t * t).sum(), out_placements=[[Partial(op)]])
        assert locals_of(dm.grad(f)(a)) == want


@pytest.mark.usefixtures("sync")
def test_case_32_parts_stay_parts() -> None:
    f = local_map(ranked, out_placements=[[Shard(0)]])
    assert locals_of(dm.grad(lambda a: np.sum(f(a)))(dm.shard_tensor(A, M2, [Shard(0)]))) == [[1, 1], [2, 2]]


@pytest.mark.usefixtures("sync")
@pytest.mark.parametrize(
    ("declared", "value", "label"),
    [(None, 3, Replicate()), (Replicate(), 3, Replicate()), (Partial(), 3, Partial()), (Partial("avg"), 1.5, Partial("avg"))],
)
def test_cases_33_and_34_a_replicated_input_that_ranks_use_differently(declared: Any, value: float, label: Any) -> None:
    a = dm.shard_tensor(A, M2, [])
    f = local_map(ranked, out_placements=[[Shard(0)]], in_grad_placements=[None if declared is None else [declared]])
    leaf = dm.grad(lambda a: np.sum(f(a)))(a)
    inner = dm.grad(lambda a: np.sum(f(a * 1)))(a)
    for gradient in (leaf, inner):
        np.testing.assert_array_equal(np.asarray(gradient), np.full(4, value))
    assert (leaf.placements, inner.placements) == ((label,), (Replicate(),))
    if isinstance(label, Partial):
        assert locals_of(leaf) == [[1, 1, 1, 1], [2, 2, 2, 2]]


@pytest.mark.usefixtures("sync")
@pytest.mark.parametrize(
    ("op", "value", "want"),
    [
        ("sum", [3, 3], [[1, 1], [1, 1]]), ("avg", [1.5, 1.5], [[0.5, 0.5], [0.5, 0.5]]), ("max", [2, 2], [[0, 1], [1, 0]]),
        ("min", [1, 1], [[1, 0], [0, 1]]), ("prod", [2, 2], [[2, 1], [1, 2]]),
    ],
)  # fmt: skip
def test_case_35_terms_of_every_reduction(op: str, value: list[float], want: list[list[float]]) -> None:
    x = dm.dtensor_from_local([np.array([1.0, 2.0]), np.array([2.0, 1.0])], M2, [Shard(0)])
    f = local_map(lambda t: t * 1, out_placements=[[Partial(op)]])
    assert np.asarray(f(x)).tolist() == value
    assert locals_of(dm.grad(lambda x: np.sum(f(x).reshard([Replicate()])))(x)) == want


@pytest.mark.usefixtures("sync")
def test_ties_share_and_products_are_right_with_zeros() -> None:
    x = dm.dtensor_from_local([np.array([2.0, 0.0, 0.0]), np.array([2.0, 3.0, 0.0]), np.array([1.0, 4.0, 5.0])], M3, [Shard(0)])
    largest = local_map(lambda t: t * 1, out_placements=[[Partial("max")]])
    assert locals_of(dm.grad(lambda x: np.sum(largest(x)))(x)) == [[0.5, 0, 0], [0.5, 0, 0], [0, 1, 1]]
    product = local_map(lambda t: t * 1, out_placements=[[Partial("prod")]])
    assert locals_of(dm.grad(lambda x: np.sum(product(x)))(x)) == [[2, 12, 0], [2, 0, 0], [4, 0, 0]]


@pytest.mark.usefixtures("sync")
@pytest.mark.parametrize("first", ["sum", "avg", "max", "min", "prod"])
@pytest.mark.parametrize("second", ["sum", "avg", "max", "min", "prod"])
def test_reductions_over_two_mesh_dims(first: str, second: str) -> None:
    """Mesh dim 0 reduces first."""
    f = local_map(lambda t: t[0], out_placements=[[Partial(first), Partial(second)]], out_shapes=[()])
    x = dm.shard_tensor(np.array([1.0, 4.0, 3.0, 2.5]), M22, [Shard(0), Shard(0)])
    gradient_check(lambda x: f(x) ** 2, x)


@pytest.mark.usefixtures("sync")
def test_case_36_a_maximum_and_a_mean_beside_parts() -> None:
    h, w = dm.shard_tensor(np.arange(8.0), M4, [Shard(0)]), dm.shard_tensor(np.array([2.0]), M4, [])

    def local(h: Any, w: Any) -> Any:
        z = h * w
        return z, np.max(np.abs(z)), np.mean(z * z)

    f = local_map(local, out_placements=[[Shard(0)], [Partial("max")], [Partial("avg")]], in_grad_placements=[None, [Partial()]])
    _, largest, average = f(h, w)
    assert (float(largest), locals_of(average), float(average)) == (14, [2, 26, 82, 170], 70)
    gh, gw = dm.grad(lambda h, w: f(h, w)[2], (0, 1))(h, w)
    np.testing.assert_array_equal(np.asarray(gh), np.arange(8.0))
    assert (np.asarray(gw).tolist(), gw.placements) == ([70], (Partial(),))
    gh, gw = dm.grad(lambda h, w: f(h, w)[1] + np.sum(f(h, w)[0]), (0, 1))(h, w)
    np.testing.assert_array_equal(np.asarray(gh), [2, 2, 2, 2, 2, 2, 2, 4])
    assert np.asarray(gw).tolist() == [28 + 7]


@pytest.mark.usefixtures("sync")
@pytest.mark.parametrize("declared", [None, [[Shard(0), Partial()], [Partial(), Shard(1)]]])
def test_case_37_a_column_parallel_linear_layer(declared: Any) -> None:
    x = dm.shard_tensor(np.arange(8.0).reshape(4, 2), M22, [Shard(0), Replicate()])
    w = dm.shard_tensor(np.array([[1.0, 2.0], [3.0, 4.0]]), M22, [Replicate(), Shard(1)])
    f = local_map(lambda x, w: x @ w, out_placements=[[Shard(0), Shard(1)]], in_grad_placements=declared)
    np.testing.assert_array_equal(np.asarray(f(x, w)), [[3, 4], [11, 16], [19, 28], [27, 40]])
    gx, gw = dm.grad(lambda x, w: np.sum(f(x, w) ** 2), (0, 1))(x, w)
    np.testing.assert_array_equal(np.asarray(gx), [[22, 50], [86, 194], [150, 338], [214, 482]])
    np.testing.assert_array_equal(np.asarray(gw), [[520, 768], [640, 944]])
    if declared is None:
        assert (gx.placements, gw.placements) == (x.placements, w.placements)
    else:
        assert ([*gx.placements], [*gw.placements]) == (declared[0], declared[1])


@pytest.mark.usefixtures("sync")
def test_case_39_resharding() -> None:
    for source, target in ((Shard(0), Replicate()), (Shard(0), Partial()), (Replicate(), Shard(0)), (Partial(), Replicate())):
        e = dm.shard_tensor(np.arange(4.0), M4, [source])
        gradient = dm.grad(lambda e, target=target: np.sum(e.reshard([target]) * A))(e)
        np.testing.assert_array_equal(np.asarray(gradient), A)


# -- regions -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("sync")
def test_uneven_and_empty_parts() -> None:
    x = dm.dtensor_from_local([np.ones((3, 2)), np.ones((0, 2)), np.ones((1, 2))], M3, [Shard(0)])
    f = local_map(lambda t: (t**2 * (dm.get_rank() + 1), np.sum(t)), out_placements=[[Shard(0)], [Partial()]])

    def total(x: Any) -> Any:
        y, s = f(x)
        return np.sum(y) * s

    gradient_check(total, x)
    assert dm.grad(total)(x).layout.chunks == ((3, 0, 1), (2,))


@pytest.mark.usefixtures("sync")
def test_replicated_outputs_are_means_of_their_replicas() -> None:
    x = dm.shard_tensor(A, M3, [])
    f = local_map(lambda t: t**2, out_placements=[[Replicate()]])
    gradient = dm.grad(lambda x: np.sum(f(x)))(x)
    np.testing.assert_allclose(np.asarray(gradient), 2 * A, rtol=1e-15)


@pytest.mark.usefixtures("sync")
def test_partial_inputs_keep_their_own_cotangents() -> None:
    x = dm.dtensor_from_local([np.array([1.0]), np.array([2.0])], M2, [Shard(0)])
    terms = local_map(lambda t: t * 3, out_placements=[[Partial()]])
    linear = local_map(lambda t: t * 10, out_placements=[[Partial()]])
    assert locals_of(dm.grad(lambda x: np.sum(linear(terms(x))))(x)) == [[30], [30]]
    curved = local_map(lambda t: t**2, out_placements=[[Partial()]])
    assert locals_of(dm.grad(lambda x: np.sum(curved(terms(x))))(x)) == [[18], [36]]
    means = local_map(lambda t: t * 3, out_placements=[[Partial("avg")]])
    kept = local_map(lambda t: t * 10, out_placements=[[Partial("avg")]])
    assert locals_of(dm.grad(lambda x: np.sum(kept(means(x))))(x)) == [[15], [15]]
    placed = dm.shard_tensor(A, M2, [Partial()])
    np.testing.assert_array_equal(np.asarray(dm.grad(lambda x: np.sum(linear(x)))(placed)), np.full(4, 10.0))
    largest = dm.shard_tensor(A, M2, [Partial("max")])
    with pytest.raises(TypeError, match=r"argument t is Partial\('max'\) on mesh dim 'x'.*reshard it to Replicate"):
        dm.grad(lambda x: np.sum(linear(x)))(largest)


def page_style(x: Any, y: Any) -> Any:
    """Plain NumPy in many ways."""
    mask = np.zeros_like(x)
    mask[1:3] = 1
    z = np.where(mask > 0, x, 0.5 * x) + np.einsum("i,ij->j", x, np.outer(y, x))
    z += np.concatenate([x[:2], x[2:] ** 2])
    z = z * np.linalg.norm(y) + z.sum() / mask.sum() + x.mean() * x.max()
    return np.add.reduce(np.stack([z, np.take(z, [0, 0, 1, 1])]), axis=0)[..., None].reshape(-1) + np.float64(2) * y.dot(x)


def test_plain_numpy_is_followed() -> None:
    rng = np.random.default_rng(3)
    x = dm.shard_tensor(rng.normal(size=8), M2, [Shard(0)])
    y = dm.shard_tensor(rng.normal(size=4), M2, [])
    f = local_map(page_style, out_placements=[[Shard(0)]])
    for n in (0, 1):
        gradient_check(lambda x, y: np.sum(f(x, y) ** 2), x, y, argnum=n)


@pytest.mark.usefixtures("sync")
def test_higher_orders_through_regions() -> None:
    x = dm.shard_tensor(A, M2, [Shard(0)])
    f = local_map(lambda t: (t**4).sum(), out_placements=[[Partial()]])
    once = dm.grad(f)
    np.testing.assert_allclose(np.asarray(once(x)), 4 * A**3)
    np.testing.assert_allclose(np.asarray(dm.grad(lambda x: np.sum(once(x)))(x)), 12 * A**2)
    twice = dm.grad(lambda x: np.sum(once(x)))
    np.testing.assert_allclose(np.asarray(dm.grad(lambda x: np.sum(twice(x)))(x)), 24 * A)
    np.testing.assert_allclose(np.asarray(dm.jacobian(once)(x)), np.diag(12 * A**2))
    largest = local_map(lambda t: t**3, out_placements=[[Partial("max")]])
    gradient_check(lambda x: np.sum(dm.grad(lambda x: np.sum(largest(x)))(x) ** 2), x)


@pytest.mark.usefixtures("sync")
def test_other_arguments_and_outputs_have_no_gradient() -> None:
    x, n = dm.shard_tensor(A, M2, [Shard(0)]), dm.shard_tensor(np.arange(4), M2, [Shard(0)])

    def local(batch: dict[str, Any], power: int, *, shift: float) -> Any:
        y = batch["x"] ** power + batch["n"] + shift
        return {"y": y, "n": batch["n"] * 2}, f"rank {dm.get_rank()}"

    f = local_map(local, out_placements=[{"y": [Shard(0)], "n": [Shard(0)]}, None])

    def total(x: Any) -> Any:
        outputs, notes = f({"x": x, "n": n}, 3, shift=1.0)
        assert isinstance(outputs["n"], dm.DTensor)
        assert len(notes) == 2
        return np.sum(outputs["y"] * outputs["n"])

    np.testing.assert_allclose(np.asarray(dm.grad(total)(x)), 3 * A**2 * 2 * np.arange(4))


@pytest.mark.usefixtures("sync")
def test_inputs_that_are_moved_get_their_gradient_back() -> None:
    x = dm.shard_tensor(A, M2, [Shard(0)])
    f = local_map(lambda t: t * np.sum(t), out_placements=[[Replicate()]], in_placements=[[Replicate()]], reshard_inputs=True)
    gradient = dm.grad(lambda x: np.sum(f(x)))(x)
    np.testing.assert_allclose(np.asarray(gradient), 2 * A.sum() * np.ones(4))
    assert gradient.placements == (Shard(0),)


def test_a_function_that_needs_values_is_differentiated_too() -> None:
    x = dm.shard_tensor(A, M2, [Shard(0)])
    f = local_map(lambda t: t[: 1 + int(np.sum(t) > 4)] ** 2, out_placements=[[Shard(0)]])
    np.testing.assert_array_equal(np.asarray(dm.grad(lambda x: np.sum(f(x)))(x)), [2, 0, 6, 8])


def test_refusals() -> None:
    x = dm.shard_tensor(A, M2, [Shard(0)])
    w = dm.shard_tensor(A[:2], M2, [])

    def of(f: Callable[..., Any], **options: Any) -> Any:
        return dm.grad(lambda x: np.sum(local_map(f, **{"out_placements": [[Shard(0)]], "out_shapes": [(4,)], **options})(x)))(x)

    with pytest.raises(TypeError, match=r"the function holds a DTensor of shape \(2,\).*pass it as an argument"):
        of(lambda t: t * w)
    with pytest.raises(TypeError, match=r"holds an array that is being differentiated.*pass it as an argument"):
        dm.grad(lambda w: np.sum(local_map(lambda t: t * w, out_placements=[[Shard(0)]])(x)))(w)
    for f, message in (
        (lambda t: np.cumprod(t), "np.cumprod cannot be differentiated: autograd has no rule"),
        (lambda t: t * float(t[0]), r"float\(x\)"),
        (lambda t: np.median(t) * t, "np.median cannot be differentiated.*LocalLayer with a backward"),
        (lambda t: np.asarray(t), "np.asarray"),
        (lambda t: t.__setitem__(0, 1), r"x\[key\] = v cannot be differentiated"),
        (lambda t: np.add(t, 1, out=np.zeros(2)), "out="),
    ):
        with pytest.raises(TypeError, match=message) as caught:
            of(f).compute()
        assert any("rank " in note for note in caught.value.__notes__)
    with pytest.raises(PlacementError, match=r"argument t has Partial\('sum'\) on mesh dim 'x', where .* is Shard\(0\)"):
        local_map(ranked, out_placements=[[Shard(0)]], in_grad_placements=[[Partial()]])(x)
    with pytest.raises(PlacementError, match=r"has Shard\(0\) on mesh dim 'x', where the argument is Replicate\(\)"):
        local_map(ranked, out_placements=[[Shard(0)]], in_grad_placements=[[Shard(0)]])(w)
    with pytest.raises(PlacementError, match=r"summed or averaged.*Partial\('max'\)"):
        local_map(ranked, out_placements=[[Shard(0)]], in_grad_placements=[[Partial("max")]])(w)
    f = local_map(lambda t, v: t * v, out_placements=[[Shard(0)]])
    with pytest.raises(TypeError, match=r"argument v is no DTensor, so its gradient would be lost.*shard_tensor"):
        dm.grad(lambda x, v: np.sum(f(x, v)), (0, 1))(x, 2.0)


# -- collectives ---------------------------------------------------------------------------------------------------------


def rank() -> int:
    gang = CURRENT_GANG.get()
    assert gang is not None
    return gang.rank


COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda x: collectives.all_reduce(x),
    "all_reduce avg": lambda x: collectives.all_reduce(x, op="avg"),
    "all_reduce max": lambda x: collectives.all_reduce(x, op="max"),
    "all_reduce min": lambda x: collectives.all_reduce(x, op="min"),
    "all_reduce prod": lambda x: collectives.all_reduce(x, op="prod"),
    "reduce_scatter": lambda x: collectives.reduce_scatter(x),
    "reduce_scatter dim": lambda x: collectives.reduce_scatter(x, None, op="avg", dim=-1),
    "reduce_scatter max": lambda x: collectives.reduce_scatter(x, op="max"),
    "reduce_scatter prod": lambda x: collectives.reduce_scatter(x, op="prod"),
    "all_gather": lambda x: collectives.all_gather(x),
    "all_gather uneven": lambda x: collectives.all_gather(x[: 1 + rank()]),
    "all_gather stacks": lambda x: collectives.all_gather(x, tiled=False, dim=1),
    "all_gather scalars": lambda x: collectives.all_gather(x[0, 0]),
    "all_to_all": lambda x: collectives.all_to_all(x, split_dim=0, concat_dim=1),
    "all_to_all one dim": lambda x: collectives.all_to_all(x, split_dim=0, concat_dim=0),
    "all_to_all uneven": lambda x: collectives.all_to_all(x[:, : 1 + rank()], split_dim=0, concat_dim=1),
    "broadcast": lambda x: collectives.broadcast(x, root=1),
    "broadcast None": lambda x: collectives.broadcast(x if rank() == 1 else None, None, root=1),
    "permute": lambda x: collectives.permute(x, None, iter([(0, 1), (1, 0)])),
    "permute sizes": lambda x: collectives.permute(x[: 1 + rank()], None, [(0, 1), (1, 2)]),
    "shift": lambda x: collectives.shift(x, None, 1),
    "shift ends": lambda x: collectives.shift(x, None, -1, wrap=False),
    "scan": lambda x: collectives.scan(x),
    "scan avg": lambda x: collectives.scan(x, op="avg"),
    "halo periodic": lambda x: collectives.halo_exchange(x, 2, ("x", None), "periodic"),
    "halo none": lambda x: collectives.halo_exchange(x, 2, "x", "none"),
    "halo reflect": lambda x: collectives.halo_exchange(x, (1, 1), ("x", None), "reflect"),
    "halo pairs": lambda x: collectives.halo_exchange(x, ((2, 0), (1, 2)), ("x", None), ("nearest", 7.0)),
    "halo over several ranks": lambda x: collectives.halo_exchange(x, 5, ("x", None), ("nearest", 7.0)),
    "two in a row": lambda x: collectives.scan(collectives.all_reduce(x) * x),
    "ranks that differ": lambda x: collectives.all_reduce(x * 2) if rank() == 0 else (collectives.all_reduce(x), x[0])[1],
    "not used": lambda x: (collectives.all_reduce(x), collectives.barrier(), x * collectives.axis_index())[2],
}
OVER_TWO_DIMS: dict[str, Callable[[Any], Any]] = {
    "halo corners": lambda x: collectives.halo_exchange(x, 1, ("x", "y"), "periodic"),
    "all_reduce": lambda x: collectives.all_reduce(x, "y"),
    "all_gather": lambda x: collectives.all_gather(x, "x", dim=1),
    "both": lambda x: collectives.all_reduce(collectives.reduce_scatter(x, "x"), ("x", "y")),
}
ALL = [(M3, name, f) for name, f in COLLECTIVES.items()] + [(M22, name, f) for name, f in OVER_TWO_DIMS.items()]


@pytest.mark.parametrize(("mesh", "name", "f"), ALL, ids=[f"{m.shape} {name}" for m, name, _ in ALL])
def test_adjoints_of_collectives(mesh: dm.ProcessMesh, name: str, f: Callable[[Any], Any]) -> None:
    """The product of all ranks is one function, its gradient is held against finite differences."""
    rng = np.random.default_rng(0)
    xs = rng.normal(size=(mesh.size, 4, 3))
    place = {r: i for i, r in enumerate(mesh.process_ids)}

    def values(xs: Any) -> list[Any]:
        return run_ranks(mesh, lambda: np.asarray(f(xs[place[rank()]] * 1.0)))

    weights = [rng.normal(size=y.shape) for y in values(xs)]

    def gradient() -> Any:
        me = place[rank()]
        _, pull = followed(lambda x: [f(x * 1.0)], [xs[me]], together)
        return pull([weights[me]])[0]

    got = run_ranks(mesh, gradient)
    for at in [tuple(i) for i in rng.permutation(list(np.ndindex(xs.shape)))[:4]]:
        step = np.zeros_like(xs)
        step[at] = 1e-5
        ends = [sum(float(np.sum(w * y)) for w, y in zip(weights, values(xs + s), strict=True)) for s in (step, -step)]
        mine = 0.0 if got[at[0]] is None else got[at[0]][at[1:]]
        assert float(mine) == pytest.approx((ends[0] - ends[1]) / 2e-5, abs=1e-7)


def test_a_collective_in_a_region() -> None:
    x = dm.shard_tensor(np.random.default_rng(1).normal(size=(6, 2)), M3, [Shard(0)])

    def normalised(t: Any) -> Any:
        mean = collectives.all_reduce(np.sum(t, axis=0), "x") / 6
        return (t - mean) / np.sqrt(collectives.all_reduce(np.sum((t - mean) ** 2, axis=0), "x") + 0.1)

    f = local_map(normalised, out_placements=[[Shard(0)]])
    w = np.random.default_rng(2).normal(size=(6, 2))
    got = dm.grad(lambda x: np.sum(f(x) ** 3 * w))(x)

    def whole(np: Any, t: Any) -> Any:
        mean = np.sum(t, axis=0) / 6
        return np.sum(((t - mean) / np.sqrt(np.sum((t - mean) ** 2, axis=0) + 0.1)) ** 3 * w)

    want = dm.grad(lambda x: whole(np, x))(x)
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-12, atol=1e-13)
    second = dm.grad(lambda x: np.sum(dm.grad(lambda x: np.sum(f(x) ** 3 * w))(x) ** 2))(x)
    wanted = dm.grad(lambda x: np.sum(dm.grad(lambda x: whole(np, x))(x) ** 2))(x)
    np.testing.assert_allclose(np.asarray(second), np.asarray(wanted), rtol=1e-10, atol=1e-12)


def test_refused_collectives() -> None:
    x = dm.shard_tensor(A, M2, [Shard(0)])
    f = local_map(lambda t: collectives.scan(t, op="max"), out_placements=[[Shard(0)]], out_shapes=[(4,)])
    with pytest.raises(TypeError, match=r"scan\(op='max'\) cannot be differentiated"):
        dm.grad(lambda x: np.sum(f(x)))(x).compute()
