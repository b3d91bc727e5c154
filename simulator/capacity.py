"""Capacity of a fleet (`bough simulate`): a closed network of users around a `World`, and the value of more hardware.

Only a share of many identical targets is simulated, and of many waiting users only enough to fill all slots.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import TypeVar

import numpy as np

from bough.errors import ConfigError
from bough.protocol.generation import Speculation
from bough.protocol.ids import ScopedId
from bough.simulation.profile import DraftProfile, NetworkProfile, Profile, TargetProfile
from bough.simulation.text_model import FIRST_WORD, NUM_WORDS, TextModel
from bough.trees.tree import Tree
from bough.trees.tree_plan import BestFirst
from orchestrator.sizing.tree_sizer import TreeSizer
from simulator.guesses import PooledText
from simulator.scenario import CapacityReport, Percentiles, Purchase, RequestKind, Scenario
from simulator.world import Process, Session, SweepRecord, World

LEAST_REQUESTS, MOST_REQUESTS = 30, 150  # limits of measured requests; within these, half the number of users
LEAST_LEFT_OUT, MOST_LEFT_OUT = 2, 100  # requests before measuring, with the same rule, as all users begin at once
CROWD = 2.0  # users per KV slot; more users only wait longer
DEFAULT_SIZE, MAX_DEPTH = BestFirst(64, 16, 7), 24  # an orchestrator's defaults
RESIDENT_SHARE = 0.25  # share of the streamed weights that added memory holds
LINK_SPEED = 2.0  # speed-up of a link, as of the next generation of PCIe
SPEED = 2.0  # speed-up of a processor, draft or network; factor of KV memory

Part = TypeVar("Part", TargetProfile, DraftProfile, NetworkProfile)


def simulate(scenario: Scenario) -> CapacityReport:
    """Run until enough requests are measured; deterministic for a scenario and its seed.

    The waiting time of users who are not simulated follows from Little's law.

    Raises:
        ConfigError: a request does not fit a target, or no request ends within the simulated rounds.
    """
    scenario.check()
    share, num_shares = scenario.sliced()
    crowd = max(2, int(CROWD * share.num_slots * share.num_targets))
    if share.num_users <= crowd:
        return report(_Simulation(share).run(), scenario, num_shares, 0.0)
    measured = _Simulation(replace(share, num_users=crowd, think_seconds=0.0)).run()
    more = (share.num_users - crowd) / measured.requests_per_second - share.think_seconds
    if more < 0 and share.think_seconds:
        return report(_Simulation(share).run(), scenario, num_shares, 0.0)
    return report(measured, scenario, num_shares, more)


class _Simulation:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario, self._random = scenario, Random(scenario.seed)
        size = scenario.fixed or DEFAULT_SIZE
        sizer = TreeSizer(size, max(MAX_DEPTH, size.depth), scenario.fixed.budget if scenario.fixed else 0)
        self._world = World(
            scenario.profile,
            sizer,
            Speculation(disabled=not scenario.num_drafts),
            scenario.seed,
            scenario.num_targets,
            scenario.num_drafts,
            scenario.gather,
        )
        self._world.observe_round = self._count_round
        self._enough = self._world.env.event()
        self._num_asked = 0
        wanted = max(LEAST_REQUESTS, min(MOST_REQUESTS, scenario.num_users // 2))
        self._wanted = scenario.num_users * scenario.requests_each or wanted
        left_out = max(LEAST_LEFT_OUT, min(MOST_LEFT_OUT, scenario.num_users // 2))
        self._left_out = 0 if scenario.requests_each else left_out
        self._measured = Measured()

    def run(self) -> Measured:
        """Run until enough requests have ended, or `max_rounds` were simulated."""
        env, measured = self._world.env, self._measured
        for _ in range(self._scenario.num_users):
            env.process(self._user())
        env.run(until=self._enough)
        measured.ended = env.now
        measured.is_complete = len(measured.requests) >= self._wanted
        measured.sweeps = [target.sweeps for target in self._world.targets]
        measured.draft_busy = [draft.busy_seconds for draft in self._world.drafts]
        measured.num_preemptions = self._world.num_preemptions - measured.num_preemptions
        return measured

    def _user(self) -> Process:
        """Ask, wait for the answer, and think; starts in the middle of an answer or of thinking."""
        scenario, random, env = self._scenario, self._random, self._world.env
        share = 1.0
        if not scenario.requests_each:
            share = 1.0 - random.random()
            answering = (
                scenario.profile.target.sweep_seconds(1) * max(kind.output_tokens for kind in scenario.kinds) / 2
            )
            if random.random() * (scenario.think_seconds + answering) < scenario.think_seconds:
                yield env.timeout(random.expovariate(1 / scenario.think_seconds))
        num_asked = 0
        while not scenario.requests_each or num_asked < scenario.requests_each:
            session = self._request(share)
            yield from self._world.generate(session)
            self._end(session, is_whole=share == 1.0)
            num_asked, share = num_asked + 1, 1.0
            if scenario.think_seconds:
                yield env.timeout(random.expovariate(1 / scenario.think_seconds))

    def _request(self, share: float) -> Session:
        """A request for this share of an answer's tokens."""
        kinds = self._scenario.kinds
        kind: RequestKind = self._random.choices(kinds, [each.weight for each in kinds])[0]
        if self._scenario.requests_each:
            kind = kinds[self._num_asked % len(kinds)]
        self._num_asked += 1
        model = TextModel(kind.acceptance or self._scenario.profile.acceptance, FIRST_WORD, NUM_WORDS)
        num_tokens = max(1, round(share * kind.output_tokens))
        return Session(ScopedId(str(self._num_asked)), PooledText(model, self._random), kind.prompt_tokens, num_tokens)

    def _count_round(self, tree: Tree, num_tokens: int) -> None:
        measured = self._measured
        measured.count_round(len(tree), int(tree.depths().max()), num_tokens)
        if measured.num_rounds >= self._scenario.max_rounds and not self._enough.triggered:
            self._enough.succeed()

    def _end(self, session: Session, *, is_whole: bool) -> None:
        if self._left_out:
            self._left_out -= 1
            if not self._left_out:
                draft_busy = [each.busy_seconds for each in self._world.drafts]
                self._measured.begin(self._world.env.now, draft_busy, self._world.num_preemptions)
        elif is_whole:
            self._measured.requests.append(session)
            if len(self._measured.requests) >= self._wanted and not self._enough.triggered:
                self._enough.succeed()


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
    num_preemptions: int = 0  # preemptions by older sessions; until the end, those during the warm-up
    num_counted: int = 0  # the rounds since the warm-up
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
        """Requests per second of all users, derived from tokens, as some requests began before the warm-up's end."""
        tokens_of_one = sum(each.num_tokens for each in self.requests) / max(1, len(self.requests))
        return self.num_tokens / max(1.0, tokens_of_one) / self.seconds

    @property
    def drafts_seconds(self) -> float:
        """Busy seconds of all drafts."""
        before = self._draft_busy_before or [0.0] * len(self.draft_busy)
        return sum(self.draft_busy) - sum(before)


def report(measured: Measured, scenario: Scenario, num_shares: int, more_wait: float) -> CapacityReport:
    """The report on a scenario, of which one of `num_shares` shares was simulated, with `more_wait` added to waits.

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
    if scenario.think_seconds:  # by Little's law: the mean thinking time is known, while a short run's sample is random
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


def purchases(scenario: Scenario, now: CapacityReport) -> list[Purchase]:
    """All applicable changes, sorted by a user's gain in tokens per second, then by gain in latency."""
    found = []
    for name, changed in _changes(scenario):
        with suppress(ConfigError):  # with more KV memory so many requests run at once that none may end in time
            found.append(_purchase(name, simulate(changed), now))
    return sorted(found, key=lambda each: (-round(each.user_gain, 3), -each.p95_latency_gain))


def _purchase(name: str, after: CapacityReport, now: CapacityReport) -> Purchase:
    return Purchase(
        name,
        after.tokens_per_second,
        _gain(after.tokens_per_second, now.tokens_per_second),
        _gain(after.user_tokens_per_second, now.user_tokens_per_second),
        -_gain(after.latency.p95, now.latency.p95),
    )


def _gain(after: float, now: float) -> float:
    return after / now - 1 if now else 0.0


def _changes(scenario: Scenario) -> list[tuple[str, Scenario]]:
    profile, target = scenario.profile, scenario.profile.target

    def with_profile(changed: Profile) -> Scenario:
        return replace(scenario, profile=changed)

    def with_link(factor: float) -> Scenario:
        experts = replace(target.experts, miss_seconds=target.experts.miss_seconds * factor) if target.experts else None
        changed = replace(target, link_seconds=target.link_seconds * factor, experts=experts)
        return with_profile(replace(profile, target=changed))

    more = max(1, scenario.num_targets // 10)
    changes = [(f"{more} more target{'s' * (more > 1)}", replace(scenario, num_targets=scenario.num_targets + more))]
    more = max(1, scenario.num_drafts // 10) if scenario.num_drafts else scenario.num_targets
    changes.append((f"{more} more draft{'s' * (more > 1)}", replace(scenario, num_drafts=scenario.num_drafts + more)))
    if target.link_seconds or target.experts:
        changes.append((f"a link {LINK_SPEED:g} times as fast", with_link(1 / LINK_SPEED)))
        changes.append(("memory for a quarter of what streams", with_link(1 - RESIDENT_SHARE)))
    computing = replace(
        _faster(target, "compute_base_seconds", "compute_row_seconds"),
        compute_curve=tuple((rows, seconds / SPEED) for rows, seconds in target.compute_curve),
    )
    changes.append((f"targets that compute {SPEED:g} times as fast", with_profile(replace(profile, target=computing))))
    if scenario.num_drafts:
        drafting = _faster(profile.draft, "base_seconds", "row_seconds", "prefill_token_seconds")
        changes.append((f"drafts {SPEED:g} times as fast", with_profile(replace(profile, draft=drafting))))
    kv = replace(target, kv_tokens=int(target.kv_tokens * SPEED))
    changes.append((f"{SPEED:g} times the KV memory", with_profile(replace(profile, target=kv))))
    if profile.network.one_way_seconds:
        near = _faster(profile.network, "one_way_seconds")
        changes.append((f"a network {SPEED:g} times as near", with_profile(replace(profile, network=near))))
    return changes


def _faster(part: Part, *times: str) -> Part:
    """A copy of a part of a profile with these times divided by SPEED."""
    return replace(part, **{name: getattr(part, name) / SPEED for name in times})
