"""What runs on the first of two hosts: `python -m hosts_program ADDRESS`; prints what it has seen."""

from __future__ import annotations

import json
import sys
from typing import Any

import dask
import numpy as np
from distributed import Client
from shmem_cases import LOADS, PROGRAMS, Boxed, check, filled, run

import daskmesh as dm
from daskmesh import PELostError, peers, transport, vm

CASES = ["7 overhang", "17 put", "34 barrier", "41 compare_swap"]


def main(address: str) -> None:
    """Connect, work, print."""
    seen: dict[str, Any] = {"passed": []}
    with Client(address, timeout="60s") as client:
        client.wait_for_workers(2, timeout=60)
        for name in CASES:
            program, want = (LOADS | PROGRAMS)[name]
            for mode in ("client", "region"):
                with filled() as tensor:
                    check(run(mode, program, tensor), want)
                seen["passed"].append(f"{name}, {mode}")
        seen |= roads()
        seen["hosts"] = sorted(process.host for process in client.run(vm.this_process).values())
        lose(client, seen)
    print(json.dumps(seen))


def roads() -> dict[str, Any]:
    """How loads went, of symmetric buffers, and of shards in an exchange."""
    n = 3 * 2**19  # 12 MiB: more than goes in one message
    x = dm.arange(2 * n, mesh=dm.init_mesh(2, ["pair"]), placements=[dm.Shard(0)])
    with dm.symm_from_dtensor(x) as held:

        def program() -> Any:
            peers.reset_stats()
            transport.reset_stats()
            got = dm.shmem_load(held, 1 - dm.my_pe())
            small = dm.shmem_load(held, 1 - dm.my_pe(), [3], [5])
            same = bool((got == np.arange(n) + n * (1 - dm.my_pe())).all() and (small == got[5:8]).all())
            return Boxed((same, peers.stats(), transport.stats()))

        values = [v.value for v in dask.compute(*dm.local_map(program, [None], process_mesh=x.process_mesh)())]
    whole = x.reshard([dm.Replicate()])
    assert all((whole.local_value(rank) == np.arange(2 * n)).all() for rank in (0, 1))
    return {"same": [v[0] for v in values], "symmetric": [v[1] for v in values], "shards": [v[2] for v in values]}


def lose(client: Client, seen: dict[str, Any]) -> None:
    """Wait for the other host to be switched off, then load from it."""
    with filled() as tensor:
        addresses = dm.init_parallel_env().table()
        far = next(pe for pe in range(4) if addresses[pe] != addresses[0])
        near = dm.ProcessMesh([0], ["near"])
        print(json.dumps({"ready": True}), flush=True)
        sys.stdin.readline()
        try:
            dm.local_map(lambda: dm.shmem_load(tensor, far), [[dm.Replicate()]], process_mesh=near)().compute()
        except PELostError as error:
            seen["lost"] = str(error)


if __name__ == "__main__":
    main(sys.argv[1])
