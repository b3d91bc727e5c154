"""How many bits each matrix gets, where they may differ: the least error within an average. Knows no files, no models.

What a matrix costs in quality is taken to be its relative squared error, whatever its size: a model's loss grows in
proportion to a sum of these over its matrices (HIGGS, arXiv 2411.17525, theorem 1; its factors are taken as equal).
So small matrices, in which a lower error costs few bytes, get more bits than large ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from bough.errors import ConfigError
from bough.model.quant.quantize import Layout

LAYOUTS = (Layout(4, 128), Layout(4, 64), Layout(4, 32), Layout(8, 64))  # 4.25, 4.5, 5 and 8.25 bits a weight


class Option(NamedTuple):
    """A layout of a matrix: what it takes, and what it costs."""

    layout: Layout
    num_bits: float
    error: float  # relative, squared


def choose(options: Mapping[str, Sequence[Option]], bits: float, num_weights: int) -> dict[str, Layout]:
    """A layout for each matrix, so that all of them together average at most `bits` for each of `num_weights`.

    From the smallest of each on, the step that takes most error away for its bits is taken next, along the lower
    convex hulls; what no longer fits is passed over.

    Raises:
        ConfigError: no choice is so small.
    """
    hulls = {name: _hull(several) for name, several in options.items()}
    chosen = {name: hull[0] for name, hull in hulls.items()}
    room = bits * num_weights - sum(option.num_bits for option in chosen.values())
    if math.isnan(room) or room < 0:
        least, most = (
            sum(end(o.num_bits for o in several) for several in options.values()) / num_weights for end in (min, max)
        )
        raise ConfigError(f"--bits: {bits:g}; {least:.3f} to {most:.3f} for a weight, scales included, would do")
    steps = [(_gain(low, high), name, high) for name, hull in hulls.items() for low, high in pairwise(hull)]
    for _, name, option in sorted(steps, reverse=True):
        added = option.num_bits - chosen[name].num_bits
        if added <= room:
            chosen[name] = option
            room -= added
    return {name: option.layout for name, option in chosen.items()}


def _gain(low: Option, high: Option) -> float:
    """Error taken away for each bit that is added."""
    return (low.error - high.error) / (high.num_bits - low.num_bits)


def _hull(options: Sequence[Option]) -> list[Option]:
    """Those worth taking, from the smallest on: each further one takes less error away for its bits."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda option: (option.num_bits, option.error)):
        if hull and option.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull
