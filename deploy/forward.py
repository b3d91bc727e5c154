"""Forwarding of HTTP from Serve's proxy to an orchestrator's own HTTP port, streamed. It does not use Ray."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Final
from urllib.parse import quote

import aiohttp
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from bough.runtime.connections import connection_limit

# Headers of one connection. The host is forwarded, as the orchestrator may have to refuse foreign ones. Serve's proxy
# itself sets the request's id, the server's name and the date.
HOP_BY_HOP: Final = frozenset(
    {"connection", "expect", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer",
     "transfer-encoding", "upgrade"}
)  # fmt: skip
NOT_PASSED_BACK: Final = HOP_BY_HOP | {"x-request-id", "date", "server"}
CLOSED = "this orchestrator is being restarted"
GIVEN_UP = "this orchestrator has ended, and another takes its place"
NO_HTTP = (
    "this orchestrator has no HTTP port that Serve's proxy may use: with --tls-client-ca clients show their "
    "certificates there themselves"
)
OPENING_SECONDS = 60.0  # for a program that restarts, and for its target to come back
AGAIN_SECONDS = 0.25  # between two attempts to connect to one that has ended
MOST_WAITING = 256  # requests that wait for a restart
SHORT_BYTES = 1 << 16  # of a body; less than connections buffer for a reader that does not read yet
CONNECT_SECONDS = 5.0  # for a connection to open, including the wait if there are too many


def most_connections() -> int:
    """Limit of connections to an orchestrator, and of concurrent requests: half of the process's file descriptors."""
    return connection_limit(num_descriptors=2)


class NotReached(Exception):
    """No program listens at the address. Nothing of the request has been sent, so it may be sent again."""


class Forwarder:
    """Forwards requests to one upstream and streams its answers back as they come."""

    def __init__(self, base_url: str, context: Callable[[], ssl.SSLContext] | None = None) -> None:
        """Connect to `base_url`, such as http://10.0.0.3:7413 without a path; https takes its TLS from `context`."""
        self._base_url, self._context = base_url, context
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS)
        connector = aiohttp.TCPConnector(limit=most_connections())
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False)

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def forward(self, request: Request) -> Response:
        """Return the upstream's answer; a client that hangs up also ends the upstream's request.

        A body is forwarded as it arrives, which keeps the upstream's limits in force. A long one waits until the
        upstream asks for it, as the upstream may refuse the request by its head; a short one is sent at once, to save a
        round trip. A length given together with chunks is dropped: bytes beyond it would become the connection's next
        request.

        Raises:
            NotReached: the upstream has ended, and nothing has been read of the body.
        """
        path = str(request.scope["path"]).removeprefix(str(request.scope.get("root_path", "")))
        is_chunked = "transfer-encoding" in request.headers
        dropped = HOP_BY_HOP | {"content-length"} if is_chunked else HOP_BY_HOP
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in dropped]
        url = f"{self._base_url}/{quote(path.removeprefix('/'))}"  # the server has decoded it
        query = request.scope.get("query_string", b"").decode("latin-1")
        length = "" if is_chunked else request.headers.get("content-length", "0")
        has_body = length != "0"
        is_short = length.isdecimal() and 0 < int(length) <= SHORT_BYTES
        try:
            upstream = await self._session.request(
                request.method,
                f"{url}?{query}" if query else url,
                headers=headers,
                data=request.stream() if has_body else None,
                expect100=has_body and not is_short,
                allow_redirects=False,
                ssl=True if self._context is None else self._context(),
            )
        except (aiohttp.ClientError, TimeoutError) as exc:
            if isinstance(exc, aiohttp.ClientConnectorError) and isinstance(exc.os_error, ConnectionRefusedError):
                raise NotReached(str(exc)) from exc
            return unavailable(f"the orchestrator does not answer: {exc}")
        return _Answer(upstream)


class WaitingForwarder:
    """Forwards to an orchestrator's program; requests wait while it restarts."""

    def __init__(self) -> None:
        """Closed: requests wait until `open`."""
        self._is_open = asyncio.Event()
        self._forwarder: Forwarder | None = None
        self._refusal = ""  # of those who cannot be let in; without one they wait
        self._num_waiting = 0

    async def forward(self, request: Request) -> Response:
        """Return the program's answer, or status 503 if there is none in time or too many requests wait."""
        deadline = asyncio.get_running_loop().time() + OPENING_SECONDS
        while True:
            if self._is_open.is_set() and self._forwarder is not None:
                with suppress(NotReached):
                    return await self._forwarder.forward(request)
            if refusal := self._refusal or await self._waited(deadline):
                return unavailable(refusal)

    async def _waited(self, deadline: float) -> str:
        """Wait for a program to connect to. Return the reason to give up, or "" if there may be a program now."""
        if self._num_waiting >= MOST_WAITING:
            return f"{CLOSED}, and {self._num_waiting} requests wait for it"
        self._num_waiting += 1
        try:
            async with asyncio.timeout_at(deadline):
                if self._is_open.is_set():  # the program has ended, which its supervisor does not know yet
                    await asyncio.sleep(AGAIN_SECONDS)
                await self._is_open.wait()
        except TimeoutError:
            return f"{CLOSED}, and has not arrived in {OPENING_SECONDS:g} s"
        finally:
            self._num_waiting -= 1
        return ""

    def open(self, forwarder: Forwarder | None) -> None:
        """Admit requests; without a forwarder they are refused."""
        self._forwarder = forwarder
        self._refusal = "" if forwarder is not None else NO_HTTP
        self._is_open.set()

    def give_up(self) -> None:
        """Let no request wait any more: no program will start here. A running one still gets requests."""
        self._refusal = GIVEN_UP
        self._is_open.set()

    def undo_give_up(self) -> None:
        """Undo `give_up`, as a single failed check does not replace a replica."""
        if self._refusal == GIVEN_UP:
            self._refusal = ""
            if self._forwarder is None:
                self._is_open.clear()

    def pause(self) -> None:
        """Let new requests wait from now on; forwarded ones continue."""
        self._refusal = ""
        self._is_open.clear()

    def release(self) -> Forwarder | None:
        """Let new requests wait; return the forwarder of the running ones, which the caller closes after them."""
        self.pause()
        forwarder, self._forwarder = self._forwarder, None
        return forwarder

    async def close(self) -> None:
        """Close the connections to a program that has ended."""
        if (forwarder := self.release()) is not None:
            await forwarder.close()


class _Answer(StreamingResponse):
    """An upstream's answer, streamed as it arrives. An early end closes the connection, which the upstream notices."""

    def __init__(self, upstream: aiohttp.ClientResponse) -> None:
        super().__init__(upstream.content.iter_any(), status_code=upstream.status)
        self._upstream = upstream
        self.raw_headers = [
            (name.lower(), value) for name, value in upstream.raw_headers if _name(name) not in NOT_PASSED_BACK
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, piece by piece as it arrives."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._upstream.close()


def unavailable(message: str) -> Response:
    """Return status 503 with a Retry-After header, in the format of OpenAI's API."""
    error = {"message": message, "type": "server_error", "param": None, "code": "unavailable"}
    return JSONResponse({"error": error}, status_code=503, headers={"retry-after": "1"})


def _name(name: bytes) -> str:
    return name.decode("latin-1").lower()
