"""Writes sessions to the index behind the stream's back: a slow or dead index never holds up a round."""

from __future__ import annotations

import asyncio
import logging

from bough.errors import Unavailable
from bough.records import SessionRecord
from bough.registry import Registry

logger = logging.getLogger(__name__)


class Recorder:
    """Of each session the newest record is written; older ones that had to wait are skipped."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._newest: dict[str, SessionRecord | None] = {}  # None: to be dropped
        self._written: dict[str, int] = {}  # tokens in the index
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def record(self, record: SessionRecord) -> None:
        """After a round."""
        self._put(record.session_id, record)

    def begin(self, session_id: str) -> None:
        """Before a request: its transcript is written from the start, whatever an earlier request has left."""
        self._written.pop(session_id, None)

    def drop(self, session_id: str) -> None:
        """After a request whose session is not kept."""
        self._put(session_id, None)

    async def end(self, session_id: str) -> None:
        """After a request whose session is kept: nothing of it need be remembered here."""
        await self.settled(session_id)
        self._written.pop(session_id, None)

    async def settled(self, session_id: str) -> None:
        """Waits until the session's record has been written, or could not be."""
        task = self._tasks.get(session_id)
        if task is not None:
            await asyncio.wait({task})  # whoever stops waiting does not stop the writing

    def _put(self, session_id: str, record: SessionRecord | None) -> None:
        self._newest[session_id] = record
        if session_id not in self._tasks:
            self._tasks[session_id] = asyncio.create_task(self._write(session_id))

    async def _write(self, session_id: str) -> None:
        try:
            while session_id in self._newest:
                record = self._newest.pop(session_id)
                if record is None:
                    self._written.pop(session_id, None)
                    await self._registry.drop_session(session_id)
                else:
                    written = min(self._written.get(session_id, 0), len(record.tokens))
                    await self._registry.record_session(record, written)
                    self._written[session_id] = len(record.tokens)
        except Unavailable as exc:
            self._newest.pop(session_id, None)
            self._written.pop(session_id, None)  # it may come back empty: write all of it the next time
            logger.debug("session %s is not recorded: %s", session_id, exc)
        finally:
            del self._tasks[session_id]
