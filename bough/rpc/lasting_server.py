"""A gRPC server that one malformed call does not end.

grpc.aio reads the name of a call as UTF-8 in the loop that takes all calls, and where it is none that loop ends, and
the server with it (grpcio 1.85): a stranger needs a single packet. Calls of methods that are there come another way,
with names that the server has itself; calls of all others are let go here before anybody looks at their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
from grpc._cython import cygrpc
from grpc.aio import _server


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
        self._loop = cygrpc.get_working_loop()
        arguments = _server._augment_channel_arguments(options, None)
        self._server = _KnownCalls(self._loop, None, (), interceptors, arguments, max_calls)
