"""TLS handshakes, before a connection reaches its server.

asyncio's own server would allow a minute for each handshake, neither limit nor log them, and keep its first
certificate. They need a loop of asyncio's own: uvloop reads before it can be asked to wait for TLS.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Any

from bough.runtime.connections import longest_idle

logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 10.0


class Handshakes:
    """Creates protocols for connections that start with a TLS handshake, with the current certificate."""

    def __init__(
        self,
        inner: Callable[..., asyncio.Protocol],
        contexts: Callable[[], ssl.SSLContext],
        connections: set[Any],
        most: Callable[[], int],
    ) -> None:
        """`connections` are all of the server's, handshakes included.

        Where there are more than `most`, the one that has been idle longest is closed.
        """
        self.inner, self.contexts, self.connections, self._most = inner, contexts, connections, most

    def __call__(self, **settings: Any) -> asyncio.Protocol:
        """Create the protocol of an accepted connection, called by its server."""
        return _Handshake(self, self.inner(**settings))

    def make_room(self) -> None:
        """Close a connection if there are too many."""
        if len(self.connections) <= self._most():
            return
        logger.warning("%d connections are open, which is the limit: the one idle for longest is closed", self._most())
        if (longest := longest_idle(self.connections)) is not None:
            self.connections.discard(longest)  # at once, so that it is not chosen again before it is lost
            longest.abort()


class _Handshake(asyncio.Protocol):
    """A connection's protocol until the handshake ends; buffers early data for the server's protocol."""

    def __init__(self, handshakes: Handshakes, inner: asyncio.Protocol) -> None:
        self._handshakes, self._inner = handshakes, inner
        self._early = bytearray()
        self._is_lost = False
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin the handshake, unless there are too many connections, and all others are busy."""
        transport.pause_reading()
        loop = asyncio.get_running_loop()
        self.transport, self.idle_since = transport, loop.time()  # the server looks at it as it leaves
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
        """Note that nobody is left to serve."""
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
    """Description of the error, in terms of settings where possible."""
    if isinstance(exc, ssl.SSLError) and exc.reason == "HTTP_REQUEST":
        return "it speaks plain HTTP, and https:// is served here"
    if isinstance(exc, ssl.SSLError) and exc.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it has no certificate, and --tls-client-ca asks for one"
    return str(exc) or type(exc).__name__
