"""Writes sessions to the index behind the stream's back: a slow or dead index never holds up a round."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import NamedTuple

from bough.errors import StaleEpoch, Unavailable
from bough.prefix import BLOCK_TOKENS, block_hashes
from bough.records import RequestRecord, SessionRecord
from bough.registry import Registry
from bough.tasks import end

logger = logging.getLogger(__name__)

PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0)  # after failures in a row; then the next record is waited for
CLOSE_SECONDS = 5.0  # for what is not written yet


class _State(NamedTuple):
    """A session after a round."""

    session: SessionRecord
    request: RequestRecord
    model_fingerprint: str

    @property
    def epoch(self) -> int:
        return self.session.epoch


class _Drop(NamedTuple):
    """A session that is to be forgotten."""

    session_id: str
    epoch: int


@dataclass(slots=True)
class _Log:
    """What of one session waits to be written, and what has been."""

    waiting: _State | _Drop | None = None  # the newest, until it has been written
    is_settled: asyncio.Event = field(default_factory=asyncio.Event)  # nothing waits that has not been tried
    has_ended: bool = False  # the request has: nothing more will come
    task: asyncio.Task[None] | None = None
    epoch: int = 0  # of what follows
    is_stale: bool = False  # another has claimed the session since
    num_written: int = 0  # tokens that are in the index
    hashes: list[int] = field(default_factory=list)  # of blocks that the target holds
    noted: tuple[int, str, int] = (0, "", 0)  # epoch, and the target of which so many blocks have been noted

    def put(self, waiting: _State | _Drop) -> None:
        """Something newer is to be written."""
        if waiting.epoch != self.epoch:
            self.epoch, self.is_stale, self.num_written = waiting.epoch, False, 0
            self.hashes.clear()
        self.waiting = waiting
        self.is_settled.clear()


class Recorder:
    """Of each session the newest state is written; older ones that had to wait are skipped."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._logs: dict[str, _Log] = {}

    def record(self, session: SessionRecord, request: RequestRecord, model_fingerprint: str) -> None:
        """After a round: where the session is, what its request has come to, and which prefixes its target holds."""
        self._put(session.session_id, _State(session, request, model_fingerprint), has_ended=False)

    def drop(self, session_id: str, epoch: int) -> None:
        """After a request whose session is not kept."""
        self._put(session_id, _Drop(session_id, epoch), has_ended=True)

    def end(self, session_id: str) -> None:
        """After a request whose session is kept: once all is written, nothing of it need be remembered here."""
        log = self._logs.get(session_id)
        if log is not None:
            log.has_ended = True
            self._forget_if_done(session_id, log)

    async def settled(self, session_id: str) -> None:
        """Waits until the session's newest state has been written, or could not be."""
        log = self._logs.get(session_id)
        if log is not None:
            await log.is_settled.wait()

    def unwritten(self, session_id: str) -> SessionRecord | None:
        """A session's newest state where the index lacks it yet."""
        log = self._logs.get(session_id)
        if log is None or log.is_stale or not isinstance(log.waiting, _State):
            return None
        return log.waiting.session

    async def close(self) -> None:
        """Writes what can be written within seconds, and ends."""
        tasks = [log.task for log in self._logs.values() if log.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
        await end(*tasks)

    def _put(self, session_id: str, waiting: _State | _Drop, has_ended: bool) -> None:
        log = self._logs.setdefault(session_id, _Log())
        log.has_ended = has_ended
        log.put(waiting)
        if log.task is None:
            log.task = asyncio.create_task(self._write_all(session_id, log))

    def _forget_if_done(self, session_id: str, log: _Log) -> None:
        if log.has_ended and log.task is None:
            del self._logs[session_id]

    async def _write_all(self, session_id: str, log: _Log) -> None:
        """Writes what waits until nothing does, or the index has been away for too long."""
        try:
            num_failures = 0
            while (state := log.waiting) is not None and num_failures < len(PAUSES_SECONDS):
                try:
                    await self._write(log, state)
                    num_failures = 0
                except StaleEpoch as exc:
                    logger.warning("%s; nothing more of it is recorded here", exc)
                    log.is_stale = log.epoch == state.epoch
                except Unavailable as exc:
                    logger.debug("session %s is not recorded: %s", session_id, exc)
                    log.is_settled.set()
                    await asyncio.sleep(PAUSES_SECONDS[num_failures])
                    num_failures += 1
                    continue
                if log.waiting is state:  # and nothing newer
                    log.waiting = None
        finally:
            log.waiting, log.task = None, None
            log.is_settled.set()
            self._forget_if_done(session_id, log)

    async def _write(self, log: _Log, state: _State | _Drop) -> None:
        """One try. Raises StaleEpoch, Unavailable."""
        if log.is_stale:
            return
        if isinstance(state, _Drop):
            await self._registry.drop_session(*state)
            return
        await self._registry.record_session(state.session, log.num_written)
        await self._registry.record_request(state.request, log.num_written)
        if log.epoch == state.epoch:  # or a newer one has begun meanwhile, of which nothing is written
            log.num_written = len(state.session.tokens)
            await self._note_prefixes(log, state)

    async def _note_prefixes(self, log: _Log, state: _State) -> None:
        """All blocks that the target holds, whenever there is one more: the first must not look older than the last."""
        held = state.session.tokens[: state.session.target_length]
        if len(held) // BLOCK_TOKENS != len(log.hashes):
            log.hashes = block_hashes(held, log.hashes[: len(held) // BLOCK_TOKENS])
        held_by = (state.epoch, state.session.target_id, len(log.hashes))
        if log.hashes and log.noted != held_by:
            await self._registry.note_prefixes(state.model_fingerprint, log.hashes, state.session.target_id)
            log.noted = held_by
