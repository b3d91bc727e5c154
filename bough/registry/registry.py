"""A client of the index: live workers, and hints about sessions, requests and prefixes.

The index is never the truth (docs/design.md, rule 4): callers act on what workers answer, and a wrong entry only costs
time. Each operation is one atomic script in `bough/registry/lua`, on the server's clock. Entries expire some time
after their last use; without room, those that expire soonest are evicted. All content may be lost at any moment:
heartbeats and the next record of each running session restore it. Requires Redis 6.2 or Valkey, one server or a
cluster; the namespace is the hash tag of all its keys, so one node has them all.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, TypeVar

from bough.concurrency.tasks import background
from bough.errors import ConfigError, StaleEpoch, Unavailable
from bough.protocol.codec_generation import require_text
from bough.protocol.ids import ScopedId
from bough.registry.connection import CallKind, IndexConnection, Value
from bough.registry.records import (
    TOKEN_BYTES,
    Claim,
    RequestRecord,
    SessionRecord,
    StoredSession,
    WorkerRecord,
    pack_tokens,
)

LEASE_SECONDS = 3.0  # of a worker without heartbeats
SESSION_SECONDS = 24 * 3600.0  # lifetime of a session after its last round
CLAIM_SECONDS = 3600.0  # lifetime of a claimed session without a record, and of a closed session's epoch
REQUEST_SECONDS = 3600.0  # lifetime of a request after its last round
ENDED_SECONDS = 600.0  # lifetime of a finished request, in which its client can resume it
REGISTRY_SECONDS = 24 * 3600.0  # lifetime of the registry after the last heartbeat; the longest lease
MAX_PREFIXES = 16_384  # recorded for each worker: half a million tokens
MOST_EVICTIONS = 8  # consecutive evictions for one entry
START_SECONDS = 10.0  # how long a starting process waits for the index

HEARTBEAT_SECONDS = 0.75
# Replies of writing scripts other than 1, as in prelude.lua.
STALE, INCOMPLETE, FULL = -1, 0, -2

Answer = TypeVar("Answer")
Entry = TypeVar("Entry", SessionRecord, RequestRecord)
logger = logging.getLogger(__name__)


class Kind(Enum):
    """Kinds of entries that clients create."""

    SESSION = "session"
    REQUEST = "request"


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a namespace, which is their hash tag: in a cluster one node has them all."""

    namespace: str

    def validate(self) -> None:
        """Raises ConfigError for an invalid namespace."""
        name = self.namespace
        if not name or set(name) & set("{}") or not name.isprintable():
            raise ConfigError(f"namespace: must be non-empty printable text without braces, got {name!r}")

    @property
    def leases(self) -> str:
        return self._key("workers:leases")

    @property
    def registry(self) -> list[str]:
        """Keys of the leases and records of workers."""
        return [self.leases, self._key("workers:records")]

    @property
    def looked(self) -> str:
        """Key of the time at which workers were last listed."""
        return self._key("workers:looked")

    def prefixes(self, worker_id: str) -> str:
        """Key of the prefixes that a worker has cached."""
        return self._key(f"prefixes:{require_text('worker_id', worker_id)}")

    def ledger(self, kind: Kind) -> list[str]:
        """Keys of the expiry times and sizes of all entries of a kind."""
        return [self._key(f"{kind.value}s:ends"), self._key(f"{kind.value}s:bytes")]

    def entry(self, kind: Kind, entry_id: ScopedId) -> list[str]:
        """Keys of the record and tokens of a session or request. Raises InvalidRequest for an invalid name."""
        require_text(f"{kind.value}_id", entry_id.name)
        return [self._key(f"{kind.value}:{entry_id}"), self._key(f"{kind.value}-tokens:{entry_id}")]

    def listed(self, kind: Kind, name: bytes) -> list[bytes]:
        """Keys of the record and tokens of an entry by its name in the ledger."""
        return [key.encode() + name for key in self.entry(kind, ScopedId())]

    def _key(self, name: str) -> str:
        return f"{{{self.namespace}}}:{name}"


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits for all sessions of a namespace, and separately for all its requests: clients must not fill the index."""

    max_records: int = 100_000
    max_bytes: int = 512 * 1024 * 1024


class Registry:
    """A client of the index. Every failure is Unavailable within seconds, every invalid name InvalidRequest."""

    def __init__(
        self, url: str, namespace: str = "bough", session_seconds: float = SESSION_SECONDS, quota: Quota | None = None
    ) -> None:
        """Sessions are kept for `session_seconds` after their last round. Raises ConfigError."""
        self._keys = Keys(namespace)
        self._keys.validate()
        self._index = IndexConnection(url)
        self.safe_url = self._index.safe_url
        self._session_seconds, self._quota = session_seconds, quota or Quota()

    async def close(self) -> None:
        """Close all connections."""
        await self._index.close()

    async def ping(self) -> None:
        """Raises Unavailable if the index does not answer or cannot be written."""
        await self.workers()

    async def wait(self, timeout_seconds: float = START_SECONDS) -> None:
        """Wait until the index, which may still be starting, answers. Raises Unavailable after the timeout."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                return await self.ping()
            except Unavailable as exc:
                if time.monotonic() > deadline:
                    raise Unavailable(f"--index-url: must be a Redis or Valkey that answers: {exc}") from exc
            await asyncio.sleep(0.1)

    async def register(self, record: WorkerRecord, lease_seconds: float = LEASE_SECONDS) -> None:
        """Register a worker, or renew its lease and its entries."""
        keys = [*self._keys.registry, self._keys.prefixes(record.worker_id)]
        times = (_milliseconds(lease_seconds), _milliseconds(REGISTRY_SECONDS))
        await self._call(CallKind.LOOK, int, "register", keys, record.worker_id, record.to_json(), *times)

    async def deregister(self, worker_id: str) -> None:
        """Remove a worker at once."""
        keys = [*self._keys.registry, self._keys.prefixes(worker_id)]
        await self._call(CallKind.BEHIND, int, "deregister", keys, worker_id)

    async def workers(self) -> list[WorkerRecord]:
        """All workers with a valid lease; malformed entries are skipped.

        Raises:
            Unavailable: the index does not answer, or cannot be written and so cannot renew leases.
        """
        keys = [*self._keys.registry, self._keys.looked]
        return await self._call(CallKind.LOOK, read_workers, "live", keys, _milliseconds(REGISTRY_SECONDS))

    async def sweep_expired(self) -> int:
        """Remove workers whose lease has expired, and return their number."""
        return await self._call(CallKind.BEHIND, int, "sweep_expired", self._keys.registry)

    async def claim_session(self, named: ScopedId, holder_id: str, epoch: int | None = None, past: int = 0) -> Claim:
        """Claim a session under a new epoch, greater than all before and than `past`; earlier ones can no longer write.

        Raises:
            StaleEpoch: `epoch` is given, and the session has been claimed or closed since.
            Unavailable: the index does not answer, or has no room.
        """
        times = (_milliseconds(self._session_seconds), _milliseconds(CLAIM_SECONDS))
        claimant = f"{holder_id}/{secrets.token_hex(8)}"  # unique, as a retried call may run twice
        args = (claimant, *times, "" if epoch is None else epoch, past)
        read = partial(read_claim, named)
        claim = await self._enter(CallKind.AWAITED, read, "claim_session", Kind.SESSION, named, *args)
        if claim is None:
            raise StaleEpoch(f"session {named.name}: epoch {epoch} is over; another request has claimed it")
        return claim

    async def record_session(self, record: SessionRecord, first_new: int) -> None:
        """Write a session's record and its tokens from `first_new` on, or all if the index lacks earlier ones.

        Idempotent; a write older than the stored one of its epoch is ignored.

        Raises:
            StaleEpoch: the session has been claimed or closed since this epoch.
            Unavailable: the index does not answer, or has no room.
        """
        progress, keep = len(record.tokens), _milliseconds(self._session_seconds)
        await self._record(Kind.SESSION, record, progress, first_new, keep)

    async def load_session(self, session_id: ScopedId) -> SessionRecord | None:
        """The record of a session; None if missing or malformed."""
        return (await self.stored_session(session_id)).record

    async def stored_session(self, session_id: ScopedId) -> StoredSession:
        """The record of a session, and whether a turn has begun that is not recorded."""
        keys = self._keys.entry(Kind.SESSION, session_id)
        return await self._call(CallKind.AWAITED, partial(read_stored, session_id), "load", keys)

    async def drop_session(self, session_id: ScopedId, epoch: int) -> None:
        """Forget a session after its request. Raises StaleEpoch if it has been claimed since `epoch`."""
        keys, keep = self._entry_keys(Kind.SESSION, session_id), _milliseconds(ENDED_SECONDS)
        if await self._call(CallKind.BEHIND, int, "drop_session", keys, str(session_id), epoch, keep) == STALE:
            raise StaleEpoch(f"session {session_id.name}: epoch {epoch} is over; another request has claimed it")

    async def close_session(self, session_id: ScopedId) -> Claim | None:
        """End a session, and return a claim with a newer epoch and its last record; None if it does not exist."""
        keys, closer = self._entry_keys(Kind.SESSION, session_id), secrets.token_hex(8)
        args = (str(session_id), closer, _milliseconds(CLAIM_SECONDS))
        return await self._call(CallKind.BEHIND, partial(read_claim, session_id), "close_session", keys, *args)

    async def record_request(self, record: RequestRecord, first_new: int) -> None:
        """Write a request's record and tokens, like `record_session` and with the same errors."""
        has_ended = bool(record.finish_reason)
        progress, keep = 2 * len(record.tokens) + has_ended, ENDED_SECONDS if has_ended else REQUEST_SECONDS
        await self._record(Kind.REQUEST, record, progress, first_new, _milliseconds(keep))

    async def load_request(self, request_id: ScopedId) -> RequestRecord | None:
        """The record of a request; None if missing or malformed."""
        keys = self._keys.entry(Kind.REQUEST, request_id)
        return await self._call(CallKind.AWAITED, partial(read_entry, RequestRecord, request_id), "load", keys)

    async def note_prefixes(
        self, model_fingerprint: str, hashes: Sequence[int], worker_id: str, first_new: int = 0
    ) -> None:
        """Record that a worker has cached the prefixes with these `block_hashes`; it keeps the newest MAX_PREFIXES.

        Hashes from `first_new` on are written with the age of the one before them, or all as new if the index lacks
        that one.
        """
        keys, limits = (
            [self._keys.leases, self._keys.prefixes(worker_id)],
            (MAX_PREFIXES, _milliseconds(REGISTRY_SECONDS)),
        )
        for first in (first_new, 0):
            names = _prefix_names(model_fingerprint, hashes[first:])
            before = _prefix_names(model_fingerprint, hashes[max(0, first - 1) : first])
            args = (worker_id, names, *limits, before)
            if await self._call(CallKind.BEHIND, int, "note_prefixes", keys, *args) != INCOMPLETE:
                return

    async def find_prefixes(
        self, model_fingerprint: str, hashes: Sequence[int], worker_ids: Sequence[str]
    ) -> dict[str, int]:
        """Leading blocks that each worker has cached; workers without any, or without a lease, are omitted."""
        keys = [self._keys.leases, *(self._keys.prefixes(worker_id) for worker_id in worker_ids)]
        names, read = _prefix_names(model_fingerprint, hashes), partial(read_blocks, worker_ids)
        return await self._call(CallKind.AWAITED, read, "find_prefixes", keys, names, *worker_ids)

    async def _record(
        self, kind: Kind, record: SessionRecord | RequestRecord, progress: int, first_new: int, keep: int
    ) -> None:
        entry_id = record.session_id if isinstance(record, SessionRecord) else record.request_id
        entry = (record.epoch, progress, record.to_json())
        for first in (first_new, 0):
            args = (*entry, first * TOKEN_BYTES, pack_tokens(record.tokens[first:]), keep)
            answer = await self._enter(CallKind.BEHIND, int, "record", kind, entry_id, *args)
            if answer == STALE:
                over = f"{kind.value} {entry_id.name}: epoch {record.epoch} is over"
                raise StaleEpoch(f"{over}; another request has claimed it, or it was closed")
            if answer != INCOMPLETE:
                return

    async def _enter(
        self, call: CallKind, read: Callable[[Any], Answer], script: str, kind: Kind, entry_id: ScopedId, *args: Value
    ) -> Answer:
        """Run a script that writes an entry, evicting others if the quota leaves no room, and return its reply."""
        keys, quota = self._entry_keys(kind, entry_id), (self._quota.max_records, self._quota.max_bytes)
        for _ in range(MOST_EVICTIONS):
            answer = await self._call(call, partial(read_unless_full, read), script, keys, str(entry_id), *quota, *args)
            if not isinstance(answer, QuotaExceeded):
                return answer
            if not answer.names:
                break
            entries = [key for victim in answer.names for key in self._keys.listed(kind, victim)]
            await self._call(call, int, "evict", [*self._keys.ledger(kind), *entries], *answer.names_and_ends)
        what = f"{kind.value} {entry_id.name}"
        raise Unavailable(f"the index has no room for {what}: the quota is {self._quota.max_bytes} bytes")

    def _entry_keys(self, kind: Kind, entry_id: ScopedId) -> list[str]:
        return [*self._keys.entry(kind, entry_id), *self._keys.ledger(kind)]

    async def _call(
        self, call: CallKind, read: Callable[[Any], Answer], script: str, keys: Sequence[str | bytes], *args: Value
    ) -> Answer:
        """A script's reply, parsed by `read`. Raises Unavailable for any failure."""
        answer = await self._index.run(call, script, keys, args)
        try:
            return read(answer)
        except (ValueError, TypeError) as exc:
            raise await self._index.nonsense(exc) from exc


def _prefix_names(model_fingerprint: str, hashes: Sequence[int]) -> bytes:
    """Eight bytes for each prefix, which differ for different models."""
    fingerprint = require_text("model_fingerprint", model_fingerprint)
    salt = hashlib.blake2b(fingerprint.encode(), digest_size=16).digest()
    digests = (hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8, key=salt).digest() for number in hashes)
    return b"".join(digests)


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


class QuotaExceeded(NamedTuple):
    """The entries that must be evicted before a new one has room."""

    names_and_ends: tuple[bytes, ...]  # name and expiry in milliseconds, alternating

    @property
    def names(self) -> tuple[bytes, ...]:
        return self.names_and_ends[::2]


def read_unless_full(read: Callable[[Any], Answer], answer: Any) -> Answer | QuotaExceeded:
    """QuotaExceeded if the reply says so, otherwise the reply parsed by `read`."""
    if isinstance(answer, list) and answer and answer[0] == FULL:
        if not all(isinstance(value, bytes) for value in answer[1:]):
            raise ValueError(f"must be names of entries, got {answer!r}")
        return QuotaExceeded(tuple(answer[1:]))
    return read(answer)


def read_claim(session_id: ScopedId, answer: Any) -> Claim | None:
    """The claim; None if it was refused, or there is no session to close."""
    if answer in (STALE, INCOMPLETE):
        return None
    epoch, *entry = answer
    return Claim(int(epoch), read_entry(SessionRecord, session_id, entry))


def read_stored(session_id: ScopedId, answer: Sequence[bytes | None]) -> StoredSession:
    """Parse a session and its newest epoch."""
    *entry, epoch = answer
    return StoredSession(read_entry(SessionRecord, session_id, entry), int(epoch or 0))


def read_entry(kind: type[Entry], entry_id: ScopedId, entry: Sequence[bytes | None]) -> Entry | None:
    """Parse a session or request from its stored record and tokens."""
    data, transcript, *_ = entry
    return kind.from_json(entry_id, data or b"", transcript or b"")


def read_workers(answer: Sequence[bytes]) -> list[WorkerRecord]:
    """Worker records sorted by id; malformed ones are skipped."""
    records = [record for value in answer if (record := WorkerRecord.from_json(value)) is not None]
    return sorted(records, key=lambda record: record.worker_id)


def read_blocks(worker_ids: Sequence[str], answer: Sequence[Any]) -> dict[str, int]:
    """Numbers of blocks by worker id, without zeros."""
    return {worker_id: int(number) for worker_id, number in zip(worker_ids, answer, strict=True) if number}


@asynccontextmanager
async def registered(
    registry: Registry, present: Callable[[], WorkerRecord], heartbeat_seconds: float = HEARTBEAT_SECONDS
) -> AsyncIterator[None]:
    """Registers a process for the duration of the block and renews its lease, also across outages of the index.

    `present` returns the record at each heartbeat; its load may change, its id may not.
    """
    await registry.register(present())
    try:
        async with background(_beat(registry, present, heartbeat_seconds)):
            yield
    finally:
        with suppress(Unavailable):
            await registry.deregister(present().worker_id)


async def _beat(registry: Registry, present: Callable[[], WorkerRecord], heartbeat_seconds: float) -> None:
    is_lost = False
    while True:
        await asyncio.sleep(heartbeat_seconds)
        try:
            await registry.register(present())
            if is_lost:
                logger.warning("the index at %s takes heartbeats again", registry.safe_url)
            is_lost = False
        except Unavailable as exc:
            if not is_lost:
                logger.warning("%s; trying again", exc)
            is_lost = True
        except Exception:  # a failing `present` must not end the heartbeats
            logger.exception("a heartbeat failed; trying again")
