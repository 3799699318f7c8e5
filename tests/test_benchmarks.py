"""The benchmarks still run: `main` of every `benchmarks/bench_*.py`, at toy size. Nothing here looks at a clock."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

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


@pytest.mark.parametrize("path", sorted(FOLDER.glob("bench_*.py")), ids=lambda path: path.stem)
def test_a_benchmark_runs_at_toy_size(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    module = load(path)
    try:
        module.main(**module.TOY)
    finally:
        dm.shutdown()
