"""What a round brings by size: expected tokens, and how they are distributed, of best-first trees under a law.

Sizes are means: below a threshold of path probability nodes are left out, and the threshold is where so many nodes are
left on average. That is what a price of a node does (docs/design.md, rule 5), and where positions do not differ it is
exactly the best shape. Values are kept in bins of their logarithm, so that a level of a tree is one convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from bough.simulation.acceptance_law import AcceptanceLaw
from bough.simulation.levels import level_vectors
from bough.trees.acceptance import FloatArray, smoothed

BIN_WIDTH = 0.02  # in natural logarithms
NUM_BINS = 800  # down to probabilities of 1e-7
MOST_DEPTH = 48


class RoundYield:
    """Tokens of a round by number of nodes (the root included) and depth (levels below it, which are draft steps)."""

    def __init__(self, law: AcceptanceLaw, position: int = 0) -> None:
        """Of the law as it is at this position."""
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
        # (MOST_DEPTH, NUM_BINS + 1): nodes up to a depth, and tokens at one, that are worth at least a bin's value
        self._nodes = 1 + _cumulative(np.cumsum(np.stack(counts), axis=0))
        self._accepted = _cumulative(np.stack(masses))

    def depth_probs(self, nodes: int, depth: int) -> FloatArray:
        """(depth,) probability that a round accepts a path as deep as each level, falling."""
        if nodes <= 1 or depth <= 0:
            return np.zeros(0)
        depth = min(depth, MOST_DEPTH)
        at = np.interp(nodes, self._nodes[depth - 1], np.arange(NUM_BINS + 1))
        low = min(int(at), NUM_BINS - 1)
        below, above = self._accepted[:depth, low], self._accepted[:depth, low + 1]
        probs: FloatArray = below + (at - low) * (above - below)
        return np.minimum.accumulate(np.clip(probs, 0.0, 1.0))

    def expected_tokens(self, nodes: int, depth: int) -> float:
        """Of a round, the bonus token included."""
        return 1.0 + float(self.depth_probs(nodes, depth).sum())

    def table(self, sizes: Sequence[int], depths: Sequence[int]) -> FloatArray:
        """(num_sizes, num_depths) expected tokens."""
        return np.array([[self.expected_tokens(nodes, depth) for depth in depths] for nodes in sizes])

    @cached_property
    def is_worthless(self) -> bool:
        """Whether no tree ever brings more than its bonus token."""
        return self.expected_tokens(4096, MOST_DEPTH) <= 1.0 + 1e-9


def _level(vectors: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Children of one node: their expected number, and the expected sum of their probabilities, by bin.

    A child between two bins counts in both by its distance to each. `vectors` is (num_levels, num_ranks).
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
    """Sums over bins from the most probable on, with 0 before the first; (n, NUM_BINS) to (n, NUM_BINS + 1)."""
    return np.concatenate((np.zeros((len(values), 1)), np.cumsum(values, axis=1)), axis=1)
