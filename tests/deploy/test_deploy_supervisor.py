"""Real programs under a supervisor: that it notices each way in which one stops serving, and ends what it started."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bough.client import Client
from bough.errors import ConfigError, Unavailable
from bough.generation import Finished, GenerateOptions, TextPrompt
from bough.registry import Registry
from bough.simulation.profile import load_profile
from deploy.child import python, start, stop
from deploy.index import IndexServer
from deploy.settings import IndexSettings, Role, read_program
from deploy.supervisor import Supervisor

HOST = "127.0.0.1"
PROFILE = Path(__file__).parent.parent.parent / "loadtest" / "data" / "cluster-profile.json"


@asynccontextmanager
async def supervised(
    role: Role, index_url: str, folder: Path, program: dict[str, Any], **supervision: float
) -> AsyncIterator[Supervisor]:
    user_config = {"program": program, "log_folder": str(folder), **supervision}
    supervisor = Supervisor(read_program(role, user_config), HOST, index_url)
    try:
        await supervisor.start()
        yield supervisor
    finally:
        await supervisor.stop()


async def checked_until_it_fails(supervised: Supervisor | IndexServer) -> None:
    while True:
        await supervised.check()
        await asyncio.sleep(0.05)


def process_id(supervisor: Supervisor) -> int:
    assert supervisor._child is not None
    return supervisor._child.process.pid


async def test_a_program_serves_where_it_says_and_leaves_when_it_is_stopped(index_url: str, tmp_path: Path) -> None:
    program = {"simulate": str(PROFILE), "namespace": "supervised"}
    registry = Registry(index_url, "supervised")
    async with supervised(Role.TARGET, index_url, tmp_path, program) as target:
        await target.check()
        assert [record.address for record in await registry.workers()] == [target.address]
        assert (await target.info()).kind == "target"
    assert await registry.workers() == [], "it has taken its leave"
    with pytest.raises(ProcessLookupError):
        os.kill(process_id(target), 0)
    await registry.close()


async def test_a_program_that_died_is_told_with_its_last_words(index_url: str, tmp_path: Path) -> None:
    program = {"simulate": str(PROFILE), "namespace": "died"}
    async with supervised(Role.DRAFT, index_url, tmp_path, program) as draft:
        os.kill(process_id(draft), signal.SIGKILL)
        with pytest.raises(Unavailable, match=r"draft_worker was killed by SIGKILL; the last lines of .*\n.*ready at"):
            await checked_until_it_fails(draft)


async def test_a_program_that_cannot_start_says_why(index_url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"target_worker ended with status 2;.*\n.*error: .*nowhere"):
        async with supervised(Role.TARGET, index_url, tmp_path, {"simulate": "nowhere"}):
            pass


async def test_a_program_that_is_silent_is_ended(index_url: str, tmp_path: Path) -> None:
    """Stopped by a signal it keeps its connections and says nothing, as one that hangs."""
    program = {"simulate": str(PROFILE), "namespace": "silent"}
    async with supervised(Role.DRAFT, index_url, tmp_path, program, silent_seconds=0.5) as draft:
        os.kill(process_id(draft), signal.SIGSTOP)
        with pytest.raises(Unavailable, match="has not answered for"):
            await checked_until_it_fails(draft)
        await asyncio.to_thread(lambda: draft._child.process.wait(30))  # type: ignore[union-attr]  # it was started
        with pytest.raises(Unavailable, match="was killed by SIGKILL"):
            await draft.check()


async def test_a_sweep_that_never_ends_is_a_stall(index_url: str, tmp_path: Path) -> None:
    """The program answers all the while; idle for longer than that it is left alone."""
    profile = json.loads(PROFILE.read_text())
    profile["target"] |= {"link_seconds": 3600.0}
    slow = tmp_path / "slow.json"
    slow.write_text(json.dumps(profile))
    assert load_profile(str(slow)).target.link_seconds == 3600.0
    common = {"namespace": "stall"}
    async with (
        supervised(Role.TARGET, index_url, tmp_path, {"simulate": str(slow), **common}, stall_seconds=1.0) as target,
        supervised(Role.ORCHESTRATOR, index_url, tmp_path, {"port": 0, "draft": "none", **common}) as orchestrator,
    ):
        for _ in range(15):
            await target.check()
            await asyncio.sleep(0.1)
        async with Client(orchestrator.address, patience_seconds=0.1) as client:
            asking = asyncio.create_task(ask(client))
            with pytest.raises(Unavailable, match=r"has 1 calls, and no pass has ended for"):
                await checked_until_it_fails(target)
            asking.cancel()
        assert (await orchestrator.loads()).max_requests_running > 0
        await orchestrator.check()


async def ask(client: Client) -> Finished:
    async for event in client.generate(TextPrompt("a"), GenerateOptions(max_tokens=4)):
        if isinstance(event, Finished):
            return event
    raise AssertionError("a stream ends with Finished")


async def test_what_runs_is_finished_before_a_program_is_ended(index_url: str, tmp_path: Path) -> None:
    common = {"namespace": "drain"}
    async with supervised(Role.TARGET, index_url, tmp_path, {"simulate": str(PROFILE), **common}):
        orchestrated = supervised(Role.ORCHESTRATOR, index_url, tmp_path, {"port": 0, "draft": "none", **common})
        async with orchestrated as orchestrator, Client(orchestrator.address) as client:
            while not (await client.server_info()).workers:
                await asyncio.sleep(0.05)
            asking = asyncio.create_task(ask_long(client))
            while not (await orchestrator.loads()).num_requests_running:
                await asyncio.sleep(0.05)
            await orchestrator.stop()
            assert (await asking).usage.completion_tokens == 40


async def ask_long(client: Client) -> Finished:
    async for event in client.generate(TextPrompt("a"), GenerateOptions(max_tokens=40, ignore_eos=True)):
        if isinstance(event, Finished):
            return event
    raise AssertionError("a stream ends with Finished")


async def test_an_index_is_supervised_as_well(tmp_path: Path) -> None:
    index = IndexServer(IndexSettings(port=free_port()), HOST)
    try:
        await index.wait()
        await index.check()
        second = IndexServer(IndexSettings(port=int(index.url.rpartition(":")[2])), HOST)
        with pytest.raises(ConfigError, match=r"index ended with status 1;(.|\n)*in use"):
            await second.wait()  # although the first one answers there
        await second.stop()
        index._child.process.kill()
        await asyncio.to_thread(index._child.process.wait)
        with pytest.raises(Unavailable, match="index was killed by SIGKILL"):
            await checked_until_it_fails(index)
    finally:
        await index.stop()


async def test_a_program_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    child = start("stubborn", [python("x", [])[0], "-c", code], {}, 0, str(tmp_path))
    while "up" not in child.tail():
        await asyncio.sleep(0.02)
    await stop(child, 0.1)
    assert child.process.returncode == -signal.SIGKILL


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
