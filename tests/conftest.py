"""Clusters for the tests: inside this process, worker processes, and a scheduler and workers started from the shell."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import dask
import pytest
from distributed import Client, LocalCluster
from distributed.client import _current_client, _global_clients
from distributed.utils import get_mp_context

import daskmesh
from daskmesh.world import init_parallel_env, shutdown

HERE = Path(__file__).parent

# Workers are forked from a process that has imported everything, in a fifth of the time that each would take to import it.
# What runs in processes of its own (the command line, the pytest plugin) starts workers as Dask does by default.
# A cluster looks again 15 s after a worker was lost, and closes the nanny for good if the worker has just been killed once more.
dask.config.set({"distributed.worker.multiprocessing-method": "forkserver", "distributed.deploy.lost-worker-timeout": "1h"})
get_mp_context().set_forkserver_preload(["distributed", "daskmesh", "scipy.special"])


def pytest_collection_finish() -> None:
    """What stays until the end is not looked through again at each garbage collection."""
    gc.collect()
    gc.freeze()


def child_environment(**more: str) -> dict[str, str]:
    """The environment of a process that must import daskmesh and the tests, installed or not.

    Without the allocator's settings, which a nanny in this process leaves in its environment.
    """
    ours = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    roots = [str(Path(daskmesh.__file__).parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")]
    return {**ours, "PYTHONPATH": os.pathsep.join(filter(None, roots)), **more}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def local_cluster(**options: Any) -> LocalCluster:
    """A `LocalCluster` without dashboard. With `dashboard_address=None` Dask warns when another cluster has port 8787."""
    return LocalCluster(dashboard_address="127.0.0.1:0", scheduler_kwargs={"dashboard": False}, **options)


class ShellCluster:
    """``dask scheduler`` and ``dask worker`` processes on loopback; each process leads a group, which is killed as one."""

    def __init__(self, workers: int, grace: str, nanny: bool = True) -> None:
        failures = {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "2"}  # each costs the restart of a worker
        forked = {"DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD": "forkserver"}
        self._env = child_environment(DASK_DASKMESH__GRACE=grace, **failures, **forked)
        self._nanny = () if nanny else ("--no-nanny",)
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.workers: list[subprocess.Popen[bytes]] = []
        self.start_scheduler()
        for _ in range(workers):
            self.start_worker()

    def start_scheduler(self) -> None:
        """Start the scheduler, at the same address each time."""
        port = self.address.rsplit(":", 1)[1]
        self.scheduler = self._start("dask_scheduler", "--port", port, "--host", "127.0.0.1", "--no-dashboard")

    def start_worker(self) -> subprocess.Popen[bytes]:
        """Start one more worker with one thread."""
        common = ("--nthreads", "1", "--host", "127.0.0.1", "--no-dashboard")
        process = self._start("dask_worker", self.address, *common, *self._nanny)
        self.workers.append(process)
        return process

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a process started here together with its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def stop_worker_of(self, client: Client, address: str) -> None:
        """Kill for good the worker at `address` and its nanny."""
        group = client.run(os.getpgrp, workers=[address])[address]
        process = next(p for p in self.workers if p.pid == group)
        self.stop(process)
        self.workers.remove(process)

    def close(self) -> None:
        for process in (*self.workers, self.scheduler):
            self.stop(process)

    def _start(self, command: str, *arguments: str) -> subprocess.Popen[bytes]:
        line = [sys.executable, "-m", f"distributed.cli.{command}", *arguments]
        quiet = subprocess.DEVNULL
        return subprocess.Popen(line, env=self._env, cwd=HERE, stdout=quiet, stderr=quiet, start_new_session=True)


@pytest.fixture(scope="session")
def process_cluster() -> Iterator[LocalCluster]:
    """Two worker processes with one thread each."""
    with local_cluster(n_workers=2, threads_per_worker=1, processes=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def processes(process_cluster: LocalCluster) -> Iterator[Client]:
    """A client of the two worker processes; it is Dask's default client for the module."""
    with Client(process_cluster) as client:
        yield client
        shutdown()


@pytest.fixture(scope="session")
def thread_cluster() -> Iterator[LocalCluster]:
    """Three workers inside this process, with two threads each."""
    with local_cluster(n_workers=3, threads_per_worker=2, processes=False, memory_limit=0) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def threads(thread_cluster: LocalCluster) -> Iterator[Client]:
    """A client of the workers inside this process; it is Dask's default client for the module."""
    with Client(thread_cluster) as client:
        yield client
        shutdown()


@pytest.fixture(scope="module")
def in_this_thread(threads: Client) -> Iterator[None]:
    """Thousands of tiny programs: a task each, run here, instead of a message each."""
    init_parallel_env()
    with dask.config.set(scheduler="synchronous"):
        yield


@pytest.fixture(scope="module")
def shell_cluster() -> Iterator[ShellCluster]:
    """A ``dask scheduler`` and two ``dask worker`` processes; lost ranks are folded after two seconds."""
    cluster = ShellCluster(workers=2, grace="2s")
    yield cluster
    cluster.close()


@pytest.fixture
def shell_client(shell_cluster: ShellCluster) -> Iterator[Client]:
    """A client of the cluster from the shell, with two workers at the start."""
    while len(shell_cluster.workers) < 2:
        shell_cluster.start_worker()
    with Client(shell_cluster.address, timeout="30s") as client:
        client.wait_for_workers(2, timeout=30)
        yield client
        shutdown()


@pytest.fixture
def embedded() -> Iterator[None]:
    """No client and no world, so that the first use of a mesh starts the cluster inside this process."""
    shutdown()
    hidden, token = dict(_global_clients), _current_client.set(None)
    _global_clients.clear()
    yield
    shutdown()
    _current_client.reset(token)
    _global_clients.update(hidden)


@pytest.fixture
def eventually() -> Callable[[Callable[[], Any]], Any]:
    """Ask until the answer is true; for what a cluster does on its own time."""
    return _eventually


def _eventually(ask: Callable[[], Any], timeout: float = 30) -> Any:
    end = monotonic() + timeout
    while not (answer := ask()):
        if monotonic() > end:
            raise TimeoutError(f"still {answer!r} after {timeout} s")
        sleep(0.02)
    return answer
