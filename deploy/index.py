"""The index that Serve supervises: a Valkey server on a fixed port of its replica's node, and TLS in front of it.

The index is never the truth (DESIGN, rule 4), so nothing is saved: heartbeats, and the next record of each running
session, restore what a restart loses.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import quote, urlencode

from bough.config.addresses import bare, is_wildcard, joined
from bough.config.processes import ServiceConfig
from bough.config.reader import with_shared
from bough.errors import ConfigError, Unavailable
from bough.processes.child import open_program, stop_program
from bough.processes.launch import valkey_command
from bough.registry.connection import PASSWORD_FILE, IndexConnection
from bough.registry.registry import Registry
from bough.runtime.connections import Connection, connection_limit
from bough.security.access import Access, require_guarded
from bough.security.keys import hash_of
from bough.security.tls import Handshakes
from deploy.settings import INDEX, IndexSettings

START_SECONDS = 20.0
READY = "Ready to accept connections"
STOP_SECONDS = 5.0
NO_SECRETS: tuple[str, ...] = ()
PIECE_BYTES = 65536  # copied in one step

# Settings of a program, by their names in the index's URL.
_PASSWORD = {PASSWORD_FILE: "worker_key_file"}
_TLS = {"ssl_ca_certs": "tls_ca", "ssl_certfile": "tls_cert", "ssl_keyfile": "tls_key"}

Result = TypeVar("Result")


class IndexPlace(NamedTuple):
    """Where an index is, without secrets: each process adds its own password file and certificates."""

    url: str
    has_password: bool = False  # the workers' secret is the password
    has_tls: bool = False  # with certificates of the processes' authority

    def url_for(self, config: ServiceConfig) -> str:
        """Return the URL for a process with these settings. Raise ConfigError naming a missing setting."""
        wanted = (_PASSWORD if self.has_password else {}) | (_TLS if self.has_tls else {})
        for setting in wanted.values():
            if not getattr(config, setting):
                variable = f"BOUGH_{setting.upper()}"
                raise ConfigError(
                    f"program.{setting}: missing; must be given, or {variable} set, as the index requires it"
                )
        settings = {query: getattr(config, setting) for query, setting in wanted.items()}
        return f"{self.url}?{urlencode(settings)}" if settings else self.url


class HeadPlace(NamedTuple):
    """Where a stage's head is."""

    address: str


class IndexServer:
    """One Valkey server, reachable from other nodes."""

    def __init__(self, settings: IndexSettings, host: str) -> None:
        """Start the server on `host`, this node's address, unless the settings name another.

        Raise ConfigError if others could reach it without a secret or certificates, or a secret's file is unusable.
        """
        settings = with_shared(settings, os.environ)
        own = bare(settings.host)
        known, self._host = (host if is_wildcard(own) else own), own or bare(host)
        self._settings = replace(settings, host=self._host)
        try:
            require_guarded(self._settings)
            self._access = Access.of(self._settings)
        except ConfigError as exc:
            raise ConfigError(f"{INDEX}.user_config: {exc}") from exc
        has_tls = self._access.tls is not None
        url = f"{'rediss' if has_tls else 'redis'}://{joined(known, settings.port)}"
        self.place = IndexPlace(url, self._access.key is not None, has_tls)
        self._secrets = self._access.key.file.value if self._access.key else NO_SECRETS
        self._folder = TemporaryDirectory(prefix="bough-index-")  # of mode 700
        self._socket = Path(self._folder.name) / "socket"
        self._registry = Registry(self.place.url_for(self._settings))
        try:
            self._child = open_program("index", index_command(self._settings, self._secrets, self._socket), {})
        except BaseException:
            self._folder.cleanup()
            raise
        try:  # the front comes last: if a later step failed, nothing would end its thread
            context = self._access.worker_context
            self._front = None if context is None else TlsFront(self._socket, context)
        except BaseException:
            self._child.process.kill()  # it has nothing to save
            self._child.process.wait()
            self._folder.cleanup()
            raise

    async def wait(self) -> None:
        """Wait until it answers. Raise ConfigError if it has ended instead, for example as its port is in use.

        An index that does not answer in time is stopped.
        """
        try:
            await self._answers()
        except BaseException:
            await self.stop()
            raise

    async def _answers(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while READY not in self._child.tail():  # a ping might reach another server on this port
            if self._child.has_ended():
                raise ConfigError(self._child.describe_end())
            if time.monotonic() > deadline:
                raise Unavailable(f"the index at {self.place.url} does not start:\n{self._child.tail()}")
            await asyncio.sleep(0.05)
        if self._front is not None:
            await self._front.listen(self._host, self._settings.port)
        await self._registry.ping()

    async def check(self) -> None:
        """Raise Unavailable if it has ended or does not answer; after three such checks in a row Serve replaces it.

        The records of sessions are lost with it.
        """
        if self._child.has_ended():
            raise Unavailable(self._child.describe_end())
        await asyncio.to_thread(self._access.refresh)
        if self._access.key is not None and self._secrets != self._access.key.file.value:
            await self._change_secrets(self._access.key.file.value)
        await self._registry.ping()

    async def stop(self) -> None:
        """Stop the server and delete its folder."""
        try:
            await self._registry.close()
            if self._front is not None:
                await self._front.close()
        finally:
            await stop_program(self._child, STOP_SECONDS)
            self._folder.cleanup()

    async def _change_secrets(self, secrets: tuple[str, ...]) -> None:
        connection = IndexConnection(f"unix://{self._socket}?password={quote(self._secrets[0], safe='')}")
        try:
            await connection.redis.execute_command("ACL", "SETUSER", *_user(secrets))
        finally:
            await connection.close()
        self._secrets = secrets


def index_command(settings: IndexSettings, secrets: Sequence[str], socket: Path) -> list[str]:
    """Return Valkey's command line. With certificates it listens on its Unix socket only, behind `TlsFront`.

    Protected mode is off, as it would refuse other nodes. Valkey evicts nothing (only the registry does, in its own
    order), but a full server would refuse new values, leases of workers too; so `memory` must exceed all quotas
    (docs/decisions/030-index-is-never-the-truth.md).
    """
    values = {
        "port": "0" if settings.tls_cert else str(settings.port),
        "bind": settings.host,
        "unixsocket": str(socket),
        "protected-mode": "no",
        "save": "",
        "appendonly": "no",
        "maxmemory": f"{settings.memory}mb",
        "maxmemory-policy": "noeviction",
    }
    command = valkey_command(values)
    return [*command, "--user", *_user(secrets)] if secrets else command


def _user(secrets: Sequence[str]) -> list[str]:
    """Return the ACL of a user who may do everything with any of the secrets; it has only their hashes."""
    return ["default", "on", "resetpass", *(f"#{hash_of(secret)}" for secret in secrets), "~*", "&*", "+@all"]


def most_connections() -> int:
    """Limit of open connections, each of which has two descriptors: together half of the process's."""
    return connection_limit(num_descriptors=4)


class TlsFront:
    """Forwards connections from a TLS port to a Unix socket, on its own thread and event loop.

    Ray's loops are uvloop's, whose `start_tls` loses bytes of the handshake that arrive before it.
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
        """Listen; each connection gets the current certificates. Raise ConfigError if the port is in use."""
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
        """Close the peer's connection, even if its task was cancelled before it began."""
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
    """A connection after its handshake. It counts as busy: its peer has a valid certificate."""

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
