"""Between plain arrays and DTensors: placing data on a mesh, joining local arrays, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import dask
import dask.array as da
import numpy as np
from dask._task_spec import TaskRef
from dask.base import tokenize
from dask.delayed import Delayed
from dask.highlevelgraph import HighLevelGraph

from daskmesh.dtensor import DTensor
from daskmesh.graph import Node, Source, block_of, errors_named, plain, rank_tasks
from daskmesh.layers import TaskLayer
from daskmesh.layout import Coord, Layout, layout_of_locals, make_layout, normalise_placements
from daskmesh.mesh import ProcessMesh
from daskmesh.moves import local_arrays_of, moved, refuse_asynchronous
from daskmesh.placement import Replicate, Shard
from daskmesh.plan import refuse_truth
from daskmesh.protocol import handing_over
from daskmesh.tasks import RankTask
from daskmesh.world import world_for

__all__ = ["dtensor_from_fn", "dtensor_from_local", "dtensor_to_local", "reshard", "shard_tensor", "unshard_dtensor"]

Array = Any


@handing_over
def shard_tensor(data: Any, mesh: ProcessMesh, placements: Any, dtype: Any = None) -> DTensor:
    """Place an array on a mesh.

    Parameters
    ----------
    data : array_like, dask array, or DTensor, shape (n, ...)
        A NumPy array, anything with ``__array__``, nested lists, a scalar; a dask array, which is never gathered on the client.
    mesh : ProcessMesh
    placements : sequence of Placement or mapping
    dtype : dtype, optional
        By default that of `data`.

    Returns
    -------
    DTensor, shape (n, ...)

    Notes
    -----
    The data stay in the graph, so that a lost block can be made again; use `from_callback` for large arrays.

    **Communication**: each part travels once, to the first rank that holds it; from there to its replicas, worker to worker.

    Raises
    ------
    PlacementError
        Placements that do not fit the mesh or the shape.
    TypeError
        `data` is a function, or a value that is not bool would become Partial('any') or Partial('all').

    Examples
    --------
    >>> import numpy as np
    >>> import daskmesh as dm
    >>> x = dm.shard_tensor(np.arange(5), dm.init_mesh(2, ["x"]), [dm.Shard(0)])
    >>> x.local_value(0), x.local_value(1)
    (array([0, 1, 2]), array([3, 4]))
    """
    if isinstance(data, DTensor):
        x = data if dtype is None or data.dtype == dtype else data.astype(dtype)
        return reshard(x, mesh, placements)
    if callable(data) and not hasattr(data, "__array__"):
        raise TypeError(f"shard_tensor(data): got the function {data!r}; use dtensor_from_fn or from_callback")
    array = data if isinstance(data, da.Array) else _as_array(data, "shard_tensor(data)")
    if dtype is not None:
        array = array.astype(dtype)
    if array.dtype == object:
        raise TypeError(f"shard_tensor(data): {type(data).__name__} became an array of objects; give numbers, bools or strings")
    if any(n != n for n in array.shape):
        raise ValueError(f"shard_tensor(data): a dask array of unknown shape {array.shape}; call x.compute_chunk_sizes() first")
    target = make_layout(mesh, placements, array.shape, array.dtype, call="shard_tensor")
    refuse_truth(target, call="shard_tensor")
    world = world_for(mesh).id
    base = _one_replica(target)
    source = _dask_source(array, base, world) if isinstance(array, da.Array) else _array_source(array, base, world)
    return DTensor(moved(source, target))


def _as_array(data: Any, argument: str) -> Array:
    try:
        array = plain(data if hasattr(data, "__array_function__") and hasattr(data, "shape") else np.asarray(data))
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{argument}: {error}") from error
    if array.dtype == object:
        raise TypeError(f"{argument}: {type(data).__name__} became an array of objects; give numbers, bools or strings")
    return array


def _one_replica(target: Layout) -> Layout:
    """The same parts on the ranks that come first: the mesh cut to coordinate 0 along every mesh dim that is not Shard."""
    mesh = target.mesh
    if not target.lead:
        return target
    index = tuple(slice(0, 1) if m in target.lead_axes else slice(None) for m in range(mesh.ndim))
    placements = tuple(p if isinstance(p, Shard) else Replicate() for p in target.placements)
    return Layout(mesh[index], placements, target.shape, target.dtype, target.chunks)


def _array_source(array: Array, base: Layout, world: str) -> Node:
    name = "shard-tensor-" + tokenize(array, base, world)
    tasks = {}
    for coord in base.coords():
        key = (name, *base.block_index(coord))
        part = array[base.box(coord)].copy()  # the caller may write to its array before this one is computed
        tasks[key] = RankTask(key, block_of, part, base, coord, world=world, rank=base.mesh.rank_at(coord))
    return Source.from_tasks(base, world, name, tasks)


def _dask_source(array: da.Array, base: Layout, world: str) -> Node:
    cut = array.rechunk(base.chunks)
    name = "shard-dask-" + tokenize(cut.name, base, world)
    tasks = {}
    for coord in base.coords():
        key = (name, *base.block_index(coord))
        ref = TaskRef((cut.name, *base.part_index(coord)))
        tasks[key] = RankTask(key, block_of, ref, base, coord, world=world, rank=base.mesh.rank_at(coord))
    graph = HighLevelGraph.from_collections(name, TaskLayer(tasks), dependencies=[cut])
    return Source(base, world, name, graph)


def dtensor_from_local(
    locals: Sequence[Array] | Callable[[int], Array], mesh: ProcessMesh, placements: Any, *, shape: Any = None
) -> DTensor:
    """Join local arrays into a DTensor.

    Parameters
    ----------
    locals : list of array, or callable
        One array per rank in row-major mesh order, or a function of the rank *number* that runs on that rank.
    placements : sequence of Placement or mapping
        What the local arrays are: parts, replicas or terms.
    shape : tuple of int, or (tuple, dtype), optional
        For a function: the global shape, cut by the split rule, so that nothing has to run to learn it. Without a dtype the
        function does run, once per rank.

    Returns
    -------
    DTensor
        Real local sizes are summed along each Shard dim.

    Notes
    -----
    **Communication**: the arrays of a list travel to their ranks; of a function's result only shapes travel.

    Raises
    ------
    TypeError
        A single array: every rank has its own, and there is one controller.
    ValueError
        The number of arrays is not the number of ranks, or their sizes do not fit together; names two ranks.

    Examples
    --------
    >>> import numpy as np
    >>> import daskmesh as dm
    >>> mesh = dm.init_mesh(2, ["x"])
    >>> dm.dtensor_from_local([np.zeros((2, 2)), np.ones((1, 2))], mesh, [dm.Shard(0)]).shape
    (3, 2)
    >>> dm.dtensor_from_local(lambda rank: np.arange(3) + rank, mesh, [dm.Partial()]).compute()
    array([1, 3, 5])
    """
    normalise_placements(placements, mesh, None, "dtensor_from_local")
    if callable(locals) and not hasattr(locals, "__array__"):
        return _from_function(locals, mesh, placements, shape)
    if not isinstance(locals, (list, tuple)):
        raise TypeError(
            f"dtensor_from_local(locals): got one {type(locals).__name__}; give a list of {mesh.size} arrays, one per rank, "
            f"or a function that runs on each rank: dtensor_from_local(lambda rank: ..., mesh, placements)"
        )
    if shape is not None:
        raise TypeError("dtensor_from_local(shape=...) is for a function of the rank; the shapes of a list are known")
    if len(locals) != mesh.size:
        raise ValueError(f"dtensor_from_local(locals): {len(locals)} arrays for {mesh.size} ranks {list(mesh.process_ids)}")
    arrays = [_as_array(a, f"dtensor_from_local(locals), rank {r}") for a, r in zip(locals, mesh.process_ids, strict=True)]
    layout = layout_of_locals(mesh, placements, [a.shape for a in arrays], [a.dtype for a in arrays], call="dtensor_from_local")
    world = world_for(mesh).id
    name = "from-local-" + tokenize(arrays, layout, world)
    tasks = {}
    for coord, array in zip(layout.coords(), arrays, strict=True):
        key = (name, *layout.block_index(coord))
        tasks[key] = RankTask(key, block_of, array.copy(), layout, coord, world=world, rank=mesh.rank_at(coord))
    return DTensor(Source.from_tasks(layout, world, name, tasks))


def _from_function(fn: Callable[[int], Array], mesh: ProcessMesh, placements: Any, shape: Any) -> DTensor:
    world = world_for(mesh).id
    if isinstance(shape, (int, np.integer)):
        shape = (int(shape),)
    if shape is not None:
        given, dtype = shape if len(shape) == 2 and not isinstance(shape[0], (int, np.integer)) else (shape, None)
        if dtype is not None:
            layout = make_layout(mesh, placements, given, dtype, call="dtensor_from_local")
            name = "from-local-" + tokenize(fn, layout, world)
            return DTensor(Source.from_tasks(layout, world, name, rank_tasks(layout, world, name, _call_on_rank, (fn, layout))))
    # Shapes are not known: the function runs now, once per rank, and its arrays stay where they are made.
    refuse_asynchronous("dtensor_from_local of a function without shape=(shape, dtype)")
    name = "from-local-" + tokenize(fn, mesh, world)
    made = {}
    for rank in mesh.process_ids:
        key = (name, rank)
        made[key] = RankTask(key, _plain_call, fn, mesh, mesh.coordinate(rank), world=world, rank=rank)
    graph = HighLevelGraph({name: TaskLayer(made)}, {name: set()})
    arrays = dask.persist(*(Delayed(key, graph, layer=name) for key in made))
    kinds = dask.compute(*(dask.delayed(_shape_and_dtype)(a) for a in arrays))
    layout = layout_of_locals(mesh, placements, [k[0] for k in kinds], [k[1] for k in kinds], call="dtensor_from_local")
    if shape is not None and layout.shape != tuple(given):
        raise ValueError(f"dtensor_from_local(shape={tuple(given)}): the local arrays make the shape {layout.shape}")
    held = {k: v for a in arrays for k, v in dict(a.__dask_graph__()).items()}
    joined = "joined-" + tokenize(name, layout)
    tasks = {}
    for coord, key in zip(layout.coords(), made, strict=True):
        to = (joined, *layout.block_index(coord))
        tasks[to] = RankTask(to, block_of, TaskRef(key), layout, coord, world=world, rank=mesh.rank_at(coord))
    layers = {name: TaskLayer(held), joined: TaskLayer(tasks)}
    return DTensor(Source(layout, world, joined, HighLevelGraph(layers, {name: set(), joined: {name}})))


def _plain_call(fn: Callable[[int], Array], mesh: ProcessMesh, coord: Coord) -> Array:
    with errors_named(mesh, coord):
        return plain(fn(mesh.rank_at(coord)))


def _call_on_rank(fn: Callable[[int], Array], layout: Layout, coord: Coord) -> Array:
    return block_of(_plain_call(fn, layout.mesh, coord), layout, coord)


def _shape_and_dtype(array: Array) -> tuple[tuple[int, ...], np.dtype[Any]]:
    return array.shape, array.dtype


def dtensor_from_fn(fn: Callable[..., Any], mesh: ProcessMesh, placements: Any, *args: Any, **kwargs: Any) -> DTensor:
    """Place what a function makes: it runs once, on the first rank of the mesh.

    Parameters
    ----------
    fn : callable
        ``fn(*args, **kwargs)`` returns the whole array, of shape (n, ...).

    Returns
    -------
    DTensor, shape (n, ...)

    Notes
    -----
    The function runs at once, since its shape has to be known. `from_callback` lets each rank build only its own box.

    **Communication**: every part travels from the first rank to those that hold it.

    Examples
    --------
    >>> import numpy as np
    >>> import daskmesh as dm
    >>> dm.dtensor_from_fn(np.ones, dm.init_mesh(2, ["x"]), [dm.Shard(0)], (3, 2)).local_value(1)
    array([[1., 1.]])
    """
    if not callable(fn):
        raise TypeError(f"dtensor_from_fn(fn): expected a function, got {fn!r}; use shard_tensor")
    normalise_placements(placements, mesh, None, "dtensor_from_fn")
    first = ProcessMesh(mesh.mesh[(slice(0, 1),) * mesh.ndim], mesh.dim_names)

    def whole(rank: int) -> Array:
        return fn(*args, **kwargs)

    x = dtensor_from_local(whole, first, [])
    return DTensor(moved(x._node, make_layout(mesh, placements, x.shape, x.dtype, call="dtensor_from_fn")))


@handing_over
def reshard(x: DTensor, mesh: ProcessMesh, placements: Any) -> DTensor:
    """The same global value in another layout: any pair of layouts, another mesh, another number of ranks.

    Parameters
    ----------
    x : DTensor, shape (n, ...)
    mesh : ProcessMesh
        Target mesh.
    placements : sequence of Placement or mapping
        Target placements.

    Returns
    -------
    DTensor, shape (n, ...)

    Notes
    -----
    **Communication**: each rank loads exactly the views that it lacks; ``reshard(...).explain()`` gives the bytes.

    Raises
    ------
    PlacementError
        Placements that do not fit mesh or shape.
    TypeError
        A value that is not bool would become Partial('any') or Partial('all').
    MemoryError
        A rank's share would not fit its worker's memory limit.

    Examples
    --------
    >>> import daskmesh as dm
    >>> mesh = dm.init_mesh(2, ["x"])
    >>> x = dm.arange(4, mesh=mesh, placements=[dm.Shard(0)])
    >>> dm.reshard(x, mesh, [dm.Replicate()]).local_value(1)
    array([0, 1, 2, 3])
    """
    _expect(x, "reshard(x, ...)", "use shard_tensor(x, mesh, placements)")
    return x.reshard(placements, mesh)


@handing_over
def unshard_dtensor(x: DTensor) -> np.ndarray[Any, Any]:
    """The global value as a writable NumPy array.

    **Communication**: one replica travels to the client.

    Examples
    --------
    >>> import daskmesh as dm
    >>> dm.unshard_dtensor(dm.ones(3, mesh=dm.init_mesh(2, ["x"]), placements=[dm.Shard(0)]))
    array([1., 1., 1.])
    """
    _expect(x, "unshard_dtensor(x)", "it is a plain array already")
    return x.compute()


@handing_over
def dtensor_to_local(x: DTensor) -> list[da.Array]:
    """The local arrays as lazy dask arrays of one chunk each, in row-major mesh order.

    **Communication**: none; the chunks stay pinned to their ranks.

    Examples
    --------
    >>> import daskmesh as dm
    >>> x = dm.arange(5, mesh=dm.init_mesh(2, ["x"]), placements=[dm.Shard(0)])
    >>> [a.shape for a in dm.dtensor_to_local(x)]
    [(3,), (2,)]
    """
    _expect(x, "dtensor_to_local(x)", "use shard_tensor(x, mesh, placements) first")
    return local_arrays_of(x._node)


def _expect(x: Any, what: str, hint: str) -> None:
    if not isinstance(x, DTensor):
        raise TypeError(f"{what}: expected a DTensor, got {type(x).__name__}; {hint}")
