"""Which road a load takes; `transport` has the table of them."""

from __future__ import annotations

from distributed import Worker
from distributed.utils import sync

from daskmesh import config, vm
from daskmesh.fetch import shares_memory
from daskmesh.store import Ticket, TicketLost, same_process

__all__ = ["ROADS", "road_to"]

ROADS = ("same", "vm", "shm", "rpc")


def road_to(ticket: Ticket, worker: Worker | None, plain: bool = True) -> tuple[str, str]:
    """The road by which `worker` loads from a ticket, and why it is not the one before it.

    For a thread that is not the event loop's.

    Parameters
    ----------
    ticket : Ticket
        Only its address and its process are looked at.
    worker : Worker, optional
        The reader, if it is one.
    plain : bool
        Whether moving the bytes of a view moves the view.

    Raises
    ------
    RuntimeError, ValueError
        The road that is forced cannot be taken, or is none.
    TicketLost
        The owner is gone.

    Notes
    -----
    **Communication**: a question to the owner, once per process, where the road may be "shm".

    Examples
    --------
    >>> import numpy as np
    >>> from daskmesh.store import expose
    >>> road_to(expose(np.ones(3)), None)
    ('same', '')
    """
    forced = config.get("transport")
    if forced not in ("auto", *ROADS[1:]):
        raise ValueError(f"daskmesh.transport is {forced!r}; set it to one of auto, vm, shm, rpc")
    elsewhere = worker is not None and ticket.address not in ("", worker.address)
    if same_process(ticket) and not (forced == "rpc" and elsewhere):
        return "same", ""
    if forced == "rpc":
        return "rpc", f"daskmesh.transport is {forced!r}"
    if ticket.process is None or ticket.process.host != vm.this_process().host:
        return "rpc", "it runs on another host"
    return _on_this_host(ticket, worker, forced) if plain else ("rpc", "not plain bytes")


def _on_this_host(ticket: Ticket, worker: Worker | None, forced: str) -> tuple[str, str]:
    why = f"daskmesh.transport is {forced!r}"
    if forced in ("auto", "vm"):
        why = _refusal(ticket)
        if not why:
            return "vm", ""
        if forced == "vm":
            raise _cannot(forced, f"the memory of worker {ticket.address} cannot be read from here: {why}")
    if worker is not None and sync(worker.loop, shares_memory, worker, ticket):
        return "shm", why
    if forced == "shm":
        raise _cannot(forced, f"worker {ticket.address} cannot map shared memory of this process")
    return "rpc", f"{why}; no shared memory"


def _refusal(ticket: Ticket) -> str:
    if ticket.process is None:
        return "it has not announced itself"
    try:
        return vm.refusal(ticket.process)
    except vm.Gone as gone:
        raise TicketLost(f"worker {ticket.address}, which held ticket {ticket.id} {ticket.shape}: {gone}") from gone


def _cannot(forced: str, why: str) -> RuntimeError:
    return RuntimeError(f"load: daskmesh.transport is {forced!r}, but {why}; set daskmesh.transport to 'auto'")
