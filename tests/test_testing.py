"""The pytest plugin in a suite of its own, and the assertions."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

import daskmesh as dm
from daskmesh.testing import assert_bytes_moved, assert_layout

pytest_plugins = ["pytester"]

SUITE = """
    import dask
    import numpy as np
    import pytest
    from distributed import default_client

    import daskmesh as dm
    from daskmesh.testing import assert_bytes_moved, assert_layout

    NUMBERS = []

    def test_without_set_up(daskmesh_mesh, daskmesh_rng):
        mesh = daskmesh_mesh((2, 3), ("rows", "columns"))
        a = daskmesh_rng.normal(size=(7, 5))
        x = dm.shard_tensor(a, mesh, [dm.Shard(0), dm.Shard(1)])
        y = x.reshard([dm.Replicate()])
        assert_layout(y, [], mesh=mesh, shape=(7, 5), dtype=float)
        np.testing.assert_array_equal(assert_bytes_moved(y), a)

    @pytest.mark.parametrize("processes", [False, True])
    def test_clusters(daskmesh_cluster, daskmesh_mesh, processes):
        client = daskmesh_cluster(1, processes=processes)
        assert default_client() is client
        x = dm.arange(6, mesh=daskmesh_mesh(3), placements=[dm.Shard(0)])
        np.testing.assert_array_equal(x.compute(), np.arange(6))
        assert dm.init_parallel_env().client is client
        assert len(client.scheduler_info()["workers"]) == 1

    def test_the_last_cluster_was_left(daskmesh_cluster):
        assert dm.get_world_size() == 1
        first = daskmesh_cluster(1)
        assert dm.init_parallel_env().client is first
        second = daskmesh_cluster(2)
        assert dm.init_parallel_env().client is second

    @pytest.mark.parametrize("i", [0, 1])
    def test_seeds(daskmesh_seed, i):
        NUMBERS.append(daskmesh_seed)
        assert len(set(NUMBERS)) == len(NUMBERS)
        print("seed", daskmesh_seed)
"""


@pytest.fixture(autouse=True)
def _no_other_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.mark.processes
def test_the_plugin_in_a_suite_of_its_own(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_subprocess("-p", "daskmesh.testing", "-v")
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines(["daskmesh: --daskmesh-seed=0"])


def test_seeds_are_repeated_and_can_be_chosen(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(daskmesh_seed, daskmesh_rng): print('seed', daskmesh_seed, daskmesh_rng.integers(1000))")

    def seeds(*options: str) -> list[str]:
        result = pytester.runpytest_inprocess("-p", "daskmesh.testing", "-s", *options)
        result.assert_outcomes(passed=1)
        return [line for line in result.outlines if "seed " in line]

    first, other = seeds(), seeds("--daskmesh-seed=1")
    assert first == seeds()
    assert first != other


def test_the_entry_point_names_the_module() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"daskmesh": "daskmesh.testing"}


def table(size: int = 3, shape: tuple[int, ...] = (5, 3)) -> dm.DTensor:
    return dm.shard_tensor(np.arange(np.prod(shape)).reshape(shape), dm.init_mesh(size, ["x"]), [dm.Shard(0)])


@pytest.mark.usefixtures("threads")
def test_assert_layout_takes_what_is_so() -> None:
    x = table()
    assert_layout(x, [dm.Shard(0)])
    assert_layout(x, {"x": dm.Shard(-2)}, mesh=x.process_mesh, shape=[5, 3], dtype="i8", chunks=[(2, 2, 1), (3,)])
    assert_layout(x.reshard([]), [], chunks=[None, None])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"placements": [dm.Shard(1)]}, r"placements: \[Shard\(0\)\], expected \[Shard\(1\)\]"),
        ({"placements": []}, r"expected \[Replicate\(\)\]"),
        ({"placements": [dm.Shard(0)], "shape": (5,)}, r"shape: \(5, 3\), expected \(5,\)"),
        ({"placements": [dm.Shard(0)], "dtype": "f4"}, "dtype: dtype.'int64'., expected dtype.'float32'."),
        ({"placements": [dm.Shard(0)], "chunks": [(1, 2, 2), None]}, r"sizes of the parts: \(\(2, 2, 1\), \(3,\)\)"),
        ({"placements": [dm.Partial()], "dtype": "f4"}, "placements: .*; dtype: "),
        ({"placements": [dm.Shard(0)], "mesh": dm.init_mesh(3, ["y"])}, "mesh: ProcessMesh"),
    ],
)
def test_assert_layout_names_what_differs(wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_layout(table(), **wanted)


def test_assert_layout_of_a_plain_array() -> None:
    with pytest.raises(AssertionError, match="expected a DTensor, got ndarray"):
        assert_layout(np.zeros(3), [])  # type: ignore[arg-type]


@pytest.mark.usefixtures("threads")
def test_bytes_are_those_of_the_plan_of_all_replicas() -> None:
    x = table()
    y = x.reshard([dm.Replicate()])
    value = assert_bytes_moved(y)
    np.testing.assert_array_equal(value, np.arange(15).reshape(5, 3))
    assert_bytes_moved(y, 2 * 15 * 8)
    assert_bytes_moved(y, y.explain())
    with pytest.raises(AssertionError, match="ranks loaded 240 B of one another, expected 0 B"):
        assert_bytes_moved(y, 0)


@pytest.mark.processes
def test_bytes_from_persisted_arrays_are_counted_on_their_workers(processes: Client) -> None:
    x = table(2).persist()
    y = x.reshard([dm.Shard(1)])
    np.testing.assert_array_equal(assert_bytes_moved(y), x.compute())
    with pytest.raises(AssertionError, match="expected 1 B"):
        assert_bytes_moved(x.reshard([dm.Replicate()]), 1)
