"""Adjoints of the collectives: what a cotangent of the results of all ranks says about their arguments.

A collective is linear (or has a derivative) as one function of the arrays of *all* ranks of the group. Its adjoint is again a
collective, over the same group::

    all_reduce sum, avg     the same             all_to_all        with the two dims swapped
    all_gather              reduce_scatter       permute, shift    the other way round
    reduce_scatter          all_gather           scan              from the last rank to the first
    broadcast               sum on the root      halo_exchange     halos are sent back and added

max and min hand the cotangent to the terms that attained the value, in equal shares; prod to each term times the others. Where
the ranks' sizes are uneven, pieces go from rank to rank, the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from autograd.extend import defvjp, defvjp_argnums
from autograd.tracer import getval

from daskmesh import collectives
from daskmesh.gang import current_gang
from daskmesh.halo import halo_settings
from daskmesh.layout import split_sizes
from daskmesh.routes import primitive, refuse
from daskmesh.tape import as_local, cast

__all__ = ["together"]

Array = Any


@dataclass
class _Call:
    """One call of a collective: its name, options, and what its adjoint has to know."""

    func: Callable[..., Any]
    name: str
    mesh_dim: Any
    options: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)

    def forward(self, x: Array) -> Array:
        out = self.func(x, **self._arguments())
        if self.name in ("all_gather", "all_to_all"):
            dim = self.options["concat_dim" if self.name == "all_to_all" else "dim"]
            self.facts["sizes"] = _sizes(np.asarray(x), dim, self)
        if self.name == "halo_exchange":
            self.facts["halo"] = list(_origins(x.shape, **self.options))
        return as_local(np.asarray(out))

    def _arguments(self) -> dict[str, Any]:
        return self.options if self.name == "halo_exchange" else {"mesh_dim": self.mesh_dim, **self.options}

    @property
    def index(self) -> int:
        return collectives.axis_index(self.mesh_dim)

    @property
    def size(self) -> int:
        return collectives.axis_size(self.mesh_dim)


def _sizes(x: Array, dim: int, call: _Call) -> tuple[int, ...]:
    """The sizes of every rank's array along `dim`."""
    size = x.shape[dim % x.ndim] if x.ndim else 1
    return tuple(collectives.all_gather(size, call.mesh_dim).tolist())


_POSITIONAL = {
    "all_reduce": ("x", "mesh_dim"), "reduce_scatter": ("x", "mesh_dim"), "scan": ("x", "mesh_dim"),
    "all_gather": ("x", "mesh_dim"), "all_to_all": ("x", "mesh_dim"), "broadcast": ("x", "mesh_dim"),
    "permute": ("x", "mesh_dim", "pairs"), "shift": ("x", "mesh_dim", "by"),
    "halo_exchange": ("x", "depth", "mesh_dims", "boundary"),
}  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {
    "all_reduce": {"op": "sum"}, "reduce_scatter": {"op": "sum", "dim": 0}, "scan": {"op": "sum"},
    "all_gather": {"dim": 0, "tiled": True}, "broadcast": {"root": 0}, "shift": {"by": 1, "wrap": True},
    "halo_exchange": {"boundary": "none"},
}  # fmt: skip


def together(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], token: Any) -> Any:
    """Carry out a collective of a followed run: its result, and the next token."""
    name = getattr(func, "__name__", str(func))
    if name not in _ADJOINTS:
        refuse(f"{name}()")
    given = {**_DEFAULTS.get(name, {}), **dict(zip(_POSITIONAL[name], args, strict=False)), **kwargs}
    x = given.pop("x")
    if given.pop("out", None) is not None:
        refuse("halo_exchange(out=...)")
    mesh_dim = given.pop("mesh_dim", None)
    if name == "permute":
        given["pairs"] = tuple(given["pairs"])
    return _together(_Call(func, name, mesh_dim, given), x, token)


@primitive
def _together(call: _Call, x: Array, token: float) -> tuple[Array, float]:
    return call.forward(x), token


def _pulling(argnums: Sequence[int], ans: Any, args: tuple[Any, ...], kwargs: Any) -> Callable[[Any], Any]:
    call, x, _ = args
    out = ans[0]

    def pull(g: Any) -> tuple[Any, ...]:
        # Run on every rank, whether its own argument is followed or not.
        gx = None
        if out.dtype.kind in "fc":
            gx = _ADJOINTS[call.name](call, cast(g[0], out.dtype), x, out)
        return tuple((_nothing(x) if gx is None else gx) if n == 1 else g[1] for n in argnums)

    return pull


defvjp_argnums(_together, _pulling)


def _nothing(x: Array) -> Array:
    return as_local(np.zeros(np.shape(x), np.result_type(x)))


# -- pieces from rank to rank -------------------------------------------------------------------------------------------


@primitive
def _placed(values: Array, rows: Array, dim: int, size: int) -> Array:
    """Zeros of `size` rows along `dim`, with `values` added in the given rows."""
    out = np.zeros((*values.shape[:dim], size, *values.shape[dim + 1 :]), values.dtype)
    np.add.at(out, (*(slice(None),) * dim, rows), values)
    return as_local(out)


defvjp(_placed, lambda ans, values, rows, dim, size: lambda g: g[(*(slice(None),) * dim, rows)])


def _cut(x: Array, dim: int, start: int, stop: int) -> Array:
    return x[(*(slice(None),) * dim, slice(start, stop))]


def _ends(sizes: Sequence[int]) -> list[int]:
    return [0, *np.cumsum(sizes).tolist()]


def _swapped(pieces: Sequence[Array], call: _Call) -> list[Array]:
    """Piece i to rank i of the group; what came from every rank, in their order. By shifts, which leave the sizes free."""
    me, n = call.index, call.size
    came: dict[int, Array] = {me: pieces[me]}
    for by in range(1, n):
        came[(me - by) % n] = collectives.shift(pieces[(me + by) % n], call.mesh_dim, by)
    return [came[i] for i in range(n)]


def _added(terms: Sequence[Array]) -> Array:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _even(sizes: Sequence[int]) -> bool:
    return tuple(sizes) == split_sizes(sum(sizes), len(sizes))


# -- reductions ---------------------------------------------------------------------------------------------------------


def _shares(call: _Call, g: Array, x: Array, whole: Array) -> Array:
    """The cotangent of max or min, in equal shares to the terms that attained it."""
    mine = cast(x == whole, g.dtype)
    return g * mine / collectives.all_reduce(mine, call.mesh_dim)


def others_product(x: Array, total: Callable[[Array, str], Array]) -> Array:
    """The product of the other ranks' terms, right where terms are 0; `total` reduces over the ranks by an op."""
    zero = x == 0
    zeros = total(cast(zero, x.dtype), "sum")
    rest = total(np.where(zero, 1, x), "prod")
    # With one zero only that term has a product of others that is not 0.
    return np.where(zeros == 0, rest / np.where(zero, 1, x), np.where(np.logical_and(zeros == 1, zero), rest, 0))


def _all_reduce(call: _Call, g: Array, x: Array, out: Array) -> Array:
    op = call.options["op"]
    if op in ("any", "all"):
        return None
    g = collectives.all_reduce(g, call.mesh_dim, op="avg" if op == "avg" else "sum")
    return _through(call, op, g, x, out)


def _through(call: _Call, op: str, g: Array, x: Array, out: Array) -> Array:
    """`g`, summed over the ranks, through the reduction to this rank's term; `out` is the reduced value."""
    if op in ("max", "min"):
        return _shares(call, g, x, out)
    if op == "prod":
        return g * others_product(x, lambda term, how: collectives.all_reduce(term, call.mesh_dim, op=how))
    return g


def _reduce_scatter(call: _Call, g: Array, x: Array, out: Array) -> Array:
    op, dim = call.options["op"], call.options["dim"]
    if op in ("any", "all"):
        return None
    g = collectives.all_gather(g, call.mesh_dim, dim=dim)
    whole = collectives.all_gather(out, call.mesh_dim, dim=dim) if op in ("max", "min") else None
    return _through(call, op, g / call.size if op == "avg" else g, x, whole)


def _scan(call: _Call, g: Array, x: Array, out: Array) -> Array:
    op, n = call.options["op"], call.size
    if op not in ("sum", "avg"):
        refuse(f"scan(op={op!r})")
    if op == "avg":
        g = g / (call.index + 1)
    reverse = [(i, n - 1 - i) for i in range(n)]
    g = collectives.scan(collectives.permute(g, call.mesh_dim, reverse), call.mesh_dim)
    return collectives.permute(g, call.mesh_dim, reverse)


# -- the others ---------------------------------------------------------------------------------------------------------


def _all_gather(call: _Call, g: Array, x: Array, out: Array) -> Array:
    dim = call.options["dim"] % out.ndim
    if not call.options["tiled"]:
        return np.squeeze(collectives.reduce_scatter(g, call.mesh_dim, dim=dim), dim)
    sizes = call.facts["sizes"]
    if _even(sizes):
        g = collectives.reduce_scatter(g, call.mesh_dim, dim=dim)
    else:
        ends = _ends(sizes)
        g = _added(_swapped([_cut(g, dim, a, b) for a, b in pairwise(ends)], call))
    return g if np.ndim(x) else g[0]


def _all_to_all(call: _Call, g: Array, x: Array, out: Array) -> Array:
    split, concat = call.options["split_dim"] % out.ndim, call.options["concat_dim"] % out.ndim
    sizes = call.facts["sizes"]
    if split == concat:
        sizes = tuple(split_sizes(size, call.size)[call.index] for size in sizes)
    elif _even(sizes):
        return collectives.all_to_all(g, call.mesh_dim, split_dim=concat, concat_dim=split)
    ends = _ends(sizes)
    pieces = [_cut(g, concat, a, b) for a, b in pairwise(ends)]
    return np.concatenate(_swapped(pieces, call), axis=split)


def _broadcast(call: _Call, g: Array, x: Array, out: Array) -> Array:
    root = current_gang("axis_index").place("broadcast", "root", call.options["root"], call.mesh_dim)
    terms = [g]
    for source in (i for i in range(call.size) if i != root):
        came = collectives.permute(g, call.mesh_dim, [(source, root)])
        terms.append(came)
    return _added(terms) if call.index == root else None


def _permute(call: _Call, g: Array, x: Array, out: Array) -> Array:
    back = [(target, source) for source, target in call.options["pairs"]]
    gang = current_gang("axis_index")
    sources = {gang.place("permute", "source", source, call.mesh_dim) for _, source in back}
    came = collectives.permute(g, call.mesh_dim, back)
    return came if call.index in sources else None


def _shift(call: _Call, g: Array, x: Array, out: Array) -> Array:
    by, wrap = call.options["by"], call.options["wrap"]
    came = collectives.shift(g, call.mesh_dim, -by, wrap=wrap)
    return came if wrap or 0 <= call.index + by < call.size else None


_FAR = 2**40  # a row of another rank's array as one number: rank * _FAR + row


def _origins(shape: tuple[int, ...], depth: Any, mesh_dims: Any, boundary: Any) -> Iterator[tuple[int, Any, Array, int]]:
    """Per tensor dim with a halo: its mesh dims, where each row of the result came from (-1: nowhere), and the own rows."""
    for dim, (group, deep, beyond) in enumerate(halo_settings(len(shape), depth, mesh_dims, boundary)):
        if deep not in (0, (0, 0), [0, 0]):
            rows = collectives.axis_index(group) * _FAR + np.arange(shape[dim])
            edge = beyond if isinstance(beyond, str) else -1
            yield dim, group, collectives.halo_exchange(rows, (deep,), (group or None,), edge), shape[dim]


def _halo_exchange(call: _Call, g: Array, x: Array, out: Array) -> Array:
    """One tensor dim after another, the last first: the corners travel back the way they came."""
    for dim, group, origins, size in reversed(call.facts["halo"]):
        me, n = collectives.axis_index(group), collectives.axis_size(group)
        at = (slice(None),) * dim
        terms = []
        for by in range(n):
            here = np.flatnonzero((origins >= 0) & (origins // _FAR == (me + by) % n))
            piece, place = g[(*at, here)], origins[here] % _FAR
            if by:
                piece = collectives.shift(piece, group, by)
                place = np.asarray(getval(collectives.shift(place, group, by)))
            terms.append(_placed(piece, place, dim, size))
        g = _added(terms)
    return g


_ADJOINTS: dict[str, Callable[[_Call, Array, Array, Array], Array]] = {
    "all_reduce": _all_reduce, "reduce_scatter": _reduce_scatter, "scan": _scan, "all_gather": _all_gather,
    "all_to_all": _all_to_all, "broadcast": _broadcast, "permute": _permute, "shift": _shift, "halo_exchange": _halo_exchange,
}  # fmt: skip
