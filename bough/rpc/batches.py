"""Frees what a batch of gRPC operations has allocated in C, however its call ends.

grpc.aio does so in the coroutine that awaits the batch, if that succeeds: of a call whose peer has gone meanwhile, or
whose task was cancelled, it keeps up to a kilobyte for ever (grpcio 1.85, https://github.com/grpc/grpc/issues/43360).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from grpc._cython import cygrpc

Batch = Coroutine[asyncio.Future[None], None, None]

_execute_batch = getattr(cygrpc, "execute_batch", None)


def free_batches() -> None:
    """Have all later calls of this process, as a server and as a client, free their batches.

    A grpcio without this function, which is not of its public interface, is left as it is.
    """
    if _execute_batch is not None:
        cygrpc.execute_batch = execute_batch


async def execute_batch(call: Any, operations: tuple[Any, ...], loop: asyncio.AbstractEventLoop) -> None:
    """Await gRPC's function of this name, which goes on to where it frees the batch also if this one is cancelled."""
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
    """Let gRPC's coroutine go on behind what it awaits, where it frees the batch; a failure would end it before."""
    if ended.exception() is not None:
        ended.__init__(loop=ended.get_loop())  # type: ignore[misc]  # as new, so that it can have a result
        ended.set_result(None)
    with suppress(StopIteration):
        batch.send(None)
