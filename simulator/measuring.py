"""Measurements of a capacity simulation, and the report made from them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from bough.errors import ConfigError
from simulator.scenario import CapacityReport, Percentiles, Scenario
from simulator.world import Session, SweepRecord


@dataclass(slots=True)
class Measured:
    """Measurements since the end of the warm-up."""

    began: float = 0.0
    ended: float = 0.0
    is_complete: bool = False
    requests: list[Session] = field(default_factory=list)
    sweeps: list[list[SweepRecord]] = field(default_factory=list)  # of each target, from the start on
    draft_busy: list[float] = field(default_factory=list)  # busy seconds of each draft, at the end
    num_rounds: int = 0
    num_tokens: int = 0
    num_preemptions: int = 0  # of sessions by older ones; until the end, those before the warm-up's end
    num_counted: int = 0  # of num_rounds, those since the warm-up
    num_nodes: int = 0  # of their trees
    num_levels: int = 0
    _draft_busy_before: list[float] = field(default_factory=list)

    def count_round(self, num_nodes: int, num_levels: int, num_tokens: int) -> None:
        """Count a round of a session."""
        self.num_rounds += 1
        self.num_counted += 1
        self.num_nodes += num_nodes
        self.num_levels += num_levels
        self.num_tokens += num_tokens

    def begin(self, now: float, draft_busy: list[float], num_preemptions: int) -> None:
        """End the warm-up: discard all measurements so far."""
        self.began, self._draft_busy_before, self.num_preemptions = now, draft_busy, num_preemptions
        self.requests.clear()
        self.num_counted = self.num_nodes = self.num_levels = self.num_tokens = 0

    @property
    def seconds(self) -> float:
        """Duration of the measurement."""
        return max(self.ended - self.began, 1e-9)

    @property
    def requests_per_second(self) -> float:
        """Requests per second, of all users, by their tokens: some that end were asked before the warm-up's end."""
        tokens_of_one = sum(each.num_tokens for each in self.requests) / max(1, len(self.requests))
        return self.num_tokens / max(1.0, tokens_of_one) / self.seconds

    @property
    def drafts_seconds(self) -> float:
        """Busy seconds of all drafts."""
        before = self._draft_busy_before or [0.0] * len(self.draft_busy)
        return sum(self.draft_busy) - sum(before)


def report(measured: Measured, scenario: Scenario, num_shares: int, more_wait: float) -> CapacityReport:
    """The report on a scenario of which one of `num_shares` shares was simulated, with `more_wait` added to waits.

    Raises:
        ConfigError: no request ended.
    """
    if not measured.requests:
        raise ConfigError(
            f"--users: must be fewer, or the answers of --mix shorter, as none ended within the {measured.num_rounds} "
            f"rounds that were simulated; got {scenario.num_users} users of {scenario.num_targets} targets"
        )
    requests, seconds = measured.requests, measured.seconds
    sweeps = [sweep for each in measured.sweeps for sweep in each if sweep.ended > measured.began]
    linked = sum(min(sweep.seconds.link, sweep.seconds.total) for sweep in sweeps)
    swept = sum(sweep.seconds.total for sweep in sweeps) or 1e-9
    num_targets = max(1, len(measured.sweeps))
    rounds = max(1, measured.num_counted)
    parts = {name: sum(request.parts[name] for request in requests) for name in requests[0].parts}
    parts["place"] += more_wait * len(requests)
    whole = sum(parts.values()) or 1e-9
    latencies = np.array([request.latency + more_wait for request in requests])
    inner = [each for each in requests if each.num_tokens > 1]
    rates = [each.num_tokens / (each.latency + more_wait) for each in requests]
    asked, tokens = num_shares * measured.requests_per_second, num_shares * measured.num_tokens / seconds
    if scenario.think_seconds:  # by Little's law: who thinks how long is known, and would be chance in a short run
        asked = scenario.num_users / (scenario.think_seconds + float(latencies.mean()))
        tokens = asked * sum(each.num_tokens for each in requests) / len(requests)
    return CapacityReport(
        num_users=scenario.num_users,
        num_targets=scenario.num_targets,
        num_drafts=scenario.num_drafts,
        num_requests=len(requests),
        measured_seconds=seconds,
        tokens_per_second=tokens,
        user_tokens_per_second=float(np.median(rates)),
        ttft=_percentiles([request.ttft + more_wait for request in requests]),
        tpot=_percentiles([(each.latency - each.ttft) / (each.num_tokens - 1) for each in inner]),
        latency=_percentiles(latencies.tolist()),
        link_busy=min(1.0, linked / (num_targets * seconds)),
        target_busy=min(1.0, swept / (num_targets * seconds)),
        draft_busy=min(1.0, measured.drafts_seconds / (max(1, len(measured.draft_busy)) * seconds)),
        link_bound=sum(sweep.seconds.total for sweep in sweeps if sweep.seconds.waited) / swept,
        rows_per_sweep=sum(sweep.rows for sweep in sweeps) / max(1, len(sweeps)),
        riders_per_sweep=sum(sweep.riders for sweep in sweeps) / max(1, len(sweeps)),
        waiting_users=parts["place"] / len(requests) * asked,
        round_seconds=(whole - parts["place"]) / sum(request.num_rounds for request in requests),
        tokens_per_round=measured.num_tokens / rounds,
        nodes=measured.num_nodes / rounds,
        depth=measured.num_levels / rounds,
        preemptions=measured.num_preemptions / len(requests),
        parts={name: value / whole for name, value in parts.items()},
        is_complete=measured.is_complete,
    )


def _percentiles(values: list[float]) -> Percentiles:
    if not values:
        return Percentiles(0.0, 0.0, 0.0)
    return Percentiles(*(float(value) for value in np.percentile(values, (50, 95, 99))))
