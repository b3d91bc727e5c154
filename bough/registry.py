"""The index: who is alive and where, and what is probably true of each session. The only file that knows Redis.

Nothing here is the truth (DESIGN.md, rule 4). A caller acts on what workers answer; whoever reads a wrong entry loses
time. Every operation is one script in `bough/lua`, by the server's clock; every entry ends some time after its last
use. All of it may be lost at any moment: heartbeats and the next record of each running session bring it back. Any
Redis 6.2 or Valkey server will do.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.typing import EncodableT

from bough.errors import ConfigError, StaleEpoch, Unavailable
from bough.records import TOKEN_BYTES, Claim, RequestRecord, SessionRecord, WorkerRecord, pack_tokens

LEASE_SECONDS = 3.0  # a worker that is silent for so long is gone
SESSION_SECONDS = 24 * 3600.0  # after its last round
CLAIM_SECONDS = 3600.0  # of a session of which nothing has been recorded
REQUEST_SECONDS = 3600.0  # after its last round: time to come back for the rest
REGISTRY_SECONDS = 24 * 3600.0  # after the last heartbeat of anyone; the longest lease
MAX_PREFIXES = 16_384  # that are known of a worker: half a million tokens
TIMEOUT_SECONDS = 2.0  # to connect, and to answer
CALL_SECONDS = 6.0  # in all: one more try, and the wait for a connection
MAX_CONNECTIONS = 16
START_SECONDS = 10.0  # that a starting process waits for the index
SETTINGS = {"db", "username", "password", "client_name"}  # in the query of a URL, beside those of TLS

# What a script answers.
STALE, INCOMPLETE = -1, 0


class Registry:
    """A client of the index; every failure of it is Unavailable, within seconds."""

    def __init__(self, url: str, namespace: str = "bough", session_seconds: float = SESSION_SECONDS) -> None:
        """A session is kept for `session_seconds` after its last round."""
        self.safe_url = _without_passwords(url)
        self._namespace, self._session_seconds = namespace, session_seconds
        try:
            self._redis = redis.asyncio.Redis.from_pool(_pool(url))
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
        await self._call("register", keys, record.worker_id, record.to_json(), *times)

    async def deregister(self, worker_id: str) -> None:
        """Takes a worker out at once."""
        await self._call("deregister", self._worker_keys(worker_id), worker_id)

    async def workers(self) -> list[WorkerRecord]:
        """All workers whose lease has not run out; an entry that cannot be read is passed over."""
        return _worker_records(await self._call("live", self._registry_keys()))

    async def sweep_expired(self) -> int:
        """Removes workers whose lease has run out, and whatever belonged to them; how many they were."""
        return int(await self._call("sweep_expired", self._registry_keys(), self._prefix_key("")))

    async def claim_session(self, session_id: str, holder_id: str, epoch: int | None = None) -> Claim:
        """A new epoch, greater than any before; from now on writes of earlier ones are refused.

        Raises:
            StaleEpoch: an `epoch` is given, and the session has been claimed since.
            Unavailable: the index does not answer.
        """
        keys, times = (
            self._session_keys(session_id),
            (_milliseconds(self._session_seconds), _milliseconds(CLAIM_SECONDS)),
        )
        answer = await self._call("claim_session", keys, holder_id, *times, "" if epoch is None else epoch)
        if answer == STALE:
            raise StaleEpoch(f"session {session_id}: epoch {epoch} is over; it has been claimed by another")
        return Claim(int(answer[0]), _session(session_id, answer[1:]))

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
        return _session(session_id, await self._call("load", self._session_keys(session_id)))

    async def drop_session(self, session_id: str, epoch: int | None = None) -> None:
        """Forgets a session. Raises StaleEpoch where it has been claimed since the given epoch."""
        if await self._call("drop_session", self._session_keys(session_id), "" if epoch is None else epoch) == STALE:
            raise StaleEpoch(f"session {session_id}: epoch {epoch} is over; it has been claimed by another")

    async def record_request(self, record: RequestRecord, first_new: int) -> None:
        """Writes a request's entry and its tokens as `record_session` does, with the same errors."""
        keys, progress = self._request_keys(record.request_id), 2 * len(record.tokens) + bool(record.finish_reason)
        await self._record(keys, record, progress, first_new, REQUEST_SECONDS)

    async def load_request(self, request_id: str) -> RequestRecord | None:
        """What is known of a request; None for nothing, or for nonsense."""
        data, transcript = await self._call("load", self._request_keys(request_id))
        return RequestRecord.from_json(request_id, data or b"", transcript or b"")

    async def note_prefixes(self, model_fingerprint: str, hashes: Sequence[int], worker_id: str) -> None:
        """A worker with a lease holds these (`bough.prefix.block_hashes`); of too many the oldest are forgotten."""
        keys, names = self._worker_keys(worker_id), _prefix_names(model_fingerprint, hashes)
        longest_lease = _milliseconds(REGISTRY_SECONDS)
        await self._call("note_prefixes", [keys[0], keys[2]], worker_id, names, MAX_PREFIXES, longest_lease)

    async def find_prefix(self, model_fingerprint: str, hashes: Sequence[int]) -> tuple[str, int] | None:
        """The live worker that holds most leading blocks, and how many; of several the one with fewest sessions."""
        names = _prefix_names(model_fingerprint, hashes)
        num_blocks, *holders = await self._call("find_prefix", self._registry_keys(), self._prefix_key(""), names)
        workers = _worker_records(holders)
        if not workers:
            return None
        return min(workers, key=lambda worker: worker.load.num_sessions).worker_id, int(num_blocks)

    async def _record(
        self,
        keys: list[str],
        record: SessionRecord | RequestRecord,
        progress: int,
        first_new: int,
        keep_seconds: float,
    ) -> None:
        entry = (record.epoch, progress, record.to_json())
        for first in (first_new, 0):
            tokens = pack_tokens(record.tokens[first:])
            answer = await self._call("record", keys, *entry, first * TOKEN_BYTES, tokens, _milliseconds(keep_seconds))
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

    async def _call(self, script: str, keys: Sequence[str], *args: EncodableT) -> Any:
        try:
            async with asyncio.timeout(CALL_SECONDS):
                return await self._scripts[script](keys=keys, args=args)
        except (RedisError, OSError, TimeoutError) as exc:
            raise Unavailable(f"the index at {self.safe_url} does not answer: {exc}") from exc


def _pool(url: str) -> redis.asyncio.BlockingConnectionPool:
    """Connections to a server, none of them made yet. Raises ValueError or TypeError for a URL with something wrong."""
    parts = urlsplit(url)
    for name, _ in parse_qsl(parts.query):
        if name not in SETTINGS and not name.startswith("ssl_"):
            raise ValueError(f"{name}: no such setting; {', '.join(sorted(SETTINGS))} and ssl_... would do")
    if parts.scheme in ("redis", "rediss") and not re.fullmatch(r"(/[0-9]*)?", parts.path):
        raise ValueError(f"{parts.path}: no number of a database; one such as /0 would do")
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        url,
        max_connections=MAX_CONNECTIONS,
        timeout=TIMEOUT_SECONDS,
        socket_timeout=TIMEOUT_SECONDS,
        socket_connect_timeout=TIMEOUT_SECONDS,
        retry=Retry(NoBackoff(), 1),  # one, for a connection that the server has closed meanwhile
    )
    pool.make_connection()  # type: ignore[no-untyped-call]  # it reads its settings, and connects to nothing
    return pool


def _session(session_id: str, entry: Sequence[bytes | None]) -> SessionRecord | None:
    data, transcript = entry
    return SessionRecord.from_json(session_id, data or b"", transcript or b"")


def _worker_records(values: Sequence[bytes]) -> list[WorkerRecord]:
    records = [record for value in values if (record := WorkerRecord.from_json(value)) is not None]
    return sorted(records, key=lambda record: record.worker_id)


def _prefix_names(model_fingerprint: str, hashes: Sequence[int]) -> bytes:
    """Eight bytes for each prefix that set it apart from the same tokens to another model."""
    salt = hashlib.blake2b(model_fingerprint.encode(), digest_size=16).digest()
    digests = (hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8, key=salt).digest() for number in hashes)
    return b"".join(digests)


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


def _without_passwords(url: str) -> str:
    password = urlsplit(url).password
    url = url.replace(f":{password}@", ":***@") if password else url
    return re.sub(r"([?&]\w*password=)[^&#]*", r"\1***", url)
