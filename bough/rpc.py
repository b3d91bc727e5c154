"""gRPC as all three services use it: channel options, errors to status and back, health, reflection.

This is the only place that knows which error is which status.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from bough import errors
from bough.errors import BoughError, ConfigError, PrefixMissing

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 4 * 1024 * 1024

STATUS_OF: dict[type[BoughError], grpc.StatusCode] = {
    errors.InvalidTree: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.PrefixMissing: grpc.StatusCode.FAILED_PRECONDITION,
    errors.PairingError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StaleEpoch: grpc.StatusCode.ABORTED,
    errors.Exhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.StreamError: grpc.StatusCode.UNAVAILABLE,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
}
ERROR_NAMES = {kind.__name__: kind for kind in STATUS_OF}
ERROR_KEY, LENGTH_KEY, HASH_KEY = "bough-error", "bough-held-length", "bough-held-hash"  # trailing metadata

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
    ("grpc.so_reuseport", 0),  # otherwise a second server takes half of the first one's calls in silence
]
_CHANNEL_OPTIONS = [
    *_KEEPALIVE,
    *_SIZES,
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),  # a channel's back-off is its own
]


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to "host:port"; connects when first used."""
    return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)


def to_error(exc: grpc.aio.AioRpcError, address: str) -> BoughError:
    """The error that a peer reported, or what its silence means."""
    metadata = dict(tuple(exc.trailing_metadata() or ()))  # pairs: it iterates over them, unlike a mapping
    details = exc.details() or exc.code().name
    kind = ERROR_NAMES.get(str(metadata.get(ERROR_KEY)))
    if kind is PrefixMissing:
        return PrefixMissing(details, int(metadata.get(LENGTH_KEY, 0)), int(metadata.get(HASH_KEY, 0)))
    if kind is not None:
        return kind(details)
    if exc.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
        return errors.Unavailable(f"{address} does not answer: {exc.code().name}: {details}")
    return BoughError(f"{address}: {exc.code().name}: {details}")


async def _abort(context: grpc.aio.ServicerContext[Any, Any], exc: Exception) -> None:
    """Ends a call with the status of an error."""
    code = next((STATUS_OF[kind] for kind in type(exc).__mro__ if kind in STATUS_OF), grpc.StatusCode.INTERNAL)
    if code is grpc.StatusCode.INTERNAL:
        logger.error("an unexpected error ended a call", exc_info=exc)
    metadata = [(ERROR_KEY, type(exc).__name__)]
    if isinstance(exc, PrefixMissing):
        metadata += [(LENGTH_KEY, str(exc.held_length)), (HASH_KEY, str(exc.held_hash))]
    await context.abort(code, str(exc) or type(exc).__name__, tuple(metadata))


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns what a servicer raises into a status, so that servicers are free of it."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """Wraps the handlers that bough's services use: one request, one reply or a stream of them."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        decode, codec = handler.request_deserializer, (None, handler.response_serializer)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_guarded_stream(handler.unary_stream, decode), *codec)
        return grpc.unary_unary_rpc_method_handler(_guarded(handler.unary_unary, decode), *codec)


def _decoded(request: bytes, decode: Callable[[bytes], Any]) -> Any:
    """The message; raises InvalidRequest for bytes that are none, for which gRPC itself has only UNKNOWN."""
    try:
        return decode(request)
    except DecodeError as exc:
        raise errors.InvalidRequest(f"request: {len(request)} bytes that are no such message: {exc}") from exc


def _guarded(method: Callable[..., Awaitable[Any]], decode: Callable[[bytes], Any]) -> Callable[..., Awaitable[Any]]:
    async def run(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await method(_decoded(request, decode), context)
        except grpc.aio.AbortError:
            raise
        except Exception as exc:  # every error becomes a status here
            await _abort(context, exc)

    return run


def _guarded_stream(
    method: Callable[..., AsyncIterator[Any]], decode: Callable[[bytes], Any]
) -> Callable[..., AsyncIterator[Any]]:
    async def run(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            async for reply in method(_decoded(request, decode), context):
                yield reply
        except grpc.aio.AbortError:
            raise
        except Exception as exc:  # every error becomes a status here
            await _abort(context, exc)

    return run


@dataclass(frozen=True, slots=True)
class Served:
    """A running server."""

    port: int
    service: str
    _health: health.aio.HealthServicer

    async def set_ready(self, is_ready: bool) -> None:
        """Health of the named service; the empty name is SERVING for as long as the process lives."""
        status = health_pb2.HealthCheckResponse
        await self._health.set(self.service, status.SERVING if is_ready else status.NOT_SERVING)


@asynccontextmanager
async def serving(
    host: str, port: int, service: str, add: Callable[[grpc.aio.Server], None], grace_seconds: float = 1.0
) -> AsyncIterator[Served]:
    """Runs a server with health and reflection; NOT_SERVING until `set_ready`. Port 0 takes a free one.

    Raises:
        ConfigError: the port is in use or the host is not ours.
    """
    server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=_SERVER_OPTIONS)
    add(server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection([service, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as exc:
        raise ConfigError(f"port: cannot listen on {host}:{port}; is it in use? 0 takes a free one") from exc
    served = Served(bound, service, health_servicer)
    await served.set_ready(False)
    await server.start()
    try:
        yield served
    finally:
        await served.set_ready(False)
        await server.stop(grace_seconds)


def service_name(descriptor: Any, name: str) -> str:
    """Full name of a service of a generated file."""
    return str(descriptor.services_by_name[name].full_name)


async def is_serving(channel: grpc.aio.Channel, service: str, timeout_seconds: float) -> bool:
    """Asks grpc.health.v1; whatever goes wrong is a no."""
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_seconds)
    except grpc.aio.AioRpcError:
        return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
