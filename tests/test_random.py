"""Random numbers: the same whatever the mesh and the placements, right in distribution, new in every call."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from distributed import Client

import daskmesh as dm
from daskmesh import streams
from daskmesh.mesh import ProcessMesh, init_mesh
from daskmesh.placement import Partial, Placement, Replicate, Shard
from daskmesh.random import Generator, default_rng
from daskmesh.streams import Stream, draw, places, tile_shape

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("threads")]

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
PLACES: list[tuple[ProcessMesh, list[Placement]]] = [
    (init_mesh(1, ["x"]), [R]),
    (init_mesh(2, ["x"]), [S0]),
    (init_mesh(3, ["x"]), [S1]),
    (init_mesh((2, 3), ("x", "y")), [S1, S0]),
    (init_mesh((2, 2), ("x", "y")), [S0, S0]),
    (init_mesh((2, 2), ("x", "y")), [P, R]),
    (init_mesh(5, ["x"]), [Partial("max")]),
]
LINE = init_mesh(2, ["x"])

METHODS: dict[str, tuple[Any, ...]] = {
    "random": (), "standard_normal": (), "standard_exponential": (), "standard_gamma": (2.5,), "uniform": (-1, 2),
    "normal": (3, 0.5), "exponential": (2,), "gamma": (2, 3), "beta": (2, 3), "binomial": (9, 0.3), "poisson": (4,),
    "lognormal": (0, 0.3), "chisquare": (4,), "f": (4, 9), "geometric": (0.4,), "gumbel": (1, 2), "hypergeometric": (9, 8, 7),
    "laplace": (1, 2), "logistic": (1, 0.5), "logseries": (0.5,), "negative_binomial": (5, 0.5), "noncentral_chisquare": (3, 2),
    "noncentral_f": (4, 9, 1), "pareto": (4,), "power": (3,), "rayleigh": (2,), "standard_cauchy": (), "standard_t": (9,),
    "triangular": (0, 1, 3), "vonmises": (0, 2), "wald": (2, 3), "weibull": (2,), "zipf": (4,), "integers": (-5, 12),
}  # fmt: skip


# Method -> its arguments, and the mean of what it draws.
VECTORS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "multivariate_normal": (([1.0, -2.0, 0.5], [[2.0, 0.6, 0], [0.6, 1.0, 0.2], [0, 0.2, 0.5]]), [1, -2, 0.5]),
    "dirichlet": (([1.0, 2.0, 5.0],), [0.125, 0.25, 0.625]),
    "multinomial": ((20, [0.2, 0.5, 0.3]), [4, 10, 6]),
    "multivariate_hypergeometric": (([5, 10, 5], 8), [2, 4, 2]),
}


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiles of eight elements, so that small arrays have many."""
    monkeypatch.setattr(streams, "TILE_SIZE", 8)
    tile_shape.cache_clear()
    yield
    tile_shape.cache_clear()


def everywhere(draw: Callable[[Generator, ProcessMesh, Any], Any]) -> np.ndarray:
    """The one value that a draw gives on all meshes, after another call each."""
    values = []
    for mesh, placements in PLACES:
        rng = default_rng(7)
        rng.random(2, mesh=mesh)
        values.append(draw(rng, mesh, placements).compute(scheduler="sync"))
    for v in values[1:]:
        assert v.dtype == values[0].dtype
        np.testing.assert_array_equal(v, values[0])
    return values[0]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", METHODS)
def test_numbers_do_not_depend_on_the_mesh(name: str) -> None:
    value = everywhere(lambda rng, mesh, p: getattr(rng, name)(*METHODS[name], size=(7, 5), mesh=mesh, placements=p))
    theirs = getattr(np.random.default_rng(0), name)(*METHODS[name], size=(7, 5))
    assert (value.shape, value.dtype) == (theirs.shape, theirs.dtype)
    if theirs.dtype.kind == "f":
        assert len(np.unique(value)) == value.size  # no tile is drawn twice


@pytest.mark.parametrize("name", VECTORS)
@pytest.mark.usefixtures("small_tiles")
def test_vectors_do_not_depend_on_the_mesh(name: str) -> None:
    args, mean = VECTORS[name]
    value = everywhere(lambda rng, mesh, p: getattr(rng, name)(*args, size=400, mesh=mesh, placements=p))
    theirs = getattr(np.random.default_rng(0), name)(*args, size=400)
    assert (value.shape, value.dtype) == (theirs.shape, theirs.dtype)
    np.testing.assert_allclose(value.mean(0), mean, atol=5 * theirs.std(0).max() / 20)
    np.testing.assert_allclose(np.cov(value.T), np.cov(theirs.T), atol=0.35 * theirs.var(0).max())
    one = getattr(default_rng(7), name)(*args, mesh=LINE)
    assert one.shape == (3,)


@pytest.mark.usefixtures("small_tiles")
def test_vectors_of_parameters_that_are_arrays() -> None:
    trials, chances = np.array([1, 100, 10000]), np.array([[0.5, 0.5], [0.1, 0.9], [1, 0]])
    value = everywhere(lambda rng, mesh, p: rng.multinomial(trials, chances, (4, 3), mesh=mesh, placements=p))
    assert np.all(value.sum(-1) == trials)
    assert np.all(value[:, 2, 1] == 0)
    assert default_rng(0).multinomial(trials, [0.5, 0.5], mesh=LINE).shape == (3, 2)
    for method in ("svd", "eigh", "cholesky"):
        drawn = default_rng(1).multivariate_normal([0, 5], [[1, 0.9], [0.9, 1]], 2000, method=method, mesh=LINE, placements=[S0])
        np.testing.assert_allclose(np.corrcoef(drawn.compute().T)[0, 1], 0.9, atol=0.03)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda rng: rng.multivariate_normal([0, 0], [[1, 2], [2, 1]], check_valid="raise", mesh=LINE), ValueError),
        (lambda rng: rng.dirichlet([1, -1], mesh=LINE), ValueError),
        (lambda rng: rng.multinomial(3, [0.9, 0.9, 0.1], mesh=LINE), ValueError),
        (lambda rng: rng.multinomial([1, 2], [0.5, 0.5], 3, mesh=LINE), ValueError),
        (lambda rng: rng.multivariate_hypergeometric([1, 1], 5, mesh=LINE), ValueError),
        (lambda rng: rng.dirichlet(dm.ones(3, mesh=LINE), mesh=LINE), TypeError),
    ],
    ids=["covariances", "alpha", "chances", "size", "colors", "dtensor"],
)
def test_vectors_of_wrong_parameters(call: Any, error: Any) -> None:
    with pytest.raises(error):
        call(default_rng(0))


def test_every_method_of_numpys_generator_is_there() -> None:
    theirs = {name for name in dir(np.random.Generator) if not name.startswith("_")} - {"bit_generator"}
    assert not theirs - set(dir(Generator))
    assert default_rng(3).bytes(5) == default_rng(3).bytes(5) != default_rng(4).bytes(5)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_dtypes(dtype: str) -> None:
    for name in ("random", "standard_normal", "standard_exponential"):
        assert everywhere(lambda rng, m, p, name=name: getattr(rng, name)((4, 5), dtype, mesh=m, placements=p)).dtype == dtype
    small = everywhere(lambda rng, m, p: rng.integers(3, 6, (6, 5), "u1", True, mesh=m, placements=p))
    assert small.dtype == np.uint8
    assert set(np.unique(small)) == {3, 4, 5, 6}


@pytest.mark.usefixtures("small_tiles")
def test_parameters_that_are_arrays() -> None:
    means = np.arange(5) * 1000.0
    value = everywhere(lambda rng, mesh, p: rng.normal(means, 1, (7, 5), mesh=mesh, placements=p))
    assert np.all(abs(value - means) < 10)
    assert default_rng(0).normal(means, mesh=LINE).shape == (5,)


@pytest.mark.usefixtures("small_tiles")
def test_permutations_and_choices_do_not_depend_on_the_mesh() -> None:
    a = np.arange(35).reshape(7, 5)
    rows = everywhere(lambda rng, m, p: rng.permutation(dm.shard_tensor(a, m, p)))
    assert sorted(rows[:, 0]) == sorted(a[:, 0])
    np.testing.assert_array_equal(rows, a[rows[:, 0] // 5])
    columns = everywhere(lambda rng, m, p: rng.permutation(a, axis=1, mesh=m, placements=p))
    assert sorted(columns[0]) == sorted(a[0])
    lines = everywhere(lambda rng, m, p: rng.permuted(dm.shard_tensor(a, m, p), axis=0))
    np.testing.assert_array_equal(np.sort(lines, axis=0), a)
    every = everywhere(lambda rng, m, p: rng.permuted(dm.shard_tensor(a, m, p)))
    np.testing.assert_array_equal(np.sort(every, axis=None), a.ravel())
    few = everywhere(lambda rng, m, p: rng.choice(40, (7, 5), replace=False, mesh=m, placements=p))
    assert len(np.unique(few)) == 35
    weighted = everywhere(lambda rng, m, p: rng.choice(4, (7, 5), p=[0.5, 0, 0.5, 0], mesh=m, placements=p))
    assert set(np.unique(weighted)) == {0, 2}
    distinct = everywhere(lambda rng, m, p: rng.choice(36, (7, 5), replace=False, p=np.ones(36) / 36, mesh=m, placements=p))
    assert len(np.unique(distinct)) == 35
    words = everywhere(lambda rng, m, p: rng.choice([1.5, 2.5], (7, 5), mesh=m, placements=p))
    assert set(np.unique(words)) == {1.5, 2.5}


def test_shuffle_rebinds() -> None:
    x = dm.arange(9, mesh=LINE, placements=[S0])
    y = x + 0
    layout = x.layout
    picked = x[[5, 2, 7]]  # of x as it is now
    default_rng(1).shuffle(x)
    assert x.layout == layout
    assert picked.compute(scheduler="sync").tolist() == [5, 2, 7]
    assert sorted(x.compute(scheduler="sync")) == list(range(9))
    assert not np.array_equal(x, y)
    np.testing.assert_array_equal(y, np.arange(9))


@pytest.mark.parametrize("n", [2, 3, 10, 1000, 4097])
def test_long_permutations_are_permutations(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_WHOLE_PERMUTATION", 1)
    value = default_rng(5).permutation(n, mesh=LINE, placements=[S0]).compute(scheduler="sync")
    np.testing.assert_array_equal(np.sort(value), np.arange(n))
    if n >= 1000:
        assert abs(np.corrcoef(value[:-1], value[1:])[0, 1]) < 0.15
        assert abs(np.corrcoef(value, np.arange(n))[0, 1]) < 0.15


def test_every_place_of_a_long_permutation_is_as_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_WHOLE_PERMUTATION", 1)
    hits = np.zeros((5, 5))
    for seed in range(1000):
        hits[np.arange(5), places(Stream(seed, (1,)), 5, np.arange(5))] += 1
    assert abs(hits - 200).max() < 65  # five standard deviations


def test_moments() -> None:
    rng = default_rng(11)
    size = {"size": 40000, "mesh": init_mesh(3, ["x"]), "placements": [S0]}
    for x, mean, deviation in [
        (rng.random(**size), 0.5, 12**-0.5),
        (rng.standard_normal(**size), 0, 1),
        (rng.exponential(3, **size), 3, 3),
        (rng.integers(10, **size), 4.5, 8.25**0.5),
        (rng.poisson(5, **size), 5, 5**0.5),
    ]:
        value = x.compute(scheduler="sync")
        assert abs(value.mean() - mean) < 5 * deviation / 200
        assert abs(value.std() - deviation) < 0.05 * deviation


def test_calls_differ_and_their_sequence_decides() -> None:
    rng = default_rng(3)
    a, b = (rng.random(6, mesh=LINE).compute(scheduler="sync") for _ in range(2))
    assert not np.intersect1d(a, b).size
    again = default_rng(3)
    again.integers(4, size=100, mesh=init_mesh(3, ["x"]), placements=[S0])
    np.testing.assert_array_equal(again.random(6, mesh=LINE), b)
    assert not np.array_equal(default_rng(4).random(6, mesh=LINE), a)
    assert not np.array_equal(default_rng().random(6, mesh=LINE), default_rng().random(6, mesh=LINE))


def test_seeds() -> None:
    def first(seed: Any) -> Any:
        return default_rng(seed).random(3, mesh=LINE).compute(scheduler="sync").tolist()

    assert first([1, 2]) == first(np.random.SeedSequence([1, 2])) == first((1, 2))
    assert first(np.random.SeedSequence(1).spawn(1)[0]) != first(1)
    rng = default_rng(1)
    assert default_rng(rng) is rng
    assert repr(rng) == "Generator(entropy=1, key=(), calls=0)"


def test_spawned_generators_are_their_own() -> None:
    rng = default_rng(2)
    values = [g.random(4, mesh=LINE).compute(scheduler="sync") for g in (*rng.spawn(2), *rng.spawn(1), rng)]
    assert len(np.unique(values)) == 16
    np.testing.assert_array_equal(default_rng(2).spawn(3)[2].random(4, mesh=LINE), values[2])


def test_a_pickled_generator_goes_on() -> None:
    rng = default_rng(2)
    rng.random(mesh=LINE)
    rng.spawn(1)
    other = pickle.loads(pickle.dumps(rng))
    np.testing.assert_array_equal(other.random(3, mesh=LINE), rng.random(3, mesh=LINE))
    np.testing.assert_array_equal(other.spawn(1)[0].random(3, mesh=LINE), rng.spawn(1)[0].random(3, mesh=LINE))


def test_a_rank_draws_the_tiles_it_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    generator = Stream.generator
    monkeypatch.setattr(Stream, "generator", lambda self, tile=0: drawn.append(tile) or generator(self, tile))
    box = (slice(300, 600), slice(0, 250))
    draw(Stream(1, (1,)), "random", (600, 500), (), {}, np.float64, box)
    assert drawn == [2, 4]


def test_shapes() -> None:
    assert default_rng(0).random(mesh=LINE).shape == ()
    assert 0 <= float(default_rng(0).random(mesh=LINE)) < 1
    assert default_rng(0).normal(size=(0, 3), mesh=LINE, placements=[S0]).compute(scheduler="sync").shape == (0, 3)
    assert tile_shape((2**9, 2**9, 2**9)) == (32, 32, 64)
    assert tile_shape(()) == ()
    assert default_rng(0).choice(3, mesh=LINE).shape == ()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda rng: rng.normal(0, -1, 3, mesh=LINE), ValueError),
        (lambda rng: rng.integers(5, 5, 3, mesh=LINE), ValueError),
        (lambda rng: rng.normal(np.zeros(4), 1, 3, mesh=LINE), ValueError),
        (lambda rng: rng.normal(dm.zeros(3, mesh=LINE), mesh=LINE), TypeError),
        (lambda rng: rng.beta(1, mesh=LINE), TypeError),
        (lambda rng: rng.uniform(0, 1, 3, 4, mesh=LINE), TypeError),
        (lambda rng: rng.random(3, int, mesh=LINE), TypeError),
        (lambda rng: rng.choice(3, 4, replace=False, mesh=LINE), ValueError),
        (lambda rng: rng.choice(3, 4, p=[0.5, 0.2, 0.1], mesh=LINE), ValueError),
        (lambda rng: rng.permutation(4), TypeError),
        (lambda rng: rng.shuffle(np.arange(3)), TypeError),
    ],
    ids=range(11),
)
def test_errors(call: Callable[[Generator], Any], error: type[Exception]) -> None:
    rng = default_rng(0)
    with pytest.raises(error):
        call(rng)


def test_on_a_cluster(threads: Client) -> None:
    """Numbers depend on the index in the whole array alone: not on the mesh, nor on the placements."""
    values = [
        default_rng(9).random((8, 8), mesh=init_mesh(n, ["x"]), placements=[p]).compute()
        for n in (1, 2, 4)
        for p in (S0, S1, R)
    ]
    for v in values[1:]:
        np.testing.assert_array_equal(v, values[0])
