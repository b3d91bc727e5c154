"""Makes grpc.aio's server safe for untrusted callers and long uptimes (grpcio 1.85).

First, grpc.aio decodes a call's method name as UTF-8 in the loop that accepts all calls. An invalid name ends that loop
and so the server: a stranger needs only one packet. Calls of registered methods take another path, which decodes no
names; calls of other methods are refused here before their names are decoded.

Second, it frees the C memory of a batch of operations in the coroutine that awaits the batch, and only on success. If
the peer has gone, or the task was cancelled, up to a kilobyte leaks (https://github.com/grpc/grpc/issues/43360). Here
batches are freed however their calls end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from inspect import iscoroutinefunction
from typing import Any

import grpc
from grpc._cython import cygrpc
from grpc.aio import _server

from bough.errors import ConfigError

MAX_REFUSALS = 256  # refusals sent at once, some to peers that do not read; further calls are dropped
Batch = Coroutine[asyncio.Future[None], None, None]
_execute_batch = getattr(cygrpc, "execute_batch", None)


class _KnownCalls(cygrpc.AioServer):  # type: ignore[misc]  # it has no types
    """Answers calls of registered methods; others end as UNIMPLEMENTED at once, or as CANCELLED if there are many."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self._refusals: set[asyncio.Task[None]] = set()

    async def _request_call(self) -> Any:
        """Called by gRPC for the next call of an unregistered method; never returns."""
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
    """A server of grpc.aio that refuses calls of unregistered methods; services register all of theirs."""

    def __init__(
        self, interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, int]], max_calls: int
    ) -> None:
        """Raises ConfigError if this version of grpcio accepts calls in a way that this class does not cover."""
        for method in ("_request_call", "_request_registered_call"):
            if not iscoroutinefunction(getattr(cygrpc.AioServer, method, None)):
                raise ConfigError(
                    f"grpcio: must be a version whose server has {method}, such as 1.85, got {grpc.__version__}: any "
                    "stranger could end this server"
                )
        self._loop = cygrpc.get_working_loop()
        self._server = _KnownCalls(self._loop, None, (), interceptors, tuple(options), max_calls)


def free_batches() -> None:
    """Make all later calls of this process, as a server and as a client, free their batches.

    Does nothing with a grpcio that lacks the private function.
    """
    if _execute_batch is not None:
        cygrpc.execute_batch = execute_batch


async def execute_batch(call: Any, operations: tuple[Any, ...], loop: asyncio.AbstractEventLoop) -> None:
    """Await gRPC's function of this name, which frees the batch even if the awaiting task is cancelled."""
    assert _execute_batch is not None
    batch: Batch = _execute_batch(call, operations, loop)
    ended = batch.send(None)  # it awaits the end of the batch
    try:
        await asyncio.shield(ended)
    finally:
        if ended.done():
            _free(batch, ended)
        else:
            ended.add_done_callback(lambda _: _free(batch, ended))


def _free(batch: Batch, ended: asyncio.Future[None]) -> None:
    """Resume gRPC's coroutine after its await, where it frees the batch; a failure would end it earlier."""
    if ended.exception() is not None:
        ended.__init__(loop=ended.get_loop())  # type: ignore[misc]  # as new, so that it can have a result
        ended.set_result(None)
    with suppress(StopIteration):
        batch.send(None)
