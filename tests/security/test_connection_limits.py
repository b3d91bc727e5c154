"""Servers with TLS: handshakes and connections share one limit, and a caller that holds all places blocks no other."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from starlette.responses import PlainTextResponse

from bough.config.addresses import free_port
from bough.security.certificates import CertificateFiles
from bough.security.tls import CurrentContext, Tls, server_context
from deploy.index import TlsFront, most_connections
from orchestrator.http_api.server import http_serving
from tests.fakes.certificates import Authority
from tests.fakes.waiting import until

MOST = 4
SECONDS = 30.0
WHOLE = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
AUTHORITY = Authority()
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def server_tls(folder: Path) -> CurrentContext:
    """For servers that ask for certificates of the authority."""
    files = AUTHORITY.files(folder)
    tls = Tls(CertificateFiles(files.cert, files.key, files.authority), is_server=True)
    return server_context(tls, lambda now: now.authority)


def client_tls(folder: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=AUTHORITY.certificate.decode())
    context.load_cert_chain(*AUTHORITY.pair("client").write(folder, "client"))
    return context


@asynccontextmanager
async def connected(port: int, num: int, context: ssl.SSLContext | None = None) -> AsyncIterator[list[Streams]]:
    """This many connections; those without a context are silent."""
    streams = [await asyncio.open_connection("127.0.0.1", port, ssl=context) for _ in range(num)]
    try:
        yield streams
    finally:
        for _, writer in streams:
            writer.transport.abort()


async def until_closed(streams: list[Streams], num: int) -> None:
    """Wait until the server has closed exactly this many of the connections."""

    async def closed(reader: asyncio.StreamReader) -> None:
        with suppress(ConnectionError):
            await reader.read()

    reading = [asyncio.create_task(closed(reader)) for reader, _ in streams]
    try:
        await until(lambda: sum(task.done() for task in reading) >= num)
        await asyncio.sleep(0.2)
        assert sum(task.done() for task in reading) == num
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


async def test_handshakes_and_connections_of_the_http_port_are_counted_together(tmp_path: Path) -> None:
    """Each had half of the descriptors, together all: the process had none left for its workers."""
    app, tls = PlainTextResponse("ok"), server_tls(tmp_path)
    async with http_serving("127.0.0.1", 0, app, tls, limit=lambda: MOST) as port:
        context = client_tls(tmp_path)
        async with connected(port, 3, context) as whole, connected(port, 20) as silent, asyncio.timeout(SECONDS):
            await until_closed([*whole, *silent], 23 - MOST)
            async with connected(port, 1, context) as ((reader, writer),):
                writer.write(WHOLE)
                assert (await reader.readline()).startswith(b"HTTP/1.1 200"), "one of the silent ones gives way"


async def test_silent_connections_at_the_indexs_proxy_block_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were not counted at all before their handshakes had ended."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
        writer.close()

    monkeypatch.setattr("deploy.index.most_connections", lambda: MOST)
    index = await asyncio.start_unix_server(echo, tmp_path / "socket")
    front = TlsFront(tmp_path / "socket", server_tls(tmp_path))
    port = free_port("127.0.0.1")
    await front.listen("127.0.0.1", port)
    context = client_tls(tmp_path)
    async with index, connected(port, 3, context) as known, connected(port, 20) as silent, asyncio.timeout(SECONDS):
        await until_closed(silent, 19)
        async with connected(port, 1, context) as newest:
            for reader, writer in (*known, *newest):
                writer.write(b"hello\n")
                assert await reader.readline() == b"hello\n"
        await until_closed(known, 0)
    await front.close()


def test_the_indexs_proxy_leaves_half_of_the_descriptors_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connection has two."""
    monkeypatch.setattr("bough.runtime.connections.resource.getrlimit", lambda _: (1024, 1024))
    assert most_connections() == 256
