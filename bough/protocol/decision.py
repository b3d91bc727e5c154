"""What was decided, expected and found out, round by round: the record that `bough explain` shows."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from bough.protocol.messages import GrowResult, RoundTimings, VerifyResult

NANO = 1e-9


class Mode(Enum):
    """Why a round's tree is as it is."""

    DRAFT = "draft"  # a draft's tree pays
    LOOKUP = "lookup"  # only what the session's own text suggests is worth its time, if anything is
    PROBE = "probe"  # a small tree, to see whether drafting would pay again
    FIXED = "fixed"  # the request, or the operator, has said so
    OFF = "off"  # the request wants none, or is at its end


@dataclass(slots=True)
class Parts:
    """Seconds of a round, by what they are spent on."""

    draft: float = 0.0
    network: float = 0.0
    queue: float = 0.0
    sweep: float = 0.0
    other: float = 0.0  # at the orchestrator

    @property
    def total(self) -> float:
        return self.draft + self.network + self.queue + self.sweep + self.other


@dataclass(slots=True)
class Decision:
    """One round: what was decided and why, what was expected, and what came to pass."""

    number: int  # of the round within the request
    mode: Mode
    draft_id: str = ""  # of the worker that was asked for a tree; empty where none was
    budget: int = 1  # most nodes that the draft was asked for
    width: int = 0
    depth: int = 0
    price: float = 0.0  # lambda: what a second was worth, in tokens, of all sessions in the sweep
    step_price: float = 0.0
    draft_rate: float = 0.0  # tokens per second expected with a draft's tree, of the session alone
    plain_rate: float = 0.0  # without
    best_nodes: int = 1  # the size that was thought best before anything had grown
    num_context: int = 0  # tokens of the prompt read in the same round
    num_grown: int = 1  # nodes that the draft and the lookup had together
    num_sent: int = 1
    num_left_out: int = 0  # by the target
    num_steps: int = 0  # draft steps
    num_rows: int = 0  # of the sweep, all sessions together
    expected_tokens: float = 1.0
    tokens: int = 0
    expected: Parts = field(default_factory=Parts)
    seconds: Parts = field(default_factory=Parts)

    @property
    def is_predicted(self) -> bool:
        """Whether anything was expected: nothing is of fixed sizes, and before the target has told what sweeps take."""
        return self.expected.sweep > 0

    def settle(self, num_tokens: int, result: VerifyResult, grown: GrowResult | None, timings: RoundTimings) -> None:
        """The round is over."""
        self.tokens, self.num_left_out, self.num_rows = num_tokens, len(result.left_out_nodes), result.num_rows
        self.num_steps = grown.timings.num_passes if grown is not None else 0
        calls_ns = timings.draft_ns + timings.network_ns + timings.target_ns
        self.seconds = Parts(
            timings.draft_ns * NANO,
            timings.network_ns * NANO,
            timings.queue_ns * NANO,
            (timings.target_ns - timings.queue_ns) * NANO,
            max(0, timings.total_ns - calls_ns) * NANO,
        )


@dataclass(frozen=True, slots=True)
class DraftCalibration:
    """How well predictions agreed with what came to pass, with one draft worker's trees; old rounds count for less."""

    draft_id: str  # of the worker
    num_rounds: int  # forgotten ones included
    expected_tokens: float  # of a round, before it was verified
    realised_tokens: float
    expected_seconds: float  # of a round, before its tree was sent
    realised_seconds: float
