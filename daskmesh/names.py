"""Ufuncs by module and name, for those who store them or send them.

A ufunc does not know its module. Pickle looks through all modules for one that has it by its name, and wakes lazy ones:
deprecated modules of NumPy's warn then, wherever a ufunc of SciPy's is called as one of NumPy's is.
"""

from __future__ import annotations

import importlib
import sys
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Named", "named", "restored"]


class Named(NamedTuple):
    """Where a ufunc is found."""

    module: str
    name: str


@lru_cache(1024)
def _home(ufunc: np.ufunc) -> Named | None:
    name = ufunc.__name__
    if getattr(np, name, None) is ufunc:
        return Named("numpy", name)
    modules = sys.modules.copy().items()
    found = [m for m, module in modules if m != "__main__" and getattr(module, "__dict__", {}).get(name) is ufunc]
    return Named(min(found, key=lambda m: (m.count("._"), len(m))), name) if found else None


def named(x: Any) -> Any:
    """The name of a ufunc that has one, anything else as it is.

    Examples
    --------
    >>> named(np.add), named(3)
    (Named(module='numpy', name='add'), 3)
    """
    return (_home(x) or x) if isinstance(x, np.ufunc) else x


def restored(x: Any) -> Any:
    """What `named` was given.

    Examples
    --------
    >>> restored(named(np.add)) is np.add
    True
    """
    return getattr(importlib.import_module(x.module), x.name) if isinstance(x, Named) else x
