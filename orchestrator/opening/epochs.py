"""Epochs: who may speak for a session."""

from __future__ import annotations

import time
from contextlib import suppress

from bough.errors import StaleEpoch, Unavailable
from bough.registry.records import MAX_EPOCH, Claim
from orchestrator.cluster.directory import Directory
from orchestrator.sessions.session import Session


class Epochs:
    """Sessions that this orchestrator takes over, each time with an epoch greater than any before it.

    A worker and the index refuse whoever comes with an older one. Without an index the clock must do, as far as it is
    not behind the index's.
    """

    def __init__(self, directory: Directory, holder_id: str) -> None:
        self._directory, self._holder_id = directory, holder_id
        self._newest = 0  # epoch

    async def begin(self, session_id: str) -> Claim:
        """For a new request: whoever had the session has lost it."""
        return await self._claim(session_id, None)

    async def renew(self, session: Session) -> None:
        """For a request that goes on elsewhere: the session must still be this orchestrator's.

        Raises:
            StaleEpoch: another has claimed it.
        """
        await self._take(session, past=0)

    async def overtake(self, session: Session, refusal: StaleEpoch) -> None:
        """For a request that has just begun, and that a target refuses for an epoch which the index does not know.

        A clock that was ahead has given it, to an earlier request, while there was no index, or before it was emptied.

        Raises:
            StaleEpoch: another has claimed the session after this request; or `refusal`, of which that may be so.
        """
        if session.round or not session.epoch < refusal.newest < MAX_EPOCH // 2:
            raise refusal
        await self._take(session, past=refusal.newest)

    async def _take(self, session: Session, past: int) -> None:
        claim = await self._claim(session.session_id, session.epoch, past)
        session.has_claim = claim.is_granted and claim.epoch > session.epoch
        session.epoch = max(claim.epoch, session.epoch + 1)

    async def _claim(self, session_id: str, epoch: int | None, past: int = 0) -> Claim:
        claim = Claim(max(time.time_ns() // 1000, self._newest + 1, past + 1), None, is_granted=False)
        if not self._directory.index_problem:
            with suppress(Unavailable):  # the directory tells of it
                claim = await self._directory.registry.claim_session(session_id, self._holder_id, epoch, past)
        self._newest = max(self._newest, claim.epoch)
        return claim
