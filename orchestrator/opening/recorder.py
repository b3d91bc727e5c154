"""Writes sessions to the index behind the stream's back: a slow or dead index never holds up a round."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from bough.concurrency.tasks import end
from bough.errors import StaleEpoch, Unavailable
from bough.protocol.prefix_hash import BLOCK_TOKENS, block_hashes
from bough.registry.records import RequestRecord, SessionRecord
from bough.registry.registry import Registry

logger = logging.getLogger(__name__)

SETTLING_SECONDS = 1.0  # most that a request waits until its session is written
REFRESH_SECONDS = 30.0  # between two times at which all that a target holds counts as used just now
PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0)  # after failures in a row; then the next record is waited for
CLOSE_SECONDS = 5.0  # for what is not written yet


class _State(NamedTuple):
    """A session after a round."""

    session: SessionRecord
    request: RequestRecord
    model_fingerprint: str
    cache_salt: str

    @property
    def epoch(self) -> int:
        return self.session.epoch


class _Drop(NamedTuple):
    """A session that is to be forgotten."""

    session_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class _Noted:
    """What of a session's blocks the index has been told."""

    epoch: int = 0
    target_id: str = ""
    num_blocks: int = 0
    all_at: float = -math.inf  # seconds on the monotonic clock, when all of them were told at once


@dataclass(slots=True)
class _Log:
    """What of one session waits to be written, and what has been."""

    waiting: _State | _Drop | None = None  # the newest, until it has been written
    is_settled: asyncio.Event = field(default_factory=asyncio.Event)  # nothing waits that has not been tried
    has_ended: bool = False  # the request has: nothing more will come
    task: asyncio.Task[None] | None = None
    epoch: int = 0  # of what follows
    refusal: StaleEpoch | None = None  # another has claimed the session since, or closed it
    refused_request_id: str = ""  # of this epoch, whose entry is another session's by now
    num_written: int = 0  # tokens that are in the index
    hashes: list[int] = field(default_factory=list)  # of blocks that the target holds
    noted: _Noted = field(default_factory=lambda: _Noted())

    def put(self, waiting: _State | _Drop) -> None:
        """Something newer is to be written."""
        if waiting.epoch != self.epoch:
            self.epoch, self.refusal, self.refused_request_id, self.num_written = waiting.epoch, None, "", 0
            self.hashes.clear()
        self.waiting = waiting
        self.is_settled.clear()


class Recorder:
    """Of each session the newest state is written; older ones that had to wait are skipped."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._logs: dict[str, _Log] = {}

    def record(
        self, session: SessionRecord, request: RequestRecord, model_fingerprint: str, cache_salt: str = ""
    ) -> None:
        """After a round: where the session is, what its request has come to, and which prefixes its target holds."""
        self._put(session.session_id, _State(session, request, model_fingerprint, cache_salt), has_ended=False)

    def drop(self, session_id: str, epoch: int) -> None:
        """After a request whose session is not kept."""
        self._put(session_id, _Drop(session_id, epoch), has_ended=True)

    def end(self, session_id: str) -> None:
        """After a request whose session is kept: once all is written, nothing of it need be remembered here."""
        log = self._logs.get(session_id)
        if log is not None:
            log.has_ended = True
            self._forget_if_done(session_id, log)

    async def settled(self, session_id: str) -> bool:
        """Waits until the session's newest state has been written, or could not be, or that takes too long.

        Whether nothing waits to be written any more.
        """
        log = self._logs.get(session_id)
        if log is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(SETTLING_SECONDS):
                    await log.is_settled.wait()
        return log is None or log.waiting is None

    def require_held(self, session_id: str) -> None:
        """Raises StaleEpoch where the index has refused what was to be written: somebody else has the session."""
        log = self._logs.get(session_id)
        if log is not None and log.refusal is not None:
            raise StaleEpoch(str(log.refusal))

    def unwritten(self, session_id: str) -> SessionRecord | None:
        """A session's newest state where the index lacks it yet."""
        log = self._logs.get(session_id)
        if log is None or log.refusal is not None or not isinstance(log.waiting, _State):
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
                    if log.epoch == state.epoch:
                        log.refusal = exc
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
        if log.refusal is not None:
            return
        if isinstance(state, _Drop):
            await self._registry.drop_session(*state)
            return
        await self._registry.record_session(state.session, log.num_written)
        await self._record_request(log, state)
        if log.epoch == state.epoch:  # or a newer one has begun meanwhile, of which nothing is written
            log.num_written = len(state.session.tokens)
            await self._note_prefixes(log, state)

    async def _record_request(self, log: _Log, state: _State) -> None:
        """A request whose name a newer one has taken, in whatever session, is not recorded; its session still is."""
        if log.refused_request_id == state.request.request_id:
            return
        try:
            await self._registry.record_request(state.request, log.num_written)
        except StaleEpoch as exc:
            logger.warning("%s: its name is another's, so that it cannot be resumed; the session goes on", exc)
            if log.epoch == state.epoch:
                log.refused_request_id = state.request.request_id

    async def _note_prefixes(self, log: _Log, state: _State) -> None:
        """The blocks that the target holds beyond those that were told, and now and then all: they are in use."""
        num_blocks, noted, now = state.session.target_length // BLOCK_TOKENS, log.noted, time.monotonic()
        if num_blocks == 0:
            return
        first_new = noted.num_blocks
        if (noted.epoch, noted.target_id) != (state.epoch, state.session.target_id) or num_blocks < first_new:
            first_new = 0
        elif num_blocks == first_new:
            return
        elif now - noted.all_at > REFRESH_SECONDS:
            first_new = 0
        if num_blocks != len(log.hashes):
            held = state.session.tokens[: num_blocks * BLOCK_TOKENS]
            log.hashes = block_hashes(held, log.hashes[:num_blocks], state.cache_salt)
        target_id = state.session.target_id
        await self._registry.note_prefixes(state.model_fingerprint, log.hashes, target_id, first_new)
        log.noted = _Noted(state.epoch, target_id, num_blocks, noted.all_at if first_new else now)
