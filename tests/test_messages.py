"""The exact words of the likeliest mistakes: what was asked, sizes and names, and what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from daskmesh.layout import make_layout
from daskmesh.mesh import ProcessMesh, init_mesh
from daskmesh.placement import Partial, PlacementError, Replicate, Shard

MESH = init_mesh((2, 4), ("dp", "tp"))


def place(placements: Any, shape: tuple[int, ...] = (6, 8), mesh: Any = MESH, chunks: Any = None) -> Callable[[], Any]:
    return lambda: make_layout(mesh, placements, shape, "f8", chunks)


PURE: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "unknown mesh dim": (
        place({"dpp": Shard(0)}), PlacementError,
        "mesh has no dim named 'dpp', its dims are ['dp', 'tp']; did you mean 'dp'?",
    ),
    "unknown mesh dim, nothing like it": (
        lambda: MESH.get_dim_size("model"), PlacementError,
        "mesh has no dim named 'model', its dims are ['dp', 'tp']",
    ),
    "mesh dim number": (
        lambda: MESH.get_dim_size(2), PlacementError,
        "mesh dim 2 is out of range for a mesh of 2 dims ['dp', 'tp']",
    ),
    "mesh dim of another type": (
        lambda: MESH.get_dim_size(1.0), TypeError,  # type: ignore[arg-type]
        "a mesh dim is a name or an int, got 1.0; the names are ['dp', 'tp']",
    ),
    "shard dim out of range": (
        place([Shard(0), Shard(2)]), PlacementError,
        "Shard(2) on mesh dim 'tp' of size 4 is out of range for a tensor of 2 dim(s); use Shard(-2) to Shard(1)",
    ),
    "negative shard dim out of range": (
        place([Shard(-3)]), PlacementError,
        "Shard(-3) on mesh dim 'dp' of size 2 is out of range for a tensor of 2 dim(s); use Shard(-2) to Shard(1)",
    ),
    "shard of a scalar": (
        place([Shard(0)], ()), PlacementError,
        "Shard(0) on mesh dim 'dp' of size 2 is out of range for a 0-d tensor, which has no dim to cut; "
        "use Replicate() or Partial()",
    ),
    "too many placements": (
        place([Shard(0), Replicate(), Replicate()]), PlacementError,
        "3 placements [Shard(0), Replicate(), Replicate()] for a mesh of 2 dim(s) ['dp', 'tp'] of sizes (2, 4); give at most 2",
    ),
    "one mesh dim twice": (
        place({"dp": Shard(0), 0: Shard(1)}), PlacementError,
        "mesh dim 'dp' is given two placements in {'dp': Shard(0), 0: Shard(1)}",
    ),
    "a bare placement": (
        place(Shard(1)), TypeError,
        "placements: expected one placement per mesh dim ['dp', 'tp'], as a sequence or a mapping by name, "
        "got Shard(1); write [Shard(1)]",
    ),
    "a string": (
        place("dp"), TypeError,
        "placements: expected one placement per mesh dim ['dp', 'tp'], as a sequence or a mapping by name, "
        "got 'dp'; write [Shard(0)]",
    ),
    "a tensor dim for a placement": (
        place([0]), TypeError,
        "placement of mesh dim 'dp' of size 2: expected Shard, Replicate or Partial, got 0; write e.g. Shard(0)",
    ),
    "a class for a placement": (
        place([Shard(0), Replicate]), TypeError,
        "placement of mesh dim 'tp' of size 4: expected Shard, Replicate or Partial, got <class 'daskmesh.placement.Replicate'>; "
        "write e.g. Shard(0)",
    ),
    "no mesh": (
        place([Shard(0)], mesh=[0, 1]), TypeError,
        "mesh: expected a ProcessMesh, got list [0, 1]; write dm.ProcessMesh([0, 1])",
    ),
    "part sizes": (
        place([Shard(0)], chunks=[(3, 4), None]), PlacementError,
        "tensor dim 0 of size 6 is cut over mesh dims ['dp'] into 2 parts; the sizes (3, 4) (sum 7) do not fit",
    ),
    "shard without an int": (lambda: Shard("0"), TypeError, "Shard(dim) takes an int, got '0'; write e.g. Shard(0)"),
    "shard of a bool": (lambda: Shard(True), TypeError, "Shard(dim) takes an int, got True; write e.g. Shard(0)"),
    "unknown reduce type": (
        lambda: Partial("mean"), PlacementError,
        "Partial('mean'): unknown reduce type; known: sum, max, min, prod, avg, any, all",
    ),
    "reduce type of another type": (
        lambda: Partial(0), TypeError,  # type: ignore[arg-type]
        "Partial(reduce_type) takes a ReduceType or one of ['sum', 'max', 'min', 'prod', 'avg', 'any', 'all'], got 0",
    ),
    "a rank twice": (
        lambda: ProcessMesh([[0, 1], [1, 2]]), ValueError,
        "ProcessMesh(mesh): rank(s) [1] appear twice; every rank has one coordinate",
    ),
    "a negative rank": (lambda: ProcessMesh([0, -1]), ValueError, "ProcessMesh(mesh): rank -1 is negative"),
    "ranks that are floats": (
        lambda: ProcessMesh([0.0, 1.0]), TypeError, "ProcessMesh(mesh): ranks are integers, got float64 in [0.0, 1.0]",
    ),
    "ranks that are bools": (
        lambda: ProcessMesh([True, False]), TypeError, "ProcessMesh(mesh): ranks are integers, got bool in [True, False]",
    ),
    "ragged ranks": (
        lambda: ProcessMesh([[0, 1], [2]]), ValueError,
        "ProcessMesh(mesh): the rows of a nested list must be equally long, got [[0, 1], [2]]",
    ),
    "no rank": (
        lambda: ProcessMesh([]), ValueError,
        "ProcessMesh(mesh): a mesh has at least one dim and one rank, got []; write e.g. [0]",
    ),
    "a mesh of an int": (
        lambda: ProcessMesh(4), ValueError, "ProcessMesh(mesh): a mesh has at least one dim and one rank, got 4; write e.g. [0]",
    ),
    "too many names": (
        lambda: ProcessMesh([0, 1], ["x", "y"]), ValueError,
        "ProcessMesh(dim_names): 2 names ['x', 'y'] for a mesh of shape (2,)",
    ),
    "a name twice": (
        lambda: ProcessMesh([[0, 1]], ["x", "x"]), ValueError, "ProcessMesh(dim_names): a name appears twice in ['x', 'x']",
    ),
    "one string of names": (
        lambda: ProcessMesh([0, 1], "x"), TypeError,
        "ProcessMesh(dim_names) takes one name per mesh dim, got the string 'x'; write ['x']",
    ),
    "a name that is no string": (
        lambda: ProcessMesh([0, 1], [0]), TypeError,  # type: ignore[list-item]
        "ProcessMesh(dim_names): names are non-empty strings, got [0]",
    ),
    "no ranks along a dim": (
        lambda: init_mesh((2, 0)), ValueError, "init_mesh(shape): every mesh dim needs at least one rank, got (2, 0)",
    ),
    "a mesh size that is no int": (
        lambda: init_mesh((2.0,)), TypeError,  # type: ignore[arg-type]
        "init_mesh(shape) takes a sequence of ints, one per mesh dim, got (2.0,)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PURE)
def test_pure(case: str) -> None:
    call, error, text = PURE[case]
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) in (error, PlacementError)
    assert str(caught.value) == text


def test_placement_error_is_a_value_error() -> None:
    assert issubclass(PlacementError, ValueError)
