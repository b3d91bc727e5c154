"""Epochs: which orchestrator may act for a session."""

from __future__ import annotations

import time
from contextlib import suppress

from bough.errors import StaleEpoch, Unavailable
from bough.protocol.ids import ScopedId
from bough.registry.records import MAX_EPOCH, Claim
from orchestrator.cluster.directory import Directory
from orchestrator.sessions.session import Session


class Epochs:
    """Claims sessions for this orchestrator, each time with a greater epoch.

    Workers and the index refuse older epochs. Without the index, epochs come from the clock, which works if it is not
    behind the index's.
    """

    def __init__(self, directory: Directory, holder_id: str) -> None:
        self._directory, self._holder_id = directory, holder_id
        self._newest = 0  # epoch

    async def begin(self, session_id: ScopedId) -> Claim:
        """Claim a session for a new request from any earlier owner."""
        return await self._claim(session_id, None)

    async def renew(self, session: Session) -> None:
        """Claim a session again, for a request that moves. Raises StaleEpoch if another orchestrator has claimed it."""
        await self._take(session, past=0)

    async def overtake(self, session: Session, refusal: StaleEpoch) -> None:
        """Claim a session past the epoch of a target's refusal, for a request that has just begun.

        A clock that is ahead gave that epoch to an earlier request while the index was away or before it was emptied.
        Raises StaleEpoch if another request has claimed the session since; or `refusal` if that is possible.
        """
        if session.round or not session.epoch < refusal.newest < MAX_EPOCH // 2:
            raise refusal
        await self._take(session, past=refusal.newest)

    async def _take(self, session: Session, past: int) -> None:
        claim = await self._claim(session.session_id, session.epoch, past)
        session.has_claim = claim.is_granted and claim.epoch > session.epoch
        session.epoch = max(claim.epoch, session.epoch + 1)

    async def _claim(self, session_id: ScopedId, epoch: int | None, past: int = 0) -> Claim:
        claim = Claim(max(time.time_ns() // 1000, self._newest + 1, past + 1), None, is_granted=False)
        if not self._directory.index_problem:
            with suppress(Unavailable):  # reported by the directory
                claim = await self._directory.registry.claim_session(session_id, self._holder_id, epoch, past)
        self._newest = max(self._newest, claim.epoch)
        return claim
