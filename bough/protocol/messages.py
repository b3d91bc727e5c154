"""Messages between services as plain values; `bough.protocol.codec` converts them to and from protobuf."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from bough.protocol.cost_curve import CostCurve
from bough.protocol.ids import ScopedId
from bough.protocol.prefix_hash import prefix_hash
from bough.protocol.sampling_params import PositionLogprobs, SamplingParams
from bough.trees.tree import Tree
from bough.trees.tree_plan import Scheme, TreePlan


@dataclass(frozen=True, slots=True)
class Context:
    """A session's tokens before the root, as sent to a worker: the prefix it has cached, and the tokens after it."""

    session_id: ScopedId
    context_start: int  # leading tokens believed to be in the worker's KV cache
    prefix_hash: int  # of those
    tokens: tuple[int, ...]  # from context_start up to, but excluding, the root
    prompt_length: int
    cache_salt: str = ""  # cached prefixes are shared only among sessions with the same salt

    @classmethod
    def of(
        cls, session_id: ScopedId, tokens: Sequence[int], held: int, prompt_length: int, cache_salt: str = ""
    ) -> Context:
        """The context of committed `tokens`, of which the last is the root, for a worker that has cached `held`."""
        held = min(held, len(tokens) - 1)
        return cls(session_id, held, prefix_hash(tokens[:held]), tuple(tokens[held:-1]), prompt_length, cache_salt)

    @property
    def base_length(self) -> int:
        """Tokens before the root, and so the root's position in the session."""
        return self.context_start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of one call in nanoseconds, on the worker's clock."""

    total_ns: int = 0
    queue_ns: int = 0  # waiting for the sweep or draft step to begin
    wait_ns: int = 0  # waiting for weights to cross the link
    compute_ns: int = 0
    link_ns: int = 0  # the link was busy
    link_bytes: int = 0
    num_passes: int = 0  # sweeps or draft steps
    link_ideal_ns: int = 0  # link_bytes at the best speed measured
    num_experts: int = 0  # distinct ones that rows chose, in all layers together, as far as the host learns of them
    row_experts: int = 0  # that one row chooses in these layers

    @property
    def expert_ratio(self) -> float:
        """Distinct experts over those of one row; 0 if none were counted."""
        return self.num_experts / self.row_experts if self.row_experts else 0.0

    def __add__(self, other: Timings) -> Timings:
        return Timings(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class GrowCall:
    """Asks the draft worker for a tree."""

    context: Context
    root_token: int
    sampling: SamplingParams
    round: int  # the root's position: sampled trees of different rounds share no random numbers
    plan: TreePlan
    vocab_size: int = 0  # of the target; 0 is the draft model's
    epoch: int = 0  # of the session; 0 is unknown


@dataclass(frozen=True, slots=True)
class GrowResult:
    """A tree, and how many tokens of the session the draft worker now has cached."""

    tree: Tree
    held_length: int
    timings: Timings
    num_warm_nodes: int = 0  # nodes of it that draft-ahead expanded before the call
    cost: CostCurve | None = None  # seconds of a draft step by its rows, all sessions together


@dataclass(frozen=True, slots=True)
class VerifyCall:
    """Asks the target worker for its verdict on a tree."""

    context: Context
    epoch: int
    round: int
    tree: Tree
    sampling: SamplingParams
    scheme: Scheme = Scheme.TARGET
    max_length: int = 0  # tokens that the session may reach in this request; 0 is the worker's maximum
    caller: str = ""  # id of the calling orchestrator, the same in all its calls
    num_running: int = 0  # sessions that the caller runs at this worker, this one included; 0 is unknown
    worker_id: str = ""  # required id of the worker, as addresses can be reused; "" is any
    may_leave_out: bool = False  # the target may skip nodes that are not worth their time in a shared sweep
    reserves: bool = False  # lease a KV slot before reporting the missing part of the context
    is_given: bool = False  # the tree is a chain of tokens that count as accepted; report their log-probabilities


class Verdict(NamedTuple):
    """The target's verdict on one tree."""

    accepted_nodes: tuple[int, ...]  # from below the root downwards
    bonus_token: int
    logprobs: tuple[PositionLogprobs, ...] = ()  # accepted nodes, then the bonus token

    def tokens_of(self, tree: Tree) -> list[int]:
        """The round's tokens: those of the accepted nodes, then the bonus token."""
        return [*(int(tree.tokens[node]) for node in self.accepted_nodes), self.bonus_token]


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """A verdict, and how many tokens of the session the target now has cached."""

    verdict: Verdict
    held_length: int
    timings: Timings
    cached_length: int = 0  # leading tokens that were cached, or copied from another slot, and not computed
    left_out_nodes: tuple[int, ...] = ()  # nodes that were not verified, nor were their descendants
    cost: CostCurve | None = None  # seconds of a sweep by its rows, all sessions together
    num_rows: int = 0  # rows of the sweep that verified the tree
    num_trees: int = 0  # trees in that sweep
    expected_expert_ratio: float = 0.0  # of that sweep, before it; 0 without experts
