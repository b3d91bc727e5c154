"""Refuses calls over gRPC before anything of them is read, where they do not show what is asked for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health

from bough.errors import Unauthenticated
from bough.rpc.status_map import abort
from bough.security.bearer import HEADER

OPEN = f"/{health.SERVICE_NAME}/"  # balancers and supervisors have no key


@dataclass(frozen=True, slots=True)
class Doorkeeper(grpc.aio.ServerInterceptor):
    """Stands before all services of a server; health alone is open."""

    require: Callable[[Iterable[str | bytes]], object]  # of all values of `authorization`; raises Unauthenticated

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """The handler of a call, or one that refuses it."""
        if not handler_call_details.method.startswith(OPEN):
            try:
                self.require(authorization(handler_call_details.invocation_metadata))
            except Unauthenticated as exc:
                return _refusing(exc)
        return await continuation(handler_call_details)


def authorization(metadata: Iterable[tuple[str, str | bytes]] | None) -> list[str | bytes]:
    """What a call's metadata has of it."""
    return [value for name, value in metadata or () if name == HEADER]


def _refusing(error: Unauthenticated) -> grpc.RpcMethodHandler[Any, Any]:
    """Of streams both ways: it is called without waiting for a message."""

    async def refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
