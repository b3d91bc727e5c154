"""What documents name is there: files that they link to, tests and benchmarks that they cite."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
FOLDERS = ("bough", "orchestrator", "draft_worker", "target_worker", "simulator", "deploy", "loadtest", "tests")
MODULES = [f"/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
DECISIONS = ROOT / "docs" / "decisions"
OF_A_COMMIT = re.compile(r"[Cc]ommit\s+[0-9a-f]{7}")  # a decision that says so describes scripts of that time


TEXTS = {document: document.read_text() for document in DOCUMENTS}


def found(pattern: str, texts: Mapping[Path, str] = TEXTS) -> Iterator[tuple[Path, Any]]:
    """What a pattern finds, with the document that has it."""
    for document, text in texts.items():
        for match in re.findall(pattern, text):
            yield document, match


def test_links_lead_to_existing_files() -> None:
    for document, link in found(r"\]\(([^)#\s]+)[^)]*\)"):
        assert "://" in link or (document.parent / link).exists(), (document, link)


def anchors(document: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_to_existing_headings() -> None:
    for document, (file, anchor) in found(r"\]\(([^)#\s:]*)#([\w-]+)\)"):
        assert anchor in anchors(document.parent / file if file else document), (document, anchor)


def test_named_tests_exist() -> None:
    """A guarantee is worth as much as the test that holds it."""
    for document, path in found(r"\btests/[\w/]+(?:\.py)?"):
        assert (ROOT / path).exists(), (document, path)


def test_named_modules_exist() -> None:
    """By a path from the root or a room, or by the file's name alone."""
    for document, module in found(r"`([\w/]+\.py)(?::[^`]*)?`"):
        assert any(path.endswith(f"/{module}") for path in MODULES), (document, module)


def test_named_benchmarks_exist() -> None:
    texts = {each: text for each, text in TEXTS.items() if each.parent != DECISIONS or not OF_A_COMMIT.search(text)}
    for document, module in found(r"python\s+-m\s+(loadtest(?:\.\w+)+)", texts):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), (document, module)


def our_flags() -> set[str]:
    """Flags of all command lines here: as the code has them, by fields of settings, and by sampling parameters."""
    code = "\n".join((ROOT / module[1:]).read_text() for module in MODULES if not module.startswith("/tests/"))
    settings = re.findall(r"^    (\w+): .+ = (?:setting|_parameter)\(", code, re.MULTILINE)
    fields = {f"--{field.replace('_', '-')}" for field in settings}
    return {"--help", "--version", *re.findall(r"[\"'](--[a-z][\w-]*)", code), *fields}


def test_named_flags_exist() -> None:
    """Those outside of commands: within a command they may be another program's."""
    flags, texts = our_flags(), {each: text for each, text in TEXTS.items() if each.parent != DECISIONS}
    for document, flag in found(r"`(--[a-z][\w-]*)", texts):
        assert {flag, flag.replace("--no-", "--", 1)} & flags, (document, flag)


def test_lines_are_short_enough_to_compare() -> None:
    """Rows of tables are as long as they have to be."""
    for document, line in found(r"(?m)^.*$"):
        assert len(line) <= 150 or line.startswith("|"), (document, line)


def test_every_decision_has_its_own_number_and_is_in_the_index() -> None:
    index = (DECISIONS / "README.md").read_text()
    files = sorted(DECISIONS.glob("[0-9]*.md"))
    assert len({file.name[:3] for file in files}) == len(files)
    for file in files:
        title = file.read_text().splitlines()[0].removeprefix("# ")
        assert title.startswith(f"{file.name[:3]}. "), file.name
        assert f"- [{title}]({file.name})\n" in index, file.name
