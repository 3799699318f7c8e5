"""Gradients of functions of DTensors, by HIPS autograd.

A DTensor is registered as one of autograd's array types: a `DTensorBox` stands for one whose computation is recorded. NumPy calls
on it lead to autograd's primitives, which run on DTensors, and its own rules give the derivatives. Added here are only the rules
for what NumPy does not have: placing, resharding, functions under `local_map`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from autograd.core import make_vjp, vspace
from autograd.tracer import getval, isbox

from daskmesh.conversion import reshard, shard_tensor
from daskmesh.cotangents import cast, relaid, whole
from daskmesh.derivative import declared_partial, differentiated
from daskmesh.dtensor import DTensor
from daskmesh.graph import reach
from daskmesh.inside import followed_inside, running
from daskmesh.items import item
from daskmesh.layout import Layout, make_layout
from daskmesh.mapping import Mapped
from daskmesh.mesh import ProcessMesh
from daskmesh.ops.contractions import spelled_out
from daskmesh.placement import Partial, Placement
from daskmesh.routes import Followed, refuse
from daskmesh.sharing import share
from daskmesh.tape import LocalArray, as_local
from daskmesh.trees import build, flatten
from daskmesh.vjps import contract

__all__ = ["DTensorBox", "grad", "jacobian", "value_and_grad", "vjp"]


class DTensorBox(Followed):
    """A DTensor whose computation is recorded, to be differentiated."""

    __slots__ = ()
    own: ClassVar[dict[Callable[..., Any], Callable[..., Any]]] = {}

    @property
    def layout(self) -> Layout:
        """Mesh, placements, global shape, dtype and part sizes."""
        return self._value.layout  # type: ignore[no-any-return]

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.layout.shape

    @property
    def ndim(self) -> int:
        """Number of tensor dims."""
        return self.layout.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.layout.size

    @property
    def dtype(self) -> np.dtype[Any]:
        """Data type."""
        return self.layout.dtype

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh dim."""
        return self.layout.placements

    @property
    def process_mesh(self) -> ProcessMesh:
        """The mesh."""
        return self.layout.mesh

    def __len__(self) -> int:
        return len(self._value)

    def __getitem__(self, key: Any) -> Any:
        return item(self, key)

    def reshard(self, placements: Any, mesh: ProcessMesh | None = None) -> Any:
        """The same value in another layout; cotangents come back the other way."""
        here = self.layout
        target = make_layout(here.mesh if mesh is None else mesh, placements, here.shape, here.dtype)
        if target.placements == here.placements and target.mesh.shape == here.mesh.shape:
            target = target.replace(chunks=here.chunks)
        return relaid(self, target)

    def explain(self, call: str = "persist") -> Any:
        """What computing the value moves between ranks."""
        return getval(self).explain(call)

    @staticmethod
    def __daskmesh_function__(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(func, Mapped):
            return differentiated(func, args, kwargs)
        if func is reshard or func is shard_tensor:
            return _resharded(*args, **kwargs)
        refuse(f"{func.__name__}(x)")


DTensorBox.register(DTensor)


def _resharded(x: Any, mesh: ProcessMesh, placements: Any, dtype: Any = None) -> Any:
    return (x if dtype is None or x.dtype == dtype else x.astype(dtype)).reshard(placements, mesh)


def _own(*functions: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def enter(f: Callable[..., Any]) -> Callable[..., Any]:
        DTensorBox.own.update(dict.fromkeys(functions, f))
        return f

    return enter


@_own(np.einsum)
def _einsum(*operands: Any, optimize: Any = False) -> Any:
    terms, result, arrays = spelled_out(operands)
    return contract(",".join(terms) + "->" + result, *arrays)


# -- differential operators -----------------------------------------------------------------------------------------------

Argnum = int | Sequence[int]


def vjp(fun: Callable[..., Any], argnum: Argnum = 0) -> Callable[..., tuple[Any, Callable[[Any], Any]]]:
    """A function that returns the value of `fun` and what pulls a cotangent of it back to the arguments.

    Parameters
    ----------
    fun : callable
        Of DTensors, or lists, tuples and dicts of them, among other arguments; written with NumPy, `reshard` and `local_map`.
    argnum : int or sequence of int
        The positional arguments to differentiate by.

    Returns
    -------
    callable
        ``(*args, **kwargs) -> (value, pull)``; ``pull(g)``, with `g` of the shape of the value, gives a gradient for the
        argument, or a tuple of them, each in the layout of its argument, Partial made Replicate.

    Notes
    -----
    Inside a region the arguments are this rank's arrays, and the gradients those of the sum of what all ranks return: collectives
    in `fun` are followed, all ranks must call this alike.

    **Communication**: that of the derivative, when the gradients are computed; ``explain()`` of a gradient lists it.

    Examples
    --------
    >>> import numpy as np
    >>> import daskmesh as dm
    >>> mesh = dm.init_mesh(2, ["x"])
    >>> x = dm.arange(3.0, mesh=mesh, placements=[dm.Shard(0)])
    >>> value, pull = dm.vjp(lambda x: x * x)(x)
    >>> np.asarray(pull(dm.ones(3, mesh=mesh)))
    array([0., 2., 4.])
    """

    @functools.wraps(fun)
    def evaluate(*args: Any, **kwargs: Any) -> tuple[Any, Callable[[Any], Any]]:
        x, value, pull = _followed(fun, argnum, args, kwargs)
        return _plain(value), lambda g: _settled(pull(g), x)

    return evaluate


def value_and_grad(fun: Callable[..., Any], argnum: Argnum = 0) -> Callable[..., tuple[Any, Any]]:
    """A function that returns the value of `fun`, a 0-d DTensor, and its gradient.

    Parameters
    ----------
    fun : callable
        Returns one real number. See `vjp` for what it may be written with.
    argnum : int or sequence of int
        The positional arguments to differentiate by. One may be a list, tuple or dict of DTensors.

    Returns
    -------
    callable
        ``(*args, **kwargs) -> (value, gradient)``; each gradient has the dtype and layout of its argument, Partial made
        Replicate, but for terms that ``in_grad_placements`` says are to stay.

    Notes
    -----
    **Communication**: none before they are computed; then, for every argument that is Replicate over a mesh dim along which
    data are cut, an all-reduce of its gradient.

    Raises
    ------
    TypeError
        `fun` returns no single real number, an argument is of integers, or something in `fun` has no derivative; names it.

    Examples
    --------
    >>> import numpy as np
    >>> import daskmesh as dm
    >>> x = dm.arange(4.0, mesh=dm.init_mesh(2, ["x"]), placements=[dm.Shard(0)])
    >>> value, gradient = dm.value_and_grad(lambda x: np.sum(x ** 3))(x)
    >>> float(value), np.asarray(gradient), gradient.placements
    (36.0, array([ 0.,  3., 12., 27.]), (Shard(0),))
    """

    @functools.wraps(fun)
    def evaluate(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        x, value, pull = _followed(fun, argnum, args, kwargs)
        if np.size(value) != 1 or np.iscomplexobj(value):
            raise TypeError(
                f"{_name(fun)} returned a value of shape {np.shape(value)}; a gradient is that of one real number: reduce it "
                "with np.sum or np.mean, or use jacobian or vjp"
            )
        gradient = _settled(pull(_one(value)), x)
        share([leaf._node for leaf in (value, *_leaves(gradient)) if isinstance(leaf, DTensor)], reach)
        return _plain(value), gradient

    return evaluate


def grad(fun: Callable[..., Any], argnum: Argnum = 0) -> Callable[..., Any]:
    """A function that returns the gradient of `fun`; see `value_and_grad`.

    Notes
    -----
    **Communication**: as for `value_and_grad`.

    Examples
    --------
    >>> import numpy as np
    >>> import daskmesh as dm
    >>> mesh = dm.init_mesh(2, ["x"])
    >>> x = dm.shard_tensor(np.arange(8.0).reshape(4, 2), mesh, [dm.Shard(0)])
    >>> w = dm.ones((2, 3), mesh=mesh)
    >>> np.asarray(dm.grad(lambda w: np.sum(x @ w))(w))
    array([[12., 12., 12.],
           [16., 16., 16.]])
    """
    both = value_and_grad(fun, argnum)

    @functools.wraps(fun)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        return both(*args, **kwargs)[1]

    return gradient


def jacobian(fun: Callable[..., Any], argnum: int = 0) -> Callable[..., Any]:
    """A function that returns the derivatives of every element of ``fun(x)``, shape ``value.shape + x.shape``.

    Notes
    -----
    The dims of `x` stay cut as they are in `x`. There is one backward pass per element of the value.

    **Communication**: that of the backward passes.

    Examples
    --------
    >>> import numpy as np
    >>> import daskmesh as dm
    >>> x = dm.arange(3.0, mesh=dm.init_mesh(3, ["x"]), placements=[dm.Shard(0)])
    >>> j = dm.jacobian(lambda x: x * x)(x)
    >>> np.asarray(j).tolist(), j.placements
    ([[0.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 4.0]], (Shard(1),))
    """

    @functools.wraps(fun)
    def derivatives(*args: Any, **kwargs: Any) -> Any:
        x, value, pull = _followed(fun, argnum, args, kwargs)
        space = vspace(value)
        rows = [_settled(pull(basis), x) for basis in space.standard_basis()]
        if not space.ndim:
            return rows[0]
        return rows[0][None][:0] if not rows else np.reshape(np.stack(rows), (*space.shape, *np.shape(x)))

    return derivatives


def _plain(value: Any) -> Any:
    return np.asarray(value)[()] if isinstance(value, LocalArray) else value


def _one(value: Any) -> Any:
    return np.ones_like(value) if running() is not None else vspace(value).ones()


def _name(fun: Callable[..., Any]) -> str:
    return getattr(fun, "__name__", repr(fun))


def _followed(
    fun: Callable[..., Any], argnum: Argnum, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any, Callable[[Any], Any]]:
    """What is differentiated by, the value, and what pulls cotangents back."""
    several = not isinstance(argnum, int)
    numbers = tuple(argnum) if isinstance(argnum, Sequence) else (argnum,)
    for n in numbers:
        if not -len(args) <= n < len(args):
            raise ValueError(f"argnum={argnum}: {_name(fun)} was called with {len(args)} positional argument(s)")
    for n in numbers:
        _expect_real(args[n], n, fun)
    x = tuple(args[n] for n in numbers) if several else args[numbers[0]]

    def of(x: Any) -> Any:
        given = list(args)
        for k, n in enumerate(numbers):
            given[n] = x[k] if several else x
        return fun(*given, **kwargs)

    gang = running()
    try:
        if gang is not None:
            value, pull = followed_inside(gang, of, x)
        else:
            pull, value = make_vjp(of, _followable(x))
    except NotImplementedError as error:
        raise TypeError(f"{_name(fun)} cannot be differentiated: {error}") from error
    return x, value, pull


def _followable(x: Any) -> Any:
    """The same with arrays of NumPy's as a kind whose boxes plain NumPy can work on."""
    leaves, tree = flatten(x)
    plain = (np.ndarray, np.generic, float, complex)
    return build(tree, [as_local(np.asarray(v)) if isinstance(v, plain) else v for v in leaves])


def _expect_real(x: Any, n: int, fun: Callable[..., Any]) -> None:
    for leaf in _leaves(x):
        dtype = np.result_type(leaf) if isinstance(leaf, (bool, int, float, complex)) else getattr(leaf, "dtype", None)
        if dtype is None or dtype.kind not in "fc":
            raise TypeError(
                f"{_name(fun)}: argument {n} is {type(leaf).__name__} of dtype {dtype}; only floating-point arrays have "
                "gradients: use x.astype('float64'), or differentiate by another argument (argnum=)"
            )


def _leaves(x: Any) -> Any:
    if isinstance(x, dict):
        return (leaf for v in x.values() for leaf in _leaves(v))
    return (leaf for v in x for leaf in _leaves(v)) if isinstance(x, (list, tuple)) else (x,)


def _settled(g: Any, x: Any) -> Any:
    """A gradient in the dtype and layout of what it belongs to, container by container."""
    if isinstance(x, dict):
        return {k: _settled(g[k], v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(_settled(g[k], v) for k, v in enumerate(x))
    if not isinstance(getval(x), DTensor):
        return relaid(g, whole(getval(g).layout)) if isinstance(getval(g), DTensor) else _plain(g)
    target = whole(getval(x).layout)
    if not isinstance(getval(g), DTensor):
        g = shard_tensor(np.broadcast_to(g, target.shape), target.mesh, target.placements)
    g = cast(g, target.dtype)
    declared = None if isbox(g) else declared_partial(g)
    if declared is not None:
        kept = tuple(q if isinstance(q, Partial) else p for p, q in zip(target.placements, declared, strict=True))
        target = target.replace(placements=kept)
    return relaid(g, target)
