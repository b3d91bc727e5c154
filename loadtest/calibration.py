"""What a draft's own probabilities are worth: how often guesses that it gave some probability were accepted."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bough.trees.tree import Tree

NUM_BINS = 24
LOWEST = -12.0  # log-probabilities below are all alike
PRIOR_GUESSES = 4.0  # before anything is counted a bin holds so many guesses, right as often as the draft says
SEEN = 1e-6  # tokens below guesses: fewer are left of rounds long forgotten
PRIOR_RIGHT = 10.0  # right guesses with as much below them as expected, before any are counted


class Calibration:
    """Learns from verdicts; estimates for trees.

    Guesses are counted in bins of equal width in the draft's conditional log-probability. A product of their rates
    along a path falls short: what stands below a guess says something about the guess, since a draft goes on more
    surely where it was right. So all that stands below a guess counts `_lift` times as much.
    """

    def __init__(self, half_life_rounds: float = math.inf) -> None:
        self._decay = 0.5 ** (1 / half_life_rounds)
        self._edges = np.linspace(LOWEST, 0.0, NUM_BINS + 1)[1:-1]
        middles = np.linspace(LOWEST, 0.0, 2 * NUM_BINS + 1)[1::2]
        self._prior = PRIOR_GUESSES * np.exp(middles)  # of it, accepted ones
        self._tried = np.zeros(NUM_BINS)
        self._accepted = np.zeros(NUM_BINS)
        # Right guesses, and the tokens expected below them: as counted, and as the rates had it of all that were tried.
        self._right, self._below_right = 0.0, 0.0
        self._expected_right, self._below_expected = 0.0, 0.0

    def observe(self, tree: Tree, accepted_nodes: Sequence[int], bonus_node: int | None = None) -> None:
        """Counts every child of the root and of an accepted node: the target chose there, and took it or did not.

        `bonus_node` is one that had the bonus token and was not verified: right too, but its children were not tried.
        """
        chosen = [*accepted_nodes] if bonus_node is None else [*accepted_nodes, bonus_node]
        tried = np.isin(tree.parents, (0, *accepted_nodes))
        bins = self._bins(tree)
        self._tried *= self._decay
        self._accepted *= self._decay
        np.add.at(self._tried, bins[tried], 1.0)
        np.add.at(self._accepted, bins[chosen], 1.0)
        rates, below = self._rates(bins)[tried], self._below(tree)
        self._right = self._decay * self._right + len(chosen)
        self._below_right = self._decay * self._below_right + float(below[chosen].sum())
        self._expected_right = self._decay * self._expected_right + float(rates.sum())
        self._below_expected = self._decay * self._below_expected + float(rates @ below[tried])

    def acceptance(self, tree: Tree) -> NDArray[np.float64]:
        """(num_nodes,) probability that each node is accepted; 1 for the root."""
        probs = [1.0]
        for parent, prob in zip(tree.parents.tolist()[1:], self._conditional(tree).tolist()[1:], strict=True):
            probs.append(probs[parent] * prob)
        return np.array(probs)

    def expected_tokens(self, tree: Tree) -> float:
        """Of a round with this tree, the bonus token included."""
        return float(self.acceptance(tree).sum())

    def _lift(self) -> float:
        """Mean of the tokens expected below right guesses, over the mean below all if these are as right as expected.

        A draft whose rates change moves both means alike: that is for the rates to learn, and is not learnt twice.
        """
        if self._below_expected < SEEN:
            return 1.0
        mean = self._below_expected / self._expected_right
        return (self._below_right / mean + PRIOR_RIGHT) / (self._right + PRIOR_RIGHT)

    def _conditional(self, tree: Tree) -> NDArray[np.float64]:
        """(num_nodes,) probability of each node given its parent, lifted but not above 1; the root's means nothing."""
        conditional = self._rates(self._bins(tree))
        deep = tree.parents > 0
        conditional[deep] = np.minimum(1.0, self._lift() * conditional[deep])
        return conditional

    def _below(self, tree: Tree) -> NDArray[np.float64]:
        """(num_nodes,) tokens expected below each node if it is right."""
        conditional, parents = self._conditional(tree).tolist(), tree.parents.tolist()
        below = [0.0] * len(parents)
        for node in range(len(parents) - 1, 0, -1):
            below[parents[node]] += conditional[node] * (1 + below[node])
        return np.array(below)

    def _rates(self, bins: NDArray[np.intp]) -> NDArray[np.float64]:
        return ((self._accepted + self._prior) / (self._tried + PRIOR_GUESSES))[bins]

    def _bins(self, tree: Tree) -> NDArray[np.intp]:
        return np.digitize(tree.log_probs, self._edges)
