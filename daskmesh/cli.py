"""The command line: `daskmesh demo`, the main job, and `daskmesh info`, who sits where."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import Any

import dask
from dask.system import CPU_COUNT
from distributed import Client, LocalCluster

import daskmesh as dm
from daskmesh import config, demo, vm
from daskmesh.pen import count, format_bytes
from daskmesh.plugins import RankPlugin
from daskmesh.store import store_at

__all__ = ["main"]

# Dask's nanny sets a trim threshold of 64 KiB, with which each large temporary array is mapped and unmapped anew.
MALLOC = {"MALLOC_TRIM_THRESHOLD_": 2**30, "MALLOC_MMAP_THRESHOLD_": 2**30}
SLOW_TRIM = 2**20
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
            stack.enter_context(Client(options.scheduler, timeout=PATIENCE))
        elif options.processes:
            stack.enter_context(dask.config.set({"distributed.nanny.pre-spawn-environ": MALLOC}))
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
    rows = [("worker", "host", "pid", "threads", "memory", "exposed", "ranks of a new world")]
    for address, worker in sorted(workers.items(), key=lambda item: (item[1]["host"], str(item[1]["name"]))):
        facts, limit = about[address], worker["memory_limit"]
        where = (address, worker["host"], str(facts["process"].pid), str(worker["nthreads"]))
        memory = format_bytes(limit) if limit else "no limit"
        rows.append((*where, memory, format_bytes(facts["held"]), " ".join(ranks[address]) or "none"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
    yield ""
    yield from _roads(client, about)
    slow = sorted(address for address, facts in about.items() if facts["trim"] is not None)
    if slow:
        yield ""
        yield (
            f"warning: {len(slow)} workers run with MALLOC_TRIM_THRESHOLD_={about[slow[0]]['trim']}, which slows "
            "arithmetic on large arrays up to 2.4 times; before the cluster starts, set the Dask setting "
            f"distributed.nanny.pre-spawn-environ to {MALLOC}"
        )


def _roads(client: Any, about: dict[str, dict[str, Any]]) -> Iterator[str]:
    """How many pairs of workers use each road."""
    found = client.run(_reach, {address: facts["process"] for address, facts in about.items()})
    roads = Counter(road for answers in found.values() for road in answers)
    yield "roads from worker to worker" if roads else "roads: there is one worker"
    for road, pairs in roads.most_common():
        yield f"  {pairs:>4} ways  {road}"


def _about(dask_worker: Any = None) -> dict[str, Any]:
    """Runs on a worker: its process, the bytes in its shard store, a trim threshold that slows it."""
    trim = os.environ.get("MALLOC_TRIM_THRESHOLD_")
    slow = trim is not None and trim.isdigit() and int(trim) < SLOW_TRIM
    store = store_at(dask_worker.address)
    return {"process": vm.this_process(), "held": store.nbytes if store else 0, "trim": trim if slow else None}


def _reach(processes: dict[str, vm.Process], dask_worker: Any = None) -> list[str]:
    """Runs on a worker: the road to each other one."""
    roads = []
    here = vm.this_process()
    for address, process in processes.items():
        if address == dask_worker.address:
            continue
        if process == here:
            roads.append("a copy inside one process")
            continue
        forced = config.get("transport") == "rpc"
        why = "daskmesh.transport is 'rpc'" if forced else vm.refusal(process)
        protocol = address.partition("://")[0]
        roads.append(f"RPC over {protocol}: {why}" if why else "memory of the other process, same host, one copy")
    return roads


def _worlds(dask_scheduler: Any = None) -> list[int]:
    """Runs on the scheduler: the size of each world."""
    plugins = [plugin for plugin in dask_scheduler.plugins.values() if isinstance(plugin, RankPlugin)]
    return [table.size for plugin in plugins for table in plugin.worlds.values()]
