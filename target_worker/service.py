"""The common part of real and simulated target workers: the engine with its metrics, and the gRPC service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bough.config.processes import TargetConfig
from bough.errors import Unavailable
from bough.pb import stage_pb2, target_pb2
from bough.processes.process import stage
from bough.processes.worker_process import ServedWorker, WorkerService
from bough.protocol import codec
from bough.protocol.generation import WorkerInfo
from bough.protocol.ids import ScopedId
from bough.protocol.messages import VerifyCall, VerifyResult
from bough.registry.records import WorkerLoad
from bough.rpc.services import STAGES, ServicerContext
from bough.telemetry.call_context import serving_call
from bough.telemetry.logs import log_session
from bough.telemetry.metrics import MetricsServer, counter, gauge
from target_worker.kv.slot_index import SlotState
from target_worker.kv.slot_pool import PoolFigures
from target_worker.scheduler.engine import SweepEngine
from target_worker.scheduler.job import Swept

if TYPE_CHECKING:
    from target_worker.stages.head import StagesHead
    from target_worker.stages.service import StagesService

logger = logging.getLogger(__name__)
NANO = 1e-9
ROWS = tuple(2**power for power in range(13))  # upper bounds of the buckets of `bough_sweep_rows`
HEAD_WINDOW_BYTES = 256 * 1024  # hidden states cross a slow network in fewer round trips; 64 streams per connection
CALLS = tuple(2**power for power in range(9))  # the same for `bough_sweep_calls`


class TargetLoad(NamedTuple):
    """The load of a target at a moment."""

    pool: PoolFigures
    num_running: int  # calls in sweeps in flight
    num_waiting: int  # other unanswered calls


class LoadCollector(Collector):
    """Gauges of slots and calls, under vLLM's names if it has one."""

    def __init__(self, model_name: str, load: Callable[[], TargetLoad]) -> None:
        self._model_name, self._load = model_name, load

    def collect(self) -> Iterator[Metric]:
        pool, num_running, num_waiting = self._load()
        yield self._gauge("vllm:num_requests_running", "Calls in the sweeps under way", num_running)
        yield self._gauge("vllm:num_requests_waiting", "Calls that wait for a sweep", num_waiting)
        usage = pool.held_bytes / max(1, pool.num_bytes)  # a head without attention has states alone
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV memory that cannot be taken from a session", usage)
        sent, hits = pool.num_sent, pool.num_sent - pool.num_computed
        yield self._counter("vllm:prefix_cache_queries", "Tokens of contexts that were sent", sent)
        yield self._counter("vllm:prefix_cache_hits", "Of these, tokens that were cached", hits)
        yield self._gauge("bough_kv_bytes", "Memory for keys and values", pool.num_bytes)
        yield self._gauge("bough_kv_cached_tokens", "Tokens with cached keys and values", pool.num_tokens)
        yield self._counter("bough_kv_evictions", "Evicted idle slots", pool.num_evictions)
        yield self._counter("vllm:num_preemptions", "Sessions preempted by older ones", pool.num_preemptions)
        yield self._by_state("bough_kv_slots", "Slots by state", pool.num_held, pool.num_idle)
        yield self._by_state("bough_kv_used_bytes", "Memory of slots by state", pool.held_bytes, pool.idle_bytes)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return gauge(name, text, {"model_name": self._model_name}, value)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return counter(name, text, {"model_name": self._model_name}, value)

    def _by_state(self, name: str, text: str, held: int, idle: int) -> Metric:
        metric = GaugeMetricFamily(name, text, labels=["model_name", "state"])
        metric.add_metric([self._model_name, SlotState.HELD.value], held)
        metric.add_metric([self._model_name, SlotState.IDLE.value], idle)
        return metric


class Metrics(MetricsServer):
    """Counters of one target worker; its owner reports every sweep."""

    def __init__(self, model_name: str) -> None:
        super().__init__()
        self._model_name = model_name
        self._bytes = self._counter("bough_link_bytes", "Bytes of weights that crossed the link")
        self._link = self._counter("bough_link_seconds", "Time in which the link transferred weights")
        self._ideal = self._counter(
            "bough_link_ideal_seconds", "Time for the same bytes at the link's best measured speed"
        )
        self._wait = self._counter("bough_wait_seconds", "Time in which sweeps waited for weights")
        self._compute = self._counter("bough_compute_seconds", "Time in which sweeps computed")
        self._kv = self._counter("bough_kv_copied_bytes", "Bytes of keys and values copied from and to the host")
        self._sweeps = self._counter("bough_sweeps", "Passes over the target's layers")
        self._tokens = self._counter("bough_sweep_tokens", "Tokens of context and nodes of trees in these passes")
        text = "Tokens of context and nodes of trees in one pass"
        self._rows = Histogram("bough_sweep_rows", text, ["model_name"], buckets=ROWS, registry=self.registry)
        text = "Calls with tokens or trees in one pass"
        self._calls = Histogram("bough_sweep_calls", text, ["model_name"], buckets=CALLS, registry=self.registry)
        efficiency = "Of the last sweep: the ideal link time of its weights, divided by its duration"
        self._efficiency = self._gauge("bough_link_efficiency", efficiency)

    def watch(self, load: Callable[[], TargetLoad]) -> None:
        """Export slots and calls too, which `load` returns at each scrape."""
        self.registry.register(LoadCollector(self._model_name, load))

    def observe(self, num_calls: int, num_tokens: int, swept: Swept) -> None:
        """Count a sweep; any thread."""
        timings = swept.timings
        self._bytes.inc(timings.link_bytes)
        self._link.inc(timings.link_ns * NANO)
        self._ideal.inc(timings.link_ideal_ns * NANO)
        self._wait.inc(timings.wait_ns * NANO)
        self._compute.inc(timings.compute_ns * NANO)
        self._kv.inc(swept.kv_bytes)
        self._sweeps.inc()
        self._tokens.inc(num_tokens)
        self._rows.labels(self._model_name).observe(num_tokens)
        self._calls.labels(self._model_name).observe(num_calls)
        self._efficiency.set(min(1.0, timings.link_ideal_ns / timings.total_ns))

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model_name"], registry=self.registry).labels(self._model_name)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ["model_name"], registry=self.registry).labels(self._model_name)


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
        """Queue a call for the next sweep with room. Raises Unavailable for a call meant for another worker."""
        if call.worker_id not in ("", self._worker_id):
            raise Unavailable(f"worker_id: must be {self._worker_id} at this address, got {call.worker_id!r}")
        return self._engine.verify(call)

    def release(self, session_id: ScopedId, epoch: int = 0) -> Future[None]:
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

    async def Verify(self, request: target_pb2.VerifyRequest, context: ServicerContext) -> target_pb2.VerifyReply:
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


class HeadService(TargetService):
    """Implements bough.v1.Target, and bough.v1.Stages on the same port."""

    def __init__(self, stages: StagesHead) -> None:
        super().__init__()
        self._stages = stages
        self.further = [(STAGES, self)]
        self.window_bytes = HEAD_WINDOW_BYTES

    def listens_at(self, address: str) -> None:
        self._stages.address = address

    async def Join(self, request: stage_pb2.JoinRequest, context: ServicerContext) -> stage_pb2.JoinReply:
        """Let a stage join, or keep its place."""
        return await self._service.Join(request, context)

    async def Pass(self, messages: AsyncGenerator[stage_pb2.PassRequest, None], context: ServicerContext) -> None:
        """Serve the last stage."""
        await self._service.Pass(messages, context)

    @property
    def _service(self) -> StagesService:
        if self._stages.service is None:
            raise Unavailable("the head is still reading its checkpoint")
        return self._stages.service
