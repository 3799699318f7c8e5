"""Handles of symmetric tensors and signals: making them, freeing them, sending them to ranks.

Nothing here looks at the arguments of operations (`windows` does) or carries them out (`shmem_ops`); the functions that people
call are in `onesided` and `signals`.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np

from daskmesh.layout import Layout
from daskmesh.mesh import CURRENT_RANK, ProcessMesh
from daskmesh.registrar import Registrar
from daskmesh.symmetric import freed
from daskmesh.world import World, world_for

__all__ = ["AtomicType", "CmpType", "ShmemSignal", "ShmemTensor", "ShmemView", "create", "integer"]

# Filled by a higher floor: methods of handles that work on the client too.
METHODS: dict[str, Callable[..., Any]] = {}

_MADE_BY = Registrar  # importing it makes every scheduler that gets daskmesh's plugin run one


class AtomicType(Enum):
    """What a put or a signal does with what is there.

    Examples
    --------
    >>> import daskmesh as dm
    >>> [how.name for how in dm.AtomicType]
    ['SET', 'ADD', 'MAX', 'MIN']
    """

    SET = "set"
    ADD = "add"
    MAX = "max"
    MIN = "min"


class CmpType(Enum):
    """How a wait compares a signal with the value waited for.

    Examples
    --------
    >>> import daskmesh as dm
    >>> [compare.value for compare in dm.CmpType]
    ['==', '!=', '<', '<=', '>', '>=']
    """

    EQ = "=="
    NE = "!="
    LT = "<"
    LE = "<="
    GT = ">"
    GE = ">="


class _Symmetric:
    """What handles of symmetric tensors and signals share. A handle is small and may be closed over by a rank's function."""

    def __init__(self, id_: str, title: str, mesh: ProcessMesh, world: str, owner: World | None = None) -> None:
        self.id = id_
        self.title = title
        self.mesh = mesh
        self.world = world
        self.freed = False
        self.pending: list[Any] = []  # tokens of the last operations recorded on the client
        self._owner = owner

    @property
    def n_pes(self) -> int:
        """Number of PEs; PE i is the i-th rank of `mesh`."""
        return self.mesh.size

    def pe_of(self, rank: int, call: str) -> int:
        """The PE that a rank is.

        Raises
        ------
        ValueError
            It is none.
        """
        if rank not in self.mesh:
            raise ValueError(f"{call}: rank {rank} is no PE of {self!r}, whose ranks are {list(self.mesh.process_ids)}")
        return self.mesh.process_ids.index(rank)

    def check_open(self) -> None:
        """Raise RuntimeError if it was freed here."""
        if self.freed:
            raise freed(self.title)

    def client(self) -> Any:
        """The client that made it.

        Raises
        ------
        RuntimeError
            Asked on a worker.
        """
        if self._owner is None or CURRENT_RANK.get() is not None:
            raise RuntimeError(f"{self!r}: its life is led by the client that created it, not by a rank")
        return self._owner.client

    def free(self) -> None:
        """Let go of the buffers of all PEs; a second time nothing happens.

        Raises
        ------
        RuntimeError
            Called on a worker.
        """
        client = self.client()
        self.pending.clear()
        if not self.freed:
            self.freed = True
            if client.status == "running":
                client.sync(client.scheduler.daskmesh_symmetric_free, tensor=self.id)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

    def __dask_tokenize__(self) -> Any:
        return (type(self).__name__, self.id)


class ShmemSignal(_Symmetric):
    """Signal slots on every PE, without data; made by `create_shmem_signal`.

    Examples
    --------
    >>> import daskmesh as dm
    >>> with dm.create_shmem_signal("tp", 2) as ready:
    ...     ready
    ShmemSignal('tp', n_pes=2)
    """

    def __repr__(self) -> str:
        return f"ShmemSignal({self.title}, n_pes={self.n_pes})"

    def __reduce__(self) -> Any:
        return ShmemSignal, (self.id, self.title, self.mesh, self.world)


class ShmemTensor(_Symmetric):
    """One equal buffer on every PE, and signal slots; made by `create_shmem_tensor` or `symm_from_dtensor`.

    Free it with `free`, or use it as a context manager: no garbage collector does. Its bytes stay outside Dask's memory
    management.

    Attributes
    ----------
    shape, dtype
        Of the buffer of one PE.
    mesh : ProcessMesh
        PE i is its i-th rank.
    layout : Layout or None
        Of the DTensor whose shards the buffers hold.

    Examples
    --------
    >>> import daskmesh as dm
    >>> with dm.create_shmem_tensor("tp", 2, "float16", [4, 8]) as t:
    ...     t
    ShmemTensor('tp', n_pes=2, shape=(4, 8), dtype=float16)
    """

    def __init__(
        self, id_: str, title: str, mesh: ProcessMesh, world: str, shape: tuple[int, ...], dtype: np.dtype[Any],
        layout: Layout | None = None, owner: World | None = None,
    ) -> None:  # fmt: skip
        super().__init__(id_, title, mesh, world, owner)
        self.shape = shape
        self.dtype = dtype
        self.layout = layout

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    def bounds(self, pe: int | None) -> tuple[int, ...]:
        """Sizes of what is valid in the buffer of a PE: its shard's where the buffers hold those of a DTensor."""
        if self.layout is None or pe is None:
            return self.shape
        return self.layout.local_shape(self.layout.coords()[pe])

    def load(self, box: Any) -> Any:
        """Any box of the *global* array whose shards the buffers hold, whoever holds them; for `symm_from_dtensor`.

        Parameters
        ----------
        box : tuple of slice and int
            Within the global shape, without steps; an int drops the dim.

        Returns
        -------
        array
            A fresh one inside a region; on the client a DTensor, the same on all ranks.

        Notes
        -----
        **Communication**: the elements of the box that this rank does not hold.

        Raises
        ------
        IndexError
            The box goes beyond the array.
        """
        return METHODS["load"](self, box)

    def __repr__(self) -> str:
        return f"ShmemTensor({self.title}, n_pes={self.n_pes}, shape={self.shape}, dtype={self.dtype})"

    def __reduce__(self) -> Any:
        return ShmemTensor, (self.id, self.title, self.mesh, self.world, self.shape, self.dtype, self.layout)


class ShmemView:
    """A view of a symmetric tensor; made by `shmem_view`.

    Examples
    --------
    >>> import daskmesh as dm
    >>> with dm.create_shmem_tensor("tp", 2, "f4", [4, 8]) as t:
    ...     dm.shmem_view(t, [2, 2], [0, 6])
    ShmemView(ShmemTensor('tp', n_pes=2, shape=(4, 8), dtype=float32), offsets=(0, 6), shape=(2, 2))
    """

    def __init__(self, tensor: ShmemTensor, offsets: tuple[int, ...], shape: tuple[int, ...], valid: tuple[int, ...]) -> None:
        self.tensor = tensor
        self.offsets = offsets
        self.shape = shape
        self.valid = valid

    @property
    def dtype(self) -> np.dtype[Any]:
        """Data type."""
        return self.tensor.dtype

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    def __dask_tokenize__(self) -> Any:
        return ("ShmemView", self.tensor.id, self.offsets, self.shape, self.valid)

    def __repr__(self) -> str:
        return f"ShmemView({self.tensor!r}, offsets={self.offsets}, shape={self.shape})"


# -- life ---------------------------------------------------------------------------------------------------------------


def create(
    call: str, group_name: Any, n_pes: Any, mesh: ProcessMesh | None, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> tuple[str, str, ProcessMesh, World]:
    """Make the buffers of all PEs: id, title, mesh and world of the new tensor.

    Raises
    ------
    ValueError
        A group of another size, or beyond the world.
    """
    if CURRENT_RANK.get() is not None:
        raise RuntimeError(f"{call}: called on a rank; create it on the client, and let the function close over the handle")
    if group_name is not None and (not isinstance(group_name, str) or not group_name):
        raise TypeError(f"{call}: group_name is the name of a group of PEs, got {group_name!r}")
    if n_pes is not None and integer(call, "n_pes", n_pes) < 1:
        raise ValueError(f"{call}: n_pes must be at least 1, got {n_pes}")
    if mesh is None:
        if group_name is None or n_pes is None:
            raise TypeError(f"{call}: give group_name and n_pes, or mesh=")
        mesh = ProcessMesh(range(n_pes), [group_name])
    elif n_pes is not None and n_pes != mesh.size:
        raise ValueError(f"{call}: n_pes is {n_pes}, but {mesh!r} has {mesh.size} ranks")
    world = world_for(mesh)
    client: Any = world.client
    if group_name is not None:
        known = client.sync(client.scheduler.daskmesh_symmetric_group, world=world.id, name=group_name, size=mesh.size)
        if known != mesh.size:
            raise ValueError(f"{call}: group {group_name!r} has {known} PEs, not {mesh.size}; use another name")
    title = repr(group_name if group_name is not None else "x".join(mesh.dim_names))
    answer = client.sync(
        client.scheduler.daskmesh_symmetric_create, client=client.id, world=world.id, ranks=mesh.process_ids, title=title,
        shape=shape, dtype=pickle.dumps(dtype),
    )  # fmt: skip
    if answer["status"] != "OK":
        raise pickle.loads(answer["error"])
    return answer["tensor"], title, mesh, world


def integer(call: str, what: str, value: Any) -> int:
    """An int, which a bool is not.

    Examples
    --------
    >>> integer("shmem_load", "src_pe", np.int8(3))
    3
    """
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise TypeError(f"{call}: {what} must be an int, got {value!r}")
    return operator.index(value)
