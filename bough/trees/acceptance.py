"""How often guesses are accepted, by depth and rank: read from lists, estimated from counts, smoothed. Knows no trees.

Row d of an acceptance holds, for accepted nodes at depth d, the probabilities that the child of each rank is accepted.
The last row stands for all deeper nodes too, so that one row alone is the vector by rank of Sequoia (arXiv 2402.12374,
section 3.1). By Scheme.MULTI_ROUND a rank is a draw: one that comes to the token of an earlier one is never accepted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bough.errors import ConfigError
from bough.trees.tree_plan import Scheme

FloatArray = NDArray[np.float64]
Acceptance = FloatArray  # (num_depths, num_ranks)

SUM_SLACK = 1e-6  # rounded probabilities may come to a little more than 1
PRIOR_NODES = 50.0  # what depths have in common is worth as much as so many nodes at each


@dataclass(frozen=True, slots=True)
class DepthCounts:
    """What became of the children of nodes at one depth; numbers of nodes, of which old ones count for less."""

    accepted: tuple[float, ...]  # (num_ranks,) [k]: the child of rank k was accepted
    rejected: tuple[float, ...]  # (num_ranks,) [k]: there were k + 1 children (or draws), and none was accepted


@dataclass(frozen=True, slots=True)
class SchemeAcceptance:
    """What a running system has counted of the trees verified by one scheme."""

    scheme: Scheme
    num_rounds: int  # whose tree had more than its root, forgotten ones included
    by_depth: tuple[DepthCounts, ...]


def acceptance_from(name: str, value: object) -> Acceptance:
    """From a list of probabilities by rank, or a list of such lists by depth.

    Raises:
        ConfigError: saying which entry of `name` is at fault.
    """
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{name}: a list of probabilities by rank would do, or a list of such lists by depth")
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
        raise ConfigError(f"{name}: empty; at least one probability would do")
    probs = []
    for rank, prob in enumerate(row):
        if not isinstance(prob, int | float) or isinstance(prob, bool) or not 0 <= prob <= 1:  # also catches NaN
            raise ConfigError(f"{name}[{rank}]: {prob!r}; a probability from 0 to 1 would do")
        probs.append(float(prob))
    if (total := math.fsum(probs)) > 1 + SUM_SLACK:
        raise ConfigError(f"{name}: sums to {total:.6g}; at most one child is accepted, so at most 1 would do")
    return probs


def smoothed(acceptance: Acceptance, weights: FloatArray | None = None) -> Acceptance:
    """The non-increasing rows nearest in (weighted) least squares, by pooling adjacent violators.

    `weights` has the shape of `acceptance` and is above 0; equal ones keep every row's sum.
    """
    weights = np.ones_like(acceptance) if weights is None else weights
    return np.stack([_pooled(row, weight) for row, weight in zip(acceptance, weights, strict=True)])


def _pooled(row: FloatArray, weights: FloatArray) -> FloatArray:
    pools: list[tuple[float, float, int]] = []  # mean, weight, ranks
    for mean, weight in zip(row.tolist(), weights.tolist(), strict=True):
        size = 1
        while pools and pools[-1][0] < mean:
            before, before_weight, before_size = pools.pop()
            mean = (before * before_weight + mean * weight) / (before_weight + weight)
            weight, size = weight + before_weight, size + before_size
        pools.append((mean, weight, size))
    return np.repeat([mean for mean, _, _ in pools], [size for _, _, size in pools])


def by_rank(counted: SchemeAcceptance) -> Acceptance:
    """(1, num_ranks): the same at every depth, non-increasing. There must be something counted."""
    accepted, rejected = _tables(counted)
    return _estimated(accepted.sum(axis=0, keepdims=True), rejected.sum(axis=0, keepdims=True))


def by_depth_and_rank(counted: SchemeAcceptance) -> Acceptance:
    """(num_depths, num_ranks): rows non-increasing, each drawn to what all depths have in common.

    The fewer nodes were counted at a depth, the more: few rounds go deep. There must be something counted.
    """
    accepted, rejected = _tables(counted)
    common = by_rank(counted)[0]
    rejected[:, -1] += PRIOR_NODES * max(0.0, 1 - float(common.sum()))
    return _estimated(accepted + PRIOR_NODES * common, rejected)


def _tables(counted: SchemeAcceptance) -> tuple[FloatArray, FloatArray]:
    """Accepted and rejected, each (num_depths, num_ranks) with as many ranks as any depth has."""
    num_ranks = max(len(row) for depth in counted.by_depth for row in (depth.accepted, depth.rejected))

    def table(rows: Sequence[tuple[float, ...]]) -> FloatArray:
        return np.array([(*row, *[0.0] * (num_ranks - len(row))) for row in rows], np.float64)

    return table([depth.accepted for depth in counted.by_depth]), table([depth.rejected for depth in counted.by_depth])


def _estimated(accepted: FloatArray, rejected: FloatArray) -> Acceptance:
    """Kaplan and Meier's estimate by rank, made non-increasing; both tables (num_depths, num_ranks).

    Nodes have different numbers of children. One that had three says nothing of the fourth's chances, and is left out
    of the reckoning from there on; where all have as many it is accepted / nodes.
    """
    at_risk = (accepted + rejected)[:, ::-1].cumsum(axis=1)[:, ::-1]  # had this rank, and no earlier one was accepted
    hazard = np.divide(accepted, at_risk, out=np.zeros_like(accepted), where=at_risk > 0)
    survival = np.cumprod(1 - hazard, axis=1)
    survival = np.concatenate((np.ones_like(survival[:, :1]), survival[:, :-1]), axis=1)
    return smoothed(hazard * survival, np.maximum(at_risk, np.finfo(np.float64).tiny))
