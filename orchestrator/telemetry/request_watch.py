"""Counts requests since the start and traces them: with ids and numbers, without content."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from bough.protocol.generation import Event, Finished, GenerateOptions, Started, Tokens
from bough.protocol.ids import ScopedId
from bough.telemetry.call_context import CALLER_TRACEPARENT
from bough.telemetry.logs import LOG_CONTEXT
from bough.telemetry.spans import Attributes
from bough.telemetry.tracing import CURRENT_SPAN, Span, Tracer
from orchestrator.sessions.session import Session
from orchestrator.sizing.totals import Histogram

logger = logging.getLogger(__name__)

NANO = 1e-9
HASH_LENGTH = 16  # hexadecimal digits of a session's hash in traces
# Bounds in seconds: vLLM's if they are fine enough, and longer ones, as sweeps of streamed weights take seconds.
WAIT_BOUNDS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0)
LEFT = (GeneratorExit, asyncio.CancelledError)  # raised in a request whose caller has gone
KEY_LIMIT = "KeyLimit"  # a key's limit is reached: unlike Exhausted, it does not concern other callers


@dataclass(slots=True)
class RequestTotals:
    """Totals of all requests; times are in seconds."""

    finished: Counter[str] = field(default_factory=Counter)  # by finish reason
    failed: Counter[str] = field(default_factory=Counter)  # by the error's class name, or KEY_LIMIT; refused ones too
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens whose KV was cached
    num_failovers: int = 0
    num_degraded_rounds: int = 0
    queue: Histogram = field(default_factory=lambda: Histogram(WAIT_BOUNDS))
    prefill: Histogram = field(default_factory=lambda: Histogram(WAIT_BOUNDS))  # after the queue, to the first tokens
    decode: Histogram = field(default_factory=lambda: Histogram(WAIT_BOUNDS))  # from the first tokens to the last
    first_token: Histogram = field(default_factory=lambda: Histogram(WAIT_BOUNDS))
    whole: Histogram = field(default_factory=lambda: Histogram(WAIT_BOUNDS))
    between: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS))  # between rounds of a request
    per_token: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS))  # after the first round of a request


@dataclass(slots=True)
class RequestWatch:
    """Measures one request as seen by its API, adds it to `totals`, and notes it in its span."""

    totals: RequestTotals
    clock: Callable[[], float] = time.monotonic
    span: Span = field(default_factory=CURRENT_SPAN.get)
    _began: float = 0.0
    _started: float = 0.0
    _first: float = 0.0  # time of the first tokens; 0 before
    _last: float = 0.0
    _num_later: int = 0  # tokens after the first round
    _has_tokens: bool = False  # perhaps from an earlier call of the same request
    _has_ended: bool = False

    def __post_init__(self) -> None:
        self._began = self.clock()

    def note(self, event: Event) -> None:
        now = self.clock()
        match event:
            case Started():
                self.totals.prompt_tokens += event.prompt_tokens
                self.totals.queue.add(now - self._began)
                self._started = now
                if self.span.is_recorded:
                    model = {"gen_ai.response.model": event.model_name}
                    self.span.set({**model, "bough.tokens.resumed": event.resumed_tokens})
            case Tokens():
                if not self._has_tokens:
                    self._has_tokens = True
                    self.span.set({"gen_ai.latency.time_to_first_token": now - self._began})
                if event.num_nodes > 0:
                    self._note_round(now, len(event.token_ids))
            case Finished():
                self._note_end(now, event)

    def failed(self, error: BaseException) -> None:
        """Count an error that ended the request, or that its caller has left before its end."""
        if not isinstance(error, LEFT):
            self.totals.failed[type(error).__name__] += 1
        elif not self._has_ended:
            self.totals.finished["abort"] += 1

    def _note_round(self, now: float, num_tokens: int) -> None:
        if not self._first:
            self._first = now
            self.totals.first_token.add(now - self._began)
            self.totals.prefill.add(now - self._started)
        else:
            self._num_later += num_tokens
            self.totals.between.add(now - self._last)
        self._last = now

    def _note_end(self, now: float, event: Finished) -> None:
        self._has_ended = True
        self.totals.finished[event.finish_reason] += 1
        self.totals.cached_tokens += event.usage.cached_tokens
        self.totals.whole.add(now - self._began)
        if self._first:
            self.totals.decode.add(self._last - self._first)
        if self._num_later:
            self.totals.per_token.add((self._last - self._first) / self._num_later)
        if self.span.is_recorded:
            self.span.set(finished_attributes(event))
        usage = event.usage
        logger.debug(
            "finished: %s, %d prompt tokens, %d tokens in %d rounds, %.3f s",
            event.finish_reason, usage.prompt_tokens, usage.completion_tokens, event.speculation.num_rounds,
            now - self._began,
        )  # fmt: skip


@dataclass(slots=True)
class TroubleCount:
    """Adds a session's failovers and degraded rounds to the totals while it runs, even if it never finishes."""

    totals: RequestTotals
    session: Session
    _counted: tuple[int, int] = 0, 0  # those that have been added

    def count(self) -> None:
        """Add those since the last call."""
        now = num_failovers, num_degraded_rounds = self.session.num_failovers, self.session.num_degraded_rounds
        self.totals.num_failovers += num_failovers - self._counted[0]
        self.totals.num_degraded_rounds += num_degraded_rounds - self._counted[1]
        self._counted = now


@contextmanager
def request_trace(
    tracer: Tracer, options: GenerateOptions, request_id: ScopedId, session_id: ScopedId
) -> Iterator[None]:
    """Trace a request during the block, in the running task and tasks that it starts.

    The span is a child of the caller's, if the caller sent one.
    """
    with tracer.serve("generate", CALLER_TRACEPARENT.get()) as span:
        CURRENT_SPAN.set(span)
        LOG_CONTEXT.set(
            LOG_CONTEXT.get()._replace(
                request_id=str(request_id), session_id=str(session_id) if session_id else "", trace_id=span.trace_id
            )
        )
        if span.is_recorded:
            span.set(request_attributes(options, request_id, session_id))
        yield


def request_attributes(options: GenerateOptions, request_id: ScopedId, session_id: ScopedId) -> Attributes:
    attributes: dict[str, str | int | float] = {
        "gen_ai.request.id": str(request_id),
        "gen_ai.request.max_tokens": options.max_tokens,
        "gen_ai.request.temperature": options.temperature,
        "gen_ai.request.top_p": options.top_p,
    }
    if options.model:
        attributes["gen_ai.request.model"] = options.model
    if session_id:
        attributes["bough.session"] = hashed(session_id)
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


def hashed(session_id: ScopedId) -> str:
    """A session's id for traces: equal for equal ids, but not the id, which may name a person."""
    return hashlib.sha256(str(session_id).encode()).hexdigest()[:HASH_LENGTH]
