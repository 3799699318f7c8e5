"""Ten thousand random operations of all PEs against a sequential model, for each of three seeds, workers killed between rounds.

Each PE changes a stripe of its own in every PE's buffer, so its operations have one right outcome whatever the others do;
elements that all PEs add to are checked by what the additions answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import dask
import numpy as np
import pytest
from conftest import local_cluster
from distributed import Client
from shmem_cases import ADD, MAX, MIN, SET, Boxed, kill

import daskmesh as dm
from daskmesh import PELostError, ShmemTensor

pytestmark = pytest.mark.processes

N, ROWS, WIDTH, SHARED = 4, 5, 7, 3
ROUNDS, OPS = 2, 10_000
UPDATES: dict[dm.AtomicType, Callable[..., Any]] = {
    SET: lambda old, new: new,
    ADD: np.add,
    MAX: np.maximum,
    MIN: np.minimum,
}


class Model:
    """What one PE's stripe holds on every PE, done one after the other."""

    def __init__(self, tensor: ShmemTensor, seed: int) -> None:
        self.tensor = tensor
        self.me = dm.my_pe()
        self.rng = np.random.default_rng([seed, self.me])
        self.stripes = np.zeros((N, ROWS, WIDTH), np.int64)
        self.wrong: list[str] = []
        self.tickets: list[tuple[int, int, int]] = []

    def box(self) -> tuple[tuple[int, int], tuple[int, int]]:
        at = [int(self.rng.integers(n)) for n in (ROWS, WIDTH)]
        size = [int(self.rng.integers(1, n - a + 1)) for n, a in zip((ROWS, WIDTH), at, strict=True)]
        return (at[0], at[1]), (size[0], size[1])

    def there(self, at: tuple[int, int]) -> tuple[int, int]:
        """A place of the stripe as one of the buffer."""
        return at[0], self.me * WIDTH + at[1]

    def expect(self, what: str, got: Any, want: Any) -> None:
        if not np.array_equal(got, want):
            self.wrong.append(f"{what}: got {got}, wanted {want}")

    def step(self) -> None:
        pe = int(self.rng.integers(N))
        at, size = self.box()
        part = self.stripes[pe, at[0] : at[0] + size[0], at[1] : at[1] + size[1]]
        kind = self.rng.choice(["put", "load", "atomic", "shared"], p=[0.3, 0.4, 0.2, 0.1])
        if kind == "put":
            how = list(UPDATES)[self.rng.integers(len(UPDATES))]
            data = self.rng.integers(-99, 99, size)
            dm.shmem_put(data, self.there(at), self.tensor, pe, put_op=how)
            part[...] = UPDATES[how](part, data)
        elif kind == "load":
            self.expect("load", dm.shmem_load(self.tensor, pe, size, self.there(at)), part)
        elif kind == "atomic":
            self.atomic(pe, at)
        else:
            slot = int(self.rng.integers(SHARED))
            answer = dm.shmem_atomic_fetch_add(self.tensor, (0, N * WIDTH + slot), 1, pe)
            self.tickets.append((pe, slot, int(answer)))

    def atomic(self, pe: int, at: tuple[int, int]) -> None:
        name = self.rng.choice(["fetch", "set", "add", "fetch_add", "swap", "compare_swap"])
        old, value = int(self.stripes[pe][at]), int(self.rng.integers(-99, 99))
        call = getattr(dm, f"shmem_atomic_{name}")
        operands = {"fetch": (), "compare_swap": (old + int(self.rng.integers(2)), value)}.get(name, (value,))
        answer = call(self.tensor, self.there(at), *operands, pe)
        if name not in ("set", "add"):
            self.expect(name, answer, old)
        if name in ("set", "swap") or (name == "compare_swap" and operands[0] == old):
            self.stripes[pe][at] = value
        elif name in ("add", "fetch_add"):
            self.stripes[pe][at] = old + value

    def look(self) -> None:
        for pe in range(N):
            got = dm.shmem_load(self.tensor, pe, (ROWS, WIDTH), (0, self.me * WIDTH))
            self.expect(f"all of PE {pe}", got, self.stripes[pe])


def work(tensor: ShmemTensor, seed: int, steps: int) -> Any:
    model = Model(tensor, seed)
    for _ in range(steps):
        model.step()
    dm.shmem_barrier_all(tensor)
    model.look()
    return Boxed((model.wrong, model.tickets))


def create() -> ShmemTensor:
    return dm.create_shmem_tensor("random", N, np.int64, (ROWS, N * WIDTH + SHARED))


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    dm.shutdown()
    with local_cluster(n_workers=2, threads_per_worker=1, processes=True) as cluster, Client(cluster) as client:
        yield client
        dm.shutdown()


def is_known(client: Client, address: str) -> bool:
    return bool(client.run_on_scheduler(lambda dask_scheduler: address in dask_scheduler.workers))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_operations(client: Client, seed: int, eventually: Callable[..., Any]) -> None:
    for turn in range(ROUNDS):
        tensor = create()
        for pe in range(N):
            assert not dm.shmem_load(tensor, pe).compute().any()
        steps = OPS // N // ROUNDS
        program = dm.local_map(work, [None], process_mesh=tensor.mesh, out_shapes=[None])
        values = [v.value for v in dask.compute(*program(tensor, 10 * seed + turn, steps))]
        assert [wrong for wrong, _ in values] == [[]] * N
        answers = sorted(ticket for _, tickets in values for ticket in tickets)
        counts = {place: sum(t[:2] == place for t in answers) for place in {t[:2] for t in answers}}
        assert answers == sorted((*place, i) for place, n in counts.items() for i in range(n))
        if turn == 0:
            lost = kill(client, seed % N)
            eventually(lambda lost=lost: not is_known(client, lost))
            everything_fails(tensor)
        tensor.free()
    eventually(lambda: len(client.scheduler_info()["workers"]) == 2)


def everything_fails(tensor: ShmemTensor) -> None:
    for pe in range(N):
        for call in (
            lambda pe=pe: dm.shmem_load(tensor, pe),
            lambda pe=pe: dm.shmem_put([[1]], (0, 0), tensor, pe),
            lambda pe=pe: dm.shmem_atomic_fetch_add(tensor, (0, 0), 1, pe),
            lambda pe=pe: dm.shmem_signal(tensor, 0, 1, target_pe=pe),
            lambda pe=pe: dm.shmem_clear_data(tensor, by=pe),
        ):
            with pytest.raises(PELostError):
                dask.compute(call())
