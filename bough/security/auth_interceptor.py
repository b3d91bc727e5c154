"""Refuse gRPC calls without credentials, or from callers whose name is not allowed, before decoding their messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from inspect import isasyncgenfunction
from typing import Any

import grpc
from grpc_health.v1 import health

from bough.errors import Unauthenticated
from bough.rpc.arrivals import CALLER
from bough.rpc.services import ServicerContext
from bough.rpc.status_map import abort
from bough.security.keys import HEADER

KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")  # of handlers
NAMES = ("x509_subject_alternative_name", "x509_common_name")  # of gRPC's authentication context
OPEN = f"/{health.SERVICE_NAME}/"  # health checks of balancers and supervisors have no key


@dataclass(frozen=True, slots=True)
class AuthInterceptor(grpc.aio.ServerInterceptor):
    """First interceptor of a server; only health is open."""

    # checks all values of `authorization` and returns the caller's name, if it has one; raises Unauthenticated
    require: Callable[[Iterable[str | bytes]], str | None]

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """Continue to a call's handler, or refuse the call."""
        if not handler_call_details.method.startswith(OPEN):
            try:
                CALLER.set(self.require(authorization(handler_call_details.invocation_metadata)) or "")
            except Unauthenticated as exc:
                return _refusing(exc)
        return await continuation(handler_call_details)


def authorization(metadata: Iterable[tuple[str, str | bytes]] | None) -> list[str | bytes]:
    """Values of the authorization header in a call's metadata."""
    return [value for name, value in metadata or () if name == HEADER]


def _refusing(error: Unauthenticated) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler that refuses. It is a stream handler, which runs without waiting for a message."""

    async def refuse(_: object, context: ServicerContext) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


@dataclass(frozen=True, slots=True)
class PeerNames(grpc.aio.ServerInterceptor):
    """Interceptor that refuses calls before their messages are decoded; health is open."""

    allowed: Collection[str]

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """Wrap a call's handler with the check."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(OPEN):
            return handler
        codec = (handler.request_deserializer, handler.response_serializer)
        (kind,) = (kind for kind in KINDS if getattr(handler, kind))
        guarded = self._guarded(getattr(handler, kind))
        return getattr(grpc, f"{kind}_rpc_method_handler")(guarded, *codec)

    def _guarded(self, answer: Callable[..., Any]) -> Callable[..., Any]:
        async def run(request: Any, context: ServicerContext) -> Any:
            return await answer(request, context) if await self._lets_in(context) else None

        async def stream(request: Any, context: ServicerContext) -> AsyncIterator[Any]:
            if await self._lets_in(context):
                async for reply in answer(request, context):
                    yield reply

        return stream if isasyncgenfunction(answer) else run

    async def _lets_in(self, context: ServicerContext) -> bool:
        """Whether the caller is admitted; otherwise the call is aborted."""
        shown = context.auth_context()
        names = {value.decode(errors="replace") for name in NAMES for value in shown.get(name, ())}
        if names & set(self.allowed):
            return True
        await abort(context, Unauthenticated(f"the certificate must name {' or '.join(sorted(self.allowed))}"))
        return False
