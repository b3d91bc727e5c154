"""Requests that are read to their end, with the moments at which their tokens came."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bough.client import Client
from bough.protocol.generation import Finished, GenerateOptions, Prompt, Tokens


@dataclass(slots=True)
class Stream:
    """A request and what it has delivered so far."""

    began: float  # seconds on the monotonic clock
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    rounds: list[tuple[float, Tokens]] = field(default_factory=list)  # with their arrival times
    finished: Finished | None = None

    async def take(
        self, client: Client, prompt: Prompt, options: GenerateOptions, on_tokens: Callable[[], None] = lambda: None
    ) -> None:
        """Send the request and read it until it ends; `on_tokens` is called after each round. Raises BoughError."""
        async for event in client.generate(prompt, options):
            if isinstance(event, Tokens):
                self.rounds.append((time.monotonic(), event))
                self.token_ids += event.token_ids
                self.text += event.text
                on_tokens()
            elif isinstance(event, Finished):
                self.text += event.text
                self.finished = event

    @property
    def ended(self) -> float:
        """Arrival time of the last token."""
        return self.rounds[-1][0]

    @property
    def first_token_seconds(self) -> float:
        return self.rounds[0][0] - self.began

    @property
    def seconds_a_token(self) -> float:
        """Seconds per token after the first round, which also reads the prompt."""
        num_tokens = len(self.token_ids) - len(self.rounds[0][1].token_ids)
        return (self.ended - self.rounds[0][0]) / max(1, num_tokens)

    @property
    def done(self) -> Finished:
        """The last event."""
        assert self.finished is not None, "read to its end"
        return self.finished

    def tokens_between(self, begin: float, end: float) -> int:
        """Number of tokens that arrived after `begin` and until `end`."""
        return sum(len(tokens.token_ids) for moment, tokens in self.rounds if begin < moment <= end)


async def stream(client: Client, prompt: Prompt, options: GenerateOptions) -> Stream:
    """Send a request and read it to its end. Raises BoughError."""
    received = Stream(time.monotonic())
    await received.take(client, prompt, options)
    return received
