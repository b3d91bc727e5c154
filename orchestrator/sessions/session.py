"""A running request: its tokens, text, end and statistics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf

import numpy as np

from bough.errors import BoughError
from bough.protocol.decision import RoundTimings
from bough.protocol.generation import (
    Event,
    Finished,
    GenerateOptions,
    Reasoning,
    Speculation,
    SpeculationMetrics,
    Started,
    Tokens,
    Usage,
    VerifiedTree,
    WorkerInfo,
    weights_differ,
)
from bough.protocol.ids import ScopedId
from bough.protocol.messages import VerifyResult
from bough.protocol.prefix_hash import TokenHistory
from bough.protocol.sampling_params import UNLIMITED, SamplingParams, StopConditions
from bough.registry.records import SessionRecord
from bough.telemetry.tracing import NO_SPAN, Span
from bough.trees.tree import Tree
from orchestrator.sessions.detokenizer import TextStream

LATE_SECONDS = 1.0  # a worker's call outlasts the request by this: the request times out, not the worker


@dataclass(slots=True)
class Deadline:
    """Deadline of one request, and one budget for all its waits: for a place, a target and KV slots."""

    deadline: float = inf  # seconds on the monotonic clock
    queue_seconds: float = inf  # left for waiting

    @classmethod
    def of(cls, timeout_seconds: float | None, queue_seconds: float) -> Deadline:
        """Start a deadline now; without a timeout there is none."""
        return cls(inf if timeout_seconds is None else time.monotonic() + timeout_seconds, queue_seconds)

    def within(self, timeout_seconds: float) -> float:
        """Time limit of a worker's call: its own, or the rest of the request's if that is shorter."""
        return max(0.0, min(timeout_seconds, self.deadline + LATE_SECONDS - time.monotonic()))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Deduct the time that the block takes from the budget for waiting."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.queue_seconds = max(0.0, self.queue_seconds - (time.monotonic() - began))


MAX_WARNINGS = 16
MAX_WARNING_LENGTH = 500  # characters


@dataclass(slots=True)
class Session:
    """State of a request between rounds. Its token ids and sampling parameters suffice to rebuild everything."""

    request_id: ScopedId
    session_id: ScopedId
    keep: bool  # KV and index entry outlive the request
    tokens: TokenHistory  # prompt and output; the last one is the next root
    prompt_length: int
    sampling: SamplingParams
    stops: StopConditions
    speculation: Speculation
    text: TextStream
    max_context: int
    target_identity: str  # of the targets that it may run at
    model_name: str
    model_identity: str  # of the targets that the session's next request may run at
    weights_hash: str = ""  # of these targets; empty until one of them has reported it
    epoch: int = 0
    before: SessionRecord | None = None  # the session before this request
    has_claim: bool = False  # whether the index has granted the epoch
    deadline: Deadline = field(default_factory=Deadline)
    round: int = 0
    target_cached: int = 0  # leading tokens that it probably caches from other sessions, before its first answer
    draft_held: int = 0
    draft_id: str = ""  # worker asked last
    prompt_logprobs: int | None = None  # alternatives to report for each token of the prompt, before any round
    reasoning: Reasoning | None = None  # how the output marks reasoning; None if it is not parsed
    cache_salt: str = ""  # KV is shared only with sessions of the same salt
    born_us: int = 0  # when the session's first request began, as an epoch
    num_replayed: int = 0  # output tokens from before the request was resumed
    num_failovers: int = 0
    cached_tokens: int | None = None  # prompt tokens not computed in the first round
    trace: Span = NO_SPAN  # of the request
    span: Span = NO_SPAN  # of the current round
    finish_reason: str = ""
    stop_reason: str = ""
    stop_token_id: int | None = None
    timings: RoundTimings = field(default_factory=RoundTimings)
    num_draft_tokens: int = 0
    num_degraded_rounds: int = 0
    num_lookup_tokens: int = 0
    accepted_counts: Counter[int] = field(default_factory=Counter)  # accepted tokens of a round -> rounds
    warnings: list[str] = field(default_factory=list)  # the first few
    num_more_warnings: int = 0

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def num_remaining(self) -> int:
        """Limit of tokens still to be generated."""
        return min(self.stops.max_tokens - self.num_generated, self.max_context - len(self.tokens))

    @property
    def max_length(self) -> int:
        """Limit of tokens of the request, including its prompt."""
        return min(self.prompt_length + self.stops.max_tokens, self.max_context)

    @property
    def slot_seconds(self) -> float:
        """Seconds that it may still wait for a KV slot; unlimited (but for the deadline) after its first answer."""
        return inf if self.round else self.deadline.queue_seconds

    @property
    def required_target(self) -> tuple[str, str]:
        """Identity and weights hash of the targets that it may run at."""
        return self.target_identity, self.weights_hash

    def require_weights(self, target: WorkerInfo) -> None:
        """Check a target's weights before verifying there; their hash may have become known since the last check.

        Raises BoughError for other weights than the session's, as its tokens may come from both. Unavailable would be
        wrong: clients retry it silently.
        """
        if weights_differ(self.weights_hash, target.weights_hash):
            raise BoughError(
                f"weights: must be {self.weights_hash}, with which the session began, got {target.weights_hash} of "
                f"{target.worker_id}; the last tokens may come from either: send the request again"
            )
        self.weights_hash = self.weights_hash or target.weights_hash

    @property
    def is_finished(self) -> bool:
        return self.finish_reason != ""

    def warn(self, text: str) -> None:
        """Add a warning about something that affects speed but not output; each text once.

        The last event carries the warnings and must stay small: long ones are cut, and after some only counted.
        """
        if len(text) > MAX_WARNING_LENGTH:
            text = f"{text[:MAX_WARNING_LENGTH]}... ({len(text)} characters)"
        if text in self.warnings:
            return
        if len(self.warnings) < MAX_WARNINGS:
            self.warnings.append(text)
        else:
            self.num_more_warnings += 1

    def gave_way(self, target_id: str) -> None:
        """Note that the session was preempted."""
        self.span.event("preempted", {"bough.worker": target_id})
        self.warn(f"{target_id}: KV memory was full (--kv-memory); this request gave way to older ones for a while")

    def assign_draft(self, draft_id: str) -> None:
        """Note the draft worker that is asked; another one's KV is useless to it."""
        if draft_id != self.draft_id:
            self.draft_id, self.draft_held = draft_id, 0

    def replay(self, output: Sequence[int], num_seen: int) -> Tokens | None:
        """Take over output generated before a stream broke; returns the part that the client has not seen, if any.

        Texts are as they were the first time, as they depend on the tokens alone. Tokens after the end are dropped.
        """
        texts = []
        for token in output:
            if self.is_finished:
                break
            texts.append(self._append(token))
        self.num_replayed = len(texts)
        unseen = tuple(output[num_seen : self.num_replayed])
        if not unseen:
            return None
        return Tokens(unseen, (False,) * len(unseen), tuple(texts[num_seen:]), (), 0, 0, RoundTimings())

    def commit(self, tree: Tree, drafted: Tree, result: VerifyResult, timings: RoundTimings) -> Tokens:
        """Apply a verdict, up to the end of the output.

        Accepted tokens that are also in `drafted` count as the draft's; others as looked up.
        """
        accepted = [int(tree.tokens[node]) for node in result.verdict.accepted_nodes]
        part, accepted_nodes = verified_part(tree, result)
        verified, num_verified = VerifiedTree(part, accepted_nodes), len(part)
        self.timings += timings
        self.num_draft_tokens += num_verified - 1
        self.accepted_counts[len(accepted)] += 1
        committed: list[int] = []
        texts: list[str] = []
        begins: list[int] = []
        for token in [*accepted, result.verdict.bonus_token]:
            committed.append(token)
            begins.append(self.text.length)
            texts.append(self._append(token))
            if self.is_finished:
                break
        num_lookup = max(0, min(len(accepted), len(committed)) - len(drafted.along(accepted)))
        self.num_lookup_tokens += num_lookup
        if self.cached_tokens is None:
            self.cached_tokens = min(result.cached_length, self.prompt_length)
        self.round += 1
        return Tokens(
            tuple(committed),
            tuple(index < len(accepted) for index in range(len(committed))),
            tuple(texts),
            result.verdict.logprobs[: len(committed)],
            num_verified,
            int(tree.depths().max()),
            timings,
            num_lookup,
            verified,
            tuple(begins),
        )

    def _append(self, token: int) -> str:
        """Commit one token; returns its text, and sets the reason if it ends the output."""
        self.tokens.append(token)
        if token in self.sampling.stop_token_ids and self.num_generated > self.sampling.min_tokens:
            self.finish_reason, self.stop_reason, self.stop_token_id = "stop", str(token), token
            return self.text.push(token).text if self.stops.include_stop else ""
        piece = self.text.push(token)
        if piece.stop is not None:
            self.finish_reason, self.stop_reason = "stop", piece.stop
        elif self.num_remaining <= 0:
            self.finish_reason = "length"
            if self.num_generated < self.stops.max_tokens < UNLIMITED:
                self.warn(
                    f"max_tokens: at most {self.num_generated} fit the model's maximum context length of "
                    f"{self.max_context} tokens after the prompt, got {self.stops.max_tokens}"
                )
        return piece.text

    def started(self, num_seen: int) -> Started:
        """The first event, for a client that has seen so many tokens of the output."""
        return Started(
            self.request_id.name, self.prompt_length, self.sampling.seed, self.model_name, num_seen, self.reasoning
        )

    def finished(self) -> Finished:
        """The last event."""
        num_rounds = sum(self.accepted_counts.values())
        num_accepted = sum(count * rounds for count, rounds in self.accepted_counts.items())
        histogram = tuple(self.accepted_counts[k] for k in range(max(self.accepted_counts, default=-1) + 1))
        more = f"{self.num_more_warnings} more warnings came after these {len(self.warnings)}"
        return Finished(
            self.finish_reason,
            self.stop_reason,
            self.text.finish(),
            Usage(self.prompt_length, self.num_generated, self.cached_tokens or 0),
            SpeculationMetrics(
                num_rounds,
                self.num_draft_tokens,
                num_accepted,
                (self.num_generated - self.num_replayed) / num_rounds if num_rounds else 0.0,
                histogram,
                self.num_degraded_rounds,
                self.num_lookup_tokens,
            ),
            self.timings,
            (*self.warnings, *([more] if self.num_more_warnings else [])),
            self.num_failovers,
            self.stop_token_id,
        )


def never_begun(options: GenerateOptions) -> tuple[Event, ...]:
    """The events of a request that was aborted before it was opened."""
    num_seen = options.resume.num_tokens if options.resume else 0
    return (
        Started(options.request_id, 0, options.seed or 0, "", num_seen),
        Finished("abort", "", "", Usage(0, num_seen, 0), SpeculationMetrics(0, 0, 0, 0.0, (), 0), RoundTimings(), ()),
    )


def verified_part(tree: Tree, result: VerifyResult) -> tuple[Tree, Sequence[int]]:
    """The part of the tree that the target verified, and its accepted nodes."""
    if not result.left_out_nodes:
        return tree, result.verdict.accepted_nodes
    kept = np.setdiff1d(np.arange(len(tree)), result.left_out_nodes)
    return tree.only(kept), np.searchsorted(kept, result.verdict.accepted_nodes).tolist()
