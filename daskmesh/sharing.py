"""What several programs share: in which order nodes are lowered, and which values are worth computing once.

A value that two exchanges or reductions read, say ``y`` in ``y - y.mean()``, lies in the programs of both. Where it is cheap,
each evaluates it again, which costs less than a way through memory; where it is not, it becomes a boundary::

    y = a @ b                    one task per rank makes y; the mean and the difference read it
    y = x + 1                    the mean and the difference add 1, each in its own loop
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

__all__ = ["lowering_order", "share"]

_LIGHT = {
    np.add, np.subtract, np.multiply, np.divide, np.negative, np.positive, np.absolute, np.square, np.maximum, np.minimum,
    np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal, np.logical_not, np.logical_and,
    np.logical_or, np.bitwise_and, np.bitwise_or, np.invert, np.conjugate,
}  # fmt: skip
_TWICE = 4  # light steps that may be evaluated once more for each reader


class _Node(Protocol):
    boundary: bool
    _layer: Any

    def parents(self) -> Sequence[Any]: ...

    def as_boundary(self) -> Any: ...


Walk = Callable[[Any], tuple[list[Any], list[Any]]]


def lowering_order(node: _Node, walk: Walk) -> list[Any]:
    """The nodes behind `node` that have no layer yet, itself the last, those that it reads first.

    Parameters
    ----------
    walk : callable
        Gives the boundaries that a node reads, and the local nodes of its program in order of evaluation, itself the last.
    """
    heads = _heads(node, walk)
    programs = [walk(head)[1] for head in heads]
    count = Counter(id(n) for program in programs for n in program)
    if max(count.values(), default=0) < 2:
        return heads
    steps = [(n, a) for program in programs for n in program for a in n.parents()]
    borders = {id(a) for n, a in steps if count[id(a)] > 1 and count[id(n)] != count[id(a)]}
    marked = False
    for n in (n for program in programs for n in program):
        if id(n) in borders and not n.boundary and sum(map(_cost, walk(n)[1])) > _TWICE:
            n.as_boundary()
            marked = True
    return _heads(node, walk) if marked else heads


def _cost(node: Any) -> int:
    return 1 if node.func in _LIGHT else _TWICE + 1


def _heads(node: _Node, walk: Walk) -> list[Any]:
    """Nodes without a layer from which a layer is made, in order. No recursion: chains are long."""
    order: dict[int, Any] = {}
    stack: list[tuple[Any, bool]] = [(node, False)]
    while stack:
        n, ready = stack.pop()
        if id(n) in order or n._layer is not None:
            continue
        if ready:
            order[id(n)] = n
        else:
            stack.append((n, True))
            stack.extend((a, False) for a in reversed(walk(n)[0]))
    return list(order.values())


class _Several:
    """Several results as one node."""

    _layer = None

    def __init__(self, ends: Sequence[Any]) -> None:
        self.boundary = True
        self._ends = ends

    def parents(self) -> Sequence[Any]:
        return self._ends

    def as_boundary(self) -> Any:
        return self


def share(ends: Sequence[Any], walk: Walk) -> None:
    """Let what several results need, say a loss and its gradients, be computed once where that is worth it."""
    borrowed = [n for n in ends if not n.boundary]
    for n in borrowed:
        n.boundary = True
    lowering_order(_Several(ends), walk)
    for n in borrowed:
        n.boundary = False
