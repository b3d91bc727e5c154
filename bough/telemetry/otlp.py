"""Spans by OpenTelemetry, sent over OTLP by a thread of their own. The one file that knows OpenTelemetry."""

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
from bough.telemetry.spans import NO_ATTRIBUTES, NO_SPAN, Attributes, FinishedSpan, Metadata, Span

EXPORT_LOGGER = "opentelemetry.exporter.otlp.proto.grpc.exporter"  # of calls to the collector that fail
BATCH_LOGGER = "opentelemetry.sdk._shared_internal"  # of spans that are dropped
SILENT_SECONDS = 60.0  # between two lines of a log that say the same of a collector
PROPAGATOR = TraceContextTextMapPropagator()
GONE = (GeneratorExit, asyncio.CancelledError)  # with which a block ends that nobody waits for any more


class OtlpTracer:
    """Makes spans and has them sent in batches. A collector that is away costs spans, and a line of the log at times.

    The queue of spans that wait to be sent is bounded; beyond it they are dropped.
    """

    def __init__(self, endpoint: str, namespace: str, kind: str, process_id: str, sample: float) -> None:
        """`sample` is the share that is traced of what comes without a sampled, or unsampled, parent."""
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
        logging.getLogger(EXPORT_LOGGER).setLevel("ERROR")  # below that it tells of every retry
        for name in (EXPORT_LOGGER, BATCH_LOGGER):
            logging.getLogger(name).addFilter(Seldom(SILENT_SECONDS))
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("bough", __version__)

    def serve(self, name: str, traceparent: str) -> Span:
        """As `Tracer.serve`."""
        parent = PROPAGATOR.extract({TRACEPARENT: traceparent}, Context())
        offset_ns = clock_offset_ns()
        span = self._tracer.start_span(
            name, parent, kind=SpanKind.SERVER, start_time=offset_ns + time.perf_counter_ns()
        )
        return OtlpSpan(self._tracer, span, offset_ns) if span.is_recording() else NO_SPAN

    def close(self, patience_seconds: float) -> None:
        """Sends what is left, if the collector takes it in time. Blocks for at most twice that."""
        closing = Thread(target=self._provider.shutdown, name="tracing", daemon=True)
        closing.start()
        closing.join(patience_seconds)
        if closing.is_alive():
            self._exporter.shutdown()  # which ends a retry
            closing.join(patience_seconds)


class OtlpSpan:
    """A `Span` that is sent when it ends."""

    is_recorded = True

    def __init__(self, tracer: trace.Tracer, span: trace.Span, offset_ns: int) -> None:
        """`offset_ns` is added to perf_counter_ns, for all spans of a request in this process alike: so they nest."""
        self._tracer, self._span, self._offset_ns = tracer, span, offset_ns

    @property
    def trace_id(self) -> str:
        """As `Span.trace_id`."""
        return trace.format_trace_id(self._span.get_span_context().trace_id)

    @property
    def metadata(self) -> Metadata:
        """As `Span.metadata`."""
        carrier: dict[str, str] = {}
        PROPAGATOR.inject(carrier, trace.set_span_in_context(self._span, Context()))
        return tuple(carrier.items())

    def child(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> Span:
        """As `Span.child`."""
        return self._begin(name, SpanKind.INTERNAL, attributes)

    def call(self, method: str, address: str) -> Span:
        """As `Span.call`."""
        return self._begin(method, SpanKind.CLIENT, {"rpc.system": "grpc", "server.address": address})

    def set(self, attributes: Attributes) -> None:
        """As `Span.set`."""
        self._span.set_attributes(attributes)

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """As `Span.event`."""
        self._span.add_event(name, attributes, self._now_ns())

    def add(self, spans: Sequence[FinishedSpan]) -> None:
        """As `Span.add`."""
        within = trace.set_span_in_context(self._span, Context())
        for one in spans:
            began_ns = self._offset_ns + one.began_ns
            span = self._tracer.start_span(one.name, within, attributes=one.attributes, start_time=began_ns)
            span.end(self._offset_ns + one.ended_ns)

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends it. Of an error its class alone is told: the text may quote what somebody wrote."""
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


class Seldom(logging.Filter):
    """Lets a line pass, and the same line again only after a while."""

    def __init__(self, silent_seconds: float) -> None:
        super().__init__()
        self._silent_seconds = silent_seconds
        self._last: dict[object, float] = {}  # when each line passed, on the monotonic clock

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it passes; lines are the same that differ in their arguments alone."""
        now, last = time.monotonic(), self._last.get(record.msg)
        if last is not None and now - last < self._silent_seconds:
            return False
        self._last[record.msg] = now
        return True


def clock_offset_ns() -> int:
    """From perf_counter_ns to the time of day.

    The largest of some tries: what comes between the two readings of one makes the second clock late.
    """
    return max(time.time_ns() - time.perf_counter_ns() for _ in range(3))
