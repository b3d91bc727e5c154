"""Inputs and reports of a capacity simulation, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isclose
from typing import Any, NamedTuple

from bough.errors import ConfigError
from bough.simulation.acceptance_model import AcceptanceModel
from bough.simulation.profile import Profile
from bough.trees.tree_plan import BestFirst

LEAST_WIDTH, MOST_WIDTH = 4, 64  # nodes that a draft step expands
MOST_EXACT = 64  # largest number of targets in a share for which an exact division is preferred to a smaller share
ROUNDING = 0.02  # relative change by rounding that is allowed; differences below 3 % are random
LESS_ROUNDING = (0.0, ROUNDING / 8, ROUNDING / 4, ROUNDING / 2)  # tried first, with shares of up to MOST_EXACT targets


def of_size(nodes: int, depth: int) -> BestFirst:
    """Growth of a tree of this size: each level's step expands as many nodes as fill it in `depth` steps."""
    return BestFirst(nodes, min(MOST_WIDTH, max(LEAST_WIDTH, -(-nodes // depth))), depth)


class RequestKind(NamedTuple):
    """A kind of request and its relative frequency; with `requests_each` kinds alternate instead."""

    prompt_tokens: int
    output_tokens: int
    weight: float = 1.0
    acceptance: AcceptanceModel | None = None  # None is the profile's

    @property
    def total_tokens(self) -> int:
        """Tokens in its KV slot at the end."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Scenario:
    """A closed network of users: each repeatedly thinks, sends a request, and waits for the answer."""

    profile: Profile
    num_users: int = 1
    num_targets: int = 1
    num_drafts: int = 1  # 0 is plain decoding
    kinds: tuple[RequestKind, ...] = (RequestKind(200, 200),)
    think_seconds: float = 0.0  # mean of an exponential distribution
    gather: float = 1.0  # longest batch delay in sweeps, as the target's --gather
    fixed: BestFirst | None = None  # a fixed size, divided among sessions, instead of choosing sizes
    requests_each: int = (
        0  # requests of each user, which all start at once and are all measured; 0 is an endless random mix
    )
    seed: int = 1
    max_rounds: int = 100_000  # rounds after which it stops, even with too few measured requests

    def check(self) -> None:
        """Raises ConfigError if a kind of request, or the fixed size, does not fit a target."""
        target = self.profile.target
        if self.fixed and self.fixed.budget > target.max_nodes:
            raise ConfigError(
                f"--nodes: must be at most {target.max_nodes}, the target's limit, got {self.fixed.budget}"
            )
        for kind in self.kinds:
            name = f"--mix: {kind.prompt_tokens}:{kind.output_tokens}"
            most = min(target.max_context, target.kv_tokens)
            if kind.total_tokens > most:
                raise ConfigError(
                    f"{name}: must be at most {most} tokens, the target's context, got {kind.total_tokens}"
                )

    @property
    def num_slots(self) -> int:
        """Requests of the mean length, half answered, whose KV fits on one target."""
        weight = sum(kind.weight for kind in self.kinds)
        mean = sum(kind.weight * (kind.prompt_tokens + kind.output_tokens / 2) for kind in self.kinds) / weight
        return max(1, int(self.profile.target.kv_tokens / mean))

    def sliced(self) -> tuple[Scenario, int]:
        """One of several equal shares of users, targets and drafts, and the number of shares; 1 if not divisible.

        Identical shares are independent. If only large shares divide all three, smaller ones are rounded.
        """
        whole = (self.num_users, self.num_targets, self.num_drafts)
        for slack, most_targets in (*((less, MOST_EXACT) for less in LESS_ROUNDING), (ROUNDING, self.num_targets)):
            for shares in range(self.num_targets, 1, -1):
                users, targets, drafts = numbers = [round(number / shares) for number in whole]
                near = (isclose(own * shares, all_, rel_tol=slack) for own, all_ in zip(numbers, whole, strict=True))
                if targets <= most_targets and all(near):
                    return replace(self, num_users=users, num_targets=targets, num_drafts=drafts), shares
        return self, 1


class Percentiles(NamedTuple):
    """Percentiles over measured requests, in seconds."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class CapacityReport:
    """The results of a simulation without its warm-up."""

    num_users: int
    num_targets: int
    num_drafts: int
    num_requests: int  # measured
    measured_seconds: float  # on the simulated clock
    tokens_per_second: float  # of all users together
    user_tokens_per_second: float  # median over requests: tokens / seconds from the question to the last token
    ttft: Percentiles
    tpot: Percentiles
    latency: Percentiles
    link_busy: float  # share of the time in which the targets' links were busy
    target_busy: float
    draft_busy: float
    link_bound: float  # share of the sweep time in sweeps limited by the link
    rows_per_sweep: float
    riders_per_sweep: float
    waiting_users: float  # mean number of users waiting for KV memory
    round_seconds: float
    tokens_per_round: float
    nodes: float  # of a round's tree, on average
    depth: float
    preemptions: float  # mean preemptions of a request
    parts: dict[str, float]  # shares of a request's time: waiting for KV, draft, network, waiting for a sweep, sweep
    is_complete: bool  # enough requests were measured

    @property
    def bottleneck(self) -> str:
        """The bottleneck in a few words."""
        parts = self.parts
        if self.target_busy >= 0.85:
            found = "the targets' link" if self.link_bound >= 0.5 else "the targets' computing"
        elif self.draft_busy >= 0.85:
            found = "the drafts"
        else:
            names = {
                "place": "KV memory",
                "draft": "the latency of drafting",
                "network": "the latency of the network",
                "queue": "waiting for sweeps to begin",
                "sweep": "the targets' link" if self.link_bound >= 0.5 else "the targets' computing",
            }
            found = names[max(parts, key=lambda name: parts[name])]
        if parts["place"] > 0.5 and found.startswith("the targets"):
            found += ", and too little KV memory for all users at once"
        return found

    def as_json(self) -> dict[str, Any]:
        """The content of the JSON line, with numbers to five digits."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: rounded(value) for name, value in fields.items()} | {"bottleneck": self.bottleneck}


class Purchase(NamedTuple):
    """A change and its effect; gains are shares, so 0.1 is 10 % more or faster."""

    name: str
    tokens_per_second: float
    throughput_gain: float  # in tokens per second of all users
    user_gain: float  # in tokens per second of one user, waiting included
    p95_latency_gain: float  # relative reduction of the 95th percentile


def rounded(value: Any) -> Any:
    """A value for JSON, with numbers to five digits."""
    if isinstance(value, Percentiles | Purchase):
        value = value._asdict()
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value
