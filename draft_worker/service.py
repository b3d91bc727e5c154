"""gRPC service of the draft: decode, call, encode."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc

from bough.pb import draft_pb2
from bough.processes.worker_process import WorkerService
from bough.protocol import codec
from bough.telemetry.call_context import serving_call
from bough.telemetry.log_context import log_session
from draft_worker.served import ServedDraft

logger = logging.getLogger(__name__)


class DraftService(WorkerService[ServedDraft]):
    """Implements bough.v1.Draft."""

    async def Grow(
        self, request: draft_pb2.GrowRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> draft_pb2.GrowReply:
        async with self.crossed():
            with serving_call(self.tracer, "bough.v1.Draft/Grow") as span:
                call = codec.grow_call_from_wire(request, self.worker.vocab_size, self.worker.max_nodes)
                log_session(call.context.session_id)
                if call.sampling.grammar:
                    await asyncio.to_thread(self.worker.compile_grammar, call)
                result = await asyncio.wrap_future(self.worker.grow(call))
                span.set({"bough.tree.nodes": len(result.tree), "bough.draft.warm_nodes": result.num_warm_nodes})
                logger.debug("grown: %d nodes in %.3f s", len(result.tree), result.timings.total_ns / 1e9)
                return codec.grow_result_to_wire(result)
