"""Runs of benchmarks as docs/benchmarks/ keeps them: a JSON file a subject, each run with what it takes to repeat it.

    {"title": "...", "text": ["a paragraph", ...], "runs": [RUN, ...]}

A RUN has `command`, `machine`, `date`, `commit` (of the code that ran; where that was not kept, the one that recorded
the figures, and its date), and its figures in one of two ways: `line`, the benchmark's own JSON line, where
`loadtest.tables` knows how to show it; or `table`, with `columns` and `rows` of text. `note` is a paragraph below.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

TEXTS = ("command", "machine", "date", "commit")
RUN_KEYS = {*TEXTS, "line", "table", "note"}
SUBJECT_KEYS = {"title", "text", "runs"}


@dataclass(frozen=True, slots=True)
class Table:
    """A table of formatted cells."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a benchmark; its figures are either a JSON line or a table."""

    command: str
    machine: str
    date: str
    commit: str
    note: str
    line: Mapping[str, Any] | None
    table: Table | None


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
    if ("line" in found) == ("table" in found):
        raise ValueError(f"{where} must have either line or table, got {sorted(found)}")
    table = _table(found["table"], f"{where}.table") if "table" in found else None
    return Run(command, machine, day, commit, found.get("note", ""), found.get("line"), table)


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
