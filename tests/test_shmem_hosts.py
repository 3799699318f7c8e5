"""Between two hosts everything goes over the comm of the cluster, TCP or TLS; a host that is gone is a lost PE."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import PORT, Host, environment, two_hosts, why_not
from hosts_program import CASES

pytestmark = [pytest.mark.processes, pytest.mark.skipif(bool(why_not()), reason=why_not() or "never")]


@pytest.fixture(params=["tcp", "tls"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Host, Host, dict[str, str], str]]:
    """A scheduler and a worker on the first host, a worker on the second."""
    protocol = request.param
    with two_hosts(tmp_path) as (one, two):
        env = environment(tmp_path, (one, two), tls=protocol == "tls")
        address = f"{protocol}://{one.address}:{PORT}"
        common = ("--no-dashboard", "--protocol", protocol)
        one.start(env, "distributed.cli.dask_scheduler", "--host", one.address, "--port", str(PORT), *common)
        for host in (one, two):
            options = ("--nthreads", "1", "--no-nanny", "--host", host.address, *common, "--local-directory", str(tmp_path))
            host.start(env, "distributed.cli.dask_worker", address, *options)
        yield one, two, env, address


def read(program: subprocess.Popen[bytes]) -> Any:
    """The next line it prints."""
    line = program.stdout.readline() if program.stdout is not None else b""
    if not line:
        _, errors = program.communicate()
        pytest.fail(errors.decode()[-4000:])
    return json.loads(line)


def test_two_hosts(cluster: tuple[Host, Host, dict[str, str], str]) -> None:
    one, two, env, address = cluster
    program = one.start(env, "hosts_program", address, talks=True)
    assert read(program) == {"ready": True}
    two.stop()
    program.stdin.write(b"\n")
    program.stdin.flush()
    seen = read(program)
    assert len(seen["passed"]) == 2 * len(CASES)
    assert seen["hosts"] == sorted([one.name, two.name])
    assert seen["same"] == [True, True]
    for symmetric, shards in zip(seen["symmetric"], seen["shards"], strict=True):
        assert symmetric["ask"] == {"loads": 2, "bytes": 12 * 2**20 + 24}
        assert shards["rpc"]["bytes"] == 12 * 2**20
        assert symmetric["vm"]["loads"] == shards["vm"]["loads"] == shards["shm"]["loads"] == 0
    assert "is lost" in seen["lost"]
