"""One-sided access to symmetric tensors: load, put, clear.

Every function works in two modes. Inside a function given to `local_map` the rank that calls it does it at once. On the client
it is recorded, and all PEs of the tensor's group do it when a result, or a token that depends on it, is computed: a load gives
a DTensor, what changes something gives a `Token`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from dask._task_spec import TaskRef
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from daskmesh.acting import Acting, array_of, done, region, tokened, tokened_local
from daskmesh.dtensor import DTensor
from daskmesh.exchange import expose_layer
from daskmesh.graph import graph_of
from daskmesh.layers import as_layer
from daskmesh.layout import Layout, make_layout
from daskmesh.mesh import ProcessMesh
from daskmesh.placement import Partial, Shard
from daskmesh.recorded import Token, fresh_name, load_shard, recorded, source, tokens_of
from daskmesh.shmem import METHODS, AtomicType, ShmemTensor, ShmemView
from daskmesh.shmem_ops import actor_of
from daskmesh.views import normal_index, view_shape
from daskmesh.windows import PerRank, Window, box, choice, integers, per_rank, tensor_of, window

__all__ = ["shmem_clear_data", "shmem_get", "shmem_load", "shmem_put", "shmem_store"]

Array = Any


# -- loading ------------------------------------------------------------------------------------------------------------


def shmem_load(
    src: ShmemTensor | ShmemView | DTensor,
    src_pe: PerRank,
    shape: Any = None,
    offsets: Any = None,
    *,
    pred: Any = None,
    valid_shape: Any = None,
    fill_value: Any = 0,
) -> Any:
    """Copy a view of a PE's buffer: what is there at one moment, never half of a change.

    Parameters
    ----------
    src : ShmemTensor, ShmemView or DTensor
        Of a DTensor (on the client only) the shard of `src_pe` is the buffer, with its own bounds.
    src_pe : int, sequence of int, or callable
        The PE, for all ranks or for each: a function is called with the rank number, so that a ring is one call.
    shape, offsets : sequence of int, optional
        Size and place of the view, one int for each dim. By default the whole buffer; `shape` alone is at the front.
    pred : token, collection, or list of these, optional
        What must have happened first. Inside a region the calls before this one have.
    valid_shape : sequence of int, optional
        How much of the view is read, at most `shape`; the view may hang over the edge by the rest.
    fill_value : scalar
        What the rest holds.

    Returns
    -------
    array or DTensor
        Of `shape`. Inside a region a fresh writable array. On the client a DTensor on the mesh of the group: for one PE the same
        on all ranks (`Replicate`), for one each the pieces one after the other (`Shard(0)`).

    Notes
    -----
    **Communication**: the elements of the valid part, from `src_pe`; on one host they are read from its memory.

    Raises
    ------
    TypeError, ValueError
        Of an argument, before anything is submitted; names the dim, and the sizes.
    PELostError
        A PE of the tensor is lost.
    RuntimeError
        The tensor was freed.

    Examples
    --------
    >>> import daskmesh as dm
    >>> with dm.create_shmem_tensor("tp", 2, "i4", [2, 3]) as t:
    ...     put = dm.shmem_put([[1, 2, 3], [4, 5, 6]], [0, 0], t, 1)
    ...     view = dm.shmem_load(t, 1, [2, 2], [0, 2], valid_shape=[2, 1], fill_value=-1, pred=put)
    ...     view.compute(), view.placements
    (array([[ 3, -1],
           [ 6, -1]], dtype=int32), (Replicate(),))
    """
    call = "shmem_load"
    gang = region(call)
    if isinstance(src, DTensor):
        if gang is not None:
            raise TypeError(f"{call}: a DTensor cannot be read inside a region; close over symm_from_dtensor(x) instead")
        return _load_shard(src, src_pe, (shape, offsets, valid_shape), fill_value, pred)
    tensor = tensor_of(call, "src", src)
    acting = Acting(call, tensor, None)
    fill = _fill(call, fill_value, tensor.dtype)
    found = acting.of("src_pe", src_pe, gang)
    if gang is not None:
        pe = acting.each(found)[0]
        view = window(call, src, shape, offsets, valid_shape, pe=pe)
        if gang.trace is not None:
            return gang.traced(view.shape, tensor.dtype)
        return actor_of(gang, call).load(view, pe, fill)
    pes = acting.each(found)
    views = [window(call, src, shape, offsets, valid_shape, pe=pe) for pe in pes]
    layout = _loaded(call, tensor.mesh, [v.shape for v in views], tensor.dtype, alike=isinstance(found, int))
    return array_of(acting, layout, "load", lambda i: (views[i], pes[i], fill), pred)


shmem_get = shmem_load


def _fill(call: str, value: Any, dtype: np.dtype[Any]) -> Any:
    try:
        return np.full((), value, dtype)[()]
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{call}: fill_value {value!r} is no {dtype}: {error}") from None


def _loaded(call: str, mesh: ProcessMesh, shapes: Sequence[tuple[int, ...]], dtype: Any, *, alike: bool) -> Layout:
    """The layout of what all ranks load: replicas, or pieces one after the other."""
    if alike:
        return make_layout(mesh, (), shapes[0], dtype)
    pieces = [shape or (1,) for shape in shapes]
    for pe, piece in enumerate(pieces):
        if piece[1:] != pieces[0][1:]:
            raise ValueError(
                f"{call}: PE 0 would load {shapes[0]} and PE {pe} {shapes[pe]}, which cannot be put one after the other along "
                "dim 0; give shape="
            )
    frame = make_layout(mesh, [Shard(0)] * mesh.ndim, (0, *pieces[0][1:]), dtype)
    sizes = tuple(piece[0] for piece in pieces)
    return frame.replace(shape=(sum(sizes), *pieces[0][1:]), chunks=(sizes, *frame.chunks[1:]))


def _load_shard(x: DTensor, src_pe: PerRank, wanted: tuple[Any, Any, Any], fill_value: Any, pred: Any) -> DTensor:
    """Views of the shards of a DTensor, by tickets for these."""
    call, held = "shmem_load", x.layout
    found = per_rank(call, "src_pe", src_pe, held.mesh.process_ids, held.mesh.size)
    pes = [found] * held.mesh.size if isinstance(found, int) else found
    boxes = [box(call, x, held.local_shape(held.coords()[pe]), *wanted) for pe in pes]
    layout = _loaded(call, held.mesh, [shape for shape, _, _ in boxes], held.dtype, alike=isinstance(found, int))
    node, fill = x._node.as_boundary(), _fill(call, fill_value, held.dtype)
    tickets, exposing = expose_layer(node)
    before = graph_of(node)
    layers = {**before.layers, tickets: as_layer(exposing)}
    deps = {**before.dependencies, tickets: {node.name}}
    exposed = Token(list(exposing), HighLevelGraph(layers, deps), [tickets])
    after = tokens_of(call, pred)
    name = fresh_name("shmem-load") if after else "shmem-load-" + tokenize(node.name, boxes, pes, layout, fill)
    jobs = []
    for coord, pe, (shape, at, valid) in zip(layout.coords(), pes, boxes, strict=True):
        index = (*(0,) * held.lead, *(slice(o, o + n) for o, n in zip(at, valid, strict=True)))
        ticket = TaskRef((tickets, *held.block_index(held.coords()[pe])))
        args = (layout, coord, (index, shape, valid), fill, ticket)
        jobs.append(((name, *layout.block_index(coord)), layout.mesh.rank_at(coord), load_shard, args))
    return DTensor(source(layout, node.world, name, recorded(name, node.world, jobs, after, [exposed])))


def _load_box(tensor: ShmemTensor, given: Any) -> Any:
    call = "load"
    gang = region(call)
    tensor.check_open()
    layout = tensor.layout
    if layout is None:
        raise TypeError(f"{tensor!r} holds no shards of a global array; load(box) is for symm_from_dtensor, use shmem_load")
    if any(isinstance(p, Partial) for p in layout.placements):
        raise ValueError(f"load: {tensor!r} holds terms, {list(layout.placements)}; make it from x.reshard(...) without Partial")
    index = normal_index(given if isinstance(given, tuple) else (given,), layout.shape)
    if gang is not None:
        if gang.trace is not None:
            return gang.traced(view_shape(index), tensor.dtype)
        return actor_of(gang, call).load_box(tensor, index)
    out = make_layout(tensor.mesh, (), view_shape(index), tensor.dtype)
    return array_of(Acting("shmem_load", tensor, None), out, "load_box", lambda i: (tensor, index), None)


METHODS["load"] = _load_box


# -- putting ------------------------------------------------------------------------------------------------------------


def shmem_put(
    src: Any,
    offsets: Any,
    dst: ShmemTensor | ShmemView,
    dst_pe: PerRank,
    *,
    put_op: AtomicType = AtomicType.SET,
    by: Any = None,
    pred: Any = None,
) -> Any:
    """Write an array into a PE's buffer, as a whole and once, however often its task runs.

    Parameters
    ----------
    src : array or DTensor
        What this rank writes. On the client an array is written by every PE that acts, of a DTensor each writes its shard.
    offsets : sequence of int, or callable
        Where, one int for each dim of `dst`; a function is called with the rank number.
    dst : ShmemTensor or ShmemView
    dst_pe : int, sequence of int, or callable
        The PE, for all ranks or for each, as for `shmem_load`.
    put_op : AtomicType
        SET; or ADD, MAX, MIN with what is there. ADD takes half floats into a buffer of float32, else the dtypes are the same.
    by : int or sequence of int, optional
        The PEs that act; by default all.
    pred : token, collection, or list of these, optional
        What must have happened first.

    Returns
    -------
    Token
        Once it is computed (inside a region: now) the data are at the target.

    Notes
    -----
    **Communication**: the elements of `src`, to `dst_pe`.

    Raises
    ------
    TypeError, ValueError
        Of an argument, before anything is submitted.
    PELostError
        A PE of the tensor is lost.

    Examples
    --------
    >>> import daskmesh as dm
    >>> with dm.create_shmem_tensor("tp", 2, "f4", [3]) as t:
    ...     one = dm.shmem_put([1, 2], [1], t, 0, put_op=dm.AtomicType.ADD)
    ...     two = dm.shmem_put([7], [0], t, 0, by=1, pred=one)
    ...     dm.shmem_load(t, 0, pred=two).compute()
    array([7., 2., 4.], dtype=float32)
    """
    how = choice("shmem_put", "put_op", put_op, AtomicType)
    return put("shmem_put", src, offsets, dst, dst_pe, (how, None), (by, pred))


shmem_store = shmem_put


def put(call: str, src: Any, offsets: Any, dst: Any, dst_pe: PerRank, what: tuple[str, Any], who: tuple[Any, Any]) -> Any:
    """A put and, where `what` has more than how to put, a signal with it: a function of the PE that acts."""
    how, signal = what
    by, pred = who
    gang = region(call)
    tensor = tensor_of(call, "dst", dst)
    acting = Acting(call, tensor, by)
    data = src if isinstance(src, DTensor) else _data(src, tensor.dtype)
    _check_dtypes(call, data.dtype, tensor, how)
    found = acting.of("dst_pe", dst_pe, gang)
    if gang is not None:
        if isinstance(data, DTensor):
            raise TypeError(f"{call}: src is a DTensor; inside a region give an array, such as an argument of the function")
        pe = acting.each(found)[0]
        view = _target(call, dst, tuple(data.shape), _at(offsets, gang.rank), pe)
        if gang.trace is not None or not acting.includes(gang.rank):
            return done(tensor)
        sent = None if signal is None else signal(tensor.pe_of(gang.rank, call))
        return actor_of(gang, call).put(view, data, pe, how, sent)
    pes = acting.each(found)
    shapes = _local_shapes(call, data, acting) if isinstance(data, DTensor) else [data.shape] * len(pes)
    views = [
        _target(call, dst, shape, _at(offsets, rank), pe) for shape, rank, pe in zip(shapes, acting.ranks, pes, strict=True)
    ]
    sent = [None if signal is None else signal(pe) for pe in acting.pes]
    if isinstance(data, DTensor):
        return tokened_local(acting, "put", data, lambda i: (views[i],), lambda i: (pes[i], how, sent[i]), pred)
    data = data.copy()  # the caller may write to its array before this is computed
    return tokened(acting, "put", lambda i: (views[i], data, pes[i], how, sent[i]), pred)


def _data(src: Any, dtype: np.dtype[Any]) -> Array:
    return src if hasattr(src, "dtype") and hasattr(src, "shape") else np.asarray(src, dtype)


def _at(offsets: Any, rank: int) -> Any:
    return offsets(rank) if callable(offsets) else offsets


def _target(call: str, dst: Any, shape: tuple[int, ...], offsets: Any, pe: int) -> Window:
    tensor = tensor_of(call, "dst", dst)
    if 0 in shape and len(shape) == tensor.ndim:  # nothing to write, wherever
        integers(call, "offsets", offsets, tensor.ndim, dst)
        return Window(tensor, (0,) * tensor.ndim, shape, shape)
    view = window(call, dst, shape, offsets, pe=pe, what="dst")
    if view.valid != view.shape:
        raise ValueError(f"{call}: src of shape {shape} at offsets {tuple(offsets)} goes beyond the valid part of {dst!r}")
    return view


def _local_shapes(call: str, x: DTensor, acting: Acting) -> list[tuple[int, ...]]:
    layout = x.layout
    missing = [rank for rank in acting.ranks if rank not in layout.mesh]
    if missing:
        raise ValueError(f"{call}: src is on {layout.mesh!r}, without rank {missing[0]} of {acting.handle!r}; reshard it")
    return [layout.local_shape(layout.mesh.coordinate(rank)) for rank in acting.ranks]


def _check_dtypes(call: str, given: Any, tensor: ShmemTensor, how: str) -> None:
    if how == "add" and tensor.dtype == np.float32 and np.dtype(given).name in ("float16", "bfloat16"):
        return
    if given != tensor.dtype:
        raise TypeError(f"{call}: src is {given}, {tensor!r} is not; convert it with src.astype({str(tensor.dtype)!r})")
    if how != "set":
        try:
            {"add": np.add, "max": np.maximum, "min": np.minimum}[how](np.zeros(1, tensor.dtype), np.zeros(1, tensor.dtype))
        except TypeError:
            raise TypeError(f"{call}: put_op {how.upper()} is not defined for {tensor.dtype}; use AtomicType.SET") from None


def shmem_clear_data(
    src: ShmemTensor | ShmemView, shape: Any = None, offsets: Any = None, *, by: Any = None, pred: Any = None
) -> Any:
    """Zero a view of this rank's own buffer; on the client all PEs, or those in `by`, zero theirs.

    Parameters
    ----------
    src, shape, offsets
        The view, as for `shmem_load`.
    by, pred
        As for `shmem_put`.

    Returns
    -------
    Token

    Notes
    -----
    **Communication**: none.

    Examples
    --------
    >>> import daskmesh as dm
    >>> with dm.create_shmem_tensor("tp", 2, "i4", [3]) as t:
    ...     put = dm.shmem_put([1, 2, 3], [0], t, lambda rank: rank)
    ...     clear = dm.shmem_clear_data(t, [2], [0], by=1, pred=put)
    ...     dm.shmem_load(t, lambda rank: rank, pred=clear).compute()
    array([1, 2, 3, 0, 0, 3], dtype=int32)
    """
    call = "shmem_clear_data"
    gang = region(call)
    tensor = tensor_of(call, "src", src)
    acting = Acting(call, tensor, by)
    if gang is not None:
        view = window(call, src, shape, offsets, pe=tensor.pe_of(gang.rank, call))
        if gang.trace is not None or not acting.includes(gang.rank):
            return done(tensor)
        return actor_of(gang, call).clear(tensor, "clear_data", (view.span,), call)
    views = [window(call, src, shape, offsets, pe=pe) for pe in acting.pes]
    return tokened(acting, "clear", lambda i: (tensor, "clear_data", (views[i].span,), call), pred)
