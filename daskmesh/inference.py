"""The layouts of a region's outputs before it runs: declared by global shapes, or inferred by a trace on each local shape."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from daskmesh.gang import Gang
from daskmesh.layout import Layout, layout_of_locals, make_layout
from daskmesh.placement import PlacementError
from daskmesh.running import Call, Declared, Input, argument, is_array, one_per_rank
from daskmesh.tracing import Untraceable, doubtful, known, shape_only, traced
from daskmesh.trees import LEAF, Entry, Tree, alike, build, flatten

__all__ = ["Spec", "agree", "declared_layouts", "declared_tree", "inferred", "measured_layout", "parse_shapes"]

Shapes = tuple[tuple[int, ...], ...]
#: Global shape and dtype (None: that of the first input) of an output; None for one that is no array.
Spec = tuple[tuple[int, ...], Any] | None


def inferred(call: Call) -> tuple[Call, bool]:
    """The call with its outputs inferred from shapes, and whether it does something to others.

    Raises
    ------
    Untraceable
        The function needs values.
    """
    groups: dict[Shapes, int] = {}
    coords = one_per_rank(call.mesh).coords()
    of_rank = [tuple(lay.local_shape(c) for lay in call.layouts) for c in coords]
    for rank, shapes in zip(call.mesh.process_ids, of_rank, strict=True):
        groups.setdefault(shapes, rank)
    found: dict[Shapes, tuple[int, Tree, list[Any], list[Entry]]] = {}
    given = [*(lay.dtype for lay in call.layouts), *(v.dtype for v in call.leaves if is_array(v))]
    gangs = []
    for shapes, rank in groups.items():
        gang = Gang(call.mesh, rank, trace=shape_only, even=len(groups) == 1)
        gangs.append(gang)
        value = traced(functools.partial(_call_on_shapes, call, shapes), gang)
        tree, leaves, entries = call.declared.read(call.title, value, tracing=True)
        arrays = [leaf for leaf in leaves if is_array(leaf, tracing=True)]
        if not all(map(known, arrays)):
            raise Untraceable("an output has a size that depends on values")
        if any(doubtful(array, given) for array in arrays):
            raise Untraceable("Dask and NumPy promote the dtypes in it in different ways")
        found[shapes] = (rank, tree, leaves, entries)
    first_rank, tree, first, entries = next(iter(found.values()))
    for rank, other_tree, leaves, _ in found.values():
        agree(call.title, (first_rank, tree, first), (rank, other_tree, leaves))
    outs = tuple(measured_layout(call, i, entry, [found[shapes][2][i] for shapes in of_rank]) for i, entry in enumerate(entries))
    how = "was inferred from the shapes of the inputs (give out_shapes= to say otherwise)"
    communicates = any(g.communicates for g in gangs)
    return replace(call, out_tree=tree, outs=outs, how=how, communicates=communicates), any(g.on_lost is not None for g in gangs)


def _call_on_shapes(call: Call, shapes: Shapes) -> Any:
    arrays = [shape_only(shape, lay.dtype) for shape, lay in zip(shapes, call.layouts, strict=True)]
    leaves = [arrays[v.index] if isinstance(v, Input) else argument(v, writeable=call.writeable) for v in call.leaves]
    args, kwargs = build(call.tree, leaves)
    return call.func(*args, **kwargs)


def agree(title: str, one: tuple[int, Tree, Sequence[Any]], other: tuple[int, Tree, Sequence[Any]]) -> None:
    """All ranks return the same containers, and arrays in the same places."""
    if not alike(one[1], other[1]):
        raise ValueError(f"{title}: rank {one[0]} returned {one[1]}, rank {other[0]} returned {other[1]}")
    for i, (a, b) in enumerate(zip(one[2], other[2], strict=True)):
        if hasattr(a, "shape") != hasattr(b, "shape"):
            raise ValueError(
                f"{title}: output {i} is a {type(a).__name__} on rank {one[0]} and a {type(b).__name__} on rank {other[0]}; "
                "return an array on all ranks or on none"
            )


def measured_layout(call: Call, i: int, entry: Entry, leaves: Sequence[Any]) -> Layout | None:
    """The layout that local arrays (or tickets for them, or stand-ins) make; None if they are no arrays."""
    if not hasattr(leaves[0], "shape"):
        return None
    what = f"{call.title}: the local arrays of output {i}"
    try:
        shapes = [tuple(map(int, a.shape)) for a in leaves]
        return layout_of_locals(call.mesh, entry or (), shapes, [a.dtype for a in leaves], what)
    except PlacementError as error:
        raise PlacementError(f"{call.title}: out_placements of output {i}, of local shape {shapes[0]}: {error}") from None


# -- declared shapes --------------------------------------------------------------------------------------------------


def parse_shapes(given: Any, declared: Declared, title: str) -> list[Spec]:
    """One (shape, dtype or None) per output, or None."""
    wanted = len(declared.entries)
    entries = [given] if _is_shape(given) or _is_pair(given) or given is None else flatten(given, is_leaf=_is_spec)[0]
    if wanted == 1 and isinstance(given, Sequence) and not given:
        entries = [()]
    for e in entries:
        if not _is_spec(e):
            raise TypeError(
                f"{title}: out_shapes: expected a global shape, (global shape, dtype) or None for each output, got {e!r}; "
                "write out_shapes=[(8, 4), ((), 'float64')]"
            )
    if len(entries) != wanted:
        raise ValueError(f"{title}: out_shapes has {len(entries)} entries, out_placements {wanted}; give one per output")
    return [None if e is None else (tuple(e[0]), np.dtype(e[1])) if _is_pair(e) else (tuple(e), None) for e in entries]


def _is_shape(e: Any) -> bool:
    return isinstance(e, (tuple, list)) and all(isinstance(n, (int, np.integer)) for n in e)


def _is_pair(e: Any) -> bool:
    if not isinstance(e, tuple) or len(e) != 2 or not _is_shape(e[0]) or e[1] is None or isinstance(e[1], (tuple, list)):
        return False
    return isinstance(e[1], (str, type, np.dtype))


def _is_spec(e: Any) -> bool:
    return e is None or _is_shape(e) or _is_pair(e)


def declared_tree(declared: Declared) -> Tree:
    """The containers of the outputs as out_placements says: one entry alone is one output, flat entries are a tuple."""
    tree = declared.tree
    if tree.kind is None or (not issubclass(tree.kind, dict) and len(tree.branches) == 1):
        return tree.branches[0] if tree.branches else LEAF
    return tree if issubclass(tree.kind, dict) else replace(tree, kind=tuple)


def declared_layouts(shapes: Sequence[Spec], call: Call) -> tuple[Layout | None, ...]:
    outs: list[Layout | None] = []
    for i, (spec, entry) in enumerate(zip(shapes, call.declared.entries, strict=True)):
        if spec is None:
            if entry is not None:
                raise ValueError(f"{call.title}: output {i} is placed {entry!r}; out_shapes has None for it, give its shape")
            outs.append(None)
            continue
        shape, dtype = spec
        if dtype is None and not call.layouts:
            raise TypeError(f"{call.title}: out_shapes of output {i}: no argument is a DTensor, so give (shape, dtype)")
        try:
            layout = make_layout(call.mesh, entry or (), shape, call.layouts[0].dtype if dtype is None else dtype)
        except PlacementError as error:
            raise PlacementError(f"{call.title}: out_placements of output {i}: {error}") from None
        outs.append(layout.replace(chunks=tuple(_cut_like_an_input(layout, d, call.layouts) for d in range(layout.ndim))))
    return tuple(outs)


def _cut_like_an_input(layout: Layout, d: int, inputs: Sequence[Layout]) -> tuple[int, ...]:
    axes = layout.shard_axes[d]
    for other in inputs if axes else ():
        for e in range(other.ndim):
            if other.shard_axes[e] == axes and other.shape[e] == layout.shape[d]:
                return other.chunks[e]
    return layout.chunks[d]
