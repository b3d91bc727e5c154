"""Real programs under a supervisor: that it notices each way in which one stops serving, and ends what it started."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from bough.client import Client
from bough.config.addresses import free_port
from bough.errors import ConfigError, Unavailable
from bough.processes.child import open_program, stop_program, temporary_folder
from bough.protocol.generation import Finished, GenerateOptions, TextPrompt
from bough.registry.registry import Registry
from bough.simulation.profile import load_profile
from deploy import supervisor as supervisor_module
from deploy.index import HeadPlace, IndexPlace
from deploy.settings import Role, read_program
from deploy.supervisor import Supervisor
from tests.fakes.processes.supervised import HOST, PROFILE, checked_until_it_fails, supervised
from tests.fakes.waiting import until

pytestmark = pytest.mark.pipeline


def process_id(supervisor: Supervisor) -> int:
    assert supervisor._child is not None
    return supervisor._child.process.pid


async def test_a_program_serves_at_its_address_and_ends_when_stopped(index_url: str, tmp_path: Path) -> None:
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


async def test_a_dead_program_is_reported_with_its_last_lines(index_url: str, tmp_path: Path) -> None:
    program = {"simulate": str(PROFILE), "namespace": "died"}
    async with supervised(Role.DRAFT, index_url, tmp_path, program) as draft:
        os.kill(process_id(draft), signal.SIGKILL)
        with pytest.raises(
            Unavailable, match=r"draft_worker was killed by SIGKILL; the last lines of .*\n(.|\n)*ready at"
        ):
            await checked_until_it_fails(draft)


async def test_a_program_that_cannot_start_reports_why(index_url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"target_worker ended with status 2;.*\n(.|\n)*error: .*nowhere"):
        async with supervised(Role.TARGET, index_url, tmp_path, {"simulate": "nowhere"}):
            pass


async def test_a_silent_program_is_ended(index_url: str, tmp_path: Path) -> None:
    """Stopped by a signal it keeps its connections and says nothing, as one that hangs."""
    program = {"simulate": str(PROFILE), "namespace": "silent"}
    async with supervised(Role.DRAFT, index_url, tmp_path, program, silent_seconds=0.5) as draft:
        os.kill(process_id(draft), signal.SIGSTOP)
        with pytest.raises(Unavailable, match="has not answered for"):
            await checked_until_it_fails(draft)
        await asyncio.to_thread(lambda: draft._child.process.wait(30))
        with pytest.raises(Unavailable, match="was killed by SIGKILL"):
            await draft.check()


async def test_a_program_without_calls_is_not_silent(
    index_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Ray's head no check comes. The first one after that ended a program whose answer was late once."""
    program = {"simulate": str(PROFILE), "namespace": "unasked"}
    async with supervised(Role.DRAFT, index_url, tmp_path, program, silent_seconds=2.0) as draft:
        await asyncio.sleep(2.1)
        own = process_id(draft)
        os.kill(own, signal.SIGSTOP)
        with monkeypatch.context() as patched:
            patched.setattr(supervisor_module, "CALL_SECONDS", 0.2)
            await draft.check()
            patched.setattr(supervisor_module, "UNASKED_SECONDS", 1.0)
            await asyncio.sleep(2.1)  # the head went after a check without an answer
            await draft.check()
        os.kill(own, signal.SIGCONT)
        await draft.check()
        assert process_id(draft) == own


async def test_an_endless_sweep_is_a_stall(index_url: str, tmp_path: Path) -> None:
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


async def has_workers(client: Client) -> bool:
    return bool((await client.server_info()).workers)


async def is_busy(orchestrator: Supervisor) -> bool:
    return bool((await orchestrator.loads()).num_requests_running)


async def test_running_requests_finish_before_a_program_is_ended(index_url: str, tmp_path: Path) -> None:
    common = {"namespace": "drain"}
    async with supervised(Role.TARGET, index_url, tmp_path, {"simulate": str(PROFILE), **common}):
        orchestrated = supervised(Role.ORCHESTRATOR, index_url, tmp_path, {"port": 0, "draft": "none", **common})
        async with orchestrated as orchestrator, Client(orchestrator.address) as client:
            await until(lambda: has_workers(client))
            asking = asyncio.create_task(ask_long(client))
            await until(lambda: is_busy(orchestrator))
            await orchestrator.stop()
            assert (await asking).usage.completion_tokens == 40


async def ask_long(client: Client) -> Finished:
    async for event in client.generate(TextPrompt("a"), GenerateOptions(max_tokens=40, ignore_eos=True)):
        if isinstance(event, Finished):
            return event
    raise AssertionError("a stream ends with Finished")


async def test_another_process_on_a_fixed_port_is_not_mistaken_for_the_program(index_url: str, tmp_path: Path) -> None:
    """One of another namespace answers there as ours would, before ours has found its port in use."""
    stranger = {"simulate": str(PROFILE), "namespace": "stranger", "port": free_port(HOST), "drain_seconds": 0}
    async with supervised(Role.TARGET, index_url, tmp_path, stranger):
        with pytest.raises(
            ConfigError, match=rf"program\.port: must be free at 127.*, got {stranger['port']}, which is in use"
        ):
            async with supervised(Role.DRAFT, index_url, tmp_path, {**stranger, "namespace": "ours"}):
                pass
    async with supervised(Role.DRAFT, index_url, tmp_path, stranger) as again:
        await again.check()


@pytest.mark.parametrize("is_by_port", [True, False])
async def test_a_program_waits_for_processes_of_a_dead_replica(
    index_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_by_port: bool
) -> None:
    """It drains: a target started meanwhile found the GPU's memory or the port in use."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    program = {"simulate": str(PROFILE), "namespace": "turns", "port": free_port(HOST) if is_by_port else 0}
    async with supervised(Role.DRAFT, index_url, tmp_path, program) as before:
        after = Supervisor(before.settings, HOST, IndexPlace(index_url))
        starting = asyncio.create_task(after.start())
        await asyncio.sleep(0.5)
        assert after._child is None
        os.kill(process_id(before), signal.SIGKILL)
        await starting
        await after.check()
        await after.stop()


async def test_a_program_does_not_wait_forever(index_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts may share a GPU; a port is reported as in use."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(supervisor_module, "REPLICA_ENDING_SECONDS", 0.0)
    program = {"simulate": str(PROFILE), "namespace": "turns", "drain_seconds": 0}
    for port in (0, free_port(HOST)):
        async with supervised(Role.DRAFT, index_url, tmp_path, {**program, "port": port}) as before:
            beside = Supervisor(before.settings, HOST, IndexPlace(index_url))
            if port:
                with pytest.raises(
                    ConfigError, match=rf"program\.port: must be free at .*, got {port}, which is in use"
                ):
                    await beside.start()
            else:
                await beside.start()
                await before.check()
            await beside.stop()


async def test_a_program_drains_as_long_as_its_supervisor_waits(
    index_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOUGH_DRAFT_DRAIN_SECONDS", "3600")
    async with supervised(Role.DRAFT, index_url, tmp_path, {"simulate": str(PROFILE), "namespace": "long"}) as draft:
        assert draft._child is not None
        flags = draft._child.command
        assert float(flags[flags.index("--drain-seconds") + 1]) == draft.settings.config.drain_seconds == 25


async def test_a_stage_gets_its_heads_address_and_no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's variable for heads would make it refuse to start."""
    monkeypatch.setenv("BOUGH_TARGET_STAGES", "2")
    started = list[tuple[Any, ...]]()
    monkeypatch.setattr(supervisor_module, "open_program", lambda *given: started.append(given))
    stage = Supervisor(read_program(Role.STAGE, {"program": {"model": "m"}}), HOST, HeadPlace("10.0.0.1:7421"))
    await stage._started()
    ((module, command, variables, *_),) = started
    assert module == "target_worker"
    assert command[command.index("--stage-of") + 1] == "10.0.0.1:7421"
    assert command[command.index("--stages") + 1] == "1"
    assert "BOUGH_TARGET_INDEX_URL" not in variables
    await stage.stop()


async def test_a_stage_that_is_not_serving_any_more_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no call that a supervisor could make but its health check."""
    answers, program = [True], Mock()
    program.has_ended.return_value = False

    async def is_serving(*_: object) -> bool:
        return answers[-1]

    monkeypatch.setattr(supervisor_module, "is_serving", is_serving)
    monkeypatch.setattr(supervisor_module, "open_program", lambda *_: program)
    settings = read_program(Role.STAGE, {"program": {"model": "m"}, "silent_seconds": 2.0})
    stage = Supervisor(settings, HOST, HeadPlace("10.0.0.1:7421"))
    await stage.start()
    await stage.check()
    answers.append(False)
    await stage.check()
    assert not program.process.kill.called, "it may answer again"
    with pytest.raises(Unavailable, match=r"target_worker at .* has not answered for .*; its process was killed"):
        await checked_until_it_fails(stage)
    program.process.kill.assert_called_once()


async def test_a_log_is_stored_in_a_readable_folder(
    index_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    asked_for, temporary = tmp_path / "asked-for", temporary_folder()
    program = {"simulate": str(PROFILE), "namespace": "logs"}
    async with supervised(Role.DRAFT, index_url, asked_for, program):
        pass
    assert len([*asked_for.glob("draft_worker-*.log")]) == 1
    settings = read_program(Role.DRAFT, {"program": program})
    for is_killed in (False, True):
        draft = Supervisor(settings, HOST, IndexPlace(index_url))
        await draft.start()
        if is_killed:
            os.kill(process_id(draft), signal.SIGKILL)
        await draft.stop()
        assert len([*temporary.glob("*.log")]) == is_killed, "of one that crashed it is all that is left"


def test_a_log_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name, another one for each user, can be guessed; another user who created it could replace logs and locks."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = temporary_folder()
    assert folder == tmp_path / f"bough-{os.getuid()}"
    assert folder.stat().st_mode & 0o77 == 0
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    (tmp_path / "bough-12345").mkdir()
    with pytest.raises(ConfigError, match=r"bough-12345: must be this user's own folder .* got that of user"):
        temporary_folder()
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="got a link"):
        temporary_folder()


async def test_a_program_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    child = open_program("stubborn", [sys.executable, "-c", code], {}, 0, str(tmp_path))
    await until(lambda: "up" in child.tail())
    await stop_program(child, 0.1)
    assert child.process.returncode == -signal.SIGKILL
