"""Malformed HTTP over raw sockets: bodies, headers, chunks and bytes, many on a connection, several at once."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from contextlib import suppress
from typing import NamedTuple, Self, cast
from urllib.parse import urlsplit

from tests.fakes.fuzz.mutation import Mutator
from tests.fakes.fuzz.ordinary import BODIES, PATHS
from tests.fakes.fuzz.outcomes import ANSWER_SECONDS, Outcomes

LAYER = "http"
MOST_PIPELINED = 16  # messages sent before the first answer is read
PATIENCE_SECONDS = 0.2  # wait for an answer to a possibly incomplete message, before closing our side
METHODS = ("GET", "POST", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "CONNECT", "TRACE", "get", "G\x00T", "")
HEADERS = (
    b"content-length: 5", b"content-length: -1", b"content-length: 99999999999999999999", b"content-length: 1, 1",
    b"transfer-encoding: chunked", b"transfer-encoding: gzip", b"transfer-encoding: chunked, chunked", b"host:",
    b"host: [::1", b"host: a b", b"host: \xff", b"expect: 100-continue", b"expect: something", b"upgrade: h2c",
    b"connection: close", b"connection: upgrade", b"x-request-id: a\tb", b"x-session-id: " + b"s" * 400,
    b"x-session-id: \xff\xfe", b"authorization: Bearer " + b"k" * 2000, b"authorization: \xff", b"x: " + b"y" * 70_000,
    b"x" * 3000 + b": y", b" folded", b": none", b"no colon", b"content-type: text/plain", b"content-encoding: gzip",
    b"content-type: application/json; charset=\xff", b"range: bytes=0-99999999999", b"cookie: " + b"a=b;" * 500,
)  # fmt: skip

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


class Sent(NamedTuple):
    """A message, and whether it is complete according to its header."""

    data: bytes
    is_whole: bool


class HttpSender:
    """Sends malformed HTTP over one connection at a time, with TLS if a context is given."""

    def __init__(self, url: str, mutator: Mutator, outcomes: Outcomes, tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._tls = parts.hostname or "", parts.port or 0, tls
        self._mutator, self._outcomes = mutator, outcomes
        self._connection: HttpConnection | None = None

    async def send(self) -> None:
        """Send a pipeline, which an incomplete message may end, and record the outcome of each message."""
        pipeline = [self._made()]
        while pipeline[-1].is_whole and len(pipeline) < MOST_PIPELINED and self._mutator.rng.random() < 0.95:
            pipeline.append(self._made())
        try:
            connection = self._connection or await HttpConnection.open(self._host, self._port, self._tls)
        except OSError as exc:
            self._outcomes.failed(LAYER, f"http: no connection: {exc.strerror}", pipeline[0].data)
            return
        self._connection = connection
        connection.write(b"".join(sent.data for sent in pipeline))
        for sent in pipeline:
            if not await self._recorded(connection, sent, may_be_cut=not pipeline[-1].is_whole):
                await self.close()  # messages after the last answer are none of the server's
                return

    async def _recorded(self, connection: HttpConnection, sent: Sent, *, may_be_cut: bool) -> bool:
        """Wait for the answer to a message that has been sent, and record it. Returns whether another may follow."""
        try:
            if sent.is_whole:
                answer = await connection.answer(ANSWER_SECONDS)
            else:
                answer = await _hurried(connection)
        except TimeoutError:
            self._outcomes.failed(LAYER, f"http: no status in {ANSWER_SECONDS:g} s", sent.data)
            return False
        is_unanswered = answer == CLOSED or (answer.status.endswith(CUT) and not may_be_cut)
        if answer.status.startswith("500") or (is_unanswered and sent.is_whole):
            self._outcomes.failed(LAYER, f"http: {answer.status}", sent.data)
        else:
            self._outcomes.answered(LAYER, sent.data)
        return sent.is_whole and not answer.is_last

    async def close(self) -> None:
        """Close the connection, if there is one."""
        if self._connection is not None:
            self._connection.abort()
            self._connection = None

    def _made(self) -> Sent:
        rng = self._mutator.rng
        drawn = rng.random()
        if drawn < 0.7:
            return self._with_body()
        if drawn < 0.85:
            return Sent(self._odd_head(), is_whole=False)
        if drawn < 0.93:
            return Sent(self._chunked(), is_whole=False)
        whole = self._with_body().data
        return Sent(self._mutator.garbage(2000) if drawn < 0.96 else whole[: rng.randrange(len(whole))], is_whole=False)

    def _with_body(self) -> Sent:
        path = self._mutator.pick([*BODIES])
        body = self._mutator.body(self._mutator.pick(BODIES[path])) if self._mutator.rng.random() < 0.95 else b""
        return Sent(_head("POST", path, b"content-length: %d" % len(body)) + body, is_whole=True)

    def _odd_head(self) -> bytes:
        pick = self._mutator.pick
        body = json.dumps(pick(BODIES["/v1/completions"])).encode()
        lines = [pick(HEADERS) for _ in range(self._mutator.rng.randint(0, 3))]
        head = _head(pick(METHODS), pick(PATHS), *lines)
        return self._mutator.changed(head) + body if self._mutator.rng.random() < 0.5 else head + body

    def _chunked(self) -> bytes:
        rng = self._mutator.rng
        body = self._mutator.body(self._mutator.pick(BODIES["/v1/chat/completions"]))
        chunks = b""
        while body:
            size = rng.randint(1, 200)
            told = size if rng.random() < 0.95 else self._mutator.pick((0, -1, 2**31, 2**64, 7))
            chunks += b"%x\r\n" % told if told >= 0 else b"-1\r\n"
            chunks, body = chunks + body[:size] + b"\r\n", body[size:]
        end: bytes = self._mutator.pick(
            (b"0\r\n\r\n", b"0\r\n\r\n", b"", b"0\r\nx: y\r\n\r\n", b"zz\r\n", b"0\r\n" + b"t: v\r\n" * 9000)
        )
        return _head("POST", "/v1/chat/completions", b"transfer-encoding: chunked") + chunks + end


def _head(method: str, path: str, *lines: bytes) -> bytes:
    first = f"{method} {path} HTTP/1.1".encode("latin-1", "replace")
    return b"\r\n".join((first, b"host: localhost", b"content-type: application/json", *lines, b"", b""))


async def _hurried(connection: HttpConnection) -> Answer:
    """The head of an answer; if none comes within PATIENCE_SECONDS, our side is closed first. Raises TimeoutError."""
    with suppress(TimeoutError):
        return await connection.answer(PATIENCE_SECONDS, is_head=True)
    connection.write_eof()
    return await connection.answer(ANSWER_SECONDS, is_head=True)
