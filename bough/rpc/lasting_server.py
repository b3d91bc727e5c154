"""A gRPC server that survives malformed method names.

grpc.aio decodes a call's method name as UTF-8 in the loop that accepts all calls; an invalid name ends that loop, and
so the server (grpcio 1.85), for which a stranger needs a single packet. Calls of registered methods take another path,
without decoding names; calls of other methods are refused here before their names are decoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from inspect import iscoroutinefunction
from typing import Any

import grpc
from grpc._cython import cygrpc
from grpc.aio import _server

from bough.errors import ConfigError

MAX_REFUSALS = 256  # being sent at once, some to peers that do not read; further calls are dropped


class _KnownCalls(cygrpc.AioServer):  # type: ignore[misc]  # it has no types
    """Answers calls of registered methods; others end as UNIMPLEMENTED at once, or as CANCELLED if there are many."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self._refusals: set[asyncio.Task[None]] = set()

    async def _request_call(self) -> Any:
        """Called by gRPC for the next call of an unregistered method; never returns one."""
        while True:
            self._refuse(await super()._request_call())  # no variable holds the call: it ends with its last reference

    def _refuse(self, call: Any) -> None:
        if len(self._refusals) < MAX_REFUSALS:
            refusal = asyncio.create_task(_unimplemented(call))
            self._refusals.add(refusal)
            refusal.add_done_callback(self._refusals.discard)


async def _unimplemented(call: Any) -> None:
    context = cygrpc._ServicerContext(call, None, None, asyncio.get_running_loop())
    with suppress(grpc.aio.AbortError, grpc.aio.InternalError):  # it has been sent, or the peer has gone
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "method: must be one of this server, see its reflection")


class LastingServer(_server.Server):
    """A server of grpc.aio that refuses calls of unregistered methods and goes on; services register all theirs."""

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
