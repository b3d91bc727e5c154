"""The distribution of accepted tokens of best-first trees by size, for an acceptance distribution.

Sizes are means: nodes below a threshold of path probability are left out, and the threshold determines the mean number
of nodes. This is the effect of a price for nodes (docs/design.md, rule 5); without variation among positions it is
exactly the best shape. Values are binned by logarithm, so that each level of a tree is one convolution.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from bough.simulation.acceptance_law import AcceptanceLaw
from bough.simulation.levels import level_vectors
from bough.trees.acceptance import FloatArray, smoothed

BIN_WIDTH = 0.02  # in natural logarithms
NUM_BINS = 800  # down to probabilities of 1e-7
MOST_DEPTH = 48


class RoundYield:
    """Tokens of a round by nodes (the root included) and depth (levels below it, or draft steps)."""

    def __init__(self, law: AcceptanceLaw, position: int = 0) -> None:
        """Uses the acceptance distribution at this position."""
        rows = smoothed(law.acceptance(position))
        levels = [_level(level_vectors(row, law.spread)) for row in rows]
        counts, masses = [], []
        count, mass = levels[0]
        for depth in range(MOST_DEPTH):
            if depth:
                step = levels[min(depth, len(levels) - 1)]
                count = np.convolve(count, step[0])[:NUM_BINS]
                mass = np.convolve(mass, step[1])[:NUM_BINS]
            counts.append(count)
            masses.append(mass)
        # (MOST_DEPTH, NUM_BINS + 1): nodes up to a depth, and tokens at a depth, with at least a bin's value
        self._nodes = 1 + _cumulative(np.cumsum(np.stack(counts), axis=0))
        self._accepted = _cumulative(np.stack(masses))

    def depth_probs(self, nodes: int, depth: int) -> FloatArray:
        """(depth,) non-increasing probability that a round accepts a path as deep as each level."""
        if nodes <= 1 or depth <= 0:
            return np.zeros(0)
        depth = min(depth, MOST_DEPTH)
        at = np.interp(nodes, self._nodes[depth - 1], np.arange(NUM_BINS + 1))
        low = min(int(at), NUM_BINS - 1)
        below, above = self._accepted[:depth, low], self._accepted[:depth, low + 1]
        probs: FloatArray = below + (at - low) * (above - below)
        return np.minimum.accumulate(np.clip(probs, 0.0, 1.0))

    def expected_tokens(self, nodes: int, depth: int) -> float:
        """Expected tokens of a round, the bonus token included."""
        return 1.0 + float(self.depth_probs(nodes, depth).sum())

    @cached_property
    def is_worthless(self) -> bool:
        """Whether no tree yields more than the bonus token."""
        return self.expected_tokens(4096, MOST_DEPTH) <= 1.0 + 1e-9


def _level(vectors: FloatArray) -> tuple[FloatArray, FloatArray]:
    """By bin, the expected number of children of a node, and the expected sum of their probabilities.

    A child between two bins is split between them linearly. `vectors` is (num_levels, num_ranks).
    """
    probs = vectors[vectors > np.exp(-BIN_WIDTH * (NUM_BINS - 1))]
    place = -np.log(np.minimum(probs, 1.0)) / BIN_WIDTH
    low = np.minimum(place.astype(np.int64), NUM_BINS - 2)
    share = place - low
    weight = 1.0 / len(vectors)
    count, mass = np.zeros(NUM_BINS), np.zeros(NUM_BINS)
    for bins, shares in ((low, 1 - share), (low + 1, share)):
        np.add.at(count, bins, weight * shares)
        np.add.at(mass, bins, weight * shares * probs)
    return count, mass


def _cumulative(values: FloatArray) -> FloatArray:
    """Cumulative sums over bins, starting with 0; (n, NUM_BINS) to (n, NUM_BINS + 1)."""
    return np.concatenate((np.zeros((len(values), 1)), np.cumsum(values, axis=1)), axis=1)
