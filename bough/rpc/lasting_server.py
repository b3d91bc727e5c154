"""A gRPC server that one malformed call does not end.

grpc.aio reads the name of a call as UTF-8 in the loop that takes all calls, and where it is none that loop ends, and
the server with it (grpcio 1.85): a stranger needs a single packet. Calls of methods that are there come another way,
with names that the server has itself; calls of all others are let go here before anybody looks at their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import iscoroutinefunction
from typing import Any

import grpc
from grpc._cython import cygrpc
from grpc.aio import _server

from bough.errors import ConfigError


class _KnownCalls(cygrpc.AioServer):  # type: ignore[misc]  # it has no types
    """Answers calls of registered methods. Others end as CANCELLED, at once."""

    async def _request_call(self) -> Any:
        """What gRPC waits for to have the next call of another method; it never has one."""
        while True:
            await super()._request_call()  # and nobody keeps it


class LastingServer(_server.Server):
    """grpc.aio's own but for that; services add all their methods as registered ones."""

    def __init__(
        self,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        options: Sequence[tuple[str, int]],
        max_calls: int,
    ) -> None:
        """Raises ConfigError where grpcio takes calls in another way, past what is done here about their names."""
        for method in ("_request_call", "_request_registered_call"):
            if not iscoroutinefunction(getattr(cygrpc.AioServer, method, None)):
                raise ConfigError(
                    f"grpcio: must be a version whose server has {method}, as 1.85 has, got {grpc.__version__}: any "
                    "stranger could end this server"
                )
        self._loop = cygrpc.get_working_loop()
        self._server = _KnownCalls(self._loop, None, (), interceptors, tuple(options), max_calls)
