"""A sizer's statistics of all sessions of a pair of draft and target: the prior of new sessions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bough.trees.acceptance import FloatArray
from bough.trees.tree import Tree, along_paths
from bough.trees.tree_plan import Scheme
from orchestrator.sizing.choice import GainProfile

DECAY = 0.5 ** (1 / 20)  # decay of the margins' statistics, per round
MOST_LEVELS = 32  # levels with their own statistics; deeper ones count with the last
PRIOR_WEIGHT, PRIOR_MARGIN = 0.5, 0.7  # prior of a level's ratio of gain to bound
PRIOR_GAINS = PRIOR_WEIGHT * PRIOR_MARGIN ** np.arange(1, MOST_LEVELS + 1)  # (MOST_LEVELS,)
FIRST_BOUND = 1.0  # most tokens that the step from the root can gain
PRIOR_ACCEPTED = 2.0  # pseudo-count of accepted and expected tokens
TRUST_DECAY = 0.5 ** (1 / 20)
LEAST_MARGIN, MOST_MARGIN = 0.02, 1.5
PRIOR_LOOKUP_GAIN = 0.02  # tokens for each doubling of the looked-up guesses: most texts repeat little at first
FIRST_PROBE, LAST_PROBE = 8, 256  # rounds without a drafted tree between probes: initially, and at most
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
CALIBRATION_ROUNDS, SESSION_ROUNDS = 200.0, 50.0  # half-lives of what all sessions share, and of a session's bias


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
    """One session's bias, in log-odds: how much better its guesses are than other sessions'."""

    value: float = 0.0
    information: float = 0.0  # Fisher information of all its guesses; older ones weigh less


class AcceptanceModel:
    """Acceptance probabilities from a draft's probabilities, by an online logistic calibration (Platt scaling).

    For a child with draft probability q below an accepted node,

        logit P(accepted) = slope * logit(q) + bias + bias of the depth + bias of the session

    as in vLLM's adaptive verification. All sessions of one pair of models and one kind of guess share the slope and the
    biases; each session has one more bias. Each round makes one Newton step towards the maximum a posteriori, in which
    older rounds weigh less.
    """

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
        decay = _decay(CALIBRATION_ROUNDS)
        self._precision = decay * self._precision + (1 - decay) * PRIOR_PRECISION
        self._precision += (features * variances[:, None]).T @ features
        step = np.linalg.solve(self._precision, features.T @ errors)
        self._weights = self._weights + np.minimum(np.maximum(step, -LONGEST_STEP), LONGEST_STEP)
        self._weights[0] = max(0.0, self._weights[0])  # acceptance must not decrease with q
        bias.information = _decay(SESSION_ROUNDS) * bias.information + float(variances.sum())
        residual = float((accepted - _sigmoid(features @ self._weights + bias.value)).sum())
        change = (residual - SESSION_PRECISION * (1 - _decay(SESSION_ROUNDS)) * bias.value) / (
            SESSION_PRECISION + bias.information
        )
        bias.value += min(LONGEST_STEP, max(-LONGEST_STEP, change))

    def view(self, tree: Tree) -> View:
        """The features of a tree that stay fixed while it is evaluated."""
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


class PairKey(NamedTuple):
    """A kind of guess; statistics of one kind say little about another."""

    target_identity: str
    draft_identity: str
    scheme: Scheme
    temperature: float  # rounded to a tenth


class Margin:
    """Gains of draft steps relative to the bounds that the draft worker compares with its least gain.

    The worker assumes that the children of an expanded node together are as probable as the node by the draft's own
    probabilities. This class learns their worth by calibrated probabilities for each level of a tree: it is less for
    an overconfident draft, and decreases with depth.
    """

    def __init__(self) -> None:
        self._rounds = 0.0  # decayed number of rounds with a drafted tree; gains and bounds decay likewise
        self._gains = np.zeros(MOST_LEVELS)
        self._bounds = np.zeros(MOST_LEVELS)

    def min_gain(self, tokens: float) -> float:
        """The least bound for the worker if a step must gain `tokens`; above 1 if not even the first step does.

        It is computed at the first level whose steps have gained less: growth ends there and not earlier.
        """
        gains = (self._gains + PRIOR_GAINS) / (self._rounds + PRIOR_WEIGHT)
        short = np.flatnonzero(gains < tokens)
        level = int(short[0]) if len(short) else MOST_LEVELS - 1
        bound = tokens / self._ratio(level)
        return min(bound, FIRST_BOUND) if level else max(bound, math.nextafter(FIRST_BOUND, 2))

    def observe(self, view: View, values: NDArray[np.float64]) -> None:
        """Learn from a grown tree and its nodes' acceptance probabilities, (num_nodes,)."""
        depths = np.minimum(view.depths, MOST_LEVELS)
        is_expanded = np.zeros(len(depths), np.bool_)
        is_expanded[view.tree.parents[1:]] = True
        stated = np.exp(along_paths(np.add, view.tree.log_probs.astype(np.float64), view.ancestors))
        self._rounds = DECAY * self._rounds + 1
        gains = np.bincount(depths[1:] - 1, values[1:], MOST_LEVELS)
        bounds = np.bincount(np.minimum(depths[is_expanded], MOST_LEVELS - 1), stated[is_expanded], MOST_LEVELS)
        self._gains = DECAY * self._gains + gains
        self._bounds = DECAY * self._bounds + bounds

    def _ratio(self, level: int) -> float:
        """The ratio of gain to bound at a level; with little data it is that of the level above."""
        ratio, end = PRIOR_MARGIN, level + 1
        for gain, bound in zip(self._gains[:end].tolist(), self._bounds[:end].tolist(), strict=True):
            ratio = min(MOST_MARGIN, max(LEAST_MARGIN, (gain + PRIOR_WEIGHT * ratio) / (bound + PRIOR_WEIGHT)))
        return ratio


class Trust:
    """The ratio of accepted to expected tokens in a pair's latest rounds.

    It corrects large errors of the expectation sooner than the calibration of single guesses does.
    """

    def __init__(self) -> None:
        self._accepted = self._expected = PRIOR_ACCEPTED

    @property
    def ratio(self) -> float:
        """Accepted over expected tokens: the factor of a grown tree's expectation."""
        return self._accepted / self._expected

    @property
    def factor(self) -> float:
        """Factor for the gains of tree sizes to choose from, at most 1: luck must not make trees grow."""
        return min(1.0, self.ratio)

    def observe(self, expected: float, accepted: int) -> None:
        """Add a tree's expected and accepted tokens, both without the bonus token."""
        self._accepted = PRIOR_ACCEPTED + TRUST_DECAY * (self._accepted - PRIOR_ACCEPTED) + accepted
        self._expected = PRIOR_ACCEPTED + TRUST_DECAY * (self._expected - PRIOR_ACCEPTED) + expected


@dataclass(slots=True)
class RoundStats:
    """Statistics of rounds, of one session or of all sessions of a pair."""

    drafted: GainProfile = field(default_factory=GainProfile)  # of rounds with a drafted tree
    looked_up: GainProfile = field(default_factory=lambda: GainProfile(prior_gain=PRIOR_LOOKUP_GAIN))  # of the others
    num_steps: float | None = None  # average draft steps of a tree; draft-ahead may save all of them
    is_drafting: bool = True  # whether drafting pays
    num_contrary: int = 0  # consecutive rounds that suggest the opposite

    @classmethod
    def after(cls, others: RoundStats) -> RoundStats:
        """Initial statistics of a new session, from those of others."""
        return cls(GainProfile(others.drafted), GainProfile(others.looked_up), others.num_steps, others.is_drafting)

    def note_steps(self, num_steps: int) -> None:
        """Add the number of draft steps of a tree."""
        before = num_steps if self.num_steps is None else self.num_steps
        self.num_steps = before + 0.2 * (num_steps - before)


@dataclass(slots=True)
class Probing:
    """Schedule of probes while drafting does not pay, for all sessions of a pair, at doubling intervals."""

    gap: int = FIRST_PROBE
    num_remaining: int = FIRST_PROBE

    def is_due(self) -> bool:
        """Count a round without a drafted tree; returns whether the round should be a probe."""
        self.num_remaining -= 1
        if self.num_remaining > 0:
            return False
        self.gap = min(2 * self.gap, LAST_PROBE)
        self.num_remaining = self.gap
        return True

    def paid(self) -> None:
        """Note that the last probe paid: the next one follows soon, to distinguish luck from change."""
        self.num_remaining = min(self.num_remaining, FIRST_PROBE)

    def begin(self) -> None:
        """Start the schedule, when drafting has been given up."""
        self.gap = self.num_remaining = FIRST_PROBE


@dataclass(slots=True)
class Pair:
    """What all sessions with the same kind of guess share."""

    acceptance: AcceptanceModel = field(default_factory=AcceptanceModel)
    margin: Margin = field(default_factory=Margin)
    trust: Trust = field(default_factory=Trust)  # in trees with drafted nodes
    lookup_trust: Trust = field(default_factory=Trust)  # in trees of looked-up nodes only
    stats: RoundStats = field(default_factory=RoundStats)
    probing: Probing = field(default_factory=Probing)


@dataclass(slots=True)
class SessionState:
    """A sizer's state of a running session."""

    pair: Pair
    key: PairKey
    stats: RoundStats
    bias: SessionBias = field(default_factory=SessionBias)
    num_rounds: int = 0
