"""TLS for a server that speaks none, such as the Valkey that comes with bough: a port in front of its Unix socket."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from bough.errors import ConfigError

logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 10.0
MAX_CONNECTIONS = 4096
PIECE_BYTES = 65536


class TlsFront:
    """Passes on what comes in over TLS, with the certificates of the moment at which a connection begins."""

    def __init__(self, socket: Path, context: Callable[[], ssl.SSLContext]) -> None:
        self._socket, self._context = socket, context
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> None:
        """Listens. Raises ConfigError where it cannot, such as where the port is in use."""
        try:
            self._server = await asyncio.start_server(self._accept, host, port)
        except OSError as exc:
            raise ConfigError(f"port: value was {port}; must be free at {host} ({exc.strerror})") from exc

    async def close(self) -> None:
        """Ends the connections."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        connection = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await writer.start_tls(self._context(), ssl_handshake_timeout=HANDSHAKE_SECONDS)
        except OSError as exc:  # among them are ssl.SSLError and TimeoutError
            logger.warning("TLS with %s failed: %s", writer.get_extra_info("peername"), exc or type(exc).__name__)
            writer.transport.abort()
            return
        try:
            inner_reader, inner_writer = await asyncio.open_unix_connection(self._socket)
        except OSError:  # it has ended, which its supervisor notices
            writer.transport.abort()
            return
        try:
            await asyncio.gather(_pass_on(reader, inner_writer), _pass_on(inner_reader, writer))
        finally:
            inner_writer.transport.abort()
            writer.transport.abort()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until one end closes, which closes the other."""
    with suppress(OSError):
        while piece := await reader.read(PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
    writer.close()
