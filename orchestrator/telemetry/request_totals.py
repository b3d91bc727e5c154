"""Totals over all requests since the start: waiting times, latencies and endings."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from bough.protocol.generation import Event, Finished, Started, Tokens
from orchestrator.sessions.session import Session
from orchestrator.sizing.totals import Histogram

# Bounds in seconds: vLLM's where these are fine enough, and longer ones, as sweeps of streamed weights take seconds.
WAIT_BOUNDS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0)
LEFT = (GeneratorExit, asyncio.CancelledError)  # raised in a request whose caller has gone
KEY_LIMIT = "KeyLimit"  # what a key allows is used up: of no concern to others, as Exhausted is


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
    """Measures one request as seen by its API, and adds it to `totals`."""

    totals: RequestTotals
    clock: Callable[[], float] = time.monotonic
    _began: float = 0.0
    _started: float = 0.0
    _first: float = 0.0  # time of the first tokens; 0 before
    _last: float = 0.0
    _num_later: int = 0  # tokens after the first round
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
            case Tokens(num_nodes=num_nodes) if num_nodes > 0:
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


@dataclass(slots=True)
class TroubleCount:
    """Adds a session's failovers and degraded rounds to the totals while it runs, not only if it comes to its end."""

    totals: RequestTotals
    session: Session
    _counted: tuple[int, int] = 0, 0  # those that have been added

    def count(self) -> None:
        """Add those that have come since the last call."""
        now = num_failovers, num_degraded_rounds = self.session.num_failovers, self.session.num_degraded_rounds
        self.totals.num_failovers += num_failovers - self._counted[0]
        self.totals.num_degraded_rounds += num_degraded_rounds - self._counted[1]
        self._counted = now
