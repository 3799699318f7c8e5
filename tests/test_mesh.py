"""The mesh as a value: slices, look-ups, submeshes, equality. No cluster."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import numpy as np
import pytest

from daskmesh.mesh import CURRENT_RANK, ProcessMesh, init_mesh
from daskmesh.placement import PlacementError

MESH = ProcessMesh([[2, 4, 5], [0, 1, 3]], dim_names=["x", "y"])
CUBE = init_mesh((2, 2, 2), ("pp", "dp", "mp"))


def on_rank(rank: int, call: Any) -> Any:
    token = CURRENT_RANK.set(rank)
    try:
        return call()
    finally:
        CURRENT_RANK.reset(token)


def parts(mesh: ProcessMesh) -> tuple[Any, list[str]]:
    return mesh.mesh.tolist(), list(mesh.dim_names)


def test_attributes() -> None:
    assert (MESH.shape, MESH.ndim, MESH.size) == ((2, 3), 2, 6)
    assert MESH.dim_names == ("x", "y")
    assert MESH.process_ids == (2, 4, 5, 0, 1, 3)
    assert MESH.mesh.tolist() == [[2, 4, 5], [0, 1, 3]]
    assert all(type(r) is int for r in MESH.process_ids)
    assert repr(MESH) == "ProcessMesh([[2, 4, 5], [0, 1, 3]], dim_names=['x', 'y'])"
    assert eval(repr(MESH)) == MESH


@pytest.mark.parametrize("ranks", [np.arange(6).reshape(2, 3), [[0, 1, 2], [3, 4, 5]], ((0, 1, 2), (3, 4, 5)), range(6)])
def test_what_a_mesh_is_made_of(ranks: Any) -> None:
    mesh = ProcessMesh(ranks)
    assert mesh.process_ids == tuple(range(6))
    assert mesh.dim_names == ("d0", "d1")[: mesh.ndim]


@pytest.mark.parametrize(
    ("index", "want"),
    [
        (0, ([2, 4, 5], ["y"])),
        (-1, ([0, 1, 3], ["y"])),
        ((slice(None), 0), ([2, 0], ["x"])),
        ((0, 0), ([2], ["d0"])),
        ((slice(None), slice(1, None)), ([[4, 5], [1, 3]], ["x", "y"])),
        ((slice(None), slice(None, None, -1)), ([[5, 4, 2], [3, 1, 0]], ["x", "y"])),
        (slice(1, 2), ([[0, 1, 3]], ["x", "y"])),
        (Ellipsis, ([[2, 4, 5], [0, 1, 3]], ["x", "y"])),
        ((Ellipsis, 1), ([4, 1], ["x"])),
        ((1, Ellipsis), ([0, 1, 3], ["y"])),
        ((1, Ellipsis, 2), ([3], ["d0"])),
        (np.int64(1), ([0, 1, 3], ["y"])),
        ((), ([[2, 4, 5], [0, 1, 3]], ["x", "y"])),
    ],
    ids=repr,
)
def test_slices(index: Any, want: Any) -> None:
    """An int drops the first name, a slice keeps its own."""
    assert parts(MESH[index]) == want


@pytest.mark.parametrize(
    ("index", "error", "text"),
    [
        (2, IndexError, "out of bounds"),
        ((0, 0, 0), IndexError, r"too many indices for a mesh of 2 dims \['x', 'y'\]"),
        ([0, 1], TypeError, "indexed by ints, slices and dim names"),
        (np.array([0, 1]), TypeError, "indexed by ints, slices and dim names"),
        (True, TypeError, "indexed by ints, slices and dim names"),
        (1.0, TypeError, "indexed by ints, slices and dim names"),
        (None, TypeError, "indexed by ints, slices and dim names"),
        ((Ellipsis, Ellipsis), TypeError, "indexed by ints, slices and dim names"),
        (("x", 0), TypeError, "indexed by ints, slices and dim names"),
        (slice(0, 0), ValueError, "at least one dim and one rank"),
        ("z", PlacementError, "mesh has no dim named 'z'"),
    ],
    ids=repr,
)
def test_bad_slices(index: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        MESH[index]


def test_coordinates() -> None:
    coords = list(itertools.product(range(2), range(3)))
    assert [MESH.coordinate(r) for r in MESH.process_ids] == coords
    assert [MESH.rank_at(c) for c in coords] == list(MESH.process_ids)
    assert MESH.coordinate(np.int64(3)) == (1, 2)
    assert 3 in MESH
    assert 9 not in MESH
    with pytest.raises(ValueError, match=r"rank 9 is not in ProcessMesh\(.*its ranks are \[2, 4, 5, 0, 1, 3\]"):
        MESH.coordinate(9)
    for coord in ((0, 3), (-1, 0), (2, 0)):
        with pytest.raises(IndexError, match=r"lies outside a mesh of shape \(2, 3\)"):
            MESH.rank_at(coord)
    with pytest.raises(ValueError, match="longer"):
        MESH.rank_at((0,))


def test_rank_by_dim_and_process_id() -> None:
    look = MESH.get_rank_by_dim_and_process_id
    assert (look("x", 3), look("y", 3), look(0, 3), look(-1, 3)) == (1, 2, 1, 2)
    assert (look("x", 9), look("y", 9)) == (-1, -1)
    with pytest.raises(PlacementError, match="no dim named 'z'"):
        look("z", 9)


def test_dim_sizes() -> None:
    assert [MESH.get_dim_size(d) for d in ("x", "y", 0, 1, -1, -2, np.int64(1))] == [2, 3, 2, 3, 3, 2, 3]


@pytest.mark.parametrize(
    ("mesh", "name", "index", "want"),
    [
        (MESH, "y", None, ([[2, 0], [4, 1], [5, 3]], ["y", "x"])),
        (MESH, "x", None, ([[2, 4, 5], [0, 1, 3]], ["x", "y"])),
        (MESH, "y", 0, ([2, 0], ["x"])),
        (MESH, "y", -1, ([5, 3], ["x"])),
        (CUBE, "mp", None, ([[[0, 2], [4, 6]], [[1, 3], [5, 7]]], ["mp", "pp", "dp"])),
        (CUBE, "dp", 1, ([[2, 3], [6, 7]], ["pp", "mp"])),
        (ProcessMesh([4, 7], ["x"]), "x", 1, ([7], ["x"])),
    ],
)
def test_mesh_with_dim(mesh: ProcessMesh, name: str, index: int | None, want: Any) -> None:
    assert parts(mesh.get_mesh_with_dim(name, index)) == want


def test_mesh_with_dim_refuses() -> None:
    with pytest.raises(IndexError, match="index 3 is outside mesh dim 'y' of size 3"):
        MESH.get_mesh_with_dim("y", 3)
    with pytest.raises(TypeError, match="takes an int"):
        MESH.get_mesh_with_dim("y", slice(0, 1))  # type: ignore[arg-type]
    with pytest.raises(PlacementError, match="no dim named 'z'"):
        MESH.get_mesh_with_dim("z")


def test_submesh_with_dim() -> None:
    assert on_rank(0, lambda: parts(MESH["y"])) == ([0, 1, 3], ["y"])
    assert on_rank(0, lambda: parts(MESH["x"])) == ([2, 0], ["x"])
    assert on_rank(5, lambda: parts(MESH.get_submesh_with_dim("x"))) == ([5, 3], ["x"])
    assert on_rank(5, lambda: parts(CUBE["dp", "mp"])) == ([[4, 5], [6, 7]], ["dp", "mp"])
    assert on_rank(5, lambda: parts(CUBE["mp", "dp"])) == ([[4, 6], [5, 7]], ["mp", "dp"])
    assert on_rank(5, lambda: CUBE["pp", "dp", "mp"]) == CUBE


def test_submesh_needs_a_rank_of_the_mesh() -> None:
    with pytest.raises(RuntimeError, match=r"called on the client, which is no rank; call it inside a local_map function"):
        MESH.get_submesh_with_dim("x")
    with pytest.raises(RuntimeError, match=r"rank 9, which is not in ProcessMesh\(.*; check `get_rank\(\) in mesh`"):
        on_rank(9, lambda: MESH["x"])
    with pytest.raises(PlacementError, match=r"a mesh dim is named twice in \['x', 'x'\]"):
        on_rank(0, lambda: MESH["x", "x"])


def test_equality_and_hash() -> None:
    same = ProcessMesh(np.array([[2, 4, 5], [0, 1, 3]], "u1"), ("x", "y"))
    others = [
        ProcessMesh([[2, 4, 5], [0, 1, 3]], ["x", "z"]),
        ProcessMesh([[2, 4, 5], [0, 3, 1]], ["x", "y"]),
        ProcessMesh([[2, 4], [5, 0], [1, 3]], ["x", "y"]),
        ProcessMesh([2, 4, 5, 0, 1, 3], ["x"]),
    ]
    assert same == MESH
    assert hash(same) == hash(MESH)
    assert len({MESH, same, *others}) == 5
    assert all(m != MESH for m in others)
    assert MESH != "mesh"


@pytest.mark.parametrize("mesh", [MESH, CUBE, ProcessMesh([7])])
def test_pickle_and_copy(mesh: ProcessMesh) -> None:
    mesh.coordinate(mesh.process_ids[0])  # fills a cache that does not travel
    for again in (pickle.loads(pickle.dumps(mesh)), copy.deepcopy(mesh), copy.copy(mesh)):
        assert again == mesh
        assert hash(again) == hash(mesh)
        assert again.coordinate(again.process_ids[-1]) == mesh.coordinate(mesh.process_ids[-1])


def test_immutable() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        MESH.shape = (6,)  # type: ignore[misc]
    with pytest.raises(AttributeError, match="immutable"):
        MESH._ids = ()
    MESH.mesh[0, 0] = 99
    assert MESH.process_ids[0] == 2


def test_init_mesh() -> None:
    assert parts(init_mesh((2, 3), ("dp", "tp"))) == ([[0, 1, 2], [3, 4, 5]], ["dp", "tp"])
    assert init_mesh(4) == init_mesh([4]) == ProcessMesh([0, 1, 2, 3])
