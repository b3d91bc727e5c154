"""grpc.health.v1 for whoever asks, keys or not: so that nobody who asks can be in the way of the others."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from bough.errors import DeadlineExceeded, Exhausted, Unavailable

MAX_WATCHERS = 1024  # streams of it; single questions are as many as there are connections
WRITE_SECONDS = 10.0  # in which a watcher takes what it is told, or is let go
RETRY_SECONDS = 5.0


class HealthService(health.aio.HealthServicer):  # type: ignore[misc]  # it has no types
    """As the library's, whose streams are told one after another, so that one that does not read stops the server."""

    def __init__(self) -> None:
        super().__init__()
        self._num_watchers = 0
        self._changed = asyncio.Event()  # another one after each change

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Tells of a service, and of every change that the caller has not missed; too many are Exhausted."""
        if self._num_watchers >= MAX_WATCHERS:
            raise Exhausted(f"{self._num_watchers} callers watch health, as many as may; Check would do", RETRY_SECONDS)
        self._num_watchers += 1
        try:
            await self._tell(request.service, context)
        finally:
            self._num_watchers -= 1

    async def _tell(self, service: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        last = None
        while True:
            changed = self._changed
            status = self._server_status.get(service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != last:
                await _write(context, health_pb2.HealthCheckResponse(status=status))
            last = status
            await changed.wait()

    async def _set(self, service: str, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        """Of the base class, which all changes go through."""
        self._server_status[service] = status
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


async def _write(context: grpc.aio.ServicerContext[Any, Any], response: health_pb2.HealthCheckResponse) -> None:
    try:
        async with asyncio.timeout(WRITE_SECONDS):
            await context.write(response)
    except TimeoutError as exc:
        raise DeadlineExceeded(f"the stream has not been read for {WRITE_SECONDS:g} s") from exc
    except grpc.aio.InternalError as exc:
        raise Unavailable("the caller has gone") from exc
