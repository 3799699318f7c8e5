"""Gradients held against finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dask
import numpy as np

from daskmesh.autograd import value_and_grad
from daskmesh.cotangents import unit
from daskmesh.dtensor import DTensor

__all__ = ["gradient_check"]


def gradient_check(
    fun: Callable[..., Any],
    *args: Any,
    argnum: int = 0,
    step: float | None = None,
    tolerance: float | None = None,
    elements: int = 8,
    seed: int = 0,
) -> None:
    """Compare the gradient of `fun` with central differences in some elements of an argument, chosen at random.

    Parameters
    ----------
    fun : callable
        Of `args`, returns one real number.
    argnum : int
        The DTensor among `args` to differentiate by.
    step : float, optional
        Of the differences; the cube root of the dtype's precision by default.
    tolerance : float, optional
        Largest difference allowed, relative to the largest of 1 and the values compared; by default 1000 times the rounding
        error of the differences.
    elements : int
        How many elements; all of them if there are fewer.

    Notes
    -----
    **Communication**: that of `fun`, twice for every element.

    Raises
    ------
    AssertionError
        The two differ; names the element and both values.

    Examples
    --------
    >>> import numpy as np
    >>> import daskmesh as dm
    >>> from daskmesh.checks import gradient_check
    >>> x = dm.arange(4.0, mesh=dm.init_mesh(2, ["x"]), placements=[dm.Shard(0)])
    >>> gradient_check(lambda x: np.sum(np.sin(x)), x)
    """
    x = args[argnum]
    if not isinstance(x, DTensor):
        raise TypeError(f"gradient_check: argument {argnum} is a {type(x).__name__}; expected a DTensor")
    precision = float(np.finfo(x.dtype).eps)
    step = precision ** (1 / 3) if step is None else step
    tolerance = 1e3 * precision / step if tolerance is None else tolerance
    rng = np.random.default_rng(seed)
    flat = rng.permutation(x.size)[:elements]
    places = [tuple(int(i) for i in np.unravel_index(at, x.shape)) for at in flat]

    def moved(place: tuple[int, ...], by: float) -> Any:
        given = list(args)
        given[argnum] = x + unit(x, place, by)
        return fun(*given)

    value, gradient = value_and_grad(fun, argnum)(*args)
    ends = [moved(place, by) for place in places for by in (step, -step)]
    gradient, value, *computed = dask.compute(gradient, value, *ends)
    for k, place in enumerate(places):
        wanted = (float(computed[2 * k]) - float(computed[2 * k + 1])) / (2 * step)
        got = float(gradient[place])
        scale = max(1.0, abs(wanted), abs(got), abs(float(value)))
        if not abs(got - wanted) <= tolerance * scale:
            raise AssertionError(
                f"gradient_check: element {place} of argument {argnum} has the gradient {got!r}, differences of step {step:.1e} "
                f"give {wanted!r}"
            )
