"""OpenTelemetry spans, exported by OTLP on a separate thread; the only file that uses OpenTelemetry."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from threading import Thread
from types import TracebackType

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from bough import __version__
from bough.telemetry.call_context import TRACEPARENT
from bough.telemetry.spans import NO_ATTRIBUTES, NO_SPAN, Attributes, FinishedSpan, Metadata, Span, Tracer

EXPORT_LOGGER = "opentelemetry.exporter.otlp.proto.grpc.exporter"  # failed calls to the collector
PROPAGATOR = TraceContextTextMapPropagator()
GONE = (GeneratorExit, asyncio.CancelledError)  # raised in a block whose result nobody waits for


class OtlpTracer(Tracer):
    """Creates spans and exports them in batches. Without a collector, spans are lost and a log line appears at times.

    The export queue is bounded; further spans are dropped.
    """

    def __init__(self, endpoint: str, namespace: str, kind: str, process_id: str, sample: float) -> None:
        """`sample` is the share of requests traced, among those without a parent that decides."""
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
        self._tracer = self._provider.get_tracer("bough", __version__)

    def serve(self, name: str, traceparent: str) -> Span:
        parent = PROPAGATOR.extract({TRACEPARENT: traceparent}, Context())
        offset_ns = clock_offset_ns()
        span = self._tracer.start_span(
            name, parent, kind=SpanKind.SERVER, start_time=offset_ns + time.perf_counter_ns()
        )
        return OtlpSpan(self._tracer, span, offset_ns) if span.is_recording() else NO_SPAN

    def close(self, timeout_seconds: float) -> None:
        """Export the remaining spans within `timeout_seconds`. Blocks for at most twice that."""
        closing = Thread(target=self._provider.shutdown, name="tracing", daemon=True)
        closing.start()
        closing.join(timeout_seconds)
        if closing.is_alive():
            self._exporter.shutdown()  # ends retries
            closing.join(timeout_seconds)


class OtlpSpan(Span):
    """A `Span` that is exported when it ends."""

    is_recorded = True

    def __init__(self, tracer: trace.Tracer, span: trace.Span, offset_ns: int) -> None:
        """`offset_ns` is added to perf_counter_ns, for all spans of a request alike, so that they nest."""
        self._tracer, self._span, self._offset_ns = tracer, span, offset_ns

    @property
    def trace_id(self) -> str:
        return trace.format_trace_id(self._span.get_span_context().trace_id)

    @property
    def metadata(self) -> Metadata:
        carrier: dict[str, str] = {}
        PROPAGATOR.inject(carrier, trace.set_span_in_context(self._span, Context()))
        return tuple(carrier.items())

    def child(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> Span:
        return self._begin(name, SpanKind.INTERNAL, attributes)

    def call(self, method: str, address: str) -> Span:
        return self._begin(method, SpanKind.CLIENT, {"rpc.system": "grpc", "server.address": address})

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        self._span.add_event(name, attributes, self._now_ns())

    def add(self, spans: Sequence[FinishedSpan]) -> None:
        within = trace.set_span_in_context(self._span, Context())
        for one in spans:
            began_ns = self._offset_ns + one.began_ns
            span = self._tracer.start_span(one.name, within, attributes=one.attributes, start_time=began_ns)
            span.end(self._offset_ns + one.ended_ns)

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
        within = trace.set_span_in_context(self._span, Context())
        span = self._tracer.start_span(name, within, kind, attributes, start_time=self._now_ns())
        return OtlpSpan(self._tracer, span, self._offset_ns)

    def _now_ns(self) -> int:
        return self._offset_ns + time.perf_counter_ns()


def clock_offset_ns() -> int:
    """Offset from perf_counter_ns to the time of day.

    The largest of several readings, as a delay between the two clocks makes the offset smaller.
    """
    return max(time.time_ns() - time.perf_counter_ns() for _ in range(3))
