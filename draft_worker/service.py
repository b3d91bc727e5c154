"""The common part of real and simulated draft workers: the thread that grows trees, and the gRPC service."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from threading import Thread
from typing import Any

import grpc
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from bough.concurrency.futures import Inbox, PendingCalls, settle
from bough.config.processes import DraftConfig
from bough.errors import Exhausted, Unavailable
from bough.pb import draft_pb2
from bough.processes.worker_process import ServedWorker, WorkerService
from bough.protocol import codec
from bough.protocol.generation import WorkerInfo
from bough.protocol.ids import ScopedId
from bough.protocol.messages import GrowCall, GrowResult
from bough.registry.records import WorkerLoad
from bough.telemetry.call_context import serving_call
from bough.telemetry.logs import log_session
from bough.telemetry.metrics import MetricsServer, counter, gauge
from bough.telemetry.spans import NOTED_SPANS
from draft_worker.engine.engine import DraftEngine, PendingGrow

logger = logging.getLogger(__name__)


class DraftCollector(Collector):
    """Exports the engine's counters at each scrape, under vLLM's names if it has one."""

    def __init__(self, model_name: str, engine: DraftEngine, num_unanswered: Callable[[], int]) -> None:
        """`num_unanswered` counts calls, growing ones included."""
        self._model, self._engine, self._num_unanswered = {"model_name": model_name}, engine, num_unanswered

    def collect(self) -> Iterator[Metric]:
        engine, pool = self._engine, self._engine.pool
        num_running = engine.num_growing
        num_waiting = max(0, self._num_unanswered() - num_running)
        usage = engine.kv_used_bytes / pool.num_bytes if pool.num_bytes else 0.0
        gauges = {
            "vllm:num_requests_running": ("Calls whose trees are growing", num_running),
            "vllm:num_requests_waiting": ("Calls that wait for room", num_waiting),
            "vllm:kv_cache_usage_perc": ("Share of KV memory of sessions whose trees are growing", usage),
            "bough_kv_bytes": ("Memory for keys and values", pool.num_bytes),
            "bough_draft_sessions": ("Sessions with cached keys and values", len(pool)),
        }
        counters = {
            "bough_draft_trees": ("Trees grown", engine.num_trees),
            "bough_draft_nodes": ("Nodes of these trees, roots included", engine.num_nodes),
            "bough_draft_warm_trees": ("Trees that reused expansions of draft-ahead", engine.num_warm_trees),
            "bough_draft_steps": ("Passes over the draft model, including draft-ahead", engine.num_passes),
            "bough_draft_step_seconds": ("Time of the passes for trees", engine.step_seconds),
        }
        for name, (text, value) in gauges.items():
            yield gauge(name, text, self._model, value)
        for name, (text, value) in counters.items():
            yield counter(name, text, self._model, value)


class ServedDraft(ServedWorker[DraftConfig]):
    """Grows the trees of all concurrent calls in the same draft steps. Subclasses supply the draft and `info`."""

    kind = "draft"
    _engine: DraftEngine

    def __init__(self, config: DraftConfig, worker_id: str, name: str) -> None:
        super().__init__(config, worker_id, name, MetricsServer())
        self._unanswered = PendingCalls(config.max_waiting)
        self._is_draining = False
        self._inbox = Inbox("the draft worker is being shut down")

    def _start_thread(self, prepare: Callable[[], None] = lambda: None) -> None:
        """Start the thread, which first calls `prepare`; serve metrics. Raises ConfigError if their port is in use."""
        self._metrics.registry.register(DraftCollector(self._name, self._engine, lambda: len(self._unanswered)))
        self._serve_metrics()
        self._inbox.put(prepare)
        self._thread = Thread(target=self._work, name="draft", daemon=True)  # a failing process must be able to end
        self._thread.start()

    @property
    def max_nodes(self) -> int:
        """Limit of nodes of a tree."""
        return self._config.max_nodes

    def grow(self, call: GrowCall) -> Future[GrowResult]:
        """Queue a call; the future raises InvalidRequest or PrefixMissing. A cancelled call ends at the next step."""
        request = PendingGrow(call, Future(), time.perf_counter_ns(), NOTED_SPANS.get())
        try:
            self._unanswered.add(request.future)
        except Exhausted as exc:
            settle(request.future, exc)
            return request.future
        self._inbox.post(request.future, lambda: self._start(request))
        return request.future

    def release(self, session_id: ScopedId, epoch: int = 0) -> Future[None]:
        """Forget a session; epoch 0 always forgets. The future raises NotFound, or StaleEpoch for a newer epoch."""
        future: Future[None] = Future()

        def release() -> None:
            self._engine.release(session_id, epoch)
            settle(future, None)

        self._inbox.post(future, release)
        return future

    def drain(self) -> Future[None]:
        self._is_draining = True
        return self._unanswered.when_idle()

    def close(self) -> None:
        """End the thread after the current draft step; unanswered and later calls fail."""
        self._inbox.put(None)
        self._thread.join()
        self._metrics.close()

    def load(self) -> WorkerLoad:
        return WorkerLoad(self._engine.pool.num_bytes, self._engine.kv_used_bytes)

    def _info(self, **own: Any) -> WorkerInfo:
        engine, pool = self._engine, self._engine.pool
        return super()._info(
            num_sessions=len(pool),
            kv_bytes=pool.num_bytes,
            kv_used_bytes=engine.kv_used_bytes,
            num_waiting=len(self._unanswered),
            num_passes=engine.num_passes,
            cost=engine.cost,
            **own,
        )

    def _start(self, request: PendingGrow) -> None:
        if self._is_draining and request.call.context.session_id not in self._engine.pool:
            settle(request.future, Unavailable("this draft worker is draining: new sessions must go to another one"))
        else:
            self._engine.start(request)

    def _work(self) -> None:
        """Loop of the thread: queued commands, then a draft step for all growing trees."""
        while self._inbox.run(lambda: 0.0 if self._engine.is_growing or self._engine.can_go_ahead else None):
            self._engine.step()
        self._engine.close()
        self._inbox.end()


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
