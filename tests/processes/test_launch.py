"""Starting and ending the processes of one machine, with the event loop in any thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bough.client import Client
from bough.config.processes import OrchestratorConfig, TargetConfig, parse
from bough.processes.launch import Cluster, Settings, launched
from tests.fakes.simulated import simulated_settings, write_profile


@pytest.mark.pipeline
def test_an_event_loop_outside_the_main_thread_starts_and_ends_processes(tmp_path: Path) -> None:
    """As in an actor of Ray's, where no signal handler can be installed."""
    profile = write_profile(tmp_path)
    ended: list[Cluster] = []

    async def use() -> None:
        settings = simulated_settings(profile, profile)
        async with launched(settings, lambda _: None) as cluster, Client(cluster.address) as client:
            assert len((await client.server_info()).workers) == 2
        ended.append(cluster)

    thread = threading.Thread(target=lambda: asyncio.run(use()))
    thread.start()
    thread.join()
    (cluster,) = ended
    assert all(child.has_ended() for child in cluster.children.values())


@pytest.mark.pipeline
async def test_the_event_loop_continues_while_processes_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    went_on = threading.Event()
    outcomes: list[bool] = []
    monkeypatch.setattr(Cluster, "start_all", lambda _: asyncio.get_running_loop().call_later(0.05, went_on.set))
    monkeypatch.setattr(Cluster, "stop_all", lambda _: outcomes.append(went_on.wait(60)))

    async def is_ready(*_: object) -> None:
        return None

    monkeypatch.setattr(Cluster, "wait_until_ready", is_ready)
    profile = write_profile(tmp_path)
    async with launched(simulated_settings(profile, profile), lambda _: None):
        pass
    assert outcomes == [True]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, ...]]:
    """Command lines by the names of the processes, which are not started."""
    commands: dict[str, tuple[str, ...]] = {}

    def start(_: Cluster, name: str, command: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
        commands[name] = tuple(command)
        assert name.startswith("stage_") != bool(variables), "stages alone need no index"

    monkeypatch.setattr(Cluster, "start", start)
    return commands


def test_a_target_of_stages_is_a_head_and_processes_that_join_it(
    tmp_path: Path, started: dict[str, tuple[str, ...]]
) -> None:
    flags = ["--model", "m", "--stages", "3", "--device-memory", "2GB", "--kv-memory", "1GB", "--dtype", "float32"]
    target = parse(TargetConfig, "t", flags, {})
    settings = Settings(target, None, parse(OrchestratorConfig, "o", [], {}), "redis://127.0.0.1:1")
    Cluster(settings, tmp_path).start_all()
    assert [*started] == ["target_worker", "stage_1", "stage_2", "orchestrator"]
    head, *stages = (parsed(started[name]) for name in ("target_worker", "stage_1", "stage_2"))
    assert head.port > 0, "the stages must know it"
    assert head == replace(target, port=head.port)
    joining = replace(target, stages=1, stage_of=f"127.0.0.1:{head.port}", port=0, metrics_port=-1)
    assert stages == [joining, joining]


def test_the_head_has_the_port_that_a_user_gives(tmp_path: Path, started: dict[str, tuple[str, ...]]) -> None:
    target = parse(TargetConfig, "t", ["--model", "m", "--stages", "2", "--host", "10.0.0.1", "--port", "7412"], {})
    settings = Settings(target, None, parse(OrchestratorConfig, "o", [], {}), "redis://127.0.0.1:1")
    Cluster(settings, tmp_path).start_all()
    assert parsed(started["target_worker"]) == target
    assert parsed(started["stage_1"]).stage_of == "10.0.0.1:7412"


def test_a_target_of_one_process_has_no_stages(tmp_path: Path, started: dict[str, tuple[str, ...]]) -> None:
    target = parse(TargetConfig, "t", ["--model", "m"], {})
    settings = Settings(target, None, parse(OrchestratorConfig, "o", [], {}), "redis://127.0.0.1:1")
    Cluster(settings, tmp_path).start_all()
    assert [*started] == ["target_worker", "orchestrator"]
    assert parsed(started["target_worker"]) == target


def parsed(command: Sequence[str]) -> TargetConfig:
    """The settings that a target's process reads from its command line."""
    flags = command[command.index("target_worker") + 1 :]
    return parse(TargetConfig, "t", list(flags), {})
