"""What a draft's own probabilities are worth: how often guesses that it gave some probability were accepted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bough.tree import Tree

NUM_BINS = 24
LOWEST = -12.0  # log-probabilities below are all alike
PRIOR_GUESSES = 4.0  # before anything is counted a bin holds so many guesses, right as often as the draft says


@dataclass(frozen=True, slots=True)
class DraftCalibration:
    """How well a draft's calibrated probabilities say what its trees come to; means of which old rounds count less."""

    draft_id: str  # of the worker
    num_rounds: int  # forgotten ones included
    expected_tokens: float  # of a round, before it was verified
    realised_tokens: float


class Calibration:
    """Learns from verdicts; estimates for trees. Bins of equal width in the draft's conditional log-probability."""

    def __init__(self, half_life_rounds: float = math.inf) -> None:
        self._decay = 0.5 ** (1 / half_life_rounds)
        self._edges = np.linspace(LOWEST, 0.0, NUM_BINS + 1)[1:-1]
        middles = np.linspace(LOWEST, 0.0, 2 * NUM_BINS + 1)[1::2]
        self._prior = PRIOR_GUESSES * np.exp(middles)  # of it, accepted ones
        self._tried = np.zeros(NUM_BINS)
        self._accepted = np.zeros(NUM_BINS)

    def observe(self, tree: Tree, accepted_nodes: Sequence[int], bonus_node: int | None = None) -> None:
        """Counts every child of the root and of an accepted node: the target chose there, and took it or did not.

        `bonus_node` is one that had the bonus token and was not verified: right too, but its children were not tried.
        """
        self._tried *= self._decay
        self._accepted *= self._decay
        chosen = [*accepted_nodes] if bonus_node is None else [*accepted_nodes, bonus_node]
        bins = self._bins(tree.log_probs)
        np.add.at(self._tried, bins[np.isin(tree.parents, (0, *accepted_nodes))], 1.0)
        np.add.at(self._accepted, bins[chosen], 1.0)

    def acceptance(self, tree: Tree) -> NDArray[np.float64]:
        """(num_nodes,) probability that each node is accepted; 1 for the root."""
        rates = (self._accepted + self._prior) / (self._tried + PRIOR_GUESSES)
        probs, conditional = [1.0], rates[self._bins(tree.log_probs)].tolist()
        for parent, rate in zip(tree.parents.tolist()[1:], conditional[1:], strict=True):
            probs.append(probs[parent] * rate)
        return np.array(probs)

    def expected_tokens(self, tree: Tree) -> float:
        """Of a round with this tree, the bonus token included."""
        return float(self.acceptance(tree).sum())

    def _bins(self, log_probs: NDArray[np.float32]) -> NDArray[np.intp]:
        return np.digitize(log_probs, self._edges)
