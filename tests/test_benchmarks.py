"""The benchmarks still run: every body of `benchmarks/bench_*.py`, at toy size. Nothing here looks at a clock."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import daskmesh as dm

FOLDER = Path(__file__).parent.parent / "benchmarks"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # so that what it defines can be pickled
    spec.loader.exec_module(module)
    return module


def bodies() -> Iterator[Any]:
    for path in sorted(FOLDER.glob("bench_*.py")):
        for name, body in inspect.getmembers(load(path), inspect.isfunction):
            if name.startswith("bench_") and body.__module__ == path.stem:
                yield pytest.param(body, id=f"{path.stem}.{name}")


@pytest.mark.parametrize("body", bodies())
def test_a_body_runs_at_toy_size(body: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    try:
        body(toy=True)
    finally:
        dm.shutdown()
