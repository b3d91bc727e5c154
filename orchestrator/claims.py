"""Epochs: who may speak for a session."""

from __future__ import annotations

import time
from contextlib import suppress

from bough.errors import Unavailable
from bough.records import Claim
from orchestrator.directory import Directory
from orchestrator.session import Session


class Claims:
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
        claim = await self._claim(session.session_id, session.epoch)
        session.epoch = max(claim.epoch, session.epoch + 1)

    async def _claim(self, session_id: str, epoch: int | None) -> Claim:
        claim = Claim(max(time.time_ns() // 1000, self._newest + 1), None)
        if not self._directory.index_problem:
            with suppress(Unavailable):  # the directory tells of it
                claim = await self._directory.registry.claim_session(session_id, self._holder_id, epoch)
        self._newest = max(self._newest, claim.epoch)
        return claim
