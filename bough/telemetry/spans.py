"""Periods of work that threads record for a traced request; the code that waits for them creates spans from these."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import NamedTuple

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]  # ids and numbers, never content: prompts, texts and keys stay out of traces
Metadata = tuple[tuple[str, str], ...]  # of a gRPC call

TRACEPARENT = "traceparent"  # W3C Trace Context, in the metadata of a call
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


# The list in which threads record work for the call that the running task answers; None if it is not traced.
NOTED_SPANS: ContextVar[list[FinishedSpan] | None] = ContextVar("spans", default=None)
