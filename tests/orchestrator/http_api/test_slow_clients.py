"""Connections without a request, or with one sent a byte at a time: none is kept forever, and they are limited."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from weakref import ref

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from bough.runtime import connections
from orchestrator.http_api import server
from orchestrator.http_api.server import http_serving
from tests.fakes.waiting import until

pytestmark = pytest.mark.slow  # running services are called
WHOLE = b"GET /quick HTTP/1.1\r\nhost: x\r\n\r\n"
LONG_BYTES = 1 << 24  # more than what the system keeps of a connection
PATIENCE_SECONDS = 30.0  # of a test for what must happen, much more than it takes


class App:
    """Answers at once, at /slow when it may, and at /long and /pieces with more than is sent to who does not read."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.num_waiting = 0
        self.transports: list[asyncio.Transport] = []  # of requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.transports.append(send.__self__.transport)  # type: ignore[attr-defined]  # uvicorn's cycle has it
        if scope["path"] == "/slow":
            self.num_waiting += 1
            await self.may_answer.wait()
        while scope["path"] == "/body" and (await receive()).get("more_body"):
            pass
        is_stream, is_long = scope["path"] == "/pieces", scope["path"] in ("/long", "/pieces")
        body = b"x" * LONG_BYTES if is_long else b"ok"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body, "more_body": is_stream})
        if is_stream:
            await send({"type": "http.response.body"})

    @property
    def lost(self) -> list[asyncio.Transport]:
        """Connections of requests that have ended, with all that was not sent."""
        return [each for each in {*self.transports} if each.is_closing() and not each.get_write_buffer_size()]


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
async def port(app: App) -> AsyncIterator[int]:
    async with http_serving("127.0.0.1", 0, app, idle_seconds=0.3) as port:
        yield port


async def connected(port: int, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    return reader, writer


async def until_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, trickle: bytes = b"") -> bytes:
    """What the server said before it closed the connection, while bytes trickle in all the time."""

    async def trickling() -> None:
        while not writer.is_closing():
            writer.write(trickle)
            await asyncio.sleep(0.02)

    sending, said = asyncio.create_task(trickling()), b""
    with suppress(ConnectionError):  # the server's way to say goodbye, where it has not read everything
        async with asyncio.timeout(PATIENCE_SECONDS):
            while got := await reader.read(4096):
                said += got
    writer.close()
    await sending
    return said


async def answer(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(PATIENCE_SECONDS):
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(2)
    return head


async def test_a_client_that_shuts_down_its_sending_side_gets_its_answer(port: int, app: App) -> None:
    """Scripts do so."""
    reader, writer = await connected(port, WHOLE.replace(b"quick", b"slow"))
    writer.write_eof()
    async with asyncio.timeout(PATIENCE_SECONDS):
        for _ in range(3):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        app.may_answer.set()
        said = await reader.read()
    assert said.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"").startswith(b"HTTP/1.1 200 OK\r\n")
    assert said.endswith(b"\r\n\r\nok")
    writer.close()


async def test_a_client_that_shuts_down_its_sending_side_gets_all_answers(port: int, app: App) -> None:
    reader, writer = await connected(port, WHOLE.replace(b"quick", b"slow") + 2 * WHOLE)
    writer.write_eof()
    app.may_answer.set()
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert (await reader.read()).count(b"HTTP/1.1 200 OK\r\n") == 3
    writer.close()


async def test_a_closed_client_is_noticed_before_its_answer_begins(port: int, app: App) -> None:
    """What it sends at its end looks as if it had only ended its sending."""
    _, writer = await connected(port, WHOLE.replace(b"quick", b"slow"))
    await until(lambda: app.num_waiting == 1)
    writer.close()
    await until(app.transports[0].is_closing)
    app.may_answer.set()


async def test_half_a_body_is_not_waited_for(port: int) -> None:
    reader, writer = await connected(port, b"POST /body HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nx")
    writer.write_eof()
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await reader.read() == b""
    writer.close()


async def test_a_request_with_two_lengths_closes_the_connection(port: int) -> None:
    """A proxy may believe the other length, and take the rest for another client's request."""
    smuggled = b"POST /quick HTTP/1.1\r\nhost: x\r\ncontent-length: 6\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    reader, writer = await connected(port, smuggled + WHOLE)
    async with asyncio.timeout(PATIENCE_SECONDS):
        said = await reader.read()
    assert said.count(b"HTTP/1.1 200 OK") == 1
    assert b"\r\nconnection: close\r\n" in said.lower()
    writer.close()


HALF = b"GET /quick HTTP/1.1\r\nhost: x\r\nx: "


@pytest.mark.parametrize(("sent", "trickle"), [(b"", b""), (b"G", b""), (HALF, b""), (HALF, b"x")])
async def test_half_a_head_does_not_occupy_a_connection(port: int, sent: bytes, trickle: bytes) -> None:
    """Its first byte once ended the patience with it."""
    assert await until_closed(*await connected(port, sent), trickle) == b""


@pytest.mark.parametrize("sent", [WHOLE, b"POST /quick HTTP/1.1\r\nhost: x\r\ncontent-length: 999999\r\n\r\n"])
async def test_bytes_trickling_in_after_an_answer_do_not_occupy_a_connection(port: int, sent: bytes) -> None:
    """Whether they are half a head or a body that is not waited for."""
    reader, writer = await connected(port, sent)
    assert (await answer(reader)).startswith(b"HTTP/1.1 200 ")
    assert await until_closed(reader, writer, b"x") == b""


async def test_an_answer_may_take_long(port: int, app: App) -> None:
    reader, writer = await connected(port)
    for byte in WHOLE.replace(b"quick", b"slow"):  # a head in pieces is one all the same
        writer.write(bytes([byte]))
    await asyncio.sleep(1.0)  # three times what an idle connection has
    app.may_answer.set()
    assert (await answer(reader)).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_a_connection_that_is_reset_is_forgotten(app: App) -> None:
    """Its timer kept it, and what it had sent, for as long as an idle one may stay; no bound counted it."""
    async with http_serving("127.0.0.1", 0, app) as port:
        _, writer = await connected(port, WHOLE + b"GET /half a head")
        await until(lambda: app.transports)
        kept = ref(app.transports[0].get_protocol())
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while kept() is not None:
                gc.collect()
                await asyncio.sleep(0.01)


async def test_of_too_many_connections_the_longest_idle_one_is_closed(port: int, app: App) -> None:
    async with http_serving("127.0.0.1", 0, app, idle_seconds=300, limit=lambda: 3) as port:
        busy = await connected(port, WHOLE.replace(b"quick", b"slow"))
        await until(lambda: app.num_waiting)
        first, second = await connected(port, b"GET /ha"), await connected(port)
        third = await connected(port, WHOLE)
        assert (await answer(third[0])).startswith(b"HTTP/1.1 200 ")
        assert await until_closed(*first) == b""
        fourth = await connected(port, WHOLE)
        assert (await answer(fourth[0])).startswith(b"HTTP/1.1 200 ")
        assert await until_closed(*second) == b""
        app.may_answer.set()
        assert (await answer(busy[0])).startswith(b"HTTP/1.1 200 ")
        for _, writer in (busy, third, fourth):
            writer.close()


async def test_a_connection_beyond_the_limit_is_refused_if_all_are_busy(app: App) -> None:
    async with http_serving("127.0.0.1", 0, app, limit=lambda: 2) as port:
        busy = [await connected(port, WHOLE.replace(b"quick", b"slow")) for _ in range(2)]
        await until(lambda: app.num_waiting >= 2)
        said = await until_closed(*await connected(port))
        head, _, body = said.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in head.lower()
        error = json.loads(body)["error"]
        assert (error["code"], error["type"]) == ("unavailable", "server_error")
        assert error["message"].startswith("connections: 2 are busy")
        app.may_answer.set()
        for reader, writer in busy:
            assert (await answer(reader)).startswith(b"HTTP/1.1 200 ")
            writer.close()
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://127.0.0.1:{port}/quick")).status_code == 200


LONG, PIECES = WHOLE.replace(b"quick", b"long"), WHOLE.replace(b"quick", b"pieces")


def closing(request: bytes) -> bytes:
    """The request as the last one of its connection."""
    return request.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")


@asynccontextmanager
async def unread(port: int, sent: bytes) -> AsyncIterator[socket.socket]:
    """A connection that sends, and reads nothing of what comes."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_sendall(connection, sent)
        yield connection


@pytest.mark.parametrize(
    "sent",
    [LONG, PIECES, LONG + WHOLE, LONG + closing(WHOLE), closing(LONG), LONG + b"no\n\n"],
    ids=["one", "a stream", "another after it", "the last of the connection", "the only one", "none"],
)
async def test_unread_answers_occupy_no_connection(app: App, sent: bytes) -> None:
    """A request after one whose answer was not read held its connection for ever, and all of them anybody's."""
    async with (
        http_serving("127.0.0.1", 0, app, idle_seconds=0.3) as port,
        unread(port, sent),
        asyncio.timeout(PATIENCE_SECONDS),
    ):
        await until(lambda: app.lost)


async def test_a_client_that_reads_no_answers_is_closed(app: App) -> None:
    """Otherwise it counts as busy, and new connections are refused."""
    async with http_serving("127.0.0.1", 0, app, limit=lambda: 1) as port, unread(port, LONG + WHOLE):
        await asyncio.sleep(0.2)  # in which it comes to the second request; before that it gives way too
        reader, writer = await connected(port, WHOLE)
        assert (await answer(reader)).startswith(b"HTTP/1.1 200 ")
        assert len(app.lost) == 1
        writer.close()


async def test_a_stream_may_stall_as_long_as_configured(app: App) -> None:
    """An answer that is being written has a limit of its own, which may be longer than that of idleness."""
    async with (
        http_serving("127.0.0.1", 0, app, idle_seconds=0.2, stalled_seconds=60.0) as port,
        unread(port, PIECES) as connection,
    ):
        await asyncio.sleep(0.6)
        assert not app.lost
        reader, writer = await asyncio.open_connection(sock=connection.dup())
        async with asyncio.timeout(PATIENCE_SECONDS):
            await reader.readuntil(b"\r\n\r\n")
            assert len(await reader.readexactly(LONG_BYTES)) == LONG_BYTES
        writer.close()


def test_connections_leave_half_of_the_descriptors_free(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((1024, 512), (10**6, connections.MAX_CONNECTIONS), (-1, connections.MAX_CONNECTIONS)):
        monkeypatch.setattr(connections.resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert server.most_connections() == most


@pytest.mark.parametrize(("method", "path"), [("POST", "/quick"), ("POST", "/slow"), ("HEAD", "/slow")])
async def test_a_body_that_breaks_off_during_its_request_is_refused_once(
    port: int, app: App, method: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n"
    reader, writer = await connected(port, head.encode() + b"zz\r\n")
    said = await until_closed(reader, writer)
    app.may_answer.set()
    await asyncio.sleep(0)  # the request continues, and its answer goes nowhere
    assert said.startswith(b"HTTP/1.1 400 "), said
    assert said.count(b"HTTP/1.1") == 1
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_body_that_breaks_off_after_its_answer_closes_the_connection(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    head = b"POST /quick HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n"
    reader, writer = await connected(port, head)
    assert b"200 OK" in await answer(reader)
    writer.write(b"zz\r\n")
    assert await until_closed(reader, writer) == b""
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
