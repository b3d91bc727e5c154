"""What all sessions of one draft and one target have taught: the prior of a new one."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bough.sizing.acceptance_model import AcceptanceModel, SessionBias
from bough.sizing.gain_profile import GainProfile
from bough.trees.tree import Tree
from bough.trees.tree_plan import Guess, Scheme

MAX_PAIRS = 64  # that are remembered
HALF_LIFE_ROUNDS = 20.0
DECAY = 0.5 ** (1 / HALF_LIFE_ROUNDS)
MOST_LEVELS = 32  # that are told apart
PRIOR_WEIGHT, PRIOR_MARGIN = 0.5, 0.7  # of a level's gain over its bound, before any was seen
FIRST_BOUND = 1.0  # of the step from the root: a token at most
PRIOR_ACCEPTED = 4.0  # tokens, as many as expected, before any were
TRUST_DECAY = 0.5 ** (1 / 10)
LEAST_MARGIN, MOST_MARGIN = 0.02, 1.5
PRIOR_LOOKUP_GAIN = 0.02  # tokens for each doubling of what is looked up: most texts repeat little at first
FIRST_PROBE, LAST_PROBE = 8, 256  # rounds without a draft's tree before one is tried, at first and at last


class PairKey(NamedTuple):
    """Guesses of one kind: what is learnt of one says little of another."""

    target_identity: str
    draft_identity: str
    scheme: Scheme
    guess: Guess
    temperature: float  # in tenths


class Margin:
    """What a draft step brings, over the bound that the draft worker compares with its price.

    The worker takes all children of an expanded node together for as probable as the node itself is by its own
    probabilities. Here stands, for each level of a tree, what they are worth by the calibrated ones: the surer a draft
    is without reason, the less, and the less the deeper.
    """

    def __init__(self) -> None:
        self._rounds = 0.0  # with a draft's tree; old ones count for less, here and below
        self._gains = np.zeros(MOST_LEVELS)
        self._bounds = np.zeros(MOST_LEVELS)

    def price(self, tokens: float) -> float:
        """The price for the worker of a step that must bring so many tokens; above 1 where not even the first does.

        By the level from which on steps have brought less: that is where growth is to end, and not before.
        """
        gains = (self._gains + PRIOR_WEIGHT * PRIOR_MARGIN ** np.arange(1, MOST_LEVELS + 1)) / (
            self._rounds + PRIOR_WEIGHT
        )
        short = np.flatnonzero(gains < tokens)
        level = int(short[0]) if len(short) else MOST_LEVELS - 1
        price = float(tokens / self._ratios()[level])
        return min(price, FIRST_BOUND) if level else max(price, math.nextafter(FIRST_BOUND, 2))

    def observe(self, tree: Tree, values: NDArray[np.float64]) -> None:
        """A draft's tree as it was grown, and its nodes' chances to be accepted."""
        depths = np.minimum(tree.depths(), MOST_LEVELS)
        is_expanded = np.zeros(len(tree), np.bool_)
        is_expanded[tree.parents[1:]] = True
        stated = np.exp(tree.scores().astype(np.float64))
        self._rounds = DECAY * self._rounds + 1
        gains = np.bincount(depths[1:] - 1, values[1:], MOST_LEVELS)
        bounds = np.bincount(np.minimum(depths[is_expanded], MOST_LEVELS - 1), stated[is_expanded], MOST_LEVELS)
        self._gains = DECAY * self._gains + gains
        self._bounds = DECAY * self._bounds + bounds

    def _ratios(self) -> list[float]:
        """(MOST_LEVELS,) gain over bound; where little was grown as on the level above."""
        ratios, above = list[float](), PRIOR_MARGIN
        for gain, bound in zip(self._gains.tolist(), self._bounds.tolist(), strict=True):
            above = min(MOST_MARGIN, max(LEAST_MARGIN, (gain + PRIOR_WEIGHT * above) / (bound + PRIOR_WEIGHT)))
            ratios.append(above)
        return ratios


class Trust:
    """Whether trees come to what was expected of them: tokens accepted over tokens expected, of a pair's last rounds.

    It tells at once where expectations are far off: before a draft that is sure and wrong has been seen through.
    """

    def __init__(self) -> None:
        self._accepted = self._expected = PRIOR_ACCEPTED

    @property
    def factor(self) -> float:
        """For what is expected of trees; never more than 1."""
        return min(1.0, self._accepted / self._expected)

    def observe(self, expected: float, accepted: int) -> None:
        """A draft's tree was expected to bring so many tokens beside the bonus token, and has brought so many."""
        self._accepted = PRIOR_ACCEPTED + TRUST_DECAY * (self._accepted - PRIOR_ACCEPTED) + accepted
        self._expected = PRIOR_ACCEPTED + TRUST_DECAY * (self._expected - PRIOR_ACCEPTED) + expected


@dataclass(slots=True)
class Habits:
    """How rounds went: of one session, or of all of a pair."""

    drafted: GainProfile = field(default_factory=GainProfile)  # values by rank of trees that a draft has grown
    looked_up: GainProfile = field(default_factory=lambda: GainProfile(prior_gain=PRIOR_LOOKUP_GAIN))  # without one
    num_steps: float = 0.0  # of a draft's tree; 0 before the first
    is_drafting: bool = True  # whether a draft's tree pays
    num_contrary: int = 0  # rounds in a row that spoke for a change of that

    @classmethod
    def after(cls, others: Habits) -> Habits:
        """Of a new session, as others have come to be."""
        return cls(GainProfile(others.drafted), GainProfile(others.looked_up), others.num_steps, others.is_drafting)

    def note_steps(self, num_steps: int) -> None:
        """A draft's tree took so many steps; without any it tells nothing of what trees take."""
        if num_steps == 0:
            return
        self.num_steps = self.num_steps + 0.2 * (num_steps - self.num_steps) if self.num_steps else float(num_steps)


@dataclass(slots=True)
class Probing:
    """When drafting is tried again while it does not pay: soon, then less often, whichever session's turn it is."""

    gap: int = FIRST_PROBE
    num_left: int = FIRST_PROBE

    def is_due(self) -> bool:
        """Counts a round without a draft's tree; whether it should have one after all."""
        self.num_left -= 1
        if self.num_left > 0:
            return False
        self.gap = min(2 * self.gap, LAST_PROBE)
        self.num_left = self.gap
        return True

    def paid(self) -> None:
        """The last one was better than doing without: perhaps it was luck, and another soon tells."""
        self.num_left = min(self.num_left, FIRST_PROBE)

    def begin(self) -> None:
        """Drafting has just been given up."""
        self.gap = self.num_left = FIRST_PROBE


@dataclass(slots=True)
class Pair:
    """Shared by all sessions of a kind of guess."""

    acceptance: AcceptanceModel = field(default_factory=AcceptanceModel)
    margin: Margin = field(default_factory=Margin)
    trust: Trust = field(default_factory=Trust)
    habits: Habits = field(default_factory=Habits)
    probing: Probing = field(default_factory=Probing)


@dataclass(slots=True)
class SessionState:
    """What a sizer keeps of a running session."""

    pair: Pair
    key: PairKey
    habits: Habits
    bias: SessionBias = field(default_factory=SessionBias)
    num_rounds: int = 0


class Pairs:
    """Those that were last used."""

    def __init__(self) -> None:
        self._pairs: OrderedDict[PairKey, Pair] = OrderedDict()

    def of(self, key: PairKey) -> Pair:
        """That of a key; a new one knows nothing yet."""
        pair = self._pairs.setdefault(key, Pair())
        self._pairs.move_to_end(key)
        if len(self._pairs) > MAX_PAIRS:
            self._pairs.popitem(last=False)
        return pair
