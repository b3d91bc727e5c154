"""The index: leases, sessions, and what is left when it is gone or full of nonsense."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio

from bough.config import OrchestratorConfig, TargetConfig, parse
from bough.errors import ConfigError, Unavailable
from bough.heartbeat import registered
from bough.launch import Cluster, Settings
from bough.records import SessionRecord, WorkerRecord
from bough.registry import Registry

WORKER = WorkerRecord("draft", "draft-1", "127.0.0.1:9")


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """An index of its own, and nothing else."""
    nothing = Settings(parse(TargetConfig, "t", ["--model", "x"], {}), None, parse(OrchestratorConfig, "o", [], {}))
    cluster = Cluster(nothing, tmp_path)
    cluster.start_index()
    yield cluster
    cluster.stop_all()


@pytest.fixture
async def registry(cluster: Cluster) -> AsyncIterator[Registry]:
    registry = Registry(cluster.index_url)
    for _ in range(100):
        try:
            await registry.ping()
            break
        except Unavailable:
            await asyncio.sleep(0.05)
    yield registry
    await registry.close()


async def test_leases_run_out_by_the_servers_clock(registry: Registry) -> None:
    await registry.register(WORKER, lease_seconds=0.2)
    assert await registry.workers() == [WORKER]
    await asyncio.sleep(0.3)
    assert await registry.workers() == []


async def test_a_registered_worker_stays_until_it_leaves(registry: Registry) -> None:
    async with registered(registry, lambda: WORKER):
        assert await registry.workers() == [WORKER]
    assert await registry.workers() == []


async def test_workers_come_back_after_the_index_lost_everything(registry: Registry, cluster: Cluster) -> None:
    raw = redis.asyncio.from_url(cluster.index_url)
    async with registered(registry, lambda: WORKER):
        await raw.flushall()
        assert await registry.workers() == []
        for _ in range(100):
            if await registry.workers():
                break
            await asyncio.sleep(0.05)
        assert await registry.workers() == [WORKER]
    await raw.aclose()


async def test_entries_that_cannot_be_read_are_passed_over(registry: Registry, cluster: Cluster) -> None:
    raw = redis.asyncio.from_url(cluster.index_url)
    await registry.register(WORKER)
    await raw.hset("bough:workers:records", "x", b"\xff{")
    await raw.hset("bough:workers:records", "y", b'{"kind": "draft"}')
    assert await registry.workers() == [WORKER]
    await raw.hset("bough:session:s", mapping={"epoch": "many"})
    assert await registry.load_session("s") is None
    await raw.aclose()


async def test_sessions_are_written_piece_by_piece_and_twice_without_harm(registry: Registry) -> None:
    assert await registry.load_session("s") is None
    first = SessionRecord("s", "t1", "d1", 5, 2, 2, (1, 2, 3))
    second = SessionRecord("s", "t1", "", 5, 4, 3, (1, 2, 3, 70_000, 5))
    for record, start in ((first, 0), (second, 3), (second, 3)):
        await registry.record_session(record, start)
        assert await registry.load_session("s") == record
    shorter = SessionRecord("s", "t2", "d1", 6, 1, 1, (1, 9))
    await registry.record_session(shorter, 0)
    assert await registry.load_session("s") == shorter
    await registry.drop_session("s")
    assert await registry.load_session("s") is None


async def test_a_dead_index_is_unavailable_within_seconds_and_never_a_hang(
    registry: Registry, cluster: Cluster
) -> None:
    cluster.children["index"].process.kill()
    cluster.children["index"].process.wait()
    with pytest.raises(Unavailable, match=r"the index at redis://127\.0\.0\.1"):
        await asyncio.wait_for(registry.workers(), 10)


def test_urls_are_checked_and_passwords_kept() -> None:
    assert "secret" not in Registry("redis://:secret@host:1/0").safe_url
    with pytest.raises(ConfigError, match="index_url: nonsense"):
        Registry("nonsense")
