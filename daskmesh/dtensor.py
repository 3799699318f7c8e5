"""DTensor: an array sharded over a named mesh, a lazy Dask collection, and NumPy's argument wherever it has a row in the table.

A DTensor is a handle on an immutable recorded node. Operations make new ones; ``x += y`` and ``x[key] = v`` put another node
behind the same handle. NumPy's two protocols look their function up in `FUNCTIONS` and `UFUNC_METHODS`; modules on higher floors
fill these tables, nothing else does dispatch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeVar

import dask
import dask.array as da
import numpy as np
from dask.base import DaskMethodsMixin
from dask.delayed import Delayed
from dask.highlevelgraph import HighLevelGraph
from numpy.lib.mixins import NDArrayOperatorsMixin

from daskmesh import draw
from daskmesh.chunked import ChunkedArray
from daskmesh.clients import prepare_current
from daskmesh.device import StandardArray
from daskmesh.explaining import explained
from daskmesh.gathering import gather
from daskmesh.graph import Node, Source, block_key, block_keys, graph_of, local_of
from daskmesh.layout import Layout, make_layout
from daskmesh.mesh import ProcessMesh
from daskmesh.methods import ArrayMethods
from daskmesh.moves import OneReplica, dask_array_of, moved, reduced, refuse_asynchronous
from daskmesh.placement import Placement
from daskmesh.plan import Plan
from daskmesh.protocol import overriding, own

__all__ = ["FUNCTIONS", "UFUNC_METHODS", "WAYS_OUT", "DTensor", "implements"]

_F = TypeVar("_F", bound=Callable[..., Any])

# NumPy function -> its meaning on DTensors; ufunc method ("__call__", "reduce", ...) -> (ufunc, *inputs, **kwargs) -> DTensor.
FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {}
UFUNC_METHODS: dict[str, Callable[..., Any]] = {}
# NumPy function that has no meaning on DTensors -> what to do instead.
WAYS_OUT: dict[Callable[..., Any], str] = {}


def implements(*functions: Callable[..., Any]) -> Callable[[_F], _F]:
    """Enter a function in the table under the NumPy functions that it stands for."""

    def enter(f: _F) -> _F:
        FUNCTIONS.update(dict.fromkeys(functions, f))
        return f

    return enter


class DTensor(ArrayMethods, StandardArray, ChunkedArray, NDArrayOperatorsMixin, DaskMethodsMixin):
    """An array sharded over a named mesh; made by `shard_tensor`, `zeros`, `local_map` and their kin.

    Mathematics is NumPy itself: ``np.sum(x)``, ``x @ y``, ``x[2:5]``. Nothing is ever gathered, replicated or densified
    silently: a function that is not in the table raises TypeError.

    **Communication**: none by itself; `explain` says what computing it will move.

    Examples
    --------
    >>> import daskmesh as dm
    >>> x = dm.arange(6, mesh=dm.init_mesh(2, ["x"]), placements=[dm.Shard(0)])
    >>> x
    DTensor(shape=(6,), dtype=int64, placements=[Shard(0)], mesh=ProcessMesh([0, 1], dim_names=['x']))
    >>> int(np.sum(x * 2))
    30
    """

    __slots__ = ("__weakref__", "_node")
    __array_priority__ = 20

    __dask_scheduler__ = staticmethod(dask.threaded.get)
    # The very function of dask.array: a private one makes dask.compute(array, x, array) return results in another order.
    __dask_optimize__ = staticmethod(da.Array.__dask_optimize__)

    def __init__(self, node: Node) -> None:
        self._node = node

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """Mesh, placements, global shape, dtype and part sizes."""
        return self._node.layout

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self._node.layout.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Data type."""
        return self._node.layout.dtype

    @property
    def ndim(self) -> int:
        """Number of tensor dims."""
        return len(self._node.layout.shape)

    @property
    def size(self) -> int:
        """Number of elements of the global array."""
        return self.layout.size

    @property
    def nbytes(self) -> int:
        """Bytes of the global array, one replica."""
        return self.layout.nbytes

    @property
    def process_mesh(self) -> ProcessMesh:
        """The mesh."""
        return self.layout.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh dim."""
        return self.layout.placements

    @property
    def blocks(self) -> da.Array:
        """The dask array behind it: a leading axis of chunk size 1 for each mesh dim that is not Shard, then the tensor dims."""
        node = self._node
        return da.Array(graph_of(node), node.name, node.layout.block_chunks, dtype=node.layout.dtype)

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("len() of a 0-d DTensor; use x.item() for its value")
        return self.shape[0]

    def __getitem__(self, key: Any) -> DTensor:
        return FUNCTIONS[operator.getitem](self, key)  # type: ignore[no-any-return]

    def __setitem__(self, key: Any, value: Any) -> None:
        FUNCTIONS[operator.setitem](self, key, value)

    # -- Dask collection protocol -------------------------------------------------------------------------------------

    @property
    def dask(self) -> HighLevelGraph:
        """The graph, lowered to one task per rank between exchanges."""
        return graph_of(self._node)

    @property
    def name(self) -> str:
        """First part of the keys of its blocks."""
        return self._node.name

    def __dask_graph__(self) -> HighLevelGraph:
        return graph_of(self._node)

    def __dask_layers__(self) -> tuple[str, ...]:
        return (self._node.name,)

    def __dask_keys__(self) -> list[tuple[Any, ...]]:
        return block_keys(self._node)

    def __dask_postcompute__(self) -> Any:
        return gather, (self.layout,)

    def __dask_postpersist__(self) -> Any:
        return _rebuilt, (self.layout, self._node.world, self._node.name)

    def __dask_tokenize__(self) -> Any:
        return ("DTensor", self._node.name)

    @property
    def expr(self) -> OneReplica:
        """What Dask computes: all blocks when persisted, one replica when computed."""
        prepare_current()
        return OneReplica.of(self._node, self.__dask_optimize__)

    def __reduce__(self) -> Any:
        return DTensor, (self._node,)

    def compute(self, **kwargs: Any) -> np.ndarray[Any, Any]:
        """The global value as a NumPy array.

        **Communication**: between ranks what ``explain("compute")`` says; then one replica travels to the client.

        Raises
        ------
        MemoryError
            The value would not fit a worker's memory limit.
        TypeError
            Dask's current client is asynchronous.
        """
        refuse_asynchronous("compute()")
        return super().compute(**kwargs)  # type: ignore[no-any-return]

    def persist(self, **kwargs: Any) -> DTensor:
        """This DTensor with its blocks held on the workers of their ranks.

        **Communication**: what `explain` says.

        Raises
        ------
        TypeError
            Dask's current client is asynchronous.
        """
        refuse_asynchronous("persist()")
        return super().persist(**kwargs)  # type: ignore[no-any-return]

    # -- moving -------------------------------------------------------------------------------------------------------

    def reshard(self, placements: Any, mesh: ProcessMesh | None = None) -> DTensor:
        """The same value in another layout, on this mesh or another; see `daskmesh.reshard`."""
        mesh = self.process_mesh if mesh is None else mesh
        target = make_layout(mesh, placements, self.shape, self.dtype, call="reshard")
        if target.placements == self.placements and target.mesh.shape == self.process_mesh.shape:
            target = target.replace(chunks=self.layout.chunks)  # uneven sizes stay where the cut stays
        return DTensor(moved(self._node, target))

    def explain(self, call: str = "persist") -> Plan:
        """What carrying this out moves between ranks, to the byte, before anything runs; `call` "compute": for one replica alone.

        By default all blocks are made, as by `persist`. Blocks of earlier steps that nobody asks for are not made nor counted;
        nor is what a function in `local_map` sends, shmem operations do, or recording itself has to compute, as ``x[x > 0]``.

        **Communication**: none.

        Examples
        --------
        >>> import daskmesh as dm
        >>> x = dm.zeros((4, 4), mesh=dm.init_mesh(2, ["x"]), placements=[dm.Shard(0)])
        >>> x.reshard([dm.Shard(1)]).explain().total_bytes
        64
        >>> whole = x.reshard([dm.Replicate()])
        >>> whole.explain().total_bytes, whole.explain("compute").total_bytes
        (128, 64)
        """
        return explained(self._node, call)

    def local_value(self, rank: int) -> np.ndarray[Any, Any]:
        """The local array of `rank` (the rank number, not its position), computed.

        **Communication**: that rank's block travels to the client.

        Raises
        ------
        ValueError
            `rank` is not in the mesh.
        """
        node = self._node
        coord = node.layout.mesh.coordinate(rank)
        refuse_asynchronous("local_value(rank)")
        prepare_current()
        key = block_key(node, coord)
        block = Delayed(key, graph_of(node), layer=node.name).compute()
        return np.array(local_of(block, node.layout))

    _local_value = local_value

    def to_dask(self) -> da.Array:
        """A dask array of the global value: Replicate axes dropped, Partial ones reduced, empty blocks left out.

        **Communication**: none, unless a Partial has to be reduced.
        """
        x = self.reshard(reduced(self.placements)) if self.layout.partial_axes else self
        return dask_array_of(x._node)

    # -- values -------------------------------------------------------------------------------------------------------

    def item(self, *index: Any) -> Any:
        """The value of a one-element DTensor as a Python scalar; a Partial is reduced first.

        **Communication**: one element, or its terms, travel to the client.
        """
        if index:
            return self[index[0] if len(index) == 1 else index].item()
        if self.size != 1:
            raise ValueError(f"item() takes a DTensor of one element, this one has shape {self.shape}; use np.asarray(x)")
        return self.compute().item()

    def tolist(self) -> Any:
        """The global value as nested lists.

        **Communication**: one replica travels to the client.
        """
        return self.compute().tolist()

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ValueError(
                f"bool(x), as by if, and, or, not: the truth value of a DTensor of shape {self.shape} is ambiguous; "
                f"use np.any(x) or np.all(x), or &, | and ~ element by element"
            )
        return bool(self.item())

    def _scalar(self, kind: str) -> Any:
        if self.size != 1:
            raise TypeError(
                f"{kind}(x): only a DTensor of one element can become one number, this one has shape {self.shape}; "
                f"use x.astype({kind})"
            )
        return self.item()

    def __int__(self) -> int:
        return int(self._scalar("int"))

    def __float__(self) -> float:
        return float(self._scalar("float"))

    def __complex__(self) -> complex:
        return complex(self._scalar("complex"))

    def __index__(self) -> int:
        if self.dtype.kind not in "iu" or self.ndim:
            raise TypeError(f"only a 0-d DTensor of integers can be an index, this one is {self.dtype} of shape {self.shape}")
        return int(self.item())

    # -- how it looks -------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return (
            f"DTensor(shape={self.shape}, dtype={self.dtype}, placements={list(self.placements)}, "
            f"mesh={self.process_mesh!r})"
        )

    def __str__(self) -> str:
        return repr(self) if self.ndim else str(self.compute()[()])

    def __format__(self, spec: str) -> str:
        if self.ndim:
            return format(repr(self), spec)
        return format(self.compute()[()], spec)

    def _repr_html_(self) -> str:
        return draw.layout_html(self.layout)

    # -- NumPy --------------------------------------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if overriding(inputs):
            return NotImplemented
        if kwargs.pop("out", None) is not None:
            raise TypeError(f"np.{ufunc.__name__}(out=...): a DTensor is no buffer; write y = np.{ufunc.__name__}(...) or y += x")
        if method not in UFUNC_METHODS:
            raise TypeError(f"np.{ufunc.__name__}.{method} is not defined on DTensors; gather with np.asarray(x) to use NumPy's")
        return UFUNC_METHODS[method](ufunc, *inputs, **kwargs)

    def __array_function__(self, func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        if any(hasattr(t, "__daskmesh_function__") for t in types):
            return NotImplemented
        if func not in FUNCTIONS:
            name = f"{getattr(func, '__module__', 'numpy')}.{func.__name__} is not defined on DTensors"
            raise TypeError(f"{name}; {WAYS_OUT.get(func, 'gather with np.asarray(x) first, or write a local_map')}")
        return FUNCTIONS[func](*map(own, args), **{name: own(value) for name, value in kwargs.items()})

    def astype(self, dtype: Any, *, copy: bool = True) -> DTensor:
        """The values cast to another dtype; a Partial whose reduction the cast would change is reduced first."""
        return FUNCTIONS[np.astype](self, dtype, copy=copy)  # type: ignore[no-any-return]

    def _rebind(self, value: Any) -> DTensor:
        """Put another value behind this handle; shape, dtype and placements stay."""
        layout = self.layout
        if not isinstance(value, DTensor) or value.shape != layout.shape:
            raise ValueError(f"cannot put a value of shape {np.shape(value)} into a DTensor of shape {layout.shape}")
        if value.dtype != layout.dtype:
            if not np.can_cast(value.dtype, layout.dtype, "same_kind"):
                raise TypeError(f"cannot put {value.dtype} values into a DTensor of dtype {layout.dtype}; use x = x.astype(...)")
            value = value.astype(layout.dtype)
        self._node = moved(value._node, layout)
        return self


def _inplace(ufunc: np.ufunc) -> Callable[[DTensor, Any], DTensor]:
    def update(self: DTensor, other: Any) -> DTensor:
        return self._rebind(ufunc(self, other))

    update.__name__ = f"__i{ufunc.__name__}__"
    return update


for _name, _ufunc in {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "matmul": np.matmul, "truediv": np.true_divide,
    "floordiv": np.floor_divide, "mod": np.remainder, "pow": np.power, "lshift": np.left_shift, "rshift": np.right_shift,
    "and": np.bitwise_and, "xor": np.bitwise_xor, "or": np.bitwise_or,
}.items():  # fmt: skip
    setattr(DTensor, f"__i{_name}__", _inplace(_ufunc))


def _rebuilt(dsk: Any, layout: Layout, world: str, name: str, *, rename: dict[str, str] | None = None) -> DTensor:
    name = (rename or {}).get(name, name)
    if not isinstance(dsk, HighLevelGraph):
        dsk = HighLevelGraph.from_collections(name, dsk, dependencies=())
    return DTensor(Source(layout, world, name, dsk))
