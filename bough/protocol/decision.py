"""Decisions about rounds: each round's plan, predictions and outcome, as `bough explain` shows them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum

NANO = 1e-9


class Mode(Enum):
    """How the tree of a round was chosen."""

    DRAFT = "draft"  # a tree from a draft worker pays
    LOOKUP = "lookup"  # drafting does not pay: prompt lookup only
    PROBE = "probe"  # a small drafted tree, to measure whether drafting pays again
    FIXED = "fixed"  # sizes fixed by the request or the operator
    OFF = "off"  # no tree: disabled by the request, or at its last token


@dataclass(frozen=True, slots=True)
class RoundTimings:
    """Durations of one round in nanoseconds, by activity."""

    total_ns: int = 0
    draft_ns: int = 0
    network_ns: int = 0  # duration of calls minus the workers' own totals
    target_ns: int = 0
    queue_ns: int = 0  # of target_ns
    wait_ns: int = 0  # of target_ns
    compute_ns: int = 0  # of target_ns
    link_ns: int = 0
    link_bytes: int = 0
    link_ideal_ns: int = 0  # link_bytes at the best speed measured

    @property
    def other_ns(self) -> int:
        """The part of the total that the orchestrator took."""
        return max(0, self.total_ns - self.draft_ns - self.network_ns - self.target_ns)

    @property
    def link_efficiency(self) -> float:
        """Ideal link time over total time: 1 if the link alone bounds the round, 0 if nothing crosses it."""
        return self.link_ideal_ns / self.total_ns if self.total_ns else 0.0

    def __add__(self, other: RoundTimings) -> RoundTimings:
        return RoundTimings(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(slots=True)
class RoundSeconds:
    """Seconds of a round by activity."""

    draft: float = 0.0
    network: float = 0.0
    queue: float = 0.0
    sweep: float = 0.0
    other: float = 0.0  # in the orchestrator

    @property
    def total(self) -> float:
        return self.draft + self.network + self.queue + self.sweep + self.other


@dataclass(slots=True)
class Decision:
    """The plan, the predictions and the outcome of one round."""

    number: int  # of the round within the request
    mode: Mode
    draft_id: str = ""  # draft worker asked for a tree; empty for none
    budget: int = 1  # most nodes requested of the draft
    width: int = 0
    depth: int = 0
    price: float = 0.0  # lambda: value of a second, in tokens, summed over all sessions in the sweep
    min_gain: float = 0.0  # least expected tokens with which a draft step pays
    draft_rate: float = 0.0  # expected tokens per second of this session with a drafted tree
    plain_rate: float = 0.0  # expected tokens per second of this session without one
    best_nodes: int = 1  # predicted best tree size, before growth
    num_context: int = 0  # prompt tokens computed in the same round
    num_grown: int = 1  # nodes from the draft and from lookup together
    num_sent: int = 1  # nodes sent to the target
    num_left_out: int = 0  # nodes that the target did not verify
    num_steps: int = 0  # draft steps
    num_rows: int = 0  # rows of the sweep, all sessions together
    expected_tokens: float = 1.0
    tokens: int = 0
    expected: RoundSeconds = field(default_factory=RoundSeconds)
    seconds: RoundSeconds = field(default_factory=RoundSeconds)
    plain_sweep: float = 0.0  # expected seconds of a sweep without a tree
    expected_expert_ratio: float = 0.0  # distinct experts of the sweep's rows over those of one row; 0 is unknown
    expert_ratio: float = 0.0  # as counted; 0 if they were not

    @property
    def is_predicted(self) -> bool:
        """Whether there is a prediction; there is none for fixed sizes or without a cost curve of the target."""
        return self.expected.sweep > 0

    def settle(self, timings: RoundTimings, num_tokens: int, num_steps: int, num_left_out: int, num_rows: int) -> None:
        """Record the outcome of the round."""
        self.tokens, self.num_steps, self.num_left_out, self.num_rows = num_tokens, num_steps, num_left_out, num_rows
        sweep_ns = timings.target_ns - timings.queue_ns
        parts_ns = timings.draft_ns, timings.network_ns, timings.queue_ns, sweep_ns, timings.other_ns
        self.seconds = RoundSeconds(*(part_ns * NANO for part_ns in parts_ns))


@dataclass(frozen=True, slots=True)
class DraftCalibration:
    """Mean predictions and outcomes of rounds with one draft worker's trees; older rounds weigh less."""

    draft_id: str  # of the worker
    num_rounds: int  # all rounds, including those that no longer weigh
    expected_tokens: float  # per round, before verification
    realised_tokens: float  # per round
    expected_seconds: float  # per round, before its tree was sent
    realised_seconds: float  # per round
