"""Target over gRPC: decode, call, encode."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from bough.pb import common_pb2, target_pb2
from bough.processes.process import WorkerService
from bough.protocol import codec
from bough.simulation.line import Line
from target_worker.served import ServedTarget


class TargetService(WorkerService[ServedTarget]):
    """bough.v1.Target."""

    async def Verify(
        self, request: target_pb2.VerifyRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> target_pb2.VerifyReply:
        """Verifies a tree."""
        call = codec.verify_call_from_wire(request, self.worker.vocab_size, self.worker.max_nodes)
        return codec.verify_result_to_wire(await asyncio.wrap_future(self.worker.verify(call)))

    async def Release(
        self, request: common_pb2.ReleaseRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> common_pb2.ReleaseReply:
        """Forgets a session."""
        await asyncio.wrap_future(self.worker.release(request.session_id, request.epoch))
        return common_pb2.ReleaseReply()


class SimulatedTargetService(TargetService):
    """bough.v1.Target at the far end of a simulated network, with the failures of a profile."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        self._line = line

    async def Verify(
        self, request: target_pb2.VerifyRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> target_pb2.VerifyReply:
        """Verifies a tree, or fails as the profile wants."""
        async with self._line.crossed():
            return await super().Verify(request, context)
