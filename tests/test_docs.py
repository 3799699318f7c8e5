"""The README and the docs: every Python block runs and prints what it says, every link leads somewhere."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
import yaml

import daskmesh

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
LANGUAGES = {"python", "bash", "yaml", "text"}
MAIN_JOB = "python3 -m venv .venv && .venv/bin/pip install . && .venv/bin/daskmesh demo"
TEST_RUN = "python3 -m venv .venv && .venv/bin/pip install '.[test]' && .venv/bin/pytest"


def blocks(page: Path) -> list[tuple[int, str, list[str]]]:
    """(line of the fence, language, lines) of every fenced block."""
    found: list[tuple[int, str, list[str]]] = []
    inside = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            inside = not inside
            if inside:
                found.append((number, line.strip().removeprefix("```"), []))
        elif inside:
            found[-1][2].append(line)
    assert not inside, f"{page}: a fence is never closed"
    return found


def session(page: Path) -> str:
    """The page with everything but its Python blocks blanked out, so that lines keep their numbers.

    The fences go too: doctest would take a closing one for output.
    """
    lines = [""] * len(page.read_text(encoding="utf-8").splitlines())
    for start, language, body in blocks(page):
        if language == "python":
            lines[start : start + len(body)] = body
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_examples(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    test = doctest.DocTestParser().get_doctest(session(page), {"__name__": "__main__"}, page.name, str(page), 0)
    report: list[str] = []
    result = doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=report.append)
    assert not result.failed, "".join(report)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_no_block_is_left_unrun(page: Path) -> None:
    for line, language, body in blocks(page):
        where = f"{page.name}:{line}"
        assert language in LANGUAGES, f"{where}: a block says which of {sorted(LANGUAGES)} it is, not {language!r}"
        prompt = any(text.lstrip().startswith(">>>") for text in body)
        assert prompt == (language == "python"), f"{where}: Python blocks, and only they, are doctests with >>>"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_every_page_is_reached_from_the_index() -> None:
    pages = {page.resolve(): page.read_text(encoding="utf-8") for page in PAGES}
    reached = set()
    queue = [(ROOT / "docs" / "index.md").resolve()]
    while queue:
        page = queue.pop()
        reached.add(page)
        links = {(page.parent / link).resolve() for link in re.findall(r"\]\(([^)#\s]+\.md)", pages[page])}
        queue += sorted((links & set(pages)) - reached - set(queue))
    assert not [str(page.relative_to(ROOT)) for page in set(pages) - reached - {(ROOT / "README.md").resolve()}]


def test_the_readme_is_short_and_holds_the_two_commands() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    assert MAIN_JOB in lines
    assert TEST_RUN in lines


def test_the_check_runs_the_readmes_commands_to_the_letter() -> None:
    steps = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert f"{TEST_RUN} || exit" in steps
    assert f"{MAIN_JOB} || exit" in steps
    assert steps.index(f"{TEST_RUN} || exit") < steps.index(f"{MAIN_JOB} || exit")


def test_the_reference_names_everything_public() -> None:
    text = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`([A-Za-z_]+)`", text))
    assert not sorted(set(daskmesh.__all__) - listed - {"__version__"})


def test_the_settings_page_has_every_default() -> None:
    text = (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    defaults = yaml.safe_load((Path(daskmesh.__file__).parent / "daskmesh.yaml").read_text(encoding="utf-8"))["daskmesh"]
    rows = dict(re.findall(r"^\| `daskmesh\.([a-z-]+)` \| (\S.*?) \|", text, re.MULTILINE))
    assert rows == {name: str(value) for name, value in defaults.items()}


def test_the_changelog_knows_this_version() -> None:
    assert f"## {daskmesh.__version__}" in (ROOT / "docs" / "CHANGELOG.md").read_text(encoding="utf-8")
