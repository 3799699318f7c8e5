"""Operations on symmetric tensors recorded on the client: one pinned task per PE, ordered by tokens.

::

    put on PE 0 --.            .--> load on PE 0       every PE's load waits for the puts of all PEs; where these are
                   >-- joined --                       many, one task that depends on all of them stands between
    put on PE 1 --'            '--> load on PE 1

Keys are never used twice, and tasks are not fused: they stand for something that happens. Ordinary collections may be tokens,
too; a small task beside each of their pieces then stands for it, so that no data move.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import dask
import dask.array as da
import numpy as np
from dask._task_spec import List, Task, TaskRef
from dask.base import DaskMethodsMixin, flatten, is_dask_collection
from dask.highlevelgraph import HighLevelGraph

from daskmesh.exchange import reschedule
from daskmesh.graph import Source, block_of, local_of
from daskmesh.layers import as_layer
from daskmesh.layout import Coord, Layout
from daskmesh.shmem_ops import task_actor
from daskmesh.store import Ticket, TicketLost
from daskmesh.tasks import RankTask
from daskmesh.transport import load_into

__all__ = ["Token", "act", "fresh_name", "joined", "load_shard", "recorded", "source", "token_of", "tokens_of"]

MANY = 8  # keys that a task depends on one by one
Tasks = dict[tuple[Any, ...], Any]


class Token(DaskMethodsMixin):
    """Stands for an operation that was recorded and will have been applied: give it to another one as `pred`.

    A lazy Dask collection without a value.

    Examples
    --------
    >>> import daskmesh as dm
    >>> with dm.create_shmem_tensor("tp", 2, "i4", [2]) as t:
    ...     token = dm.shmem_put([7, 8], [0], t, 1)
    ...     dm.shmem_load(t, 1, pred=token).compute()
    array([7, 8], dtype=int32)
    """

    __slots__ = ("_graph", "_keys", "_layers")
    __dask_scheduler__ = staticmethod(dask.threaded.get)
    # The same as that of arrays, so that Dask optimises them together.
    __dask_optimize__ = staticmethod(da.Array.__dask_optimize__)

    def __init__(self, keys: Sequence[Any], graph: HighLevelGraph, layers: Sequence[str]) -> None:
        self._keys = list(keys)
        self._graph = graph
        self._layers = tuple(layers)

    def __dask_graph__(self) -> HighLevelGraph:
        return self._graph

    def __dask_keys__(self) -> list[Any]:
        return self._keys

    def __dask_layers__(self) -> tuple[str, ...]:
        return self._layers

    def __dask_postcompute__(self) -> Any:
        return _none, ()

    def __dask_postpersist__(self) -> Any:
        return _rebuilt, (self._keys,)

    def __dask_tokenize__(self) -> Any:
        return ("Token", self._keys)

    def __reduce__(self) -> Any:
        return Token, (self._keys, self._graph, self._layers)

    def __repr__(self) -> str:
        return f"Token({self._layers[0] if self._layers else ''})"


def _none(_: Any) -> None:
    return None


def _rebuilt(graph: Any, keys: Sequence[Any], *, rename: dict[str, str] | None = None) -> Token:
    if rename:
        keys = [(rename.get(key[0], key[0]), *key[1:]) if isinstance(key, tuple) else rename.get(key, key) for key in keys]
    if not isinstance(graph, HighLevelGraph):
        name = fresh_name("shmem-held")
        graph = HighLevelGraph({name: as_layer(dict(graph))}, {name: set()})
    return Token(keys, graph, list(graph.layers))


def fresh_name(what: str) -> str:
    """A name that no other layer has."""
    return f"{what}-{uuid.uuid4().hex}"


# -- tokens -------------------------------------------------------------------------------------------------------------


def tokens_of(call: str, pred: Any) -> list[Token]:
    """What must have happened first, as tokens.

    Raises
    ------
    TypeError
        `pred` is no token, collection, or sequence of these.
    """
    given = [pred] if pred is not None and not isinstance(pred, (list, tuple)) else pred or []
    return [token_of(call, one) for one in given if one is not None]


def token_of(call: str, one: Any) -> Token:
    """A token; for an ordinary collection one that stands for its pieces, beside which a small task runs."""
    if isinstance(one, Token):
        return one
    if not is_dask_collection(one):
        raise TypeError(f"{call}: pred must be a token, a Dask collection, or a list of these, got {type(one).__name__}")
    name = fresh_name("shmem-after")
    keys = list(flatten([one.__dask_keys__()]))
    tasks = {(name, i): Task((name, i), _nothing, TaskRef(key)) for i, key in enumerate(keys)}
    graph = HighLevelGraph.from_collections(name, as_layer(tasks), dependencies=[one])
    return Token(list(tasks), graph, [name])


def _nothing(*_: Any) -> None:
    return None


def _joined(tokens: Sequence[Token], world: str, rank: int) -> tuple[list[Any], list[Any]]:
    """The keys to depend on, and the tokens that have them; few whatever the tokens."""
    keys = [key for token in tokens for key in token.__dask_keys__()]
    if len(keys) <= MANY:
        return keys, list(tokens)
    token = joined(tokens, world, rank)
    return token.__dask_keys__(), [token]


def joined(tokens: Sequence[Any], world: str, rank: int) -> Token:
    """One task that comes after all that `tokens` stand for."""
    name = fresh_name("shmem-joined")
    keys = [key for token in tokens for key in token.__dask_keys__()]
    task = RankTask((name,), _nothing, *map(TaskRef, keys), world=world, rank=rank)
    graph = HighLevelGraph.from_collections(name, as_layer({(name,): task}), dependencies=tokens)
    return Token([(name,)], graph, [name])


# -- recording ----------------------------------------------------------------------------------------------------------


def recorded(
    name: str,
    world: str,
    jobs: Iterable[tuple[Any, int, Callable[..., Any], tuple[Any, ...]]],
    tokens: Sequence[Token],
    reads: Sequence[Any] = (),
) -> Token:
    """One task per job (key, rank, function, arguments), after `tokens`; `reads` are collections that arguments refer to."""
    jobs = list(jobs)
    keys, before = _joined(tokens, world, jobs[0][1])
    after = List(*map(TaskRef, keys))
    tasks = {key: RankTask(key, _after, after, func, *args, world=world, rank=rank) for key, rank, func, args in jobs}
    graph = HighLevelGraph.from_collections(name, as_layer(tasks), dependencies=[*before, *reads])
    return Token(list(tasks), graph, [name])


def source(layout: Layout, world: str, name: str, token: Token) -> Source:
    """The tasks of a token, which return blocks, as a recorded array."""
    return Source(layout, world, name, token.__dask_graph__())


def _after(_: Any, func: Callable[..., Any], *args: Any) -> Any:
    return func(*args)


def act(method: str, *args: Any) -> Any:
    """A recorded operation: what the rank's actor does."""
    return getattr(task_actor(), method)(*args)


def act_block(layout: Layout, coord: Coord, method: str, *args: Any) -> Any:
    """The same, for one that returns the block at a coordinate."""
    found = getattr(task_actor(), method)(*args)
    return block_of(found.reshape(layout.local_shape(coord)), layout, coord)


def act_on_local(layout: Layout, method: str, block: Any, before: tuple[Any, ...], *after: Any) -> Any:
    """The same, for one that takes this rank's local array."""
    local = local_of(block, layout)
    return getattr(task_actor(), method)(*before, local, *after)


def load_shard(layout: Layout, coord: Coord, view: tuple[Any, ...], fill: Any, ticket: Ticket) -> Any:
    """A view of a shard, from a ticket for it; `view` is (index, shape, valid shape)."""
    index, shape, valid = view
    out: Any = np.full(shape, fill, ticket.dtype)
    try:
        load_into(ticket, index, out[(*map(slice, valid), ...)])
    except TicketLost:
        reschedule([ticket])
    return block_of(out.reshape(layout.local_shape(coord)), layout, coord)
