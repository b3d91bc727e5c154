"""Intervals, tables and a plot of the results of `loadtest.acceptance`. A row is one contestant at one size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]


def interval(values: Sequence[float], seed: int) -> float:
    """Half the width of the mean's 95 % confidence interval."""
    rng = np.random.default_rng(seed)
    means = rng.choice(values, (2000, len(values))).mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(high - low) / 2


def prediction_errors(rows: Sequence[Row], which: str) -> dict[str, dict[str, float]]:
    """|predicted / measured - 1| by contestant, over sizes of 8 nodes and more: their mean and the worst of them.

    `beyond_interval` is the share of sizes where the error exceeds half the width of the measurement's interval.
    """
    misses: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row[which] is not None and row["nodes"] >= 8:
            half_width = row["interval"] / row["tokens_per_round"]
            misses.setdefault(row["contestant"], []).append((abs(row[which] / row["of_all_rounds"] - 1), half_width))
    figures = {}
    for name, of_sizes in misses.items():
        errors, half_widths = np.array(of_sizes).T
        beyond = (errors > half_widths).mean()
        each = {"mean": errors.mean(), "worst": errors.max(), "beyond_interval": beyond}
        figures[name] = {kind: round(float(value), 4) for kind, value in each.items()}
    return figures


def table(rows: Sequence[Row], temperature: float, nodes: Sequence[int]) -> str:
    """The rows as a Markdown table."""
    lines = [
        f"| temperature {temperature:g}, nodes | " + " | ".join(map(str, nodes)) + " |",
        "|---" * (len(nodes) + 1) + "|",
    ]
    mine = [row for row in rows if row["temperature"] == temperature]
    for name in dict.fromkeys(row["contestant"] for row in mine):
        cells = [f"{row['tokens_per_round']:.2f} ±{row['interval']:.2f}" for row in mine if row["contestant"] == name]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(rows: Sequence[Row], file: Path) -> None:
    """Plot tokens per round over nodes, with a panel for each temperature."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    figure, panels = pyplot.subplots(1, len(temperatures), figsize=(5.5 * len(temperatures), 4.5), squeeze=False)
    for panel, temperature in zip(panels[0], temperatures, strict=True):
        mine = [row for row in rows if row["temperature"] == temperature]
        for name in dict.fromkeys(row["contestant"] for row in mine):
            line = [row for row in mine if row["contestant"] == name]
            panel.errorbar(
                *([row[key] for row in line] for key in ("nodes", "tokens_per_round", "interval")), label=name
            )
        panel.set(xscale="log", title=f"temperature {temperature:g}", xlabel="nodes", ylabel="tokens per round")
        panel.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def tokens_per_round(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Mean tokens per round and half the width of its confidence interval, by temperature, contestant and nodes."""
    figures: dict[str, dict[str, dict[str, list[float]]]] = {}
    for row in rows:
        contestants = figures.setdefault(str(row["temperature"]), {})
        figure = [row["tokens_per_round"], row["interval"]]
        contestants.setdefault(str(row["contestant"]), {})[str(row["nodes"])] = figure
    return figures
