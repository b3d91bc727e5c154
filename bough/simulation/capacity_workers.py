"""Targets and drafts of a capacity simulation, as SimPy processes: sweeps, gathering, and steps that sessions share."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import simpy

from bough.simulation.capacity_choice import PLAIN, Size
from bough.simulation.capacity_slots import SlotMemory
from bough.simulation.measuring import Request, SweepRecord
from bough.simulation.profile import Factors, Profile, jittered
from bough.simulation.scenario import RequestKind

PARTS = ("place", "draft", "network", "queue", "sweep")  # of a request's time
WEIGHT = 0.25  # of the last in what is typical
SLOW_WEIGHT = 0.05  # the same of what varies much
CHUNK = 256  # rows that a sweep may have beside trees, however low the knee
SLACK = 3.0  # typical times after which a sweep waits for nobody (as target_worker.scheduler.batch_delay)

Process = Generator[simpy.Event, Any, None]


@dataclass(slots=True, eq=False)
class Session:
    """A request under way, and where its time went."""

    kind: RequestKind
    asked: float
    number: int = 0  # of all requests, in the order in which they were asked
    slot_tokens: int = 0  # of its target's KV memory
    gives_way: bool = False
    target: Target | None = None
    draft: Draft | None = None
    size: Size = PLAIN
    accepts: list[float] = field(default_factory=list)  # negated probabilities by depth, rising
    context: int = 0  # tokens of the prompt that the target has not read
    draft_context: int = 0  # the same of the draft
    produced: int = 0
    first: float = 0.0  # when the first tokens came
    since: float = 0.0  # when the part of its time began that it is in
    answered: float = 0.0
    num_rounds: int = 0
    luck: float = 0.0  # from 0 to 1: where its tokens are drawn evenly instead of by chance
    more: int = 0  # requests of the same user after it; below 0 there is no end
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def enter(self, ended: str, now: float) -> None:
        """A part of its time is over, and another begins."""
        self.parts[ended] += now - self.since
        self.since = now

    def as_request(self, now: float) -> Request:
        """What it was, when its last token comes."""
        return Request(self.produced, self.first - self.asked, now - self.asked, self.num_rounds, self.parts)

    @property
    def wanted_tokens(self) -> int:
        """Tokens that its KV slot must hold in its next round."""
        return self.kind.prompt_tokens + self.produced + self.size.nodes

    @property
    def final_tokens(self) -> int:
        """Tokens of its text when it is whole."""
        return self.kind.total_tokens

    def begin_anew(self) -> None:
        """It has lost its slot: all of its text must be read again, wherever it goes on."""
        self.target = self.draft = None
        self.size = PLAIN
        self.context = self.draft_context = self.kind.prompt_tokens + self.produced

    @property
    def remaining(self) -> int:
        """Tokens still to come."""
        return self.kind.output_tokens - self.produced


@dataclass(slots=True)
class World:
    """What all workers share: the clock, chance, and the profile as it is now."""

    env: simpy.Environment
    profile: Profile
    random: Random

    @property
    def factors(self) -> Factors:
        """What events have made of the profile."""
        return self.profile.factors_at(self.env.now) if self.profile.events else Factors()

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Acts after so long, at once where that is nothing."""
        if seconds <= 0:
            act()
        else:
            self.env.timeout(seconds).callbacks.append(lambda _: act())


class Typical:
    """A running mean in which what is old counts less."""

    def __init__(self, value: float = 0.0, weight: float = WEIGHT) -> None:
        self.value = value
        self._weight = weight
        self._is_known = False

    def observe(self, value: float) -> None:
        """One more; the first is all that is known."""
        self.value = value if not self._is_known else self.value + self._weight * (value - self.value)
        self._is_known = True


class Draft:
    """Grows the trees of all its sessions in common steps; who comes during a step joins the next."""

    def __init__(self, world: World, grown: Callable[[list[Session]], None]) -> None:
        self.num_sessions = 0  # assigned to it
        self.drafting = Typical(1.0)  # sessions in one step
        self.busy_seconds = 0.0
        self._world, self._grown = world, grown
        self._new: list[Session] = []
        self._ends: list[tuple[int, int, Session]] = []  # step after which each is done
        self._rows, self._count = 0, 0
        self._wake = world.env.event()
        world.env.process(self._run())

    def call(self, session: Session) -> None:
        """A session wants a tree of its `size`."""
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
        """Takes in who has come; tokens of context that they bring."""
        context = 0
        for session in self._new:
            self._count += 1
            heapq.heappush(self._ends, (step + session.size.depth, self._count, session))
            self._rows += session.size.frontier
            context += session.draft_context
            session.draft_context = 0
        self._new.clear()
        return context


Trim = Callable[[Session, int], None]  # of a session, and how many ride


class Target:
    """Sweeps whoever is there, after a short wait for those on their way."""

    def __init__(self, world: World, gather: float, swept: Callable[[list[Session]], None], trim: Trim) -> None:
        """`swept` is told who has a verdict, `trim` makes a tree smaller where more ride than it was planned for."""
        self.slots = SlotMemory(world.profile.target.kv_tokens)
        self.num_running = 0
        self.riders = Typical(1.0)  # trees in a sweep
        self.context = Typical(0.0)  # rows of prompts beside them
        self.tokens = Typical(1.0, SLOW_WEIGHT)  # that a round of one of its sessions brings
        self.sweeps: list[SweepRecord] = []
        self._world, self._swept, self._trim, self._patience = world, swept, trim, gather
        self._waiting: deque[Session] = deque()
        self._return, self._is_return_known = Typical(), False
        self._longest, self._answered = 0.0, 0.0
        self._arrival = world.env.event()
        self._knee = max(CHUNK, world.profile.target.knee())
        world.env.process(self._run())

    def call(self, session: Session) -> None:
        """A session asks for its tree, and what it has of context, to be verified."""
        now = self._world.env.now
        if session.num_rounds:
            self._return.observe(min(now - session.answered, 2 * self._longest))
            self._is_return_known = True
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
            self._longest, self._answered = self._patience * seconds, env.now
            for session in riders:
                session.enter("sweep", env.now)
                session.answered = env.now
            reading = [session for session in riders if session.context]  # before others may lose what they had read
            self._swept(done)
            self._waiting.extendleft(reversed(reading))

    def _gather(self) -> Process:
        """Waits for sessions that draft, at most `gather` sweeps and no longer than they are typically away."""
        typical = self._return.value
        if not self._longest or not self._is_return_known or typical > self._longest:
            return
        env = self._world.env
        until = min(env.now + self._longest, self._answered + SLACK * typical)
        while len(self._waiting) < self.num_running and env.now < until:
            self._arrival = env.event()
            yield self._arrival | env.timeout(until - env.now)

    def _pack(self) -> tuple[list[Session], list[Session], int]:
        """Riders of the next sweep, those of them that get a verdict, and rows: trees, then pieces of prompts."""
        most = self._world.profile.target.max_sweep_rows
        riders: list[Session] = []
        done: list[Session] = []
        reading: list[Session] = []
        left: list[Session] = []
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
                left.append(session)
        beside = min(most, max(self._knee, 2 * rows)) if rows else most  # as target_worker.scheduler.batching
        for session in reading:
            piece = min(session.context, beside - rows)
            if piece <= 0:
                left.append(session)
                continue
            is_read = session.context == piece and rows + piece + session.size.nodes <= most
            piece = piece if is_read or session.context > piece else piece - 1
            if piece:
                riders.append(session)
            else:
                left.append(session)
            session.context -= piece
            rows += piece + (session.size.nodes if is_read else 0)
            if is_read:
                done.append(session)
        self._waiting = deque(left)
        return riders, done, rows


def accepted_of(accepts: list[float], uniform: float) -> int:
    """Nodes that a round accepts: those whose probability by depth is above a random number."""
    return bisect_left(accepts, -uniform)
