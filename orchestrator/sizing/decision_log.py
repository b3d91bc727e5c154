"""Log of a sizer's decisions: the latest rounds of recent sessions, and how accurate predictions were."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from bough.protocol.decision import Decision, DraftCalibration
from orchestrator.sizing.acceptance_counts import HALF_LIFE_ROUNDS

MAX_ROUNDS = 256  # limit for each session
MAX_SESSIONS = 64  # limit; the most recently active are kept
MAX_DRAFTS = 64  # limit of draft workers
DECAY = 0.5 ** (1 / HALF_LIFE_ROUNDS)


@dataclass(slots=True)
class _Sums:
    """Decayed sums over rounds with one draft worker's trees."""

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
    """Bounded log: the least recently used sessions, rounds and workers are dropped."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, deque[Decision]] = OrderedDict()
        self._drafts: OrderedDict[str, _Sums] = OrderedDict()

    def add(self, session_id: str, decision: Decision) -> None:
        """Log a round. It counts as a prediction if a draft was asked and a sweep was predicted."""
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
        """Decisions of a session, oldest first; an empty id means the session active last."""
        if not session_id and self._sessions:
            session_id = next(reversed(self._sessions))
        return tuple(self._sessions.get(session_id, ()))

    def calibrations(self) -> tuple[DraftCalibration, ...]:
        """Accuracy of predictions by draft worker."""
        return tuple(sums.report(draft_id) for draft_id, sums in self._drafts.items())
