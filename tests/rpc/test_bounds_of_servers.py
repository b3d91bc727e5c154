"""What unauthenticated callers may use of a server: connections, streams, event loop time."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bough.errors import ConfigError, Unavailable
from bough.rpc import lasting_server, server
from bough.rpc.lasting_server import LastingServer
from bough.rpc.server import MAX_WATCHERS, HealthService, Served, is_serving, open_channel, serving
from tests.fakes.http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PREFACE,
    SETTINGS,
    frame,
    head,
)  # fmt: skip

SERVICE = "bough.v1.Target"
WATCH = "/grpc.health.v1.Health/Watch"
HELLO = PREFACE + frame(SETTINGS, 0, 0, b"")


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving("127.0.0.1", 0, SERVICE, lambda _: None) as running:
        yield running


def watching_without_reading() -> bytes:
    """A stream of health whose reader gives it no room for a single byte."""
    message = health_pb2.HealthCheckRequest(service=SERVICE).SerializeToString()
    data = struct.pack(">BI", 0, len(message)) + message
    settings = frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, 0))
    return PREFACE + settings + frame(HEADERS, END_HEADERS, 1, head(WATCH)) + frame(DATA, END_STREAM, 1, data)


async def test_a_health_watcher_that_does_not_read_blocks_nobody(served: Served) -> None:
    """The server's own word on its health waited for every watcher to have read the last one: one stranger, who needs
    no key for it, kept an orchestrator from ever being SERVING, and from draining."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(watching_without_reading())
    await writer.drain()
    await reader.readexactly(9)
    await asyncio.sleep(0.3)  # the call is there
    async with asyncio.timeout(10):
        for is_ready in (True, False, True, False, True):
            await served.set_ready(is_ready)
            await asyncio.sleep(0.05)
        await served.leave()
    writer.transport.abort()


@pytest.mark.slow
async def test_watchers_receive_every_change_and_are_limited(served: Served) -> None:
    async with open_channel(f"127.0.0.1:{served.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        told = health_pb2.HealthCheckResponse
        assert (await watch.read()).status == told.NOT_SERVING
        await served.set_ready(True)
        assert (await watch.read()).status == told.SERVING
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="other"))
        assert (await unknown.read()).status == told.SERVICE_UNKNOWN
        more = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(MAX_WATCHERS - 2)]
        assert {(await each.read()).status for each in more} == {told.SERVING}
        with pytest.raises(grpc.aio.AioRpcError, match="watch") as refused:
            await stub.Watch(health_pb2.HealthCheckRequest()).read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await is_serving(channel, SERVICE, 10.0)  # a question of its own is answered all the same
        unknown.cancel()
        async with asyncio.timeout(20):
            while True:
                try:
                    assert (await stub.Watch(health_pb2.HealthCheckRequest()).read()).status == told.SERVING
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_concurrent_calls_wait_and_are_answered(served: Served) -> None:
    """Of more than 1,000 that no task had taken yet, gRPC cancelled some by chance."""
    async with open_channel(f"127.0.0.1:{served.port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*(check(health_pb2.HealthCheckRequest()) for _ in range(2500)))
    assert {answer.status for answer in answers} == {health_pb2.HealthCheckResponse.SERVING}


async def test_a_watcher_that_has_left_is_no_unexpected_error() -> None:
    """Each one that left in the middle of a word was logged with a traceback."""

    class Gone:
        async def write(self, _: object) -> None:
            raise grpc.aio.InternalError("the caller has gone")

    with pytest.raises(Unavailable, match="the caller has gone"):
        await HealthService().Watch(health_pb2.HealthCheckRequest(), cast(grpc.aio.ServicerContext[Any, Any], Gone()))


async def test_the_number_of_connections_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "most_connections", lambda: 3)
    async with serving("127.0.0.1", 0, SERVICE, lambda _: None) as served:
        streams = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(6)]
        for _, writer in streams:
            writer.write(HELLO)
        async with asyncio.timeout(20):
            answered = [bool(await reader.read(9)) for reader, _ in streams]
        assert sum(answered) == 3
        for _, writer in streams:
            writer.transport.abort()
        async with asyncio.timeout(20), open_channel(f"127.0.0.1:{served.port}") as channel:
            while not await is_serving(channel, "", 5.0):  # once the others have gone
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("said", [b"", PREFACE[:10]])
async def test_a_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_SECONDS", 0.5)
    async with serving("127.0.0.1", 0, SERVICE, lambda _: None) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(said)
        async with asyncio.timeout(30):
            while await reader.read(1000):
                pass
        writer.close()


async def test_a_call_whose_name_is_not_text_does_not_end_the_server(served: Served) -> None:
    """One packet of a stranger ended grpc.aio's server. Here running calls continue, and new calls are answered."""
    async with open_channel(f"127.0.0.1:{served.port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        for is_ready in (True, False, True):
            _, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(HELLO + frame(HEADERS, END_HEADERS | END_STREAM, 1, head("/x\xffy")))
            await writer.drain()
            async with asyncio.timeout(30), open_channel(f"127.0.0.1:{served.port}") as other:
                await asyncio.sleep(0.3)
                while not await is_serving(other, "", 5.0):
                    await asyncio.sleep(0.05)
                await served.set_ready(is_ready)
                assert await is_serving(other, SERVICE, 5.0) is is_ready
            told = health_pb2.HealthCheckResponse
            assert (await watch.read()).status == (told.SERVING if is_ready else told.NOT_SERVING)
            writer.close()


@pytest.mark.parametrize(("most", "code"), [(256, "UNIMPLEMENTED"), (0, "CANCELLED")])
async def test_an_unknown_method_is_refused(
    served: Served, monkeypatch: pytest.MonkeyPatch, most: int, code: str
) -> None:
    """For any number of calls; beyond a limit of unread refusals, calls are dropped."""
    monkeypatch.setattr(lasting_server, "MAX_REFUSALS", most)
    async with open_channel(f"127.0.0.1:{served.port}") as channel:
        calls: list[Any] = [
            channel.unary_stream(method)(b"x") for method in ("/x", f"/{SERVICE}/Other") for _ in range(50)
        ]
        assert {(await call.code()).name for call in calls} == {code}
        assert not most or "method: must be one of this server" in await calls[0].details()
        assert await is_serving(channel, "", 5.0)


def test_an_incompatible_grpcio_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls would bypass the check for names that are not text, unnoticed."""
    other = type("AioServer", (), {"_request_call": lambda _: None})
    monkeypatch.setattr(lasting_server, "cygrpc", SimpleNamespace(AioServer=other))
    with pytest.raises(ConfigError, match=rf"^grpcio: must be .*_request_call, .*got {grpc.__version__}"):
        LastingServer((), (), 1)


async def test_a_port_in_use_is_named_by_its_setting(served: Served) -> None:
    with pytest.raises(ConfigError, match=rf"^--port: cannot listen on 127\.0\.0\.1:{served.port}; it is in use, or"):
        async with serving("127.0.0.1", served.port, SERVICE, lambda _: None):
            pass
