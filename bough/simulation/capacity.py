"""Discrete-event simulation of users, targets and drafts as a closed queueing network (`bough simulate`).

A request waits for a KV slot of a target, which grows with its text, then repeats rounds: a size is chosen, the draft
grows the tree in steps shared with other sessions, the target verifies it in a shared sweep, and the number of accepted
tokens is drawn from a distribution that follows from the size; trees themselves are not built. Draft-ahead, prompt
lookup, shared prompts and failures are not simulated. Each target has its own drafts, or shares one with other targets.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from dataclasses import replace
from functools import partial

import simpy

from bough.simulation.acceptance_law import AcceptanceLaw
from bough.simulation.capacity_choice import LEAST_SHARE, PLAIN, RoundLoad, Size, SizeChoice
from bough.simulation.capacity_workers import Draft, SimulatedSession, Target, World
from bough.simulation.measuring import Measured, report
from bough.simulation.round_yield import RoundYield
from bough.simulation.scenario import CapacityReport, RequestKind, Scenario

LEAST_REQUESTS = 100  # fewest measured requests
MOST_REQUESTS = 2000
REQUESTS_EACH = 10  # measured requests for each user, within these limits
LEFT_OUT_EACH = 2  # requests of each user before measuring, as all users begin at once
GOLDEN = 0.618033988749895  # the golden ratio, whose multiples modulo 1 are evenly spread
CROWD = 2.0  # users, as a multiple of the KV slots, beyond which more users only wait longer


def simulate(scenario: Scenario) -> CapacityReport:
    """Run until enough requests are measured; deterministic for a scenario and its seed.

    Of many identical targets only a share is simulated, and of many waiting users only as many as keep all slots taken:
    the waiting time of the others follows from Little's law.

    Raises:
        ConfigError: a request does not fit a target, or no request ends within the rounds that are simulated.
    """
    scenario.check()
    share, num_shares = scenario.sliced()
    crowd = max(2, int(CROWD * share.num_slots * share.num_targets))
    if share.num_users <= crowd:
        return report(_Simulation(share).run(), scenario, num_shares, 0.0)
    measured = _Simulation(replace(share, num_users=crowd, think_seconds=0.0)).run()
    rate = measured.requests_per_second
    more = (share.num_users - crowd) / rate - share.think_seconds
    if more < 0 and share.think_seconds:
        return report(_Simulation(share).run(), scenario, num_shares, 0.0)
    return report(measured, scenario, num_shares, more)


class _Simulation:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._env = simpy.Environment()
        self._random = random.Random(scenario.seed)
        self._world = World(self._env, scenario.profile, self._random)
        laws = {kind.acceptance or scenario.profile.acceptance: kind for kind in scenario.kinds}
        self._choices = {law: self._choice_for(law, kind) for law, kind in laws.items()}
        self._targets = [
            Target(self._world, scenario.gather, self._swept, self._trim) for _ in range(scenario.num_targets)
        ]
        self._drafts = [Draft(self._world, self._grown) for _ in range(scenario.num_drafts)]
        self._cells = {id(target): self._cell(index) for index, target in enumerate(self._targets)}
        self._queue: list[SimulatedSession] = []  # waiting for a KV slot, oldest first
        self._num_asked = 0
        self._weights = [kind.weight for kind in scenario.kinds]
        self._enough = self._env.event()
        self._left_out = 0 if scenario.requests_each else LEFT_OUT_EACH * scenario.num_users
        wanted = max(LEAST_REQUESTS, min(MOST_REQUESTS, REQUESTS_EACH * scenario.num_users))
        self._wanted = scenario.num_users * scenario.requests_each or wanted
        self._measured = Measured()

    def _choice_for(self, law: AcceptanceLaw, kind: RequestKind) -> SizeChoice:
        """The size choice of an acceptance distribution; a drifting one is evaluated in the middle of the answer."""
        tokens = RoundYield(law, kind.prompt_tokens + kind.output_tokens // 2)
        return SizeChoice(self._scenario.profile, tokens, self._scenario.num_drafts > 0, self._scenario.fixed)

    def _cell(self, index: int) -> list[Draft]:
        """The drafts of a target's sessions: its share of all, so that sessions of one sweep share draft steps."""
        num_targets, num_drafts = self._scenario.num_targets, self._scenario.num_drafts
        begin = index * num_drafts // num_targets
        return self._drafts[begin : max(begin + 1, (index + 1) * num_drafts // num_targets)]

    def run(self) -> Measured:
        """Run until enough requests have ended, or `max_rounds` were simulated."""
        each = self._scenario.requests_each or -1
        mean = max(self._scenario.think_seconds, self._scenario.profile.target.sweep_seconds(1))
        for _ in range(self._scenario.num_users):
            begin = 0.0 if self._scenario.requests_each else self._random.random() * mean
            self._world.later(begin, partial(self._ask, each))
        self._env.run(until=self._enough)
        self._measured.ended = self._env.now
        self._measured.is_complete = len(self._measured.requests) >= self._wanted
        self._measured.sweeps = [target.sweeps for target in self._targets]
        self._measured.draft_busy = [draft.busy_seconds for draft in self._drafts]
        return self._measured

    def _ask(self, more: int) -> None:
        """A user sends a request, the first of `more`; without end if `more` is negative."""
        kinds = self._scenario.kinds
        kind: RequestKind = self._random.choices(kinds, self._weights)[0]
        if self._scenario.requests_each:
            kind = kinds[self._num_asked % len(kinds)]
        self._num_asked += 1
        now = self._env.now
        choice = self._choices[kind.acceptance or self._scenario.profile.acceptance]
        session = SimulatedSession(
            kind, choice, now, self._num_asked, since=now, context=kind.prompt_tokens, more=more - 1
        )
        session.draft_context = kind.prompt_tokens
        session.luck = self._random.random() if self._scenario.requests_each else 0.0
        self._queue.append(session)
        self._place()

    def _place(self) -> None:
        """Admit requests in order while there is room, each at the target with the fewest running."""
        while self._queue:
            session = self._queue[0]
            target = max(self._targets, key=lambda each: (each.slots.fits(session), -each.num_running))
            if not target.slots.fits(session):
                return
            self._queue.pop(0)
            target.slots.enter(session)
            target.num_running += 1
            session.target = target
            if self._drafts:
                session.draft = min(self._cells[id(target)], key=lambda each: each.num_sessions)
                session.draft.num_sessions += 1
            session.enter("place", self._env.now)
            self._begin_round([session])

    def _begin_round(self, sessions: list[SimulatedSession]) -> None:
        """Choose sizes, and send on each session whose slot has room for its tree."""
        ready: list[SimulatedSession] = []
        crowded: set[Target] = set()
        for session in sessions:
            target = session.target
            assert target is not None, "an admitted session has a target"
            self._resize(session, self._size(session))
            if not target.slots.has_room(session):  # a smaller tree costs less than waiting or preemption
                rows = max(1, session.slot_tokens - session.kind.prompt_tokens - session.produced)
                self._limit(session, rows)
            if session.gives_way:
                target.slots.leave(session)
                self._put_back(session, target)
            elif target.slots.grow(session):
                ready.append(session)
                continue
            crowded.add(target)
        self._send_round(ready)
        for target in sorted(crowded, key=self._targets.index):
            self._make_room(target)

    def _make_room(self, target: Target) -> None:
        """Distribute the KV memory of a target after a change, preempting sessions if needed."""
        resumed, preempted = target.slots.settle()
        for session in preempted:
            self._put_back(session, target)
        for session in resumed:
            session.enter("place", self._env.now)
        self._send_round(resumed)

    def _put_back(self, session: SimulatedSession, target: Target) -> None:
        """Queue a preempted session again, before all younger ones."""
        self._leave_workers(session, target)
        session.begin_anew()
        insort(self._queue, session, key=lambda each: each.number)
        self._measured.num_preemptions += 1

    def _leave_workers(self, session: SimulatedSession, target: Target) -> None:
        target.num_running -= 1
        if session.draft is not None:
            session.draft.num_sessions -= 1

    def _send_round(self, sessions: list[SimulatedSession]) -> None:
        """Send each session to its draft, or directly to its target for plain decoding."""
        self._send([session for session in sessions if session.size.depth], 1, "draft")
        self._send([session for session in sessions if not session.size.depth], 1, "target")

    def _resize(self, session: SimulatedSession, size: Size) -> None:
        if size != session.size:  # else both are as they were
            session.size, session.accepts = size, session.choice.negated_probs(size)

    def _trim(self, session: SimulatedSession, num_riders: int) -> None:
        """Shrink a tree at the target to the size that would be chosen for this number of riders."""
        self._limit(session, self._size(session, num_riders).nodes)

    def _limit(self, session: SimulatedSession, most: int) -> None:
        """Shrink a tree to at most `most` nodes."""
        if most < session.size.nodes:
            self._resize(session, Size(most, min(session.size.depth, most - 1)) if most > 1 else PLAIN)

    def _size(self, session: SimulatedSession, num_riders: int = 0) -> Size:
        target, draft = session.target, session.draft
        if draft is None or target is None or session.remaining <= 1:
            return PLAIN
        riders, context = num_riders or round(target.riders.value), round(target.context.value)
        halves = round(2 * target.tokens.value)
        load = RoundLoad(target.num_running, riders, round(draft.drafting.value), context, halves)
        size = session.choice.choose(load, self._world.factors).size
        nodes = size.nodes
        if self._scenario.fixed and session.context and size != PLAIN:  # like the orchestrator's fixed planner
            nodes = max(LEAST_SHARE, nodes - session.context)
        depth = min(size.depth, nodes - 1, session.remaining - 1)
        return Size(nodes, depth) if depth else PLAIN

    def _send(self, sessions: list[SimulatedSession], ways: int, to: str) -> None:
        """Deliver sessions after `ways` one-way network delays."""
        if not sessions:
            return
        profile = self._scenario.profile

        def arrive() -> None:
            for session in sessions:
                session.enter("network", self._env.now)
            if to == "answer":
                self._commit(sessions)
                return
            for session in sessions:
                worker = session.draft if to == "draft" else session.target
                assert worker is not None, "an admitted session has workers"
                worker.call(session)

        self._world.later(ways * profile.network.call_seconds(self._world.factors) / 2, arrive)

    def _grown(self, sessions: list[SimulatedSession]) -> None:
        for session in sessions:
            session.enter("draft", self._env.now)
        self._send(sessions, 2, "target")

    def _swept(self, sessions: list[SimulatedSession]) -> None:
        self._send(sessions, 1, "answer")

    def _commit(self, sessions: list[SimulatedSession]) -> None:
        going_on = []
        for session in sessions:
            num_accepted = bisect_left(session.accepts, -self._draw(session))  # depths likelier than what was drawn
            tokens = min(session.remaining, 1 + num_accepted)
            session.first = session.first or self._env.now
            session.produced += tokens
            session.num_rounds += 1
            if session.target is not None:
                session.target.tokens.observe(tokens)
            self._measured.count_round(session.size, tokens)
            if session.remaining:
                going_on.append(session)
            else:
                self._end(session)
        self._begin_round(going_on)
        if self._left_out and 2 * self._measured.num_rounds >= self._scenario.max_rounds:
            self._begin_measuring()
        if self._measured.num_rounds >= self._scenario.max_rounds and not self._enough.triggered:
            self._enough.succeed()

    def _begin_measuring(self) -> None:
        self._left_out = 0
        self._measured.begin(self._env.now, [each.busy_seconds for each in self._drafts])

    def _draw(self, session: SimulatedSession) -> float:
        """A uniform number: random, or evenly spread for requests given one by one, to reduce variance."""
        if not self._scenario.requests_each:
            return self._random.random()
        session.luck = (session.luck + GOLDEN) % 1.0
        return session.luck

    def _end(self, session: SimulatedSession) -> None:
        target, measured = session.target, self._measured
        assert target is not None, "an admitted session has a target"
        target.slots.leave(session)
        self._leave_workers(session, target)
        self._make_room(target)
        if self._left_out:
            self._left_out -= 1
            if not self._left_out:
                self._begin_measuring()
        else:
            measured.requests.append(session.as_request(self._env.now))
            if len(measured.requests) >= self._wanted and not self._enough.triggered:
                self._enough.succeed()
        if session.more:
            think = self._scenario.think_seconds
            pause = self._random.expovariate(1 / think) if think else 0.0
            self._world.later(pause, partial(self._ask, session.more))
        self._place()
