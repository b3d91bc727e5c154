"""docs/benchmarks.md is what its JSON files say, and a file that lacks something is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.tables.__main__ import markdown, read_subjects

DOCS = Path(__file__).parents[3] / "docs"
RUN: dict[str, Any] = {
    "command": "python -m loadtest.sweep",
    "machine": "Zen 4",
    "date": "2026-11-26",
    "commit": "e009632",
    "table": {"columns": ["tokens", "seconds"], "rows": [["1", "0.9"]]},
    "note": "Quiet.",
}


def page(folder: Path, **changed: object) -> str:
    """Of one subject with one run."""
    run = {name: value for name, value in {**RUN, **changed}.items() if value is not None}
    (folder / "sweeps.json").write_text(json.dumps({"title": "Sweeps", "text": ["What they take."], "runs": [run]}))
    return markdown(read_subjects(folder))


def test_the_page_is_up_to_date() -> None:
    """A developer who changes a figure changes the JSON file, and sees the page fail until it is written again."""
    assert (DOCS / "benchmarks.md").read_text() == markdown(read_subjects(DOCS / "benchmarks"))


def test_a_table_follows_its_command_machine_date_and_commit(tmp_path: Path) -> None:
    end = page(tmp_path).partition("## Sweeps")[2]
    assert end == (
        "\n\nWhat they take.\n\n`python -m loadtest.sweep`  \nZen 4; 2026-11-26, commit e009632:\n\n"
        "| tokens | seconds |\n|---|---|\n| 1 | 0.9 |\n\nQuiet.\n"
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"machine": None}, r"sweeps.json: runs\[0\].machine must be a text, got None"),
        ({"date": "yesterday"}, r"runs\[0\].date must be a date such as 2026-11-26, got 'yesterday'"),
        ({"speed": 3}, r"runs\[0\] must have no fields but .*, got \['speed'\]"),
        ({"table": None}, r"runs\[0\].table must have columns and rows, got \[\]"),
        (
            {"table": {"columns": ["a", "b"], "rows": [["1"]]}},
            r"runs\[0\].table.rows\[0\] must have 2 cells, got 1",
        ),
        ({"table": {"rows": []}}, r"runs\[0\].table must have columns and rows, got \['rows'\]"),
    ],
)
def test_missing_fields_of_a_run_are_named(tmp_path: Path, changed: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        page(tmp_path, **changed)


def test_a_subject_without_runs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_text('{"title": "Nothing", "runs": []}')
    with pytest.raises(ValueError, match=r"empty.json: runs must be a list of at least one run, got \[\]"):
        read_subjects(tmp_path)
