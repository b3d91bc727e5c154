"""The index: who is alive and where, and what is probably true of each session. The only file that knows Redis.

Nothing here is the truth (DESIGN.md, rule 4). A caller acts on what workers answer; whoever reads a wrong entry loses
time. Every operation is one script in `bough/lua`, by the server's clock; every entry ends some time after its last
use. All of it may be lost at any moment: heartbeats and the next record of each running session bring it back. Any
Redis 6.2 or Valkey server will do.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.typing import EncodableT

from bough.errors import ConfigError, StaleEpoch, Unavailable
from bough.index_answers import (
    INCOMPLETE,
    STALE,
    read_claim,
    read_holder,
    read_request,
    read_session,
    read_workers,
)
from bough.index_url import refuse_unknown, without_passwords
from bough.records import TOKEN_BYTES, Claim, RequestRecord, SessionRecord, WorkerRecord, pack_tokens
from bough.tasks import cancellable

LEASE_SECONDS = 3.0  # a worker that is silent for so long is gone
SESSION_SECONDS = 24 * 3600.0  # after its last round
CLAIM_SECONDS = 3600.0  # of a session of which nothing has been recorded
REQUEST_SECONDS = 3600.0  # after its last round
ENDED_SECONDS = 600.0  # after its end: time to come back for the last words
REGISTRY_SECONDS = 24 * 3600.0  # after the last heartbeat of anyone; the longest lease
MAX_PREFIXES = 16_384  # that are known of a worker: half a million tokens
TIMEOUT_SECONDS = 2.0  # to connect, and to answer
CALL_SECONDS = 6.0  # in all: one more try, and the wait for a turn
MAX_CONNECTIONS = 16
START_SECONDS = 10.0  # that a starting process waits for the index

Answer = TypeVar("Answer")


class Registry:
    """A client of the index; every failure of it is Unavailable, within seconds."""

    def __init__(self, url: str, namespace: str = "bough", session_seconds: float = SESSION_SECONDS) -> None:
        """A session is kept for `session_seconds` after its last round."""
        self.safe_url = without_passwords(url)
        self._namespace, self._session_seconds = namespace, session_seconds
        try:
            self._redis = redis.asyncio.Redis.from_pool(_pool(url))
            self._turns = asyncio.Semaphore(MAX_CONNECTIONS)  # first come, first served, as redis-py's own queue is not
        except (ValueError, TypeError) as exc:
            raise ConfigError(f"index_url: {self.safe_url}: {exc}") from exc
        folder = Path(__file__).parent / "lua"
        prelude = (folder / "prelude.lua").read_text()
        self._scripts = {
            path.stem: self._redis.register_script(prelude + path.read_text())
            for path in folder.glob("*.lua")
            if path.stem != "prelude"
        }

    async def close(self) -> None:
        """Gives the connections back."""
        await self._redis.aclose()

    async def ping(self) -> None:
        """Raises Unavailable where the index does not answer."""
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
        keys = self._worker_keys(record.worker_id)
        times = (_milliseconds(lease_seconds), _milliseconds(REGISTRY_SECONDS))
        await self._call(int, "register", keys, record.worker_id, record.to_json(), *times)

    async def deregister(self, worker_id: str) -> None:
        """Takes a worker out at once."""
        await self._call(int, "deregister", self._worker_keys(worker_id), worker_id)

    async def workers(self) -> list[WorkerRecord]:
        """All workers whose lease has not run out; an entry that cannot be read is passed over."""
        return await self._call(read_workers, "live", self._registry_keys())

    async def sweep_expired(self) -> int:
        """Removes workers whose lease has run out, and whatever belonged to them; how many they were."""
        return await self._call(int, "sweep_expired", self._registry_keys(), self._prefix_key(""))

    async def claim_session(self, session_id: str, holder_id: str, epoch: int | None = None) -> Claim:
        """A new epoch, greater than any before; from now on writes of earlier ones are refused.

        Raises:
            StaleEpoch: an `epoch` is given, and the session has been claimed since.
            Unavailable: the index does not answer.
        """
        keys, fence = self._session_keys(session_id), "" if epoch is None else epoch
        times = (_milliseconds(self._session_seconds), _milliseconds(CLAIM_SECONDS))
        claimant = f"{holder_id}/{secrets.token_hex(8)}"  # the same call may reach the index twice
        claim = await self._call(partial(read_claim, session_id), "claim_session", keys, claimant, *times, fence)
        if claim is None:
            raise StaleEpoch(f"session {session_id}: epoch {epoch} is over; it has been claimed by another")
        return claim

    async def record_session(self, record: SessionRecord, first_new: int) -> None:
        """Writes a session's entry; its tokens from `first_new` on, or all where the index lacks those before.

        Writing the same again changes nothing, nor does a write that a later one of its epoch has overtaken.

        Raises:
            StaleEpoch: the session has been claimed since this epoch.
            Unavailable: the index does not answer.
        """
        keys, progress = self._session_keys(record.session_id), len(record.tokens)
        await self._record(keys, record, progress, first_new, self._session_seconds)

    async def load_session(self, session_id: str) -> SessionRecord | None:
        """What is known of a session; None for nothing, or for nonsense."""
        return await self._call(partial(read_session, session_id), "load", self._session_keys(session_id))

    async def drop_session(self, session_id: str, epoch: int | None = None) -> None:
        """Forgets a session. Raises StaleEpoch where it has been claimed since the given epoch."""
        keys, fence = self._session_keys(session_id), "" if epoch is None else epoch
        if await self._call(int, "drop_session", keys, fence) == STALE:
            raise StaleEpoch(f"session {session_id}: epoch {epoch} is over; it has been claimed by another")

    async def record_request(self, record: RequestRecord, first_new: int) -> None:
        """Writes a request's entry and its tokens as `record_session` does, with the same errors."""
        has_ended = bool(record.finish_reason)
        keep_seconds = ENDED_SECONDS if has_ended else REQUEST_SECONDS
        progress = 2 * len(record.tokens) + has_ended
        await self._record(self._request_keys(record.request_id), record, progress, first_new, keep_seconds)

    async def load_request(self, request_id: str) -> RequestRecord | None:
        """What is known of a request; None for nothing, or for nonsense."""
        return await self._call(partial(read_request, request_id), "load", self._request_keys(request_id))

    async def note_prefixes(self, model_fingerprint: str, hashes: Sequence[int], worker_id: str) -> None:
        """A worker with a lease holds these (`bough.prefix.block_hashes`); of too many the oldest are forgotten."""
        keys, names = self._worker_keys(worker_id), _prefix_names(model_fingerprint, hashes)
        longest_lease = _milliseconds(REGISTRY_SECONDS)
        await self._call(int, "note_prefixes", [keys[0], keys[2]], worker_id, names, MAX_PREFIXES, longest_lease)

    async def find_prefix(self, model_fingerprint: str, hashes: Sequence[int]) -> tuple[str, int] | None:
        """The live worker that holds most leading blocks, and how many; of several the one with fewest sessions."""
        names = _prefix_names(model_fingerprint, hashes)
        return await self._call(read_holder, "find_prefix", self._registry_keys(), self._prefix_key(""), names)

    async def _record(
        self,
        keys: list[str],
        record: SessionRecord | RequestRecord,
        progress: int,
        first_new: int,
        keep_seconds: float,
    ) -> None:
        entry, keep = (record.epoch, progress, record.to_json()), _milliseconds(keep_seconds)
        for first in (first_new, 0):
            tokens = pack_tokens(record.tokens[first:])
            answer = await self._call(int, "record", keys, *entry, first * TOKEN_BYTES, tokens, keep)
            if answer == STALE:
                raise StaleEpoch(f"session {record.session_id}: epoch {record.epoch} is over; another has begun")
            if answer != INCOMPLETE:
                return

    def _registry_keys(self) -> list[str]:
        return [f"{self._namespace}:workers:leases", f"{self._namespace}:workers:records"]

    def _worker_keys(self, worker_id: str) -> list[str]:
        return [*self._registry_keys(), self._prefix_key(worker_id)]

    def _prefix_key(self, worker_id: str) -> str:
        return f"{self._namespace}:prefixes:{worker_id}"

    def _session_keys(self, session_id: str) -> list[str]:
        return [f"{self._namespace}:session:{session_id}", f"{self._namespace}:session-tokens:{session_id}"]

    def _request_keys(self, request_id: str) -> list[str]:
        return [f"{self._namespace}:request:{request_id}", f"{self._namespace}:request-tokens:{request_id}"]

    async def _call(self, read: Callable[[Any], Answer], script: str, keys: Sequence[str], *args: EncodableT) -> Answer:
        """What `read` makes of a script's answer. Raises Unavailable for whatever goes wrong."""
        try:
            with cancellable():
                async with asyncio.timeout(CALL_SECONDS), self._turns:
                    return read(await self._scripts[script](keys=keys, args=args))
        except (RedisError, OSError, TimeoutError) as exc:
            raise Unavailable(f"the index at {self.safe_url} does not answer: {exc}") from exc
        except (ValueError, TypeError) as exc:  # redis-py, too, stumbles over what no such server would say
            await self._redis.connection_pool.disconnect()
            raise Unavailable(f"what answers at {self.safe_url} is no index: {exc}") from exc


def _pool(url: str) -> redis.asyncio.ConnectionPool:
    """Connections to a server, none of them made yet. Raises ValueError or TypeError for a URL with something wrong."""
    refuse_unknown(url)
    pool = redis.asyncio.ConnectionPool.from_url(
        url,
        max_connections=MAX_CONNECTIONS,
        socket_timeout=TIMEOUT_SECONDS,
        socket_connect_timeout=TIMEOUT_SECONDS,
        retry=Retry(NoBackoff(), 1),  # one, for a connection that the server has closed meanwhile
    )
    pool.make_connection()  # type: ignore[no-untyped-call]  # it reads its settings, and connects to nothing
    return pool


def _prefix_names(model_fingerprint: str, hashes: Sequence[int]) -> bytes:
    """Eight bytes for each prefix that set it apart from the same tokens to another model."""
    salt = hashlib.blake2b(model_fingerprint.encode(), digest_size=16).digest()
    digests = (hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8, key=salt).digest() for number in hashes)
    return b"".join(digests)


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)
