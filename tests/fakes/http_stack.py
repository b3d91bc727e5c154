"""The HTTP API of a real orchestrator with simulated workers, on a free port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import CollectorRegistry
from starlette.types import Receive, Scope, Send

from orchestrator.http_api.app import http_app
from orchestrator.http_api.server import IDLE_SECONDS, http_serving
from orchestrator.serving.tenants import Callers
from orchestrator.telemetry.metrics import OrchestratorCollector
from tests.fakes.simulated import pair_of
from tests.fakes.stack import Stack, simulated_stack

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class HttpStack:
    """The served HTTP API, and a client of it."""

    stack: Stack
    client: httpx.AsyncClient
    port: int
    transports: list[asyncio.Transport]  # of each request's connection

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """Send a request; underscores in header names become hyphens."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(path, json=body, headers=named)

    async def answer(self, path: str, body: Json) -> Json:
        """The body of a successful answer; asserts status 200."""
        response = await self.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    async def refusal(self, path: str, body: Any) -> tuple[int, Json]:
        """Status and error object of a refused request."""
        response = await self.post(path, body)
        return response.status_code, error_of(response)

    async def chunks(self, path: str, body: Json) -> list[Json]:
        """All chunks of a streamed answer; asserts that it succeeds and ends with [DONE]."""
        async with self.client.stream("POST", path, json=body | {"stream": True}) as response:
            assert response.status_code == 200, await response.aread()
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line async for line in response.aiter_lines() if line and not line.startswith(":")]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    async def events(self, path: str, body: Json) -> list[Json]:
        """All typed events of a streamed answer; asserts that each is named as its type says, and no more."""
        async with self.client.stream("POST", path, json=body | {"stream": True}) as response:
            assert response.status_code == 200, await response.aread()
            told = [block.split("\n") for block in "".join([t async for t in response.aiter_text()]).split("\n\n")]
        assert told.pop() == [""]
        events = [json.loads(lines[-1].removeprefix("data: ")) for lines in told if lines != [": keep-alive"]]
        assert [lines[0] for lines in told if lines != [": keep-alive"]] == [f"event: {e['type']}" for e in events]
        return events


def error_of(response: httpx.Response) -> Json:
    """The error object of an answer; asserts that it has OpenAI's form."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert isinstance(error["type"], str)
    return error


@asynccontextmanager
async def http_stack(
    folder: Path, stalled_seconds: float = 0.0, idle_seconds: float = IDLE_SECONDS, **profile: Any
) -> AsyncIterator[HttpStack]:
    """Serve the HTTP API for the duration of the block; `profile` changes fields of the simulated workers' profile."""
    pair = pair_of(folder, **profile)
    async with simulated_stack(folder, pair) as stack:
        figures = CollectorRegistry()
        figures.register(OrchestratorCollector(stack.requests.figures))
        app = http_app(Callers(stack.requests), figures, has_page=True)
        transports: list[asyncio.Transport] = []

        async def noted(scope: Scope, receive: Receive, send: Send) -> None:
            transports.append(send.__self__.transport)  # type: ignore[attr-defined]  # uvicorn's cycle has it
            await app(scope, receive, send)

        async with (
            http_serving("127.0.0.1", 0, noted, stalled_seconds=stalled_seconds, idle_seconds=idle_seconds) as port,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
        ):
            yield HttpStack(stack, client, port, transports)
