"""A real target whose KV memory is full: a younger request gives way in the middle, and says what it would have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

from bough.config.processes import OrchestratorConfig, parse
from bough.processes.launch import Cluster
from bough.protocol.generation import Event, GenerateOptions, TokenPrompt, Tokens
from orchestrator.cluster.directory import Directory
from orchestrator.serving.requests import Requests
from tests.conftest import pipeline, settings
from tests.fakes.streams import Seen
from tests.fakes.waiting import until

CONTEXT, NODES = 384, 16
STEP = 256
PROMPT = TokenPrompt(tuple(1 + index * index % 200 for index in range(STEP - 6)))
OPTIONS = GenerateOptions(seed=3, temperature=0.8, max_tokens=CONTEXT - len(PROMPT.token_ids), ignore_eos=True)
TOKEN_BYTES = 1024  # of the tiny model
FIT = 2 * (STEP + NODES) + CONTEXT - STEP  # two that begin, and one of them to its end


@asynccontextmanager
async def requests_at(cluster: Cluster) -> AsyncIterator[Requests]:
    """An orchestrator in this process, so that its streams pause while they are not read."""
    registry = cluster.registry()
    directory = Directory(registry)
    requests = Requests(parse(OrchestratorConfig, "o", ["--draft", "none"], {}), directory, "in the test")
    async with AsyncExitStack() as stack:
        stack.push_async_callback(registry.close)
        await stack.enter_async_context(directory.running())
        await stack.enter_async_context(requests.running())
        await until(lambda: len(list(directory.targets)) == 1)
        yield requests


async def pull(stream: AsyncGenerator[Event], events: list[Event], num_tokens: int) -> None:
    """Reads on until this many tokens have come."""
    while sum(len(event.token_ids) for event in events if isinstance(event, Tokens)) < num_tokens:
        events.append(await anext(stream))


def figure(requests: Requests, name: str) -> float:
    """Of the target's metrics."""
    (target,) = requests.directory.targets
    (url,) = [note.removeprefix("metrics at ") for note in target.info.notes if note.startswith("metrics at ")]
    lines = urlopen(url, timeout=10).read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


async def test_a_preempted_request_gives_the_same_output(tiny: Path) -> None:
    flags = ["--max-context", str(CONTEXT), "--max-nodes", str(NODES), "--kv-memory", str(FIT * TOKEN_BYTES)]
    async with pipeline(settings(tiny, None, *flags)) as cluster, requests_at(cluster) as requests:
        older, younger = (requests.generate(PROMPT, replace(OPTIONS, request_id=name)) for name in ("older", "younger"))
        first: list[Event] = []
        second: list[Event] = []
        async with aclosing(older), aclosing(younger):
            await pull(older, first, 2)
            await pull(younger, second, 20)  # it has grown: there is no room for the older one to grow as well
            assert await asyncio.to_thread(figure, requests, "vllm:num_preemptions_total") == 0
            await pull(older, first, 20)
            assert await asyncio.to_thread(figure, requests, "vllm:num_preemptions_total") == 1
            waiting = asyncio.create_task(pull(younger, second, OPTIONS.max_tokens))
            await until(lambda: requests.loads().num_requests_waiting == 1)
            await pull(older, first, OPTIONS.max_tokens)
            first += [event async for event in older]
            await waiting
            second += [event async for event in younger]
    assert Seen(second).token_ids == Seen(first).token_ids
    assert len(Seen(first).token_ids) == OPTIONS.max_tokens
    assert Seen(first).end.warnings == ()
    (warning,) = Seen(second).end.warnings
    assert "gave way to older ones for a while" in warning
