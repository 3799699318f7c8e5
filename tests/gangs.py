"""Ranks without a cluster: threads of this process, or processes, over real endpoints."""

from __future__ import annotations

import multiprocessing
import threading
import traceback
from collections.abc import Callable
from typing import Any

from daskmesh.gang import Gang, gang_context
from daskmesh.links import Endpoint
from daskmesh.mesh import ProcessMesh
from daskmesh.parcels import Line
from daskmesh.store import close_store, open_store

KEY = b"a key for tests"


def lines(mesh: ProcessMesh, *, endpoints: int = 1, timeout: float = 30, tcp: bool = False) -> dict[int, Line]:
    """A line for each rank of `mesh`, dealt over so many endpoints of this process."""
    ends = [Endpoint(KEY, host="127.0.0.1" if tcp else None) for _ in range(endpoints)]
    table = {rank: ends[i % endpoints].address for i, rank in enumerate(mesh.process_ids)}
    if tcp:
        table = {rank: type(a)(a.name, a.machine, "", a.host, a.port) for rank, a in table.items()}
    found = {}
    for i, rank in enumerate(mesh.process_ids):
        end = ends[i % endpoints]
        found[rank] = Line(end, open_store(end.address.name), 7, 0, rank, table, timeout)
        found[rank].enter()
    return found


def close(lines_: dict[int, Line]) -> None:
    for end in {line.endpoint for line in lines_.values()}:
        end.close()
        close_store(end.address.name)


def run_ranks(mesh: ProcessMesh, function: Callable[[], Any], *, errors: bool = False, **options: Any) -> list[Any]:
    """What `function` returns as each rank of `mesh`, in mesh order; with `errors`, what it raised instead."""
    table = lines(mesh, **options)
    results: dict[int, Any] = {}

    def run(rank: int) -> None:
        line = table[rank]
        try:
            with gang_context(Gang(mesh, rank, lambda: line)):
                results[rank] = function()
        except BaseException as error:
            results[rank] = error
            line.close(error)
        else:
            line.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in mesh.process_ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    close(table)
    found = [results[rank] for rank in mesh.process_ids]
    for result in found:
        if isinstance(result, BaseException) and not errors:
            raise result
    return found


def _serve(pipe: Any, mesh: ProcessMesh, ranks: list[int], function: Callable[[], Any], tcp: bool) -> None:
    end = Endpoint(KEY, host="127.0.0.1" if tcp else None)
    pipe.send(end.address)
    table = pipe.recv()
    store = open_store(end.address.name)
    results: dict[int, Any] = {}

    def run(rank: int) -> None:
        line = Line(end, store, 7, 0, rank, table, 30.0)
        line.enter()
        try:
            with gang_context(Gang(mesh, rank, lambda: line)):
                results[rank] = function()
        except BaseException as error:
            traceback.print_exc()
            results[rank] = error
            line.close(error)
        else:
            line.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe.send(results)
    pipe.recv()
    end.close()


def run_processes(mesh: ProcessMesh, function: Callable[[], Any], n: int = 2, tcp: bool = False) -> list[Any]:
    """The same with the ranks dealt over `n` processes; `function` is one of a module."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for i in range(n):
        ours, theirs = context.Pipe()
        ranks = list(mesh.process_ids[i::n])
        processes.append(context.Process(target=_serve, args=(theirs, mesh, ranks, function, tcp)))
        pipes.append(ours)
        processes[-1].start()
    addresses = [pipe.recv() for pipe in pipes]
    if tcp:
        addresses = [type(a)(a.name, a.machine, "", a.host, a.port) for a in addresses]
    table = {rank: addresses[i % n] for i, rank in enumerate(mesh.process_ids)}
    for pipe in pipes:
        pipe.send(table)
    results: dict[int, Any] = {}
    for pipe in pipes:
        results |= pipe.recv()
    for pipe in pipes:
        pipe.send("stop")
    for process in processes:
        process.join()
    return [results[rank] for rank in mesh.process_ids]
