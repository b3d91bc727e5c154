"""An OpenTelemetry collector in the test process: receives spans over OTLP and keeps them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from tests.fakes.waiting import until


@dataclass(frozen=True, slots=True)
class Seen:
    """A span as it was exported, with its resource."""

    name: str
    service: str
    resource: dict[str, Any]
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    is_error: bool


@dataclass
class Collector(TraceServiceServicer):
    """Receives exported spans and keeps them in `spans`."""

    endpoint: str = ""
    spans: list[Seen] = field(default_factory=list)
    raw: bytes = b""  # all export requests, serialized and concatenated

    async def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:
        """Add the spans of an export request."""
        self.raw += request.SerializeToString()
        for group in request.resource_spans:
            resource = values(group.resource.attributes)
            for scope in group.scope_spans:
                self.spans += [seen(span, resource) for span in scope.spans]
        return ExportTraceServiceResponse()

    def named(self, name: str, trace_id: str) -> list[Seen]:
        """Spans with this name in a trace, in order of their begin."""
        return sorted(
            (s for s in self.spans if (s.name, s.trace_id) == (name, trace_id)), key=lambda span: span.began_ns
        )

    async def trace_of(self, request_id: str) -> list[Seen]:
        """All spans of a request, once every call in its trace has a server span. Raises TimeoutError."""

        def is_whole() -> bool:
            spans = self._of(request_id)
            calls = {span.span_id for span in spans if span.kind == CLIENT and not span.is_error}
            return bool(spans) and calls <= {span.parent_id for span in spans if span.kind == SERVER}

        await until(is_whole)
        return self._of(request_id)

    def _of(self, request_id: str) -> list[Seen]:
        roots = [s for s in self.spans if s.attributes.get("gen_ai.request.id") == request_id]
        return [span for span in self.spans if span.trace_id == roots[0].trace_id] if roots else []


SERVER, CLIENT = 2, 3  # of opentelemetry.proto.trace.v1.Span.SpanKind
ERROR = 2  # of Status.StatusCode


def seen(span: Any, resource: dict[str, Any]) -> Seen:
    """Read a protobuf span."""
    return Seen(
        span.name,
        resource["service.name"],
        resource,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        values(span.attributes),
        [(event.name, values(event.attributes)) for event in span.events],
        span.status.code == ERROR,
    )


def values(attributes: Any) -> dict[str, Any]:
    """Attributes as Python values."""
    return {pair.key: value(pair.value) for pair in attributes if isinstance(pair, KeyValue)}


def value(message: AnyValue) -> Any:
    """An attribute's value as a Python value."""
    kind = message.WhichOneof("value")
    if kind == "array_value":
        return [value(each) for each in message.array_value.values]
    return getattr(message, str(kind))


@asynccontextmanager
async def collecting(port: int = 0) -> AsyncIterator[Collector]:
    """A collector that listens on a free port for as long as the block runs."""
    server, collector = grpc.aio.server(), Collector()
    add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(None)
