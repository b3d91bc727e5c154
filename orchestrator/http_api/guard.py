"""Checks HTTP requests by their headers, before routing or reading a body, and adds an id to every answer."""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from http import HTTPStatus
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bough.errors import Unauthenticated
from bough.security.keys import HEADER
from bough.telemetry.call_context import set_caller_traceparent
from bough.telemetry.logs import LOG_CONTEXT, LogContext
from bough.telemetry.spans import TRACEPARENT
from orchestrator.http_api.fields.errors import ApiError, api_error, shortened
from orchestrator.serving.tenants import Callers, Tenant

TENANT = "bough.tenant"  # key in a request's scope
REQUEST_ID = b"x-request-id"
_NAME = re.compile(rb"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True)
class Guard:
    """ASGI middleware that sets the tenant of each request."""

    app: ASGIApp
    callers: Callers
    open_paths: Collection[str]  # need no key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in self.open_paths:
            try:
                scope[TENANT] = self.callers.tenant(Headers(scope=scope).getlist(HEADER))
            except Unauthenticated as exc:
                await api_error(exc, {}).response()(scope, receive, send)
                return
        await self.app(scope, receive, send)


@dataclass(frozen=True, slots=True)
class HostGuard:
    """ASGI middleware that refuses requests to foreign host names.

    A web page can point its own name to this machine's loopback address (DNS rebinding), and then read the answers.
    The browser still sends the page's host name.
    """

    app: ASGIApp
    own_name: str  # in addition to addresses and localhost

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "")
        if host and not self._is_own(host):  # HTTP/1.0 clients may leave it out; browsers send it
            message = (
                "host: must be an address, localhost or the name given by --advertise, as there are no keys here, "
                f"got {shortened(host)}"
            )
            refusal = ApiError(HTTPStatus.MISDIRECTED_REQUEST, message, param="host", code="foreign_host")
            await refusal.response()(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _is_own(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return name in ("localhost", self.own_name.lower()) or bool(ip_address(name))
        except ValueError:
            return False


def tenant_of(request: Request) -> Tenant:
    """The tenant of a request that passed the guard."""
    tenant = request.scope[TENANT]
    assert isinstance(tenant, Tenant)
    return tenant


@dataclass(frozen=True, slots=True)
class RequestIds:
    """Adds `x-request-id` to every answer, the client's own if valid, and notes it and the client's trace for logs."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(REQUEST_ID, b"")
        name = given if _NAME.fullmatch(given) else uuid.uuid4().hex.encode()
        LOG_CONTEXT.set(LogContext(http_request_id=name.decode()))
        set_caller_traceparent(Headers(scope=scope).getlist(TRACEPARENT))

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (REQUEST_ID, name)]
            await send(message)

        await self.app(scope, receive, send_named)
