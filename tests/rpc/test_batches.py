"""What gRPC's batches take in C is freed, however a call ends: a stranger who cancels calls had a kilobyte of each."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress
from typing import Any

import pytest
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bough.rpc import lasting_server
from bough.rpc.server import is_serving, open_channel, serving


class Batch:
    """gRPC's function, which frees a batch only after what it awaits."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_freed = False

    async def execute(self, call: object, operations: tuple[object, ...], loop: asyncio.AbstractEventLoop) -> None:
        await self.ended
        self.is_freed = True

    def end(self, *, has_failed: bool) -> None:
        if has_failed:
            self.ended.set_exception(ValueError("failed"))
        else:
            self.ended.set_result(None)


@pytest.mark.parametrize("is_cancelled", [False, True])
@pytest.mark.parametrize("has_failed", [False, True])
async def test_a_batch_is_freed_however_it_ends(
    has_failed: bool, is_cancelled: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    batch = Batch()
    monkeypatch.setattr(lasting_server, "_execute_batch", batch.execute)
    waiting = asyncio.create_task(lasting_server.execute_batch(None, (), asyncio.get_running_loop()))
    await asyncio.sleep(0)
    if is_cancelled:
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not batch.is_freed, "gRPC is still at it"
    batch.end(has_failed=has_failed)
    if has_failed and not is_cancelled:
        with pytest.raises(ValueError, match="failed"):
            await waiting
    else:
        with suppress(asyncio.CancelledError):
            await waiting
    await asyncio.sleep(0)
    assert batch.is_freed
    del batch
    gc.collect()
    assert not caplog.records, "no exception is said to have been overlooked"


async def test_all_batches_of_a_process_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a server, and those of a client whose call is cancelled while it is away."""
    began, freed, real = list[Any](), list[Any](), lasting_server._free
    original = lasting_server._execute_batch

    def execute(call: Any, operations: Any, loop: Any) -> Any:
        began.append(operations)
        return original(call, operations, loop)

    def free(batch: Any, ended: Any) -> None:
        freed.append(batch)
        real(batch, ended)

    monkeypatch.setattr(lasting_server, "_execute_batch", execute)
    monkeypatch.setattr(lasting_server, "_free", free)
    async with serving("127.0.0.1", 0, "bough.v1.Target", lambda _: None) as served:
        assert cygrpc.execute_batch is lasting_server.execute_batch
        async with open_channel(f"127.0.0.1:{served.port}") as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            with suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    await watch.read()
            watch.cancel()
            assert await is_serving(channel, "", 5.0)
    async with asyncio.timeout(30):
        while len(freed) < len(began):
            await asyncio.sleep(0.01)
    assert len(began) > 4
