"""Fixtures and assertions for test suites of programs that use daskmesh; pytest finds the fixtures by itself.

::

    def test_column_means(daskmesh_mesh, daskmesh_rng):
        mesh = daskmesh_mesh((2, 3), ("rows", "columns"))          # six ranks in this process, no set-up
        a = daskmesh_rng.normal(size=(7, 5))                       # the same numbers in every run of this test
        x = dm.shard_tensor(a, mesh, [dm.Shard(0), dm.Shard(1)])
        means = np.mean(x, axis=0)
        assert_layout(means.reshard([dm.Replicate()]), [], shape=(5,))
        assert_bytes_moved(means.reshard([dm.Replicate()]))        # what its explain() says
        np.testing.assert_allclose(means.compute(), a.mean(0))
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster, default_client, futures_of, wait

from daskmesh import transport
from daskmesh.checks import gradient_check
from daskmesh.dtensor import DTensor
from daskmesh.gathering import gather
from daskmesh.layout import make_layout, normalise_placements
from daskmesh.mesh import ProcessMesh, init_mesh
from daskmesh.pen import format_bytes
from daskmesh.plan import Plan
from daskmesh.world import shutdown, world_for

__all__ = [
    "assert_bytes_moved", "assert_layout", "daskmesh_cluster", "daskmesh_mesh", "daskmesh_rng", "daskmesh_seed",
    "gradient_check", "pytest_addoption", "pytest_report_header",
]  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    """Pytest's hook: ``--daskmesh-seed``."""
    group = parser.getgroup("daskmesh", "sharded arrays")
    group.addoption(
        "--daskmesh-seed", type=int, default=0, metavar="N", help="seed of the fixtures daskmesh_seed and daskmesh_rng (0)"
    )


def pytest_report_header(config: pytest.Config) -> str:
    """Pytest's hook: the seed, so that a run can be repeated."""
    return f"daskmesh: --daskmesh-seed={config.getoption('--daskmesh-seed')}"


@pytest.fixture
def daskmesh_seed(request: pytest.FixtureRequest) -> int:
    """A seed that depends on the test's name and ``--daskmesh-seed`` only: the same alone as in the whole suite."""
    return zlib.crc32(f"{request.config.getoption('--daskmesh-seed')} {request.node.nodeid}".encode())


@pytest.fixture
def daskmesh_rng(daskmesh_seed: int) -> np.random.Generator:
    """A NumPy generator from `daskmesh_seed`."""
    return np.random.default_rng(daskmesh_seed)


@pytest.fixture(scope="session")
def _daskmesh_clusters() -> Iterator[dict[Any, LocalCluster]]:
    clusters: dict[Any, LocalCluster] = {}
    yield clusters
    for cluster in clusters.values():
        cluster.close()


@pytest.fixture
def daskmesh_cluster(_daskmesh_clusters: dict[Any, LocalCluster]) -> Iterator[Callable[..., Client]]:
    """A function that gives a client of a local cluster: ``daskmesh_cluster(n_workers=2, processes=False)``.

    Clusters are kept for the whole session; the client is Dask's default client until the test ends.
    """
    with ExitStack() as stack:

        def cluster(n_workers: int = 2, *, processes: bool = False) -> Client:
            key = n_workers, processes
            if key not in _daskmesh_clusters:
                _daskmesh_clusters[key] = _start(n_workers, processes)
            shutdown()
            stack.callback(shutdown)
            client: Client = stack.enter_context(Client(_daskmesh_clusters[key]))
            return client

        yield cluster


def _start(n_workers: int, processes: bool) -> LocalCluster:
    # glibc would give every freed buffer back to the system at once, which slows down kernels.
    trim = {"distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": None}
    with dask.config.set(trim if processes else {}):
        return LocalCluster(
            n_workers=n_workers,
            threads_per_worker=1 if processes else 2,
            processes=processes,
            memory_limit=0,
            dashboard_address="127.0.0.1:0",
            scheduler_kwargs={"dashboard": False},
        )


@pytest.fixture
def daskmesh_mesh() -> Callable[..., ProcessMesh]:
    """A function that gives a mesh whose ranks are ready: ``daskmesh_mesh((2, 3), ("rows", "columns"))``.

    The ranks are those of the cluster that `daskmesh_cluster` gave, or of any current Dask client; without one they live in this
    process.
    """

    def mesh(shape: int | Sequence[int] = 2, dim_names: Sequence[str] | None = None) -> ProcessMesh:
        made = init_mesh(shape, dim_names)
        world_for(made)
        return made

    return mesh


def assert_layout(
    x: DTensor,
    placements: Any,
    *,
    mesh: ProcessMesh | None = None,
    shape: Sequence[int] | None = None,
    dtype: Any = None,
    chunks: Sequence[Sequence[int] | None] | None = None,
) -> None:
    """Fail unless a DTensor is placed as it should be.

    Parameters
    ----------
    placements : sequence of Placement or mapping
        As for `shard_tensor`: padded with Replicate, negative dims allowed.
    mesh, shape, dtype : optional
        Compared if given.
    chunks : sequence, optional
        Per tensor dim the sizes of its parts, None for the split rule.

    Notes
    -----
    **Communication**: none; nothing is computed.

    Raises
    ------
    AssertionError
        Names all that differs.

    Examples
    --------
    >>> import daskmesh as dm
    >>> from daskmesh.testing import assert_layout
    >>> x = dm.zeros((4, 3), mesh=dm.init_mesh(2, ["x"]), placements=[dm.Shard(0)])
    >>> assert_layout(x, [dm.Shard(-2)], shape=(4, 3), chunks=[(2, 2), None])
    >>> assert_layout(x, [dm.Shard(1)])
    Traceback (most recent call last):
    AssertionError: placements: [Shard(0)], expected [Shard(1)]
    """
    if not isinstance(x, DTensor):
        raise AssertionError(f"expected a DTensor, got {type(x).__name__}")
    layout = x.layout
    wanted = normalise_placements(placements, layout.mesh if mesh is None else mesh, layout.ndim)
    pairs: list[tuple[str, Any, Any]] = [("placements", list(layout.placements), list(wanted))]
    if mesh is not None:
        pairs.append(("mesh", layout.mesh, mesh))
    if shape is not None:
        pairs.append(("shape", layout.shape, tuple(shape)))
    if dtype is not None:
        pairs.append(("dtype", layout.dtype, np.dtype(dtype)))
    if chunks is not None and wanted == layout.placements:
        sizes = make_layout(layout.mesh, wanted, layout.shape, layout.dtype, chunks).chunks
        pairs.append(("sizes of the parts", layout.chunks, sizes))
    wrong = [f"{what}: {got!r}, expected {want!r}" for what, got, want in pairs if got != want]
    if wrong:
        raise AssertionError("; ".join(wrong))


def assert_bytes_moved(x: DTensor, expected: int | Plan | None = None) -> np.ndarray[Any, Any]:
    """Compute all blocks of a DTensor and fail unless ranks load just so many bytes of one another.

    Parameters
    ----------
    expected : int or Plan, optional
        Bytes over all ranks, or the plan that says so; by default what ``x.explain()`` says.

    Returns
    -------
    ndarray
        The value of `x`.

    Notes
    -----
    The program of all ranks runs in this thread, without a cluster, so nothing that ran before is used again. Only if it starts
    from persisted arrays does it run where they are.

    **Communication**: what is counted.

    Raises
    ------
    AssertionError
        Another number of bytes was loaded.

    Examples
    --------
    >>> import daskmesh as dm
    >>> from daskmesh.testing import assert_bytes_moved
    >>> x = dm.zeros((4, 4), mesh=dm.init_mesh(2, ["x"]), placements=[dm.Shard(0)])
    >>> assert_bytes_moved(x.reshard([dm.Shard(1)]), 64).shape
    (4, 4)
    >>> assert_bytes_moved(x + 1, 64)
    Traceback (most recent call last):
    AssertionError: ranks loaded 0 B of one another, expected 64 B
    """
    plan = x.explain() if expected is None else expected
    want = plan if isinstance(plan, int) else plan.total_bytes
    value: np.ndarray[Any, Any]
    value, moved = _run_there(x) if futures_of(x) else _run_here(x)
    if moved != want:
        raise AssertionError(f"ranks loaded {format_bytes(moved)} of one another, expected {format_bytes(want)}")
    return value


def _run_here(x: DTensor) -> tuple[Any, int]:
    before = _bytes(transport.stats())
    blocks = dask.get(x.__dask_graph__(), x.__dask_keys__())
    return gather(blocks, x.layout), _bytes(transport.stats()) - before


def _run_there(x: DTensor) -> tuple[Any, int]:
    client = default_client()
    before = sum(client.run(_loaded_by_worker).values())
    y = x.persist()
    wait(y)
    moved = sum(client.run(_loaded_by_worker).values()) - before
    return y.compute(), moved


def _loaded_by_worker(dask_worker: Any) -> int:
    return _bytes(transport.stats(dask_worker.address))


def _bytes(stats: dict[str, dict[str, int]]) -> int:
    return sum(road["bytes"] for road in stats.values())
