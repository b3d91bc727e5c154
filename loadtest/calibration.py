"""What a draft's own probabilities are worth: how often guesses that it gave some probability were accepted."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bough.tree import Tree

NUM_BINS = 24
LOWEST = -12.0  # log-probabilities below are all alike
PRIOR_GUESSES = 4.0  # before anything is counted a bin holds so many guesses, right as often as the draft says


class Calibration:
    """Learns from verdicts; estimates for trees. Bins of equal width in the draft's conditional log-probability."""

    def __init__(self) -> None:
        self._edges = np.linspace(LOWEST, 0.0, NUM_BINS + 1)[1:-1]
        middles = np.linspace(LOWEST, 0.0, 2 * NUM_BINS + 1)[1::2]
        self._tried = np.full(NUM_BINS, PRIOR_GUESSES)
        self._accepted = PRIOR_GUESSES * np.exp(middles)

    def observe(self, tree: Tree, accepted_nodes: tuple[int, ...]) -> None:
        """Counts every child of the root and of an accepted node: the target chose there, and took it or did not."""
        chosen = np.isin(np.arange(len(tree)), accepted_nodes)
        was_tried = np.isin(tree.parents, (0, *accepted_nodes))
        bins = self._bins(tree.log_probs)
        np.add.at(self._tried, bins[was_tried], 1.0)
        np.add.at(self._accepted, bins[chosen], 1.0)

    def acceptance(self, tree: Tree) -> NDArray[np.float64]:
        """(num_nodes,) probability that each node is accepted; 1 for the root."""
        conditional = (self._accepted / self._tried)[self._bins(tree.log_probs)]
        probs = np.ones(len(tree))
        for node in range(1, len(tree)):
            probs[node] = probs[tree.parents[node]] * conditional[node]
        return probs

    def expected_tokens(self, tree: Tree) -> float:
        """Of a round with this tree, the bonus token included."""
        return float(self.acceptance(tree).sum())

    def _bins(self, log_probs: NDArray[np.float32]) -> NDArray[np.intp]:
        return np.digitize(log_probs, self._edges)
