"""Who may come in over HTTP: decided by a header, before a path is looked up or a body read."""

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

TENANT = "bough.tenant"  # of a request's scope


@dataclass(frozen=True, slots=True)
class Guard:
    """An ASGI application around another, which learns who calls."""

    app: ASGIApp
    callers: Callers
    open_paths: Collection[str]  # that need no key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, or refuses it."""
        if scope["path"] not in self.open_paths:
            try:
                scope[TENANT] = self.callers.tenant(Headers(scope=scope).getlist(HEADER))
            except Unauthenticated as exc:
                await api_error(exc, {}).response()(scope, receive, send)
                return
        await self.app(scope, receive, send)


def tenant_of(request: Request) -> Tenant:
    """Who has sent a request that the guard has let in."""
    tenant = request.scope[TENANT]
    assert isinstance(tenant, Tenant)
    return tenant
