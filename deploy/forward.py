"""HTTP that comes in through Serve's proxy, passed on to an orchestrator's own door as it streams. Knows no Ray."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final

import aiohttp
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from bough.rpc.status_map import MAX_MESSAGE_BYTES

# Of one connection and not of the message. Serve's proxy sets the request's id, its own name and the date itself.
HOP_BY_HOP: Final = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
     "upgrade", "host", "content-length"}
)  # fmt: skip
NOT_PASSED_BACK: Final = HOP_BY_HOP - {"content-length"} | {"x-request-id", "date", "server"}
CONNECT_SECONDS = 5.0


class Forwarder:
    """Passes requests on to one upstream, whose answers it streams back piece by piece, as they come."""

    def __init__(self, base_url: str, context: Callable[[], ssl.SSLContext] | None = None) -> None:
        """`base_url` such as http://10.0.0.3:7413, without a path; `context` for one of https."""
        self._base_url, self._context = base_url, context
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        connector = aiohttp.TCPConnector(limit=0)  # how many may come is decided by the orchestrator's admission
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False)

    async def close(self) -> None:
        """Ends the connections."""
        await self._session.close()

    async def forward(self, request: Request) -> Response:
        """The upstream's answer. A client that hangs up ends the upstream's request too."""
        path = str(request.scope["path"]).removeprefix(str(request.scope.get("root_path", "")))
        url = f"{self._base_url}/{path.lstrip('/')}"
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP]
        query = request.scope.get("query_string", b"").decode("latin-1")
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_MESSAGE_BYTES:  # which the orchestrator would refuse once it is all here
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
    """The body as it comes. Closed half-way it closes the connection, which is how the upstream hears of it."""
    try:
        async for piece in upstream.content.iter_any():
            yield piece
        upstream.release()
    finally:
        upstream.close()


def unavailable(message: str) -> Response:
    """503, after which clients ask again."""
    return _error(503, message, "server_error", "unavailable", {"retry-after": "1"})


def _error(status: int, message: str, kind: str, code: str, headers: Mapping[str, str] | None = None) -> Response:
    """In the form that OpenAI's clients read."""
    error = {"message": message, "type": kind, "param": None, "code": code}
    return JSONResponse({"error": error}, status_code=status, headers=headers)


def _name(name: bytes) -> str:
    return name.decode("latin-1").lower()
