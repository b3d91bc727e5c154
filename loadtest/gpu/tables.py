"""A report of `loadtest.gpu` as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PARTS = ("unpacking", "contexts", "recurrence", "draft", "sweeps", "chosen", "memory")  # parts whose results are rows


def table(report: Mapping[str, Any]) -> str:
    """A Markdown table for each part with rows."""
    return "\n\n".join(
        f"**{part}** on {report.get('device', 'an unknown GPU')}\n\n{_rows(report[part])}"
        for part in PARTS
        if report.get(part)
    )


def _rows(rows: Sequence[Mapping[str, Any]]) -> str:
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([_cell(row[name]) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {number}" for key, number in value.items())
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
