"""TLS for a server without TLS, such as the Valkey that comes with bough: a TLS port in front of its Unix socket."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from bough.errors import ConfigError
from bough.runtime.connections import Connection, connection_limit
from bough.security.handshakes import Handshakes

PIECE_BYTES = 65536

Result = TypeVar("Result")


def most_connections() -> int:
    """Limit of open connections, each of which has two descriptors: together half of the process's."""
    return connection_limit(num_descriptors=4)


class TlsFront:
    """Forwards connections from a TLS port to a Unix socket, on a thread and an event loop of its own.

    Ray's loops are uvloop's, whose `start_tls` loses the handshake's first bytes where they have come before it.
    """

    def __init__(self, socket: Path, context: Callable[[], ssl.SSLContext]) -> None:
        """Forward to `socket`; `context` returns a new object once the certificates have changed."""
        self._socket, self._server = socket, cast(asyncio.Server | None, None)
        self._connections: set[Connection] = set()  # handshakes included
        self._handshakes = Handshakes(self._protocol, context, self._connections, most_connections)
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tls-front", daemon=True)
        self._thread.start()

    async def listen(self, host: str, port: int) -> None:
        """Listen; each connection gets the certificates of its time. Raise ConfigError if the port is in use."""
        try:
            self._server = await self._there(self._loop.create_server(self._handshakes, host, port))
        except OSError as exc:
            raise ConfigError(f"port: must be free at {host}, got {port} ({exc.strerror})") from exc

    async def close(self) -> None:
        """Close the port and the connections, and end the thread."""
        await self._there(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in [*self._connections]:
            connection.abort()
        while self._connections:
            await asyncio.sleep(0)

    async def _there(self, call: Coroutine[Any, Any, Result]) -> Result:
        """Run the call on the front's own loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))

    def _protocol(self) -> asyncio.Protocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(), self._accept)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Forwarded(asyncio.create_task(self._serve(reader, writer)))
        self._connections.add(connection)
        connection.task.add_done_callback(lambda _: self._end(connection, writer))

    def _end(self, connection: _Forwarded, writer: asyncio.StreamWriter) -> None:
        """Close the peer's connection, also where its task was cancelled before it began."""
        self._connections.discard(connection)
        writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):  # the server has ended; its supervisor checks for that
            inner_reader, inner_writer = await asyncio.open_unix_connection(self._socket)
            try:
                await asyncio.gather(_pass_on(reader, inner_writer), _pass_on(inner_reader, writer))
            finally:
                inner_writer.transport.abort()


@dataclass(frozen=True, slots=True)
class _Forwarded:
    """A connection after its handshake. It counts as busy: its peer has shown a certificate."""

    task: asyncio.Task[None]
    idle_since: None = None

    def abort(self) -> None:
        self.task.cancel()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes until one end closes, then close the other."""
    with suppress(OSError):
        while piece := await reader.read(PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
    writer.close()
