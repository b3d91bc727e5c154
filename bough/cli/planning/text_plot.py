"""A plot of seconds per sweep against tree size, as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bough.sizing.cost_model import SweepModel

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
