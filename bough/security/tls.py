"""TLS of a process: its certificate towards whoever calls it, and towards those that it calls, as files are now.

A certificate is changed by putting another file in its place: the next connection has it, and those that are open go
on as they are.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import cast

import grpc

from bough.concurrency.tasks import end
from bough.errors import ConfigError
from bough.rpc.server import open_channel
from bough.security.certificates import CertificateFiles, Certificates, own_context, read_certificates
from bough.security.watched_file import WatchedFiles

logger = logging.getLogger(__name__)

SOON_SECONDS = 14 * 24 * 3600.0  # a certificate that ends within them is warned of
REMIND_SECONDS = 24 * 3600.0  # between two such warnings
GRACE_SECONDS = 3600.0  # that calls may take which have begun before a certificate was changed


class Tls:
    """Certificates of one process, and what gRPC and HTTP make of them."""

    def __init__(self, files: CertificateFiles, *, is_server: bool = False, is_told: bool = True) -> None:
        """`is_told` has a server's names and end logged. Raises ConfigError naming the setting of a useless file."""
        self.files, self._is_told = files, is_server and is_told
        self._watched: WatchedFiles[Certificates] = WatchedFiles(
            f"TLS: {', '.join(files.paths)}",
            files.paths,
            lambda: _loaded(files, is_server=is_server, is_told=self._is_told),
        )

    @property
    def now(self) -> Certificates:
        """What the files said when they were last usable."""
        return self._watched.value

    def refresh(self) -> None:
        """Looks whether files have changed: for those who call seldom, and watch nothing."""
        self._watched.refresh()

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Follows the files for as long as the block runs."""
        reminding = asyncio.create_task(self._remind())
        try:
            async with self._watched.watched():
                yield
        finally:
            await end(reminding)

    async def _remind(self) -> None:
        """Warns of a certificate that was far from its end when it was read."""
        while self._is_told:
            await asyncio.sleep(REMIND_SECONDS)
            if self.now.chain and _is_over_soon(self.now):
                _tell(self.now)

    def channel_credentials(self, known: bytes = b"") -> grpc.ChannelCredentials:
        """For calls to servers with a certificate of the authority; of `known`, or of the system's, without one."""
        now = self.now
        return grpc.ssl_channel_credentials(now.authority or known or None, now.key or None, now.chain or None)

    def server_credentials(self, clients: Callable[[Certificates], bytes]) -> grpc.ServerCredentials:
        """Of a server that lets in clients with a certificate of these authorities; everybody where there are none."""
        last = self.now

        def configuration() -> grpc.ServerCertificateConfiguration:
            return grpc.ssl_server_certificate_configuration([(last.key, last.chain)], clients(last) or None)

        def changed() -> grpc.ServerCertificateConfiguration | None:
            """gRPC asks at each connection, on a thread of its own; None is no change."""
            nonlocal last
            if last is self.now:
                return None
            last = self.now
            return configuration()

        fetch = cast(Callable[[], grpc.ServerCertificateConfiguration], changed)  # whose stub knows no None
        return grpc.dynamic_ssl_server_credentials(configuration(), fetch, bool(clients(last)))


class CurrentContext:
    """The `ssl.SSLContext` for the next connection, by the certificates as they are then."""

    def __init__(self, tls: Tls, make: Callable[[CertificateFiles, Certificates], ssl.SSLContext]) -> None:
        self._tls, self._make, self._of = tls, make, tls.now
        self._context = make(tls.files, tls.now)

    def __call__(self) -> ssl.SSLContext:
        """Made anew when the certificates have changed."""
        certificates = self._tls.now
        if self._of is not certificates:
            with suppress(ConfigError):  # the files are being changed at this moment: the next connection looks again
                self._context, self._of = self._make(self._tls.files, certificates), certificates
        return self._context


def server_context(tls: Tls, clients: Callable[[Certificates], bytes]) -> CurrentContext:
    """For a server that lets in clients with a certificate of these authorities; everybody where there are none."""

    def make(files: CertificateFiles, now: Certificates) -> ssl.SSLContext:
        context = own_context(ssl.PROTOCOL_TLS_SERVER, files)
        context.set_alpn_protocols(["http/1.1"])
        if known := clients(now):
            context.verify_mode = ssl.CERT_REQUIRED
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a single certificate may be known by itself
            context.load_verify_locations(cadata=known.decode())
        return context

    return CurrentContext(tls, make)


def context_to_itself(tls: Tls) -> CurrentContext:
    """For connections to the process that has these certificates, from who looks after it."""

    def make(files: CertificateFiles, now: Certificates) -> ssl.SSLContext:
        context = own_context(ssl.PROTOCOL_TLS_CLIENT, files)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.load_verify_locations(cadata=(now.authority or now.chain).decode())
        return context

    return CurrentContext(tls, make)


class PeerChannel:
    """A channel to one server, opened anew when this process's certificates have changed.

    Calls that run stay on the channel that they began on, which closes after them.
    """

    def __init__(self, address: str, tls: Tls | None, *, is_to_itself: bool = False) -> None:
        """`is_to_itself` has a server with this process's own certificate taken, where there is no authority."""
        self.address, self._tls, self._is_to_itself = address, tls, is_to_itself
        self._of = None if tls is None else tls.now
        self._channel = self._opened()
        self._older: dict[asyncio.Future[None], grpc.aio.Channel] = {}  # by what closes them after their calls

    def refresh(self) -> None:
        """Looks whether certificates have changed, for the next call: after one that has failed."""
        if self._tls is not None:
            self._tls.refresh()

    @property
    def current(self) -> grpc.aio.Channel:
        """For the next call."""
        if self._tls is not None and self._of is not self._tls.now:
            self._of, before = self._tls.now, self._channel
            self._channel = self._opened()
            closing = asyncio.ensure_future(before.close(GRACE_SECONDS))
            self._older[closing] = before
            closing.add_done_callback(self._older.pop)
        return self._channel

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[grpc.aio.Channel]:
        """For the calls of a block, after which it is closed."""
        try:
            yield self.current
        finally:
            await self.close()

    async def close(self) -> None:
        """Ends the connections, those of older certificates too, and the calls on them."""
        older = list(self._older.items())
        for closing, _ in older:
            closing.cancel()
        for channel in (self._channel, *(channel for _, channel in older)):
            await channel.close()

    def _opened(self) -> grpc.aio.Channel:
        if self._tls is None:
            return open_channel(self.address)
        known = self._tls.now.chain if self._is_to_itself else b""
        return open_channel(self.address, self._tls.channel_credentials(known))


def _loaded(files: CertificateFiles, is_server: bool, is_told: bool) -> Certificates:
    """Read, and told of in the log: names and the end of a process's certificate are no secrets."""
    certificates = read_certificates(files, is_server=is_server)
    if is_told and certificates.chain:
        _tell(certificates)
    return certificates


def _tell(certificates: Certificates) -> None:
    level = logging.WARNING if _is_over_soon(certificates) else logging.INFO
    until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(certificates.expires))
    logger.log(level, "the certificate of %s is valid until %s", ", ".join(certificates.names), until)


def _is_over_soon(certificates: Certificates) -> bool:
    return certificates.expires - time.time() < SOON_SECONDS
