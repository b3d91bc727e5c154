"""What all sessions of one draft and one target have taught: the prior of a new one."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bough.growth import Guess, Scheme
from bough.sizing.acceptance_model import AcceptanceModel, SessionBias
from bough.sizing.gain_profile import GainProfile
from bough.tree import Tree

MAX_PAIRS = 64  # that are remembered
HALF_LIFE_ROUNDS = 20.0
DECAY = 0.5 ** (1 / HALF_LIFE_ROUNDS)
PRIOR_WEIGHT, PRIOR_MARGIN = 1.0, 0.7  # of the last levels' gain over its bound, before any were seen
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


@dataclass(slots=True)
class Margin:
    """What a draft step brings, over the bound that the draft worker compares with its price.

    The worker takes all children of an expanded node together for as probable as the node itself is by its own
    probabilities. Here stands what they are worth by the calibrated ones, at the last levels of trees: a step that is
    not made would have been another one of these.
    """

    gain: float = PRIOR_WEIGHT * PRIOR_MARGIN
    bound: float = PRIOR_WEIGHT

    @property
    def ratio(self) -> float:
        return min(MOST_MARGIN, max(LEAST_MARGIN, self.gain / self.bound))

    def observe(self, tree: Tree, values: NDArray[np.float64]) -> None:
        """A draft's tree as it was grown, and its nodes' chances to be accepted."""
        depths = tree.depths()
        for level in range(max(1, int(depths.max()) - 1), int(depths.max()) + 1):
            nodes = np.flatnonzero(depths == level)
            bound = float(np.exp(tree.scores()[np.unique(tree.parents[nodes])].astype(np.float64)).sum())
            self.gain = DECAY * self.gain + float(values[nodes].sum())
            self.bound = DECAY * self.bound + bound


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
        """A draft's tree took so many steps."""
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

    def begin(self) -> None:
        """Drafting has just been given up."""
        self.gap = self.num_left = FIRST_PROBE


@dataclass(slots=True)
class Pair:
    """Shared by all sessions of a kind of guess."""

    acceptance: AcceptanceModel = field(default_factory=AcceptanceModel)
    margin: Margin = field(default_factory=Margin)
    habits: Habits = field(default_factory=Habits)
    probing: Probing = field(default_factory=Probing)
    mean_tokens: float = 1.0  # of a round

    def note_tokens(self, num_tokens: int) -> None:
        """A round has come to so many."""
        self.mean_tokens += 0.1 * (num_tokens - self.mean_tokens)


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
