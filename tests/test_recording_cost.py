"""What recording leaves out: questions to the scheduler, and work that only lowering needs. Nothing here looks at a clock."""

from __future__ import annotations

from typing import Any

import numpy as np
import ops_oracle as oracle
import pytest

import daskmesh as dm
from daskmesh import moves
from daskmesh.graph import Node
from daskmesh.late import Late
from daskmesh.layout import make_layout
from daskmesh.ops import picks
from daskmesh.placement import Shard
from daskmesh.rules import Decision

S0, S1 = Shard(0), Shard(1)
LINE, THREE, _, _ = oracle.MESHES


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


# -- what is worked out late ------------------------------------------------------------------------------------------


def test_operands_are_worked_out_once_when_they_are_asked_for() -> None:
    layout = make_layout(THREE, [S0], (6,), "f8")
    source, calls = Node(layout, "a world"), []

    def make() -> Any:
        calls.append(1)
        return [source], {"axis": 0}

    node = Late(layout, "a world", np.flip, make)
    assert not calls
    assert node.parents() == [source]
    assert node.args == (source,)
    assert node.kwargs == {"axis": 0}
    assert calls == [1]
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = node.other


@pytest.mark.cluster
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("how", ["get", "take", "set", "mask", "pair"])
def test_indices_may_be_written_to_after_recording(how: str) -> None:
    value = np.arange(24.0).reshape(6, 4)
    x = dm.shard_tensor(value, THREE, [S0])
    index, mask = np.array([5, 0, -2, 1, 1]), np.array([True, False, True, True, False, True])
    want = value.copy()
    if how == "get":
        y, want = x[index], value[index]
    elif how == "take":
        y, want = np.take(x, index, axis=0), value[index]
    elif how == "pair":
        y, want = x[index, index % 4], value[index, index % 4]
    elif how == "mask":
        y, want = x[mask], value[mask]
    else:
        y = x
        y[index] = -1.0
        want[index] = -1.0
    index[:] = 3
    mask[:] = False
    oracle.same(y, want)


@pytest.mark.cluster
@pytest.mark.usefixtures("threads")
def test_picking_works_out_no_routes_before_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("nobody has asked")

    x = dm.shard_tensor(np.arange(12.0), THREE, [S0])
    monkeypatch.setattr(picks, "routes", refuse)
    y = x[[11, 0, 4, 1]]
    assert y.layout.chunks == ((2, 2, 0),)
    monkeypatch.undo()
    assert y.explain().total_bytes == 8 * 2  # 11 and 0 go to rank 0, which has 0; 4 and 1 to rank 1, which has 4
    oracle.same(y, np.array([11.0, 0.0, 4.0, 1.0]))


@pytest.mark.cluster
@pytest.mark.usefixtures("threads")
def test_words_are_made_when_someone_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    text = Decision.text.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Decision, "text", property(lambda self: made.append(1) or text(self)))
    x, y = (dm.zeros((4, 4), mesh=LINE, placements=[p]) for p in (S0, S1))
    z = x + y
    assert not made
    assert "becomes" in z.explain().text
    assert made


@pytest.mark.cluster
@pytest.mark.usefixtures("threads")
def test_known_layouts_make_no_new_stages() -> None:
    x = dm.zeros((6, 4), mesh=THREE, placements=[S0])
    for f in (lambda: np.roll(x, 1, 0), lambda: np.flip(x, 0), lambda: np.reshape(x, -1), lambda: np.concatenate([x, x])):
        a, b = f(), f()
        assert a.layout is b.layout
        assert all(s is t for s, t in zip(a.explain().stages, b.explain().stages, strict=True))
