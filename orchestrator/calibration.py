"""Learns of every draft worker what its probabilities are worth, as `bough doctor` tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bough.calibration import Calibration, DraftCalibration
from bough.growth import Guess, Scheme, TreePlan
from bough.tree import Tree
from orchestrator.acceptance import HALF_LIFE_ROUNDS

MAX_DRAFTS = 64  # that are remembered: workers come and go
DECAY = 0.5 ** (1 / HALF_LIFE_ROUNDS)


@dataclass(slots=True)
class _Draft:
    """What is known of one worker."""

    calibration: Calibration = field(default_factory=lambda: Calibration(HALF_LIFE_ROUNDS))
    num_rounds: int = 0
    weight: float = 0.0  # of the rounds that the sums below remember
    expected: float = 0.0
    realised: float = 0.0


class Calibrations:
    """By draft worker, of all sessions together; the last used ones."""

    def __init__(self) -> None:
        self._drafts: dict[str, _Draft] = {}

    def observe(self, draft_id: str, plan: TreePlan, drafted: Tree, tokens: Sequence[int]) -> None:
        """One verdict on a tree that a draft worker grew, whatever was verified beside it: `tokens` end with the bonus.

        Counted are guesses at what the target will draw. Samples and the likeliest of a distribution are others.
        """
        if len(drafted) == 1 or plan.scheme is not Scheme.TARGET or plan.guess is not Guess.SAMPLE:
            return
        draft = self._drafts[draft_id] = self._drafts.pop(draft_id, _Draft())  # the last used is the last
        if len(self._drafts) > MAX_DRAFTS:
            del self._drafts[next(iter(self._drafts))]
        chosen = drafted.along(tokens)
        accepted, bonus = chosen[: len(tokens) - 1], chosen[len(tokens) - 1 :]
        draft.num_rounds += 1
        draft.weight = DECAY * draft.weight + 1
        draft.expected = DECAY * draft.expected + draft.calibration.expected_tokens(drafted)
        draft.realised = DECAY * draft.realised + min(len(chosen) + 1, len(tokens))
        draft.calibration.observe(drafted, accepted, bonus[0] if bonus else None)

    def reports(self) -> tuple[DraftCalibration, ...]:
        """Of every draft worker that is remembered."""
        return tuple(
            DraftCalibration(draft_id, draft.num_rounds, draft.expected / draft.weight, draft.realised / draft.weight)
            for draft_id, draft in self._drafts.items()
        )
