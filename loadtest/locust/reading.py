"""Records the events of one stream and their times, for clients under gevent and under asyncio."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bough.errors import BoughError, Exhausted
from bough.pb import generation_pb2
from bough.protocol import codec_generation as wire
from bough.protocol.generation import Finished, Message, Tokens
from loadtest.locust.samples import Arrivals, Sample

CHAT_PATH = "/v1/chat/completions"
OK, TOO_MANY_REQUESTS = 200, 429
REFUSED = "rate_limit_exceeded"  # a refusal's code in an event: a stream that waits gets status 200 before it
MOST_ERROR_CHARACTERS = 500


@dataclass(slots=True)
class Reading:
    """A running stream, from the moment of creation."""

    api: str
    started: float = 0.0  # start of the load test on the monotonic clock
    arrivals: Arrivals = field(default_factory=lambda: Arrivals(time.monotonic()))
    texts: list[str] = field(default_factory=list)
    num_events: int = 0  # events with tokens
    has_ended: bool = False  # whether it ended properly
    error: str = ""
    is_refused: bool = False
    retry_seconds: float = 0.0

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)

    def take_event(self, message: generation_pb2.GenerateEvent) -> None:
        """Record a message of gRPC's `Generate`."""
        match wire.event_from_wire(message):
            case Tokens() as event:
                self._take(len(event.token_ids), event.text)
            case Finished() as event:
                self._take(0, event.text)
                self.has_ended = True

    def take_line(self, line: str) -> None:
        """Record a line of server-sent events. Raises ValueError if its data is not JSON."""
        if line == "data: [DONE]":
            self.has_ended = True
        elif line.startswith("data: "):
            self._take_chunk(json.loads(line.removeprefix("data: ")))

    def take_status(self, status: int, text: str, retry_after: str | None) -> None:
        """Record the status and body of an HTTP answer that is not a stream."""
        self.error = f"status {status}: {text[:MOST_ERROR_CHARACTERS]}"
        self.is_refused = status == TOO_MANY_REQUESTS
        self.retry_seconds = float(retry_after or 0.0)

    def fail(self, error: BoughError) -> None:
        """Record the error of a gRPC call; an error after the first tokens is not a refusal."""
        self.error = str(error)
        if isinstance(error, Exhausted):
            self.is_refused, self.retry_seconds = not self.num_events, error.retry_seconds or 0.0

    def sample(self, users: int = 1) -> Sample:
        """The sample of the stream so far."""
        arrivals = self.arrivals
        return Sample(
            self.api,
            arrivals.began - self.started,
            time.monotonic() - arrivals.began,
            arrivals.first_token_seconds,
            arrivals.token_seconds,
            arrivals.longest_gap,
            arrivals.num_tokens,
            users,
            self.error or self._lack(),
            self.is_refused,
            self.retry_seconds,
        )

    def _lack(self) -> str:
        if not self.has_ended:
            return "the stream broke off"
        return "" if self.arrivals.num_tokens else "no token came"

    def _take_chunk(self, chunk: Any) -> None:
        """Record a chunk, whose tokens are the difference in cumulative usage."""
        if "error" in chunk:
            self.error = str(chunk["error"].get("message"))  # such as a refusal after waiting
            self.is_refused = chunk["error"].get("code") == REFUSED and not self.num_events
            return
        usage = chunk.get("usage") or {}
        text = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
        self._take(usage.get("completion_tokens", 0) - self.arrivals.num_tokens, text)

    def _take(self, num_tokens: int, text: str) -> None:
        if num_tokens > 0:
            self.num_events += 1
            self.arrivals.take(time.monotonic(), num_tokens)
        self.texts.append(text)


def chat_body(messages: Sequence[Message], max_tokens: int) -> dict[str, Any]:
    """Body of a streamed chat completion with usage in every chunk."""
    return {
        "model": "",
        "messages": [{"role": message.role, "content": message.content} for message in messages],
        "max_completion_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
