"""The proxies of loadtest.chaos.proxy: faithful when calm, and each fault is the one that it is called."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import pytest

from loadtest.chaos.proxy import LOCALHOST, CallFault, CallProxy, LinkProxy
from tests.fakes.waiting import until

pytestmark = pytest.mark.chaos

METHOD = "/test.Echo/Say"
Say = Callable[[bytes], Awaitable[bytes]]
Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class Echo(grpc.GenericRpcHandler):
    """Streams the request's bytes back one by one; counts how often it was called. "!" is refused with metadata."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.num_at_once = 0
        self.most_at_once = 0

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        async def say(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> AsyncIterator[bytes]:
            self.num_calls += 1
            self.num_at_once += 1
            self.most_at_once = max(self.most_at_once, self.num_at_once)
            try:
                await asyncio.sleep(0.05)
                if request == b"!":
                    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "why", (("held", "3"),))
                if request == b"deadline":
                    await asyncio.sleep(3600)
                for byte in request:
                    yield bytes([byte])
            finally:
                self.num_at_once -= 1

        return grpc.unary_stream_rpc_method_handler(say)


@asynccontextmanager
async def echoing() -> AsyncIterator[tuple[Echo, int]]:
    echo, server = Echo(), grpc.aio.server()
    server.add_generic_rpc_handlers((echo,))
    port = server.add_insecure_port(f"{LOCALHOST}:0")
    await server.start()
    try:
        yield echo, port
    finally:
        await server.stop(None)


@asynccontextmanager
async def proxied() -> AsyncIterator[tuple[Echo, CallProxy, Say]]:
    """An echo behind a proxy, and a way to call it."""
    async with (
        echoing() as (echo, port),
        CallProxy(port, random.Random(1)).running() as proxy,
        grpc.aio.insecure_channel(f"{LOCALHOST}:{proxy.port}") as channel,
    ):

        async def said(request: bytes) -> bytes:
            return b"".join([reply async for reply in channel.unary_stream(METHOD)(request, timeout=3)])

        yield echo, proxy, said


async def test_a_proxy_without_faults_forwards_everything() -> None:
    async with proxied() as (echo, _, said):
        assert await said(b"hello") == b"hello"
        assert await said(b"") == b""
        with pytest.raises(grpc.aio.AioRpcError, match="why") as caught:
            await said(b"!")
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert ("held", "3") in tuple(caught.value.trailing_metadata() or ())
        assert echo.num_calls == 3


async def test_a_deadline_is_forwarded() -> None:
    async with proxied() as (echo, _, said):
        with pytest.raises(grpc.aio.AioRpcError, match="Deadline"):
            await said(b"deadline")
        await until(lambda: echo.num_at_once == 0)


@pytest.mark.parametrize(
    ("fault", "num_calls", "answer"),
    [
        (CallFault.DELAY, 1, b"ab"),
        (CallFault.REFUSE, 0, None),
        (CallFault.LOSE_REPLY, 1, None),
        (CallFault.TWICE, 2, b"ab"),
        (CallFault.TWICE_AT_ONCE, 2, b"ab"),
    ],
)
async def test_each_fault_does_what_its_name_says(fault: CallFault, num_calls: int, answer: bytes | None) -> None:
    async with proxied() as (echo, proxy, said):
        misbehaving = asyncio.create_task(proxy.misbehave(fault, 1.0, 1.0))
        await asyncio.sleep(0)
        if answer is None:
            with pytest.raises(grpc.aio.AioRpcError, match="the proxy"):
                await said(b"ab")
        else:
            assert await said(b"ab") == answer
        assert (echo.num_calls, proxy.num_faulted) == (num_calls, 1)
        assert (echo.most_at_once == 2) == (fault is CallFault.TWICE_AT_ONCE)
        await misbehaving
        assert await said(b"cd") == b"cd"


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[LinkProxy, Connect]]:
    """A server that says all bytes again, behind a link."""

    async def again(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(again, LOCALHOST, 0)
    async with server, LinkProxy(server.sockets[0].getsockname()[1]).running() as link:
        yield link, lambda: asyncio.open_connection(LOCALHOST, link.port)


async def test_a_link_forwards_bytes_and_ends_with_fin_or_rst() -> None:
    async with linked() as (link, connect):
        for is_reset in (False, True):
            reader, writer = await connect()
            writer.write(b"hello")
            assert await reader.readexactly(5) == b"hello"
            link.cut(is_reset=is_reset)
            if is_reset:
                with pytest.raises(ConnectionResetError):
                    await reader.read()
            else:
                assert await reader.read() == b""
            writer.close()


async def test_a_stalled_link_loses_nothing_and_a_swallowing_one_ends_in_a_reset() -> None:
    async with linked() as (link, connect):
        reader, writer = await connect()
        stalling = asyncio.create_task(link.stall(0.2))
        await asyncio.sleep(0)
        writer.write(b"late")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(1), 0.1)
        await stalling
        assert await asyncio.wait_for(reader.readexactly(4), 20) == b"late"
        swallowing = asyncio.create_task(link.swallow(0.2))
        await asyncio.sleep(0)
        writer.write(b"gone")
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(), 20)
        await swallowing
        writer.close()


async def test_messages_that_are_too_large_are_refused_by_the_server_and_not_by_the_proxy() -> None:
    """The proxy has no limit; the server behind it has grpc's own."""
    async with proxied() as (echo, _, said):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await said(b"x" * (4 * 1024 * 1024 + 1))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert echo.num_calls == 0
