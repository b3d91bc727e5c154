"""Refuses gRPC calls without credentials before reading their messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health

from bough.errors import Unauthenticated
from bough.rpc.status_map import abort
from bough.security.bearer import HEADER

OPEN = f"/{health.SERVICE_NAME}/"  # health checks of balancers and supervisors have no key


@dataclass(frozen=True, slots=True)
class AuthInterceptor(grpc.aio.ServerInterceptor):
    """First interceptor of a server; only health is open."""

    require: Callable[[Iterable[str | bytes]], object]  # checks all values of `authorization`; raises Unauthenticated

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """Continue to a call's handler, or refuse the call."""
        if not handler_call_details.method.startswith(OPEN):
            try:
                self.require(authorization(handler_call_details.invocation_metadata))
            except Unauthenticated as exc:
                return _refusing(exc)
        return await continuation(handler_call_details)


def authorization(metadata: Iterable[tuple[str, str | bytes]] | None) -> list[str | bytes]:
    """Values of the authorization header in a call's metadata."""
    return [value for name, value in metadata or () if name == HEADER]


def _refusing(error: Unauthenticated) -> grpc.RpcMethodHandler[Any, Any]:
    """A refusing handler; as a stream handler, it runs without waiting for a message."""

    async def refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
