"""Tasks that know their rank.

The rank travels inside the task object. Annotations do not survive Dask's optimisers and `workers=` names addresses
that die with their process; an attribute of the task survives both, because nothing in Dask rewrites a task that
refuses fusion. The scheduler plugin reads it and pins the task (see `plugins`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from dask._task_spec import Task
from dask.tokenize import tokenize
from distributed.worker import get_worker

from daskmesh.mesh import CURRENT_RANK

__all__ = ["CURRENT_WORLD", "WATCHERS", "DirectoryTask", "RankTask", "TicketTask"]

# Set, like CURRENT_RANK, by a rank's task while it runs: the id of the world the rank belongs to.
CURRENT_WORLD: ContextVar[str | None] = ContextVar("daskmesh_world", default=None)

# Workers of this process that want to know each rank's task before it begins: address -> function of the key.
WATCHERS: dict[str, Callable[[Any], None]] = {}


class RankTask(Task):
    """A task that runs on the worker of one rank.

    Parameters
    ----------
    key, func, *args, **kwargs
        As for a Dask `Task`.
    world : str
        Id of the world.
    rank : int
        Rank in that world.

    Examples
    --------
    >>> task = RankTask(("x", 0), abs, -3, world="w", rank=0)
    >>> task(), task.substitute({}, key=("y", 0)).rank
    (3, 0)
    """

    world: str
    rank: int

    __slots__ = ("rank", "world")

    def __init__(self, key: Any, func: Callable[..., Any], /, *args: Any, world: str, rank: int, **kwargs: Any) -> None:
        self.world = world
        self.rank = rank
        super().__init__(key, func, *args, **kwargs)

    @property
    def block_fusion(self) -> bool:
        """True: dask.array's optimiser must neither fuse nor rename this task, or the rank is lost."""
        return True

    @property
    def data_producer(self) -> bool:
        """False: a data producer would be fused into each of its readers, and run there."""
        return False

    def copy(self) -> RankTask:
        """A shallow copy; Dask's own leaves the rank out."""
        return type(self)(self.key, self.func, *self.args, world=self.world, rank=self.rank, **self.kwargs)

    def _get_token(self) -> str:
        if not self._token:
            what = (type(self).__name__, self.func, self.args, self.kwargs, self.world, self.rank)
            self._token = tokenize(what)
        return str(self._token)

    def __call__(self, values: Any = ()) -> Any:
        """Run the task as its rank: `get_rank` answers inside."""
        if WATCHERS:
            self._announce()
        rank = CURRENT_RANK.set(self.rank)
        world = CURRENT_WORLD.set(self.world)
        try:
            return super().__call__(values)
        finally:
            CURRENT_WORLD.reset(world)
            CURRENT_RANK.reset(rank)

    def _announce(self) -> None:
        try:
            address = get_worker().address
        except ValueError:
            return
        if address in WATCHERS:
            WATCHERS[address](self.key)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.key!r}, {getattr(self.func, '__name__', self.func)}, rank={self.rank})"


class TicketTask(RankTask):
    """A rank's task whose result is a ticket: a claim on an array that stays in the store of the worker that ran it.

    Dask takes all copies of a result for equal; a ticket is worth what the worker it was born on still holds. The
    scheduler plugin treats these results by birthplace.
    """

    __slots__ = ()


class DirectoryTask(RankTask):
    """A rank's task whose result collects tickets: it is worth nothing once one of them is gone.

    The scheduler plugin releases it together with any ticket that it collects.
    """

    __slots__ = ()
