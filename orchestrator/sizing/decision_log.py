"""The record of a sizer's decisions: the last rounds of the last sessions, and how well predictions agreed."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from bough.protocol.decision import Decision, DraftCalibration
from orchestrator.sizing.acceptance_counts import HALF_LIFE_ROUNDS

MAX_ROUNDS = 256  # of a session that are remembered
MAX_SESSIONS = 64  # the last ones at work
MAX_DRAFTS = 64  # workers come and go
DECAY = 0.5 ** (1 / HALF_LIFE_ROUNDS)


@dataclass(slots=True)
class _Sums:
    """Of the rounds with one draft worker's trees; old ones count for less."""

    num_rounds: int = 0
    weight: float = 0.0
    expected_tokens: float = 0.0
    realised_tokens: float = 0.0
    expected_seconds: float = 0.0
    realised_seconds: float = 0.0

    def add(self, decision: Decision) -> None:
        self.num_rounds += 1
        self.weight = DECAY * self.weight + 1
        self.expected_tokens = DECAY * self.expected_tokens + decision.expected_tokens
        self.realised_tokens = DECAY * self.realised_tokens + decision.tokens
        self.expected_seconds = DECAY * self.expected_seconds + decision.expected.total
        self.realised_seconds = DECAY * self.realised_seconds + decision.seconds.total

    def report(self, draft_id: str) -> DraftCalibration:
        return DraftCalibration(
            draft_id,
            self.num_rounds,
            self.expected_tokens / self.weight,
            self.realised_tokens / self.weight,
            self.expected_seconds / self.weight,
            self.realised_seconds / self.weight,
        )


class DecisionLog:
    """Bounded in every direction: sessions, rounds and workers that were used longest ago are forgotten."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, deque[Decision]] = OrderedDict()
        self._drafts: OrderedDict[str, _Sums] = OrderedDict()

    def add(self, session_id: str, decision: Decision) -> None:
        """A round is over. Predictions count where a draft was asked and something was predicted."""
        log = self._sessions.setdefault(session_id, deque(maxlen=MAX_ROUNDS))
        log.append(decision)
        self._sessions.move_to_end(session_id)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        if decision.draft_id and decision.num_grown > 1 and decision.expected.sweep:
            self._drafts.setdefault(decision.draft_id, _Sums()).add(decision)
            self._drafts.move_to_end(decision.draft_id)
            if len(self._drafts) > MAX_DRAFTS:
                self._drafts.popitem(last=False)

    def of(self, session_id: str) -> Sequence[Decision]:
        """Those of a session, oldest first; of the one last at work where the name is empty."""
        if not session_id and self._sessions:
            session_id = next(reversed(self._sessions))
        return tuple(self._sessions.get(session_id, ()))

    def calibrations(self) -> tuple[DraftCalibration, ...]:
        """How well predictions agreed, for every draft worker that is remembered."""
        return tuple(sums.report(draft_id) for draft_id, sums in self._drafts.items())
