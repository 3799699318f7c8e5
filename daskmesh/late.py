"""Local nodes whose operands are worked out late: when they are lowered or explained, not while they are recorded.

What an operation gives is known at once: its layout, and that it can be done. How the data come to it, say which elements of a
picked array lie with which rank, takes longer to work out, and nobody asks before the graph is made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from daskmesh.graph import Local, Node
from daskmesh.layout import Layout

__all__ = ["Late"]

_LOCK = threading.RLock()  # one for all: that two threads lower one node is rare


class Late(Local):
    """A local node of which `make` gives the operands and options; it must not fail, and is called once.

    Parameters
    ----------
    make : callable
        Returns what `Local` takes as ``args`` and ``kwargs``.
    """

    __slots__ = ("_make",)

    def __init__(
        self,
        layout: Layout,
        world: str,
        func: Callable[..., Any],
        make: Callable[[], tuple[Sequence[Node], Mapping[str, Any]]],
        *,
        located: bool = False,
    ) -> None:
        Node.__init__(self, layout, world, boundary=False)
        self.func = func
        self.located = located
        self._make: Callable[[], tuple[Sequence[Node], Mapping[str, Any]]] | None = make

    def __getattr__(self, name: str) -> Any:
        # Slots that are not set: the first time that anybody asks for them.
        if name not in ("args", "kwargs"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        with _LOCK:
            if self._make is not None:
                args, self.kwargs = self._make()
                self.args, self._make = tuple(args), None
        return object.__getattribute__(self, name)
