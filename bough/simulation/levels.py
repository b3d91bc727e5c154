"""Variation among positions: acceptance vectors of more and less certain positions, with an exact given mean."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from bough.trees.acceptance import FloatArray

NUM_LEVELS = 64  # equally frequent kinds of positions, from the least to the most certain
_POINTS = 20001  # of the numerical integral, whose integrand is smooth and vanishes at both ends
_REACH = 45.0  # the integrand is negligible beyond this exponent


def level_vectors(row: FloatArray, spread: float) -> FloatArray:
    """(NUM_LEVELS, num_ranks): probabilities by rank at positions of each level; their mean over levels is `row`.

    The first rank's probability follows a Beta distribution on [smallest value not below the second rank's, 1], with
    `spread` times the largest possible standard deviation; the other ranks share the rest in fixed proportions. So
    ranks keep the order of `row`.
    """
    first, rest = float(row[0]), row[1:]
    if spread <= 0 or not 0 < first < 1:
        return np.tile(row, (NUM_LEVELS, 1))
    second = float(rest[0]) if len(rest) else 0.0
    low = min(first, second / (1 - first + second))
    mean = (first - low) / (1 - low)
    if not 0 < mean < 1:
        return np.tile(row, (NUM_LEVELS, 1))
    firsts = low + (1 - low) * _beta_levels(mean, 1 / spread**2 - 1)
    return np.column_stack((firsts, np.outer((1 - firsts) / (1 - first), rest)))


@lru_cache(maxsize=1024)
def _beta_levels(mean: float, concentration: float) -> FloatArray:
    """(NUM_LEVELS,) ascending means of equally probable slices of a Beta distribution with mean `mean`.

    Over logits its density is x^a (1-x)^b, which is smooth for any a and b. An integral takes milliseconds, and
    a profile has hundreds, so they are kept; nobody may change the array.
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
    moments = np.interp(np.linspace(0, mass[-1], NUM_LEVELS + 1), mass, moment)
    levels = np.clip(np.diff(moments) / mass[-1] * NUM_LEVELS, 0.0, 1.0)
    found = float(levels.mean())
    if found < mean:  # scaled towards 1 or 0, so that the integration's error does not move the mean
        return np.asarray(1 - (1 - levels) * ((1 - mean) / (1 - found)))
    return np.asarray(levels * (mean / found))
