"""Forwarding of HTTP from Serve's proxy to an orchestrator's own HTTP port, streamed. It does not use Ray."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final

import aiohttp
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from bough.rpc.status_map import MAX_MESSAGE_BYTES

# Headers of one connection. Serve's proxy itself sets the request's id, the server's name and the date.
HOP_BY_HOP: Final = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
     "upgrade", "host", "content-length"}
)  # fmt: skip
NOT_PASSED_BACK: Final = HOP_BY_HOP - {"content-length"} | {"x-request-id", "date", "server"}
CONNECT_SECONDS = 5.0


class Forwarder:
    """Forwards requests to one upstream and streams its answers back as they come."""

    def __init__(self, base_url: str, context: Callable[[], ssl.SSLContext] | None = None) -> None:
        """Connect to `base_url`, such as http://10.0.0.3:7413 without a path; https takes its TLS from `context`."""
        self._base_url, self._context = base_url, context
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        connector = aiohttp.TCPConnector(limit=0)  # the orchestrator's admission limits requests
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False)

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def forward(self, request: Request) -> Response:
        """Return the upstream's answer; a client that hangs up also ends the upstream's request."""
        path = str(request.scope["path"]).removeprefix(str(request.scope.get("root_path", "")))
        url = f"{self._base_url}/{path.lstrip('/')}"
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP]
        query = request.scope.get("query_string", b"").decode("latin-1")
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_MESSAGE_BYTES:  # the orchestrator would refuse it
                return _error(
                    413, f"body: must have at most {MAX_MESSAGE_BYTES} bytes", "invalid_request_error", "body_too_large"
                )
        try:
            upstream = await self._session.request(
                request.method,
                f"{url}?{query}" if query else url,
                headers=headers,
                data=body,
                ssl=True if self._context is None else self._context(),
            )
        except (aiohttp.ClientError, TimeoutError) as exc:
            return unavailable(f"the orchestrator does not answer: {exc}")
        answer = StreamingResponse(_pieces(upstream), status_code=upstream.status)
        answer.raw_headers = [
            (name.lower(), value) for name, value in upstream.raw_headers if _name(name) not in NOT_PASSED_BACK
        ]
        return answer


async def _pieces(upstream: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the body as it comes; closed early it closes the connection, which tells the upstream."""
    try:
        async for piece in upstream.content.iter_any():
            yield piece
        upstream.release()
    finally:
        upstream.close()


def unavailable(message: str) -> Response:
    """Return status 503 with a Retry-After header."""
    return _error(503, message, "server_error", "unavailable", {"retry-after": "1"})


def _error(status: int, message: str, kind: str, code: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error in the format of OpenAI's API."""
    error = {"message": message, "type": kind, "param": None, "code": code}
    return JSONResponse({"error": error}, status_code=status, headers=headers)


def _name(name: bytes) -> str:
    return name.decode("latin-1").lower()
