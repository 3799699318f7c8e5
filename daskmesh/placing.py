"""Placements as people give them: in mesh-dim order or by name, some left out, tensor dims counted from the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from daskmesh.mesh import ProcessMesh
from daskmesh.placement import Placement, PlacementError, Replicate, Shard

__all__ = ["asked", "normalise_placements"]


@contextmanager
def asked(call: str) -> Iterator[None]:
    """Errors begin with what was asked for."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if not call:
            raise
        raise type(error)(f"{call}: {error}") from None


def normalise_placements(placements: Any, mesh: ProcessMesh, ndim: int | None, call: str = "") -> tuple[Placement, ...]:
    """One placement per mesh dim, tensor dims non-negative; `ndim` None leaves the dims unchecked.

    Messages begin with `call`, what the caller was asked for.

    Examples
    --------
    >>> import daskmesh as dm
    >>> from daskmesh.placing import normalise_placements
    >>> normalise_placements({"y": dm.Shard(-1)}, dm.init_mesh((2, 2), ("x", "y")), 2)
    (Replicate(), Shard(1))
    """
    with asked(call):
        return _normalised(placements, mesh, ndim)


def _normalised(placements: Any, mesh: ProcessMesh, ndim: int | None) -> tuple[Placement, ...]:
    if not isinstance(mesh, ProcessMesh):
        raise TypeError(f"mesh: expected a ProcessMesh, got {type(mesh).__name__} {mesh!r}; write dm.ProcessMesh([0, 1])")
    if type(placements) is tuple and len(placements) == mesh.ndim and all(map(_settled, placements)):
        given: list[Any] = list(placements)
    elif isinstance(placements, Mapping):
        given = _by_name(placements, mesh)
    elif isinstance(placements, Sequence) and not isinstance(placements, str):
        given = list(placements)
    else:
        shown = f"[{placements!r}]" if isinstance(placements, Placement) else "[Shard(0)]"
        raise TypeError(
            f"placements: expected one placement per mesh dim {list(mesh.dim_names)}, as a sequence or a mapping by "
            f"name, got {placements!r}; write {shown}"
        )
    if len(given) > mesh.ndim:
        raise PlacementError(
            f"{len(given)} placements {given} for a mesh of {mesh.ndim} dim(s) {list(mesh.dim_names)} of sizes "
            f"{mesh.shape}; give at most {mesh.ndim}"
        )
    given += [Replicate()] * (mesh.ndim - len(given))
    return tuple(_placed(p, m, mesh, ndim) for m, p in enumerate(given))


def _settled(p: Any) -> bool:
    return isinstance(p, Placement)


def _by_name(placements: Mapping[Any, Any], mesh: ProcessMesh) -> list[Any]:
    given: list[Any] = [Replicate()] * mesh.ndim
    seen: set[int] = set()
    for name, p in placements.items():
        m = mesh.dim_index(name)
        if m in seen:
            raise PlacementError(f"mesh dim {mesh.dim_names[m]!r} is given two placements in {dict(placements)!r}")
        seen.add(m)
        given[m] = p
    return given


def _placed(p: Any, m: int, mesh: ProcessMesh, ndim: int | None) -> Placement:
    where = f"mesh dim {mesh.dim_names[m]!r} of size {mesh.shape[m]}"
    if not isinstance(p, Placement):
        raise TypeError(f"placement of {where}: expected Shard, Replicate or Partial, got {p!r}; write e.g. Shard(0)")
    if ndim is None or not isinstance(p, Shard):
        return p
    if not -ndim <= p.dim < ndim:
        what = "a 0-d tensor, which has no dim to cut; use Replicate() or Partial()" if ndim == 0 else (
            f"a tensor of {ndim} dim(s); use Shard({-ndim}) to Shard({ndim - 1})"
        )  # fmt: skip
        raise PlacementError(f"{p!r} on {where} is out of range for {what}")
    return p if p.dim >= 0 else Shard(p.dim + ndim)
