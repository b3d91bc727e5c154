"""gRPC servers and channels of all services: options, errors, health, reflection, draining.

Only `bough.rpc.status_map` knows which error is which status.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from inspect import isasyncgenfunction
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from bough.config.addresses import joined
from bough.errors import ConfigError, DeadlineExceeded, Exhausted, InvalidRequest, Unavailable
from bough.rpc.arrivals import WINDOW_BYTES, Arrivals
from bough.rpc.drain import Drainer
from bough.rpc.lasting_server import LastingServer, free_batches
from bough.rpc.services import ServicerContext
from bough.rpc.status_map import MAX_MESSAGE_BYTES, abort
from bough.runtime.connections import connection_limit
from bough.telemetry.call_context import CallContextInterceptor

logger = logging.getLogger(__name__)

MAX_STREAMS = 1024  # limit of a connection with the usual windows; further calls wait at the caller
MAX_CALLS = 8192  # limit of a server for all calls
HANDSHAKE_SECONDS = 20.0  # time limit for a new connection to start HTTP/2
IDLE_SECONDS = 600.0  # idle time after which a connection is closed; clients reconnect when needed
MAX_METADATA_BYTES = 16 * 1024  # limit of a call's headers
MAX_HEALTH_BYTES = 4096  # limit of a message to grpc.health.v1, which needs no key
SETTINGS_SECONDS = 10.0  # time limit for a connection to accept its streams' limits
LASTING_SECONDS = 1e6  # calls may continue after their port is closed, until the server is stopped

_KEEPALIVE = [
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_SIZES = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.max_send_message_length", MAX_MESSAGE_BYTES)]
_SERVER_OPTIONS = [
    *_KEEPALIVE,
    *_SIZES,
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.bdp_probe", 0),  # otherwise it makes the window of every stream 4 MiB
    ("grpc.http2.settings_timeout", round(1000 * SETTINGS_SECONDS)),
    ("grpc.max_connection_idle_ms", round(1000 * IDLE_SECONDS)),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.server.max_pending_requests", MAX_CALLS),  # per method: gRPC cancels some of a burst of more than 1,000
    ("grpc.server.max_pending_requests_hard_limit", MAX_CALLS),
    ("grpc.so_reuseport", 0),  # otherwise a second server would silently take half of the first one's calls
]
_CHANNEL_OPTIONS = [
    *_KEEPALIVE,
    *_SIZES,
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),  # channels do not share back-off
]

Decode: TypeAlias = Callable[[bytes], Any]
Answer: TypeAlias = Callable[..., Awaitable[Any]]
Answered: TypeAlias = Callable[[ServicerContext], Awaitable[Any]]


MAX_WATCHERS = 256  # streams; Check calls are limited by the number of connections
WRITE_SECONDS = 10.0  # time limit for a watcher to read an update
RETRY_SECONDS = 5.0


class HealthService(health.aio.HealthServicer):  # type: ignore[misc]  # it has no types
    """The health service. The library's own writes its streams one after another: a stalled one blocks all."""

    def __init__(self) -> None:
        super().__init__()
        self._num_watchers = 0
        self._changed = asyncio.Event()  # replaced after each change

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: ServicerContext) -> None:
        """Send a service's status and its changes. Raises Exhausted for too many watchers."""
        if self._num_watchers >= MAX_WATCHERS:
            raise Exhausted(f"{self._num_watchers} callers watch health, which is the limit; use Check", RETRY_SECONDS)
        self._num_watchers += 1
        try:
            await self._tell(request.service, context)
        finally:
            self._num_watchers -= 1

    async def _tell(self, service: str, context: ServicerContext) -> None:
        last = None
        while True:
            changed = self._changed
            status = self._server_status.get(service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != last:
                await write(context, health_pb2.HealthCheckResponse(status=status), WRITE_SECONDS)
            last = status
            await changed.wait()

    async def _set(self, service: str, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        """Override of the base class; all changes call it."""
        self._server_status[service] = status
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


async def write(context: ServicerContext, reply: Any, stalled_seconds: float | None) -> None:
    """Send a reply of a stream. Raises DeadlineExceeded if its reader stalls for this time, or Unavailable."""
    try:
        async with asyncio.timeout(stalled_seconds):
            await context.write(reply)
    except TimeoutError as exc:
        raise DeadlineExceeded(
            f"the stream has not been read for {stalled_seconds:g} s; it is ended, and can be resumed"
        ) from exc
    except grpc.aio.InternalError as exc:
        raise Unavailable("the caller has gone") from exc


def open_channel(address: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """A channel to "host:port", with TLS if credentials are given; connects on first use."""
    free_batches()
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(address, credentials, options=_CHANNEL_OPTIONS)


@dataclass(frozen=True, slots=True)
class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Reads messages, passes every call through the drainer, and maps errors of servicers to statuses.

    All handlers take a stream of messages: gRPC must not read any by itself (see `arrivals`).
    """

    gate: Drainer
    stalled_seconds: float | None = None  # longest time for which a stream's reader may stall
    of_health: Arrivals = field(default_factory=lambda: Arrivals(16, 4, 5.0, MAX_HEALTH_BYTES))
    of_others: Arrivals = field(default_factory=lambda: Arrivals(64, 32, 30.0, MAX_MESSAGE_BYTES))

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """Wrap the handler of a call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        service, _, method = handler_call_details.method.rpartition("/")
        arrivals = self.of_health if service == f"/{health.SERVICE_NAME}" else self.of_others
        decode, codec = handler.request_deserializer, (None, handler.response_serializer)
        if not handler.response_streaming:
            run = self._guarded(self._answered(method, arrivals, decode, handler.unary_unary))
            return grpc.stream_unary_rpc_method_handler(run, *codec)
        answer = handler.stream_stream or handler.unary_stream
        if isasyncgenfunction(answer):
            answer = self._written(answer)
        if handler.request_streaming:
            run = self._guarded(self._conversed(arrivals, decode, answer))
        else:
            run = self._guarded(self._answered(method, arrivals, decode, answer))
        return grpc.stream_stream_rpc_method_handler(run, *codec)

    def _answered(self, method: str, arrivals: Arrivals, decode: Decode, answer: Answer) -> Answered:
        """Answer the only message of a call."""

        async def run(context: ServicerContext) -> Any:
            data = await arrivals.read(context)
            if data is None:
                if context.done():  # it was refused as too slow
                    return None
                raise InvalidRequest("request", "must be a message", "none")
            with self.gate.entering(method, len(data)):
                request = decoded(data, decode)
                del data  # a stream goes on for minutes
                with self.gate.track(method, request):
                    return await answer(request, context)

        return run

    def _conversed(self, arrivals: Arrivals, decode: Decode, answer: Answer) -> Answered:
        """Answer a stream of messages."""

        async def run(context: ServicerContext) -> Any:
            async def messages() -> AsyncIterator[Any]:
                while (data := await arrivals.read(context)) is not None:
                    yield decoded(data, decode)

            return await answer(messages(), context)

        return run

    def _guarded(self, answer: Answered) -> Answer:
        async def run(_: object, context: ServicerContext) -> Any:
            try:
                return await answer(context)
            except grpc.aio.AbortError:
                raise
            except Exception as exc:  # every error becomes a status here
                await abort(context, exc)

        return run

    def _written(self, answer: Callable[..., AsyncGenerator[Any, None]]) -> Answer:
        """Write a servicer's replies as fast as they are read, and close it however the call ends.

        The servicer is asked for the next reply only after gRPC has taken the last one: a full window of the reader
        stops it and bounds its memory.
        """

        async def run(request: Any, context: ServicerContext) -> None:
            async with aclosing(answer(request, context)) as replies:
                async for reply in replies:
                    await write(context, reply, self.stalled_seconds)

        return run


def decoded(data: bytes, decode: Decode) -> Any:
    """Decode a message. Raises InvalidRequest for invalid bytes, where gRPC would answer UNKNOWN."""
    try:
        return decode(data)
    except DecodeError as exc:
        raise InvalidRequest("request", "must be a valid message", f"{len(data)} bytes: {exc}") from exc


@dataclass(frozen=True, slots=True)
class Served:
    """A running server."""

    port: int
    service: str
    gate: Drainer
    close_port: Callable[[], None]  # frees the port for another process: no call comes in, and running calls continue
    _health: HealthService

    async def set_ready(self, is_ready: bool) -> None:
        """Set the health of the named service; the empty name is SERVING while the process lives."""
        status = health_pb2.HealthCheckResponse
        await self._health.set(self.service, status.SERVING if is_ready else status.NOT_SERVING)

    async def leave(self) -> None:
        """Set health to NOT_SERVING permanently, also for the empty name: balancers then send no calls here."""
        await self._health.enter_graceful_shutdown()

    async def drain(self, refusal: str, timeout_seconds: float) -> None:
        """Refuse new work with this text, let running work finish in time, and end the rest as Unavailable."""
        await self.leave()
        self.gate.stop_accepting(refusal)
        if not await self.gate.wait_idle(timeout_seconds):
            logger.warning("some calls did not finish in %g s, and are cut off", timeout_seconds)
        await self.gate.cut()


@asynccontextmanager
async def serving(
    host: str,
    port: int,
    service: str,
    add: Callable[[grpc.aio.Server], None],
    gate: Drainer | None = None,
    stalled_seconds: float | None = None,
    grace_seconds: float = 1.0,
    max_connection_age: float = 0.0,
    auth_interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    credentials: grpc.ServerCredentials | None = None,
    window_bytes: int = WINDOW_BYTES,
) -> AsyncIterator[Served]:
    """Run a server with health and reflection; NOT_SERVING until `set_ready`. Port 0 takes a free one.

    `auth_interceptors` come first, after the interceptor that sets the log context. With `credentials` only TLS is
    accepted.

    A stream whose reader stalls for `stalled_seconds` ends as DEADLINE_EXCEEDED. A connection older than
    `max_connection_age` seconds accepts no new calls, and closes when its calls have ended; 0 is no limit. A message
    that is larger than `window_bytes` takes a round trip more; a larger window allows a connection fewer streams.

    Raises:
        ConfigError: the port is in use, or the host is not an address of this machine.
    """
    gate = gate or Drainer()
    # without a grace period, an old connection waits for its calls without limit
    age = [("grpc.max_connection_age_ms", round(1000 * max_connection_age))] if max_connection_age else []
    interceptors = [CallContextInterceptor(), *auth_interceptors, ErrorInterceptor(gate, stalled_seconds)]
    options = [*_SERVER_OPTIONS, *_windows(window_bytes), *_bounds(), *age]
    health_servicer = HealthService()

    free_batches()
    server = LastingServer(interceptors, options, MAX_CALLS)
    add(server)  # type: ignore[arg-type]  # the stubs of grpc.aio have its classes twice
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection([service, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    try:
        where = joined(host, port)
        bound = server.add_secure_port(where, credentials) if credentials else server.add_insecure_port(where)
    except RuntimeError as exc:
        raise ConfigError(
            f"--port: cannot listen on {where}; it is in use, or --host is not this machine's; 0 takes a free one"
        ) from exc
    closing: list[asyncio.Task[None]] = []

    def close_port() -> None:
        closing.append(asyncio.create_task(server.stop(LASTING_SECONDS)))

    served = Served(bound, service, gate, close_port, health_servicer)
    await served.set_ready(False)
    await server.start()
    try:
        yield served
    finally:
        await served.set_ready(False)
        await server.stop(grace_seconds)
        await asyncio.gather(*closing)


def most_connections() -> int:
    """Limit of open connections: at most a quarter of the process's file descriptors, as HTTP and workers need some."""
    return connection_limit(num_descriptors=4)


def _windows(window_bytes: int) -> list[tuple[str, int]]:
    """Windows of streams, and as many streams for a connection as keep the memory of all its windows the same."""
    num_streams = MAX_STREAMS * WINDOW_BYTES // window_bytes
    return [
        ("grpc.http2.lookahead_bytes", window_bytes),
        ("grpc.max_concurrent_streams", num_streams),
        ("grpc.http2.max_deallocating_streams", num_streams),  # ended, but not freed yet
    ]


def _bounds() -> list[tuple[str, int]]:
    return [
        ("grpc.max_allowed_incoming_connections", most_connections()),
        ("grpc.server_handshake_timeout_ms", round(1000 * HANDSHAKE_SECONDS)),
    ]


async def is_serving(channel: grpc.aio.Channel, service: str, timeout_seconds: float) -> bool:
    """Ask grpc.health.v1; any error means False."""
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_seconds)
    except grpc.aio.AioRpcError:
        return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
