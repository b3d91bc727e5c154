"""Authenticates HTTP requests by a header, before routing or reading a body."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from bough.errors import Unauthenticated
from bough.security.bearer import HEADER
from orchestrator.http_api.errors import api_error
from orchestrator.serving.tenants import Callers, Tenant

TENANT = "bough.tenant"  # key in a request's scope


@dataclass(frozen=True, slots=True)
class Guard:
    """ASGI middleware that sets the tenant of each request."""

    app: ASGIApp
    callers: Callers
    open_paths: Collection[str]  # need no key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it."""
        if scope["path"] not in self.open_paths:
            try:
                scope[TENANT] = self.callers.tenant(Headers(scope=scope).getlist(HEADER))
            except Unauthenticated as exc:
                await api_error(exc, {}).response()(scope, receive, send)
                return
        await self.app(scope, receive, send)


def tenant_of(request: Request) -> Tenant:
    """The tenant of a request that passed the guard."""
    tenant = request.scope[TENANT]
    assert isinstance(tenant, Tenant)
    return tenant
