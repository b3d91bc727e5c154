"""A client's side of HTTP/1.1 for pipelines, which reads nothing but statuses and where answers end."""

from __future__ import annotations

import asyncio
import os
import ssl
from contextlib import suppress
from typing import NamedTuple, Self, cast

HEAD_END, LINE_END = b"\r\n\r\n", b"\r\n"
READ_BYTES = 65536


class Answer(NamedTuple):
    """The status of an answer, and whether the server closes the connection after it."""

    status: str
    is_last: bool


CLOSED = Answer("closed", is_last=True)
CUT = ", cut by a reset"  # behind a status whose answer's rest has not come


def close_side(transport: asyncio.WriteTransport) -> None:
    """Close our side of a connection; both where it has TLS, which cannot close one. Raises OSError."""
    if transport.can_write_eof():
        transport.write_eof()
    else:
        transport.close()


class HttpConnection(asyncio.Protocol):
    """One connection. What came before a reset is still read, as asyncio's own StreamReader would not let it be."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._is_closed = self._is_reset = False
        self._changed = asyncio.Event()
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(cls, host: str, port: int, tls: ssl.SSLContext | None = None) -> Self:
        """Connect, with TLS if a context is given. Raises OSError."""
        _, connection = await asyncio.get_running_loop().create_connection(cls, host, port, ssl=tls)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Keep the bytes."""
        self._received += data
        self._changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Read what has come, which asyncio leaves where a write failed, and tell that nothing more comes."""
        self._is_closed = True
        if exc is not None and self._transport is not None:
            self._is_reset = True
            socket = self._transport.get_extra_info("socket")  # None where it has TLS, whose bytes are of no use
            with suppress(OSError):
                while socket is not None and (data := os.read(socket.fileno(), READ_BYTES)):
                    self._received += data
        self._changed.set()

    def write(self, data: bytes) -> None:
        """Send data, unless the connection is closed."""
        if self._transport is not None and not self._is_closed:
            self._transport.write(data)

    def write_eof(self) -> None:
        """Close our side, unless the connection is closed; the loop may not have told of a reset yet.

        TLS in asyncio closes both sides at once, after which nothing is read.
        """
        if self._transport is not None and not self._is_closed:
            with suppress(OSError):
                close_side(self._transport)

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    async def answer(self, seconds: float, *, is_head: bool = False) -> Answer:
        """The next answer, of which only the head need come if `is_head`. Raises TimeoutError.

        A server that refuses a message and closes while more of it arrives resets the connection, which may lose what
        it had sent before (RFC 9112, 9.6).
        """
        answer = self._taken(is_head)
        if answer is None:
            async with asyncio.timeout(seconds):
                while answer is None:
                    if self._is_closed:
                        return self._ended()
                    self._changed.clear()
                    await self._changed.wait()
                    answer = self._taken(is_head)
        return answer

    def _ended(self) -> Answer:
        """The answer that never comes to its end."""
        cut = self._taken(is_head=True) if self._is_reset else None
        return Answer(f"{cut.status}{CUT}", is_last=True) if cut else CLOSED

    def _taken(self, is_head: bool) -> Answer | None:
        at = self._received.find(HEAD_END)
        if at < 0:
            return None
        lines = self._received[:at].decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines if ": " in line)
        end = at + len(HEAD_END)
        if not is_head:
            is_chunked = "chunked" in headers.get("transfer-encoding", "")
            end = self._chunks_end(end) if is_chunked else end + int(headers.get("content-length", "0"))
        if not 0 < end <= len(self._received):
            return None
        del self._received[:end]
        return Answer(lines[0].split(" ")[1], headers.get("connection") == "close")

    def _chunks_end(self, at: int) -> int:
        """Where chunks that begin at `at` end; 0 if they have not come to their end."""
        while (line_end := self._received.find(LINE_END, at)) >= 0:
            size = int(self._received[at:line_end], 16)
            at = line_end + len(LINE_END) + size + len(LINE_END)
            if size == 0:
                return at
        return 0
