"""gRPC service of the target: decode, call, encode."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc

from bough.pb import target_pb2
from bough.processes.worker_process import WorkerService
from bough.protocol import codec
from bough.telemetry.call_context import serving_call
from bough.telemetry.log_context import log_session
from target_worker.served import ServedTarget

logger = logging.getLogger(__name__)


class TargetService(WorkerService[ServedTarget]):
    """Implements bough.v1.Target."""

    async def Verify(
        self, request: target_pb2.VerifyRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> target_pb2.VerifyReply:
        async with self.crossed():
            with serving_call(self.tracer, "bough.v1.Target/Verify") as span:
                call = codec.verify_call_from_wire(request, self.worker.vocab_size, self.worker.max_nodes)
                log_session(call.context.session_id)
                if call.sampling.grammar:
                    await asyncio.to_thread(self.worker.compile_grammar, call)
                result = await asyncio.wrap_future(self.worker.verify(call))
                num_nodes, num_accepted = len(call.tree), len(result.verdict.accepted_nodes)
                span.set({"bough.tree.nodes": num_nodes, "bough.tree.accepted": num_accepted})
                seconds = result.timings.total_ns / 1e9
                logger.debug("verified: %d nodes, %d accepted, in %.3f s", num_nodes, num_accepted, seconds)
                if call.is_given:  # scores of hundreds of tokens, each perhaps with dozens of alternatives
                    return await asyncio.to_thread(codec.verify_result_to_wire, result)
                return codec.verify_result_to_wire(result)
