"""The index: who is alive and where, and what is probably true of each session.

Nothing here is the truth (docs/design.md, rule 4). A caller acts on what workers answer; whoever reads a wrong entry
loses time. Every operation is one script in `bough/registry/lua`, by the server's clock; every entry ends some time
after its last use, and where there is no room those that end soonest go. All of it may be lost at any moment:
heartbeats and the next record of each running session bring it back. Any Redis 6.2 or Valkey server will do, or a
cluster of them: all keys of a namespace have it as their hash tag, so that one node has them all.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from bough.errors import StaleEpoch, Unavailable
from bough.registry.connection import Call, IndexConnection, Value
from bough.registry.keys import Keys, Kind, require_text
from bough.registry.records import TOKEN_BYTES, Claim, RequestRecord, SessionRecord, WorkerRecord, pack_tokens
from bough.registry.script_replies import (
    INCOMPLETE,
    STALE,
    Crowded,
    read_blocks,
    read_claim,
    read_closed,
    read_crowded,
    read_request,
    read_session,
    read_workers,
)

LEASE_SECONDS = 3.0  # a worker that is silent for so long is gone
SESSION_SECONDS = 24 * 3600.0  # after its last round
CLAIM_SECONDS = 3600.0  # of a session of which nothing has been recorded, and of the epoch of one that was closed
REQUEST_SECONDS = 3600.0  # after its last round
ENDED_SECONDS = 600.0  # after its end: time to come back for the last words
REGISTRY_SECONDS = 24 * 3600.0  # after the last heartbeat of anyone; the longest lease
MAX_PREFIXES = 16_384  # that are known of a worker: half a million tokens
MOST_EVICTIONS = 8  # in a row, for one entry
START_SECONDS = 10.0  # that a starting process waits for the index

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Quota:
    """What the sessions of a namespace may take in the index, and its requests once more: clients cannot fill it."""

    max_records: int = 100_000
    max_bytes: int = 512 * 1024 * 1024


class Registry:
    """A client of the index; every failure of it is Unavailable, within seconds.

    A name that cannot be a key of any index is InvalidRequest.
    """

    def __init__(
        self, url: str, namespace: str = "bough", session_seconds: float = SESSION_SECONDS, quota: Quota | None = None
    ) -> None:
        """A session is kept for `session_seconds` after its last round. Raises ConfigError."""
        self._keys = Keys(namespace)
        self._keys.validate()
        self._index = IndexConnection(url)
        self.safe_url = self._index.safe_url
        self._session_seconds, self._quota = session_seconds, quota or Quota()

    async def close(self) -> None:
        """Gives the connections back."""
        await self._index.close()

    async def ping(self) -> None:
        """Raises Unavailable where the index does not answer, or cannot be written."""
        await self.workers()

    async def wait(self, patience_seconds: float = START_SECONDS) -> None:
        """Returns once the index answers, which may be starting beside this process. Raises Unavailable."""
        deadline = time.monotonic() + patience_seconds
        while True:
            try:
                return await self.ping()
            except Unavailable:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.1)

    async def register(self, record: WorkerRecord, lease_seconds: float = LEASE_SECONDS) -> None:
        """Announces a worker, or renews its lease and what belongs to it."""
        keys = [*self._keys.registry, self._keys.prefixes(record.worker_id)]
        times = (_milliseconds(lease_seconds), _milliseconds(REGISTRY_SECONDS))
        await self._call(Call.LOOK, int, "register", keys, record.worker_id, record.to_json(), *times)

    async def deregister(self, worker_id: str) -> None:
        """Takes a worker out at once."""
        keys = [*self._keys.registry, self._keys.prefixes(worker_id)]
        await self._call(Call.BEHIND, int, "deregister", keys, worker_id)

    async def workers(self) -> list[WorkerRecord]:
        """All workers whose lease has not run out; an entry that cannot be read is passed over.

        Raises:
            Unavailable: the index does not answer, or cannot be written: then leases run out whoever is there.
        """
        keys = [*self._keys.registry, self._keys.looked]
        return await self._call(Call.LOOK, read_workers, "live", keys, _milliseconds(REGISTRY_SECONDS))

    async def sweep_expired(self) -> int:
        """Removes workers whose lease has run out; how many they were."""
        return await self._call(Call.BEHIND, int, "sweep_expired", self._keys.registry)

    async def claim_session(self, session_id: str, holder_id: str, epoch: int | None = None, past: int = 0) -> Claim:
        """A new epoch, greater than any before and than `past`; from now on writes of earlier ones are refused.

        Raises:
            StaleEpoch: an `epoch` is given, and the session has been claimed or closed since.
            Unavailable: the index does not answer, or has no room.
        """
        times = (_milliseconds(self._session_seconds), _milliseconds(CLAIM_SECONDS))
        claimant = f"{holder_id}/{secrets.token_hex(8)}"  # the same call may reach the index twice
        args = (claimant, *times, "" if epoch is None else epoch, past)
        read = partial(read_claim, session_id)
        claim = await self._enter(Call.AWAITED, read, "claim_session", Kind.SESSION, session_id, *args)
        if claim is None:
            raise StaleEpoch(f"session {session_id}: epoch {epoch} is over; it has been claimed by another")
        return claim

    async def record_session(self, record: SessionRecord, first_new: int) -> None:
        """Writes a session's entry; its tokens from `first_new` on, or all where the index lacks those before.

        Writing the same again changes nothing, nor does a write that a later one of its epoch has overtaken.

        Raises:
            StaleEpoch: the session has been claimed or closed since this epoch.
            Unavailable: the index does not answer, or has no room.
        """
        progress, keep = len(record.tokens), _milliseconds(self._session_seconds)
        await self._record(Kind.SESSION, record.session_id, record, progress, first_new, keep)

    async def load_session(self, session_id: str) -> SessionRecord | None:
        """What is known of a session; None for nothing, or for nonsense."""
        keys = self._keys.entry(Kind.SESSION, session_id)
        return await self._call(Call.AWAITED, partial(read_session, session_id), "load", keys)

    async def drop_session(self, session_id: str, epoch: int) -> None:
        """Forgets a session after its request. Raises StaleEpoch where it has been claimed since this epoch."""
        keys, keep = self._entry_keys(Kind.SESSION, session_id), _milliseconds(ENDED_SECONDS)
        if await self._call(Call.BEHIND, int, "drop_session", keys, session_id, epoch, keep) == STALE:
            raise StaleEpoch(f"session {session_id}: epoch {epoch} is over; it has been claimed by another")

    async def close_session(self, session_id: str) -> Claim | None:
        """Ends a session whoever has it: an epoch past theirs, and what was recorded. None for one that nobody has."""
        keys, closer = self._entry_keys(Kind.SESSION, session_id), secrets.token_hex(8)
        args = (session_id, closer, _milliseconds(CLAIM_SECONDS))
        return await self._call(Call.BEHIND, partial(read_closed, session_id), "close_session", keys, *args)

    async def record_request(self, record: RequestRecord, first_new: int) -> None:
        """Writes a request's entry and its tokens as `record_session` does, with the same errors."""
        has_ended = bool(record.finish_reason)
        progress, keep = 2 * len(record.tokens) + has_ended, ENDED_SECONDS if has_ended else REQUEST_SECONDS
        await self._record(Kind.REQUEST, record.request_id, record, progress, first_new, _milliseconds(keep))

    async def load_request(self, request_id: str) -> RequestRecord | None:
        """What is known of a request; None for nothing, or for nonsense."""
        keys = self._keys.entry(Kind.REQUEST, request_id)
        return await self._call(Call.AWAITED, partial(read_request, request_id), "load", keys)

    async def note_prefixes(
        self, model_fingerprint: str, hashes: Sequence[int], worker_id: str, first_new: int = 0
    ) -> None:
        """A worker with a lease holds these (`bough.protocol.prefix_hash.block_hashes`); of too many the oldest go.

        Only those from `first_new` on are written, and count as old as the one before them; or all, as new, where the
        index does not know that one.
        """
        keys, limits = (
            [self._keys.leases, self._keys.prefixes(worker_id)],
            (MAX_PREFIXES, _milliseconds(REGISTRY_SECONDS)),
        )
        for first in (first_new, 0):
            names = _prefix_names(model_fingerprint, hashes[first:])
            before = _prefix_names(model_fingerprint, hashes[max(0, first - 1) : first])
            args = (worker_id, names, *limits, before)
            if await self._call(Call.BEHIND, int, "note_prefixes", keys, *args) != INCOMPLETE:
                return

    async def find_prefixes(
        self, model_fingerprint: str, hashes: Sequence[int], worker_ids: Sequence[str]
    ) -> dict[str, int]:
        """How many leading blocks each of these workers holds. Those that hold none, or have no lease, are left out."""
        keys = [self._keys.leases, *(self._keys.prefixes(worker_id) for worker_id in worker_ids)]
        names, read = _prefix_names(model_fingerprint, hashes), partial(read_blocks, worker_ids)
        return await self._call(Call.AWAITED, read, "find_prefixes", keys, names, *worker_ids)

    async def _record(
        self, kind: Kind, name: str, record: SessionRecord | RequestRecord, progress: int, first_new: int, keep: int
    ) -> None:
        entry = (record.epoch, progress, record.to_json())
        for first in (first_new, 0):
            args = (*entry, first * TOKEN_BYTES, pack_tokens(record.tokens[first:]), keep)
            answer = await self._enter(Call.BEHIND, int, "record", kind, name, *args)
            if answer == STALE:
                raise StaleEpoch(
                    f"{kind.value} {name}: epoch {record.epoch} is over; another has begun, or it was closed"
                )
            if answer != INCOMPLETE:
                return

    async def _enter(
        self, call: Call, read: Callable[[Any], Answer], script: str, kind: Kind, name: str, *args: Value
    ) -> Answer:
        """The answer of a script that writes an entry; others go first where the quota leaves no room for it."""
        keys, quota = self._entry_keys(kind, name), (self._quota.max_records, self._quota.max_bytes)
        for _ in range(MOST_EVICTIONS):
            answer = await self._call(call, partial(read_crowded, read), script, keys, name, *quota, *args)
            if not isinstance(answer, Crowded):
                return answer
            if not answer.names:
                break
            entries = [key for victim in answer.names for key in self._keys.listed(kind, victim)]
            await self._call(call, int, "evict", [*self._keys.ledger(kind), *entries], *answer.names_and_ends)
        raise Unavailable(f"the index has no room for {kind.value} {name}: all may take {self._quota.max_bytes} bytes")

    def _entry_keys(self, kind: Kind, name: str) -> list[str]:
        return [*self._keys.entry(kind, name), *self._keys.ledger(kind)]

    async def _call(
        self, call: Call, read: Callable[[Any], Answer], script: str, keys: Sequence[str | bytes], *args: Value
    ) -> Answer:
        """What `read` makes of a script's answer. Raises Unavailable for whatever goes wrong."""
        answer = await self._index.run(call, script, keys, args)
        try:
            return read(answer)
        except (ValueError, TypeError) as exc:
            raise await self._index.nonsense(exc) from exc


def _prefix_names(model_fingerprint: str, hashes: Sequence[int]) -> bytes:
    """Eight bytes for each prefix that set it apart from the same tokens to another model."""
    fingerprint = require_text("model_fingerprint", model_fingerprint)
    salt = hashlib.blake2b(fingerprint.encode(), digest_size=16).digest()
    digests = (hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8, key=salt).digest() for number in hashes)
    return b"".join(digests)


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)
