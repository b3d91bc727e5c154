"""Writes docs/benchmarks.md from the JSON files in docs/benchmarks/.

    python -m loadtest.tables

There is a file a subject, and each run has what it takes to repeat it:

    {"title": "...", "text": ["a paragraph", ...], "runs": [RUN, ...]}

A RUN has `command`, `machine`, `date`, `commit` (of the code that ran; if that was not kept, the one that recorded
the figures, and its date), and `table`, with `columns` and `rows` of text. `note` is a paragraph below.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

TEXTS = ("command", "machine", "date", "commit")
RUN_KEYS = {*TEXTS, "table", "note"}
SUBJECT_KEYS = {"title", "text", "runs"}


@dataclass(frozen=True, slots=True)
class Table:
    """A table of formatted cells."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a benchmark."""

    command: str
    machine: str
    date: str
    commit: str
    note: str
    table: Table


@dataclass(frozen=True, slots=True)
class Subject:
    """A subject with its runs."""

    title: str
    text: Sequence[str]
    runs: Sequence[Run]


def read_subjects(folder: Path) -> list[Subject]:
    """Read all files of a folder in order of their names. Raises ValueError with the file and the invalid field."""
    return [_subject(json.loads(file.read_text()), file.name) for file in sorted(folder.glob("*.json"))]


def _subject(found: Mapping[str, Any], where: str) -> Subject:
    _require_known(found, SUBJECT_KEYS, where)
    title = _text(found, "title", where)
    text = found.get("text", [])
    if not isinstance(text, list) or not all(isinstance(paragraph, str) for paragraph in text):
        raise ValueError(f"{where}: text must be a list of paragraphs, got {text!r}")
    runs = found.get("runs")
    if not isinstance(runs, list) or not runs:
        raise ValueError(f"{where}: runs must be a list of at least one run, got {runs!r}")
    return Subject(title, text, [_run(run, f"{where}: runs[{number}]") for number, run in enumerate(runs)])


def _run(found: Mapping[str, Any], where: str) -> Run:
    _require_known(found, RUN_KEYS, where)
    command, machine, day, commit = (_text(found, name, where) for name in TEXTS)
    try:
        date.fromisoformat(day)
    except ValueError:
        raise ValueError(f"{where}.date must be a date such as 2026-11-26, got {day!r}") from None
    table = _table(found.get("table", {}), f"{where}.table")
    return Run(command, machine, day, commit, found.get("note", ""), table)


def _table(found: Mapping[str, Any], where: str) -> Table:
    if not {"columns", "rows"} <= set(found):
        raise ValueError(f"{where} must have columns and rows, got {sorted(found)}")
    columns, rows = found["columns"], found["rows"]
    for number, row in enumerate(rows):
        if len(row) != len(columns):
            raise ValueError(f"{where}.rows[{number}] must have {len(columns)} cells, got {len(row)}")
    return Table(columns, rows)


def _text(found: Mapping[str, Any], name: str, where: str) -> str:
    value = found.get(name)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where}.{name} must be a text, got {value!r}")
    return value


def _require_known(found: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := set(found) - known:
        raise ValueError(f"{where} must have no fields but {sorted(known)}, got {sorted(unknown)}")


HEAD = "# Benchmarks"
INTRODUCTION = (
    "For those who want to know how fast bough is, and where it is not: what was measured, with the command to repeat "
    "it. Machines are virtual, with two cores of the named processor, no GPU, and neighbours: compare within a table, "
    'and trust ratios more than speeds. "The demonstration" is SmolLM2-135M-Instruct, block-expanded to 300 layers: '
    "the text of a small model at the cost of one of 2.1 GB. Nothing has run on a GPU yet. Figures behind a "
    "decision are in [decisions](decisions/README.md). `make bench-docs` writes this page from "
    "[docs/benchmarks](benchmarks)."
)
WIDTH = 130


def markdown(subjects: Iterable[Subject]) -> str:
    """The whole page."""
    return "\n\n".join([HEAD, _wrapped(INTRODUCTION), *(_section(subject) for subject in subjects)]) + "\n"


def _section(subject: Subject) -> str:
    parts = [f"## {subject.title}", *(_wrapped(paragraph) for paragraph in subject.text)]
    for run in subject.runs:
        commit = "commit" if " " not in run.commit else "commits"
        parts.append(f"`{run.command}`  \n{run.machine}; {run.date}, {commit} {run.commit}:")
        parts.append(_rows(run.table))
        if run.note:
            parts.append(_wrapped(run.note))
    return "\n\n".join(parts)


def _rows(table: Table) -> str:
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    return (
        "\n".join("| " + " | ".join(cells) + " |" for cells in lines).replace("| --- ", "|---").replace("--- |", "---|")
    )


def _wrapped(paragraph: str) -> str:
    return textwrap.fill(paragraph, WIDTH, break_long_words=False, break_on_hyphens=False)


DOCS = Path(__file__).parents[2] / "docs"


def main() -> None:
    """Write the page and print its path."""
    page = DOCS / "benchmarks.md"
    try:
        page.write_text(markdown(read_subjects(DOCS / "benchmarks")))
    except ValueError as exc:
        raise SystemExit(f"error: {exc}") from exc
    print(f"{page}: written")


if __name__ == "__main__":
    main()
