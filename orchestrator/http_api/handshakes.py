"""TLS handshakes, before a connection reaches the HTTP server.

asyncio's own server would allow a minute for each handshake, neither limit nor log them, and keep its first
certificate.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Any

from bough.security.tls import CurrentContext

logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 10.0


class Handshakes:
    """Creates protocols for connections that start with a TLS handshake, with the current certificate."""

    def __init__(self, inner: Callable[..., asyncio.Protocol], contexts: CurrentContext, most: int) -> None:
        """At most `most` handshakes run at once; further connections are closed."""
        self._inner, self._contexts, self._most = inner, contexts, most
        self._running: set[asyncio.Task[None]] = set()

    def __call__(self, **settings: Any) -> asyncio.Protocol:
        """Create the protocol of an accepted connection, called by uvicorn."""
        return _Handshake(self, self._inner(**settings))

    def begin(self, handshake: _Handshake, transport: asyncio.Transport) -> None:
        """Start a handshake; errors close the connection and are logged."""
        if len(self._running) >= self._most:
            logger.warning("%d TLS handshakes run, which is the limit: one more connection is closed", self._most)
            transport.abort()
            return
        task = asyncio.get_running_loop().create_task(handshake.run(transport, self._contexts()))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def close(self) -> None:
        """Cancel unfinished handshakes."""
        for task in self._running:
            task.cancel()


class _Handshake(asyncio.Protocol):
    """A connection's protocol until the handshake ends; buffers early data for the HTTP protocol."""

    def __init__(self, handshakes: Handshakes, inner: asyncio.Protocol) -> None:
        self._handshakes, self._inner = handshakes, inner
        self._early = bytearray()
        self._is_lost = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Pause reading until the handshake begins."""
        transport.pause_reading()
        self._handshakes.begin(self, transport)

    def data_received(self, data: bytes) -> None:
        """Buffer data that follows directly on the handshake."""
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that nobody is left to serve."""
        self._is_lost = True

    async def run(self, transport: asyncio.Transport, context: ssl.SSLContext) -> None:
        """Perform the handshake and hand the connection over."""
        peer = transport.get_extra_info("peername")
        try:
            secured = await asyncio.get_running_loop().start_tls(
                transport, self, context, server_side=True, ssl_handshake_timeout=HANDSHAKE_SECONDS
            )
        except OSError as exc:  # includes ssl.SSLError and TimeoutError
            logger.warning("TLS with %s failed: %s", peer, _reason(exc))
            transport.abort()
            return
        if secured is None or self._is_lost:
            return
        secured.set_protocol(self._inner)
        self._inner.connection_made(secured)
        if self._early:
            self._inner.data_received(bytes(self._early))


def _reason(exc: OSError) -> str:
    """Description of the error, in terms of settings where possible."""
    if isinstance(exc, ssl.SSLError) and exc.reason == "HTTP_REQUEST":
        return "it speaks plain HTTP, and https:// is served here"
    if isinstance(exc, ssl.SSLError) and exc.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it has no certificate, and --tls-client-ca asks for one"
    return str(exc) or type(exc).__name__
