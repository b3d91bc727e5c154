"""Metadata of gRPC calls that joins a request's parts: one trace, and the same ids in all logs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import grpc

from bough.telemetry.logs import LOG_CONTEXT, LogContext
from bough.telemetry.spans import NOTED_SPANS, TRACEPARENT, FinishedSpan, Metadata

if TYPE_CHECKING:
    from bough.telemetry.tracing import Span, Tracer  # which clients need not import

REQUEST_ID = "x-request-id"
MAX_NAME_LENGTH = 2048  # limit of a percent-encoded name

# The trace context of the call or HTTP request that the running task answers; empty if the caller sent none.
CALLER_TRACEPARENT: ContextVar[str] = ContextVar("traceparent", default="")


def set_caller_traceparent(values: list[str]) -> None:
    """Set it from all values that a caller has sent; it is ignored unless there is exactly one."""
    CALLER_TRACEPARENT.set(values[0] if len(values) == 1 else "")


def carried(span: Span) -> Metadata:
    """Metadata of a call for the running task's request, within `span`."""
    name = LOG_CONTEXT.get().request_id
    names = ((REQUEST_ID, quote(name)),) if name else ()
    return (*names, *span.metadata)


class CallContextInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor that sets the log context and trace context of each call, in the context of the answering task."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """Never refuses a call: invalid metadata is ignored."""
        parents, names = [], []
        for name, value in handler_call_details.invocation_metadata or ():
            if name == TRACEPARENT:
                parents.append(str(value))
            elif name == REQUEST_ID:
                names.append(str(value)[:MAX_NAME_LENGTH])
        set_caller_traceparent(parents)
        LOG_CONTEXT.set(LogContext(request_id=unquote(names[0]) if names else ""))
        return await continuation(handler_call_details)


@contextmanager
def serving_call(tracer: Tracer, method: str) -> Iterator[Span]:
    """The span of the call that the running task answers; periods that threads record become child spans."""
    with tracer.serve(method, CALLER_TRACEPARENT.get()) as span:
        spans: list[FinishedSpan] | None = [] if span.is_recorded else None
        NOTED_SPANS.set(spans)
        LOG_CONTEXT.set(LOG_CONTEXT.get()._replace(trace_id=span.trace_id))
        try:
            yield span
        finally:
            span.add(spans or ())
