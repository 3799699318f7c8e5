"""Propagation: the layouts an operation needs of its operands and the layout it gives, in index notation.

An operation is a `Signature`: labels for the tensor dims of every operand and of the result, as einsum writes them. Along *one*
mesh dim it allows a few rows, and elementwise operations, reductions, contractions, transposition and broadcasting are all
cases of them::

    matmul  ij, jk -> ik          a            b            result
    cut along i                   Shard(0)     Replicate    Shard(0)        an operand without the label is whole
    cut along k                   Replicate    Shard(1)     Shard(1)
    cut along j, which is summed  Shard(1)     Shard(0)     Partial(sum)    each rank reduces its part
    whole                         Replicate    Replicate    Replicate
    terms pass                    Partial      Replicate    Partial         `algebra.Flow`, one row each

Rows of different mesh dims combine freely: two mesh dims on one label nest in mesh order. `decide` takes, for each mesh dim, the
row that leaves the operands where they are; else the combination that moves the fewest bytes, where a result left Partial by a
move is charged with the reduction it still needs; ties go to fewer bytes now, fewer operands changed, then the row listed
first. Bytes are compared under even splits; the plans of the decision give the true figures.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from daskmesh.algebra import PLACED, passes
from daskmesh.layout import Layout, make_layout, split_sizes
from daskmesh.mesh import ProcessMesh
from daskmesh.notation import (
    Label,
    Labels,
    Placements,
    Shape,
    Signature,
    broadcasting,
    contraction,
    elementwise,
    legal_rows,
    matmul,
    rearranging,
    reducing,
)
from daskmesh.pen import format_bytes
from daskmesh.placement import Partial, Placement, Replicate
from daskmesh.plan import Plan, make_plan
from daskmesh.pricing import estimated_bytes

__all__ = [
    "Decision", "Dense", "Signature", "broadcasting", "contraction", "decide", "elementwise", "matmul", "rearranging", "reducing",
]  # fmt: skip

Dtype = np.dtype[Any]

_MAX_COMBINATIONS = 16


class Dense(NamedTuple):
    """A NumPy array or scalar among the operands: counts as Replicate."""

    shape: Shape
    dtype: Dtype


class _Option(NamedTuple):
    """A row as it applies to the operands at hand along one mesh dim."""

    inputs: Placements
    output: Placement
    why: str
    label: Label | None = None
    changed: int = 0
    costly: bool = False
    thin: bool = False


def _options(
    signature: Signature, layouts: Sequence[Layout], m: int, dtype: Dtype, fixed: Layout | None
) -> list[_Option]:
    """The rows that serve along mesh dim `m`; only the first that changes nothing, if there is one."""
    n = layouts[0].mesh.shape[m]
    current = tuple(layout.placements[m] for layout in layouts)
    options = []
    for row in legal_rows(signature):
        if fixed is not None and row.output != fixed.placements[m]:
            continue
        inputs = row.inputs if row.flow is None else _flowing(row.inputs, row.flow.rule, layouts, m, dtype, fixed is not None)
        if inputs is None:
            continue
        if inputs == current:
            return [_Option(inputs, row.output, row.why, row.label)]
        moves = [(a, b) for a, b in zip(current, inputs, strict=True) if a != b]
        costly = any(not isinstance(a, Replicate) for a, _ in moves)
        thin = row.label is not None and _size(signature, layouts, row.label) < n
        options.append(_Option(inputs, row.output, row.why, row.label, len(moves), costly, thin))
    if options:
        return options
    whole = Replicate()
    moved = sum(p != whole for p in current)
    why = f"computed whole, then placed as {fixed.placements[m]!r}" if fixed is not None else "computed whole on every rank"
    return [_Option((whole,) * len(layouts), whole, why, changed=moved, costly=moved > 0)]


def _flowing(
    wanted: Placements, rule: str, layouts: Sequence[Layout], m: int, dtype: Dtype, fixed: bool
) -> Placements | None:
    """The inputs of a flow; None where no operand holds such terms, their dtype forbids it, or one would have to be gathered."""
    inputs: list[Placement] = []
    held = False
    for want, layout in zip(wanted, layouts, strict=True):
        p = layout.placements[m]
        if isinstance(want, Partial) and p == want:
            if not passes(rule, layout.dtype, dtype):
                return None
            held = True
        elif isinstance(want, Partial) and isinstance(p, Replicate):
            want = want if want.op in PLACED else p
        elif isinstance(want, Partial) and not fixed:
            return None
        inputs.append(want)
    return tuple(inputs) if held else None


def _size(signature: Signature, layouts: Sequence[Layout], label: Label) -> int:
    for labels, layout in zip(signature.operands, layouts, strict=True):
        if label in labels:
            return layout.shape[labels.index(label)]
    return dict(signature.extents)[label]


def _owed(options: Sequence[_Option], mesh: ProcessMesh, nbytes: int) -> float:
    """Bytes of the reduce-scatter that the moves of `options` leave to be done."""
    terms = copies = 1
    for o, n in zip(options, mesh.shape, strict=True):
        if isinstance(o.output, Replicate):
            copies *= n
        elif o.costly and isinstance(o.output, Partial):
            terms *= n
    return float(nbytes * copies * (terms - 1))


def _choose(options: list[list[_Option]], layouts: Sequence[Layout], nbytes: int) -> tuple[_Option, ...]:
    """One option per mesh dim, by the order that the head of this module states."""
    if all(len(o) == 1 for o in options):
        return tuple(o[0] for o in options)
    mesh = layouts[0].mesh

    def price(combination: Sequence[_Option]) -> tuple[float, float, int, int]:
        targets = zip(*(o.inputs for o in combination), strict=True)
        moved = sum(estimated_bytes(layout, target) for layout, target in zip(layouts, targets, strict=True))
        owed = _owed(combination, mesh, nbytes)
        return moved + owed, moved, sum(o.changed for o in combination), sum(o.thin for o in combination)

    options = [sorted(o, key=lambda o: (o.costly, o.changed, o.thin)) for o in options]
    easiest = tuple(o[0] for o in options)
    if not price(easiest)[0]:
        return easiest
    if math.prod(map(len, options)) > _MAX_COMBINATIONS:
        options = _shortlisted(options, layouts, nbytes)
    return min(itertools.product(*options), key=price)


def _shortlisted(options: list[list[_Option]], layouts: Sequence[Layout], nbytes: int) -> list[list[_Option]]:
    """The most promising options of each mesh dim, each priced as if the other mesh dims stayed as they are."""
    open_dims = sum(len(o) > 1 for o in options)
    keep = max(1, int(_MAX_COMBINATIONS ** (1 / open_dims) + 1e-9))
    short = []
    for m, given in enumerate(options):
        n = layouts[0].mesh.shape[m]

        def alone(o: _Option, m: int = m, n: int = n) -> tuple[float, int, int]:
            moved = sum(
                estimated_bytes(layout, (*layout.placements[:m], p, *layout.placements[m + 1 :]))
                for layout, p in zip(layouts, o.inputs, strict=True)
            )
            owed = nbytes * (n - 1) if o.costly and isinstance(o.output, Partial) else 0
            return moved + owed, o.changed, o.thin

        short.append(sorted(given, key=alone)[:keep])
    return short


def _adapted(chunks: Shape, axes: Shape, aims: Shape, mesh: ProcessMesh) -> Shape | None:
    """Part sizes over the mesh dims `axes` carried over to `aims`, where one begins with the other."""
    if axes == aims[: len(axes)]:
        return _split(chunks, aims[len(axes) :], mesh)
    if aims != axes[: len(aims)]:
        return None
    width = math.prod(mesh.shape[m] for m in axes[len(aims) :])
    return tuple(sum(chunks[i : i + width]) for i in range(0, len(chunks), width))


def _split(chunks: Shape, axes: Iterable[int], mesh: ProcessMesh) -> Shape:
    for m in axes:
        chunks = tuple(itertools.chain.from_iterable(split_sizes(n, mesh.shape[m]) for n in chunks))
    return chunks


def _parts(
    signature: Signature, layouts: Sequence[Layout], chosen: Sequence[_Option], fixed: Layout | None
) -> dict[Label, Shape]:
    """Part sizes of every cut label: the fixed output's, else those that most bytes of operands have, else the rule's."""
    cut: dict[Label, Shape] = {}
    for m, option in enumerate(chosen):
        if option.label is not None:
            cut[option.label] = (*cut.get(option.label, ()), m)
    parts = {}
    holders = list(zip(signature.operands, layouts, strict=True))
    for label, aims in cut.items():
        votes: dict[Shape, int] = {}
        final = [(signature.output, fixed)] if fixed is not None and label in signature.output else []
        for labels, layout in final or holders:
            if label not in labels or not layout.shard_axes[labels.index(label)]:
                continue
            d = labels.index(label)
            sizes = _adapted(layout.chunks[d], layout.shard_axes[d], aims, layout.mesh)
            if sizes is not None:
                votes[sizes] = votes.get(sizes, 0) + layout.nbytes
        whole = (_size(signature, layouts, label),)
        parts[label] = max(votes, key=lambda v: votes[v]) if votes else _split(whole, aims, layouts[0].mesh)
    return parts


def _laid_out(
    labels: Labels, shape: Shape, placements: Placements, dtype: Dtype, mesh: ProcessMesh, parts: dict[Label, Shape]
) -> Layout:
    chunks = tuple((n,) if x is None else parts.get(x, (n,)) for x, n in zip(labels, shape, strict=True))
    return Layout(mesh, placements, shape, dtype, chunks)


@dataclass(frozen=True)
class Decision:
    """What an operation does to its operands before it runs, and the layout that it gives.

    Attributes
    ----------
    sources, operands : tuple of Layout
        The layouts that the operands have and must have; equal where nothing is to be done.
    output : Layout
        Layout of what the locals yield.
    result : Layout
        Equal to `output`, unless a fixed output needs a last placement (which moves nothing).
    whys : tuple of str
        Per mesh dim, the row that was taken.
    may_be_empty : bool
        A max or min meets an empty local part on some rank: start from the neutral element.
    """

    sources: tuple[Layout, ...]
    operands: tuple[Layout, ...]
    output: Layout
    result: Layout
    whys: tuple[str, ...]
    may_be_empty: bool = False

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        """One plan per operand, and one for the result where it is placed last."""
        pairs = [*zip(self.sources, self.operands, strict=True), *([(self.output, self.result)] * (self.output != self.result))]
        return tuple(make_plan(a, b) for a, b in pairs)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes that move between ranks before the operation can run."""
        return sum(plan.total_bytes for plan in self.plans)

    @cached_property
    def reasons(self) -> tuple[str, ...]:
        """Per mesh dim, what goes in, what comes out, and why."""
        lines: list[str] = []
        for m, (name, why) in enumerate(zip(self.output.mesh.dim_names, self.whys, strict=True)):
            inputs = ", ".join(repr(layout.placements[m]) for layout in self.operands)
            moves = [
                f"operand {k} {'is reduced' if isinstance(a.placements[m], Partial) else 'becomes'}: "
                f"{a.placements[m]!r} -> {b.placements[m]!r}"
                for k, (a, b) in enumerate(zip(self.sources, self.operands, strict=True))
                if a.placements[m] != b.placements[m]
            ]
            lines.append("; ".join([f"{name}: {inputs} -> {self.output.placements[m]!r}, {why}", *moves]))
        return tuple(lines)

    @property
    def text(self) -> str:
        """The decision in words and bytes."""
        return "\n".join([*self.reasons, f"moves {format_bytes(self.total_bytes)}"])


@lru_cache(4096)
def decide(signature: Signature, operands: tuple[Layout | Dense, ...], dtype: Dtype, output: Layout | None = None) -> Decision:
    """Choose the layouts of the operands of an operation, and that of its result.

    **Communication**: none here; ``plans`` of the decision hold what has to move before the operation can run.

    Parameters
    ----------
    operands : tuple of Layout or Dense
        At least one Layout; Dense counts as Replicate.
    dtype : dtype
        Of the result.
    output : Layout, optional
        The layout that the result must have, as ``x += y`` demands.

    Raises
    ------
    ValueError
        The operands lie on different meshes; a label has two sizes; a max or min over a globally empty dim.

    Examples
    --------
    >>> import numpy as np
    >>> import daskmesh as dm
    >>> from daskmesh.layout import make_layout
    >>> from daskmesh.rules import decide, matmul
    >>> mesh = dm.init_mesh(2, ["x"])
    >>> a = make_layout(mesh, [dm.Shard(1)], (4, 6), "f8")
    >>> b = make_layout(mesh, [dm.Shard(0)], (6, 2), "f8")
    >>> print(decide(matmul((4, 6), (6, 2)), (a, b), np.dtype("f8")).text)
    x: Shard(1), Shard(0) -> Partial('sum'), every rank reduces its part by sum
    moves 0 B
    """
    layouts = _layouts(operands, output)
    sizes = _sizes(signature, layouts)
    mesh = layouts[0].mesh
    shape = tuple(1 if x is None else sizes[x] for x in signature.output)
    if output is not None and (output.shape, output.dtype) != (shape, dtype):
        raise ValueError(
            f"the result, {dtype} of shape {shape}, does not fit the output given, {output.dtype} of shape {output.shape}"
        )
    options = [_options(signature, layouts, m, dtype, output) for m in range(mesh.ndim)]
    chosen = _choose(options, layouts, math.prod(shape) * dtype.itemsize)
    parts = _parts(signature, layouts, chosen, output)
    targets = tuple(
        _laid_out(labels, source.shape, tuple(o.inputs[k] for o in chosen), source.dtype, mesh, parts)
        for k, (labels, source) in enumerate(zip(signature.operands, layouts, strict=True))
    )
    made = _laid_out(signature.output, shape, tuple(o.output for o in chosen), dtype, mesh, parts)
    ordered = signature.reduce in ("max", "min")
    return Decision(
        sources=layouts,
        operands=tuple(a if a == b else b for a, b in zip(layouts, targets, strict=True)),
        output=made,
        result=made if output is None else output,
        whys=tuple(o.why for o in chosen),
        may_be_empty=ordered and any(0 in parts.get(x, ()) for x in signature.reduced),
    )


def _layouts(operands: Sequence[Layout | Dense], output: Layout | None) -> tuple[Layout, ...]:
    """All operands as layouts on one mesh."""
    given = [x for x in (*operands, output) if isinstance(x, Layout)]
    if not given:
        raise TypeError("a decision needs a Layout among the operands; NumPy arrays alone are NumPy's business")
    mesh = given[0].mesh
    for k, x in enumerate((*operands, output)):
        if isinstance(x, Layout) and x.mesh != mesh:
            who = f"operand {k}" if k < len(operands) else "the output"
            raise ValueError(
                f"{who} of shape {x.shape} lies on {x.mesh!r}, another on {mesh!r}; "
                f"bring both to one mesh first: reshard(x, mesh, placements)"
            )
    return tuple(x if isinstance(x, Layout) else make_layout(mesh, (), x.shape, x.dtype) for x in operands)


def _sizes(signature: Signature, layouts: Sequence[Layout]) -> dict[Label, int]:
    """The size of every label; the signature and the layouts must agree."""
    sizes: dict[Label, int] = dict(signature.extents)
    for k, (labels, layout) in enumerate(zip(signature.operands, layouts, strict=True)):
        if len(labels) != layout.ndim:
            raise ValueError(f"operand {k} of shape {layout.shape} has {layout.ndim} dims, the operation takes {len(labels)}")
        for d, (x, n) in enumerate(zip(labels, layout.shape, strict=True)):
            if x is not None and sizes.setdefault(x, n) != n:
                raise ValueError(f"operand {k} of shape {layout.shape}: dim {d} has size {n}, it meets a dim of size {sizes[x]}")
    if signature.reduce in ("max", "min") and any(sizes[x] == 0 for x in signature.reduced):
        raise ValueError(f"zero-size array to reduction operation {signature.reduce}imum which has no identity")
    return sizes
