"""Tracing by OpenTelemetry, whose API does nothing without its SDK; the only file that uses it.

The objects of a request keep its spans. OpenTelemetry's context cannot, because different tasks advance the generators
of one request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from threading import Thread
from types import TracebackType

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from bough import __version__
from bough.config.processes import ServiceConfig
from bough.errors import ConfigError
from bough.telemetry.spans import NO_ATTRIBUTES, TRACEPARENT, Attributes, FinishedSpan, Metadata

PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_PROTOCOL"
EXPORT_LOGGER = "opentelemetry.exporter.otlp.proto.grpc.exporter"  # failed calls to the collector
FLUSH_SECONDS = 2.0  # that the end of a process waits for the last export
PROPAGATOR = TraceContextTextMapPropagator()
GONE = (GeneratorExit, asyncio.CancelledError)  # raised in a block whose caller has left


class Span:
    """A period of one request, which ends with its `with` block and the block's error.

    All spans of a request have one offset from the monotonic clock to the time of day, so that they nest.
    """

    def __init__(self, tracer: trace.Tracer, span: trace.Span, offset_ns: int) -> None:
        """`offset_ns` is added to perf_counter_ns."""
        self._tracer, self._span, self._offset_ns = tracer, span, offset_ns

    @property
    def is_recorded(self) -> bool:
        """Whether the span is exported."""
        return self._span.is_recording()

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits; empty if not recorded."""
        return trace.format_trace_id(self._span.get_span_context().trace_id) if self.is_recorded else ""

    @property
    def metadata(self) -> Metadata:
        """Metadata for calls within the span, so that the callee's spans become its children."""
        carrier: dict[str, str] = {}
        PROPAGATOR.inject(carrier, self._context())
        return tuple(carrier.items())

    def child(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> Span:
        """A child span that begins now."""
        return self._begin(name, SpanKind.INTERNAL, attributes)

    def call(self, method: str, address: str) -> Span:
        """A child span for a gRPC call that begins now."""
        return self._begin(method, SpanKind.CLIENT, {"rpc.system": "grpc", "server.address": address})

    def set(self, attributes: Attributes) -> None:
        """Set attributes."""
        self._span.set_attributes(attributes)

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """Record an event in the span."""
        self._span.add_event(name, attributes, self._now_ns())

    def add(self, spans: Sequence[FinishedSpan]) -> None:
        """Add child spans recorded by threads."""
        for one in spans:
            began_ns = self._offset_ns + one.began_ns
            span = self._tracer.start_span(one.name, self._context(), attributes=one.attributes, start_time=began_ns)
            span.end(self._offset_ns + one.ended_ns)

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the span. Only an error's class is recorded, as its text may quote content."""
        if isinstance(error, GONE):
            self._span.set_attribute("bough.cancelled", True)
        elif error is not None:
            name = type(error).__name__
            self._span.set_attribute("error.type", name)
            self._span.set_status(Status(StatusCode.ERROR, name))
        self._span.end(self._now_ns())

    def _begin(self, name: str, kind: SpanKind, attributes: Attributes) -> Span:
        if not self.is_recorded:
            return self
        span = self._tracer.start_span(name, self._context(), kind, attributes, start_time=self._now_ns())
        return Span(self._tracer, span, self._offset_ns)

    def _context(self) -> Context:
        return trace.set_span_in_context(self._span, Context())

    def _now_ns(self) -> int:
        return self._offset_ns + time.perf_counter_ns()


class Tracer:
    """Creates the spans of requests that enter a process, if its OpenTelemetry tracer records any."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer

    def serve(self, name: str, traceparent: str) -> Span:
        """A span for work of this process, within the caller's span that `traceparent` (W3C) names.

        Without a valid one it begins a new trace, or is `NO_SPAN` if not sampled.
        """
        parent = PROPAGATOR.extract({TRACEPARENT: traceparent}, Context())
        offset_ns = clock_offset_ns()
        began_ns = offset_ns + time.perf_counter_ns()
        span = self._tracer.start_span(name, parent, kind=SpanKind.SERVER, start_time=began_ns)
        return Span(self._tracer, span, offset_ns) if span.is_recording() else NO_SPAN


NO_TRACER = Tracer(trace.NoOpTracer())
NO_SPAN = Span(trace.NoOpTracer(), trace.INVALID_SPAN, 0)
CURRENT_SPAN: ContextVar[Span] = ContextVar("span", default=NO_SPAN)  # of the running task's request


@asynccontextmanager
async def tracing(config: ServiceConfig, kind: str, process_id: str, sample: float = 0.0) -> AsyncIterator[Tracer]:
    """The tracer of a process during the block; it records nothing unless an endpoint is configured.

    `sample` is the share of requests to trace if the caller has not decided. A thread exports spans in batches.
    Without a collector they are lost, and a warning is logged from time to time.

    Raises:
        ConfigError: tracing is configured but its packages are not installed, or OpenTelemetry's environment variables
            are invalid.
    """
    if not config.otlp_endpoint:
        yield NO_TRACER
        return
    if (protocol := os.environ.get(PROTOCOL_VARIABLE, "")) not in ("", "grpc"):
        raise ConfigError(f"{PROTOCOL_VARIABLE}: must be grpc, or not set, got {protocol!r}")
    try:
        exporter = Exporter(config.otlp_endpoint, config.namespace, kind, process_id, sample)
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"--otlp-endpoint: must be empty if {exc.name} is not installed, got {config.otlp_endpoint!r}; "
            "pip install '.[tracing]'"
        ) from exc
    except Exception as exc:  # invalid variables such as OTEL_EXPORTER_OTLP_TIMEOUT raise various errors
        raise ConfigError(f"OTEL_*: must be as OpenTelemetry documents them, got an error: {exc}") from exc
    try:
        yield exporter.tracer
    finally:
        await asyncio.to_thread(exporter.close, FLUSH_SECONDS)


class Exporter:
    """Sends spans to a collector in batches. The queue is bounded; further spans are dropped."""

    def __init__(self, endpoint: str, namespace: str, kind: str, process_id: str, sample: float) -> None:
        """Raises ModuleNotFoundError without the SDK, and various errors for invalid environment variables."""
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        resource = Resource.create(
            {
                "service.namespace": namespace,
                "service.name": f"bough-{kind}",
                "service.instance.id": process_id,
                "service.version": __version__,
            }
        )
        sampler = ParentBased(TraceIdRatioBased(sample))
        self._provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
        self._exporter = OTLPSpanExporter(endpoint=endpoint)
        logging.getLogger(EXPORT_LOGGER).setLevel("ERROR")  # otherwise every retry is logged
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self.tracer = Tracer(self._provider.get_tracer("bough", __version__))

    def close(self, timeout_seconds: float) -> None:
        """Export the remaining spans within `timeout_seconds`. Blocks for at most twice that."""
        closing = Thread(target=self._provider.shutdown, name="tracing", daemon=True)
        closing.start()
        closing.join(timeout_seconds)
        if closing.is_alive():
            self._exporter.shutdown()  # ends retries
            closing.join(timeout_seconds)


def clock_offset_ns() -> int:
    """Offset from perf_counter_ns to the time of day.

    The largest of several readings, as a delay between the two clocks makes the offset smaller.
    """
    return max(time.time_ns() - time.perf_counter_ns() for _ in range(3))
