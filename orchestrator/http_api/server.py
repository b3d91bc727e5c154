"""The HTTP server: uvicorn in the event loop that everything else runs in."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from bough.errors import ConfigError

IDLE_SECONDS = 75  # after which a connection without a request is closed; balancers keep theirs for a minute
GRACE_SECONDS = 2  # that answers may take to be sent when the server ends; requests have ended before


@asynccontextmanager
async def http_serving(host: str, port: int, app: ASGIApp) -> AsyncIterator[int]:
    """Serves for as long as the block runs, which is given the port; 0 takes a free one.

    Raises:
        ConfigError: the port is in use, or the host is not ours.
    """
    listener = _listener(host, port)
    config = uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    server = _Server(config)
    bound = int(listener.getsockname()[1])
    serving = asyncio.create_task(server.serve([listener]))
    try:
        yield bound
    finally:
        server.should_exit = True
        await serving


def _listener(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as exc:
        raise ConfigError(f"--http-port: cannot listen on {host}:{port}: {exc}") from exc
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as exc:
        listener.close()
        raise ConfigError(f"--http-port: cannot listen on {host}:{port}: {exc}; 0 takes a free one") from exc
    return listener


class _Server(uvicorn.Server):
    """Signals are the process's business: it drains first, and then sets `should_exit`."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Takes none."""
        yield


class _Protocol(H11Protocol):
    """Lets a request end its connection at once, and ends those that nobody uses."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection that never asks for anything is closed like one that has ceased to."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, "abort": transport.abort}
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        """Closing would wait until the peer has read what was sent before; it had the time."""
        self.transport.abort()
