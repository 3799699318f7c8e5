"""The public surface: `__all__` is what is there, in order, and every name explains itself with an example."""

from __future__ import annotations
import __future__

import inspect
import re
from types import ModuleType
from typing import Any

import pytest

import daskmesh

# Names that are public through the package, and those of its public modules, which a star import does not bring.
PUBLIC: dict[str, Any] = {name: getattr(daskmesh, name, None) for name in daskmesh.__all__}
MODULES = {"random": daskmesh.random}
INNER = {f"{m}.{name}": getattr(module, name) for m, module in MODULES.items() for name in module.__all__}
EXPLAINED = {name: value for name, value in {**PUBLIC, **INNER}.items() if callable(value)}
FUNCTIONS = {name: value for name, value in EXPLAINED.items() if inspect.isfunction(value)}


def test_all_is_what_is_importable() -> None:
    there = {
        name
        for name, value in vars(daskmesh).items()
        if not name.startswith("_")
        and not isinstance(value, __future__._Feature | ModuleType)
    }
    assert sorted(there | {"__version__"}) == sorted(set(daskmesh.__all__) | {"__version__"})
    assert not [name for name in daskmesh.__all__ if not hasattr(daskmesh, name)]
    assert not MODULES.keys() & set(daskmesh.__all__), "a star import would hide modules of the standard library"


@pytest.mark.parametrize("module", [daskmesh, *MODULES.values()], ids=lambda module: module.__name__)
def test_all_is_sorted_and_has_no_name_twice(module: ModuleType) -> None:
    assert list(module.__all__) == sorted(set(module.__all__))


@pytest.mark.parametrize("name", EXPLAINED)
def test_every_public_name_has_a_summary_and_an_example(name: str) -> None:
    doc = inspect.getdoc(EXPLAINED[name]) or ""
    summary, _, rest = doc.partition("\n")
    assert summary.endswith("."), f"{name}: the first line is one sentence"
    assert not rest or rest.startswith("\n"), f"{name}: a blank line follows the first"
    assert "Examples\n--------" in doc, f"{name}: an Examples section"
    assert ">>> " in doc, f"{name}: a doctest"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_is_typed(name: str) -> None:
    signature = inspect.signature(FUNCTIONS[name])
    bare = [p.name for p in signature.parameters.values() if p.annotation is inspect.Parameter.empty]
    assert not bare
    assert signature.return_annotation is not inspect.Signature.empty


@pytest.mark.parametrize("name", FUNCTIONS)
def test_described_parameters_exist(name: str) -> None:
    """What the Parameters section describes is what the function takes."""
    doc = inspect.getdoc(FUNCTIONS[name]) or ""
    section = re.search(r"Parameters\n-+\n(.*?)(?=\n\n[A-Z][a-z]+\n-+\n|\Z)", doc, re.DOTALL)
    described = re.findall(r"^\*{0,2}(\w+(?:, \*{0,2}\w+)*) :", section.group(1), re.MULTILINE) if section else []
    names = {part.lstrip("*") for line in described for part in line.split(", ")}
    assert not names - set(inspect.signature(FUNCTIONS[name]).parameters)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_says_what_it_communicates(name: str) -> None:
    assert "**Communication**" in (inspect.getdoc(FUNCTIONS[name]) or "")
