"""A gRPC server that survives malformed method names.

grpc.aio decodes a call's method name as UTF-8 in the loop that accepts all calls; an invalid name ends that loop, and
so the server (grpcio 1.85), for which a stranger needs a single packet. Calls of registered methods take another path,
without decoding names; calls of other methods are dropped here before their names are decoded.
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
    """Answers calls of registered methods; others end as CANCELLED at once."""

    async def _request_call(self) -> Any:
        """Called by gRPC for the next call of an unregistered method; never returns one."""
        while True:
            await super()._request_call()  # dropped


class LastingServer(_server.Server):
    """As grpc.aio's server; services must register all their methods."""

    def __init__(
        self, interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, int]], max_calls: int
    ) -> None:
        """Raises ConfigError if grpcio accepts calls in another way, which this class would not cover."""
        for method in ("_request_call", "_request_registered_call"):
            if not iscoroutinefunction(getattr(cygrpc.AioServer, method, None)):
                raise ConfigError(
                    f"grpcio: must be a version whose server has {method}, as 1.85 has, got {grpc.__version__}: any "
                    "stranger could end this server"
                )
        self._loop = cygrpc.get_working_loop()
        self._server = _KnownCalls(self._loop, None, (), interceptors, tuple(options), max_calls)
