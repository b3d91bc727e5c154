"""Streams of a fake fleet as a client sees them, the expected output, and faults at chosen calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from bough.client import Client
from bough.protocol.generation import Event, Finished, GenerateOptions, Prompt, Started, TextPrompt, Tokens
from bough.protocol.messages import VerifyCall
from bough.tokenization.tokenizer import Tokenizer
from tests.fakes.fleet import FakeTarget, FakeText, Fleet, Process
from tests.fakes.waiting import PATIENCE_SECONDS

PROMPT = TextPrompt("say: try try ")
OPTIONS = GenerateOptions(seed=5, max_tokens=60, ignore_eos=True, request_id="r")


class Seen:
    """Events of one stream, or of its beginning."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events
        self.rounds = [event for event in events if isinstance(event, Tokens)]
        self.token_ids = [token for event in self.rounds for token in event.token_ids]
        self.texts = [text for event in self.rounds for text in event.texts]

    @property
    def text(self) -> str:
        """The text of all events."""
        return "".join(self.texts) + (self.events[-1].text if isinstance(self.events[-1], Finished) else "")

    @property
    def started(self) -> Started:
        assert isinstance(self.events[0], Started)
        return self.events[0]

    @property
    def end(self) -> Finished:
        assert isinstance(self.events[-1], Finished)
        return self.events[-1]

    @property
    def ending(self) -> tuple[str, str, int]:
        """Finish reason, stop reason and number of generated tokens."""
        return self.end.finish_reason, self.end.stop_reason, self.end.usage.completion_tokens


async def read(client: Client, options: GenerateOptions = OPTIONS, prompt: Prompt = PROMPT) -> Seen:
    """Read a stream to its end."""
    return Seen([event async for event in client.generate(prompt, options)])


async def read_rounds(client: Client, num_rounds: int, options: GenerateOptions = OPTIONS) -> Seen:
    """Read `num_rounds` rounds of a stream and then close it."""
    events: list[Event] = []
    stream = client.generate(PROMPT, options)
    async for event in stream:
        events.append(event)
        if len(events) > num_rounds:
            break
    await stream.aclose()
    return Seen(events)


def expected(fakes: Fleet, options: GenerateOptions = OPTIONS) -> list[int]:
    """The output tokens of plain decoding."""
    tokenizer = Tokenizer(fakes.tokenizer)
    return FakeText(tokenizer).output(tokenizer.encode(PROMPT.text), options.seed or 0, options.max_tokens)


def once(act: Callable[[], Awaitable[object]], at_call: int) -> Callable[[VerifyCall], Awaitable[None]]:
    """A hook that awaits `act` at call number `at_call` of a target, counted from 1."""
    num_calls = 0

    async def hook(call: VerifyCall) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == at_call:
            await act()

    return hook


def failing(error: Exception) -> Callable[[], Awaitable[None]]:
    """An action that raises `error`."""

    async def act() -> None:
        raise error

    return act


def kill_the_one_that_gets(call_number: int, targets: list[tuple[FakeTarget, Process]]) -> None:
    """Kill the target that gets call number `call_number`, counted over all targets from 1, before it answers."""
    num_calls = 0

    def hook_of(server: Process) -> Callable[[VerifyCall], Awaitable[None]]:
        async def hook(call: VerifyCall) -> None:
            nonlocal num_calls
            num_calls += 1
            if num_calls == call_number:
                asyncio.get_running_loop().create_task(server.kill())
                await asyncio.sleep(60)

        return hook

    for target, server in targets:
        target.before = hook_of(server)


def renamed(options: GenerateOptions, request_id: str) -> GenerateOptions:
    """The options with another request id."""
    return replace(options, request_id=request_id)


class Gate:
    """Holds call number `at_call` of a target, counted from 1, until it is opened."""

    def __init__(self, target: FakeTarget, at_call: int) -> None:
        self._reached, self._opened = asyncio.Event(), asyncio.Event()
        target.before = once(self._hold, at_call)

    async def reached(self) -> None:
        """Wait until the call is held: no call of another stream can be the one then."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self._reached.wait()

    def open(self) -> None:
        """Let the call continue."""
        self._opened.set()

    async def _hold(self) -> None:
        self._reached.set()
        await self._opened.wait()
