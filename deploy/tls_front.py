"""TLS for a server without TLS, such as the Valkey that comes with bough: a TLS port in front of its Unix socket."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from bough.errors import ConfigError

HANDSHAKE_SECONDS = 10.0
MAX_CONNECTIONS = 4096
PIECE_BYTES = 65536


class TlsFront:
    """Forwards connections from a TLS port to a Unix socket."""

    def __init__(self, socket: Path, context: Callable[[], ssl.SSLContext]) -> None:
        """Forward to `socket`; `context` returns a new object once the certificates have changed."""
        self._socket, self._context = socket, context
        self._listening: tuple[ssl.SSLContext, asyncio.Server] | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int) -> None:
        """Listen with the present certificates; existing connections stay.

        Raises:
        ConfigError: the port is in use.
        """
        context = self._context()
        if self._listening is not None:
            of, server = self._listening
            if of is context:
                return
            server.close()
        try:
            server = await asyncio.start_server(
                self._accept, host, port, ssl=context, ssl_handshake_timeout=HANDSHAKE_SECONDS
            )
        except OSError as exc:
            raise ConfigError(f"port: value was {port}; must be free at {host} ({exc.strerror})") from exc
        self._listening = context, server

    async def close(self) -> None:
        """Close the port and the connections."""
        if self._listening is not None:
            self._listening[1].close()
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
            inner_reader, inner_writer = await asyncio.open_unix_connection(self._socket)
        except OSError:  # the server has ended; its supervisor checks for that
            writer.transport.abort()
            return
        try:
            await asyncio.gather(_pass_on(reader, inner_writer), _pass_on(inner_reader, writer))
        finally:
            inner_writer.transport.abort()
            writer.transport.abort()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes until one end closes, then close the other."""
    with suppress(OSError):
        while piece := await reader.read(PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
    writer.close()
