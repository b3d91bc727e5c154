"""What the services say to one another, as plain values. `bough.protocol.codec` turns them into protobuf and back."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from bough.protocol.cost_curve import CostCurve
from bough.protocol.prefix_hash import prefix_hash
from bough.protocol.sampling_params import PositionLogprobs, SamplingParams
from bough.trees.tree import Tree
from bough.trees.tree_plan import Scheme, TreePlan

PROTOCOL_VERSION = 1


@dataclass(frozen=True, slots=True)
class Context:
    """The part of a session that a worker is asked to stand on: what it holds already, and the tokens after that."""

    session_id: str
    context_start: int  # leading tokens believed to be held
    prefix_hash: int  # of those
    tokens: tuple[int, ...]  # from context_start up to, but excluding, the root
    prompt_length: int
    cache_salt: str = ""  # what is held serves only sessions with the same one to begin from

    @classmethod
    def of(cls, session_id: str, tokens: Sequence[int], held: int, prompt_length: int, cache_salt: str = "") -> Context:
        """For a session with these committed tokens, the last of which is the root, at a worker that holds `held`."""
        held = min(held, len(tokens) - 1)
        return cls(session_id, held, prefix_hash(tokens[:held]), tuple(tokens[held:-1]), prompt_length, cache_salt)

    @property
    def base_length(self) -> int:
        """Tokens before the root, which is the root's absolute position."""
        return self.context_start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Timings:
    """Nanoseconds of one call on the worker's clock."""

    total_ns: int = 0
    queue_ns: int = 0  # waiting for the sweep or draft step to begin
    wait_ns: int = 0  # waiting for weights
    compute_ns: int = 0
    link_ns: int = 0  # the link was at work
    link_bytes: int = 0
    num_passes: int = 0  # sweeps or draft steps
    link_ideal_ns: int = 0  # link_bytes at the best speed that the link has shown


@dataclass(frozen=True, slots=True)
class GrowCall:
    """Asks the draft worker for a tree."""

    context: Context
    root_token: int
    sampling: SamplingParams
    round: int  # the root's position: sampled trees of different rounds share no random numbers
    plan: TreePlan
    vocab_size: int = 0  # ids below it can be the target's tokens; 0 for as many as the draft's model has
    epoch: int = 0  # of the session; 0 does not say


@dataclass(frozen=True, slots=True)
class GrowResult:
    """A tree, and how many tokens of the session the draft worker now holds."""

    tree: Tree
    held_length: int
    timings: Timings
    num_warm_nodes: int = 0  # nodes expanded for it that the draft model had been run on before the call
    cost: CostCurve | None = None  # seconds of a draft step by the rows of all sessions in it


@dataclass(frozen=True, slots=True)
class VerifyCall:
    """Asks the target worker for its verdict on a tree."""

    context: Context
    epoch: int
    round: int
    tree: Tree
    sampling: SamplingParams
    scheme: Scheme = Scheme.TARGET
    max_length: int = 0  # tokens that the session may grow to in this request; 0 is as many as a session may have
    caller: str = ""  # one word for all calls of an orchestrator to this worker
    num_running: int = 0  # sessions that the caller runs at this worker, this one included; 0 does not say
    worker_id: str = ""  # of the worker that is meant: another may have come to its address; "" is whoever is there
    may_leave_out: bool = False  # nodes that are not worth their time in a sweep that others share
    reserves: bool = False  # a slot is to be had before the answer says what of the context is missing


class Verdict(NamedTuple):
    """What one tree came to."""

    accepted_nodes: tuple[int, ...]  # from below the root downwards
    bonus_token: int
    logprobs: tuple[PositionLogprobs, ...] = ()  # accepted nodes, then the bonus token

    def tokens_of(self, tree: Tree) -> list[int]:
        """What the target chose below the root: tokens of the accepted nodes, then the bonus token."""
        return [*(int(tree.tokens[node]) for node in self.accepted_nodes), self.bonus_token]


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """A verdict, and how many tokens of the session the target now holds."""

    verdict: Verdict
    held_length: int
    timings: Timings
    cached_length: int = 0  # leading tokens before the root that were held, or copied, and not computed
    left_out_nodes: tuple[int, ...] = ()  # that were not verified: of them and of what is below them nothing is known
    cost: CostCurve | None = None  # seconds of a sweep by the rows of all sessions in it
    num_rows: int = 0  # of the sweep that verified the tree
    num_trees: int = 0  # in it


@dataclass(frozen=True, slots=True)
class RoundTimings:
    """Nanoseconds of one round, by what they were spent on."""

    total_ns: int = 0
    draft_ns: int = 0
    network_ns: int = 0  # calls took this much longer than the workers' own totals
    target_ns: int = 0
    queue_ns: int = 0  # of target_ns
    wait_ns: int = 0  # of target_ns
    compute_ns: int = 0  # of target_ns
    link_ns: int = 0
    link_bytes: int = 0
    link_ideal_ns: int = 0  # these bytes at the best speed that the link has shown

    @property
    def link_efficiency(self) -> float:
        """Ideal over actual time: 1 where nothing but the link is waited for, 0 where nothing crosses it."""
        return self.link_ideal_ns / self.total_ns if self.total_ns else 0.0

    def __add__(self, other: RoundTimings) -> RoundTimings:
        return RoundTimings(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker serves, and within which limits."""

    kind: str  # "draft" or "target"
    worker_id: str
    model_name: str
    model_description: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    max_context: int  # tokens of a session, the root included
    max_nodes: int
    max_sessions: int  # of the longest context; of shorter ones more fit
    num_sessions: int = 0
    kv_bytes: int = 0  # for the sessions' keys and values
    kv_used_bytes: int = 0  # of these, what cannot be taken from a session now
    num_waiting: int = 0  # calls that wait for a sweep or a draft step
    link_bytes_per_pass: int = 0
    notes: tuple[str, ...] = ()
    protocol_version: int = PROTOCOL_VERSION
    bough_version: str = ""
    arithmetic: str = ""  # of a target: what else its results depend on to the bit
    cost: CostCurve | None = None  # seconds of a sweep, or of a draft step, by its rows
    num_running: int = 0  # calls that have a part in the sweep that is under way; a draft counts all as waiting
    num_passes: int = 0  # sweeps or draft steps that have ended since the start
    weights_hash: str = ""  # of a target: over all bytes of its weights; empty until it is known

    @property
    def model_identity(self) -> str:
        """Equal for targets of one model: a session may go on at any of them, if not with tokens equal to the bit."""
        return _digest(self.model_fingerprint, self.model_description, self.tokenizer_fingerprint)

    def contradiction(self, other: WorkerInfo) -> str:
        """What keeps sessions from moving between two targets that pass for one model; empty for all others."""
        if {self.kind, other.kind} != {"target"} or self.model_identity != other.model_identity:
            return ""
        if not weights_differ(self.weights_hash, other.weights_hash):
            return ""
        first, second = sorted((self, other), key=lambda info: info.worker_id)
        return (
            f"{first.worker_id} and {second.worker_id} pass for one model and have different weights: "
            f"{first.weights_hash} and {second.weights_hash}"
        )

    @property
    def identity(self) -> str:
        """Equal for targets that give equal tokens, to the bit; short enough to be recorded."""
        return _digest(self.model_fingerprint, self.model_description, self.tokenizer_fingerprint, self.arithmetic)


def weights_differ(first: str, second: str) -> bool:
    """Whether two hashes are of different weights; one that is not known yet tells nothing."""
    return bool(first and second) and first != second


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()
