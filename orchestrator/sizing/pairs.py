"""What a sizer has learnt from all sessions of a pair of draft and target: the prior of new sessions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bough.trees.tree import along_paths
from bough.trees.tree_plan import Scheme
from orchestrator.sizing.acceptance_model import AcceptanceModel, SessionBias, View
from orchestrator.sizing.choice import GainProfile

HALF_LIFE_ROUNDS = 20.0
DECAY = 0.5 ** (1 / HALF_LIFE_ROUNDS)
MOST_LEVELS = 32  # levels with their own statistics; deeper ones count with the last
PRIOR_WEIGHT, PRIOR_MARGIN = 0.5, 0.7  # prior of a level's ratio of gain to bound
PRIOR_GAINS = PRIOR_WEIGHT * PRIOR_MARGIN ** np.arange(1, MOST_LEVELS + 1)  # (MOST_LEVELS,)
FIRST_BOUND = 1.0  # most tokens that the step from the root can gain
PRIOR_ACCEPTED = 2.0  # pseudo-count of accepted and expected tokens
TRUST_DECAY = 0.5 ** (1 / 20)
LEAST_MARGIN, MOST_MARGIN = 0.02, 1.5
PRIOR_LOOKUP_GAIN = 0.02  # tokens for each doubling of the looked-up guesses: most texts repeat little at first
FIRST_PROBE, LAST_PROBE = 8, 256  # rounds without a drafted tree between probes: initially, and at most


class PairKey(NamedTuple):
    """A kind of guess; what is learnt about one kind says little about another."""

    target_identity: str
    draft_identity: str
    scheme: Scheme
    temperature: float  # rounded to a tenth


class Margin:
    """Gains of draft steps relative to the bounds that the draft worker compares with its least gain.

    The worker assumes that the children of an expanded node together are as probable as the node by the draft's own
    probabilities. This class learns, for each level of a tree, what they are worth by calibrated probabilities: less
    for an overconfident draft, and less the deeper.
    """

    def __init__(self) -> None:
        self._rounds = 0.0  # decayed number of rounds with a drafted tree; gains and bounds decay likewise
        self._gains = np.zeros(MOST_LEVELS)
        self._bounds = np.zeros(MOST_LEVELS)

    def min_gain(self, tokens: float) -> float:
        """The least bound for the worker if a step must gain `tokens`; above 1 if not even the first step does.

        It is computed at the first level whose steps have gained less, so that growth ends there and not before.
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

    It corrects expectations that are far off sooner than the calibration of single guesses does.
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
    num_steps: float | None = None  # average draft steps of a tree, of which draft-ahead may save all
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
        """Note that the last probe paid: the next one follows soon, to tell luck from change."""
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
