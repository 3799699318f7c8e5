"""LocalLayer: a function of local arrays as an object, with state, and with a backward of its own if it wants."""

from __future__ import annotations

import copy
import dis
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import dask
import numpy as np

from daskmesh.dtensor import DTensor
from daskmesh.mapping import local_map
from daskmesh.mesh import ProcessMesh
from daskmesh.protocol import overriding

__all__ = ["LocalLayer"]

Array = Any
DistAttr = tuple[ProcessMesh, Any]
_NUMBERS = (bool, int, float, complex, np.generic)


class LocalLayer:
    """A layer whose `forward` works on the local arrays of every rank: DTensors go in and come out.

    Subclasses write ``forward(self, *inputs)``, and call the layer like a function. It runs on a copy of the layer on every rank.
    Arrays and numbers that it assigns to attributes can be read from the layer after the call, as a list in mesh order.

    Gradients come from `forward` itself, which autograd follows on each rank, or from ``backward(self, *grads)`` if there is one:
    it is called on a copy of the layer on which `forward` has just run, with this rank's cotangent of every output, and returns
    one gradient for every positional input, None for one that has none.

    Parameters
    ----------
    out_dist_attrs : list of (ProcessMesh, placements)
        One pair per output. Outputs are counted flat, dict values in sorted key order.
    grad_dist_attrs : list of (ProcessMesh, placements) or None, optional
        One per positional input: how the gradients that the ranks work out are placed. None, for all or for one: Shard where the
        input is Shard, and summed over the ranks where it is Replicate.

    Notes
    -----
    **Communication**: none but that of collectives in `forward`. Backward: the gradient of an input that is Replicate is a sum
    over the ranks, an all-reduce when it is read.

    Raises
    ------
    TypeError
        An entry that is no pair.
    ValueError
        Meshes differ.

    Examples
    --------
    >>> import numpy as np
    >>> import daskmesh as dm
    >>> mesh = dm.ProcessMesh([0, 1], dim_names=["x"])
    >>> class Masked(dm.LocalLayer):
    ...     def __init__(self, out_dist_attrs, grad_dist_attrs):
    ...         super().__init__(out_dist_attrs, grad_dist_attrs)
    ...         self.local_result = np.float32(0.0)
    ...
    ...     def forward(self, x):
    ...         mask = np.zeros_like(x)
    ...         if dm.get_rank() == 0:
    ...             mask[1:3] = 1
    ...         else:
    ...             mask[4:7] = 1
    ...         x = x * mask
    ...         mask_sum = np.sum(x) / mask.sum()
    ...         self.local_result = mask_sum
    ...         return mask_sum
    >>> attrs = [(mesh, [dm.Partial(dm.ReduceType.kRedSum)])]
    >>> layer = Masked(attrs, [None])
    >>> x = dm.dtensor_from_local(lambda rank: np.arange(10, dtype="float32") + rank, mesh, [dm.Shard(0)])
    >>> output = layer(x)
    >>> [float(v) for v in layer.local_result], float(output)
    ([1.5, 6.0], 7.5)
    >>> dm.grad(layer)(x).local_value(0)
    array([0. , 0.5, 0.5, 0. , 0. , 0. , 0. , 0. , 0. , 0. ], dtype=float32)
    """

    def __init__(self, out_dist_attrs: Sequence[DistAttr], grad_dist_attrs: Sequence[DistAttr | None] | None = None) -> None:
        name = type(self).__name__
        self._outs = _entries(out_dist_attrs, f"{name}: out_dist_attrs", required=True)
        self._grads = None if grad_dist_attrs is None else _entries(grad_dist_attrs, f"{name}: grad_dist_attrs", required=False)
        meshes = [pair[0] for pair in (*self._outs, *(self._grads or ())) if pair is not None]
        for mesh in meshes:
            if mesh != meshes[0]:
                raise ValueError(f"{name}: {meshes[0]!r} and {mesh!r}; a layer runs on one mesh, reshard what it returns")
        self._mesh = meshes[0]
        self._results: _Results | None = None

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Outputs from local arrays; subclasses write it."""
        raise NotImplementedError(f"{type(self).__name__} has no forward(self, *inputs)")

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        before = self._before()
        for name, value in before.items():
            if isinstance(value, DTensor) or overriding((value,)) is not None:
                raise TypeError(
                    f"{type(self).__name__}: the attribute {name!r} is a DTensor, which has no local array inside forward; pass "
                    "it as an input"
                )
        blank = copy.copy(self)
        blank.__dict__ = {**before, "_results": None}
        run = (_RunWithBackward if hasattr(self, "backward") else _Run)(blank)
        mapped = local_map(
            run,
            out_placements=[*(placements for _, placements in self._outs), None],
            process_mesh=self._mesh,
            in_grad_placements=None if self._grads is None else [None if pair is None else pair[1] for pair in self._grads],
        )
        outputs, assigned = mapped(*inputs, **kwargs)
        names = run.assigned | set(_stored(type(self).forward))
        for name in names & set(self.__dict__):
            del self.__dict__[name]
        self._results = _Results(before, assigned)
        return outputs

    def __getattr__(self, name: str) -> Any:
        results = self.__dict__.get("_results")
        if results is not None and not name.startswith("_") and name in results.found:
            return results.found[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _before(self) -> dict[str, Any]:
        """The attributes as they were before any call."""
        earlier = self._results.before if self._results is not None else {}
        return {**earlier, **{k: v for k, v in self.__dict__.items() if k != "_results"}}


def _entries(given: Any, what: str, *, required: bool) -> list[Any]:
    """The pairs of (mesh, placements), None where nothing is said."""
    pair = "a pair (mesh, placements)" + ("" if required else " or None")
    if not isinstance(given, (list, tuple)) or isinstance(given[0] if given else None, ProcessMesh):
        raise TypeError(f"{what}: expected a list with {pair} for each array, got {given!r}; write [(mesh, [Shard(0)])]")
    for entry in given:
        if entry is None and not required:
            continue
        if not isinstance(entry, (list, tuple)) or len(entry) != 2 or not isinstance(entry[0], ProcessMesh):
            raise TypeError(f"{what}: expected {pair} for each array, got {entry!r}; write [(mesh, [Shard(0)])]")
    if required and not given:
        raise TypeError(f"{what}: a layer has at least one output; write [(mesh, [Shard(0)])]")
    return list(given)


def _stored(func: Any) -> Iterator[str]:
    """The names of attributes that a function's code assigns, on whatever rank."""
    code = getattr(func, "__code__", None)
    return (i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR") if code is not None else iter(())


class _Assigned:
    """What a run of `forward` assigned on one rank."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values


class _Run:
    """The function that every rank runs: `forward` of a copy of the layer."""

    def __init__(self, layer: LocalLayer) -> None:
        self.layer = layer
        self.assigned: set[str] = set()

    @property
    def __name__(self) -> str:
        return type(self.layer).__name__

    def __getstate__(self) -> dict[str, Any]:
        return {"layer": self.layer, "assigned": set()}

    def __dask_tokenize__(self) -> Any:
        return type(self.layer), {k: v for k, v in self.layer.__dict__.items() if k != "_results"}

    def fresh(self) -> LocalLayer:
        """A copy with arrays and containers of its own: ranks may share a process."""
        layer = copy.copy(self.layer)
        own = {k: copy.copy(v) if isinstance(v, (np.ndarray, list, dict, set)) else v for k, v in self.layer.__dict__.items()}
        layer.__dict__ = own
        return layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self.fresh()
        held = dict(layer.__dict__)
        value = layer.forward(*args, **kwargs)
        blank = self.layer.__dict__
        changed = {k: v for k, v in layer.__dict__.items() if _is_value(v) and not _same(v, held.get(k), blank.get(k))}
        self.assigned.update(changed)
        return value, _Assigned(changed)


class _RunWithBackward(_Run):
    """The same for a layer with a `backward` of its own."""

    def pulled(self, args: tuple[Any, ...], kwargs: dict[str, Any], cotangents: Mapping[int, Array]) -> Any:
        """The gradients of the inputs, from the cotangents of the flat outputs that have one."""
        layer: Any = self.fresh()
        layer.forward(*args, **kwargs)
        return layer.backward(*(cotangents.get(i) for i in range(len(layer._outs))))


def _is_value(v: Any) -> bool:
    return isinstance(v, _NUMBERS) or (hasattr(v, "shape") and hasattr(v, "dtype"))


def _same(value: Any, held: Any, original: Any) -> bool:
    if value is not held:
        return False
    return not isinstance(value, np.ndarray) or np.array_equal(value, original, equal_nan=value.dtype.kind in "fc")


class _Results:
    """What `forward` assigned on all ranks, fetched when it is asked for."""

    def __init__(self, before: dict[str, Any], assigned: Sequence[Any]) -> None:
        self.before = before
        self._assigned = assigned
        self._found: dict[str, Any] | None = None

    @property
    def found(self) -> dict[str, Any]:
        """Per attribute a list in mesh order; what it was before, where no rank assigned it."""
        if self._found is None:
            each = [a.values for a in dask.compute(*self._assigned)]
            names = {name for values in each for name in values}
            lists = {name: [values.get(name, self.before.get(name)) for values in each] for name in names}
            self._found = {**self.before, **lists}
        return self._found
