"""`bough up` asked to stop: what runs finishes, unless it is asked again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from bough.client import Client
from bough.protocol.generation import Finished, GenerateOptions, TextPrompt, Tokens
from tests.fakes.processes.bough_up import bough_up_command
from tests.fakes.simulated import write_profile

pytestmark = pytest.mark.pipeline

OPTIONS = GenerateOptions(max_tokens=60, seed=1, ignore_eos=True)
ENDLESS = GenerateOptions(max_tokens=10_000, seed=1, ignore_eos=True)
IGNORING_SIGINT = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]  # as the shell of a script does for `command &`


@contextmanager
def serving(folder: Path, held: int, **changes: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`bough up` with SIGINT ignored and an open descriptor, and its address."""
    command = bough_up_command("--simulate", str(write_profile(folder, **changes)))
    pipe = subprocess.PIPE
    process = subprocess.Popen([*IGNORING_SIGINT, *command], stdout=pipe, stderr=pipe, text=True, pass_fds=(held,))
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().split()[1]
    finally:
        process.kill()
        process.communicate()


def open_files(process: int) -> list[str]:
    """What the descriptors of a process lead to."""
    return [os.readlink(each) for each in Path(f"/proc/{process}/fd").iterdir()]


def children(process: int) -> list[int]:
    """Its child processes, whichever of its threads started them."""
    found = list[int]()
    for task in Path(f"/proc/{process}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # of a thread that has ended
            found += map(int, (task / "children").read_text().split())
    return found


async def test_up_finishes_an_answer_before_its_processes_end(tmp_path: Path) -> None:
    """It was cut off, and a `bough up &` of a script took no notice of SIGINT at all."""
    with (tmp_path / "open").open("w") as held, serving(tmp_path, held.fileno(), clock_scale=20) as (process, address):
        assert held.name in open_files(process.pid)
        assert len(children(process.pid)) == 4
        for child in children(process.pid):
            assert held.name not in open_files(child), "a child keeps what its parent was given"
        async with Client(address, patience_seconds=0.0) as client:
            events = []
            async for event in client.generate(TextPrompt("hello"), OPTIONS):
                if isinstance(event, Tokens) and not any(isinstance(each, Tokens) for each in events):
                    process.send_signal(signal.SIGINT)
                events.append(event)
        assert isinstance(events[-1], Finished)
        assert sum(len(each.token_ids) for each in events if isinstance(each, Tokens)) == OPTIONS.max_tokens
        _, errors = await asyncio.to_thread(process.communicate, timeout=60)
        assert process.returncode == 0
        assert "draining: running requests have 25 s to finish; Ctrl-C again ends them at once" in errors


async def test_a_second_signal_ends_up_at_once(tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as held, serving(tmp_path, held.fileno(), clock_scale=5) as (process, address):
        async with Client(address, patience_seconds=0.0) as client:
            events = client.generate(TextPrompt("hello"), ENDLESS)
            await anext(events)
            process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            while "draining" not in (line := await asyncio.to_thread(process.stderr.readline)):
                assert line, f"ended with {process.wait()}, without a word of draining"
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(process.communicate, timeout=60)
            assert process.returncode == 128 + signal.SIGTERM
            assert time.monotonic() - began < 20, "it would have waited for the answer, for 25 s"
            await events.aclose()


@pytest.mark.long
async def test_answers_longer_than_the_drain_end_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over HTTP a stream's last event but [DONE] is an error, and what is no stream becomes a 503."""
    monkeypatch.setenv("BOUGH_ORCHESTRATOR_DRAIN_SECONDS", "1")
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2000, "ignore_eos": True}
    with (tmp_path / "open").open("w") as held, serving(tmp_path, held.fileno(), clock_scale=5) as (process, _):
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        base = next(line for line in lines if "base URL" in line).split("base URL ")[1].split(";")[0]
        async with httpx.AsyncClient(timeout=60) as client, asyncio.TaskGroup() as tasks:
            whole = tasks.create_task(client.post(f"{base}/chat/completions", json=body))
            async with client.stream("POST", f"{base}/chat/completions", json=body | {"stream": True}) as stream:
                events = stream.aiter_lines()
                assert stream.status_code == 200, await stream.aread()
                begun = [await anext(events), await anext(events), await anext(events)]
                process.send_signal(signal.SIGTERM)
                rest = [line async for line in events if line]
        assert json.loads(begun[-1].removeprefix("data: "))["choices"]
        *_, error, done = rest
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "unavailable"
        assert done == "data: [DONE]"
        answer = whole.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        await asyncio.to_thread(process.communicate, timeout=60)
        assert process.returncode == 0
