"""Runs uvicorn in the event loop of the orchestrator."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from bough.errors import ConfigError, Unavailable
from bough.runtime.connections import Connection, connection_limit, longest_idle
from bough.security.tls import CurrentContext, Handshakes
from orchestrator.http_api.fields.errors import api_error

IDLE_SECONDS = (
    75  # after which a connection without a complete request head is closed; balancers keep theirs for a minute
)
MAX_ACCEPTED = 64  # excess connections at once, until they are closed: they need descriptors meanwhile
NUM_PENDING = 1024  # connections waiting to be accepted
FIRST_PROBE_SECONDS = 0.05  # between probes of a client that has closed its side; later intervals are longer
LONGEST_PROBE_SECONDS = 5.0
CLOSE = (b"connection", b"close")
FRAMINGS = {b"content-length", b"transfer-encoding"}
most_connections = partial(connection_limit, num_descriptors=2)  # workers and gRPC need the other half of them
GRACE_SECONDS = 2  # for sending answers when the server ends; requests have ended before


@asynccontextmanager
async def http_serving(
    host: str,
    port: int,
    app: ASGIApp,
    tls: CurrentContext | None = None,
    stalled_seconds: float = 0.0,
    leaving: asyncio.Event | None = None,
    idle_seconds: float = IDLE_SECONDS,
    limit: Callable[[], int] = most_connections,
) -> AsyncIterator[int]:
    """Serve during the block, and yield the port; port 0 takes a free one, and `leaving` closes it early.

    A connection whose peer does not read is closed after `stalled_seconds`, at least `idle_seconds`.
    Raises ConfigError if the port is in use, or the host is not an address of this machine.
    """
    listener, protocol = _listener(host, port), partial(_Protocol, stalled_seconds=stalled_seconds, limit=limit)
    config = uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], protocol),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=idle_seconds,  # type: ignore[arg-type]  # uvicorn only adds it to a time
        timeout_graceful_shutdown=GRACE_SECONDS,
        backlog=MAX_ACCEPTED,
    )
    server = _HttpServer(config, leaving or asyncio.Event())
    if tls is not None:
        handshakes = Handshakes(protocol, tls, server.server_state.connections, limit)
        config.http = cast(type[asyncio.Protocol], handshakes)
    bound = int(listener.getsockname()[1])
    serving = asyncio.create_task(server.serve([listener]))
    try:
        yield bound
    finally:
        server.should_exit = True
        await serving


def _listener(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        is_v6 = family == socket.AF_INET6
        listener = socket.create_server(address, family=family, backlog=NUM_PENDING, dualstack_ipv6=is_v6)
    except (OSError, UnicodeError) as exc:  # the latter if a name has labels such as those of "a..b"
        raise ConfigError(
            f"--http-port: cannot listen on {host}:{port}: {exc}; --host must be this machine's, 0 takes a free port"
        ) from exc
    # Connections inherit it. Otherwise a chunk waits until the client has acknowledged the one before, up to 40 ms:
    # asyncio sets it for sockets that were created with a protocol alone.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class _HttpServer(uvicorn.Server):
    """Leaves signals to the process, which closes the port, drains, and then sets `should_exit`."""

    def __init__(self, config: uvicorn.Config, leaving: asyncio.Event) -> None:
        super().__init__(config)
        self._leaving, self._has_left = leaving, False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Let connections wait in the system's queue, which uvicorn limits to the number of connections."""
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(NUM_PENDING)

    async def on_tick(self, counter: int) -> bool:
        """Stop listening once the process leaves; each connection closes when its answers are finished.

        uvicorn calls this ten times a second.
        """
        if self._leaving.is_set():
            if not self._has_left:
                self._has_left = True
                for listener in self.servers:
                    listener.close()
            for connection in list(
                self.server_state.connections
            ):  # a connection accepted at the end appears in a later tick
                if not connection.transport.is_closing():
                    connection.shutdown()
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class _Protocol(H11Protocol):
    """Closes idle, unread or excess connections.

    A connection counts as idle, with a running timer, until a request head is complete. Partial data does not reset the
    timer, so slow senders cannot keep connections forever. The body has its own limit (`BodyReader`). Another timer
    runs while answers are not read: otherwise a client could keep a connection by sending requests without reading.
    """

    def __init__(self, *args: Any, stalled_seconds: float, limit: Callable[[], int], **settings: Any) -> None:
        """`stalled_seconds` limits the time in which answers are not read; at least the idle limit applies."""
        super().__init__(*args, **settings)
        self._stalled_seconds = max(stalled_seconds, self.timeout_keep_alive)
        self._limit = limit
        self._stalled: asyncio.TimerHandle | None = None
        self._probe: asyncio.TimerHandle | None = None  # since the client has closed its side

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the idle timer also for a connection that never sends anything."""
        super().connection_made(transport)
        self._start_timer()
        if len(self.connections) > self._limit():
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers even if the peer has reset the connection: they would keep it and its data in memory."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._unset_stalled()
        self._unset_probe()

    def data_received(self, data: bytes) -> None:
        """Keep the timer, which the base class would stop, unless a request has begun."""
        timer, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        super().data_received(data)
        if self.timeout_keep_alive_task is None and not self._is_serving:
            self.timeout_keep_alive_task = timer
        elif timer is not None:
            timer.cancel()

    def handle_events(self) -> None:
        """Close after a request with two lengths: a proxy may have used the other one."""
        super().handle_events()
        if self._is_serving and {name for name, _ in self.headers} >= FRAMINGS and CLOSE not in self.headers:
            self.headers.append(CLOSE)  # as if the client had asked for it; the answer repeats it

    def eof_received(self) -> bool:  # type: ignore[override]
        """Continue with an answer that has not begun if the client may only have closed its side.

        Only a write shows whether it has closed the connection. So "100 Continue" is sent, which clients skip: a closed
        client resets the connection, and the next such write fails. HTTP/1.0 has no such answer, and with TLS asyncio
        cannot continue. An answer that has begun ends at once, as its client may want to send the next request in the
        same session.
        """
        has_begun = not self._is_serving or self.cycle.response_started or self.cycle.more_body
        if has_begun or self.conn.their_http_version != b"1.1" or self.scheme == "https":
            return False
        self._send_probe(FIRST_PROBE_SECONDS)
        return True

    def pause_writing(self) -> None:
        """Start the timer of answers that are not read."""
        super().pause_writing()
        self._stalled = self.loop.call_later(self._stalled_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unset_stalled()

    def on_response_complete(self) -> None:
        """Also limit the time that a closing connection waits for its peer to read."""
        super().on_response_complete()
        if self._probe is not None and not self._is_serving:
            self._unset_probe()
            self.transport.close()
        self._require_end()

    def send_400_response(self, msg: str) -> None:
        """Also end the request with this body; if its answer has begun, close without an error message."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # the answer has begun, or answers HEAD and has no body
            self.transport.close()
        self._require_end()

    def timeout_keep_alive_handler(self) -> None:
        """Abort: closing would wait for the peer to read the sent data."""
        self.transport.abort()

    def abort(self) -> None:
        self.transport.abort()

    @property
    def idle_since(self) -> float | None:
        """When the running timer started, on the event loop's clock; None while a request is served and read.

        An answer that waits for the peer to read earlier ones counts as unread.
        """
        if (timer := self.timeout_keep_alive_task) is not None:
            return timer.when() - self.timeout_keep_alive
        if self._stalled is not None and not self.cycle.response_started:
            return self._stalled.when() - self._stalled_seconds
        return None

    @property
    def _is_serving(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _send_probe(self, seconds: float) -> None:
        """Send a probe, and the next after so many seconds."""
        if not self.cycle.response_started:
            self.transport.write(
                self.conn.send(h11.InformationalResponse(status_code=100, headers=[], reason="Continue"))
            )
        longer = min(2 * seconds, LONGEST_PROBE_SECONDS)
        self._probe = self.loop.call_later(seconds, self._send_probe, longer)

    def _unset_probe(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
            self._probe = None

    def _start_timer(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _require_end(self) -> None:
        if self.transport.is_closing() and self.timeout_keep_alive_task is None:
            self._start_timer()

    def _unset_stalled(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _make_room(self) -> None:
        """Close the connection that has been idle longest; if all others are busy, refuse this one."""
        longest = longest_idle(cast(set[Connection], self.connections))
        if longest is None or longest is self:
            self.connections.discard(self)
            self.transport.write(_too_many(len(self.connections)))
            self.transport.close()
        else:
            self.connections.discard(cast(Any, longest))  # at once: it must not be chosen again before it is lost
            longest.abort()


def _too_many(num_connections: int) -> bytes:
    """An answer that refuses any request."""
    problem = Unavailable(f"connections: {num_connections} are busy, which is the limit; one of them must end first")
    response = api_error(problem, {}).response()
    lines = [b"HTTP/1.1 %d %s" % (response.status_code, HTTPStatus(response.status_code).phrase.encode())]
    lines += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join((*lines, b"connection: close", b"", bytes(response.body)))
