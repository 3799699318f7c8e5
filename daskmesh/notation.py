"""Index notation: an operation as labels for the tensor dims of its operands and of its result.

As einsum writes them: ``matmul`` is ``ij, jk -> ik``, a sum over the rows ``ij -> j``, a transposition ``ij -> ji``, an addition
with broadcasting ``ij, j -> ij``. A dim of size 1 that broadcasts has no label, for nothing can be cut there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from daskmesh.algebra import Flow, carried, multilinear, reduction_flows
from daskmesh.placement import Partial, Placement, ReduceType, Replicate, Shard

__all__ = [
    "Label", "Labels", "Row", "Shape", "Signature", "broadcasting", "contraction", "elementwise", "legal_rows", "matmul",
    "rearranging", "reducing",
]  # fmt: skip

Label = int | str
Labels = tuple[Label | None, ...]
Shape = tuple[int, ...]
Placements = tuple[Placement, ...]


@dataclass(frozen=True, eq=False)
class Signature:
    """An operation in index notation; the builders below make the usual ones, and cache them.

    Attributes
    ----------
    operands, output : labels
        One label per tensor dim; None for a dim of size 1 that broadcasts or is new.
    reduce : str or None
        Reduction by which labels absent from the output are reduced; None: they may not be cut.
    flows : tuple of Flow
        Which Partials pass.
    whole : frozenset
        Labels that may not be cut.
    extents : tuple of (label, size)
        Sizes of labels that no operand has.
    """

    operands: tuple[Labels, ...]
    output: Labels
    reduce: str | None = None
    flows: tuple[Flow, ...] = ()
    whole: frozenset[Label] = frozenset()
    extents: tuple[tuple[Label, int], ...] = ()

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        return self.operands, self.output, self.reduce, self.flows, self.whole, self.extents

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Signature) and self._key == other._key)

    @cached_property
    def labels(self) -> tuple[Label, ...]:
        """Labels that may be cut and that an operand has: the output's first, then the reduced ones."""
        held = dict.fromkeys(x for labels in (self.output, *self.operands) for x in labels if x is not None)
        twice = {x for labels in self.operands for x in labels if labels.count(x) > 1}
        kept = [x for x in held if x in self.output or self.reduce is not None]
        return tuple(x for x in kept if x not in self.whole | twice and any(x in labels for labels in self.operands))

    @cached_property
    def reduced(self) -> tuple[Label, ...]:
        """Labels of the operands that the output lacks."""
        return tuple(dict.fromkeys(x for s in self.operands for x in s if x is not None and x not in self.output))


def _unbroadcast(operands: Sequence[Labels], shapes: Sequence[Shape]) -> tuple[Labels, ...]:
    """Labels with those of size 1 dropped where another operand is longer."""
    sizes: dict[Label, int] = {}
    for labels, shape in zip(operands, shapes, strict=True):
        for x, n in zip(labels, shape, strict=True):
            if x is None or n == 1:
                continue
            if sizes.setdefault(x, n) != n:
                shown = " ".join(str(s) for s in shapes)
                raise ValueError(f"operands could not be broadcast together with shapes {shown}: sizes {sizes[x]} and {n} meet")
    return tuple(
        tuple(None if n == 1 and x in sizes else x for x, n in zip(labels, shape, strict=True))
        for labels, shape in zip(operands, shapes, strict=True)
    )


@lru_cache(4096)
def elementwise(shapes: tuple[Shape, ...], flows: tuple[Flow, ...] = ()) -> Signature:
    """Any operation that broadcasts its operands.

    Examples
    --------
    >>> from daskmesh.notation import elementwise
    >>> elementwise(((3, 4), (4,), (3, 1))).operands
    ((0, 1), (1,), (0, None))
    """
    ndim = max(map(len, shapes), default=0)
    operands: list[Labels] = [tuple(range(ndim - len(s), ndim)) for s in shapes]
    return Signature(_unbroadcast(operands, shapes), tuple(range(ndim)), flows=flows)


@lru_cache(4096)
def reducing(
    ndim: int, axes: tuple[int, ...], op: str | None, *, keepdims: bool = False, flows: tuple[Flow, ...] | None = None
) -> Signature:
    """Reduction of tensor dims by `op`; with None the reduced dims are never cut. `flows` defaults to those of `op`."""
    output = tuple(None if d in axes else d for d in range(ndim) if keepdims or d not in axes)
    given = flows if flows is not None else reduction_flows(op) if op is not None else ()
    return Signature((tuple(range(ndim)),), output, op, given)


@lru_cache(4096)
def contraction(operands: tuple[Labels, ...], output: Labels, shapes: tuple[Shape, ...]) -> Signature:
    """Sum of products, as einsum writes it.

    Examples
    --------
    >>> from daskmesh.notation import contraction
    >>> contraction((tuple("ij"), tuple("jk")), tuple("ik"), ((2, 3), (3, 4))).reduced
    ('j',)
    """
    return Signature(_unbroadcast(operands, shapes), output, "sum", multilinear(len(operands)))


@lru_cache(4096)
def matmul(a: Shape, b: Shape) -> Signature:
    """``a @ b`` with NumPy's rules for vectors and stacks of matrices."""
    if not a or not b:
        raise ValueError(f"matmul: an operand is 0-d (shapes {a} and {b}); use * instead")
    if a[-1] != b[-2 if len(b) > 1 else -1]:
        raise ValueError(f"matmul: the last dim of shape {a} does not match the contracted dim of shape {b}")
    stack = max(len(a), len(b), 2) - 2
    lead = tuple(range(stack))
    left: Labels = (*lead[stack - max(len(a) - 2, 0) :], *(("i", "j") if len(a) > 1 else ("j",)))
    right: Labels = (*lead[stack - max(len(b) - 2, 0) :], *(("j", "k") if len(b) > 1 else ("j",)))
    output: Labels = (*lead, *(("i",) if len(a) > 1 else ()), *(("k",) if len(b) > 1 else ()))
    return contraction((left, right), output, (a, b))


@lru_cache(4096)
def rearranging(ndim: int, order: tuple[int | None, ...]) -> Signature:
    """Transposing, squeezing and adding dims: the operand's dims in the order given, None for a new dim of size 1.

    Dims left out have size 1 and are not cut.
    """
    return Signature((tuple(range(ndim)),), order, None, carried(1))


@lru_cache(4096)
def broadcasting(shape: Shape, to: Shape) -> Signature:
    """``np.broadcast_to``: new dims and dims of size 1 grow on every rank."""
    output = tuple(range(len(to)))
    (labels, _) = _unbroadcast((output[len(to) - len(shape) :], output), (shape, to))
    return Signature((labels,), output, None, carried(1), extents=tuple((d, to[d]) for d in output if d not in labels))


class Row(NamedTuple):
    """One legal assignment of placements along one mesh dim."""

    inputs: Placements
    output: Placement
    why: str
    label: Label | None = None
    flow: Flow | None = None


@lru_cache(4096)
def legal_rows(signature: Signature) -> tuple[Row, ...]:
    """The legal rows of one mesh dim, in the order that settles ties; a flow also asks what dtypes its terms have."""
    whole = Replicate()
    rows = []
    for x in signature.labels:
        inputs: Placements = tuple(Shard(labels.index(x)) if x in labels else whole for labels in signature.operands)
        if x in signature.output:
            d = signature.output.index(x)
            rows.append(Row(inputs, Shard(d), f"cut along output dim {d}", x))
        elif signature.reduce is not None:
            why = f"every rank reduces its part by {signature.reduce}"
            rows.append(Row(inputs, _partial(signature.reduce), why, x))
    every = (whole,) * len(signature.operands)
    rows.append(Row(every, whole, "computed whole on every rank"))
    for flow in signature.flows:
        terms: Placements = tuple(whole if op is None else _partial(op) for op in flow.inputs)
        rows.append(Row(terms, _partial(flow.output), "the terms pass through the operation", flow=flow))
    for x, _ in signature.extents:
        d = signature.output.index(x)
        rows.append(Row(every, Shard(d), f"cut along output dim {d}, which is new", x))
    return tuple(rows)


@lru_cache(16)
def _partial(op: str) -> Partial:
    return Partial(ReduceType(op))
