"""Samples with replacement, as a draft that draws tokens one by one takes them."""

from __future__ import annotations

import numpy as np


def independently(tokens: np.ndarray, probs: np.ndarray, num: int, rng: np.random.Generator) -> np.ndarray:
    """Draw (..., num) tokens independently from `tokens` and their `probs`, (..., num_entries) each."""
    rates = np.repeat(probs[..., None, :], num, -2)
    arrivals = np.divide(
        rng.standard_exponential(rates.shape), rates, out=np.full(rates.shape, np.inf), where=rates > 0
    )
    return np.take_along_axis(tokens, arrivals.argmin(-1), -1)
