"""Requests that wait for KV while targets restart, again and again: all end, with the tokens of an undisturbed run."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bough.client import Client
from bough.config.processes import OrchestratorConfig, parse
from bough.processes.launch import TARGET, Cluster
from bough.protocol.generation import GenerateOptions
from bough.simulation.pair import simulated_pair
from tests.conftest import pipeline
from tests.fakes.simulated import simulated_settings, text_of, write_profile
from tests.fakes.streams import Seen, read

pytestmark = pytest.mark.chaos

SLOW = {
    "link_seconds": 0.25,
    "compute_base_seconds": 0.01,
    "compute_row_seconds": 0.0001,
    "kv_tokens": 110,
    "max_nodes": 8,
}
OTHER = "other target"
NUM_REQUESTS = 14  # of which the targets have KV for four
OPTIONS = GenerateOptions(max_tokens=25, ignore_eos=True, temperature=0.8)
SECONDS_BETWEEN = 3.0  # restarts; a target lives long enough for some rounds, or losses in a row would be certain


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
async def test_requests_waiting_for_kv_survive_restarts(tmp_path: Path, signal_number: int) -> None:
    """Refused connections and polls for room counted as failures of the request: 8 of 14 ended as INTERNAL."""
    profile = write_profile(tmp_path, target=SLOW, clock_scale=1)
    pair, config = simulated_pair(str(profile)), simulated_settings(profile, None)
    orchestrator = parse(OrchestratorConfig, "o", ["--port", "0", "--draft", "none"], {})
    target = replace(config.target, drain_seconds=2.0)
    async with pipeline(replace(config, target=target, orchestrator=orchestrator)) as cluster:
        cluster.start(OTHER, cluster.children[TARGET].command, cluster.children[TARGET].variables)
        async with Client(cluster.address) as client:
            options = [replace(OPTIONS, seed=seed) for seed in range(NUM_REQUESTS)]
            reading = [asyncio.create_task(read(client, each)) for each in options]
            await restarted(cluster, signal_number, lambda: all(task.done() for task in reading))
            seen = await asyncio.gather(*reading, return_exceptions=True)
    failed = [one for one in seen if not isinstance(one, Seen)]
    assert not failed
    for each, one in zip(options, seen, strict=True):
        assert isinstance(one, Seen)
        assert one.token_ids == text_of(pair, each.seed or 0, one.started.prompt_tokens, OPTIONS.max_tokens)


async def restarted(cluster: Cluster, signal_number: int, is_enough: Callable[[], bool]) -> None:
    """Restart the targets in turn until it is enough; after this many times they are left alone, so all end."""
    for name in (TARGET, OTHER) * 5:
        await asyncio.sleep(SECONDS_BETWEEN)
        if is_enough():
            return
        cluster.children[name].process.send_signal(signal_number)
        await asyncio.to_thread(cluster.children[name].process.wait)
        cluster.restart(name)
