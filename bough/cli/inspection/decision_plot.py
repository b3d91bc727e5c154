"""A plot of a session's rounds: sizes, tokens and seconds, expected and real."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bough.errors import ConfigError
from bough.protocol.decision import Decision, Mode
from bough.sizing.account import PART_NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    Mode.DRAFT: "tab:green",
    Mode.LOOKUP: "tab:blue",
    Mode.PROBE: "tab:orange",
    Mode.FIXED: "tab:grey",
    Mode.OFF: "lightgrey",
}


def save_decisions(decisions: Sequence[Decision], title: str, file: str) -> None:
    """Save three panels over the rounds: nodes by mode, tokens, and seconds by activity.

    Raises:
        ConfigError: the file cannot be written.
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # not pyplot, which has global state
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 9), layout="constrained")
    sizes, tokens, seconds = figure.subplots(3, 1, sharex=True)
    _draw_sizes(sizes, decisions)
    _draw_tokens(tokens, decisions)
    _draw_seconds(seconds, decisions)
    figure.suptitle(title)
    seconds.set(xlabel="round, counted from the first that is remembered")
    seconds.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (sizes, tokens, seconds):
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
    try:
        figure.savefig(file, format="png", dpi=150)
    except OSError as exc:
        raise ConfigError(f"--plot: {file} cannot be written: {exc}") from exc


def _draw_sizes(axes: Axes, decisions: Sequence[Decision]) -> None:
    """Bars of verified nodes in the mode's colour, nodes left out stacked on top, and dashes for budgets."""
    places = range(1, len(decisions) + 1)
    for mode, colour in COLOURS.items():
        bars = [(x, d.num_sent - d.num_left_out) for x, d in zip(places, decisions, strict=True) if d.mode is mode]
        if bars:
            axes.bar(*zip(*bars, strict=True), color=colour, label=mode.value)
            axes.plot(*zip(*bars, strict=True), "o", color=colour, markersize=4)  # visible for a root alone
    if any(each.num_left_out for each in decisions):
        left_out, below = [d.num_left_out for d in decisions], [d.num_sent - d.num_left_out for d in decisions]
        axes.bar(places, left_out, bottom=below, color="none", edgecolor="tab:red", label="left out by the target")
    budgets = [each.budget for each in decisions]
    axes.plot(places, budgets, "_", color="black", label="asked of the draft")
    axes.set(ylabel="nodes", ylim=(0, None))


def _draw_tokens(axes: Axes, decisions: Sequence[Decision]) -> None:
    places = range(1, len(decisions) + 1)
    axes.bar(places, [each.tokens for each in decisions], color="lightsteelblue", label="came")
    expected = [(x, d.expected_tokens) for x, d in zip(places, decisions, strict=True) if d.is_predicted]
    if expected:
        axes.plot(*zip(*expected, strict=True), "o-", color="black", markersize=3, label="expected")
    axes.set(ylabel="tokens", ylim=(0, None))


def _draw_seconds(axes: Axes, decisions: Sequence[Decision]) -> None:
    """Stacked bars of real seconds by activity, and a line of expected totals."""
    places = range(1, len(decisions) + 1)
    below = [0.0] * len(decisions)
    for name in PART_NAMES:
        parts = [getattr(each.seconds, name) for each in decisions]
        axes.bar(places, parts, bottom=below, label=name)
        below = [low + part for low, part in zip(below, parts, strict=True)]
    expected = [(x, d.expected.total) for x, d in zip(places, decisions, strict=True) if d.is_predicted]
    if expected:
        axes.plot(*zip(*expected, strict=True), "o-", color="black", markersize=3, label="expected")
    axes.set(ylabel="seconds", ylim=(0, None))
