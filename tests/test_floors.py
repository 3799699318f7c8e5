"""The floors of the house, read from the imports: a module imports only lower floors, and stays small."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import daskmesh

PACKAGE = Path(daskmesh.__file__).parent
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60

# From the ground up. Modules of one row may not import each other; a floor with an order of its own takes several rows.
FLOORS: list[tuple[int, str]] = [
    (0, "placement pen protocol asking names"),
    (0, "mesh"),
    (1, "placing"),
    (1, "layout"),
    (2, "draw algebra pricing trees"),
    (2, "stage"),
    (2, "plan notation"),
    (2, "rules regather streams"),
    (3, "config errors recycling views wires"),
    (3, "vm links"),
    (3, "segments"),
    (3, "store"),
    (3, "fetch serve"),
    (3, "reading roads"),
    (3, "transport"),
    (3, "parcels buffers"),
    (3, "symmetric"),
    (3, "peers"),
    (4, "tasks region pins"),
    (4, "tickets blame"),
    (4, "plugins"),
    (4, "clients"),
    (4, "world meeting registrar"),
    (5, "layers"),
    (4, "tiles sharing"),
    (5, "graph gang algorithms"),
    (5, "joining gathering"),
    (5, "exchange halo late tracing"),
    (5, "running moves collectives summa"),
    (5, "regions inference explaining chunked"),
    (5, "shmem methods device"),
    (5, "windows"),
    (5, "shmem_ops"),
    (5, "recorded"),
    (6, "dtensor"),
    (7, "creation acting"),
    (7, "allocation onesided"),
    (7, "signals atomics"),
    (7, "waits"),
    (7, "conversion eager"),
    (7, "mapping io ops.kinds"),
    (7, "ops.parts ops.gathers ops.cells"),
    (7, "ops.picks ops.reshaping ops.keys ops.masks ops.reaching"),
    (8, "ops.* random"),
    (8, "ops"),
    (9, "routes array_api"),
    (9, "compositions cotangents"),
    (9, "tape"),
    (9, "duals items vjps"),
    (9, "backward inside"),
    (9, "derivative"),
    (9, "autograd"),
    (10, "layer checks"),
    (11, ""),
    (11, "testing demo"),
    (11, "cli"),
]
PURE_FLOOR = 2  # up to here: the standard library and NumPy only
MAY_IMPORT_DASK = set(
    "config errors store fetch serve reading roads transport links symmetric peers tasks tickets blame plugins clients world "
    "meeting registrar joining region layers graph exchange summa tracing running regions moves dtensor conversion eager "
    "explaining creation mapping shmem shmem_ops recorded chunked acting allocation onesided signals waits atomics "
    "collectives layer checks testing demo cli".split()
)
ALLOWED_BELOW = {"numpy", "daskmesh", *sys.stdlib_module_names}


def module_name(path: Path) -> str:
    """`ops/kinds.py` is `ops.kinds`; the package itself is the empty name."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}
STEPS = {name: (step, floor) for step, (floor, names) in enumerate(FLOORS) for name in (names.split() or [""])}


def step_of(name: str) -> tuple[int, int]:
    """(step, floor) of a module; a row such as `ops.*` stands for the modules no other row names."""
    if name in STEPS:
        return STEPS[name]
    package, _, _ = name.rpartition(".")
    if f"{package}.*" in STEPS:
        return STEPS[f"{package}.*"]
    raise LookupError(f"daskmesh/{name.replace('.', '/')}.py stands on no floor: give it a row in tests/test_floors.py")


def imports(name: str) -> Iterator[tuple[int, str]]:
    """Every (line, absolute module) that a module imports, those under TYPE_CHECKING included."""
    package = name if SOURCES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, target) for target in _from_targets(node, package))


def _from_targets(node: ast.ImportFrom, package: str) -> Iterator[str]:
    above = package.split(".") if package else []
    above = above[: len(above) - node.level + 1] if node.level else []
    base = ".".join((["daskmesh", *above] if node.level else []) + ([node.module] if node.module else []))
    for alias in node.names:
        inner = f"{base}.{alias.name}".removeprefix("daskmesh.")
        yield f"daskmesh.{inner}" if base.split(".")[0] == "daskmesh" and inner in SOURCES else base


def inner_imports(name: str) -> Iterator[tuple[int, str]]:
    for line, target in imports(name):
        if target.split(".")[0] == "daskmesh":
            yield line, target.removeprefix("daskmesh").removeprefix(".")


@pytest.mark.parametrize("name", SOURCES)
def test_a_module_imports_only_lower_floors(name: str) -> None:
    here, _ = step_of(name)
    upward = [(line, target or "daskmesh") for line, target in inner_imports(name) if step_of(target)[0] >= here]
    assert not upward, f"{name} reaches up or sideways: {upward}"


@pytest.mark.parametrize("name", [name for name in SOURCES if name in STEPS and STEPS[name][1] <= PURE_FLOOR])
def test_the_pure_floors_need_only_the_standard_library_and_numpy(name: str) -> None:
    foreign = [target for _, target in imports(name) if target.split(".")[0] not in ALLOWED_BELOW]
    assert not foreign


@pytest.mark.parametrize("name", [name for name in SOURCES if name not in MAY_IMPORT_DASK])
def test_only_the_named_modules_import_dask(name: str) -> None:
    found = [target for _, target in imports(name) if target.split(".")[0] in {"dask", "distributed"}]
    assert not found


@pytest.mark.parametrize("name", SOURCES)
def test_no_import_inside_a_function(name: str) -> None:
    functions = [node for node in ast.walk(TREES[name]) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    hidden = {node.lineno for f in functions for node in ast.walk(f) if isinstance(node, ast.Import | ast.ImportFrom)}
    assert not hidden, f"{name}: imports inside functions at lines {sorted(hidden)}"


@pytest.mark.parametrize("name", SOURCES)
def test_modules_and_functions_stay_small(name: str) -> None:
    lines = len(SOURCES[name].read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_MODULE_LINES, f"{name}: {lines} lines"
    functions = [node for node in ast.walk(TREES[name]) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {f.name: size for f in functions if (size := code_lines(f)) > MAX_FUNCTION_LINES}
    assert not long


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring: an example must not cost room."""
    doc = function.body[0] if ast.get_docstring(function, clean=False) is not None else None
    return _span(function) - (_span(doc) if doc else 0)


def _span(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_no_grab_bag_modules() -> None:
    grab_bags = {"utils", "util", "helpers", "common", "misc", "types", "base"}
    assert not [name for name in SOURCES if name.rpartition(".")[2] in grab_bags]
