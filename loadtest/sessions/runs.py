"""Concurrent sessions that each send one prompt after another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

from bough.client import Client
from bough.protocol.generation import GenerateOptions, Prompt
from loadtest.common.streams import Stream, stream


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
