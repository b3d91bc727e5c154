"""One request on its way: its tokens, its text, its end, and what it has come to so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from bough.errors import BoughError
from bough.protocol.generation import (
    Event,
    Finished,
    GenerateOptions,
    Speculation,
    SpeculationMetrics,
    Started,
    Tokens,
    Usage,
    VerifiedTree,
)
from bough.protocol.messages import RoundTimings, VerifyResult, WorkerInfo, weights_differ
from bough.protocol.prefix_hash import TokenHistory
from bough.protocol.sampling_params import SamplingParams, StopConditions
from bough.telemetry.spans import NO_SPAN, Span
from bough.trees.tree import Tree
from orchestrator.sessions.deadline import Deadline
from orchestrator.sessions.detokenizer import TextStream

MAX_WARNINGS = 16
MAX_WARNING_LENGTH = 500  # characters


@dataclass(slots=True)
class Session:
    """State of a request between rounds. Its token ids and sampling parameters are all that it needs to be rebuilt."""

    request_id: str
    session_id: str
    keep: bool  # KV and index entry outlive the request
    tokens: TokenHistory  # prompt and output; the last one is the next root
    prompt_length: int
    sampling: SamplingParams
    stops: StopConditions
    speculation: Speculation
    text: TextStream
    max_context: int
    target_identity: str  # of all targets that it may be at
    model_name: str
    model_identity: str  # of the targets at which its next request may run
    weights_hash: str = ""  # of these targets, once one that it was at has known it
    epoch: int = 0
    has_claim: bool = False  # the index has granted the epoch
    patience: Deadline = field(default_factory=Deadline)
    round: int = 0
    target_held: int = 0  # tokens that the target is believed to hold
    draft_held: int = 0
    draft_id: str = ""  # worker that was asked last
    cache_salt: str = ""  # KV is shared with sessions that have the same one
    born_us: int = 0  # microseconds on the clock of epochs: when the session's first request began
    num_replayed: int = 0  # output tokens from before the request was resumed
    num_failovers: int = 0
    cached_tokens: int | None = None  # prompt tokens that were not computed in the first round
    trace: Span = NO_SPAN  # of the request
    span: Span = NO_SPAN  # of the round that is under way
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
    def num_left(self) -> int:
        """Most tokens that may still come."""
        return min(self.stops.max_tokens - self.num_generated, self.max_context - len(self.tokens))

    @property
    def max_length(self) -> int:
        """Tokens that the request may come to, its prompt included."""
        return min(self.prompt_length + self.stops.max_tokens, self.max_context)

    @property
    def slot_seconds(self) -> float:
        """That it may still wait for a KV slot: once it has had an answer, for as long as its caller does."""
        return inf if self.round else self.patience.queue_seconds

    @property
    def ground(self) -> tuple[str, str]:
        """What the targets have in common that it may be at: identity, and hash of weights."""
        return self.target_identity, self.weights_hash

    def require_weights(self, target: WorkerInfo) -> None:
        """Before it is verified at a target, which may have learnt its hash since the last time.

        Raises:
            BoughError: it began with other weights. What it has said since may be of both; a client that goes on with
                it by itself, as with an `Unavailable`, would not hear of that.
        """
        if weights_differ(self.weights_hash, target.weights_hash):
            raise BoughError(
                f"weights: {target.worker_id} has {target.weights_hash}, and the session began with "
                f"{self.weights_hash}; the last tokens may be of either: ask again from the beginning"
            )
        self.weights_hash = self.weights_hash or target.weights_hash

    @property
    def is_finished(self) -> bool:
        return self.finish_reason != ""

    def warn(self, text: str) -> None:
        """Notes something that changed the speed and not the output; once each.

        The last event carries the warnings, and must stay small enough to be sent: what comes after the first few is
        counted, and what is long is cut off.
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
        """Its KV has, to older sessions: what its target still holds it says when there is room."""
        self.target_held = 0
        self.span.event("preempted", {"bough.worker": target_id})
        self.warn(f"{target_id}: KV memory was full (--kv-memory); this request gave way to older ones for a while")

    def seat_draft(self, draft_id: str) -> None:
        """A draft worker is asked; what another one holds is of no use to it."""
        if draft_id != self.draft_id:
            self.draft_id, self.draft_held = draft_id, 0

    def replay(self, output: Sequence[int], num_seen: int) -> Tokens | None:
        """Takes over what was generated before a stream broke; what of it was not seen is to be sent, None for nothing.

        Texts come out as they did the first time: what is held back depends on the tokens alone. Tokens after the end
        of the output are left out.
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
        """Takes over a verdict: as much of it as comes before the end of the output.

        What of the accepted path the draft worker had `drafted` too is its own; the rest was looked up.
        """
        accepted = [int(tree.tokens[node]) for node in result.verdict.accepted_nodes]
        verified = verified_part(tree, result)
        num_verified = len(verified.tree)
        self._count(num_verified - 1, len(accepted), timings)
        committed: list[int] = []
        texts: list[str] = []
        for token in [*accepted, result.verdict.bonus_token]:
            committed.append(token)
            texts.append(self._append(token))
            if self.is_finished:
                break
        num_lookup = max(0, min(len(accepted), len(committed)) - len(drafted.along(accepted)))
        self.num_lookup_tokens += num_lookup
        self.target_held = min(result.held_length, len(self.tokens) - 1)
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
        )

    def _count(self, num_drafted: int, num_accepted: int, timings: RoundTimings) -> None:
        self.timings += timings
        self.num_draft_tokens += num_drafted
        self.accepted_counts[num_accepted] += 1

    def _append(self, token: int) -> str:
        """Commits one token; returns its text, and notes the end where this is it."""
        self.tokens.append(token)
        if token in self.sampling.stop_token_ids:
            self.finish_reason, self.stop_reason, self.stop_token_id = "stop", str(token), token
            return ""
        piece = self.text.push(token)
        if piece.stop is not None:
            self.finish_reason, self.stop_reason = "stop", piece.stop
        elif self.num_left <= 0:
            self.finish_reason = "length"
        return piece.text

    def _all_warnings(self) -> list[str]:
        if not self.num_more_warnings:
            return self.warnings
        return [*self.warnings, f"{self.num_more_warnings} more warnings came after these {len(self.warnings)}"]

    def finished(self) -> Finished:
        """The last event."""
        num_rounds = sum(self.accepted_counts.values())
        num_accepted = sum(count * rounds for count, rounds in self.accepted_counts.items())
        histogram = tuple(self.accepted_counts[k] for k in range(max(self.accepted_counts, default=-1) + 1))
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
            tuple(self._all_warnings()),
            self.num_failovers,
            self.stop_token_id,
        )


def never_begun(options: GenerateOptions) -> tuple[Event, ...]:
    """The events of a request that was aborted before anything was known of it."""
    num_seen = options.resume.num_tokens if options.resume else 0
    return (
        Started(options.request_id, 0, options.seed or 0, "", num_seen),
        Finished("abort", "", "", Usage(0, num_seen, 0), SpeculationMetrics(0, 0, 0, 0.0, (), 0), RoundTimings(), ()),
    )


def verified_part(tree: Tree, result: VerifyResult) -> VerifiedTree:
    """What of a tree the target has looked at, and which of its nodes it accepted."""
    if not result.left_out_nodes:
        return VerifiedTree(tree, result.verdict.accepted_nodes)
    kept = np.setdiff1d(np.arange(len(tree)), result.left_out_nodes)
    return VerifiedTree(tree.only(kept), np.searchsorted(kept, result.verdict.accepted_nodes).tolist())
