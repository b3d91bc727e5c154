"""An orchestrator's HTTP port as Serve's replica sees it, and requests as Serve hands them over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web as aiohttp_web
from starlette.requests import Request

from deploy.forward import Forwarder


@dataclass(slots=True)
class Upstream:
    """An orchestrator's HTTP API: it records requests, and sends one piece for each set of `go_on`."""

    go_on: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    asked: list[tuple[str, str, bytes, dict[str, str]]] = field(default_factory=list)
    was_left: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: Any) -> Any:
        self.asked.append(
            (
                request.method,
                request.path_qs,
                await request.read(),
                {name.lower(): value for name, value in request.headers.items()},
            )
        )
        if request.path == "/refused":
            return aiohttp_web.json_response(
                {"error": 1}, status=429, headers={"retry-after": "3", "x-request-id": "u"}
            )
        response = aiohttp_web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        try:
            for number in range(3):
                await self.go_on.acquire()
                await response.write(b"data: %d\n\n" % number)
        except (asyncio.CancelledError, ConnectionError):
            self.was_left.set()
            raise
        return response


@asynccontextmanager
async def forwarding() -> AsyncIterator[tuple[Upstream, Forwarder]]:
    upstream = Upstream()
    app = aiohttp_web.Application()
    app.router.add_route("*", "/{path:.*}", upstream.answer)
    runner = aiohttp_web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = aiohttp_web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    forwarder = Forwarder(f"http://127.0.0.1:{runner.addresses[0][1]}")
    try:
        yield upstream, forwarder
    finally:
        await forwarder.close()
        await runner.cleanup()


def request(path: str, body: bytes = b"", root_path: str = "", query: bytes = b"") -> Any:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"host", b"outside"), (b"x-request-id", b"r1"), (b"authorization", b"Bearer key")]
    headers += [(b"traceparent", b"00-1-2-01")]
    headers += [(b"content-length", str(len(body)).encode()), (b"connection", b"keep-alive")]
    scope = {"type": "http", "method": "POST", "path": path, "root_path": root_path, "query_string": query}
    return Request({**scope, "headers": headers}, receive)
