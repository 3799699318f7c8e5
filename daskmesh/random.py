"""Random numbers that do not depend on the mesh: a function of the seed, the number of the call and the place in the whole array.

How they are drawn, and what that costs, stands in `daskmesh.streams`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from daskmesh.creation import from_callback
from daskmesh.dtensor import DTensor
from daskmesh.layout import Box
from daskmesh.mesh import ProcessMesh
from daskmesh.moves import reduced
from daskmesh.streams import Stream, Vectors, draw, draw_vectors, places

__all__ = ["Generator", "default_rng"]

Array = Any
Shape = tuple[int, ...]
_np: Any = np

_CHILD, _CALL = 0, 1


def default_rng(seed: Any = None) -> Generator:
    """A generator of random DTensors; the same numbers whatever the mesh and the placements.

    Parameters
    ----------
    seed : None, int, sequence of int, SeedSequence or Generator
        As ``numpy.random.default_rng`` takes it; None for fresh entropy of the system.

    Returns
    -------
    Generator

    Notes
    -----
    The numbers are not those of ``numpy.random.default_rng(seed)``, for these depend on the order in which they are drawn.

    **Communication**: none.

    Examples
    --------
    >>> import numpy as np
    >>> import daskmesh as dm
    >>> mesh = dm.init_mesh(2, ["x"])
    >>> a = dm.random.default_rng(7).random((4, 3), mesh=mesh, placements=[dm.Shard(0)])
    >>> b = dm.random.default_rng(7).random((4, 3), mesh=mesh, placements=[dm.Shard(1)])
    >>> bool(np.all(a == b))
    True
    """
    if isinstance(seed, Generator):
        return seed
    sequence = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
    return Generator(sequence.entropy, tuple(sequence.spawn_key))


class Generator:
    """Random DTensors; made by `default_rng`.

    The methods are those of NumPy's ``Generator``, with ``mesh=`` and ``placements=`` besides. Parameters are numbers or NumPy
    arrays that broadcast to the size. Successive calls differ; the sequence of calls decides, not the mesh.

    **Communication**: none; each rank draws its own box.

    Examples
    --------
    >>> import daskmesh as dm
    >>> rng = dm.random.default_rng(0)
    >>> rng.integers(10, size=4, mesh=dm.init_mesh(2, ["x"]), placements=[dm.Shard(0)]).shape
    (4,)
    """

    def __init__(self, entropy: Any, key: Shape = ()) -> None:
        self._entropy = entropy if isinstance(entropy, int) else tuple(int(e) for e in entropy)
        self._key = key
        self._calls = 0
        self._children = 0

    def __repr__(self) -> str:
        return f"Generator(entropy={self._entropy}, key={self._key}, calls={self._calls})"

    def spawn(self, n_children: int) -> list[Generator]:
        """Generators of their own, independent of this one and of each other."""
        first = self._children
        self._children += operator.index(n_children)
        return [Generator(self._entropy, (*self._key, _CHILD, first + i)) for i in range(n_children)]

    def _next(self) -> Stream:
        self._calls += 1
        return Stream(self._entropy, (*self._key, _CALL, self._calls))

    def _drawn(
        self, method: str, args: tuple[Any, ...], size: Any, mesh: ProcessMesh, placements: Any,
        kwargs: Mapping[str, Any] | None = None,
    ) -> DTensor:  # fmt: skip
        for a in args:
            if isinstance(a, DTensor):
                raise TypeError(f"{method}: a parameter is a DTensor; give numbers or NumPy arrays that broadcast to the size")
        args = tuple(np.array(a) if np.ndim(a) else a for a in args)  # the caller may go on to write into them
        shape = np.broadcast_shapes(*map(np.shape, args)) if size is None else _shape(size)
        if np.broadcast_shapes(shape, *map(np.shape, args)) != shape:
            raise ValueError(f"{method}: parameters of shapes {[np.shape(a) for a in args]} do not broadcast to the size {shape}")
        kwargs = kwargs or {}
        # NumPy itself says what the parameters must be, and of what dtype the numbers are.
        sample = None if any(map(np.ndim, args)) else 1
        dtype = np.asarray(getattr(np.random.default_rng(0), method)(*args, size=sample, **kwargs)).dtype
        return from_callback(shape, dtype, mesh, placements, partial(draw, self._next(), method, shape, args, kwargs, dtype))

    # -- the methods whose arguments are their own ----------------------------------------------------------------------

    def random(self, size: Any = None, dtype: Any = np.float64, *, mesh: ProcessMesh, placements: Any = ()) -> DTensor:
        """Floats, uniform in [0, 1)."""
        return self._drawn("random", (), size, mesh, placements, {"dtype": np.dtype(dtype)})

    def standard_normal(self, size: Any = None, dtype: Any = np.float64, *, mesh: ProcessMesh, placements: Any = ()) -> DTensor:
        """The normal distribution of mean 0 and deviation 1."""
        return self._drawn("standard_normal", (), size, mesh, placements, {"dtype": np.dtype(dtype)})

    def standard_exponential(
        self, size: Any = None, dtype: Any = np.float64, method: str = "zig", *, mesh: ProcessMesh, placements: Any = ()
    ) -> DTensor:
        """The exponential distribution of scale 1."""
        return self._drawn("standard_exponential", (), size, mesh, placements, {"dtype": np.dtype(dtype), "method": method})

    def standard_gamma(
        self, shape: Any, size: Any = None, dtype: Any = np.float64, *, mesh: ProcessMesh, placements: Any = ()
    ) -> DTensor:
        """The gamma distribution of scale 1."""
        return self._drawn("standard_gamma", (shape,), size, mesh, placements, {"dtype": np.dtype(dtype)})

    def integers(
        self, low: Any, high: Any = None, size: Any = None, dtype: Any = np.int64, endpoint: bool = False, *,
        mesh: ProcessMesh, placements: Any = (),
    ) -> DTensor:  # fmt: skip
        """Integers from `low` to below `high`, or to `high` with `endpoint`; from 0 to below `low` without `high`."""
        low, high = (0, low) if high is None else (low, high)
        return self._drawn("integers", (low, high), size, mesh, placements, {"dtype": np.dtype(dtype), "endpoint": endpoint})

    # -- vectors, which are the last dim of the result -------------------------------------------------------------------

    def multivariate_normal(
        self, mean: Any, cov: Any, size: Any = None, check_valid: Any = "warn", tol: float = 1e-8, *, method: Any = "svd",
        mesh: ProcessMesh, placements: Any = (),
    ) -> DTensor:  # fmt: skip
        """Vectors of the normal distribution with a mean and covariances."""
        mean, cov = _plain_parameters("multivariate_normal", mean, cov)
        # NumPy says what the parameters must be; the root is taken once, so that it is the same on every rank.
        np.random.default_rng(0).multivariate_normal(mean, cov, None, check_valid, tol, method=method)
        vectors = Vectors(_normal, ((mean, 1), (_root_of(cov, method), 2)), np.dtype(np.float64))
        return self._vectors(vectors, _shape(() if size is None else size), len(mean), mesh, placements)

    def dirichlet(self, alpha: Any, size: Any = None, *, mesh: ProcessMesh, placements: Any = ()) -> DTensor:
        """Vectors of proportions, which sum to 1."""
        (alpha,) = _plain_parameters("dirichlet", alpha)
        np.random.default_rng(0).dirichlet(alpha)
        vectors = Vectors(_dirichlet, ((alpha, 1),), np.dtype(np.float64))
        return self._vectors(vectors, _shape(() if size is None else size), len(alpha), mesh, placements)

    def multinomial(self, n: Any, pvals: Any, size: Any = None, *, mesh: ProcessMesh, placements: Any = ()) -> DTensor:
        """How often each outcome comes in `n` trials."""
        n, pvals = _plain_parameters("multinomial", n, pvals)
        if not pvals.ndim:
            raise ValueError("pvals must have at least 1 dimension and the last dimension of pvals must be greater than 0.")
        free = np.broadcast_shapes(n.shape, pvals.shape[:-1])
        shape = free if size is None else _shape(size)
        if np.broadcast_shapes(free, shape) != shape:
            raise ValueError(f"multinomial: n of shape {n.shape} and pvals of shape {pvals.shape} do not fit the size {shape}")
        np.random.default_rng(0).multinomial(n, pvals)
        vectors = Vectors(_multinomial, ((n, 0), (pvals, 1)), np.dtype(np.int64))
        return self._vectors(vectors, shape, pvals.shape[-1], mesh, placements)

    def multivariate_hypergeometric(
        self, colors: Any, nsample: int, size: Any = None, method: Any = "marginals", *, mesh: ProcessMesh, placements: Any = ()
    ) -> DTensor:
        """How many of each color are among `nsample` drawn without putting back."""
        (colors,) = _plain_parameters("multivariate_hypergeometric", colors)
        np.random.default_rng(0).multivariate_hypergeometric(colors, nsample, method=method)
        vectors = Vectors(partial(_hypergeometric, colors, nsample, method), (), np.dtype(np.int64))
        return self._vectors(vectors, _shape(() if size is None else size), len(colors), mesh, placements)

    def _vectors(self, vectors: Vectors, size: Shape, width: int, mesh: ProcessMesh, placements: Any) -> DTensor:
        shape = (*size, width)
        return from_callback(shape, vectors.dtype, mesh, placements, partial(draw_vectors, self._next(), vectors, shape))

    def bytes(self, length: int) -> bytes:
        """Random bytes, on the client: Python's own, which lie on no mesh."""
        return self._next().generator().bytes(operator.index(length))

    # -- order and choice -----------------------------------------------------------------------------------------------

    def permutation(self, x: Any, axis: int = 0, *, mesh: ProcessMesh | None = None, placements: Any = ()) -> DTensor:
        """The numbers below `x` in random order; or a DTensor with its slices along `axis` in random order.

        **Communication**: none for a number; for a DTensor each slice goes once to each rank that gets it.
        """
        if isinstance(x, DTensor):
            return _np.take(x, self._order(x.shape[axis]), axis=axis)  # type: ignore[no-any-return]
        if mesh is None:
            raise TypeError("permutation(x): give mesh=, on which the result is to lie, or a DTensor x")
        if np.ndim(x):
            x = np.asarray(x)
            order = self._order(x.shape[axis])
            return from_callback(x.shape, x.dtype, mesh, placements, partial(_box_of, np.take(x, order, axis=axis)))
        n = operator.index(x)
        return from_callback((n,), np.int64, mesh, placements, partial(_permuted, self._next(), n))

    def _order(self, n: int) -> Array:
        return _permuted(self._next(), n, (slice(0, n),))

    def shuffle(self, x: DTensor, axis: int = 0) -> None:
        """Put the slices of `x` along `axis` in random order behind the same handle; its layout stays.

        **Communication**: that of `permutation`, and back to the layout of `x`.
        """
        if not isinstance(x, DTensor):
            raise TypeError(f"shuffle(x): expected a DTensor, got {type(x).__name__}; NumPy shuffles plain arrays")
        x._rebind(self.permutation(x, axis))

    def permuted(self, x: DTensor, *, axis: int | None = None) -> DTensor:
        """`x` with the elements along `axis` in random order, each line in an order of its own; all of them with None.

        **Communication**: a cut `axis` is gathered.
        """
        if not isinstance(x, DTensor):
            raise TypeError(f"permuted(x): expected a DTensor, got {type(x).__name__}")
        if axis is None:
            flat = _np.ravel(x)
            return _np.reshape(_np.take(flat, self._order(flat.size)), x.shape)  # type: ignore[no-any-return]
        keys = self.random(x.shape, mesh=x.process_mesh, placements=reduced(x.placements))
        return _np.take_along_axis(x, _np.argsort(keys, axis=axis), axis)  # type: ignore[no-any-return]

    def choice(
        self, a: Any, size: Any = None, replace: bool = True, p: Any = None, axis: int = 0, shuffle: bool = True, *,
        mesh: ProcessMesh, placements: Any = (),
    ) -> DTensor:  # fmt: skip
        """Elements of `a`, or numbers below it, with or without replacement.

        **Communication**: none for a number or a plain array; the dim `axis` of a DTensor is gathered if it is cut.
        """
        n = operator.index(a) if np.ndim(a) == 0 and not isinstance(a, DTensor) else np.shape(a)[axis]
        shape = () if size is None else _shape(size)
        count = math.prod(shape)
        if not n and count:
            raise ValueError("a cannot be empty unless no samples are taken")
        if not replace and count > n:
            raise ValueError("Cannot take a larger sample than population when replace is False")
        weights = None if p is None else _weights(p, n)
        if weights is not None and replace:
            limits = np.cumsum(weights)
            chosen = partial(_weighted, self._next(), shape, limits / limits[-1])
        elif weights is not None:
            chosen = partial(_chosen, self._next(), shape, n, weights)
        elif replace:
            stream, kwargs = self._next(), {"dtype": np.dtype(np.int64)}
            chosen = partial(draw, stream, "integers", shape, (0, max(n, 1)), kwargs, np.int64)
        else:
            chosen = partial(_first_of_permutation, self._next(), shape, n)
        index = from_callback(shape, np.int64, mesh, placements, chosen)
        if np.ndim(a) == 0 and not isinstance(a, DTensor):
            return index
        if not isinstance(a, DTensor):
            a = np.array(a)
            a = from_callback(a.shape, a.dtype, mesh, (), partial(_box_of, a))
        return _np.take(a, index, axis=axis)  # type: ignore[no-any-return]


def _plain(name: str, defaults: Mapping[str, Any]) -> Callable[..., DTensor]:
    """A method whose parameters all broadcast to the size."""

    def method(self: Generator, *args: Any, mesh: ProcessMesh, placements: Any = (), **kwargs: Any) -> DTensor:
        names = [*defaults, "size"]
        if len(args) > len(names) or not kwargs.keys() <= set(names[len(args) :]):
            raise TypeError(f"{name} takes {names}, mesh= and placements=; got {len(args)} positional and {sorted(kwargs)}")
        given = {**defaults, "size": None, **dict(zip(names, args, strict=False)), **kwargs}
        missing = [k for k, v in given.items() if v is _REQUIRED]
        if missing:
            raise TypeError(f"{name}: the argument {missing[0]!r} is missing")
        size = given.pop("size")
        return self._drawn(name, tuple(given.values()), size, mesh, placements)

    method.__name__ = name
    method.__qualname__ = f"Generator.{name}"
    shown = ", ".join(k if v is _REQUIRED else f"{k}={v}" for k, v in defaults.items())
    method.__doc__ = f"NumPy's ``{name}({shown}, size=None)``, as a DTensor."
    return method


_REQUIRED: Any = object()
_R = _REQUIRED
for _name, _defaults in {
    "uniform": {"low": 0.0, "high": 1.0}, "normal": {"loc": 0.0, "scale": 1.0}, "exponential": {"scale": 1.0},
    "gamma": {"shape": _R, "scale": 1.0}, "beta": {"a": _R, "b": _R}, "binomial": {"n": _R, "p": _R}, "poisson": {"lam": 1.0},
    "lognormal": {"mean": 0.0, "sigma": 1.0}, "chisquare": {"df": _R}, "f": {"dfnum": _R, "dfden": _R}, "geometric": {"p": _R},
    "gumbel": {"loc": 0.0, "scale": 1.0}, "hypergeometric": {"ngood": _R, "nbad": _R, "nsample": _R},
    "laplace": {"loc": 0.0, "scale": 1.0}, "logistic": {"loc": 0.0, "scale": 1.0}, "logseries": {"p": _R},
    "negative_binomial": {"n": _R, "p": _R}, "noncentral_chisquare": {"df": _R, "nonc": _R},
    "noncentral_f": {"dfnum": _R, "dfden": _R, "nonc": _R}, "pareto": {"a": _R}, "power": {"a": _R}, "rayleigh": {"scale": 1.0},
    "standard_cauchy": {}, "standard_t": {"df": _R}, "triangular": {"left": _R, "mode": _R, "right": _R},
    "vonmises": {"mu": _R, "kappa": _R}, "wald": {"mean": _R, "scale": _R}, "weibull": {"a": _R}, "zipf": {"a": _R},
}.items():  # fmt: skip
    setattr(Generator, _name, _plain(_name, _defaults))


def _shape(size: Any) -> Shape:
    return (operator.index(size),) if isinstance(size, (int, np.integer)) else tuple(operator.index(n) for n in size)


def _plain_parameters(method: str, *parameters: Any) -> tuple[Array, ...]:
    if any(isinstance(p, DTensor) for p in parameters):
        raise TypeError(f"{method}: a parameter is a DTensor; give numbers or NumPy arrays, np.asarray(x)")
    return tuple(np.array(p) for p in parameters)


def _root_of(cov: Array, method: str) -> Array:
    """A matrix whose product with its transpose is `cov`, as NumPy takes it."""
    if method == "cholesky":
        return np.linalg.cholesky(cov)
    if method == "eigh":
        values, vectors = np.linalg.eigh(cov)
    else:
        vectors, values, _ = np.linalg.svd(cov)
    return vectors * np.sqrt(abs(values))


def _normal(rng: np.random.Generator, size: Shape, mean: Array, root: Array) -> Array:
    return mean + rng.standard_normal((*size, len(mean))) @ root.T


def _dirichlet(rng: np.random.Generator, size: Shape, alpha: Array) -> Array:
    return rng.dirichlet(alpha, size)


def _multinomial(rng: np.random.Generator, size: Shape, n: Array, pvals: Array) -> Array:
    return rng.multinomial(n, pvals, size)


def _hypergeometric(colors: Array, nsample: int, method: Any, rng: np.random.Generator, size: Shape) -> Array:
    return rng.multivariate_hypergeometric(colors, nsample, size, method)


def _weights(p: Any, n: int) -> Array:
    weights = np.array(p, np.float64)
    if weights.shape != (n,):
        raise ValueError(f"choice(p): {weights.shape} probabilities for {n} elements")
    if np.any(weights < 0) or not abs(weights.sum() - 1) <= 1e-8:
        raise ValueError("choice(p): probabilities must not be negative and must sum to 1")
    return weights


def _box_of(array: Array, box: Box) -> Array:
    return array[box]


def _weighted(stream: Stream, shape: Shape, limits: Array, box: Box) -> Array:
    uniform = draw(stream, "random", shape, (), {}, np.float64, box)
    return np.searchsorted(limits, uniform, side="right")


def _chosen(stream: Stream, shape: Shape, n: int, weights: Array, box: Box) -> Array:
    """Without replacement the elements depend on each other: every rank draws them all."""
    return np.asarray(stream.generator().choice(n, size=shape, replace=False, p=weights))[box]


def _first_of_permutation(stream: Stream, shape: Shape, n: int, box: Box) -> Array:
    extent = tuple(b.stop - b.start for b in box)
    flat = np.zeros((1,) * len(shape), np.int64)
    for d, b in enumerate(box):
        flat = flat * shape[d] + np.arange(b.start, b.stop).reshape((-1,) + (1,) * (len(shape) - 1 - d))
    return places(stream, n, flat.reshape(-1)).reshape(extent)


def _permuted(stream: Stream, n: int, box: Box) -> Array:
    return places(stream, n, np.arange(box[0].start, box[0].stop))
