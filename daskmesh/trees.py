"""Nested containers of arguments, outputs and placements, flattened and put back.

Lists, tuples (named ones too) and dicts are containers, everything else is a leaf, None as well. Leaves come in the order of
their containers, those of a dict in the sorted order of its keys; a dict that is put back has its keys in the order in which
they were given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from daskmesh.placement import Placement

__all__ = [
    "LEAF", "Entry", "Tree", "alike", "build", "count", "entries_for", "entry_tree", "flatten", "leaf_names", "leaves_along",
]  # fmt: skip

#: What is said about one array: its placements, by mesh-dim order or by name, or nothing.
Entry = tuple[Placement, ...] | Mapping[str, Placement] | None

BOTH_SPELLINGS = (
    "write [[Shard(0)], None] for two of them, one entry each, or [[Shard(0), Replicate()]] for one array over two mesh dims"
)


@dataclass(frozen=True)
class Tree:
    """The containers around leaves.

    Attributes
    ----------
    kind : type or None
        Of the container; None for a leaf.
    keys : tuple
        Of a dict, as they were given.
    branches : tuple of Tree
        In the order of the leaves.
    """

    kind: type | None = None
    keys: tuple[Any, ...] = ()
    branches: tuple[Tree, ...] = ()

    def __str__(self) -> str:
        if self.kind is None:
            return "*"
        inner = [str(b) for b in self.branches]
        if issubclass(self.kind, dict):
            return "{" + ", ".join(f"{k!r}: {b}" for k, b in zip(_sorted(self.keys), inner, strict=True)) + "}"
        if issubclass(self.kind, list):
            return "[" + ", ".join(inner) + "]"
        return "(" + ", ".join(inner) + ("," if len(inner) == 1 else "") + ")"


LEAF = Tree()


def flatten(value: Any, *, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Tree]:
    """The leaves of a value and the containers around them.

    Examples
    --------
    >>> leaves, tree = flatten({"b": 1, "a": [2, None]})
    >>> leaves, str(tree), build(tree, leaves)
    ([2, None, 1], "{'a': [*, *], 'b': *}", {'b': 1, 'a': [2, None]})
    """
    leaves: list[Any] = []

    def walk(v: Any) -> Tree:
        if (is_leaf is None or not is_leaf(v)) and isinstance(v, (list, tuple, dict)):
            inner = [v[k] for k in _sorted(v)] if isinstance(v, dict) else v
            return Tree(type(v), tuple(v) if isinstance(v, dict) else (), tuple(walk(i) for i in inner))
        leaves.append(v)
        return LEAF

    return leaves, walk(value)


def build(tree: Tree, leaves: Sequence[Any]) -> Any:
    """Put leaves back into their containers."""
    rest = iter(leaves)

    def make(t: Tree) -> Any:
        if t.kind is None:
            return next(rest)
        inner = [make(b) for b in t.branches]
        if issubclass(t.kind, dict):
            held = dict(zip(_sorted(t.keys), inner, strict=True))
            return {k: held[k] for k in t.keys}
        if hasattr(t.kind, "_fields"):
            return t.kind(*inner)
        return inner if issubclass(t.kind, list) else tuple(inner)

    return make(tree)


def leaves_along(tree: Tree, value: Any) -> list[Any]:
    """The leaves of a value that was built along `tree`, containers in the place of a leaf left whole.

    Examples
    --------
    >>> leaves_along(flatten({"a": 1, "b": 2})[1], {"a": [3, 4], "b": 5})
    [[3, 4], 5]
    """
    if tree.kind is None:
        return [value]
    inner = [value[k] for k in _sorted(tree.keys)] if issubclass(tree.kind, dict) else value
    return [leaf for t, v in zip(tree.branches, inner, strict=True) for leaf in leaves_along(t, v)]


def _sorted(keys: Any) -> list[Any]:
    try:
        return sorted(keys)
    except TypeError:  # keys of several types have no order of their own
        return sorted(keys, key=lambda k: (type(k).__name__, repr(k)))


def leaf_names(tree: Tree, name: str = "") -> Iterator[str]:
    """How each leaf is reached from the value called `name`.

    Examples
    --------
    >>> list(leaf_names(flatten({"b": 1, "a": [2, 3]})[1], "batch"))
    ["batch['a'][0]", "batch['a'][1]", "batch['b']"]
    """
    if tree.kind is None:
        yield name
        return
    steps = _sorted(tree.keys) if issubclass(tree.kind, dict) else range(len(tree.branches))
    for step, branch in zip(steps, tree.branches, strict=True):
        yield from leaf_names(branch, f"{name}[{step!r}]")


def _is_entry(e: Any) -> bool:
    if isinstance(e, Mapping):
        return all(isinstance(p, Placement) for p in e.values())
    return e is None or (isinstance(e, (list, tuple)) and all(isinstance(p, Placement) for p in e))


def entry_tree(given: Any, what: str) -> tuple[list[Entry], Tree]:
    """Read placements, one entry per array, in nested containers or flat.

    A flat sequence of Placements only, or one mapping, is the entry of one array.

    Raises
    ------
    TypeError
        Placements and other entries at one level, or something that is neither.

    Examples
    --------
    >>> from daskmesh.placement import Replicate, Shard
    >>> entries, tree = entry_tree([[Shard(0)], None], "out_placements")
    >>> entries, str(tree)
    ([(Shard(0),), None], '[*, *]')
    >>> str(entry_tree([Shard(0), Replicate()], "out_placements")[1])
    '*'
    """
    if isinstance(given, (list, tuple)) and not given:
        return [], Tree(tuple)
    leaves, tree = flatten(given, is_leaf=_is_entry)
    for leaf in leaves:
        if not _is_entry(leaf):
            if isinstance(leaf, Placement):
                raise TypeError(f"{what}: {given!r} holds {leaf!r} beside other entries of the same level; {BOTH_SPELLINGS}")
            raise TypeError(f"{what}: expected placements or None for each array, got {leaf!r}; {BOTH_SPELLINGS}")
    return [tuple(e) if isinstance(e, (list, tuple)) else e for e in leaves], tree


def entries_for(entries: Sequence[Entry], given: Tree, tree: Tree) -> list[Entry] | None:
    """One entry for each leaf of `tree`: as many entries as leaves, or containers that mirror those of `tree`.

    None in the place of a container stands for all its leaves. The answer is None if the entries fit in neither way.

    Examples
    --------
    >>> entries, given = entry_tree([None, None], "in_placements")
    >>> entries_for(entries, given, flatten((1, [2, 3]))[1])
    [None, None, None]
    """
    if len(entries) == count(tree):
        return list(entries)
    rest = iter(entries)
    out: list[Entry] = []

    def walk(g: Tree, t: Tree) -> bool:
        if g.kind is None:
            entry = next(rest)
            fits = t.kind is None or not entry
            out.extend([entry] if t.kind is None else [None] * count(t))
            return fits
        if t.kind is None or len(g.branches) != len(t.branches) or _sorted(g.keys) != _sorted(t.keys):
            return False
        return all(walk(a, b) for a, b in zip(g.branches, t.branches, strict=True))

    return out if walk(given, tree) else None


def alike(a: Tree, b: Tree) -> bool:
    """Whether two trees hold the same leaves in the same places, a list counting as a tuple.

    Examples
    --------
    >>> alike(flatten([1, (2,)])[1], flatten((1, [2]))[1]), alike(LEAF, flatten([1])[1])
    (True, False)
    """
    if (a.kind is None) != (b.kind is None) or len(a.branches) != len(b.branches) or _sorted(a.keys) != _sorted(b.keys):
        return False
    return all(map(alike, a.branches, b.branches))


def count(tree: Tree) -> int:
    """Number of leaves."""
    return 1 if tree.kind is None else sum(map(count, tree.branches))
