"""What all target workers share, real or simulated: the engine's surroundings, and the gRPC service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import grpc

from bough.config.processes import TargetConfig
from bough.errors import Unavailable
from bough.pb import target_pb2
from bough.processes.process import stage
from bough.processes.worker_process import ServedWorker, WorkerService
from bough.protocol import codec
from bough.protocol.generation import WorkerInfo
from bough.protocol.messages import VerifyCall, VerifyResult
from bough.registry.records import WorkerLoad
from bough.telemetry.call_context import serving_call
from bough.telemetry.logs import log_session
from target_worker.metrics import Metrics, TargetLoad
from target_worker.scheduler.engine import SweepEngine

logger = logging.getLogger(__name__)


class ServedTarget(ServedWorker[TargetConfig]):
    """An engine and its metrics, closed once. Subclasses supply the sweeper and `info`."""

    kind = "target"
    max_nodes: int  # nodes of a tree
    _engine: SweepEngine
    _metrics: Metrics

    def __init__(self, config: TargetConfig, worker_id: str, name: str) -> None:
        super().__init__(config, worker_id, name, Metrics(name))
        self._resources = ExitStack()

    def _start_engine(self, prepare: Callable[[], None] = lambda: None) -> None:
        """Start the sweep thread, which first calls `prepare`, and serve metrics; returns when it has warmed up.

        Raises ConfigError if the port for metrics is in use, or what the first sweep raised.
        """
        self._metrics.watch(self._load)
        self._engine.start(prepare)
        self._resources.callback(self._engine.stop)
        self._resources.callback(self._metrics.close)
        self._serve_metrics()
        stage("warming up")
        self._engine.warm_up().result()

    def verify(self, call: VerifyCall) -> Future[VerifyResult]:
        """Queue a call for the next sweep with room. Raises Unavailable for one of another worker at this address."""
        if call.worker_id not in ("", self._worker_id):
            raise Unavailable(f"worker_id: must be {self._worker_id} at this address, got {call.worker_id!r}")
        return self._engine.verify(call)

    def release(self, session_id: str, epoch: int = 0) -> Future[None]:
        return self._engine.release(session_id, epoch)

    def trouble(self) -> str:
        return self._engine.trouble()

    def drain(self) -> Future[None]:
        return self._engine.drain()

    def close(self) -> None:
        self._resources.close()

    def load(self) -> WorkerLoad:
        figures = self._engine.pool.figures()
        return WorkerLoad(figures.num_bytes, figures.held_bytes)

    def _info(self, **own: Any) -> WorkerInfo:
        engine, figures = self._engine, self._engine.pool.figures()
        return super()._info(
            max_nodes=self.max_nodes,
            num_sessions=figures.num_sessions,
            kv_bytes=figures.num_bytes,
            kv_used_bytes=figures.held_bytes,
            num_waiting=engine.num_waiting,
            num_running=engine.num_running,
            num_passes=engine.num_passes,
            cost=engine.cost,
            **own,
        )

    def _load(self) -> TargetLoad:
        return TargetLoad(self._engine.pool.figures(), self._engine.num_running, self._engine.num_waiting)


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
