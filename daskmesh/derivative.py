"""The derivative of a region, as autograd sees it: one primitive whose backward is a second region.

The ranks' local arrays are the coordinates of one large space; the adjoint on it is the true one. What a rank gets of a cotangent
`g` depends on how the output is placed, and how its own cotangent of an input is placed depends on that input::

    output       a rank's cotangent                        input          the ranks' cotangents are
    Shard        its part of g                             Shard          parts
    Replicate    g / n: the value is the mean of replicas  Replicate      terms of a sum (or as the user declares)
    Partial sum  g     avg  g / n                          Partial sum    replicas: each rank keeps its own
            max, min  where its term attained the value    Partial avg    the same, times n
            prod  g times the product of the others
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

import numpy as np
from autograd.extend import defvjp_argnums
from autograd.tracer import getval, isbox

from daskmesh.backward import Backward
from daskmesh.cotangents import cast, relaid, whole
from daskmesh.dtensor import DTensor
from daskmesh.duals import others_product
from daskmesh.layout import Layout
from daskmesh.mapping import Mapped, argument_names, held_by
from daskmesh.placement import Partial, Placement, Replicate, Shard
from daskmesh.regions import Out, Region
from daskmesh.routes import primitive
from daskmesh.running import Declared
from daskmesh.trees import LEAF, Tree, build, flatten, leaves_along

__all__ = ["declared_partial", "differentiated"]

Placements = tuple[Placement, ...]


def differentiated(mapped: Mapped, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function under `local_map` some of whose arguments are boxes, and record it."""
    record = _Record(mapped, args, kwargs)
    boxed = _region(record, *(record.leaves[i] for i in record.slots))
    found = list(record.found)
    for k, i in enumerate(record.outs):
        found[i] = boxed if len(record.outs) == 1 else boxed[k]
    return build(record.out_tree, found)


@primitive
def _region(record: _Record, *values: DTensor) -> Any:
    return record.run(values)


def _pulling(argnums: Sequence[int], ans: Any, args: tuple[Any, ...], kwargs: Any) -> Callable[[Any], Any]:
    record: _Record = args[0]
    values = args[1:]
    outputs = [ans] if len(record.outs) == 1 else [ans[k] for k in range(len(record.outs))]

    def pull(g: Any) -> tuple[Any, ...]:
        gs = [g] if len(outputs) == 1 else [g[k] for k in range(len(outputs))]
        return record.pulled([n - 1 for n in argnums], values, outputs, gs)

    return pull


defvjp_argnums(_region, _pulling)


class _Record:
    """One call of a function under `local_map`: `slots` are the flat arguments that are boxes, `outs` the outputs to box."""

    def __init__(self, mapped: Mapped, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.mapped = mapped
        self.leaves, self.tree = flatten((args, kwargs))
        self.slots = [i for i, leaf in enumerate(self.leaves) if isbox(leaf)]
        self.names = argument_names(mapped.func, args, kwargs)
        for i in self.slots:
            if not isinstance(getval(self.leaves[i]), DTensor):
                raise TypeError(
                    f"{mapped.title}: argument {self.names[i]} is no DTensor, so its gradient would be lost; place it with "
                    "shard_tensor(w, mesh, [Replicate()]) before"
                )
        for value in [*held_by(mapped.func), *_globals_of(mapped.func)]:
            if isinstance(value, DTensor):
                raise TypeError(
                    f"{mapped.title}: the function holds a DTensor of shape {value.shape}, which has no local array there; pass "
                    "it as an argument"
                )
        self.found: list[Any] = []
        self.outs: list[int] = []
        self.out_tree: Tree = LEAF
        self.region: Region | None = None

    def run(self, values: Sequence[DTensor]) -> Any:
        """The plain call; the outputs that can have a gradient."""
        leaves = list(self.leaves)
        for i, value in zip(self.slots, values, strict=True):
            leaves[i] = value
        args, kwargs = build(self.tree, leaves)
        outputs = self.mapped(args, kwargs)
        node = next((x._node for x in _dtensors(outputs)), None)
        if not isinstance(node, Out):  # nothing but values that are no arrays
            self.found, self.out_tree = [outputs], LEAF
            return ()
        self.region = region = node.region
        if region.unique and region.call.communicates is not None:
            raise TypeError(
                f"{self.mapped.title}: it uses symmetric tensors (put, signal, load), which has no derivative; keep it out of "
                "functions under grad, and use collectives there"
            )
        self.out_tree = region.call.out_tree or LEAF
        self.found = leaves_along(self.out_tree, outputs)
        self.outs = [i for i, x in enumerate(self.found) if isinstance(x, DTensor) and x.dtype.kind in "fc"]
        chosen = tuple(self.found[i] for i in self.outs)
        return chosen[0] if len(chosen) == 1 else chosen

    def pulled(self, which: Sequence[int], values: Sequence[Any], outputs: Sequence[Any], gs: Sequence[Any]) -> tuple[Any, ...]:
        """The cotangents of the boxed arguments `which`, from those of the outputs."""
        region = self.region
        if region is None:
            raise RuntimeError(f"{self.mapped.title}: the derivative was asked for before the function was called")
        call = region.call
        number = {slot: k for k, slot in enumerate(self._inputs())}
        wrt = tuple(number[self.slots[k]] for k in which)
        inputs: list[Any] = [DTensor(node) for node in region.inputs]
        for slot, value in zip(self.slots, values, strict=True):
            inputs[number[slot]] = relaid(value, call.layouts[number[slot]])
        cots, scales = zip(*(_handed_out(y, g) for y, g in zip(outputs, gs, strict=True)), strict=True)
        placed = [self._placed(region, i) for i in wrt]
        backward = Backward(
            call.func, call.title, call.tree, call.leaves, call.declared, wrt, tuple(f for _, f, _ in placed),
            tuple(self.outs), tuple(scales), tuple(kept for _, _, kept in placed), call.writeable,
        )  # fmt: skip
        layouts = tuple(layout for layout, _, _ in placed)
        found = _mapped(backward, f"the derivative of {call.title}", layouts, call.communicates)((inputs, list(cots)), {})
        return (found,) if len(layouts) == 1 else tuple(found)

    def _inputs(self) -> list[int]:
        """The flat arguments that are DTensors, in the order of the region's inputs."""
        return [i for i, leaf in enumerate(self.leaves) if isinstance(getval(leaf), DTensor)]

    def _placed(self, region: Region, i: int) -> tuple[Layout, float, Placements | None]:
        """The layout of the cotangent of input `i` as the ranks return it, its factor, and what of that the user declared."""
        layout = region.call.layouts[i]
        declared = region.in_grad_placements[i] if region.in_grad_placements is not None else None
        factor = 1.0
        placed: list[Placement] = []
        for m, p in enumerate(layout.placements):
            said = declared[m] if declared is not None else Replicate()
            if isinstance(p, Shard):
                placed.append(p)
            elif isinstance(said, Partial):
                placed.append(said)
            elif isinstance(p, Replicate):
                placed.append(Partial())
            elif p.op in ("sum", "avg"):
                placed.append(Replicate())
                factor *= layout.mesh.shape[m] if p.op == "avg" else 1
            else:
                raise TypeError(
                    f"{region.call.title}: argument {self.names[self._inputs()[i]]} is {p!r} on mesh dim "
                    f"{layout.mesh.dim_names[m]!r}: the terms of such a value have no gradient; reshard it to Replicate() first"
                )
        return layout.replace(placements=tuple(placed)), factor, declared


def declared_partial(x: DTensor) -> Placements | None:
    """The placements that the user declared for the gradient `x`, if it comes as a region left it."""
    node = x._node
    if isinstance(node, Out) and isinstance(node.region.func, Backward):
        return node.region.func.kept[node.index]
    return None


def _dtensors(value: Any) -> Iterator[DTensor]:
    return (x for x in flatten(value)[0] if isinstance(x, DTensor))


def _globals_of(func: Callable[..., Any]) -> Iterator[Any]:
    """The globals that a function names."""
    code = getattr(func, "__code__", None)
    if isinstance(func, FunctionType) and code is not None:
        yield from (func.__globals__[name] for name in code.co_names if name in func.__globals__)


def _mapped(func: Callable[..., Any], title: str, outs: tuple[Layout, ...], communicates: bool | None) -> Mapped:
    """`local_map` of a function whose results' layouts are known."""
    declared = Declared(tuple(layout.placements for layout in outs), Tree(tuple, (), (LEAF,) * len(outs)))
    return Mapped(func, title, declared, None, None, None, False, None, False, False, outs, communicates)


# -- cotangents of the outputs ------------------------------------------------------------------------------------------


def _handed_out(y: Any, g: Any) -> tuple[Any, float]:
    """The cotangent `g` of the output `y` as the ranks get it, and a factor."""
    layout = getval(y).layout
    g = relaid(cast(g, layout.dtype), whole(layout))
    sizes = zip(layout.placements, layout.mesh.shape, strict=True)
    scale = 1 / math.prod(n for p, n in sizes if isinstance(p, Replicate) or (isinstance(p, Partial) and p.op == "avg"))
    ops = {p.op for p in layout.placements if isinstance(p, Partial)}
    return (_term_by_term(y, g, layout), scale) if ops & {"max", "min", "prod"} else (g, scale)


def _term_by_term(y: Any, g: Any, layout: Layout) -> Any:
    """The cotangents of the ranks' own terms, where they depend on the terms: back through one mesh dim after another.

    The terms are reduced over the first Partial mesh dim, the results over the next, and so on; `levels` are these results. Each
    rank's own cotangent lies in what is labelled a term of a sum.
    """
    axes = layout.partial_axes
    levels = [y]
    for m in axes:
        at = getval(levels[-1]).layout
        levels.append(relaid(levels[-1], at.replace(placements=_with(at.placements, m, Replicate()))))
    for k in reversed(range(len(axes))):
        m, op = axes[k], getval(y).placements[axes[k]].op
        if op in ("sum", "avg"):
            continue
        mine = layout.replace(placements=tuple(Partial() if j in axes[k:] else p for j, p in enumerate(whole(layout).placements)))
        pull = _attained if op in ("max", "min") else _multiplied
        g = pull(levels[k], levels[k + 1], g, mine, m)
    return g


def _with(placements: Placements, m: int, p: Placement) -> Placements:
    return (*placements[:m], p, *placements[m + 1 :])


def _over(x: Any, m: int) -> Any:
    """Terms reduced over one mesh dim."""
    layout = getval(x).layout
    return relaid(x, layout.replace(placements=_with(layout.placements, m, Replicate())))


def _attained(u: Any, v: Any, g: Any, mine: Layout, m: int) -> Any:
    u, v = getval(u), getval(v)  # where a maximum is attained changes only in jumps
    ties = _over(_mapped(_equal, "the ties of a maximum", (mine,), False)((u, v), {}), m)
    return _mapped(_share, "the gradient of a maximum", (mine,), False)((g, u, v, ties), {})


def _equal(u: Any, v: Any) -> Any:
    return (u == v).astype(u.dtype)


def _share(g: Any, u: Any, v: Any, ties: Any) -> Any:
    return np.where(u == v, g / np.where(ties == 0, 1, ties), 0).astype(u.dtype)


def _multiplied(u: Any, v: Any, g: Any, mine: Layout, m: int) -> Any:
    if isbox(u):
        raise TypeError(
            "a product over ranks, Partial('prod'), has first derivatives only; for more make it in the function, with "
            "all_reduce(x, op='prod')"
        )
    def total(func: Callable[..., Any], op: Placement) -> Any:
        terms = _mapped(func, "the terms of a product", (mine.replace(placements=_with(mine.placements, m, op)),), False)
        return _over(terms((u,), {}), m)

    zeros, rest = total(_zeros, Partial()), total(_nonzero, Partial("prod"))
    return _mapped(_times_others, "the gradient of a product", (mine,), False)((g, u, zeros, rest), {})


def _zeros(u: Any) -> Any:
    return (u == 0).astype(u.dtype)


def _nonzero(u: Any) -> Any:
    return np.where(u == 0, 1, u).astype(u.dtype)


def _times_others(g: Any, u: Any, zeros: Any, rest: Any) -> Any:
    return (g * others_product(u, lambda _, op: zeros if op == "sum" else rest)).astype(u.dtype)
