"""Sends prompts to a bough, one after another or in concurrent sessions, and keeps their rounds with their times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bough.client import Client
from bough.protocol.generation import Finished, GenerateOptions, Prompt, Tokens


@dataclass(slots=True)
class Stream:
    """A request and its times."""

    began: float  # seconds on the monotonic clock
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    rounds: list[tuple[float, Tokens]] = field(default_factory=list)  # with their arrival times
    finished: Finished | None = None

    @property
    def ended(self) -> float:
        """Arrival time of the last token."""
        return self.rounds[-1][0]

    @property
    def first_token_seconds(self) -> float:
        return self.rounds[0][0] - self.began

    @property
    def done(self) -> Finished:
        """The last event."""
        assert self.finished is not None, "read to its end"
        return self.finished

    def tokens_between(self, begin: float, end: float) -> int:
        """Number of tokens that arrived after `begin` and until `end`."""
        return sum(len(tokens.token_ids) for moment, tokens in self.rounds if begin < moment <= end)


async def stream(client: Client, prompt: Prompt, options: GenerateOptions) -> Stream:
    """Send a request and read it to its end."""
    received = Stream(time.monotonic())
    async for event in client.generate(prompt, options):
        if isinstance(event, Tokens):
            received.rounds.append((time.monotonic(), event))
            received.token_ids += event.token_ids
            received.text += event.text
        elif isinstance(event, Finished):
            received.text += event.text
            received.finished = event
    return received


class Together(NamedTuple):
    """Concurrent sessions, each with one prompt after another."""

    num_sessions: int
    numbers: tuple[int, ...]  # of all prompts
    streams: list[Stream]  # in the same order: all sessions' first ones, all second ones, and so on
    seconds: float  # from the first request to the last token

    @property
    def num_tokens(self) -> int:
        return sum(len(each.token_ids) for each in self.streams)

    @property
    def steady_rate(self) -> float:
        """Tokens per second from the time when all have a first token until the first session ends."""
        begin = max(each.rounds[0][0] for each in self.streams[: self.num_sessions])
        end = min(each.ended for each in self.streams[-self.num_sessions :])
        num_tokens = sum(each.tokens_between(begin, end) for each in self.streams)
        return num_tokens / (end - begin) if end > begin else 0.0


async def together(
    client: Client, num_sessions: int, numbers: Sequence[int], prompts: Sequence[Prompt], options: GenerateOptions
) -> Together:
    """Distribute prompts among concurrent sessions; each sends the next one after its answer."""

    async def run(own: Sequence[int]) -> list[Stream]:
        return [await stream(client, prompts[number], options) for number in own]

    began = time.monotonic()
    dealt = [numbers[first::num_sessions] for first in range(num_sessions)]
    by_session = await asyncio.gather(*map(run, dealt))
    streams = [each for turn in zip(*by_session, strict=True) for each in turn]
    return Together(num_sessions, tuple(numbers), streams, max(each.ended for each in streams) - began)
