"""Pearson's chi-square test of counts against probabilities."""

from __future__ import annotations

import numpy as np
import torch


def tail(statistic: float, degrees: int) -> float:
    """Probability that a chi-square variable with `degrees` degrees of freedom exceeds `statistic`."""
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def fit(counts: np.ndarray, probs: np.ndarray) -> float:
    """The p-value of `counts` under `probs`; 0 if something of probability 0 was counted."""
    expected = probs * counts.sum()
    if counts[probs <= 1e-15].sum():
        return 0.0
    is_rare = expected < 20
    counts = np.append(counts[~is_rare], counts[is_rare].sum())
    expected = np.append(expected[~is_rare], expected[is_rare].sum())
    kept = expected > 1e-9
    if kept.sum() < 2:
        return 1.0
    return tail(float(((counts - expected)[kept] ** 2 / expected[kept]).sum()), int(kept.sum()) - 1)
