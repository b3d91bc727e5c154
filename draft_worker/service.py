"""Draft over gRPC: decode, call, encode."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from bough import wire
from bough.pb import common_pb2, draft_pb2
from bough.process import WorkerService
from draft_worker.worker import DraftWorker


class DraftService(WorkerService[DraftWorker]):
    """bough.v1.Draft."""

    async def Grow(
        self, request: draft_pb2.GrowRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> draft_pb2.GrowReply:
        """Grows a tree."""
        call = wire.grow_call_from_wire(request, self.worker.vocab_size, self.worker.max_nodes)
        return wire.grow_result_to_wire(await asyncio.wrap_future(self.worker.grow(call)))

    async def Release(
        self, request: common_pb2.ReleaseRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> common_pb2.ReleaseReply:
        """Forgets a session."""
        await asyncio.wrap_future(self.worker.release(request.session_id))
        return common_pb2.ReleaseReply()
