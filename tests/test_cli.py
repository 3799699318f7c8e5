"""The command line: the demo prints what the page says on every kind of cluster, `info` says who sits where."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from pathlib import Path

import conftest
import dask
import numpy as np
import pytest
from distributed import Client

import daskmesh as dm
from daskmesh import cli, demo, vm

PAGE = ["[Rank 0] local_value=1.5", "[Rank 1] local_value=6.0", "global_value (distributed)=7.5"]


@pytest.fixture
def small_table(monkeypatch: pytest.MonkeyPatch) -> None:
    run = demo.run
    monkeypatch.setattr(demo, "run", lambda ranks: run(ranks, rows=2_003))


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


@pytest.mark.usefixtures("embedded", "small_table")
@pytest.mark.parametrize(("ranks", "mesh"), [(1, "(1, 1)"), (3, "(3, 1)"), (4, "(2, 2)"), (6, "(3, 2)")])
def test_demo_on_the_embedded_cluster(ranks: int, mesh: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--ranks", str(ranks)]) == 0
    lines = lines_of(capsys)
    assert lines[1:4] == PAGE
    assert any(line.startswith("2,003 minutes") and line.endswith(mesh) for line in lines)
    assert re.fullmatch(r"checked 391.2 KiB against NumPy: the largest difference is \d\.\de[+-]\d\d", lines[-1])
    assert dm.get_world_size() == 1


@pytest.mark.usefixtures("small_table")
def test_demo_on_a_scheduler_and_workers_from_the_shell(
    shell_client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo", "--scheduler", shell_client.scheduler.address]) == 0
    lines = lines_of(capsys)
    assert lines[1:4] == PAGE
    assert lines[-1].startswith("checked")


def test_demo_starts_worker_processes_without_the_slow_trim_threshold() -> None:
    code = (
        "from daskmesh import cli, demo\n"
        "from distributed import get_client\n"
        "import os\n"
        "def run(ranks):\n"
        "    demo.local_map_page()\n"
        "    for name in ('MALLOC_TRIM_THRESHOLD_', 'MALLOC_MMAP_THRESHOLD_', 'OMP_NUM_THREADS'):\n"
        "        found = get_client().run(os.environ.get, name)\n"
        "        print(len(found), set(found.values()))\n"
        "demo.run = run\n"
        "if __name__ == '__main__':\n"
        "    cli.main(['demo', '--processes', '--ranks', '2'])\n"
    )
    env = {name: value for name, value in conftest.child_environment().items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [*PAGE, f"2 {{'{2**30}'}}", f"2 {{'{2**30}'}}", "2 {'1'}"]
    assert done.stderr == ""


def test_the_demo_finds_a_wrong_answer(embedded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_medians", lambda part: np.median(part, axis=0) + 1)
    with pytest.raises(RuntimeError, match="the mesh and NumPy differ by 1"):
        demo.sensor_table(ranks=2, rows=2_003, show=lambda line: None)


@pytest.mark.usefixtures("embedded")
def test_info_on_the_embedded_cluster(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)  # what a nanny in this process has left
    dm.ones((4,), mesh=dm.init_mesh(2), placements=[dm.Shard(0)]).persist()
    with dm.create_shmem_tensor("pair", 2, "f8", [1024]):
        assert cli.main(["info"]) == 0
    lines = lines_of(capsys)
    assert lines[0].startswith(f"daskmesh {dm.__version__}, dask ")
    assert lines[2] == "1 world: 2 ranks"
    assert lines[4].split()[5:7] == ["exposed", "symmetric"]
    assert sum("8 KiB" in line for line in lines[5:]) == 2
    assert [line for line in lines if "ways" in line] == ["     2 ways  a copy inside one process"]
    assert not [line for line in lines if "warning" in line]
    with dask.config.set({"daskmesh.transport": "rpc"}):
        cli.main(["info"])
    assert "     2 ways  RPC over inproc: daskmesh.transport is 'rpc'" in lines_of(capsys)


def forbid(process: vm.Process, transport: str) -> None:
    """What a worker would find where it may not read the memory of `process`."""
    vm._refusals[process] = "process_vm_readv: Operation not permitted"
    dask.config.set({"daskmesh.transport": transport})


def allow() -> None:
    vm._refusals.clear()
    dask.config.set({"daskmesh.transport": "auto"})


def test_info_on_a_scheduler_and_workers_from_the_shell(shell_client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--scheduler", shell_client.scheduler.address]) == 0
    lines = lines_of(capsys)
    workers = sorted(shell_client.scheduler_info()["workers"])
    ranks = {line.split()[0]: line.split()[-1] for line in lines if line.startswith("tcp://")}
    assert sorted(ranks) == workers
    assert sorted(ranks.values()) == ["0", "1"]
    assert sum(int(line.split()[0]) for line in lines if re.search(r"\bways? ", line)) == 2
    advice = next(i for i, line in enumerate(lines) if line.startswith("warning: MALLOC_TRIM_THRESHOLD_=65536 on 2 workers of 2"))
    environ: dict[str, int] = {"OMP_NUM_THREADS": 1}
    with dask.config.set({cli.ENVIRON: environ}):
        exec("\n".join(line.strip() for line in lines[advice + 3 :]), {"dask": dask})
        assert dask.config.get(cli.ENVIRON) == {"OMP_NUM_THREADS": 1, **cli.MALLOC}


@pytest.mark.parametrize(
    ("transport", "road"),
    [
        ("auto", "shared memory, same host, two copies: process_vm_readv: Operation not permitted"),
        ("shm", "shared memory, same host, two copies: daskmesh.transport is 'shm'"),
        ("rpc", "RPC over tcp: daskmesh.transport is 'rpc'"),
        (
            "vm",
            "none: load: daskmesh.transport is 'vm', but the memory of worker OWNER cannot be read from here: "
            "process_vm_readv: Operation not permitted; set daskmesh.transport to 'auto'",
        ),
    ],
)
def test_info_says_the_road_of_each_pair(shell_client: Client, transport: str, road: str) -> None:
    shell_client.run(allow)
    dm.init_parallel_env(client=shell_client)
    about = shell_client.run(cli._about)
    reader, owner = sorted(about)
    try:
        shell_client.run(forbid, about[owner]["process"], transport, workers=[reader])
        lines = list(cli._roads(shell_client, about))
    finally:
        shell_client.run(allow)
    assert sorted(lines[1:]) == sorted([
        "     1 way   memory of the other process, same host, one copy",
        f"             to {owner} from {reader}",
        f"     1 way   {road.replace('OWNER', owner)}",
        f"             to {reader} from {owner}",
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (f"tcp://127.0.0.1:{conftest.free_port()}", "Timed out trying to connect to tcp://127.0.0.1:"),
        ("horse", "'horse' is no address of a scheduler, such as tcp://host:8786: missing port number"),
        ("xyz://h:1", "'xyz://h:1' is no address of a scheduler, such as tcp://host:8786: unknown address scheme"),
        ("tls://h:1", "'tls://h:1' is no address of a scheduler, such as tcp://host:8786: TLS expects a `ssl_context`"),
    ],
)
def test_a_scheduler_that_is_not_there_is_an_error_in_one_line(
    address: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "PATIENCE", "100ms")
    before = set(map(id, _open_clients()))
    assert cli.main(["info", "--scheduler", address]) == 1
    assert capsys.readouterr().err.startswith(f"daskmesh info: {message}")
    assert {id(client) for client in _open_clients()} <= before


def _open_clients() -> list[Client]:
    return [o for o in gc.get_objects() if isinstance(o, Client) and o.status not in ("closed", "newly-created")]


def test_a_cluster_without_workers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "PATIENCE", "100ms")
    with conftest.local_cluster(n_workers=0, processes=False, protocol="tcp") as cluster:
        assert cli.main(["info", "--scheduler", cluster.scheduler_address]) == 0
        assert lines_of(capsys)[-1] == "roads: there is no worker"
        assert cli.main(["demo", "--scheduler", cluster.scheduler_address]) == 1
        assert capsys.readouterr().err.startswith("daskmesh demo: Only 0/1 workers arrived")


@pytest.mark.parametrize("ranks", ["0", "-1", "two"])
def test_ranks_are_checked(ranks: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["demo", "--ranks", ranks])
    assert f"{ranks} is not a number of ranks" in capsys.readouterr().err


def test_the_table_is_the_same_however_it_is_cut() -> None:
    whole = demo.measurements((slice(0, 10_010), slice(0, 25)))
    assert (demo.measurements((slice(9_990, 10_005), slice(3, 9))) == whole[9_990:10_005, 3:9]).all()
    assert demo.measurements((slice(5, 5), slice(0, 25))).shape == (0, 25)


def test_the_package_ships_its_settings_and_types() -> None:
    package = Path(dm.__file__).parent
    assert (package / "daskmesh.yaml").exists()
    assert (package / "py.typed").exists()
