"""The namespace of the Python array API standard over DTensors, version 2025.12.

Most of it is NumPy, whose functions find DTensors by its protocols. What is here beside: functions that make arrays, and those
that NumPy spells differently.

The standard's creation functions know no mesh, but a device: a device here is a mesh, so ``device=x.device`` makes an array on
the mesh of `x`. Without one, the namespace ``x.__array_namespace__()`` makes arrays on the mesh of `x`, and this module on the
ranks of the current world in one row. Either way every mesh dim cuts a tensor dim (see `spread`): nothing is replicated unasked.

Examples
--------
>>> import daskmesh as dm
>>> x = dm.arange(5, mesh=dm.init_mesh(2, ["x"]), placements=[dm.Shard(0)])
>>> xp = x.__array_namespace__()
>>> y = xp.sqrt(x) + xp.ones(5)
>>> y.device == x.device, float(xp.max(y))
(True, 3.0)
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np

from daskmesh import creation
from daskmesh.conversion import shard_tensor
from daskmesh.device import NAMESPACES, VERSIONS
from daskmesh.dtensor import FUNCTIONS, DTensor
from daskmesh.mesh import ProcessMesh, init_mesh
from daskmesh.ops import standard
from daskmesh.placement import Placement, Replicate, Shard
from daskmesh.world import init_parallel_env

__array_api_version__ = VERSIONS[-1]

Device = ProcessMesh
Rule = Callable[[int], Sequence[Placement]]

# Names whose functions and objects are NumPy's own.
_NUMPY = """
    abs acos acosh add all any argmax argmin asin asinh atan atan2 atanh bitwise_and bitwise_invert bitwise_left_shift
    bitwise_or bitwise_right_shift bitwise_xor bool broadcast_arrays broadcast_shapes broadcast_to can_cast ceil complex64
    complex128 concat conj copysign cos cosh count_nonzero cumulative_prod cumulative_sum diff divide e equal exp expand_dims
    expm1 flip float32 float64 floor floor_divide greater greater_equal hypot iinfo imag inf int8 int16 int32 int64 isdtype
    isfinite isin isinf isnan less less_equal log log1p log2 log10 logaddexp logical_and logical_not logical_or logical_xor
    matmul matrix_transpose max maximum mean meshgrid min minimum moveaxis multiply nan negative newaxis nextafter nonzero
    not_equal permute_dims pi positive pow prod real reciprocal remainder repeat reshape result_type roll round searchsorted
    sign signbit sin sinh sqrt square squeeze stack std subtract sum take take_along_axis tan tanh tensordot tile tril triu
    trunc uint8 uint16 uint32 uint64 unique_all unique_counts unique_inverse unique_values unstack var vecdot where
""".split()
_CREATION = """
    arange asarray empty empty_like eye from_dlpack full full_like linspace ones ones_like zeros zeros_like
""".split()
_OWN = ["argsort", "astype", "clip", "finfo", "sort"]


def spread(mesh: ProcessMesh) -> Rule:
    """Placements of arrays that are made without any: mesh dim i cuts tensor dim i, or the last one.

    Examples
    --------
    >>> import daskmesh as dm
    >>> rule = spread(dm.init_mesh((2, 2), ("x", "y")))
    >>> rule(0), rule(1), rule(3)
    ([Replicate(), Replicate()], [Shard(0), Shard(0)], [Shard(0), Shard(1)])
    """

    def rule(ndim: int) -> list[Placement]:
        return [Shard(builtins.min(m, ndim - 1)) if ndim else Replicate() for m in range(mesh.ndim)]

    return rule


@dataclass(frozen=True)
class Creation:
    """Functions that make arrays, on a mesh (None: the ranks of the current world in one row) and by a rule of placements."""

    mesh: ProcessMesh | None = None
    rule: Rule | None = None

    def default_device(self) -> ProcessMesh:
        """The mesh of arrays made without a device."""
        return self.mesh or init_mesh(init_parallel_env().size, ["x"])

    def _on(self, device: Device | None) -> ProcessMesh:
        if device is None:
            return self.default_device()
        if not isinstance(device, ProcessMesh):
            raise ValueError(f"device={device!r}: the device of a DTensor is its mesh; give x.device, or a ProcessMesh")
        return device

    def _where(self, device: Device | None, ndim: int) -> dict[str, Any]:
        mesh = self._on(device)
        rule = self.rule if self.rule is not None and mesh == self.mesh else spread(mesh)
        return {"mesh": mesh, "placements": rule(ndim)}

    def __array_namespace_info__(self) -> Info:
        return Info(self)

    def asarray(self, obj: Any, /, *, dtype: Any = None, device: Device | None = None, copy: bool | None = None) -> DTensor:
        """Place numbers, nested lists or an array; a DTensor stays where it is, unless another mesh is given."""
        if isinstance(obj, DTensor):
            moving = dtype is not None and np.dtype(dtype) != obj.dtype
            if copy is False and moving:
                raise ValueError(f"asarray(copy=False): a cast from {obj.dtype} to {np.dtype(dtype)} makes a copy")
            x = obj.astype(dtype) if moving else obj
            x = x if device is None else x.to_device(self._on(device))
            return x.copy() if copy and x is obj else x
        if copy is False:
            raise ValueError("asarray(copy=False): placing data on a mesh copies them")
        if isinstance(obj, (list, tuple)) and builtins.any(isinstance(x, DTensor) for x in obj):
            raise TypeError("asarray(obj): a sequence of DTensors; use stack or concat, which leave them on their ranks")
        array = obj if hasattr(obj, "__array_function__") else np.asarray(obj, dtype=dtype)
        return shard_tensor(array, dtype=dtype, **self._where(device, array.ndim))

    def from_dlpack(self, x: Any, /, *, device: Device | None = None, copy: bool | None = None) -> DTensor:
        """Place an array that speaks DLPack; a DTensor stays where it is."""
        return self.asarray(x if isinstance(x, DTensor) else np.from_dlpack(x), device=device, copy=copy)

    def full(self, shape: Any, fill_value: Any, *, dtype: Any = None, device: Device | None = None) -> DTensor:
        return creation.full(shape, fill_value, dtype, **self._where(device, _ndim(shape)))

    def zeros(self, shape: Any, *, dtype: Any = None, device: Device | None = None) -> DTensor:
        return self.full(shape, 0, dtype=float if dtype is None else dtype, device=device)

    def ones(self, shape: Any, *, dtype: Any = None, device: Device | None = None) -> DTensor:
        return self.full(shape, 1, dtype=float if dtype is None else dtype, device=device)

    def empty(self, shape: Any, *, dtype: Any = None, device: Device | None = None) -> DTensor:
        return self.zeros(shape, dtype=dtype, device=device)

    def arange(
        self, start: Any, /, stop: Any = None, step: Any = 1, *, dtype: Any = None, device: Device | None = None
    ) -> DTensor:
        return creation.arange(start, stop, step, dtype, **self._where(device, 1))

    def linspace(
        self, start: Any, stop: Any, /, num: int, *, dtype: Any = None, device: Device | None = None, endpoint: bool = True
    ) -> DTensor:
        return creation.linspace(start, stop, num, endpoint, dtype, **self._where(device, 1))

    def eye(
        self, n_rows: int, n_cols: int | None = None, /, *, k: int = 0, dtype: Any = None, device: Device | None = None
    ) -> DTensor:
        return creation.eye(n_rows, n_cols, k, float if dtype is None else dtype, **self._where(device, 2))

    def zeros_like(self, x: Any, /, *, dtype: Any = None, device: Device | None = None) -> DTensor:
        return self.full_like(x, 0, dtype=dtype, device=device)

    def ones_like(self, x: Any, /, *, dtype: Any = None, device: Device | None = None) -> DTensor:
        return self.full_like(x, 1, dtype=dtype, device=device)

    def empty_like(self, x: Any, /, *, dtype: Any = None, device: Device | None = None) -> DTensor:
        return self.full_like(x, 0, dtype=dtype, device=device)

    def full_like(self, x: Any, /, fill_value: Any, *, dtype: Any = None, device: Device | None = None) -> DTensor:
        dtype = x.dtype if dtype is None else dtype
        if not isinstance(x, DTensor) or device not in (None, x.device):
            return self.full(x.shape, fill_value, dtype=dtype, device=device)
        return FUNCTIONS[np.full_like](x, fill_value, dtype=dtype)  # type: ignore[no-any-return]


def _ndim(shape: Any) -> int:
    return 1 if isinstance(shape, (int, np.integer)) else len(shape)


@dataclass(frozen=True)
class Info:
    """What the namespace can do: the answer of ``__array_namespace_info__()``."""

    _creation: Creation

    def capabilities(self) -> dict[str, Any]:
        """Boolean indexing and shapes that depend on values both work; the latter compute when they are called."""
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}

    def default_device(self) -> ProcessMesh:
        return self._creation.default_device()

    def devices(self) -> tuple[ProcessMesh, ...]:
        """The mesh of this namespace; any other mesh of the world is as good."""
        return (self._creation.default_device(),)

    def default_dtypes(self, *, device: Device | None = None) -> dict[str, Any]:
        return _NUMPY_INFO.default_dtypes()  # type: ignore[no-any-return]

    def dtypes(self, *, device: Device | None = None, kind: str | tuple[str, ...] | None = None) -> dict[str, Any]:
        return _NUMPY_INFO.dtypes(kind=kind)  # type: ignore[no-any-return]


_NUMPY_INFO: Any = np.__array_namespace_info__()


@dataclass(frozen=True)
class FloatInfo:
    """Limits of a floating-point dtype, as Python numbers."""

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: np.dtype[Any]


def finfo(type: Any, /) -> FloatInfo:
    """Limits of a floating-point dtype, or of an array's; those of the components where it is complex."""
    info = np.finfo(type.dtype if isinstance(type, (DTensor, np.ndarray)) else type)
    limits = (float(info.eps), float(info.max), float(info.min), float(info.smallest_normal))
    return FloatInfo(int(info.bits), *limits, dtype=info.dtype)


def astype(x: DTensor, dtype: Any, /, *, copy: bool = True, device: Device | None = None) -> DTensor:
    """Cast, and put on another mesh if one is given."""
    y = x if np.dtype(dtype) == x.dtype else x.astype(dtype)
    y = y if device is None else y.to_device(device)
    return y.copy() if copy and y is x else y


def clip(x: Any, /, min: Any = None, max: Any = None) -> DTensor:
    """The values held between two bounds, in the dtype of `x`."""
    return np.clip(x, min=min, max=max)  # type: ignore[no-any-return]


def sort(x: DTensor, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> DTensor:
    """A sorted copy; the axis is made whole on each rank first, as ``explain()`` of the result says."""
    return standard.ordered(x, axis, descending=descending, stable=stable)


def argsort(x: DTensor, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> DTensor:
    """The indices that sort; the axis is made whole on each rank first, as ``explain()`` of the result says."""
    return standard.ordered(x, axis, descending=descending, stable=stable, indices=True)


class Namespace(ModuleType):
    """The functions of the standard, with those that make arrays bound to a mesh; made by `namespace`."""

    def __init__(self, mesh: ProcessMesh, rule: Rule | None = None) -> None:
        super().__init__(__name__, __doc__)
        self._bound = (mesh, rule)
        vars(self).update(_contents(Creation(mesh, rule)))

    def __getattr__(self, name: str) -> Any:
        return _more(name)

    def __reduce__(self) -> Any:
        return _namespace, self._bound

    def __repr__(self) -> str:
        return f"<namespace {self.__name__!r} on {self._bound[0]!r}>"


def namespace(mesh: ProcessMesh, rule: Rule | None = None) -> Namespace:
    """The namespace whose functions make arrays on `mesh`; always the same object for the same mesh.

    Parameters
    ----------
    rule : callable, optional
        ``rule(ndim)``: the placements of an array made without any; by default those of `spread`.

    Examples
    --------
    >>> import daskmesh as dm
    >>> mesh = dm.init_mesh((2, 2), ("x", "y"))
    >>> xp = namespace(mesh)
    >>> xp.zeros((4, 4)).placements, xp is xp.zeros(3).__array_namespace__()
    ((Shard(0), Shard(1)), True)
    """
    return _namespace(mesh, rule)


@lru_cache(256)
def _namespace(mesh: ProcessMesh, rule: Rule | None) -> Namespace:
    return Namespace(mesh, rule)


def _more(name: str) -> Any:
    """NumPy's functions beyond the standard that know DTensors: users of several libraries look for them in the namespace."""
    found = getattr(np, name, None)
    if name == "lib" or isinstance(found, np.ufunc) or (callable(found) and found in FUNCTIONS):
        return found
    raise AttributeError(f"the namespace {__name__!r} has no attribute {name!r}")


__getattr__ = _more


def _contents(made: Creation) -> dict[str, Any]:
    found: dict[str, Any] = {name: getattr(np, name) for name in _NUMPY}
    found.update(argsort=argsort, astype=astype, clip=clip, finfo=finfo, sort=sort)
    found.update({name: getattr(made, name) for name in (*_CREATION, "__array_namespace_info__")})
    return {**found, "__array_api_version__": __array_api_version__}


# From here on the builtins that the standard has names of are hidden in this module.
globals().update(_contents(Creation()))
__all__ = sorted((*_NUMPY, *_OWN, *_CREATION, "__array_namespace_info__", "namespace", "spread"))

NAMESPACES.append(namespace)
