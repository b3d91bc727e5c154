"""TLS before HTTP: a connection is one of the HTTP server's once it has shaken hands.

asyncio's own server would give each connection a minute for that, count none of them, log nothing, and keep the
certificate that it began with.
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
    """Makes the protocols of connections, each of which speaks TLS first, by the certificate of the moment."""

    def __init__(self, inner: Callable[..., asyncio.Protocol], contexts: CurrentContext, most: int) -> None:
        """At most so many connections shake hands at once; another one is closed."""
        self._inner, self._contexts, self._most = inner, contexts, most
        self._running: set[asyncio.Task[None]] = set()

    def __call__(self, **settings: Any) -> asyncio.Protocol:
        """As uvicorn makes the protocol of a connection that it has accepted."""
        return _Handshake(self, self._inner(**settings))

    def begin(self, handshake: _Handshake, transport: asyncio.Transport) -> None:
        """Shakes hands; what goes wrong ends the connection and is logged."""
        if len(self._running) >= self._most:
            logger.warning("%d connections shake hands, as many as may: one more is closed", self._most)
            transport.abort()
            return
        task = asyncio.get_running_loop().create_task(handshake.run(transport, self._contexts()))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def close(self) -> None:
        """Ends those that have not come to an end."""
        for task in self._running:
            task.cancel()


class _Handshake(asyncio.Protocol):
    """A connection's protocol until it speaks TLS; keeps what has come by then for the one behind it."""

    def __init__(self, handshakes: Handshakes, inner: asyncio.Protocol) -> None:
        self._handshakes, self._inner = handshakes, inner
        self._early = bytearray()
        self._is_lost = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Nothing is read before the handshake begins."""
        transport.pause_reading()
        self._handshakes.begin(self, transport)

    def data_received(self, data: bytes) -> None:
        """What a client sends right behind its handshake."""
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody is left to serve."""
        self._is_lost = True

    async def run(self, transport: asyncio.Transport, context: ssl.SSLContext) -> None:
        """Shakes hands, and hands the connection over."""
        peer = transport.get_extra_info("peername")
        try:
            secured = await asyncio.get_running_loop().start_tls(
                transport, self, context, server_side=True, ssl_handshake_timeout=HANDSHAKE_SECONDS
            )
        except OSError as exc:  # among them are ssl.SSLError and TimeoutError
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
    """What went wrong, where a reader of logs looks for what to mend."""
    if isinstance(exc, ssl.SSLError) and exc.reason == "HTTP_REQUEST":
        return "it speaks plain HTTP, and https:// is served here"
    if isinstance(exc, ssl.SSLError) and exc.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it has no certificate, and --tls-client-ca asks for one"
    return str(exc) or type(exc).__name__
