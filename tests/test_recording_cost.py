"""What recording leaves out: questions to the scheduler, and work that only lowering needs. Nothing here looks at a clock."""

from __future__ import annotations

from typing import Any

import pytest

from daskmesh import moves


class _Client:
    """Stands for a Dask client: counts how often its scheduler is asked."""

    asynchronous = False

    def __init__(self, *limits: int) -> None:
        self.limits = limits
        self.asked = 0

    def scheduler_info(self, n_workers: int = -1) -> dict[str, Any]:
        self.asked += 1
        return {"workers": {str(i): {"memory_limit": n} for i, n in enumerate(self.limits)}}


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> _Client:
    client = _Client(2**30, 2**28, 0)
    monkeypatch.setattr(moves, "default_client", lambda: client)
    monkeypatch.setattr(moves, "monotonic", lambda: 100.0)
    return client


def test_the_scheduler_is_asked_once_for_the_limits_of_its_workers(client: _Client) -> None:
    for _ in range(3):
        moves.refuse_beyond_memory(2**28, pytest.fail)
    moves.refuse_beyond_memory(2**20, pytest.fail)
    assert client.asked == 1


def test_what_was_remembered_refuses_nothing(client: _Client) -> None:
    moves.refuse_beyond_memory(2**27, pytest.fail)
    with pytest.raises(MemoryError, match="a matrix takes 512 MiB on one worker, whose memory limit is 256 MiB; keep it"):
        moves.refuse_beyond_memory(2**29, lambda: "a matrix")
    client.limits = (2**31, 0)
    moves.refuse_beyond_memory(2**29, pytest.fail)
    client.limits = (0,)
    moves.refuse_beyond_memory(2**40, pytest.fail)


def test_limits_are_asked_for_again(client: _Client, monkeypatch: pytest.MonkeyPatch) -> None:
    moves.refuse_beyond_memory(2**27, pytest.fail)
    client.limits = (2**25,)
    monkeypatch.setattr(moves, "monotonic", lambda: 103.0)
    with pytest.raises(MemoryError, match="32 MiB"):
        moves.refuse_beyond_memory(2**27, lambda: "a matrix")
