"""How positions differ: vectors by rank of more and less certain positions, whose mean is a given vector exactly."""

from __future__ import annotations

import numpy as np

from bough.trees.acceptance import FloatArray

NUM_LEVELS = 64  # kinds of positions, equally frequent, from the least certain to the most
_POINTS = 20001  # of the numerical integral; its integrand is smooth and vanishes at both ends
_REACH = 45.0  # exponents beyond which it is nothing


def level_vectors(row: FloatArray, spread: float, num_levels: int = NUM_LEVELS) -> FloatArray:
    """(num_levels, num_ranks): probabilities by rank at positions of each level; their mean over levels is `row`.

    The first rank's follow a Beta distribution between the least value that is not below the second's and 1, with
    standard deviation `spread` times the largest possible; the others share what it leaves in fixed proportions. So
    ranks stay in order wherever `row` is in order.
    """
    first, rest = float(row[0]), row[1:]
    if spread <= 0 or not 0 < first < 1:
        return np.tile(row, (num_levels, 1))
    second = float(rest[0]) if len(rest) else 0.0
    low = min(first, second / (1 - first + second))
    mean = (first - low) / (1 - low)
    if not 0 < mean < 1:
        return np.tile(row, (num_levels, 1))
    firsts = low + (1 - low) * _beta_levels(mean, 1 / spread**2 - 1, num_levels)
    return np.column_stack((firsts, np.outer((1 - firsts) / (1 - first), rest)))


def _beta_levels(mean: float, concentration: float, num_levels: int) -> FloatArray:
    """(num_levels,) means of a Beta distribution's equally probable slices, rising; their mean is `mean`.

    In logits its density is x^a (1-x)^b, smooth however small a and b are.
    """
    a, b = mean * concentration, (1 - mean) * concentration
    centre = np.log(mean / (1 - mean))
    logits = np.linspace(centre - _REACH / a - _REACH, centre + _REACH / b + _REACH, _POINTS)
    log_x, log_rest = -np.logaddexp(0, -logits), -np.logaddexp(0, logits)
    log_density = a * log_x + b * log_rest
    density = np.exp(log_density - log_density.max())
    mass = np.concatenate(([0.0], np.cumsum((density[1:] + density[:-1]) / 2)))
    weighted = density * np.exp(log_x)
    moment = np.concatenate(([0.0], np.cumsum((weighted[1:] + weighted[:-1]) / 2)))
    moments = np.interp(np.linspace(0, mass[-1], num_levels + 1), mass, moment)
    levels = np.clip(np.diff(moments) / mass[-1] * num_levels, 0.0, 1.0)
    return _with_mean(levels, mean)


def _with_mean(levels: FloatArray, mean: float) -> FloatArray:
    """Moved towards 1 or towards 0 by the rounding error of their mean, each by its share."""
    found = float(levels.mean())
    if found < mean:
        return np.asarray(1 - (1 - levels) * ((1 - mean) / (1 - found)))
    return np.asarray(levels * (mean / found))
