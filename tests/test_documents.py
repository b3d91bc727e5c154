"""What documents name is there: files that they link to, tests and benchmarks that they cite."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
FOLDERS = ("bough", "orchestrator", "draft_worker", "target_worker", "simulator", "deploy", "loadtest", "tests")
MODULES = [f"/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
DECISIONS = ROOT / "docs" / "decisions"
OF_A_COMMIT = re.compile(r"[Cc]ommit\s+[0-9a-f]{7}")  # a decision that says so describes scripts of that time


def name(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_lead_to_existing_files(document: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text()):
        assert "://" in link or (document.parent / link).exists(), link


def anchors(document: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_lead_to_existing_headings(document: Path) -> None:
    for file, anchor in re.findall(r"\]\(([^)#\s:]*)#([\w-]+)\)", document.read_text()):
        assert anchor in anchors(document.parent / file if file else document), anchor


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_named_tests_exist(document: Path) -> None:
    """A guarantee is worth as much as the test that holds it."""
    for path in re.findall(r"\btests/[\w/]+(?:\.py)?", document.read_text()):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_named_modules_exist(document: Path) -> None:
    """By a path from the root or a room, or by the file's name alone."""
    for module in re.findall(r"`([\w/]+\.py)(?::[^`]*)?`", document.read_text()):
        assert any(path.endswith(f"/{module}") for path in MODULES), module


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_named_benchmarks_exist(document: Path) -> None:
    text = document.read_text()
    if document.parent == DECISIONS and OF_A_COMMIT.search(text):
        return
    for module in re.findall(r"python\s+-m\s+(loadtest(?:\.\w+)+)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def our_flags() -> set[str]:
    """Flags of all command lines here: as the code has them, by fields of settings, and by sampling parameters."""
    code = "\n".join((ROOT / module[1:]).read_text() for module in MODULES if not module.startswith("/tests/"))
    settings = re.findall(r"^    (\w+): .+ = (?:setting|_parameter)\(", code, re.MULTILINE)
    fields = {f"--{field.replace('_', '-')}" for field in settings}
    return {"--help", "--version", *re.findall(r"[\"'](--[a-z][\w-]*)", code), *fields}


FLAGS = our_flags()


@pytest.mark.parametrize("document", [each for each in DOCUMENTS if each.parent != DECISIONS], ids=name)
def test_named_flags_exist(document: Path) -> None:
    """Those outside of commands: within a command they may be another program's."""
    for flag in re.findall(r"`(--[a-z][\w-]*)", document.read_text()):
        assert {flag, flag.replace("--no-", "--", 1)} & FLAGS, flag


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_lines_are_short_enough_to_compare(document: Path) -> None:
    """Rows of tables are as long as they have to be."""
    for number, line in enumerate(document.read_text().splitlines(), 1):
        assert len(line) <= 150 or line.startswith("|"), f"line {number}: {len(line)}"


def test_every_decision_has_its_own_number_and_is_in_the_index() -> None:
    index = (DECISIONS / "README.md").read_text()
    files = sorted(DECISIONS.glob("[0-9]*.md"))
    assert len({file.name[:3] for file in files}) == len(files)
    for file in files:
        title = file.read_text().splitlines()[0].removeprefix("# ")
        assert title.startswith(f"{file.name[:3]}. "), file.name
        assert f"- [{title}]({file.name})\n" in index, file.name
