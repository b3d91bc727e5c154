"""What comes in through Serve's proxy is passed on as it streams, and ends with the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import unquote

import pytest

pytest.importorskip("aiohttp.web")
requests = pytest.importorskip("starlette.requests")

from starlette.responses import JSONResponse, PlainTextResponse  # noqa: E402  # where it is not, these cannot be imported

from deploy import forward  # noqa: E402
from deploy.forward import Forwarder, WaitingForwarder  # noqa: E402
from orchestrator.http_api.server import http_serving  # noqa: E402
from tests.fakes.upstream import Upstream, forwarding, request  # noqa: E402
from tests.fakes.waiting import until  # noqa: E402

PIECE_BYTES, MAX_BYTES = 1 << 16, 1 << 20


async def test_pieces_are_forwarded_before_the_last_one_arrives() -> None:
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
        assert headers["host"] == "outside", "which the orchestrator may refuse"
        assert headers["traceparent"] == "00-1-2-01", "a caller's trace goes on behind the proxy"
        assert (response.status_code, response.headers["content-type"]) == (200, "text/event-stream")


async def test_a_short_body_is_sent_with_the_head_and_a_longer_one_on_request() -> None:
    """To be asked for it takes a round trip."""
    async with forwarding() as (upstream, forwarder):
        for body in (b"a" * forward.SHORT_BYTES, b"a" * (forward.SHORT_BYTES + 1)):
            response = await forwarder.forward(request("/refused", body))
            assert [piece async for piece in response.body_iterator] == [b'{"error": 1}']
            assert upstream.asked[-1][2] == body
        assert ["expect" in headers for *_, headers in upstream.asked] == [False, True]


async def test_a_path_is_forwarded_unchanged() -> None:
    """What the server had decoded of it became a query, or the part that is not sent."""
    async with forwarding() as (upstream, forwarder):
        await read_to_the_end(upstream, await forwarder.forward(request("/decisions/a/b#c?d%41 \u00e9", query=b"x=1")))
        path, _, query = upstream.asked[0][1].partition("?")
        assert (unquote(path), query) == ("/decisions/a/b#c?d%41 \u00e9", "x=1")


async def test_a_refusal_is_returned_even_if_a_short_body_is_not_read() -> None:
    async with before(JSONResponse({"error": "no key"}, 401)) as forwarder:
        for _ in range(20):
            response = await forwarder.forward(request("/v1", b"a" * forward.SHORT_BYTES))
            assert (response.status_code, [piece async for piece in response.body_iterator]) == (
                401,
                [b'{"error":"no key"}'],
            )


async def sending(response: Any) -> asyncio.Task[None]:
    """Send an answer to a client, of which the first message has been sent."""
    has_begun = asyncio.Event()

    async def send(message: dict[str, Any]) -> None:
        has_begun.set()

    answering: asyncio.Task[None] = asyncio.create_task(response({"type": "http"}, asyncio.Event().wait, send))
    await has_begun.wait()
    return answering


async def left(answering: asyncio.Task[None]) -> None:
    """The client disconnects, as Serve reports to a replica."""
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)


async def test_a_client_that_leaves_ends_the_request() -> None:
    async with forwarding() as (upstream, forwarder), asyncio.timeout(30):
        upstream.go_on.release()
        await left(await sending(await forwarder.forward(request("/v1/completions"))))
        await upstream.was_left.wait()


async def read_to_the_end(upstream: Upstream, response: Any) -> None:
    for _ in range(3):
        upstream.go_on.release()
    assert len(b"".join([piece async for piece in response.body_iterator])) == 27


async def test_requests_wait_while_the_orchestrator_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running requests continue meanwhile. The number of waiting ones and their time are limited."""
    monkeypatch.setattr(forward, "MOST_WAITING", 1)
    waiting_forwarder = WaitingForwarder()
    async with forwarding() as (upstream, forwarder), forwarding() as (other, successor):
        waiting_forwarder.open(forwarder)
        running = await waiting_forwarder.forward(request("/v1"))
        waiting_forwarder.pause()
        waiting = asyncio.create_task(waiting_forwarder.forward(request("/v1")))
        await asyncio.sleep(0)
        assert (refused := await waiting_forwarder.forward(request("/v1"))).status_code == 503
        assert b"and 1 requests wait for it" in refused.body
        assert refused.headers["retry-after"]
        assert not waiting.done()
        await read_to_the_end(upstream, running)
        await waiting_forwarder.close()
        waiting_forwarder.open(successor)
        await read_to_the_end(other, await waiting)
        assert (len(upstream.asked), len(other.asked)) == (1, 1)
        waiting_forwarder.pause()
        monkeypatch.setattr(forward, "OPENING_SECONDS", 0.0)
        assert b"being restarted" in (await waiting_forwarder.forward(request("/v1"))).body


async def test_an_orchestrator_without_an_http_port_is_reported() -> None:
    waiting_forwarder = WaitingForwarder()
    waiting_forwarder.open(None)
    assert b"--tls-client-ca" in (await waiting_forwarder.forward(request("/v1"))).body


async def test_refusals_are_returned_with_their_headers() -> None:
    async with forwarding() as (upstream, forwarder):
        response = await forwarder.forward(request("/bough/refused", root_path="/bough"))
        assert response.status_code == 429
        assert response.headers["retry-after"] == "3"
        assert not {"x-request-id", "date", "server"} & {*response.headers}, "Serve's proxy adds its own"
        assert b"".join([piece async for piece in response.body_iterator]) == b'{"error": 1}'
        assert upstream.asked[0][1] == "/refused", "the route's prefix is Serve's alone"


async def test_requests_and_their_bodies_wait_for_an_orchestrator_that_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its supervisor does not know yet that it has ended. A request that has reached none may be sent to the next."""
    monkeypatch.setattr(forward, "AGAIN_SECONDS", 0.0)
    waiting_forwarder = WaitingForwarder()
    async with forwarding() as (upstream, successor), asyncio.timeout(30):
        waiting_forwarder.open(Forwarder("http://127.0.0.1:9"))
        waiting = [
            asyncio.create_task(waiting_forwarder.forward(request("/refused", body)))
            for body in (b"", b"x", b"x" * 70_000)
        ]
        while waiting_forwarder._num_waiting < len(waiting):
            await asyncio.sleep(0)
        await waiting_forwarder.close()
        waiting_forwarder.open(successor)
        for task in waiting:
            response = await task
            assert (response.status_code, await anext(response.body_iterator)) == (429, b'{"error": 1}')
        assert sorted(len(body) for _, _, body, _ in upstream.asked) == [0, 1, 70_000]


async def test_requests_do_not_wait_if_no_orchestrator_will_be_restarted() -> None:
    waiting_forwarder, gone = WaitingForwarder(), Forwarder("http://127.0.0.1:9")
    for is_shut in (False, True):
        waiting_forwarder.open(gone)
        if is_shut:
            waiting_forwarder.pause()
        waiting = asyncio.create_task(waiting_forwarder.forward(request("/v1")))
        await until(lambda: waiting_forwarder._num_waiting)
        waiting_forwarder.give_up()
        for response in (await waiting, await waiting_forwarder.forward(request("/v1"))):
            assert response.status_code == 503
            assert b"another takes its place" in response.body
    async with forwarding() as (_, forwarder):
        waiting_forwarder.open(forwarder)
        waiting_forwarder.give_up()
        assert (await waiting_forwarder.forward(request("/refused"))).status_code == 429, (
            "while its program runs it answers"
        )
    await gone.close()


async def test_requests_wait_again_after_a_replica_recovers() -> None:
    """Serve replaces one only after several checks have failed."""
    waiting_forwarder = WaitingForwarder()
    waiting_forwarder.give_up()
    waiting_forwarder.undo_give_up()
    waiting = asyncio.create_task(waiting_forwarder.forward(request("/refused")))
    await until(lambda: waiting_forwarder._num_waiting)
    async with forwarding() as (_, forwarder):
        waiting_forwarder.open(forwarder)
        assert (await waiting).status_code == 429


async def test_a_request_that_an_orchestrator_has_begun_is_not_repeated() -> None:
    """It had the request, and may have done what was asked."""
    num_asked = 0

    async def dying(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_asked
        num_asked += 1
        await reader.readuntil(b"{}")
        writer.close()

    async with await asyncio.start_server(dying, "127.0.0.1", 0) as server, asyncio.timeout(30):
        forwarder = Forwarder(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        waiting_forwarder = WaitingForwarder()
        waiting_forwarder.open(forwarder)
        response = await waiting_forwarder.forward(request("/v1/completions", b"{}"))
        assert response.status_code == 503
        assert b"the orchestrator does not answer" in response.body
        assert num_asked == 1
        await waiting_forwarder.close()


def endless(num_read: list[int], pause_seconds: float = 0.0) -> Any:
    """A request whose body never ends; what has been read of it is noted."""

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(pause_seconds)
        num_read.append(PIECE_BYTES)
        return {"type": "http.request", "body": bytes(PIECE_BYTES), "more_body": True}

    scope = request("/v1/completions").scope
    return requests.Request({**scope, "headers": [(b"transfer-encoding", b"chunked")]}, receive)


@asynccontextmanager
async def before(app: Any) -> AsyncIterator[Forwarder]:
    """A forwarder before an orchestrator's own HTTP server."""
    async with http_serving("127.0.0.1", 0, app) as port:
        forwarder = Forwarder(f"http://127.0.0.1:{port}")
        yield forwarder
        await forwarder.close()


async def test_the_body_of_a_request_refused_by_its_head_is_not_read() -> None:
    """Bodies of up to 4 MB were in memory, for as long as they took, before a key was checked."""
    num_read: list[int] = []
    async with before(JSONResponse({"error": "no key"}, 401)) as forwarder, asyncio.timeout(30):
        response = await forwarder.forward(endless(num_read))
        assert response.status_code == 401
        assert b"".join([piece async for piece in response.body_iterator]) == b'{"error":"no key"}'
        assert num_read == []


@pytest.mark.parametrize("pause_seconds", [0.0, 0.05])
async def test_an_endless_body_is_limited_like_at_the_orchestrator(pause_seconds: float) -> None:
    """In bytes and in time; what it refuses is read no further."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        num_bytes, end = 0, asyncio.get_running_loop().time() + 0.5
        while num_bytes <= MAX_BYTES and asyncio.get_running_loop().time() < end:
            num_bytes += len((await receive()).get("body", b""))
        await PlainTextResponse("enough", 413 if num_bytes > MAX_BYTES else 408)(scope, receive, send)

    num_read: list[int] = []
    async with before(app) as forwarder, asyncio.timeout(30):
        response = await forwarder.forward(endless(num_read, pause_seconds))
        assert response.status_code in (408, 413)
        assert [piece async for piece in response.body_iterator] == [b"enough"]
        await asyncio.sleep(0.1)
        told = len(num_read)
        await asyncio.sleep(0.3)
        assert len(num_read) == told
        assert sum(num_read) < 3 * MAX_BYTES


async def test_a_length_with_a_chunked_body_is_not_forwarded() -> None:
    """The chunks are what counts: the orchestrator would take part of the next request for the body, or the reverse."""
    async with forwarding() as (upstream, forwarder):
        for length in (b"3", b"900"):
            asked = request("/refused", b'{"a": 1}')
            kept = [(name, value) for name, value in asked.scope["headers"] if name != b"content-length"]
            headers = [*kept, (b"content-length", length), (b"transfer-encoding", b"chunked")]
            response = await forwarder.forward(requests.Request({**asked.scope, "headers": headers}, asked.receive))
            assert [piece async for piece in response.body_iterator] == [b'{"error": 1}']
            _, _, body, passed_on = upstream.asked[-1]
            assert body == b'{"a": 1}'
            assert "content-length" not in passed_on


async def test_the_number_of_concurrent_requests_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection is for each of them, and all descriptors of the replica were theirs."""
    monkeypatch.setattr(forward, "most_connections", lambda: 2)
    monkeypatch.setattr(forward, "CONNECT_SECONDS", 0.5)
    async with forwarding() as (upstream, forwarder), asyncio.timeout(30):
        for _ in range(2):
            upstream.go_on.release()
        running = [await sending(await forwarder.forward(request("/v1/completions"))) for _ in range(2)]
        refused = await forwarder.forward(request("/v1/completions"))
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        await left(running[0])
        upstream.go_on.release()
        response = await forwarder.forward(request("/v1/completions"))
        assert response.status_code == 200
        for each in (running[1], await sending(response)):
            await left(each)
