"""Who am I: questions that only make sense inside a task of a rank."""

from __future__ import annotations

from daskmesh.mesh import CURRENT_RANK, ProcessMesh

__all__ = ["get_coordinate", "get_rank"]


def get_rank() -> int:
    """The rank whose task is running.

    **Communication**: none.

    Raises
    ------
    RuntimeError
        Called outside a rank's task: the client drives all ranks and is none of them.

    Examples
    --------
    >>> get_rank()
    Traceback (most recent call last):
    ...
    RuntimeError: get_rank() has no answer on the client, which drives all ranks and is none of them; call it inside ...
    """
    return _current("get_rank()")


def get_coordinate(mesh: ProcessMesh) -> tuple[int, ...]:
    """The coordinate in `mesh` of the rank whose task is running.

    **Communication**: none.

    Raises
    ------
    RuntimeError
        Called outside a rank's task.
    ValueError
        The rank is not in `mesh`.

    Examples
    --------
    >>> mesh = ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
    >>> token = CURRENT_RANK.set(2)  # as a task of rank 2 does
    >>> get_coordinate(mesh)
    (1, 0)
    >>> CURRENT_RANK.reset(token)
    """
    return mesh.coordinate(_current("get_coordinate(mesh)"))


def _current(call: str) -> int:
    rank = CURRENT_RANK.get()
    if rank is None:
        raise RuntimeError(
            f"{call} has no answer on the client, which drives all ranks and is none of them; call it inside a "
            "function given to local_map, dtensor_from_local or dtensor_from_fn, or use mesh.process_ids and "
            "mesh.coordinate(rank) here"
        )
    return rank
