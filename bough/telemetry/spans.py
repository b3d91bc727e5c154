"""Tracing interface for all code, without OpenTelemetry; a no-op if tracing is off.

A `Span` is a period of one request, with a name, attributes and child spans. Threads that work for many requests create
none: they record `FinishedSpan`s, from which the code that waits for the answer creates spans.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType, TracebackType
from typing import NamedTuple

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]
Metadata = tuple[tuple[str, str], ...]  # of a gRPC call

NO_ATTRIBUTES: Attributes = MappingProxyType({})


class FinishedSpan(NamedTuple):
    """Work of a thread for a call, recorded when it is over."""

    name: str
    began_ns: int  # from time.perf_counter_ns
    ended_ns: int
    attributes: Attributes = NO_ATTRIBUTES


def note_span(
    spans: list[FinishedSpan] | None,
    name: str,
    began_ns: int,
    ended_ns: int | None = None,
    attributes: Attributes = NO_ATTRIBUTES,
) -> None:
    """Record a span that ends at `ended_ns`, by default now; does nothing if `spans` is None."""
    if spans is not None:
        spans.append(FinishedSpan(name, began_ns, time.perf_counter_ns() if ended_ns is None else ended_ns, attributes))


class Span:
    """A period of one request, which ends with its `with` block and the block's error. This one is not traced.

    Attributes are ids and numbers, never content: prompts, texts and keys stay out of traces.
    """

    is_recorded = False  # whether the span is exported

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits; empty if not recorded."""
        return ""

    @property
    def metadata(self) -> Metadata:
        """Metadata for calls within the span, so that the callee's spans become its children."""
        return ()

    def child(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> Span:
        """A child span that begins now."""
        return self

    def call(self, method: str, address: str) -> Span:
        """A child span for a gRPC call that begins now."""
        return self

    def set(self, attributes: Attributes) -> None:
        """Set attributes."""

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """Record an event within the span."""

    def add(self, spans: Sequence[FinishedSpan]) -> None:
        """Add child spans recorded by threads."""

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the span."""


class Tracer:
    """Creates the spans of requests that enter a process. This one traces nothing."""

    def serve(self, name: str, traceparent: str) -> Span:
        """A span for work of this process, within the caller's span that `traceparent` (W3C) names.

        Without a valid one it begins a new trace, or is `NO_SPAN` if not sampled.
        """
        return NO_SPAN


NO_SPAN = Span()
NO_TRACER = Tracer()

CURRENT_SPAN: ContextVar[Span] = ContextVar("span", default=NO_SPAN)  # of the request that the running task works for
# The list in which threads record work for the call that the running task answers; None if it is not traced.
NOTED_SPANS: ContextVar[list[FinishedSpan] | None] = ContextVar("spans", default=None)
