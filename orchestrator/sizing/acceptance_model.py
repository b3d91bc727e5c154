"""Acceptance probabilities from a draft's probabilities, by an online logistic calibration (Platt scaling).

For a child with draft probability q below an accepted node,

    logit P(accepted) = slope * logit(q) + bias + bias of the depth + bias of the session

as in vLLM's adaptive verification. All sessions of one pair of models and one kind of guess share the slope and the
biases; each session has one more bias. Each round makes one Newton step towards the maximum a posteriori, in which
older rounds weigh less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bough.trees.acceptance import FloatArray
from bough.trees.tree import Tree, along_paths

LEAST_PROB = 1e-4  # probabilities are clipped to LEAST_PROB and 1 - LEAST_PROB
DEPTH_EDGES = (2, 3, 5, 9)  # first depths of the ranges with their own bias; depth 1 has none
NUM_WEIGHTS = 2 + len(DEPTH_EDGES)
# (9 + 1, NUM_WEIGHTS) inputs of the regression by depth, up to the last edge; those of the draft's probability are 0.
INPUTS_BY_DEPTH = np.array(
    [
        [0.0, 1.0, *(first <= depth < end for first, end in pairwise((*DEPTH_EDGES, math.inf)))]
        for depth in range(DEPTH_EDGES[-1] + 1)
    ]
)
PRIOR_MEAN = np.array([1.0, *[0.0] * (NUM_WEIGHTS - 1)])  # the draft's probabilities unchanged
PRIOR_PRECISION = np.diag([16.0, 1.0, *[10.0] * len(DEPTH_EDGES)])
SESSION_PRECISION = 4.0  # prior of a session's bias: a standard deviation of 0.5
LONGEST_STEP = 1.0  # of a weight in one round, as confident wrong guesses have steep gradients
HALF_LIFE_ROUNDS = 200.0
SESSION_HALF_LIFE_ROUNDS = 50.0


def _decay(half_life: float) -> float:
    return float(0.5 ** (1 / half_life))


@dataclass(slots=True)
class View:
    """Cached features of the last tree, which is evaluated several times in a round."""

    tree: Tree
    depths: NDArray[np.intp]  # (num_nodes,)
    ancestors: list[NDArray[np.intp]]  # as `along_paths` takes them
    features: FloatArray  # (num_nodes, NUM_WEIGHTS)


@dataclass(slots=True)
class SessionBias:
    """One session's bias: how much better its guesses are than others', in log-odds."""

    value: float = 0.0
    information: float = 0.0  # Fisher information of all its guesses; older ones weigh less


class AcceptanceModel:
    """Estimates acceptance probabilities of nodes, learning from the verdicts of all sessions of a pair of models."""

    def __init__(self) -> None:
        self.num_rounds = 0
        self._weights = PRIOR_MEAN.copy()
        self._precision = PRIOR_PRECISION.copy()
        self._last: View | None = None

    def conditional(self, tree: Tree, bias: SessionBias | None = None) -> FloatArray:
        """(num_nodes,) probability that each node is accepted if its parent is; 1 for the root."""
        probs = _sigmoid(self.view(tree).features @ self._weights + (bias.value if bias else 0.0))
        probs[0] = 1.0
        return probs

    def values(self, tree: Tree, bias: SessionBias | None = None) -> FloatArray:
        """(num_nodes,) probability that each node is accepted; 1 for the root, and never above the parent's."""
        ancestors = self.view(tree).ancestors
        products = along_paths(np.multiply, self.conditional(tree, bias), ancestors)
        return along_paths(np.minimum, products, ancestors)  # products are rounded

    def observe(self, tree: Tree, chosen: Sequence[int], is_verified: NDArray[np.bool_], bias: SessionBias) -> None:
        """Learn from one verdict on a drafted tree.

        `chosen` are the nodes, from below the root on, that spell the target's tokens; `is_verified` (num_nodes,) says
        which nodes were sent to the target. The outcome is known for all children of the root and of verified chosen
        nodes, verified or not; nothing is learnt below a chosen node that was not verified.
        """
        accepted = [node for node in chosen if is_verified[node]]
        has_known_children, is_chosen = np.zeros((2, len(tree)), np.bool_)
        has_known_children[[0, *accepted]] = True
        is_chosen[chosen] = True
        known = has_known_children[tree.parents]
        known[0] = False  # it has no parent
        if not known.any():
            return
        self._learn(tree, known, is_chosen[known], bias)
        self.num_rounds += 1

    def _learn(self, tree: Tree, known: NDArray[np.bool_], accepted: NDArray[np.bool_], bias: SessionBias) -> None:
        features = self.view(tree).features[known]
        probs = _sigmoid(features @ self._weights + bias.value)
        errors, variances = accepted - probs, probs * (1 - probs)
        decay = _decay(HALF_LIFE_ROUNDS)
        self._precision = decay * self._precision + (1 - decay) * PRIOR_PRECISION
        self._precision += (features * variances[:, None]).T @ features
        step = np.linalg.solve(self._precision, features.T @ errors)
        self._weights = self._weights + np.minimum(np.maximum(step, -LONGEST_STEP), LONGEST_STEP)
        self._weights[0] = max(0.0, self._weights[0])  # acceptance must not decrease with q
        bias.information = _decay(SESSION_HALF_LIFE_ROUNDS) * bias.information + float(variances.sum())
        residual = float((accepted - _sigmoid(features @ self._weights + bias.value)).sum())
        change = (residual - SESSION_PRECISION * (1 - _decay(SESSION_HALF_LIFE_ROUNDS)) * bias.value) / (
            SESSION_PRECISION + bias.information
        )
        bias.value += min(LONGEST_STEP, max(-LONGEST_STEP, change))

    def view(self, tree: Tree) -> View:
        """What does not change while a tree is evaluated."""
        if self._last is None or self._last.tree is not tree:
            ancestors = tree.ancestors()
            depths = along_paths(np.add, np.minimum(np.arange(len(tree)), 1), ancestors)
            self._last = View(tree, depths, ancestors, _features(tree.log_probs, depths))
        return self._last


def with_values(tree: Tree, values: FloatArray) -> Tree:
    """The tree with the `worth` whose products along paths are `values`."""
    least = np.finfo(np.float32).tiny
    above = np.maximum(values[np.maximum(tree.parents, 0)], least)
    ratios = np.minimum(np.maximum(values / above, least), 1.0)
    ratios[0] = 1.0
    return replace(tree, worth=np.log(ratios).astype(np.float32))


def _features(log_probs: NDArray[np.float32], depths: NDArray[np.intp]) -> FloatArray:
    """(num_nodes, NUM_WEIGHTS) inputs of the regression."""
    probs = np.minimum(np.maximum(np.exp(log_probs.astype(np.float64)), LEAST_PROB), 1 - LEAST_PROB)
    features: FloatArray = INPUTS_BY_DEPTH.take(np.minimum(depths, DEPTH_EDGES[-1]), axis=0)
    features[:, 0] = np.log(probs / (1 - probs))
    return features


def _sigmoid(logits: FloatArray) -> FloatArray:
    probs: FloatArray = 1 / (1 + np.exp(-np.minimum(np.maximum(logits, -30), 30)))
    return probs
