"""Log of a sizer's decisions: the latest rounds of recent sessions, and how accurate predictions were."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bough.protocol.decision import Decision, DraftCalibration
from orchestrator.sizing.acceptance_counts import HALF_LIFE_ROUNDS

MAX_ROUNDS = 256  # limit for each session
MAX_SESSIONS = 64  # limit; the most recently active are kept
MAX_DRAFTS = 64  # limit of draft workers
DECAY = 0.5 ** (1 / HALF_LIFE_ROUNDS)


class DecisionLog:
    """Bounded log: the least recently used sessions, rounds and workers are dropped."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, deque[Decision]] = OrderedDict()
        # By draft worker: rounds, and decayed sums over them (5,): weight, then what a DraftCalibration has means of.
        self._drafts: OrderedDict[str, tuple[int, NDArray[np.float64]]] = OrderedDict()

    def add(self, session_id: str, decision: Decision) -> None:
        """Log a round. It counts as a prediction if a draft was asked and a sweep was predicted."""
        log = self._sessions.setdefault(session_id, deque(maxlen=MAX_ROUNDS))
        log.append(decision)
        self._sessions.move_to_end(session_id)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        if decision.draft_id and decision.num_grown > 1 and decision.expected.sweep:
            num_rounds, sums = self._drafts.pop(decision.draft_id, (0, np.zeros(5)))
            tokens, seconds = (decision.expected_tokens, decision.tokens), (decision.expected, decision.seconds)
            sums = DECAY * sums + (1.0, *tokens, *(each.total for each in seconds))
            self._drafts[decision.draft_id] = num_rounds + 1, sums
            if len(self._drafts) > MAX_DRAFTS:
                self._drafts.popitem(last=False)

    def of(self, session_id: str) -> Sequence[Decision]:
        """Decisions of a session, oldest first; an empty id means the session active last."""
        if not session_id and self._sessions:
            session_id = next(reversed(self._sessions))
        return tuple(self._sessions.get(session_id, ()))

    def calibrations(self) -> tuple[DraftCalibration, ...]:
        """Accuracy of predictions by draft worker."""
        return tuple(
            DraftCalibration(draft_id, num_rounds, *(sums[1:] / sums[0]).tolist())
            for draft_id, (num_rounds, sums) in self._drafts.items()
        )
