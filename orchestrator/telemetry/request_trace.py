"""Traces of requests and rounds: ids and numbers, but no content of prompts or answers."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from bough.protocol.generation import Event, Finished, GenerateOptions, Started, Tokens
from bough.telemetry.call_context import CALLER_TRACEPARENT
from bough.telemetry.logs import LOG_CONTEXT
from bough.telemetry.spans import Attributes
from bough.telemetry.tracing import CURRENT_SPAN, Span, Tracer

logger = logging.getLogger(__name__)

NANO = 1e-9
HASH_LENGTH = 16  # hexadecimal digits of a session's hash in traces


@contextmanager
def request_trace(tracer: Tracer, options: GenerateOptions) -> Iterator[RequestTrace]:
    """Trace a request during the block, in the running task and tasks that it starts.

    The span is a child of the caller's, if the caller sent one.
    """
    with tracer.serve("generate", CALLER_TRACEPARENT.get()) as span:
        CURRENT_SPAN.set(span)
        LOG_CONTEXT.set(
            LOG_CONTEXT.get()._replace(
                request_id=options.request_id, session_id=options.session_id, trace_id=span.trace_id
            )
        )
        if span.is_recorded:
            span.set(request_attributes(options))
        yield RequestTrace(span)


@dataclass(slots=True)
class RequestTrace:
    """Follows the events of a request."""

    span: Span
    _began: float = field(default_factory=time.monotonic)
    _has_tokens: bool = False

    def note(self, event: Event) -> None:
        match event:
            case Started() if self.span.is_recorded:
                self.span.set({"gen_ai.response.model": event.model_name, "bough.tokens.resumed": event.resumed_tokens})
            case Tokens() if not self._has_tokens:
                self._has_tokens = True
                self.span.set({"gen_ai.latency.time_to_first_token": time.monotonic() - self._began})
            case Finished():
                if self.span.is_recorded:
                    self.span.set(finished_attributes(event))
                seconds, usage = time.monotonic() - self._began, event.usage
                logger.debug(
                    "finished: %s, %d prompt tokens, %d tokens in %d rounds, %.3f s",
                    event.finish_reason, usage.prompt_tokens, usage.completion_tokens, event.speculation.num_rounds,
                    seconds,
                )  # fmt: skip


def request_attributes(options: GenerateOptions) -> Attributes:
    attributes: dict[str, str | int | float] = {
        "gen_ai.request.id": options.request_id,
        "gen_ai.request.max_tokens": options.max_tokens,
        "gen_ai.request.temperature": options.temperature,
        "gen_ai.request.top_p": options.top_p,
    }
    if options.model:
        attributes["gen_ai.request.model"] = options.model
    if options.session_id:
        attributes["bough.session"] = hashed(options.session_id)
    if name := LOG_CONTEXT.get().http_request_id:
        attributes["bough.http_request_id"] = name
    return attributes


def finished_attributes(event: Finished) -> Attributes:
    return {
        "gen_ai.response.finish_reasons": (event.finish_reason,),
        "gen_ai.usage.input_tokens": event.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": event.usage.completion_tokens,
        "bough.tokens.cached": event.usage.cached_tokens,
        "bough.rounds": event.speculation.num_rounds,
        "bough.rounds.degraded": event.speculation.num_degraded_rounds,
        "bough.failovers": event.num_failovers,
    }


def round_attributes(tokens: Tokens) -> Attributes:
    timings = tokens.timings
    parts = ("draft", "network", "queue", "wait", "compute")
    return {
        "bough.tree.nodes": tokens.num_nodes,
        "bough.tree.depth": tokens.tree_depth,
        "bough.tree.accepted": sum(tokens.drafted),
        "bough.tree.accepted_lookup": tokens.num_lookup,
        "bough.tokens": len(tokens.token_ids),
        **{f"bough.round.{name}_seconds": getattr(timings, f"{name}_ns") * NANO for name in parts},
        "bough.round.link_efficiency": timings.link_efficiency,
    }


def hashed(session_id: str) -> str:
    """A session's id for traces: equal for equal ids, but not the id, which may name a person."""
    return hashlib.sha256(session_id.encode()).hexdigest()[:HASH_LENGTH]
