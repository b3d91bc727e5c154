"""A gRPC server that one malformed call does not end.

grpc.aio reads the name of a call as UTF-8 in the loop that takes all calls, and where it is none that loop ends, and
the server with it (grpcio 1.85): a stranger needs a single packet. Here another server takes the port at once; what
runs at the old one goes on to its end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import grpc
from grpc._cython import cygrpc
from grpc.aio import _server

from bough.errors import ConfigError

logger = logging.getLogger(__name__)

OLD_SECONDS = 3600.0  # in which calls end that run at a server which has been replaced
BIND_SECONDS = 10.0  # in which its port is free again
POLL_SECONDS = 0.02
Option = tuple[str, int]


class _Loop(cygrpc.AioServer):  # type: ignore[misc]  # it has no types
    """Tells when it takes no more calls though nobody has stopped it."""

    died: Callable[[], None]

    def _server_main_loop(self, server_started: Any) -> Awaitable[None]:
        return self._watched(super()._server_main_loop(server_started))

    async def _watched(self, loop: Awaitable[None]) -> None:
        try:
            await loop
        except UnicodeDecodeError:
            self.died()


class _OneServer(_server.Server):
    """grpc.aio's own, around such a loop."""

    def __init__(
        self,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        options: Sequence[Option],
        max_calls: int,
        died: Callable[[], None],
    ) -> None:
        self._loop = cygrpc.get_working_loop()
        arguments = _server._augment_channel_arguments(options, None)
        self._server = _Loop(self._loop, None, (), interceptors, arguments, max_calls)
        self._server.died = died


class LastingServer:
    """One server after another at one port, all with the same services."""

    def __init__(
        self,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        options: Sequence[Option],
        max_calls: int,
        add: Callable[[grpc.aio.Server], None],
    ) -> None:
        self._make: Callable[[], _OneServer] = lambda: _OneServer(interceptors, options, max_calls, self._died)
        self._add = add
        self._server = self._made()
        self._credentials: grpc.ServerCredentials | None = None
        self._where = ""
        self._old: dict[_OneServer, asyncio.Task[None]] = {}
        self._kept: set[asyncio.Task[Any]] = set()  # answering calls at old servers, which hold them no longer
        self._replacing: asyncio.Task[None] | None = None
        self._is_stopped = False

    async def start(self, host_and_port: Callable[[int], str], port: int, credentials: Any) -> int:
        """The port. Raises ConfigError where it is in use, or the host is not ours."""
        self._credentials = credentials
        try:
            bound = self._bind(self._server, host_and_port(port))
        except RuntimeError as exc:
            raise ConfigError(
                f"port: cannot listen on {host_and_port(port)}; is it in use? 0 takes a free one"
            ) from exc
        self._where = host_and_port(bound)
        await self._server.start()
        return bound

    async def stop(self, grace_seconds: float) -> None:
        """Ends all of them; calls have so long."""
        self._is_stopped = True
        if self._replacing is not None:
            await self._replacing
        await asyncio.gather(*(server.stop(grace_seconds) for server in (self._server, *self._old)))

    def _made(self) -> _OneServer:
        server = self._make()
        self._add(server)  # type: ignore[arg-type]  # its stub says it is another class than the one it is
        return server

    def _bind(self, server: _OneServer, where: str) -> int:
        credentials = self._credentials
        port = server.add_secure_port(where, credentials) if credentials else server.add_insecure_port(where)
        return int(port)

    def _died(self) -> None:
        if not self._is_stopped:
            self._kept = {task for task in (*self._kept, *asyncio.all_tasks()) if not task.done()}
            self._replacing = asyncio.get_running_loop().create_task(self._replace())

    async def _replace(self) -> None:
        old = self._server
        logger.error("a call whose name is no text has ended gRPC's server at %s; another takes its place", self._where)
        self._old[old] = asyncio.create_task(self._run_out(old))
        with suppress(TimeoutError):
            async with asyncio.timeout(BIND_SECONDS):
                while not self._is_stopped and not await self._taken_over():
                    await asyncio.sleep(POLL_SECONDS)
                return
        logger.critical("gRPC's server at %s could not be replaced: its port is not free", self._where)

    async def _taken_over(self) -> bool:
        server = self._made()
        try:
            self._bind(server, self._where)
        except RuntimeError:
            return False
        await server.start()
        self._server = server
        return True

    async def _run_out(self, server: _OneServer) -> None:
        await server.stop(OLD_SECONDS)
        del self._old[server]
