"""Two fault-injecting proxies for the connections between bough's processes.

`LinkProxy` handles bytes: it cuts, stalls and swallows connections. `CallProxy` handles gRPC calls without decoding
them: it delays and refuses them, loses replies after the worker has acted, and sends calls twice. Without faults both
pass everything on.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from enum import Enum
from typing import Any

import grpc

from bough.rpc.services import STAGES

CHUNK_BYTES = 65536
PASS = f"/{STAGES.full_name}/Pass"
LOCALHOST = "127.0.0.1"
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST instead of FIN
_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_reconnect_backoff_ms", 200),  # reconnect fast
    ("grpc.use_local_subchannel_pool", 1),
]
_SERVER_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
]
_HOP_KEYS = {"user-agent", "te", "content-type"}  # metadata of one hop, not of the call


class LinkProxy:
    """A TCP proxy to `upstream`, a port of this machine."""

    def __init__(self, upstream: int) -> None:
        self.port = 0  # once it is running
        self._upstream = upstream
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._swallows = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._handlers: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[LinkProxy]:
        """Listens on a free port for as long as the block runs."""
        server = await asyncio.start_server(self._accept, LOCALHOST, 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self.cut(is_reset=True)
            for handler in list(self._handlers):
                handler.cancel()
            await asyncio.gather(*self._handlers, return_exceptions=True)

    def cut(self, *, is_reset: bool) -> None:
        """Close all connections at once: with RST, or with FIN."""
        for writer in list(self._writers):
            if is_reset:
                raw = writer.get_extra_info("socket")
                with suppress(OSError):
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                writer.transport.abort()
            else:
                writer.close()

    async def stall(self, seconds: float) -> None:
        """Delay all bytes for a while; none is lost."""
        self._is_open.clear()
        try:
            await asyncio.sleep(seconds)
        finally:
            self._is_open.set()

    async def swallow(self, seconds: float) -> None:
        """Drop all bytes for a while; connections that lost bytes are reset at the end."""
        self._swallows = True
        try:
            await asyncio.sleep(seconds)
        finally:
            self._swallows = False
            self.cut(is_reset=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a handler runs in a task"
        self._handlers.add(task)
        try:
            with self._open(writer), suppress(OSError):
                far_reader, far_writer = await asyncio.open_connection(LOCALHOST, self._upstream)
                with self._open(far_writer):
                    pumps = (self._pump(reader, far_writer), self._pump(far_reader, writer))
                    await asyncio.gather(*pumps, return_exceptions=True)
        except asyncio.CancelledError:
            pass  # the proxy ends; asyncio would log it as a failure of the handler
        finally:
            self._handlers.discard(task)

    @contextmanager
    def _open(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        self._writers.add(writer)
        try:
            yield
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(CHUNK_BYTES):
                await self._is_open.wait()
                if not self._swallows:
                    writer.write(data)
                    await writer.drain()
        finally:
            writer.close()


class CallFault(Enum):
    """A fault of one call."""

    DELAY = "delay"
    REFUSE = "refuse"  # UNAVAILABLE; the worker does not receive it
    LOSE_REPLY = "lose the reply"  # UNAVAILABLE after the worker has acted
    TWICE_AT_ONCE = "twice at once"  # a second time while the first is running; the second's answer counts
    TWICE = "twice"  # once more after the first has been answered; the second's answer counts


class CallProxy(grpc.GenericRpcHandler):
    """Passes calls with one request, and one reply or a stream, on to `upstream`, a port of this machine.

    The stream of requests between stages is passed on, too, without faults of its own.
    """

    def __init__(
        self, upstream: int, rng: random.Random, on_call: Callable[[str, bytes], None] = lambda *_: None
    ) -> None:
        """`on_call` is called with the method and the request of every call."""
        self.port = 0  # once it is running
        self.num_faulted = 0
        self._upstream = upstream
        self._rng = rng
        self._on_call = on_call
        self._fault: CallFault | None = None
        self._share = 0.0
        self._seconds = 0.0
        self._channel: grpc.aio.Channel | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[CallProxy]:
        """Listens on a free port for as long as the block runs."""
        options = _CHANNEL_OPTIONS
        async with grpc.aio.insecure_channel(f"{LOCALHOST}:{self._upstream}", options=options) as self._channel:
            server = grpc.aio.server(options=_SERVER_OPTIONS)
            server.add_generic_rpc_handlers((self,))
            self.port = server.add_insecure_port(f"{LOCALHOST}:0")
            await server.start()
            try:
                yield self
            finally:
                await server.stop(None)

    async def misbehave(self, fault: CallFault, share: float, seconds: float) -> None:
        """Inject `fault` into a share of the calls for some seconds; delays last up to a quarter of that time."""
        self._fault, self._share, self._seconds = fault, share, seconds
        try:
            await asyncio.sleep(seconds)
        finally:
            self._fault = None

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        """The handler of any method: bytes in, bytes out."""
        method = str(details.method)
        if method == PASS:
            return grpc.stream_stream_rpc_method_handler(self._pass_on)

        async def forward(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> AsyncIterator[bytes]:
            self._on_call(method, request)
            try:
                async for reply in self._forward(method, request, context):
                    yield reply
            except grpc.aio.AioRpcError as exc:
                await _fail(context, exc)

        return grpc.unary_stream_rpc_method_handler(forward)

    async def _pass_on(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> AsyncIterator[bytes]:
        assert self._channel is not None, "it is running"
        multi: Any = self._channel.stream_stream(PASS)
        call = multi(requests, metadata=_passed_on(context.invocation_metadata() or ()))
        try:
            async for reply in call:
                yield reply
        except grpc.aio.AioRpcError as exc:
            await _fail(context, exc)
        finally:
            call.cancel()

    async def _forward(
        self, method: str, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> AsyncIterator[bytes]:
        fault = self._fault if self._rng.random() < self._share else None
        self.num_faulted += fault is not None
        if fault is CallFault.REFUSE:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the proxy refused the call")
        if fault is CallFault.DELAY:
            await asyncio.sleep(self._rng.uniform(0, self._seconds / 4))
        calls = [self._call(method, request, context) for _ in range(2 if fault is CallFault.TWICE_AT_ONCE else 1)]
        try:
            if fault in (CallFault.TWICE, CallFault.LOSE_REPLY):
                await _outcome(calls[0])
            if fault is CallFault.LOSE_REPLY:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the proxy lost the reply")
            if fault is CallFault.TWICE:
                calls.append(self._call(method, request, context))
            async for reply in calls[-1]:
                yield reply
            context.set_trailing_metadata(_passed_on(await calls[-1].trailing_metadata()))
            for call in calls[:-1]:
                await _outcome(call)
        finally:
            for call in calls:
                call.cancel()

    def _call(self, method: str, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> Any:
        assert self._channel is not None, "it is running"
        call: Any = self._channel.unary_stream(method)  # without serializers it takes bytes, whatever its types say
        metadata = _passed_on(context.invocation_metadata() or ())
        return call(request, timeout=context.time_remaining(), metadata=metadata)


async def _fail(context: grpc.aio.ServicerContext[bytes, bytes], exc: grpc.aio.AioRpcError) -> None:
    """End a call as the one behind it has ended."""
    await context.abort(exc.code(), exc.details() or "", _passed_on(exc.trailing_metadata()))


async def _outcome(call: Any) -> None:
    """Wait until a call has ended, with or without an error."""
    with suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass


def _passed_on(metadata: Iterable[Any]) -> tuple[tuple[str, Any], ...]:
    """Metadata of the call, without that of the hop."""
    return tuple((key, value) for key, value in metadata if key not in _HOP_KEYS and not key.startswith("grpc-"))
