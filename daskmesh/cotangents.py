"""DTensors as a vector space of autograd, and the adjoints of moving them.

A DTensor is a global value, so autograd's own rules are right for it whatever its placements: a cotangent is a DTensor of the
same global shape, in any layout. Nothing of global size is made here or on a single rank: zeros and the like are made rank by
rank, in the layout of what they belong to, with Partial made Replicate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from autograd.extend import VSpace, defvjp
from autograd.tracer import getval

from daskmesh.dtensor import DTensor
from daskmesh.graph import Local
from daskmesh.layout import Coord, Layout
from daskmesh.moves import moved, reduced
from daskmesh.routes import primitive

__all__ = ["DTensorVSpace", "cast", "made", "relaid", "unit", "whole"]

Array = Any


def whole(layout: Layout, dtype: Any = None) -> Layout:
    """The layout with Partial made Replicate: that of a cotangent."""
    return layout.replace(placements=tuple(reduced(layout.placements)), dtype=layout.dtype if dtype is None else np.dtype(dtype))


@primitive
def relaid(x: DTensor, layout: Layout) -> DTensor:
    """The same value in the mesh, placements and part sizes of `layout`.

    **Communication**: what the redistribution moves.
    """
    return DTensor(moved(x._node, layout if layout.dtype == x.dtype else layout.replace(dtype=x.dtype)))


defvjp(relaid, lambda ans, x, layout: lambda g: relaid(g, whole(getval(x).layout)))


def cast(x: Any, dtype: Any) -> Any:
    """``x.astype(dtype)``, nothing if it has it."""
    return x if x.dtype == dtype else x.astype(dtype)


def made(fill: Any, layout: Layout, world: str, **options: Any) -> DTensor:
    """A DTensor that every rank makes for itself: ``fill(coord, layout=layout, **options)``."""
    return DTensor(Local(layout, world, fill, (), {"layout": layout, **options}, located=True))


def _filled(coord: Coord, layout: Layout, value: Any) -> Array:
    return np.full(layout.local_shape(coord), value, layout.dtype)


def _is_zero(x: Any) -> bool:
    node = x._node if isinstance(x, DTensor) else None
    return isinstance(node, Local) and node.func is _filled and node.kwargs is not None and node.kwargs["value"] == 0


def _basis(coord: Coord, layout: Layout, at: tuple[int, ...], value: Any) -> Array:
    local = np.zeros(layout.local_shape(coord), layout.dtype)
    box = layout.box(coord)
    if all(s.start <= i < s.stop for i, s in zip(at, box, strict=True)):
        local[tuple(i - s.start for i, s in zip(at, box, strict=True))] = value
    return local


def unit(x: DTensor, at: tuple[int, ...], value: Any) -> DTensor:
    """Zeros of the shape of `x` with one element set."""
    return made(_basis, whole(x.layout), x._node.world, at=at, value=value)


def _noise(coord: Coord, layout: Layout, seed: int) -> Array:
    start = [s.start for s in layout.box(coord)]
    rng = np.random.default_rng([seed, *start])  # of the box: replicas are equal
    local = rng.standard_normal(layout.local_shape(coord))
    return (local + 1j * local[::-1] if layout.dtype.kind == "c" and local.ndim else local).astype(layout.dtype)


class DTensorVSpace(VSpace):  # type: ignore[misc]
    """The vector space of DTensors of one layout, as autograd asks for it."""

    def __init__(self, value: DTensor) -> None:
        self.layout = whole(value.layout)
        self.world = value._node.world

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.layout.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Data type."""
        return self.layout.dtype

    @property
    def ndim(self) -> int:
        """Number of tensor dims."""
        return self.layout.ndim

    @property
    def iscomplex(self) -> bool:
        """Whether there are two real dimensions per element."""
        return self.layout.dtype.kind == "c"

    @property
    def size(self) -> int:
        """Real dimensions."""
        return math.prod(self.shape) * (2 if self.iscomplex else 1)

    def zeros(self) -> DTensor:
        """The origin."""
        return made(_filled, self.layout, self.world, value=0)

    def ones(self) -> DTensor:
        """All ones; with imaginary parts of one if complex, as autograd has it."""
        return made(_filled, self.layout, self.world, value=1 + 1j if self.iscomplex else 1)

    def standard_basis(self) -> Iterator[DTensor]:
        """One DTensor per dimension."""
        values = (1.0, 1.0j) if self.iscomplex else (1,)
        for at in itertools.product(*map(range, self.shape)):
            for value in values:
                yield made(_basis, self.layout, self.world, at=at, value=value)

    def randn(self) -> DTensor:
        """Some vector."""
        return made(_noise, self.layout, self.world, seed=int(np.random.randint(2**31)))

    def _add(self, x: Any, y: Any) -> Any:
        # autograd begins sums of cotangents with zeros, in a layout that need not be theirs.
        return y if _is_zero(x) else x if _is_zero(y) else x + y

    _mut_add = _add

    def _inner_prod(self, x: Any, y: Any) -> Any:
        return np.real(np.sum(np.conj(x) * y)) if self.iscomplex else np.sum(x * y)

    def _covector(self, x: Any) -> Any:
        return np.conj(x) if self.iscomplex else x


VSpace.register(DTensor, DTensorVSpace)
