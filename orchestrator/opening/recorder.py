"""Writes sessions to the index in the background: a slow or absent index never delays a round."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from bough.concurrency.tasks import end
from bough.errors import NotFound, StaleEpoch, Unavailable
from bough.protocol.codec_fields import like
from bough.protocol.ids import ScopedId
from bough.protocol.prefix_hash import BLOCK_TOKENS, block_hashes
from bough.protocol.sampling_params import SamplingParams
from bough.registry.records import RequestRecord, SessionRecord
from bough.registry.registry import Registry
from orchestrator.cluster.target_place import TargetPlace
from orchestrator.sessions.session import Session

logger = logging.getLogger(__name__)

SETTLING_SECONDS = 1.0  # longest wait of a request until its session is written
NOTING_SECONDS = 0.1  # longest wait of a request until the index has the prefixes that others left at targets
REFRESH_SECONDS = 30.0  # between two refreshes of all blocks that a target holds
PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0)  # after consecutive failures; then until the next record
CLOSE_SECONDS = 5.0  # for writing the rest on close


class _State(NamedTuple):
    """A session's state to write. With a request it is the state after a round. Without one it is the state before a
    turn that ended without a round, under that turn's epoch. Without both, the session is forgotten."""

    session_id: ScopedId
    epoch: int
    session: SessionRecord | None = None
    request: RequestRecord | None = None
    model_fingerprint: str = ""
    cache_salt: str = ""
    is_lost: bool = False  # its last turn could not be recorded; tried until the index takes it


@dataclass(frozen=True, slots=True)
class _Noted:
    """The session's blocks that are noted in the index."""

    epoch: int = 0
    target_id: str = ""
    num_blocks: int = 0
    all_at: float = -math.inf  # when all blocks were last noted together, in seconds on the monotonic clock


@dataclass(slots=True)
class _Log:
    """What remains to be written of one session, and what has been written."""

    waiting: _State | None = None  # the newest, until it is written
    is_settled: asyncio.Event = field(default_factory=asyncio.Event)  # unless something was not tried yet
    has_ended: bool = False  # the request has ended: no more records will come
    task: asyncio.Task[None] | None = None
    epoch: int = 0  # of the records
    refusal: StaleEpoch | None = None  # another request has claimed or closed the session
    refused_request_id: ScopedId | None = None  # request of this epoch whose id now belongs to another session
    lost: _State | None = None  # what the index could not take for too long
    num_written: int = 0  # tokens in the index
    hashes: list[int] = field(default_factory=list)  # of the blocks that the target holds
    noted: _Noted = field(default_factory=lambda: _Noted())

    def put(self, waiting: _State) -> None:
        """Replace what is to be written by something newer."""
        if waiting.epoch != self.epoch:
            self.epoch, self.refusal, self.refused_request_id, self.num_written = waiting.epoch, None, None, 0
            self.hashes.clear()
        self.waiting, self.lost = waiting, None
        self.is_settled.clear()


class Recorder:
    """Writes each session's newest state; older states that had to wait are skipped."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.pauses_seconds, self.refresh_seconds, self.noting_seconds = PAUSES_SECONDS, REFRESH_SECONDS, NOTING_SECONDS
        self._logs: dict[ScopedId, _Log] = {}

    def record(
        self, session: SessionRecord, request: RequestRecord, model_fingerprint: str, cache_salt: str = ""
    ) -> None:
        """Record a round: the session's place, its request's tokens, and the prefixes that its target holds."""
        state = _State(session.session_id, session.epoch, session, request, model_fingerprint, cache_salt)
        self._enqueue(state, has_ended=False)

    def drop(self, session_id: ScopedId, epoch: int) -> None:
        """Forget a session that is not kept, unless a newer epoch of it is recorded here."""
        log = self._logs.get(session_id)
        if log is None or log.epoch <= epoch:
            self._enqueue(_State(session_id, epoch), has_ended=True)

    def end(self, session_id: ScopedId, epoch: int = 0, before: SessionRecord | None = None) -> None:
        """End the request of a kept session: its log is dropped once all is written.

        If no round of `epoch` was recorded, the session is recorded as `before`, as its next turn may continue that.
        """
        log = self._logs.get(session_id)
        if before is not None and (log is None or log.epoch < epoch):
            self._enqueue(_State(session_id, epoch, replace(before, epoch=epoch)), has_ended=True)
        elif log is not None and log.lost is not None and log.task is None:
            self._enqueue(log.lost, has_ended=True)
        elif log is not None:
            log.has_ended = True
            self._forget_if_done(session_id, log)

    async def until_written(self, session_id: ScopedId) -> bool:
        """Wait for a limited time until the newest state is written or has failed; returns whether it is written."""
        log = self._logs.get(session_id)
        if log is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(SETTLING_SECONDS):
                    await log.is_settled.wait()
        return log is None or (log.waiting is None and log.lost is None)

    async def prefixes_noted(self) -> None:
        """Wait briefly until the index has the prefixes that sessions have left at targets."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.noting_seconds):
                for log in list(self._logs.values()):
                    await log.is_settled.wait()

    def require_held(self, session_id: ScopedId) -> None:
        """Raise StaleEpoch if the index refused a record, as another request has the session."""
        log = self._logs.get(session_id)
        if log is not None and log.refusal is not None:
            raise StaleEpoch(str(log.refusal))

    def is_refused(self, session_id: ScopedId) -> bool:
        """Whether the index refused a record, as another request has the session or it was closed elsewhere."""
        log = self._logs.get(session_id)
        return log is not None and log.refusal is not None

    def unwritten(self, session_id: ScopedId, continues: bool = False) -> SessionRecord | None:
        """The newest state of a session that is not in the index yet.

        Raises NotFound if the state should be continued but could not be recorded: the index may have an earlier one.
        """
        log = self._logs.get(session_id)
        if log is None or log.refusal is not None or log.waiting is None:
            return None
        if log.waiting.is_lost and continues:
            raise lost_turn(session_id)
        return log.waiting.session

    async def close(self) -> None:
        """Write what can be written within a time limit, and stop."""
        tasks = [log.task for log in self._logs.values() if log.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
        await end(*tasks)

    def _enqueue(self, state: _State, has_ended: bool) -> None:
        log = self._logs.setdefault(state.session_id, _Log())
        log.has_ended = has_ended
        log.put(state)
        if log.task is None:
            log.task = asyncio.create_task(self._write_all(state.session_id, log))

    def _forget_if_done(self, session_id: ScopedId, log: _Log) -> None:
        if log.has_ended and log.task is None:
            del self._logs[session_id]

    async def _write_all(self, session_id: ScopedId, log: _Log) -> None:
        """Write until nothing is left, or the index has been away too long."""
        try:
            num_failures = 0
            while (state := log.waiting) is not None:
                if num_failures >= len(self.pauses_seconds) and not state.is_lost:
                    log.lost = _lost(state) or log.lost
                    if log.lost is None or not log.has_ended:
                        break
                    log.waiting = log.lost  # small enough to be tried for as long as it takes
                    continue
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
                    await asyncio.sleep(self.pauses_seconds[min(num_failures, len(self.pauses_seconds) - 1)])
                    num_failures += 1
                    continue
                if log.waiting is state:  # nothing newer came
                    log.waiting = None
        finally:
            log.waiting, log.task = None, None
            log.is_settled.set()
            self._forget_if_done(session_id, log)

    async def _write(self, log: _Log, state: _State) -> None:
        """Write once. Raises StaleEpoch or Unavailable."""
        if log.refusal is not None:
            return
        if (session := state.session) is None:
            await self._registry.drop_session(state.session_id, state.epoch)
            return
        await self._registry.record_session(session, log.num_written)
        if state.request is None:
            return
        await self._record_request(log, state.request)
        if log.epoch == state.epoch:  # otherwise a newer epoch has begun, and none of it is written
            log.num_written = len(session.tokens)
            await self._note_prefixes(log, session, state)

    async def _record_request(self, log: _Log, request: RequestRecord) -> None:
        """Record the request, unless another session's request has taken its id; the session is recorded anyway."""
        if log.refused_request_id == request.request_id:
            return
        try:
            await self._registry.record_request(request, log.num_written)
        except StaleEpoch as exc:
            logger.warning("%s: another session has its name, so it cannot be resumed; the session continues", exc)
            if log.epoch == request.epoch:
                log.refused_request_id = request.request_id

    async def _note_prefixes(self, log: _Log, session: SessionRecord, state: _State) -> None:
        """Record the target's new blocks, and from time to time all of them, as they are in use."""
        num_blocks, noted, now = session.target_length // BLOCK_TOKENS, log.noted, time.monotonic()
        if num_blocks == 0:
            return
        first_new = noted.num_blocks
        if (noted.epoch, noted.target_id) != (state.epoch, session.target_id) or num_blocks < first_new:
            first_new = 0
        elif num_blocks == first_new:
            return
        elif now - noted.all_at > self.refresh_seconds:
            first_new = 0
        if num_blocks != len(log.hashes):
            held = session.tokens[: num_blocks * BLOCK_TOKENS]
            log.hashes = block_hashes(held, log.hashes[:num_blocks], state.cache_salt)
        target_id = session.target_id
        await self._registry.note_prefixes(state.model_fingerprint, log.hashes, target_id, first_new)
        log.noted = _Noted(state.epoch, target_id, num_blocks, noted.all_at if first_new else now)


def lost_turn(session_id: ScopedId) -> NotFound:
    """The refusal to continue a session whose last turn is not recorded."""
    return NotFound(
        "session_id",
        f"{session_id.name!r} cannot be continued, as its last turn is not recorded; send the full history, "
        "with continues false",
    )


def _lost(state: _State) -> _State | None:
    """The record for a state that could not be written, if its session may be continued."""
    is_kept = state.session is not None and (state.request is None or state.request.keeps_session)
    return _State(state.session_id, state.epoch, is_lost=True) if is_kept else None


def session_record(session: Session, place: TargetPlace) -> SessionRecord:
    """The session's place and tokens."""
    lengths = {"target_length": place.held, "draft_length": session.draft_held}
    target_id = place.target.record.worker_id
    return like(SessionRecord, session, target_id=target_id, tokens=session.tokens[:], **lengths)


def request_record(session: Session) -> RequestRecord:
    """The state of the session's request."""
    sampling = as_recorded(session.sampling)
    return like(RequestRecord, session, tokens=session.tokens[:], sampling=sampling, keeps_session=session.keep)


def as_recorded(sampling: SamplingParams) -> SamplingParams:
    """Sampling parameters with a hash in place of a grammar, as it may be long and every round is recorded."""
    digest = hashlib.blake2b(sampling.grammar.encode(), digest_size=12).hexdigest() if sampling.grammar else ""
    return replace(sampling, grammar=digest)
