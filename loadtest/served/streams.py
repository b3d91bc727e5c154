"""Streams over both APIs with asyncio clients, and their samples."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import grpc
import httpx

from bough.protocol import codec_generation as wire
from bough.protocol.generation import ChatPrompt, GenerateOptions, Message
from bough.rpc.server import open_channel
from bough.rpc.services import GENERATION, stub_of
from bough.rpc.status_map import to_error
from loadtest.locust.reading import CHAT_PATH, OK, Reading, chat_body
from loadtest.locust.samples import Sample

HTTP_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=512)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, the same for both APIs."""

    text: str
    max_tokens: int
    seed: int = 1
    temperature: float = 0.0
    timeout_seconds: float = 600.0


Api = Callable[[Ask], Awaitable[Sample]]


class GrpcApi:
    """A gRPC client without resuming, which would hide failures."""

    def __init__(self, address: str) -> None:
        self._address, self._channel = address, open_channel(address)
        self._stub = stub_of(GENERATION, self._channel)

    async def close(self) -> None:
        """Ends the connection."""
        await self._channel.close()

    async def __call__(self, ask: Ask) -> Sample:
        """Reads one answer to its end."""
        options = GenerateOptions(
            temperature=ask.temperature,
            seed=ask.seed,
            max_tokens=ask.max_tokens,
            ignore_eos=True,
        )
        request = wire.request_to_wire(ChatPrompt((Message("user", ask.text),)), options)
        reading = Reading("grpc")
        try:
            async for message in self._stub.Generate(request, timeout=ask.timeout_seconds):
                reading.take_event(message)
        except grpc.aio.AioRpcError as exc:
            reading.fail(to_error(exc, self._address))
        return reading.sample()


class HttpApi:
    """A client of `/v1/chat/completions` with streaming, at an orchestrator's port or behind a proxy."""

    def __init__(self, url: str, name: str = "http") -> None:
        """`url` is without /v1."""
        self._url, self._name = f"{url.rstrip('/')}{CHAT_PATH}", name
        self._client = httpx.AsyncClient(limits=HTTP_LIMITS, trust_env=False)

    async def close(self) -> None:
        """Ends the connections."""
        await self._client.aclose()

    async def __call__(self, ask: Ask) -> Sample:
        """Reads one answer to its end."""
        body = chat_body([Message("user", ask.text)], ask.max_tokens) | {
            "temperature": ask.temperature,
            "seed": ask.seed,
        }
        reading = Reading(self._name)
        try:
            async with self._client.stream("POST", self._url, json=body, timeout=ask.timeout_seconds) as response:
                if response.status_code != OK:
                    text = (await response.aread()).decode(errors="replace")
                    reading.take_status(response.status_code, text, response.headers.get("retry-after"))
                else:
                    async for line in response.aiter_lines():
                        reading.take_line(line)
        except (httpx.HTTPError, ValueError) as exc:
            reading.error = f"{type(exc).__name__}: {exc}"
        return reading.sample()


async def closed_loop(
    apis: Sequence[Api], num_users: int, seconds: float, ask_of: Callable[[int], Ask]
) -> list[Sample]:
    """Run users who send a new request after each answer, distributed among the APIs, for the given time."""
    samples: list[Sample] = []
    began, numbers = time.monotonic(), iter(range(1 << 62))

    async def live(user: int) -> None:
        while time.monotonic() - began < seconds:
            sample = await apis[user % len(apis)](ask_of(next(numbers)))
            samples.append(replace(sample, users=num_users))
            if sample.is_refused:
                await asyncio.sleep(min(sample.retry_seconds, seconds))

    async with asyncio.TaskGroup() as group:
        for user in range(num_users):
            group.create_task(live(user))
    return samples
