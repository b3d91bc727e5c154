"""Draft over gRPC: decode, call, encode."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from bough.pb import common_pb2, draft_pb2
from bough.processes.process import WorkerService
from bough.protocol import codec
from bough.simulation.line import Line
from draft_worker.served import ServedDraft


class DraftService(WorkerService[ServedDraft]):
    """bough.v1.Draft."""

    async def Grow(
        self, request: draft_pb2.GrowRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> draft_pb2.GrowReply:
        """Grows a tree."""
        call = codec.grow_call_from_wire(request, self.worker.vocab_size, self.worker.max_nodes)
        return codec.grow_result_to_wire(await asyncio.wrap_future(self.worker.grow(call)))

    async def Release(
        self, request: common_pb2.ReleaseRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> common_pb2.ReleaseReply:
        """Forgets a session."""
        await asyncio.wrap_future(self.worker.release(request.session_id, request.epoch))
        return common_pb2.ReleaseReply()


class SimulatedDraftService(DraftService):
    """bough.v1.Draft at the far end of a simulated network, with the failures of a profile."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        self._line = line

    async def Grow(
        self, request: draft_pb2.GrowRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> draft_pb2.GrowReply:
        """Grows a tree, or fails as the profile wants."""
        async with self._line.crossed():
            return await super().Grow(request, context)
