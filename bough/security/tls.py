"""TLS of a process, as server and client, with files that may change while it runs.

New connections use the current files; open ones keep theirs. Channels to orchestrators may be without TLS.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import grpc

from bough.concurrency.tasks import background, end
from bough.config.parsers import MAX_PORT
from bough.config.processes import AUTHORITY_VARIABLE, CERT_VARIABLE, TLS_KEY_VARIABLE, OrchestratorConfig
from bough.errors import ConfigError
from bough.rpc.server import open_channel
from bough.runtime.connections import longest_idle
from bough.security.certificates import (
    AUTHORITY,
    CERT,
    KEY,
    CertificateFiles,
    Certificates,
    own_context,
    read_certificates,
)
from bough.security.private_files import WatchedFiles

logger = logging.getLogger(__name__)

SOON_SECONDS = 14 * 24 * 3600.0  # a warning is logged if a certificate expires within these
REMIND_SECONDS = 24 * 3600.0  # between two such warnings
GRACE_SECONDS = 3600.0  # limit for calls that began before a certificate was changed
CLOSING_SECONDS = 1.0  # limit for calls that end with the last channel to a server
SCHEME = "grpcs://"
HANDSHAKE_SECONDS = 10.0


class Tls:
    """Certificates of one process, for gRPC and HTTP."""

    def __init__(self, files: CertificateFiles, *, is_server: bool = False, is_logged: bool = True) -> None:
        """`is_logged` logs a server's names and expiry. Raises ConfigError naming the setting of an unusable file."""
        self.files, self._is_logged = files, is_server and is_logged
        self._watched: WatchedFiles[Certificates] = WatchedFiles(
            f"TLS: {', '.join(files.paths)}",
            files.paths,
            lambda: _loaded(files, is_server=is_server, is_logged=self._is_logged),
        )

    @property
    def now(self) -> Certificates:
        """The last usable contents of the files."""
        return self._watched.value

    def refresh(self) -> None:
        """Reload changed files, for callers that do not use `watched`."""
        self._watched.refresh()

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Watch the files during the block."""
        async with background(self._remind()), self._watched.watched():
            yield

    async def _remind(self) -> None:
        """Repeat the warning, also for certificates that were far from expiry when read."""
        while self._is_logged:
            await asyncio.sleep(REMIND_SECONDS)
            if self.now.chain and _is_over_soon(self.now):
                _tell(self.now)

    def channel_credentials(self, known: bytes = b"") -> grpc.ChannelCredentials:
        """Credentials for calls to servers of the authority; without one, of `known` or the system's authorities."""
        now = self.now
        return grpc.ssl_channel_credentials(now.authority or known or None, now.key or None, now.chain or None)

    def server_credentials(self, clients: Callable[[Certificates], bytes]) -> grpc.ServerCredentials:
        """Credentials of a server that requires client certificates of these authorities, if there are any."""
        last = self.now

        def configuration() -> grpc.ServerCertificateConfiguration:
            return grpc.ssl_server_certificate_configuration([(last.key, last.chain)], clients(last) or None)

        def changed() -> grpc.ServerCertificateConfiguration | None:
            """Called by gRPC at each connection, on its own thread; None is no change."""
            nonlocal last
            if last is self.now:
                return None
            last = self.now
            return configuration()

        fetch = cast(Callable[[], grpc.ServerCertificateConfiguration], changed)  # the stub's type lacks None
        return grpc.dynamic_ssl_server_credentials(configuration(), fetch, bool(clients(last)))


class CurrentContext:
    """The `ssl.SSLContext` for the next connection, with the certificates current at that time."""

    def __init__(self, tls: Tls, make: Callable[[CertificateFiles, Certificates], ssl.SSLContext]) -> None:
        self._tls, self._make, self._of = tls, make, tls.now
        self._context = make(tls.files, tls.now)

    def __call__(self) -> ssl.SSLContext:
        """The context, made again if the certificates have changed."""
        certificates = self._tls.now
        if self._of is not certificates:
            with suppress(ConfigError):  # files are in the middle of a change: retried at the next connection
                self._context, self._of = self._make(self._tls.files, certificates), certificates
        return self._context


def server_context(tls: Tls, clients: Callable[[Certificates], bytes]) -> CurrentContext:
    """Context of a server that requires client certificates of these authorities, if there are any."""

    def make(files: CertificateFiles, now: Certificates) -> ssl.SSLContext:
        context = own_context(ssl.PROTOCOL_TLS_SERVER, files)
        context.set_alpn_protocols(["http/1.1"])
        if known := clients(now):
            context.verify_mode = ssl.CERT_REQUIRED
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a single certificate may be trusted by itself
            context.load_verify_locations(cadata=known.decode())
        return context

    return CurrentContext(tls, make)


def context_to_itself(tls: Tls) -> CurrentContext:
    """Context for connections to the process with these certificates itself."""

    def make(files: CertificateFiles, now: Certificates) -> ssl.SSLContext:
        context = own_context(ssl.PROTOCOL_TLS_CLIENT, files)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.load_verify_locations(cadata=(now.authority or now.chain).decode())
        return context

    return CurrentContext(tls, make)


class PeerChannel:
    """A channel to one server, reopened when this process's certificates have changed.

    Running calls stay on their channel, which closes after them.
    """

    def __init__(self, address: str, tls: Tls | None, *, is_to_itself: bool = False) -> None:
        """`is_to_itself` accepts this process's own certificate as the server's if there is no authority."""
        self.address, self._tls, self._is_to_itself = address, tls, is_to_itself
        self._of = None if tls is None else tls.now
        self._channel = self._opened()
        self._older: dict[asyncio.Task[None], grpc.aio.Channel] = {}  # by the task that closes it after its calls

    def refresh(self) -> None:
        """Reload changed certificates for the next call; used after a failed one."""
        if self._tls is not None:
            self._tls.refresh()

    @property
    def current(self) -> grpc.aio.Channel:
        """The channel for the next call."""
        if self._tls is not None and self._of is not self._tls.now:
            self._of, before = self._tls.now, self._channel
            self._channel = self._opened()
            closing = asyncio.create_task(before.close(GRACE_SECONDS))
            self._older[closing] = before
            closing.add_done_callback(self._older.pop)
        return self._channel

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[grpc.aio.Channel]:
        """The channel for calls within the block, closed afterwards."""
        try:
            yield self.current
        finally:
            await self.close()

    async def close(self) -> None:
        """Close all connections, including those with older certificates, and their calls."""
        ending = [asyncio.create_task(self._channel.close()), *self._older]
        for before in self._older.values():  # a second close would do nothing: its first one ends with its calls
            for call in list(getattr(before, "_active_calls", ())):  # private API, which another grpcio may lack
                call.cancel()
        _, late = await asyncio.wait(ending, timeout=CLOSING_SECONDS)
        await end(*late)

    def _opened(self) -> grpc.aio.Channel:
        if self._tls is None:
            return open_channel(self.address)
        known = self._tls.now.chain if self._is_to_itself else b""
        return open_channel(self.address, self._tls.channel_credentials(known))


def _loaded(files: CertificateFiles, is_server: bool, is_logged: bool) -> Certificates:
    """Read the files, and log names and expiry, which are not secret."""
    certificates = read_certificates(files, is_server=is_server)
    if is_logged and certificates.chain:
        _tell(certificates)
    return certificates


def _tell(certificates: Certificates) -> None:
    level = logging.WARNING if _is_over_soon(certificates) else logging.INFO
    until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(certificates.expires))
    logger.log(level, "the certificate of %s is valid until %s", ", ".join(certificates.names), until)


def _is_over_soon(certificates: Certificates) -> bool:
    return certificates.expires - time.time() < SOON_SECONDS


def channels(files: CertificateFiles, *addresses: str) -> list[PeerChannel]:
    """Channels to orchestrators: all use TLS if `files` have an authority, else those whose address has the scheme.

    Raises:
        ConfigError: a file is unusable, or an address invalid.
    """
    tls = Tls(files)
    return [_channel(tls, address) for address in addresses]


def _channel(tls: Tls, address: str) -> PeerChannel:
    plain = address.removeprefix(SCHEME)
    is_url = plain.startswith(("http://", "https://"))
    if ":" not in plain or is_url or not plain.isprintable():  # without a port gRPC would ask 443
        raise ConfigError(f"addresses: must be such as 127.0.0.1:7411 or {SCHEME}127.0.0.1:7411, got {address!r}")
    port = plain.rpartition(":")[2]
    if port.isdecimal() and int(port) > MAX_PORT:  # gRPC would use the remainder modulo 65536
        raise ConfigError(f"addresses: must have a port from 1 to {MAX_PORT}, got {address!r}")
    return PeerChannel(plain, tls if tls.files.authority or plain != address else None)


def files_towards(config: OrchestratorConfig) -> CertificateFiles:
    """Files for clients of an orchestrator with these settings on its own machine."""
    authority = config.tls_ca or config.tls_cert
    if config.tls_client_ca:
        return CertificateFiles(config.tls_cert, config.tls_key, authority)
    return CertificateFiles(authority=authority)


def environment_files() -> CertificateFiles:
    """The files that the environment names."""
    names = (CERT_VARIABLE, TLS_KEY_VARIABLE, AUTHORITY_VARIABLE)
    return CertificateFiles(*(os.environ.get(name, "") for name in names))


def add_certificates(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `files_from` reads."""
    texts = {
        AUTHORITY: (AUTHORITY_VARIABLE, "PEM file of the authority of the server's certificate; enables TLS"),
        CERT: (CERT_VARIABLE, "PEM file of a certificate to present if the server requires one"),
        KEY: (TLS_KEY_VARIABLE, "PEM file of its key"),
    }
    for flag, (variable, text) in texts.items():
        parser.add_argument(flag, metavar="FILE", default=os.environ.get(variable, ""), help=f"{text} ({variable})")


def files_from(arguments: argparse.Namespace) -> CertificateFiles:
    """The files that the flags name."""
    return CertificateFiles(arguments.tls_cert, arguments.tls_key, arguments.tls_ca)


class Handshakes:
    """Creates protocols for connections that start with a TLS handshake, with the current certificate.

    asyncio's own server would allow a minute for each handshake, neither limit nor log them, and keep its first
    certificate. They need asyncio's own event loop: uvloop reads before TLS can start.
    """

    def __init__(
        self,
        inner: Callable[..., asyncio.Protocol],
        contexts: Callable[[], ssl.SSLContext],
        connections: set[Any],
        most: Callable[[], int],
    ) -> None:
        """`connections` has all of the server's, including handshakes.

        If there are more than `most`, the one that has been idle longest is closed.
        """
        self.inner, self.contexts, self.connections, self._most = inner, contexts, connections, most

    def __call__(self, **settings: Any) -> asyncio.Protocol:
        """Create the protocol of an accepted connection; called by the server."""
        return _Handshake(self, self.inner(**settings))

    def make_room(self) -> None:
        """Close a connection if there are too many."""
        if len(self.connections) <= self._most():
            return
        logger.warning("%d connections are open, the limit: closing the one that has been idle longest", self._most())
        if (longest := longest_idle(self.connections)) is not None:
            self.connections.discard(longest)  # immediately: it must not be chosen again before it is closed
            longest.abort()


class _Handshake(asyncio.Protocol):
    """A connection's protocol until the handshake ends; buffers early data for the server's protocol."""

    def __init__(self, handshakes: Handshakes, inner: asyncio.Protocol) -> None:
        self._handshakes, self._inner = handshakes, inner
        self._early = bytearray()
        self._is_lost = False
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin the handshake, unless there are too many connections and all others are busy."""
        transport.pause_reading()
        loop = asyncio.get_running_loop()
        self.transport, self.idle_since = transport, loop.time()  # the server reads it when it stops
        self._task = loop.create_task(self._run())
        self._handshakes.connections.add(self)
        self._handshakes.make_room()

    def abort(self) -> None:
        """End the handshake and the connection."""
        self._handshakes.connections.discard(self)
        self._task.cancel()
        self.transport.abort()

    shutdown = abort  # called by uvicorn as its server ends

    def data_received(self, data: bytes) -> None:
        """Buffer data that follows directly on the handshake."""
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        """Record that there is no client left."""
        self._is_lost = True

    async def _run(self) -> None:
        """Perform the handshake and hand the connection over; errors close it and are logged."""
        peer, context = self.transport.get_extra_info("peername"), self._handshakes.contexts()
        try:
            secured = await asyncio.get_running_loop().start_tls(
                self.transport, self, context, server_side=True, ssl_handshake_timeout=HANDSHAKE_SECONDS
            )
        except OSError as exc:  # includes ssl.SSLError and TimeoutError
            logger.warning("TLS with %s failed: %s", peer, _reason(exc))
            self.abort()
            return
        self._handshakes.connections.discard(self)
        if secured is None or self._is_lost:
            return
        secured.set_protocol(self._inner)
        self._inner.connection_made(secured)
        if self._early:
            self._inner.data_received(bytes(self._early))


def _reason(exc: OSError) -> str:
    """Description of the error, in terms of settings if possible."""
    if isinstance(exc, ssl.SSLError) and exc.reason == "HTTP_REQUEST":
        return "it speaks plain HTTP, but this port serves https://"
    if isinstance(exc, ssl.SSLError) and exc.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it has no certificate, but --tls-client-ca requires one"
    return str(exc) or type(exc).__name__
