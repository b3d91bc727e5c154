"""Bytes of other protocols than a port's, over raw sockets: to both APIs, workers, the index, and one behind TLS."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import grpc

from bough.config.addresses import free_port
from bough.security.certificates import CertificateFiles
from deploy.index import IndexServer
from deploy.settings import IndexSettings
from tests.fakes.fuzz.http_port import close_side
from tests.fakes.fuzz.mutation import Mutator
from tests.fakes.fuzz.outcomes import ANSWER_SECONDS, Outcomes

LAYER, HOST = "other protocols", "127.0.0.1"
PATIENCE_SECONDS = 0.05  # wait for the end of a connection, before closing our side
HTTP = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
COMMAND = b"*1\r\n$4\r\nPING\r\n"  # of the index


@dataclass(frozen=True, slots=True)
class Trust:
    """How a caller speaks with the processes: in plain text, or with a certificate of their authority."""

    files: CertificateFiles | None = None
    http: ssl.SSLContext | None = None
    http2: ssl.SSLContext | None = None
    credentials: grpc.ChannelCredentials | None = None

    @classmethod
    def of(cls, files: CertificateFiles) -> Self:
        """A caller that shows this certificate. Raises OSError for a file that cannot be read."""
        read = [Path(path).read_bytes() for path in (files.authority, files.key, files.cert)]
        return cls(files, _context(files), _context(files, "h2"), grpc.ssl_channel_credentials(*read))


def _context(files: CertificateFiles, *protocols: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=files.authority)
    context.load_cert_chain(files.cert, files.key)
    context.set_alpn_protocols(list(protocols))
    return context


def client_hello() -> bytes:
    """What TLS says first."""
    sent = ssl.MemoryBIO()
    side = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        side.do_handshake()
    return sent.read()


class OtherProtocolSender:
    """Sends bytes to random ports, each time over a new connection, which the server must end."""

    def __init__(self, ports: dict[str, ssl.SSLContext | None], mutator: Mutator, outcomes: Outcomes) -> None:
        """Ports by address; some bytes for those with a context, which speak TLS, come after a whole handshake."""
        self._ports, self._mutator, self._outcomes = ports, mutator, outcomes
        self._hello = client_hello()

    async def close(self) -> None:
        """Do nothing: no connection stays open."""

    async def send(self) -> None:
        """Send bytes; afterwards the connection must end, with or without an answer."""
        address, data = self._mutator.pick([*self._ports]), self._made()
        tls = self._ports[address] if self._mutator.rng.random() < 0.2 else None
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await _end(address, data, tls)
        except TimeoutError:
            self._outcomes.failed(LAYER, f"{LAYER}: no end in {ANSWER_SECONDS:g} s", data)
        except OSError as exc:
            self._outcomes.failed(LAYER, f"{LAYER}: no connection: {exc}", data)
        else:
            self._outcomes.answered(LAYER, data)

    def _made(self) -> bytes:
        rng = self._mutator.rng
        data: bytes = self._mutator.pick((HTTP, HTTP2, COMMAND, self._hello, self._hello, self._mutator.garbage(2000)))
        drawn = rng.random()
        if drawn < 0.2:
            return data[: rng.randrange(len(data) + 1)]
        return self._mutator.changed(data, self._hello) if drawn < 0.7 else data


async def _end(address: str, data: bytes, tls: ssl.SSLContext | None) -> None:
    """Send bytes over a new connection, until the server ends it. Raises OSError if there is no connection."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=tls)
    try:
        with suppress(OSError):  # a reset, or what TLS makes of the server's last words
            if tls is None:
                writer.write(data)
            else:
                os.write(writer.get_extra_info("socket").fileno(), data)
            answer = asyncio.ensure_future(reader.read())
            await asyncio.wait([answer], timeout=PATIENCE_SECONDS)
            if not answer.done():
                close_side(writer.transport)
            await answer
    finally:
        writer.transport.abort()


@asynccontextmanager
async def index_behind_tls(files: CertificateFiles | None) -> AsyncIterator[IndexServer | None]:
    """An index as `deploy/` has it with these certificates; its port of TLS is served by this process. None without."""
    if files is None:
        yield None
        return
    index = IndexServer(
        IndexSettings(host=HOST, port=free_port(HOST), tls_cert=files.cert, tls_key=files.key, tls_ca=files.authority),
        HOST,
    )
    await index.wait()
    try:
        yield index
    finally:
        await index.stop()
