"""Malformed gRPC messages over real channels, and malformed HTTP/2 frames over raw sockets."""

from __future__ import annotations

import asyncio
import ssl
import struct
from contextlib import suppress
from typing import Any

import grpc

from bough.rpc.server import open_channel
from bough.rpc.status_map import ERROR_KEY, MAX_MESSAGE_BYTES, STATUS_OF
from tests.fakes.fuzz.http_port import close_side
from tests.fakes.fuzz.mutation import Mutator
from tests.fakes.fuzz.ordinary import GRPC, HEALTH, SERVICE, Calls
from tests.fakes.fuzz.outcomes import ANSWER_SECONDS, Outcomes
from tests.fakes.http2 import ACK, DATA, GOAWAY, HEADERS, PING, PREFACE, SETTINGS, frame, literal

LAYER, FRAMES = "grpc", "http2 frames"
NAMES_OF_ERRORS = {kind.__name__: code for kind, code in STATUS_OF.items()}
NUM_TYPES = 12  # types of frames, unknown ones included
MOST_FRAMES = 12  # in a burst, before a ping
PATIENCE_SECONDS = 0.5
OWN_PING = b"are you?"
MOST_CALLS = 8  # at once on a channel
NO_METHODS = ("/x", SERVICE + "Other", "/bough.v1.None/Verify", SERVICE + "Generate/Generate", "/" + "y" * 3000)
# of which gRPC's own code gives the status
OWN_CODES = dict.fromkeys(NO_METHODS, "UNIMPLEMENTED") | {HEALTH: "NOT_FOUND"}
NAMES = ("authorization", "traceparent", "tracestate", "x-request-id", "bough-error", "user-agent", "x", "baggage")
BINARY_NAMES = ("x-bin", "grpc-trace-bin", "grpc-tags-bin", "bough-error-bin")
VALUES = (
    "", "Bearer", "Bearer ", "Bearer sk-bough-x", "Basic eA==", "Bearer " + "k" * 2000, "k" * 20_000, "=;,",
    "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "00-" + "a" * 32 + "-" + "b" * 16 + "-01", "ff-zz", "a=b," * 300,
    "%00%ff",
)  # fmt: skip


class GrpcSender:
    """Sends malformed calls of the given methods over one channel; every second one is of the first."""

    def __init__(
        self,
        address: str,
        mutator: Mutator,
        outcomes: Outcomes,
        layer: str = LAYER,
        calls: Calls = GRPC,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._channel = open_channel(address, credentials)
        self._mutator, self._outcomes = mutator, outcomes
        self._layer, self._calls = layer, calls

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    async def send(self) -> None:
        """Send some calls at once and wait for the first reply or the status of each."""
        await asyncio.gather(*(self._call() for _ in range(self._mutator.rng.randint(1, MOST_CALLS))))

    async def _call(self) -> None:
        rng = self._mutator.rng
        methods = [*self._calls]
        method = methods[0] if rng.random() < 0.5 else self._mutator.pick(methods)
        given = self._mutator.pick(self._calls[method])
        data = self._mutator.garbage() if rng.random() < 0.1 else self._mutator.message(given)
        data = data[:MAX_MESSAGE_BYTES]  # our channel's limit
        headers = self._headers() if rng.random() < 0.3 else ()
        if rng.random() < 0.02:
            method = self._mutator.pick(NO_METHODS)
        sent = repr((method, headers)).encode() + data
        ask: Any = self._channel.unary_stream(method)
        call = ask(data, timeout=ANSWER_SECONDS, metadata=headers)
        try:
            await call.read()
            call.cancel()
        except grpc.aio.AioRpcError as exc:
            self._note(exc, sent, OWN_CODES.get(method, ""), is_large=bool(headers))
            return
        self._outcomes.answered(self._layer, sent)

    def _headers(self) -> tuple[tuple[str, str | bytes], ...]:
        headers: list[tuple[str, str | bytes]] = []
        for _ in range(self._mutator.rng.randint(1, 4)):
            if self._mutator.rng.random() < 0.3:
                headers.append((self._mutator.pick(BINARY_NAMES), self._mutator.garbage(2000)))
            else:
                headers.append((self._mutator.pick(NAMES), self._mutator.pick(VALUES)))
        return tuple(headers)

    def _note(self, exc: grpc.aio.AioRpcError, sent: bytes, own_code: str, *, is_large: bool) -> None:
        """Record a status: one of bough's, or what gRPC itself says, `own_code`, or of headers that are too large."""
        code, name = exc.code(), str(dict(tuple(exc.trailing_metadata() or ())).get(ERROR_KEY))
        is_grpcs = code.name == own_code or (is_large and "metadata size" in str(exc.details()))
        if is_grpcs or (NAMES_OF_ERRORS.get(name) is code and exc.details()):
            self._outcomes.answered(self._layer, sent)
        else:
            problem = f"{self._layer}: {code.name}, which is none of bough's own: {str(exc.details())[:100]}"
            self._outcomes.failed(self._layer, problem, sent)


class FrameSender:
    """Sends bursts of malformed frames, each over a new connection, with TLS if a context is given."""

    def __init__(self, address: str, mutator: Mutator, outcomes: Outcomes, tls: ssl.SSLContext | None = None) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port, self._tls = host, int(port), tls
        self._mutator, self._outcomes = mutator, outcomes

    async def close(self) -> None:
        """Do nothing: no connection stays open."""

    async def send(self) -> None:
        """Send a burst; afterwards the connection must be closed or answer a ping."""
        frames = [self._frame() for _ in range(self._mutator.rng.randint(1, MOST_FRAMES))]
        is_http2 = self._mutator.rng.random() < 0.9
        beginning = PREFACE + frame(SETTINGS, 0, 0, b"") if is_http2 else self._mutator.garbage()
        data = beginning + b"".join(frames) + frame(PING, 0, 0, OWN_PING)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._answer(data)
        except TimeoutError:
            problem = f"http2: neither answer nor end in {ANSWER_SECONDS:g} s"
            self._outcomes.failed(FRAMES, problem, data, len(frames))
        except OSError as exc:
            self._outcomes.failed(FRAMES, f"http2: no connection: {exc.strerror}", data, len(frames))
        else:
            self._outcomes.answered(FRAMES, data, len(frames))

    async def _answer(self, data: bytes) -> None:
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                writer.write(data)
                await writer.drain()
                with suppress(TimeoutError):
                    async with asyncio.timeout(PATIENCE_SECONDS):
                        await _read_answer(reader)
                        return
                close_side(writer.transport)  # the server may be waiting for the rest of a frame
                await _read_answer(reader)
        finally:
            writer.transport.abort()

    def _frame(self) -> bytes:
        rng = self._mutator.rng
        drawn = rng.random()
        stream = self._mutator.pick((0, 1, 1, 3, 5, 2, 2**31 - 1))
        if drawn < 0.3:
            return frame(HEADERS, self._mutator.pick((4, 5, 4, 0, 0x2C)), stream, self._headers())
        if drawn < 0.5:
            return frame(DATA, rng.randrange(2), stream, self._data())
        payload = self._mutator.garbage(300)
        mutated = frame(rng.randrange(NUM_TYPES), rng.randrange(256), stream, payload)
        return self._mutator.changed(mutated) if rng.random() < 0.3 else mutated

    def _headers(self) -> bytes:
        method = self._mutator.pick([SERVICE + "Generate", SERVICE + "GetLoads", "/x", "", "/" + "x" * 200])
        fields = [
            (b":method", b"POST"), (b":scheme", b"http"), (b":path", method.encode()), (b":authority", b"fuzz"),
            (b"te", b"trailers"), (b"content-type", self._mutator.pick((b"application/grpc", b"text/plain", b""))),
            (b"grpc-timeout", self._mutator.pick((b"1S", b"-1S", b"99999999999H", b"x"))),
            (b"grpc-encoding", self._mutator.pick((b"identity", b"gzip", b"none"))), (b"x-bin", b"!!"),
        ]  # fmt: skip
        block = b"".join(literal(*field) for field in fields if self._mutator.rng.random() < 0.9)
        return self._mutator.changed(block) if self._mutator.rng.random() < 0.3 else block

    def _data(self) -> bytes:
        message = self._mutator.message(self._mutator.pick(GRPC[SERVICE + "Generate"]))[:4000]
        told = self._mutator.pick((len(message), len(message), 0, 2**32 - 1, len(message) + 9))
        return struct.pack(">BI", self._mutator.pick((0, 0, 1, 255)), told) + message


async def _read_answer(reader: asyncio.StreamReader) -> None:
    """Read frames up to one that shows the connection's state."""
    while True:
        head = await reader.readexactly(9)
        payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
        if head[3] == GOAWAY or (head[3] == PING and head[4] & ACK and payload == OWN_PING):
            return
