"""The index: who is alive and where, and what is probably true of each session. The only file that knows Redis.

Nothing here is the truth (DESIGN.md, rule 4). A caller acts on what workers answer; whoever reads a wrong entry loses
time. Any Redis 6.2 or Valkey server will do.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.typing import EncodableT, FieldT

from bough.errors import ConfigError, Unavailable

logger = logging.getLogger(__name__)

LEASE_SECONDS = 3.0  # a worker that is silent for so long is gone
HEARTBEAT_SECONDS = 0.75
SESSION_SECONDS = 24 * 3600  # after its last round
TIMEOUT_SECONDS = 2.0
START_SECONDS = 10.0  # that a starting process waits for the index
TOKEN_BYTES = 4  # transcripts are little-endian int32


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A process that has announced itself."""

    kind: str  # "draft", "target" or "orchestrator"
    worker_id: str
    address: str  # host:port


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """Where a session's KV probably is, and its text."""

    session_id: str
    target_id: str
    draft_id: str
    epoch: int
    target_length: int  # tokens that the target is believed to hold
    draft_length: int
    tokens: tuple[int, ...]


class Registry:
    """A client of the index; every failure of it is Unavailable, within seconds."""

    def __init__(self, url: str, namespace: str = "bough") -> None:
        self.safe_url = _without_password(url)
        self._prefix = namespace
        try:
            self._redis = redis.asyncio.from_url(
                url,
                socket_timeout=TIMEOUT_SECONDS,
                socket_connect_timeout=TIMEOUT_SECONDS,
                retry=Retry(NoBackoff(), 1),  # one, for a connection that the server has closed meanwhile
            )
        except ValueError as exc:
            raise ConfigError(f"index_url: {self.safe_url}: {exc}") from exc
        folder = Path(__file__).parent / "lua"
        self._register = self._redis.register_script((folder / "register.lua").read_text())
        self._live = self._redis.register_script((folder / "live.lua").read_text())

    async def close(self) -> None:
        """Gives the connections back."""
        await self._redis.aclose()

    async def ping(self) -> None:
        """Raises Unavailable where the index does not answer."""
        with self._errors():
            await self._redis.ping()

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
        """Announces a worker, or renews its lease."""
        with self._errors():
            await self._register(
                keys=self._worker_keys(),
                args=[record.worker_id, json.dumps(asdict(record)), int(lease_seconds * 1000)],
            )

    async def deregister(self, worker_id: str) -> None:
        """Takes a worker out at once."""
        leases, records = self._worker_keys()
        with self._errors():
            async with self._redis.pipeline() as pipeline:
                pipeline.zrem(leases, worker_id)
                pipeline.hdel(records, worker_id)
                await pipeline.execute()

    async def workers(self) -> list[WorkerRecord]:
        """All workers whose lease has not run out; an entry that cannot be read is passed over."""
        with self._errors():
            values = await self._live(keys=self._worker_keys())
        records = []
        for value in values:
            with suppress(ValueError, TypeError):
                records.append(WorkerRecord(**json.loads(value)))
        return sorted(records, key=lambda record: record.worker_id)

    async def record_session(self, record: SessionRecord, first_new: int) -> None:
        """Writes a session's entry and its tokens from `first_new` on. Writing the same again changes nothing."""
        entry, transcript = self._session_keys(record.session_id)
        fields: dict[FieldT, EncodableT] = {
            name: value for name, value in asdict(record).items() if name not in ("session_id", "tokens")
        }
        with self._errors():
            async with self._redis.pipeline() as pipeline:
                pipeline.hset(entry, mapping=fields)
                pipeline.setrange(transcript, first_new * TOKEN_BYTES, _pack(record.tokens[first_new:]))
                pipeline.hset(entry, "num_tokens", len(record.tokens))
                pipeline.expire(entry, SESSION_SECONDS)
                pipeline.expire(transcript, SESSION_SECONDS)
                await pipeline.execute()

    async def load_session(self, session_id: str) -> SessionRecord | None:
        """What is known of a session; None for nothing, or for nonsense."""
        entry, transcript = self._session_keys(session_id)
        with self._errors():
            async with self._redis.pipeline() as pipeline:
                pipeline.hgetall(entry)
                pipeline.get(transcript)
                raw, data = await pipeline.execute()
        try:
            fields = {key.decode(): value.decode() for key, value in raw.items()}
            tokens = np.frombuffer(data or b"", dtype="<i4")[: int(fields["num_tokens"])]
            return SessionRecord(
                session_id,
                fields["target_id"],
                fields["draft_id"],
                int(fields["epoch"]),
                int(fields["target_length"]),
                int(fields["draft_length"]),
                tuple(tokens.tolist()),
            )
        except (KeyError, ValueError):
            return None

    async def drop_session(self, session_id: str) -> None:
        """Forgets a session."""
        with self._errors():
            await self._redis.delete(*self._session_keys(session_id))

    def _worker_keys(self) -> list[str]:
        return [f"{self._prefix}:workers:leases", f"{self._prefix}:workers:records"]

    def _session_keys(self, session_id: str) -> tuple[str, str]:
        return f"{self._prefix}:session:{session_id}", f"{self._prefix}:transcript:{session_id}"

    @contextmanager
    def _errors(self) -> Any:
        try:
            yield
        except (RedisError, OSError, TimeoutError) as exc:
            raise Unavailable(f"the index at {self.safe_url} does not answer: {exc}") from exc


@asynccontextmanager
async def registered(registry: Registry, record: WorkerRecord) -> AsyncIterator[None]:
    """Keeps a worker's lease alive for as long as the block runs, whatever happens to the index meanwhile."""
    await registry.register(record)
    heartbeat = asyncio.create_task(_beat(registry, record))
    try:
        yield
    finally:
        heartbeat.cancel()
        with suppress(asyncio.CancelledError):
            await heartbeat
        with suppress(Unavailable):
            await registry.deregister(record.worker_id)


async def _beat(registry: Registry, record: WorkerRecord) -> None:
    is_lost = False
    while True:
        await asyncio.sleep(HEARTBEAT_SECONDS)
        try:
            await registry.register(record)
            if is_lost:
                logger.warning("the index at %s answers again", registry.safe_url)
            is_lost = False
        except Unavailable as exc:
            if not is_lost:
                logger.warning("%s; trying on", exc)
            is_lost = True


def _pack(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype="<i4").tobytes()


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return url.replace(f":{parts.password}@", ":***@") if parts.password else url
