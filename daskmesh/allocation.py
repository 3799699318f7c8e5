"""Symmetric tensors and signals: making them, from nothing or from a DTensor, and viewing them."""

from __future__ import annotations

from typing import Any

import numpy as np

from daskmesh.acting import Acting, settle, tokened_local
from daskmesh.dtensor import DTensor
from daskmesh.mesh import ProcessMesh
from daskmesh.shmem import ShmemSignal, ShmemTensor, ShmemView, create
from daskmesh.windows import integers, tensor_of, window

__all__ = ["create_shmem_signal", "create_shmem_tensor", "shmem_view", "symm_from_dtensor"]


def create_shmem_tensor(
    group_name: str | None = None,
    n_pes: int | None = None,
    dtype: Any = None,
    shape: Any = None,
    *,
    mesh: ProcessMesh | None = None,
) -> ShmemTensor:
    """Make a symmetric tensor: one zeroed buffer of `shape` on each PE, and signal slots.

    Parameters
    ----------
    group_name : str, optional
        Names a group: the ranks 0 to n_pes - 1, PE i being rank i. The name is remembered with its size.
    n_pes : int, optional
        Number of PEs, at most the size of the world.
    dtype : dtype
        Whatever ``np.dtype`` takes, but no objects.
    shape : sequence of int, (k, ...)
        Of the buffer of one PE.
    mesh : ProcessMesh, optional
        The group instead: PE i is the i-th rank of the mesh.

    Returns
    -------
    ShmemTensor
        A handle, which functions given to `local_map` may close over. Free it, or use it as a context manager.

    Notes
    -----
    **Communication**: one message to the scheduler, and from it two to the worker of each PE. Every buffer is zeroed before any
    PE can reach another's.

    Raises
    ------
    TypeError
        A dtype of objects, or an argument of another type.
    ValueError
        A size below 1; another size for a known group; more PEs than a fixed world has ranks.
    MemoryError
        The buffers would not fit a worker's memory limit.

    Examples
    --------
    >>> import daskmesh as dm
    >>> with dm.create_shmem_tensor("tp", 2, "float16", [2, 3]) as t:
    ...     dm.shmem_load(t, 1).compute()
    array([[0., 0., 0.],
           [0., 0., 0.]], dtype=float16)
    """
    call = "create_shmem_tensor"
    if dtype is None or shape is None:
        raise TypeError(f"{call}: give dtype and shape, as in {call}('tp', n_pes=2, dtype='float32', shape=[4, 8])")
    kind = np.dtype(dtype)
    if kind.subdtype is not None:
        raise TypeError(f"{call}: dtype {dtype!r} is one of arrays; give dtype={kind.base.str!r} and add {kind.shape} to shape")
    if not kind.itemsize:
        raise TypeError(f"{call}: elements of dtype {dtype!r} have no bytes; give their size, as in '{kind.kind}8'")
    if kind.hasobject:
        raise TypeError(f"{call}: dtype {kind} holds Python objects, which have no memory to share; use numbers or strings")
    sizes = integers(call, "shape", shape, len(shape) if hasattr(shape, "__len__") else 1, "the buffer")
    for d, n in enumerate(sizes):
        if n < 1:
            raise ValueError(f"{call}: shape {sizes} has size {n} along dim {d}; every size is at least 1")
    id_, title, mesh, world = create(call, group_name, n_pes, mesh, sizes, kind)
    return ShmemTensor(id_, title, mesh, world.id, sizes, kind, owner=world)


def create_shmem_signal(
    group_name: str | None = None, n_pes: int | None = None, *, mesh: ProcessMesh | None = None
) -> ShmemSignal:
    """Make signal slots on each PE of a group, without data.

    Parameters
    ----------
    group_name, n_pes, mesh
        As for `create_shmem_tensor`.

    Notes
    -----
    **Communication**: as `create_shmem_tensor`.

    Examples
    --------
    >>> import daskmesh as dm
    >>> with dm.create_shmem_signal("tp", 2) as ready:
    ...     sent = dm.shmem_signal(ready, 0, 5, target_pe=-1)
    ...     dm.shmem_signal_fetch(ready, 0, pred=sent).compute()
    array([5, 5])
    """
    id_, title, mesh, world = create("create_shmem_signal", group_name, n_pes, mesh, (), np.dtype("u1"))
    return ShmemSignal(id_, title, mesh, world.id, world)


def symm_from_dtensor(x: DTensor) -> ShmemTensor:
    """A symmetric tensor whose buffers hold the shards of a DTensor, each in the front of a buffer as large as the largest.

    Parameters
    ----------
    x : DTensor
        Computed now. Later changes of the buffers do not change it.

    Returns
    -------
    ShmemTensor
        The buffer of a PE counts as large as its shard: loads without `shape` give the shard. ``t.load(box)`` reads any box of
        the global array.

    Notes
    -----
    **Communication**: as `create_shmem_tensor`; the shards stay where they are and are copied once.

    Examples
    --------
    >>> import daskmesh as dm
    >>> x = dm.arange(5, mesh=dm.init_mesh(2, ["x"]), placements=[dm.Shard(0)])
    >>> with dm.symm_from_dtensor(x) as t:
    ...     t.shape, dm.shmem_load(t, 1).compute(), t.load((slice(1, 4),)).compute()
    ((3,), array([3, 4]), array([1, 2, 3]))
    """
    call = "symm_from_dtensor"
    if not isinstance(x, DTensor):
        raise TypeError(f"{call}(x): expected a DTensor, got {type(x).__name__}; use create_shmem_tensor and shmem_put")
    layout = x.layout
    shape = tuple(max(*c, 1) for c in layout.chunks)
    id_, title, mesh, world = create(call, None, None, layout.mesh, shape, layout.dtype)
    tensor = ShmemTensor(id_, title, mesh, world.id, shape, layout.dtype, layout, world)
    tokened_local(Acting(call, tensor, None), "fill", x, lambda i: (tensor,), lambda i: (), None)
    try:
        settle(tensor)
    except BaseException:
        tensor.free()
        raise
    return tensor


def shmem_view(src: ShmemTensor | ShmemView, shape: Any, offsets: Any, *, valid_shape: Any = None) -> ShmemView:
    """A view of a symmetric tensor, to be used in its place.

    Parameters
    ----------
    src : ShmemTensor or ShmemView
    shape, offsets : sequence of int
        Size and place of the view, one int for each dim.
    valid_shape : sequence of int, optional
        How much of the view lies within `src`; by default all of it. The rest reads as the fill value.

    Notes
    -----
    **Communication**: none.

    Examples
    --------
    >>> import daskmesh as dm
    >>> with dm.create_shmem_tensor("tp", 2, "i4", [4, 8]) as t:
    ...     view = dm.shmem_view(t, [2, 2], [0, 6])
    ...     dm.shmem_load(view, 1).shape
    (2, 2)
    """
    call = "shmem_view"
    tensor_of(call, "src", src)
    if shape is None or offsets is None:
        raise TypeError(f"{call}: give shape and offsets, one int for each dim of {src!r}")
    found = window(call, src, shape, offsets, valid_shape)
    return ShmemView(found.tensor, found.offsets, found.shape, found.valid)
