"""Processes that die: a draft costs speed only; a target or an index gives a status, never a hang."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import IO

import pytest

from bough.client import Client
from bough.config.processes import OrchestratorConfig, parse
from bough.errors import Unavailable
from bough.health.problems import find_problems
from bough.processes.launch import Cluster
from bough.protocol.generation import Event, Finished, GenerateOptions, Speculation, Started, Tokens
from bough.protocol.messages import VerifyCall
from bough.registry.registry import Registry
from tests.conftest import pipeline, settings
from tests.fakes.fleet import FakeDraft, Fleet
from tests.fakes.processes.bough_up import bough_up_command
from tests.fakes.simulated import simulated_settings, write_profile
from tests.fakes.streams import OPTIONS, PROMPT, Seen, expected, read
from tests.fakes.tiers import long_but
from tests.fakes.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.chaos

LONG = GenerateOptions(temperature=0.8, seed=3, max_tokens=120, ignore_eos=True, speculation=Speculation(budget=8))


@pytest.fixture(scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """A pipeline that is broken again and again; its workers simulate, so that they are soon back.

    Real models go through the same faults in tests/loadtest/chaos.
    """
    profile = write_profile(tmp_path_factory.mktemp("profile"), clock_scale=20)
    impatient = ["--port", "0", "--draft-timeout", "2", "--failover-timeout", "2"]
    config = simulated_settings(profile, profile)
    async with pipeline(replace(config, orchestrator=parse(OrchestratorConfig, "o", impatient, {}))) as running:
        yield running


@pytest.fixture
async def cluster(shared: Cluster) -> Cluster:
    """The pipeline for one more test: what others have ended is started again, which is sooner than starting all."""
    for name, child in shared.children.items():
        if child.has_ended():
            shared.restart(name)
    async with asyncio.timeout(60), Client(shared.address) as client:
        while not await is_whole(client, shared):
            await asyncio.sleep(0.1)
    return shared


async def is_whole(client: Client, cluster: Cluster) -> bool:
    """Whether all programs are present, and none that has ended is still considered alive."""
    running = {str(child.process.pid) for child in cluster.children.values()}
    try:
        info = await client.server_info()
    except Unavailable:
        return False
    in_use = [w.info.kind for w in info.workers if not w.problem and w.info.worker_id.split("-")[1] in running]
    return not info.index_problem and len(info.workers) == 2 and sorted(in_use) == ["draft", "target"]


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with Client(cluster.address, patience_seconds=3.0) as connected:
        yield connected


def end(cluster: Cluster, name: str, number: signal.Signals = signal.SIGKILL) -> None:
    """Sends a signal to one process that the test started; one that is killed has ended then."""
    process = cluster.children[name].process
    process.send_signal(number)
    if number is signal.SIGKILL:
        process.wait()


async def run(client: Client, options: GenerateOptions, after: int, act: object) -> tuple[list[int], Finished]:
    """The tokens of a request, in the middle of which something happens."""
    tokens: list[int] = []
    finished = None
    async for event in client.generate(PROMPT, options):
        if isinstance(event, Tokens):
            tokens += event.token_ids
            if len(tokens) >= after and callable(act):
                act()
                act = None
        elif not isinstance(event, Started):
            finished = event
    assert finished is not None
    return tokens, finished


SAID: list[int] = []  # by LONG, when nothing happens: the same in every test


async def undisturbed_tokens(client: Client) -> list[int]:
    if not SAID:
        SAID.extend((await run(client, LONG, 0, None))[0])
    return SAID


async def test_killing_the_draft_changes_nothing_in_the_stream(cluster: Cluster, client: Client) -> None:
    undisturbed = await undisturbed_tokens(client)
    tokens, finished = await run(client, LONG, 40, lambda: end(cluster, "draft_worker"))
    assert tokens == undisturbed
    assert finished.speculation.num_degraded_rounds > 0
    assert any("draft worker" in warning for warning in finished.warnings)


async def test_without_a_draft_guesses_come_from_the_text(fakes: Fleet) -> None:
    """Guesses come from the draft, else from the text, else not at all."""
    target, _ = await fakes.target("target")
    draft, is_dead = await fakes.worker(FakeDraft("draft", fakes.tokenizer)), asyncio.Event()
    _, server = await fakes.orchestrator("--draft", "workers")

    async def held(call: VerifyCall) -> None:
        if call.round >= 3:
            await is_dead.wait()

    target.before = held
    options, events = replace(OPTIONS, max_tokens=120, speculation=Speculation(budget=8)), list[Event]()
    async with Client(server.address) as client:
        async for event in client.generate(PROMPT, options):
            events.append(event)
            if len(events) == 4:
                await draft.kill()
                is_dead.set()
        plain = await read(client, replace(options, speculation=Speculation(budget=8, lookup=0)))
    seen = Seen(events)
    assert seen.token_ids == plain.token_ids == expected(fakes, options)
    assert seen.end.speculation.num_lookup_tokens > 20
    assert seen.end.speculation.num_degraded_rounds > 0
    assert plain.end.speculation.tokens_per_round == 1.0


async def test_a_hanging_draft_only_costs_its_timeout(cluster: Cluster, client: Client) -> None:
    undisturbed = await undisturbed_tokens(client)
    tokens, finished = await run(client, LONG, 40, lambda: end(cluster, "draft_worker", signal.SIGSTOP))
    end(cluster, "draft_worker", signal.SIGCONT)
    assert tokens == undisturbed
    assert finished.speculation.num_degraded_rounds > 0


async def test_killing_the_target_gives_a_status_within_seconds(cluster: Cluster, client: Client) -> None:
    """No other one is there, and none comes back."""
    with pytest.raises(Unavailable, match="no target"):
        await asyncio.wait_for(run(client, LONG, 40, lambda: end(cluster, "target_worker")), 30)
    with pytest.raises(Unavailable, match="no target"):
        await asyncio.wait_for(run(client, LONG, 0, None), 20)
    async with asyncio.timeout(PATIENCE_SECONDS):  # until its registration has run out
        while not any("no target worker" in problem for problem in find_problems(await client.server_info())):
            await asyncio.sleep(0.1)


async def test_another_orchestrator_continues_the_stream_of_a_killed_one(cluster: Cluster) -> None:
    orchestrator = cluster.children["orchestrator"]
    victim = cluster.start("second", orchestrator.command, orchestrator.variables)
    registry = Registry(cluster.index_url)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(addresses := [r.address for r in await registry.workers() if r.kind == "orchestrator"]) < 2:
            await asyncio.sleep(0.1)
    await registry.close()
    addresses.remove(cluster.address)
    assert not victim.has_ended()
    async with asyncio.timeout(20), Client(*addresses) as new:
        while not await is_whole(new, cluster):
            await asyncio.sleep(0.1)
    async with Client(*addresses, cluster.address) as client:
        undisturbed, _ = await run(client, LONG, 0, None)
        assert client.address == addresses[0]
        tokens, finished = await asyncio.wait_for(run(client, LONG, 40, lambda: end(cluster, "second")), 60)
        assert client.address == cluster.address
    cluster.children.pop("second").process.wait()
    assert tokens == undisturbed
    assert (finished.finish_reason, finished.usage.completion_tokens) == ("length", 120)
    assert any("was resumed" in warning for warning in finished.warnings)


async def test_killing_the_index_stops_no_stream_and_is_reported(cluster: Cluster, client: Client) -> None:
    """Nothing depends on the index's truth: the workers last known are used, and the problem is named."""
    undisturbed = await undisturbed_tokens(client)
    tokens, finished = await asyncio.wait_for(run(client, LONG, 40, lambda: end(cluster, "index")), 60)
    assert (tokens, finished.finish_reason) == (undisturbed, "length")
    for _ in range(100):
        if problem := (await client.server_info()).index_problem:
            break
        await asyncio.sleep(0.1)
    assert "does not answer" in problem
    later, finished = await asyncio.wait_for(run(client, replace(LONG, session_id="s"), 0, None), 60)
    assert later == undisturbed
    assert any("index" in warning for warning in finished.warnings)


async def test_a_restarted_draft_is_used_again(cluster: Cluster, client: Client) -> None:
    end(cluster, "draft_worker")
    cluster.children["draft_worker"].process.wait()
    cluster.restart("draft_worker")
    for _ in range(300):
        _, finished = await run(client, replace(LONG, max_tokens=20), 0, None)
        if finished.speculation.num_degraded_rounds == 0:
            return
        await asyncio.sleep(0.2)
    pytest.fail("the new draft worker was never used")


async def test_a_truncated_weight_file_ends_its_target_with_the_reason(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = settings(folder, None, orchestrator=("--failover-timeout", "2"))
    async with pipeline(config) as cluster, Client(cluster.address, patience_seconds=1.0) as client:
        victim = max(folder.glob("*.safetensors"), key=lambda file: file.stat().st_size)
        whole = victim.read_bytes()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not all(w.info.weights_hash for w in (await client.server_info()).workers):
                await asyncio.sleep(0.1)  # after that the target knows whether they are back
        os.truncate(victim, 4096)
        with pytest.raises(Unavailable, match=f"{victim.name}.*(layer|got 4096)"):
            await run(client, LONG, 0, None)  # its first sweeps may still find layers that were read ahead
        await until(cluster.children["target_worker"].has_ended)  # rather than answer from unknown weights
        victim.write_bytes(whole)
        cluster.restart("target_worker")  # as a supervisor would
        await cluster.wait_until_ready(lambda _: None)
        _, finished = await run(client, replace(LONG, max_tokens=20), 0, None)
        assert finished.finish_reason == "length"


def alive(marker: str) -> list[str]:
    """Command lines of running processes that hold a text."""
    lines = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_text().replace("\0", " ")
            state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if marker in line and state != "Z":
            lines.append(line)
    return lines


def read_until(stream: IO[bytes] | None, text: bytes, process: subprocess.Popen[bytes]) -> None:
    """Reads what a process prints, up to the line that has the text."""
    assert stream is not None
    assert any(text in line for line in stream), (
        f"it never printed {text!r}: {process.communicate(timeout=PATIENCE_SECONDS)}"
    )


SIGNALS, MOMENTS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL), ("it serves", "it begins", "its workers load")


@pytest.mark.parametrize(("number", "when"), long_but(zip(SIGNALS, MOMENTS, strict=True), product(SIGNALS, MOMENTS)))
async def test_bough_up_leaves_no_processes(tiny: Path, tmp_path: Path, number: signal.Signals, when: str) -> None:
    """Gently or not; only workers with weights have something to load."""
    marker = tmp_path / "marked"
    marker.symlink_to(tiny)
    model = ["--target", str(marker), "--drop-layers", "2"]
    model = model if when == "its workers load" else ["--simulate", str(write_profile(tmp_path))]
    command = bough_up_command(*model)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite run in the background inherits it ignored
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path)
    if when == "it serves":
        await asyncio.to_thread(read_until, process.stdout, b"ready: ", process)
    elif when == "its workers load":
        await asyncio.to_thread(read_until, process.stderr, b"target worker (", process)
    else:
        await asyncio.sleep(0.5)
    process.send_signal(number)
    try:
        process.communicate(timeout=30)
    finally:
        process.kill()  # one that hangs is not to be the next tests' concern
    for _ in range(600):
        if not alive(str(marker)) and not alive(f"{tmp_path}"):
            return
        await asyncio.sleep(0.1)
    pytest.fail(f"still running: {alive(str(marker))}")
