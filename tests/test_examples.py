"""The programs in docs/examples against NumPy, at toy size: uneven and empty parts, one and two mesh dims, one rank."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from distributed import Client

import daskmesh as dm
from daskmesh import Shard

FOLDER = Path(__file__).parent.parent / "docs" / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
pytestmark = pytest.mark.cluster
MESHES = {n: dm.init_mesh(n, ["x"]) for n in (1, 2, 3, 5)}
RANKS = (1, 3, 5)
M23 = dm.init_mesh((2, 3), ["x", "y"])


@pytest.fixture(scope="module")
def examples() -> Iterator[dict[str, ModuleType]]:
    """The programs by name; not importable by workers, as if they stood in a notebook."""
    found = {}
    for name in NAMES:
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        found[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found[name])
    yield found
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.fixture(autouse=True)
def _cluster(threads: Client) -> None:
    """Three workers inside this process."""


def rows(data: Any, n: int) -> dm.DTensor:
    return dm.shard_tensor(data, MESHES[n], [Shard(0)])


def neighbours(u: Any) -> Any:
    padded = np.pad(u, 1)
    return padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]


def random(*shape: int) -> Any:
    return np.random.default_rng(0).random(shape)


GRIDS = [
    ((40, 12), MESHES[1], [Shard(0)]),
    ((37, 9), MESHES[2], [Shard(0)]),
    ((9, 37), MESHES[3], [Shard(1)]),
    ((6, 4), MESHES[5], [Shard(0)]),  # 2, 2, 2, 0, 0
    ((13, 11), M23, [Shard(0), Shard(1)]),
    ((13, 11), M23, [Shard(1), Shard(0)]),
]


@pytest.mark.parametrize(("shape", "mesh", "placements"), GRIDS)
def test_jacobi(examples: dict[str, ModuleType], shape: Any, mesh: dm.ProcessMesh, placements: Any) -> None:
    f = random(*shape)
    u, norms = examples["jacobi"].jacobi(dm.shard_tensor(f, mesh, placements), sweeps=20)
    want, residuals = np.zeros(shape), []
    for _ in range(20):
        residuals.append(np.linalg.norm(f + neighbours(want) - 4 * want))
        want = (f + neighbours(want)) / 4
    assert np.allclose(u, want, rtol=1e-13)
    assert np.allclose(norms, residuals, rtol=1e-12)


@pytest.mark.parametrize(("shape", "mesh", "placements"), GRIDS)
def test_conjugate_gradients(examples: dict[str, ModuleType], shape: Any, mesh: dm.ProcessMesh, placements: Any) -> None:
    b = random(*shape)
    x, norms = examples["cg"].solve(dm.shard_tensor(b, mesh, placements), tolerance=1e-10)
    x, norms = np.asarray(x), np.asarray(norms)
    residual = np.linalg.norm(b + neighbours(x) - 4 * x)
    assert residual <= 1.1e-10 * np.linalg.norm(b)
    assert norms[0] == pytest.approx(np.linalg.norm(b), rel=1e-14)
    assert norms[-2] > 1e-10 * norms[0] >= norms[-1]


def test_conjugate_gradients_of_nothing_and_with_few_turns(examples: dict[str, ModuleType]) -> None:
    solve = examples["cg"].solve
    assert np.array_equal(solve(rows(np.zeros((6, 4)), 2))[0], np.zeros((6, 4)))
    assert solve(rows(random(20, 20), 2), turns=3)[1].shape == (4,)


@pytest.mark.parametrize("n", RANKS)
def test_kmeans(examples: dict[str, ModuleType], n: int) -> None:
    start = np.array([[0, 0], [5, 5], [99, 99]], "f4")
    points = np.concatenate([random(6, 2), random(5, 2) + 5]).astype("f4")
    centres = examples["kmeans"].kmeans(rows(points, n), start, turns=5)
    assert centres.dtype == "f4"
    assert np.allclose(centres, [points[:6].mean(0), points[6:].mean(0), [99, 99]], rtol=1e-5)


@pytest.mark.parametrize("n", RANKS)
def test_logistic_regression(examples: dict[str, ModuleType], n: int) -> None:
    x = np.random.default_rng(0).normal(size=(9, 3))
    y = (x[:, 0] > 0.1).astype(float)
    y[4] = 1 - y[4]
    w, losses = examples["logreg"].fit(rows(x, n), rows(y, n), turns=30)

    want, speed, history = np.zeros(3), np.zeros(3), []
    for _ in range(30):
        history.append(np.mean(np.logaddexp(0, x @ want) - y * (x @ want)))
        speed = 0.9 * speed - x.T @ (1 / (1 + np.exp(-(x @ want))) - y) / len(x)
        want = want + speed
    assert np.allclose(w, want, rtol=1e-12)
    assert np.allclose(losses, history, rtol=1e-12)


def test_the_gradient_of_the_loss(examples: dict[str, ModuleType]) -> None:
    x, y, w = random(9, 3) - 0.5, np.arange(9.0) % 2, np.array([700.0, -2.0, 0.1])
    at = examples["logreg"].gradient_and_loss
    for i in range(3):
        step = 1e-6 * (np.arange(3) == i)
        assert (at(w + step, x, y)[-1] - at(w - step, x, y)[-1]) / 2e-6 == pytest.approx(at(w, x, y)[i], rel=1e-6)


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("shape", [(7, 5), (3, 12)])
def test_fft2(examples: dict[str, ModuleType], n: int, shape: tuple[int, int]) -> None:
    x = random(*shape) + 1j * random(*shape)[::-1]
    y = examples["fft2"].fft2(rows(x, n))
    assert y.placements == (Shard(1),)
    assert np.allclose(y, np.fft.fft2(x), rtol=1e-13)


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("shape", [(60, 4), (7, 3), (2, 3)])
def test_tsqr(examples: dict[str, ModuleType], n: int, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examples["tsqr"], "ROWS", 9)
    a = random(*shape)
    q, r = (np.asarray(part) for part in examples["tsqr"].tsqr(rows(a, n)))
    assert np.allclose(q @ r, a, rtol=1e-13)
    assert np.allclose(q.T @ q, np.eye(len(r)), atol=1e-13)
    assert np.allclose(np.abs(r), np.abs(np.linalg.qr(a)[1]), rtol=1e-12)
    assert np.array_equal(r, np.triu(r))


@pytest.mark.processes
@pytest.mark.parametrize("name", NAMES)
def test_on_worker_processes(processes: Client, examples: dict[str, ModuleType], name: str) -> None:
    x = random(20, 4)
    module, a = examples[name], rows(x, 2)
    result = {
        "jacobi": lambda: module.jacobi(a, 3)[1],
        "cg": lambda: module.solve(a)[1],
        "kmeans": lambda: module.kmeans(a, x[:2]),
        "logreg": lambda: module.fit(a, rows(x[:, 0].round(), 2), 3)[1],
        "fft2": lambda: module.fft2(a),
        "tsqr": lambda: module.tsqr(a)[1],
    }[name]()
    assert np.isfinite(np.asarray(result)).all()
