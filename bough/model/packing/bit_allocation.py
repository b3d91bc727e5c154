"""Allocates bits to matrices with the least total error for an average number of bits. Uses no files and no models.

A matrix's cost in quality is its relative squared error, whatever its size: a model's loss grows in proportion to a sum
of these over its matrices (HIGGS, arXiv 2411.17525, theorem 1, with equal factors). So small matrices, in which lower
errors cost few bytes, get more bits than large ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from bough.errors import ConfigError
from bough.model.quant.quantize import Layout

LAYOUTS = (Layout(4, 128), Layout(4, 64), Layout(4, 32), Layout(8, 64))  # 4.25, 4.5, 5 and 8.25 bits per weight


class Option(NamedTuple):
    """A layout of a matrix, with its size and error."""

    layout: Layout
    num_bits: float
    error: float  # relative squared error


def choose(options: Mapping[str, Sequence[Option]], bits: float, num_weights: int) -> dict[str, Layout]:
    """Choose a layout for each matrix, with an average of at most `bits` over `num_weights` weights.

    Greedy along lower convex hulls: from the smallest layouts on, the step that reduces the error most per bit is taken
    next; steps that no longer fit are skipped.

    Raises:
        ConfigError: `bits` is below the smallest possible average.
    """
    hulls = {name: _hull(several) for name, several in options.items()}
    chosen = {name: hull[0] for name, hull in hulls.items()}
    room = bits * num_weights - sum(option.num_bits for option in chosen.values())
    if math.isnan(room) or room < 0:
        least, most = (
            sum(end(o.num_bits for o in several) for several in options.values()) / num_weights for end in (min, max)
        )
        raise ConfigError(f"--bits: must be {least:.3f} to {most:.3f} per weight, scales included, got {bits:g}")
    steps = [(_gain(low, high), name, high) for name, hull in hulls.items() for low, high in pairwise(hull)]
    for _, name, option in sorted(steps, reverse=True):
        added = option.num_bits - chosen[name].num_bits
        if added <= room:
            chosen[name] = option
            room -= added
    return {name: option.layout for name, option in chosen.items()}


def _gain(low: Option, high: Option) -> float:
    """Error reduction per added bit."""
    return (low.error - high.error) / (high.num_bits - low.num_bits)


def _hull(options: Sequence[Option]) -> list[Option]:
    """Options on the lower convex hull, smallest first: error reduction per bit decreases."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda option: (option.num_bits, option.error)):
        if hull and option.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull
