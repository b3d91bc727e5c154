"""Starting and ending the processes of one machine, with the event loop in any thread."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from bough.client import Client
from bough.processes.launch import Cluster, launched
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
