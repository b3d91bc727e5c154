"""Targets and drafts of a capacity simulation as SimPy processes: shared sweeps, batch delays and draft steps."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import simpy

from bough.simulation.capacity_choice import PLAIN, Size, SizeChoice
from bough.simulation.capacity_slots import SlotMemory
from bough.simulation.measuring import FinishedRequest, SweepRecord
from bough.simulation.profile import Factors, Profile, jittered
from bough.simulation.scenario import RequestKind

PARTS = ("place", "draft", "network", "queue", "sweep")  # of a request's time
WEIGHT = 0.25  # of the latest value in a running mean
SLOW_WEIGHT = 0.05  # the same for values that vary much
CHUNK = 256  # rows that a sweep may have with prompts, even if the knee is lower
SLACK = 3.0  # longest batch delay, in mean return times (as target_worker.scheduler.batch_delay)

Process = Generator[simpy.Event, Any, None]


@dataclass(slots=True, eq=False)
class SimulatedSession:
    """A running request, and its time by activity."""

    kind: RequestKind
    choice: SizeChoice
    asked: float
    number: int = 0  # of all requests, in the order in which they were asked
    slot_tokens: int = 0  # of its target's KV memory
    gives_way: bool = False
    target: Target | None = None
    draft: Draft | None = None
    size: Size = PLAIN
    accepts: list[float] = field(default_factory=list)  # negated acceptance probabilities by depth, ascending
    context: int = 0  # prompt tokens that the target has not computed
    draft_context: int = 0  # the same of the draft
    produced: int = 0
    first: float = 0.0  # time of the first tokens
    since: float = 0.0  # start of the current activity
    answered: float = 0.0
    num_rounds: int = 0
    luck: float = 0.0  # last uniform number, for evenly spread draws
    more: int = 0  # further requests of the same user; negative is without end
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def enter(self, ended: str, now: float) -> None:
        """Account the time since the last activity ended to the activity `ended`."""
        self.parts[ended] += now - self.since
        self.since = now

    def as_request(self, now: float) -> FinishedRequest:
        """The finished request, at the time of its last token."""
        return FinishedRequest(self.produced, self.first - self.asked, now - self.asked, self.num_rounds, self.parts)

    @property
    def wanted_tokens(self) -> int:
        """Tokens that its KV slot needs in its next round."""
        return self.kind.prompt_tokens + self.produced + self.size.nodes

    @property
    def final_tokens(self) -> int:
        """Tokens of its complete text."""
        return self.kind.total_tokens

    def begin_anew(self) -> None:
        """Reset after preemption: all of its text must be computed again, at any target."""
        self.target = self.draft = None
        self.size, self.accepts = PLAIN, []
        self.context = self.draft_context = self.kind.prompt_tokens + self.produced

    @property
    def remaining(self) -> int:
        """Output tokens still to be generated."""
        return self.kind.output_tokens - self.produced


@dataclass(slots=True)
class World:
    """State shared by all workers: the clock, random numbers, and the current profile."""

    env: simpy.Environment
    profile: Profile
    random: Random

    @property
    def factors(self) -> Factors:
        """The factors of past events."""
        return self.profile.factors_at(self.env.now)

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Call `act` after `seconds`, at once if 0."""
        if seconds <= 0:
            act()
        else:
            self.env.timeout(seconds).callbacks.append(lambda _: act())


class RunningMean:
    """An exponentially weighted running mean."""

    def __init__(self, value: float = 0.0, weight: float = WEIGHT) -> None:
        self.value = value
        self.is_known = False
        self._weight = weight

    def observe(self, value: float) -> None:
        """Add a value; the first one replaces the initial value."""
        self.value = value if not self.is_known else self.value + self._weight * (value - self.value)
        self.is_known = True


class Draft:
    """Grows the trees of all its sessions in shared steps; sessions that arrive during a step join the next."""

    def __init__(self, world: World, grown: Callable[[list[SimulatedSession]], None]) -> None:
        self.num_sessions = 0  # assigned to it
        self.drafting = RunningMean(1.0)  # sessions in one step
        self.busy_seconds = 0.0
        self._world, self._grown = world, grown
        self._new: list[SimulatedSession] = []
        self._ends: list[tuple[int, int, SimulatedSession]] = []  # heap of (last step, order, session)
        self._rows, self._count = 0, 0
        self._wake = world.env.event()
        world.env.process(self._run())

    def call(self, session: SimulatedSession) -> None:
        """Request a tree of the session's `size`."""
        self._new.append(session)
        if not self._wake.triggered:
            self._wake.succeed()

    def _run(self) -> Process:
        env, draft, step = self._world.env, self._world.profile.draft, 0
        while True:
            if not self._new and not self._ends:
                self._wake = env.event()
                yield self._wake
            context = self._join(step)
            self.drafting.observe(len(self._ends))
            factors = self._world.factors
            seconds = draft.step_seconds(self._rows, factors) + draft.prefill_seconds(context, factors)
            seconds = jittered(seconds, draft.jitter, self._world.random)
            yield env.timeout(seconds)
            self.busy_seconds += seconds
            step += 1
            done = []
            while self._ends and self._ends[0][0] <= step:
                session = heapq.heappop(self._ends)[2]
                self._rows -= session.size.frontier
                done.append(session)
            if done:
                self._grown(done)

    def _join(self, step: int) -> int:
        """Add the sessions that have arrived, and return the context tokens they bring."""
        context = 0
        for session in self._new:
            self._count += 1
            heapq.heappush(self._ends, (step + session.size.depth, self._count, session))
            self._rows += session.size.frontier
            context += session.draft_context
            session.draft_context = 0
        self._new.clear()
        return context


Trim = Callable[[SimulatedSession, int], None]  # given a session and the number of riders


class Target:
    """Sweeps over the sessions present, after a short delay for sessions that are about to return."""

    def __init__(
        self, world: World, gather: float, swept: Callable[[list[SimulatedSession]], None], trim: Trim
    ) -> None:
        """`swept` is called with sessions that have a verdict; `trim` shrinks a tree if more ride than planned."""
        self.slots = SlotMemory(world.profile.target.kv_tokens)
        self.num_running = 0
        self.riders = RunningMean(1.0)  # trees in a sweep
        self.context = RunningMean(0.0)  # prompt rows in a sweep
        self.tokens = RunningMean(1.0, SLOW_WEIGHT)  # tokens of a round
        self.sweeps: list[SweepRecord] = []
        self._world, self._swept, self._trim, self._most_delay = world, swept, trim, gather
        self._waiting: deque[SimulatedSession] = deque()
        self._return = RunningMean()
        self._longest, self._answered = 0.0, 0.0
        self._arrival = world.env.event()
        self._knee = max(CHUNK, world.profile.target.knee())
        world.env.process(self._run())

    def call(self, session: SimulatedSession) -> None:
        """Queue a session's tree and context for the next sweep."""
        now = self._world.env.now
        if session.num_rounds:
            self._return.observe(min(now - session.answered, 2 * self._longest))
        self._waiting.append(session)
        if not self._arrival.triggered:
            self._arrival.succeed()

    def _run(self) -> Process:
        env, target = self._world.env, self._world.profile.target
        while True:
            if not self._waiting:
                self._arrival = env.event()
                yield self._arrival
            yield from self._gather()
            riders, done, rows = self._pack()
            factors = self._world.factors
            link = target.link_seconds_of(rows) * factors.link
            compute = target.compute_seconds(rows) * factors.compute
            seconds = jittered(target.sweep_seconds(rows, factors), target.jitter, self._world.random)
            for session in riders:
                session.enter("queue", env.now)
            yield env.timeout(seconds)
            if done:
                self.riders.observe(len(done))
            self.context.observe(rows - sum(session.size.nodes for session in done))
            self.sweeps.append(SweepRecord(env.now, seconds, min(link, seconds), link >= compute, rows, len(riders)))
            self._longest, self._answered = self._most_delay * seconds, env.now
            for session in riders:
                session.enter("sweep", env.now)
                session.answered = env.now
            reading = [session for session in riders if session.context]  # before others may lose what they had read
            self._swept(done)
            self._waiting.extendleft(reversed(reading))

    def _gather(self) -> Process:
        """Wait for drafting sessions, at most `gather` sweeps and a multiple of their mean return time."""
        typical = self._return.value
        if not self._longest or not self._return.is_known or typical > self._longest:
            return
        env = self._world.env
        deadline = min(env.now + self._longest, self._answered + SLACK * typical)
        while len(self._waiting) < self.num_running and env.now < deadline:
            self._arrival = env.event()
            yield self._arrival | env.timeout(deadline - env.now)

    def _pack(self) -> tuple[list[SimulatedSession], list[SimulatedSession], int]:
        """The riders of the next sweep, those of them that get a verdict, and rows: trees, then chunks of prompts."""
        most = self._world.profile.target.max_sweep_rows
        riders: list[SimulatedSession] = []
        done: list[SimulatedSession] = []
        reading: list[SimulatedSession] = []
        remaining: list[SimulatedSession] = []
        rows = 0
        if len(self._waiting) > round(self.riders.value):
            for session in self._waiting:
                self._trim(session, len(self._waiting))
        for session in self._waiting:
            if session.context:
                reading.append(session)
            elif rows + session.size.nodes <= most:
                rows += session.size.nodes
                riders.append(session)
                done.append(session)
            else:
                remaining.append(session)
        beside = min(most, max(self._knee, 2 * rows)) if rows else most  # like target_worker.scheduler.batching
        for session in reading:
            piece = min(session.context, beside - rows)
            if piece <= 0:
                remaining.append(session)
                continue
            is_read = session.context == piece and rows + piece + session.size.nodes <= most
            piece = piece if is_read or session.context > piece else piece - 1
            if piece:
                riders.append(session)
            else:
                remaining.append(session)
            session.context -= piece
            rows += piece + (session.size.nodes if is_read else 0)
            if is_read:
                done.append(session)
        self._waiting = deque(remaining)
        return riders, done, rows
