"""grpc.health.v1, without keys; no caller can block others."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from bough.errors import DeadlineExceeded, Exhausted, Unavailable
from bough.rpc.services import ServicerContext

MAX_WATCHERS = 256  # streams; Check calls are limited by the number of connections
WRITE_SECONDS = 10.0  # for which a watcher may take to read an update
RETRY_SECONDS = 5.0


class HealthService(health.aio.HealthServicer):  # type: ignore[misc]  # it has no types
    """The library's service writes its streams one after another, so that a stalled one blocks all; this does not."""

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
        """Override of the base class, through which all changes go."""
        self._server_status[service] = status
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


async def write(context: ServicerContext, reply: Any, stalled_seconds: float | None) -> None:
    """Send a reply of a stream. Raises DeadlineExceeded if its reader takes nothing for so long, or Unavailable."""
    try:
        async with asyncio.timeout(stalled_seconds):
            await context.write(reply)
    except TimeoutError as exc:
        raise DeadlineExceeded(
            f"the stream has not been read for {stalled_seconds:g} s; it is ended, and can be resumed"
        ) from exc
    except grpc.aio.InternalError as exc:
        raise Unavailable("the caller has gone") from exc
