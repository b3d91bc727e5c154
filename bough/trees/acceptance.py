"""Acceptance probabilities by depth and rank: read from lists, estimated from counts, smoothed.

Row d of an acceptance table holds, for accepted nodes at depth d, the probability that the child of each rank is
accepted. The last row also applies to all deeper nodes, so a table of one row is the acceptance vector of Sequoia
(arXiv 2402.12374, section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bough.errors import ConfigError
from bough.trees.scheme_acceptance import SchemeAcceptance

FloatArray = NDArray[np.float64]
Acceptance = FloatArray  # (num_depths, num_ranks)

SUM_SLACK = 1e-6  # rounded probabilities may sum to slightly more than 1
PRIOR_NODES = 50.0  # weight of the average over all depths in each depth's estimate, as a number of observed nodes


def acceptance_from(name: str, value: object) -> Acceptance:
    """Parse a list of probabilities by rank, or a list of such lists by depth.

    Raises:
        ConfigError: names the invalid entry of `name`.
    """
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{name}: must be a list of probabilities by rank, or a list of such lists by depth")
    if all(isinstance(row, list) for row in value):
        rows = [_row(f"{name}[{depth}]", row) for depth, row in enumerate(value)]
    else:
        rows = [_row(name, value)]
    acceptance = np.zeros((len(rows), max(map(len, rows))))
    for depth, row in enumerate(rows):
        acceptance[depth, : len(row)] = row
    return acceptance


def _row(name: str, row: list[object]) -> list[float]:
    if not row:
        raise ConfigError(f"{name}: must have at least one probability, got an empty list")
    probs = []
    for rank, prob in enumerate(row):
        if not isinstance(prob, int | float) or isinstance(prob, bool) or not 0 <= prob <= 1:  # also catches NaN
            raise ConfigError(f"{name}[{rank}]: must be a probability from 0 to 1, got {prob!r}")
        probs.append(float(prob))
    if (total := math.fsum(probs)) > 1 + SUM_SLACK:
        raise ConfigError(f"{name}: must sum to at most 1, as at most one child is accepted, got {total:.6g}")
    return probs


def smoothed(acceptance: Acceptance, weights: FloatArray | None = None) -> Acceptance:
    """Each row's isotonic (non-increasing) regression in weighted least squares.

    `weights` has the shape of `acceptance` and is above 0; equal weights preserve each row's sum.
    """
    weights = np.ones_like(acceptance) if weights is None else weights
    return np.array([falling(*rows) for rows in zip(acceptance.tolist(), weights.tolist(), strict=True)])


def falling(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Isotonic (non-increasing) regression by pooling adjacent violators."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, number of values
    for mean, weight in zip(values, weights, strict=True):
        size = 1
        while pools and pools[-1][0] < mean:
            before, before_weight, before_size = pools.pop()
            mean = (before * before_weight + mean * weight) / (before_weight + weight)
            weight, size = weight + before_weight, size + before_size
        pools.append((mean, weight, size))
    return [mean for mean, _, size in pools for _ in range(size)]


def by_rank(counted: SchemeAcceptance) -> Acceptance:
    """Estimate one non-increasing row (1, num_ranks) for all depths; `counted` must not be empty."""
    accepted, rejected = _tables(counted)
    return _estimated(accepted.sum(axis=0, keepdims=True), rejected.sum(axis=0, keepdims=True))


def by_depth_and_rank(counted: SchemeAcceptance) -> Acceptance:
    """Estimate non-increasing rows (num_depths, num_ranks), each shrunk towards the average over all depths.

    Shrinkage is stronger if fewer nodes were counted, since few rounds go deep. `counted` must not be empty.
    """
    accepted, rejected = _tables(counted)
    common = by_rank(counted)[0]
    rejected[:, -1] += PRIOR_NODES * max(0.0, 1 - float(common.sum()))
    return _estimated(accepted + PRIOR_NODES * common, rejected)


def _tables(counted: SchemeAcceptance) -> tuple[FloatArray, FloatArray]:
    """Accepted and rejected counts, each (num_depths, num_ranks), padded with 0 to the largest number of ranks."""
    num_ranks = max(len(row) for depth in counted.depths for row in (depth.accepted, depth.rejected))

    def table(rows: Sequence[tuple[float, ...]]) -> FloatArray:
        return np.array([(*row, *[0.0] * (num_ranks - len(row))) for row in rows], np.float64)

    return table([depth.accepted for depth in counted.depths]), table([depth.rejected for depth in counted.depths])


def _estimated(accepted: FloatArray, rejected: FloatArray) -> Acceptance:
    """The Kaplan-Meier estimate by rank, made non-increasing; both tables are (num_depths, num_ranks).

    A node with three children is a censored observation from rank 4 on. If all nodes have the same number of
    children, the estimate is accepted / nodes.
    """
    at_risk = (accepted + rejected)[:, ::-1].cumsum(axis=1)[:, ::-1]  # nodes with this rank and none accepted before
    hazard = np.divide(accepted, at_risk, out=np.zeros_like(accepted), where=at_risk > 0)
    survival = np.cumprod(1 - hazard, axis=1)
    survival = np.concatenate((np.ones_like(survival[:, :1]), survival[:, :-1]), axis=1)
    return smoothed(hazard * survival, np.maximum(at_risk, np.finfo(np.float64).tiny))
