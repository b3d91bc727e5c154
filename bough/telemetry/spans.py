"""Spans as the code that is traced sees them. Knows no OpenTelemetry: where traces are off, all of this does nothing.

A `Span` is a stretch of time of one request, with a name, attributes and spans within it. Threads that work for many
requests make none: they note what they did as `FinishedSpan`s, and whoever waits for the answer makes spans of those.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType, TracebackType
from typing import NamedTuple, Protocol

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]
Metadata = tuple[tuple[str, str], ...]  # of a gRPC call

NO_ATTRIBUTES: Attributes = MappingProxyType({})


class FinishedSpan(NamedTuple):
    """What a thread did for a call, told when it is over."""

    name: str
    began_ns: int  # of time.perf_counter_ns
    ended_ns: int
    attributes: Attributes = NO_ATTRIBUTES


def note_span(
    spans: list[FinishedSpan] | None,
    name: str,
    began_ns: int,
    ended_ns: int | None = None,
    attributes: Attributes = NO_ATTRIBUTES,
) -> None:
    """Adds a span, which ends now unless it is said when it did; nothing where nobody asks."""
    if spans is not None:
        spans.append(FinishedSpan(name, began_ns, time.perf_counter_ns() if ended_ns is None else ended_ns, attributes))


class Span(Protocol):
    """A stretch of time of one request; it ends with its `with` block, with the error that the block ends with.

    Attributes are names and numbers, never what somebody wrote: prompts, texts and keys stay out of traces.
    """

    @property
    def is_recorded(self) -> bool:
        """Whether anybody will see it."""
        ...

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits; empty where nothing is recorded."""
        ...

    @property
    def metadata(self) -> Metadata:
        """What a call that is made within it takes along, so that the callee's spans are within it too."""
        ...

    def child(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> Span:
        """A span within this one, from now on."""
        ...

    def call(self, method: str, address: str) -> Span:
        """A span within this one, of a gRPC call that is made now."""
        ...

    def set(self, attributes: Attributes) -> None:
        """More is known of it."""
        ...

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """Something has happened within it now."""
        ...

    def add(self, spans: Sequence[FinishedSpan]) -> None:
        """Spans within it, of what threads have noted."""
        ...

    def __enter__(self) -> Span: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class _NoSpan:
    """Of a request that is not traced."""

    is_recorded, trace_id, metadata = False, "", ()

    def child(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> Span:
        return self

    def call(self, method: str, address: str) -> Span:
        return self

    def set(self, attributes: Attributes) -> None:
        pass

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        pass

    def add(self, spans: Sequence[FinishedSpan]) -> None:
        pass

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


NO_SPAN: Span = _NoSpan()


class Tracer(Protocol):
    """Where requests enter a process."""

    def serve(self, name: str, traceparent: str) -> Span:
        """A span of what this process does for a caller, within the span that `traceparent` (W3C) names.

        Without one, or with one that is malformed, it begins a trace, or is `NO_SPAN` where it is not sampled.
        """
        ...


class _NoTracer:
    def serve(self, name: str, traceparent: str) -> Span:
        return NO_SPAN


NO_TRACER: Tracer = _NoTracer()

_span: ContextVar[Span] = ContextVar("span", default=NO_SPAN)
_finished: ContextVar[list[FinishedSpan] | None] = ContextVar("spans", default=None)


def current_span() -> Span:
    """Of the request that the running task works for."""
    return _span.get()


def set_current_span(span: Span) -> None:
    """For the running task, which works for one request, and those that it starts."""
    _span.set(span)


def noted_spans() -> list[FinishedSpan] | None:
    """Where a thread notes what it does for the call that the running task answers; None where nobody asks."""
    return _finished.get()


def set_noted_spans(spans: list[FinishedSpan] | None) -> None:
    """For the running task, which answers one call."""
    _finished.set(spans)
