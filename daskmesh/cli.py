"""The command line: `daskmesh demo`, the main job, and `daskmesh info`, who sits where."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import Any

import dask
import numpy as np
from dask.system import CPU_COUNT
from distributed import Client, LocalCluster

import daskmesh as dm
from daskmesh import demo, vm
from daskmesh.pen import count, format_bytes
from daskmesh.plugins import RankPlugin
from daskmesh.roads import road_to
from daskmesh.store import Ticket, store_at
from daskmesh.symmetric import symmetric_at

__all__ = ["main"]

# Dask's nanny sets a trim threshold of 64 KiB, with which each large temporary array is mapped and unmapped anew.
MALLOC = {"MALLOC_TRIM_THRESHOLD_": 2**30, "MALLOC_MMAP_THRESHOLD_": 2**30}
ENVIRON = "distributed.nanny.pre-spawn-environ"  # of workers; Dask's own setting says one thread for each library, too
SLOW_TRIM = 2**20
READERS = 8  # listed for each road
PATIENCE = "10s"  # with a scheduler that does not answer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the number is the exit status.

    Examples
    --------
    >>> from daskmesh.cli import main
    >>> main([])
    usage: daskmesh [-h] [--version] {demo,info} ...
    2
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_usage()
        return 2
    try:
        with _cluster(options):
            if options.command == "demo":
                demo.run(options.ranks)
            else:
                print("\n".join(_info()))
    except OSError as error:  # nobody answers at the address
        print(f"daskmesh {options.command}: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("daskmesh", description=dm.__doc__)
    parser.add_argument("--version", action="version", version=f"daskmesh {dm.__version__}")
    commands = parser.add_subparsers(dest="command")
    run = commands.add_parser("demo", help="the main job: a local_map, then a table of 200 MB on a 2-D mesh")
    run.add_argument("--ranks", type=_positive, default=4, metavar="N", help="ranks of the second part (default 4)")
    info = commands.add_parser("info", help="ranks, workers, hosts and the roads between them")
    info.set_defaults(processes=False)
    for command in (run, info):
        command.add_argument("--scheduler", metavar="ADDRESS", help="a Dask scheduler that runs, tcp://host:8786")
    run.add_argument("--processes", action="store_true", help="start worker processes, not threads of this one")
    return parser


def _positive(text: str) -> int:
    n = int(text) if text.isdecimal() else 0
    if n < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of ranks; it takes at least 1")
    return n


@contextmanager
def _cluster(options: argparse.Namespace) -> Iterator[None]:
    """The cluster asked for, as Dask's current one; the default starts inside this process at the first use."""
    with ExitStack() as stack:
        if options.scheduler:
            client = stack.enter_context(_client(options.scheduler))
            if options.command == "demo":
                client.wait_for_workers(1, timeout=PATIENCE)
        elif options.processes:
            stack.enter_context(dask.config.set({ENVIRON: {**dask.config.get(ENVIRON), **MALLOC}}))
            workers = max(2, min(CPU_COUNT, options.ranks))
            cluster = LocalCluster(
                n_workers=workers,
                threads_per_worker=1,
                dashboard_address=None,
                scheduler_kwargs={"dashboard_address": ":0"},  # a free port
            )
            stack.enter_context(cluster)
            stack.enter_context(Client(cluster))
        stack.callback(dm.shutdown)
        yield


def _client(address: str) -> Client:
    client = Client.__new__(Client)
    try:
        Client.__init__(client, address, timeout=PATIENCE)
    except (ValueError, TypeError) as error:  # TypeError: an address of TLS, and no certificates
        # Left to the garbage collector, it is closed in whatever thread that runs: in a new loop's thread that is a deadlock.
        client.close()
        raise OSError(f"{address!r} is no address of a scheduler, such as tcp://host:8786: {error}") from error
    return client


# ---------------------------------------------------------------------------------------------------------------- info


def _info() -> Iterator[str]:
    """Lines on the current cluster: what each worker holds, and how views travel."""
    world = dm.init_parallel_env()
    client: Any = world.client
    workers = client.scheduler_info(n_workers=-1)["workers"]
    about = client.run(_about)
    ranks = defaultdict(list)
    for rank, address in world.table().items():
        ranks[address].append(str(rank))
    hosts = {worker["host"] for worker in workers.values()}
    others = (f"{package} {version(package)}" for package in ("dask", "distributed", "numpy"))
    yield ", ".join([f"daskmesh {dm.__version__}", *others])
    yield f"scheduler {client.scheduler.address}: {count(len(workers), 'worker')} on {count(len(hosts), 'host')}"
    worlds = [size for size in client.run_on_scheduler(_worlds) if size]
    yield f"{count(len(worlds), 'world')}: {', '.join(count(size, 'rank') for size in worlds) or 'no mesh was used yet'}"
    yield ""
    rows = [("worker", "host", "pid", "threads", "memory", "exposed", "symmetric", "ranks of a new world")]
    for address, worker in sorted(workers.items(), key=lambda item: (item[1]["host"], str(item[1]["name"]))):
        facts, limit = about[address], worker["memory_limit"]
        where = (address, worker["host"], str(facts["process"].pid), str(worker["nthreads"]))
        memory = format_bytes(limit) if limit else "no limit"
        held = format_bytes(facts["exposed"]), format_bytes(facts["symmetric"])
        rows.append((*where, memory, *held, " ".join(ranks[address]) or "none"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
    yield ""
    yield from _roads(client, about)
    yield from _advice(about)


def _advice(about: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A warning of workers that are slower than they need be."""
    slow = sorted(address for address, facts in about.items() if facts["trim"] is not None)
    if not slow:
        return
    yield ""
    yield (
        f"warning: MALLOC_TRIM_THRESHOLD_={about[slow[0]]['trim']} on {count(len(slow), 'worker')} of {len(about)}, which slows "
        "arithmetic on large arrays up to 2.4 times; before they start:"
    )
    yield f"  export {' '.join(f'{name}={value}' for name, value in MALLOC.items())}"
    yield "or, where Python starts them:"
    yield f'  environ = dask.config.get("{ENVIRON}")'
    yield f'  dask.config.set({{"{ENVIRON}": environ | {MALLOC}}})'


def _roads(client: Any, about: dict[str, dict[str, Any]]) -> Iterator[str]:
    """How many pairs of workers use each road; where there are several, which."""
    processes = {address: facts["process"] for address, facts in about.items()}
    found = client.run(_reach, processes) if len(processes) > 1 else {}
    readers: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for reader, answers in found.items():
        for owner, road in answers.items():
            readers[road][reader].append(owner)
    if not readers:
        yield f"roads: there is {'one' if processes else 'no'} worker"
        return
    yield "roads from worker to worker"
    ways = Counter({road: sum(map(len, pairs.values())) for road, pairs in readers.items()})
    for road, pairs in ways.most_common():
        yield f"  {pairs:>4} {'way ' if pairs == 1 else 'ways'}  {road}"
        shown = sorted(readers[road].items()) if len(ways) > 1 else []
        for reader, owners in shown[:READERS]:
            yield f"             to {reader} from {', '.join(sorted(owners))}"
        if len(shown) > READERS:
            yield f"             to {len(shown) - READERS} others"


def _about(dask_worker: Any = None) -> dict[str, Any]:
    """Runs on a worker: its process, the bytes in its stores, a trim threshold that slows it."""
    trim = os.environ.get("MALLOC_TRIM_THRESHOLD_")
    slow = trim is not None and trim.isdigit() and int(trim) < SLOW_TRIM
    stores = store_at(dask_worker.address), symmetric_at(dask_worker.address)
    exposed, symmetric = (store.nbytes if store else 0 for store in stores)
    return {"process": vm.this_process(), "exposed": exposed, "symmetric": symmetric, "trim": trim if slow else None}


async def _reach(processes: dict[str, vm.Process], dask_worker: Any = None) -> dict[str, str]:
    """Runs on a worker: the road by which it loads from each other one."""
    owners = {address: process for address, process in processes.items() if address != dask_worker.address}
    # Not on the event loop, over which workers ask each other.
    return await asyncio.to_thread(lambda: {owner: _road(owner, process, dask_worker) for owner, process in owners.items()})


def _road(owner: str, process: vm.Process, reader: Any) -> str:
    probe = Ticket(owner, 1, (), np.dtype(float), (), 8, "raw", process=process)
    try:
        road, why = road_to(probe, reader)
    except (RuntimeError, ValueError) as refused:
        return f"none: {refused}"
    protocol = owner.partition("://")[0]
    how = {
        "same": "a copy inside one process",
        "vm": "memory of the other process, same host, one copy",
        "shm": "shared memory, same host, two copies",
        "rpc": f"RPC over {protocol}",
    }
    return f"{how[road]}: {why}" if why else how[road]


def _worlds(dask_scheduler: Any = None) -> list[int]:
    """Runs on the scheduler: the size of each world."""
    plugins = [plugin for plugin in dask_scheduler.plugins.values() if isinstance(plugin, RankPlugin)]
    return [table.size for plugin in plugins for table in plugin.worlds.values()]
