"""What comes in through Serve's proxy is passed on as it streams, and ends with the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

aiohttp_web = pytest.importorskip("aiohttp.web")
requests = pytest.importorskip("starlette.requests")

from deploy.forward import Forwarder  # noqa: E402  # where starlette is not, this cannot be imported

Handler = Callable[[Any], Awaitable[Any]]


@dataclass(slots=True)
class Upstream:
    """An orchestrator's door: it remembers what it was asked, and sends one piece for each set of `go_on`."""

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
    headers += [(b"content-length", str(len(body)).encode()), (b"connection", b"keep-alive")]
    scope = {"type": "http", "method": "POST", "path": path, "root_path": root_path, "query_string": query}
    return requests.Request({**scope, "headers": headers}, receive)


async def test_pieces_come_one_by_one_before_the_last_is_there() -> None:
    async with forwarding() as (upstream, forwarder):
        upstream.go_on.release()
        response = await forwarder.forward(request("/v1/chat/completions", b'{"a": 1}', query=b"x=%20y"))
        pieces = response.body_iterator
        assert await anext(pieces) == b"data: 0\n\n", "while the upstream waits to send the next"
        for number in (1, 2):
            upstream.go_on.release()
            assert await anext(pieces) == b"data: %d\n\n" % number
        assert [piece async for piece in pieces] == []
        ((method, path, body, headers),) = upstream.asked
        assert (method, path, body) == ("POST", "/v1/chat/completions?x=%20y", b'{"a": 1}')
        assert (headers["x-request-id"], headers["authorization"]) == ("r1", "Bearer key")
        assert headers["host"].startswith("127.0.0.1")
        assert (response.status_code, response.headers["content-type"]) == (200, "text/event-stream")


async def test_a_client_that_leaves_ends_the_request() -> None:
    async with forwarding() as (upstream, forwarder):
        upstream.go_on.release()
        response = await forwarder.forward(request("/v1/completions"))
        pieces = response.body_iterator
        await anext(pieces)
        await pieces.aclose()  # as starlette does when the client has hung up
        async with asyncio.timeout(30):
            await upstream.was_left.wait()


async def test_refusals_are_passed_back_with_their_headers() -> None:
    async with forwarding() as (upstream, forwarder):
        response = await forwarder.forward(request("/bough/refused", root_path="/bough"))
        assert response.status_code == 429
        assert response.headers["retry-after"] == "3"
        assert not {"x-request-id", "date", "server"} & {*response.headers}, "Serve's proxy adds its own"
        assert b"".join([piece async for piece in response.body_iterator]) == b'{"error": 1}'
        assert upstream.asked[0][1] == "/refused", "the route's prefix is Serve's alone"


async def test_an_orchestrator_that_is_not_there_is_503() -> None:
    async with forwarding() as (_, forwarder):
        gone = Forwarder("http://127.0.0.1:9")
        response = await gone.forward(request("/v1/models"))
        assert response.status_code == 503
        assert b"the orchestrator does not answer" in response.body
        await gone.close()
        del forwarder


async def test_a_body_without_end_is_not_kept() -> None:
    """It went into memory whole, for whoever reached the proxy, before anybody was asked for a key."""
    num_read = 0

    async def receive() -> dict[str, Any]:
        nonlocal num_read
        num_read += 1
        return {"type": "http.request", "body": bytes(1 << 20), "more_body": True}

    async with forwarding() as (upstream, forwarder):
        endless = requests.Request(request("/v1/completions").scope, receive)
        async with asyncio.timeout(30):
            response = await forwarder.forward(endless)
        assert (response.status_code, num_read) == (413, 5)
        assert b"body: must have at most 4194304 bytes" in response.body
        assert upstream.asked == []
