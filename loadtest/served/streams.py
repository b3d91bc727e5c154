"""One stream through a door, from an asyncio client, and what it came to."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import httpx

from bough import wire_generation as wire
from bough.errors import BoughError, Exhausted
from bough.generation import ChatPrompt, GenerateOptions, Message, Tokens
from bough.pb import generation_pb2_grpc
from bough.rpc import open_channel, to_error
from loadtest.locust.samples import Arrivals, Sample

TOO_MANY_REQUESTS = 429
HTTP_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=512)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, the same through whichever door."""

    text: str
    max_tokens: int
    seed: int = 1
    temperature: float = 0.0
    timeout_seconds: float = 600.0


@dataclass(slots=True)
class Answered:
    """A sample, and the text that it brought."""

    sample: Sample
    text: str = ""
    num_events: int = 0  # with tokens


Door = Callable[[Ask], Awaitable[Answered]]


@dataclass(slots=True)
class _Reading:
    """A stream under way."""

    door: str
    arrivals: Arrivals = field(default_factory=lambda: Arrivals(time.monotonic()))
    text: list[str] = field(default_factory=list)
    num_events: int = 0

    def take(self, num_tokens: int, text: str) -> None:
        if num_tokens > 0:
            self.num_events += 1
            self.arrivals.take(time.monotonic(), num_tokens)
        self.text.append(text)

    def answered(self, error: str = "", is_refused: bool = False, retry_seconds: float = 0.0) -> Answered:
        arrivals = self.arrivals
        sample = Sample(
            self.door,
            arrivals.began,
            time.monotonic() - arrivals.began,
            arrivals.first_token_seconds,
            arrivals.token_seconds,
            arrivals.longest_gap,
            arrivals.num_tokens,
            error=error or ("" if arrivals.num_tokens else "no token came"),
            is_refused=is_refused,
            retry_seconds=retry_seconds,
        )
        return Answered(sample, "".join(self.text), self.num_events)


class GrpcDoor:
    """The gRPC door without the client's resuming, which would hide what is to be counted."""

    def __init__(self, address: str) -> None:
        self._address, self._channel = address, open_channel(address)
        self._stub = generation_pb2_grpc.GenerationStub(self._channel)

    async def close(self) -> None:
        """Ends the connection."""
        await self._channel.close()

    async def __call__(self, ask: Ask) -> Answered:
        """Reads one answer to its end."""
        options = GenerateOptions(
            temperature=ask.temperature, seed=ask.seed, max_tokens=ask.max_tokens, ignore_eos=True
        )
        request = wire.request_to_wire(ChatPrompt((Message("user", ask.text),)), options)
        reading = _Reading("grpc")
        try:
            async for message in self._stub.Generate(request, timeout=ask.timeout_seconds):
                event = wire.event_from_wire(message)
                if isinstance(event, Tokens):
                    reading.take(len(event.token_ids), event.text)
                elif hasattr(event, "text"):
                    reading.take(0, event.text)
        except grpc.aio.AioRpcError as exc:
            return _failed(reading, to_error(exc, self._address))
        return reading.answered()


def _failed(reading: _Reading, error: BoughError) -> Answered:
    if isinstance(error, Exhausted):
        return reading.answered(str(error), True, error.retry_seconds or 0.0)
    return reading.answered(str(error))


class HttpDoor:
    """`/v1/chat/completions`, streamed, at an orchestrator's own port or behind a proxy."""

    def __init__(self, url: str, name: str = "http") -> None:
        """`url` is without /v1."""
        self._url, self._name = f"{url.rstrip('/')}/v1/chat/completions", name
        self._client = httpx.AsyncClient(limits=HTTP_LIMITS, trust_env=False)

    async def close(self) -> None:
        """Ends the connections."""
        await self._client.aclose()

    async def __call__(self, ask: Ask) -> Answered:
        """Reads one answer to its end."""
        body = {
            "model": "",
            "messages": [{"role": "user", "content": ask.text}],
            "max_completion_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "seed": ask.seed,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        reading = _Reading(self._name)
        try:
            async with self._client.stream("POST", self._url, json=body, timeout=ask.timeout_seconds) as response:
                if response.status_code != httpx.codes.OK:
                    error = (await response.aread()).decode(errors="replace")
                    delay = float(response.headers.get("retry-after") or 0.0)
                    return reading.answered(error, response.status_code == TOO_MANY_REQUESTS, delay)
                async for chunk in _chunks(response):
                    if "error" in chunk:
                        return reading.answered(str(chunk["error"].get("message")))
                    num_tokens = (chunk.get("usage") or {}).get("completion_tokens", 0)
                    text = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                    reading.take(num_tokens - reading.arrivals.num_tokens, text)
        except (httpx.HTTPError, ValueError) as exc:
            return reading.answered(f"{type(exc).__name__}: {exc}")
        return reading.answered()


async def _chunks(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each `data:` line up to [DONE]. Raises ValueError where the stream ends before that."""
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))
    raise ValueError("the stream ended before [DONE]")


async def closed_loop(
    doors: Sequence[Door], num_users: int, seconds: float, ask_of: Callable[[int], Ask]
) -> list[Sample]:
    """Users who ask again as soon as they have their answer, for so long; users take turns among the doors."""
    samples: list[Sample] = []
    began, numbers = time.monotonic(), iter(range(1 << 62))

    async def live(user: int) -> None:
        while time.monotonic() - began < seconds:
            answered = await doors[user % len(doors)](ask_of(next(numbers)))
            samples.append(replace(answered.sample, users=num_users))
            if answered.sample.is_refused:
                await asyncio.sleep(min(answered.sample.retry_seconds, seconds))

    async with asyncio.TaskGroup() as group:
        for user in range(num_users):
            group.create_task(live(user))
    return samples
