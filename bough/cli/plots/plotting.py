"""Plots of seconds per sweep against tree size, as text and as PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bough.errors import ConfigError
from bough.sizing.cost_model import SweepModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 64, 10  # characters
MARK, KNEE_MARK = "*", "K"


def text_plot(model: SweepModel, most: int) -> str:
    """A text plot: tokens from 1 to `most` on a logarithmic axis, seconds from 0 on a linear axis."""
    columns = [round(math.exp(math.log(most) * i / (WIDTH - 1))) for i in range(WIDTH)]
    seconds = [model.seconds(tokens) for tokens in columns]
    highest = max(seconds)
    knee = max((i for i, tokens in enumerate(columns) if tokens <= model.knee), default=-1)
    lines = []
    for level in range(HEIGHT, -1, -1):
        marks = (_mark(s, highest, level, is_knee=i == knee) for i, s in enumerate(seconds))
        label = f"{highest * level / HEIGHT:9.3g}" if level % 5 == 0 else " " * 9
        lines.append(f"{label} |{''.join(marks)}".rstrip())
    return "\n".join([*lines, " " * 10 + "+" + "-" * WIDTH, " " * 11 + _axis(columns)])


def _mark(seconds: float, highest: float, level: int, *, is_knee: bool) -> str:
    is_here = round(seconds / highest * HEIGHT) == level
    return (KNEE_MARK if is_knee else MARK) if is_here else " "


def _axis(columns: Sequence[int]) -> str:
    """Labels of the token axis that do not overlap."""
    axis = ""
    for power in range(columns[-1].bit_length()):
        column = next(i for i, tokens in enumerate(columns) if tokens >= 2**power)
        if power % 2 == 0 and column >= len(axis):
            axis = axis.ljust(column) + f"{columns[column]} "
    return axis + "tokens"


def require_matplotlib(flag: str) -> None:
    """Check for matplotlib before the work whose result is plotted.

    Raises:
        ConfigError: matplotlib is not installed; names the flag that needs it.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as exc:
        raise ConfigError(f"{flag}: matplotlib is not installed: pip install 'bough[plan]'") from exc


def save_png(model: SweepModel, most: int, title: str, file: str) -> None:
    """Save a plot of sweeps of up to `most` tokens. Raises ConfigError if the file cannot be written."""
    from matplotlib.figure import Figure  # not pyplot, which has global state

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    tokens = range(1, most + 1)
    axes.plot(tokens, [model.seconds(n) for n in tokens], label="sweep", linewidth=2)
    axes.plot(tokens, [model.compute_seconds(n) for n in tokens], label="compute", linestyle=":")
    axes.plot(tokens, [model.link_seconds_of(n) for n in tokens], label="link", linestyle="--", color="grey")
    if 0 < model.knee <= most:
        axes.axvline(model.knee, label=f"knee: {model.knee} tokens", linestyle="-.", color="tab:red")
    axes.set(xlabel="tokens of a sweep", ylabel="seconds", title=title, xlim=(0, most), ylim=(0, None))
    axes.legend()
    axes.grid(alpha=0.3)
    save_figure(figure, "--png", file)


def save_figure(figure: Figure, flag: str, file: str) -> None:
    """Save a figure as PNG. Raises ConfigError, naming the flag, if the file cannot be written."""
    try:
        figure.savefig(file, format="png", dpi=150)
    except OSError as exc:
        raise ConfigError(f"{flag}: {file} cannot be written: {exc}") from exc
