"""Formats runs of benchmarks as Markdown: a section for each subject, and for each run its command and a table."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from loadtest.tables.runs import Run, Subject, Table

HEAD = "# Benchmarks"
INTRODUCTION = (
    "What was measured, each with its date. This page is written by `make bench-docs` from the JSON files in "
    "[docs/benchmarks](benchmarks): change those, not this page. Machines are virtual, two cores of the processor that "
    "is named, without a GPU, shared with strangers unless it is said otherwise: compare within a table, and believe "
    'ratios. "The demonstration" is SmolLM2-135M-Instruct, block-expanded to 300 layers: the text of a small model at '
    "the cost of one of 2.1 GB. Where the commit that ran was not kept, date and commit are those at which the figures "
    "were recorded. Figures that settled a decision stand with it, in [decisions](decisions/README.md)."
)
WIDTH = 130
REGRET_COLUMNS = (
    "regime",
    "of the best fixed size (95 %)",
    "plain",
    "self-sized",
    "best fixed",
    "times plain (95 %)",
    "nodes: median, most",
    "load",
)


def markdown(subjects: Iterable[Subject]) -> str:
    """The whole page."""
    return "\n\n".join([HEAD, _wrapped(INTRODUCTION), *(_section(subject) for subject in subjects)]) + "\n"


def _section(subject: Subject) -> str:
    parts = [f"## {subject.title}", *(_wrapped(paragraph) for paragraph in subject.text)]
    for run in subject.runs:
        commit = "commit" if " " not in run.commit else "commits"
        parts.append(f"`{run.command}`  \n{run.machine}; {run.date}, {commit} {run.commit}:")
        parts.append(_table(run.table or _of_line(run)))
        if run.note:
            parts.append(_wrapped(run.note))
    return "\n\n".join(parts)


def _table(table: Table) -> str:
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    return (
        "\n".join("| " + " | ".join(cells) + " |" for cells in lines).replace("| --- ", "|---").replace("--- |", "---|")
    )


def _of_line(run: Run) -> Table:
    """The table for a benchmark's JSON line."""
    line = run.line or {}
    if "real" in line:
        return _regret(line["real"]["details"])
    raise ValueError(f"line of {run.command!r} must be of loadtest.regret --only real, got fields {sorted(line)}")


def _regret(details: Mapping[str, Mapping[str, Any]]) -> Table:
    return Table(REGRET_COLUMNS, [_regret_row(regime, found) for regime, found in details.items()])


def _regret_row(regime: str, found: Mapping[str, Any]) -> Sequence[str]:
    fixed: Mapping[str, float] = found["fixed_tokens_per_second"]
    best = max(fixed, key=lambda size: fixed[size])
    return [
        regime,
        _with_interval(found["ratio"], found["interval"]),
        f"{found['plain_tokens_per_second']:.3g}",
        f"{found['self_tokens_per_second']:.3g}",
        f"{fixed[best]:.3g} ({best.partition(',')[0]})",
        _with_interval(found["plain_ratio"], found["plain_interval"]),
        f"{found['nodes']:g}, {found['most_nodes']:g}",
        f"{found['load_average']:.0f}",
    ]


def _with_interval(ratio: float, interval: Sequence[float]) -> str:
    low, high = interval
    return f"{ratio:.2f} ({low:.2f} to {high:.2f})"


def _wrapped(paragraph: str) -> str:
    return textwrap.fill(paragraph, WIDTH, break_long_words=False, break_on_hyphens=False)
