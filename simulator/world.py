"""Sessions, drafts and targets in simulated time: the real sizer, slots, batching, row division and estimators.

A profile (`bough.simulation.profile`) has the durations; a text (`simulator.guesses`) has the guesses and the true
tokens. Nothing depends on the real clock or on the order of threads, so runs are repeatable.
Draft-ahead, prompt lookup and failures are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any, NamedTuple

import simpy

from bough.errors import BoughError, Exhausted, Preempted, PrefixMissing
from bough.model.kv.arena import Arena
from bough.model.sizes.target_limits import TargetLimits
from bough.protocol.decision import RoundTimings
from bough.protocol.generation import Speculation
from bough.protocol.ids import ScopedId
from bough.protocol.messages import Context, GrowResult, Timings, VerifyCall, VerifyResult
from bough.protocol.prefix_hash import TokenHistory
from bough.protocol.sampling_params import SamplingParams
from bough.simulation.profile import ROW_BYTES, Factors, Profile, SweepSeconds
from bough.sizing.sweep_times import SweepTimes
from bough.trees.tree import Tree
from bough.trees.tree_plan import BestFirst, TreePlan
from orchestrator.sizing.plans import Proposal, RoundOutcome, Situation, Sizer, WorkerFacts
from simulator.guesses import Grown, Text
from target_worker.kv.slot_pool import SlotPool
from target_worker.scheduler.batching import Part
from target_worker.scheduler.engine import SharedSweeps
from target_worker.scheduler.job import SweepShare, VerifyJob

SECOND = 1e9
PRIOR_ERROR = 1.3  # ratio of a target's estimated to its true seconds before the first sweep
LEAST_PREFILL = 8  # context tokens that a draft step reads at no extra cost
PARTS = ("place", "draft", "network", "queue", "sweep")  # of a session's time
LEASE_SECONDS = 60.0  # the targets' default
CALLER = "orchestrator"
Process = Generator[simpy.Event, Any, Any]


@dataclass(slots=True, eq=False)
class Session:
    """A session: its request, its workers, and the parts of its time."""

    session_id: ScopedId
    text: Text
    prompt_tokens: int
    num_tokens: int
    number: int = 0  # in the order in which sessions begin
    asked: float = 0.0  # times are seconds on the world's clock
    first: float = 0.0  # its first tokens
    ended: float = 0.0
    num_made: int = 0
    num_rounds: int = 0
    target_held: int = 0
    draft_held: int = 0
    since: float = 0.0  # when its current activity began
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    @property
    def position(self) -> int:
        """Of the root of its next tree."""
        return self.prompt_tokens + self.num_made

    @property
    def ttft(self) -> float:
        """Seconds to its first tokens."""
        return self.first - self.asked

    @property
    def latency(self) -> float:
        """Seconds to its last token."""
        return self.ended - self.asked

    def spent(self, part: str, now: float) -> None:
        """Account the time since the last call to a part."""
        self.parts[part] += now - self.since
        self.since = now


@dataclass(slots=True)
class _Growing:
    """A call that waits at a draft."""

    grown: Grown
    num_context: int
    arrived: float
    done: simpy.Event
    num_passes: int = 0

    @property
    def rows(self) -> int:
        """Rows of its next step; 0 if it is grown."""
        return self.grown.rows[self.num_passes] if self.num_passes < len(self.grown.rows) else 0


class Draft:
    """Grows the trees of its sessions in shared steps; those that arrive during a step join the next."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.num_sessions = 0
        self.busy_seconds = 0.0
        self._world = world
        self._growing: list[_Growing] = []
        self._wakes = world.env.event()
        self._times = SweepTimes(1, world.profile.target.max_nodes)
        world.env.process(self._run())

    def facts(self) -> WorkerFacts:
        """What a sizer knows of it."""
        return WorkerFacts(self.name, "draft", self._world.profile.target.max_nodes, self._times.curve())

    def grow(self, grown: Grown, num_context: int) -> simpy.Event:
        """Grow a tree, which takes simulated time; the event has a GrowResult."""
        growing = _Growing(grown, num_context, self._world.env.now, self._world.env.event())
        self._growing.append(growing)
        if not self._wakes.triggered:
            self._wakes.succeed()
        return growing.done

    def _run(self) -> Process:
        world, env, profile = self._world, self._world.env, self._world.profile.draft
        while True:
            for growing in [each for each in self._growing if not each.rows]:
                self._growing.remove(growing)
                total = round((env.now - growing.arrived) * SECOND)
                timings = Timings(total, 0, compute_ns=total, num_passes=growing.num_passes)
                growing.done.succeed(GrowResult(growing.grown.tree, 0, timings, 0, self._times.curve()))
            if not self._growing:
                self._wakes = env.event()
                yield self._wakes
                continue
            stepping = [*self._growing]
            rows = sum(each.rows for each in stepping)
            new = [each.num_context for each in stepping if each.num_passes == 0]
            num_context = sum(number for number in new if number > LEAST_PREFILL)
            seconds = profile.step(rows, num_context, world.factors(), world.random)
            yield env.timeout(seconds)
            self.busy_seconds += seconds
            if num_context == 0:
                self._times.observe(rows, seconds)
            for each in stepping:
                each.num_passes += 1


class SweepRecord(NamedTuple):
    """One sweep."""

    ended: float
    seconds: SweepSeconds
    rows: int
    riders: int


class Target:
    """Sweeps over the calls of its sessions in simulated time."""

    def __init__(self, world: World, name: str, gather: float) -> None:
        profile = world.profile.target
        self.name, self.num_sessions, self.sweeps = name, 0, list[SweepRecord]()
        self._world, self._profile = world, profile
        limits = TargetLimits(profile.row_step, profile.max_sweep_rows, profile.max_nodes, profile.max_context)
        self.pool = SlotPool(Arena(profile.kv_tokens, ROW_BYTES), LEASE_SECONDS, lambda: world.env.now, limits.kv_step)
        self._sweeps = SharedSweeps(self.pool, limits, profile.known_times(PRIOR_ERROR), profile.chunk_rows, gather)
        self._delay = self._sweeps.delay
        self._texts: dict[ScopedId, tuple[Session, float]] = {}  # by session: of the call in flight, and when it came
        self._arrived: list[tuple[Session, VerifyCall, simpy.Event]] = []
        self._line: dict[int, simpy.Event] = {}  # sessions that wait for KV memory, by number
        self._wakes = world.env.event()
        world.env.process(self._run())

    @property
    def num_running(self) -> int:
        """Sessions that do not wait for KV memory."""
        return self.num_sessions - len(self._line)

    def facts(self) -> WorkerFacts:
        """What a sizer knows of it."""
        return WorkerFacts(self.name, "target", self._profile.max_nodes, self._sweeps.cost, self.num_running)

    def verify(self, session: Session, call: VerifyCall) -> simpy.Event:
        """Verify a tree; the event has a VerifyResult, or fails with an error of `bough.errors`."""
        done = self._world.env.event()
        self._arrived.append((session, call, done))
        self._delay.arrived(session.session_id, self._world.env.now, CALLER, self.num_running)
        if not self._wakes.triggered:
            self._wakes.succeed()
        return done

    @property
    def has_line(self) -> bool:
        """Whether sessions wait for KV memory."""
        return bool(self._line)

    def room(self, session: Session) -> simpy.Event:
        """Queue until there may be room for a session; older ones come first."""
        self._line[session.number] = self._world.env.event()
        return self._line[session.number]

    def leave(self, session: Session) -> None:
        """Forget a session that has ended."""
        self._delay.left(session.session_id)
        self.pool.release(session.session_id)
        self._offer_room()

    def _offer_room(self) -> None:
        if self._line and not (first := self._line[min(self._line)]).triggered:
            first.succeed()

    def _admit(self) -> None:
        """Admit the calls that have arrived; between sweeps, as slots may be taken from others."""
        arrived, self._arrived = self._arrived, []
        for session, call, done in arrived:
            future: Future[VerifyResult] = Future()
            future.add_done_callback(partial(_pass_on, done))
            try:
                self._sweeps.calls.admit(call, future, 0)
            except (Exhausted, PrefixMissing) as exc:
                self._delay.left(session.session_id)
                future.set_exception(exc)
            else:
                self._texts[session.session_id] = session, self._world.env.now
                if self._line.pop(session.number, None) is not None:  # perhaps there is room for another, too
                    self._offer_room()

    def _run(self) -> Process:
        env = self._world.env
        while True:
            self._admit()
            if (wait := self._sweeps.wait_seconds(env.now)) == 0.0:
                yield from self._sweep(self._sweeps.choose())
                yield env.timeout(0)  # sessions that return at once arrive before the next sweep begins
                continue
            self._wakes = env.event()
            yield self._wakes if wait is None else self._wakes | env.timeout(wait)

    def _sweep(self, parts: Sequence[Part[VerifyJob]]) -> Process:
        world, target, began = self._world, self._profile, self._world.env.now
        rows = sum(part.num_tokens for part in parts)
        seconds = target.sweep(rows, world.factors(), world.random)
        yield world.env.timeout(seconds.total)
        num_bytes, ratio = round(target.link_seconds_of(rows) * SECOND), target.expert_ratio(rows)
        self._sweeps.observe_times(rows, seconds.total, seconds.waited, num_bytes, ratio)
        now = world.env.now
        self.sweeps.append(SweepRecord(now, seconds, rows, len(parts)))
        share = SweepShare.of(parts, self._sweeps.cost)
        for part in parts:
            job, timings = part.job, Timings(compute_ns=round((now - began) * SECOND), num_passes=1)
            self._sweeps.commit(part, timings, 0, share)
            if part.has_tree:
                session, arrived = self._texts.pop(job.call.context.session_id)
                job.timings = replace(timings, queue_ns=round((began - arrived) * SECOND))  # until the tree's own sweep
                verdict = session.text.verdict(len(job.text.tokens), job.tree)
                self._sweeps.answer(job, verdict, share, arrived, lambda: now)
        self._sweeps.ended(seconds.total, now)


class World:
    """Sessions at drafts and targets of one profile, and an orchestrator's sizer."""

    def __init__(
        self,
        profile: Profile,
        sizer: Sizer,
        speculation: Speculation,
        seed: int,
        num_targets: int = 1,
        num_drafts: int = 1,
        gather: float = 1.0,
    ) -> None:
        self.env = simpy.Environment()
        self.profile, self.random = profile, Random(seed)
        self.factors: Callable[[], Factors] = lambda: profile.factors_at(self.env.now)
        self.targets = [Target(self, f"target {number}", gather) for number in range(num_targets)]
        self.drafts = [Draft(self, f"draft {number}") for number in range(num_drafts)]
        self.num_tokens = 0  # generated by all sessions
        self.num_preemptions = 0
        self.observe_round: Callable[[Tree, int], None] = lambda *_: None  # the tree that was sent, and its tokens
        self._sizer, self._speculation = sizer, speculation
        self._num_sessions = 0

    def run(self, sessions: Sequence[Session]) -> dict[ScopedId, float]:
        """Run sessions concurrently, to their ends; returns the seconds of each."""
        processes = [self.env.process(self.generate(session)) for session in sessions]
        self.env.run(until=self.env.all_of(processes))
        return {session.session_id: session.latency for session in sessions}

    def generate(self, session: Session) -> Process:
        """Run a session's rounds at the workers with the fewest sessions, like `orchestrator.rounds.round`."""
        self._num_sessions += 1
        session.number, session.asked, session.since = self._num_sessions, self.env.now, self.env.now
        index = min(range(len(self.targets)), key=lambda index: self.targets[index].num_sessions)
        target, draft = self.targets[index], self._draft(index)
        history = TokenHistory([session.number] * session.prompt_tokens)
        history.append(session.text.root(session.position))
        target.num_sessions += 1
        if draft is not None:
            draft.num_sessions += 1
        while session.num_made < session.num_tokens:
            tokens = yield from self._round(session, target, draft, history)
            session.num_made += len(tokens)
            for token in (*tokens[:-1], session.text.root(session.position)):
                history.append(token)
            session.first = session.first or self.env.now
            session.num_rounds += 1
            self.num_tokens += len(tokens)
        session.ended = self.env.now
        self._sizer.forget(session.session_id)
        target.leave(session)
        target.num_sessions -= 1
        if draft is not None:
            draft.num_sessions -= 1

    def _draft(self, index: int) -> Draft | None:
        """The draft with the fewest sessions of those that serve a target: sessions of a sweep share draft steps."""
        num_targets, num_drafts = len(self.targets), len(self.drafts)
        begin = index * num_drafts // num_targets
        own = self.drafts[begin : max(begin + 1, (index + 1) * num_drafts // num_targets)]
        return min(own, key=lambda each: each.num_sessions, default=None)

    def _round(self, session: Session, target: Target, draft: Draft | None, history: TokenHistory) -> Process:
        """One round; returns its tokens."""
        began, position = self.env.now, session.position
        situation = Situation(
            session.session_id,
            self._speculation,
            0.0,
            target.facts(),
            draft.facts() if draft is not None else None,
            session.num_tokens - session.num_made,
            position - session.target_held,
            position - session.draft_held,
        )
        plan = self._sizer.plan(situation)
        root, grown = history[-1], None
        drafted = Tree.root(root)
        if plan.asks_draft and draft is not None:
            grown = yield from self._grow(session, draft, plan.tree)
            drafted = grown.tree
        proposal = self._sizer.propose(session.session_id, drafted, Tree.root(root))
        result = yield from self._verify(session, target, proposal, history)
        tokens = result.verdict.tokens_of(proposal.tree)
        one_way = round(self._network() * SECOND)
        timings = RoundTimings(
            total_ns=round((self.env.now - began) * SECOND),
            draft_ns=grown.timings.total_ns if grown is not None else 0,
            network_ns=(2 if grown is not None else 1) * one_way,
            target_ns=result.timings.total_ns,
            queue_ns=result.timings.queue_ns,
        )
        outcome = RoundOutcome(
            len(proposal.tree), tokens, result, grown, one_way if grown is not None else 0, one_way, timings
        )
        self._sizer.observe(session.session_id, outcome)
        self.observe_round(proposal.tree, len(tokens))
        return tokens

    def _network(self) -> float:
        return self.profile.network.call_seconds(self.factors())

    def _cross(self, session: Session) -> Process:
        """Take the network time of a call, both ways."""
        if seconds := self._network():
            yield self.env.timeout(seconds)
            session.spent("network", self.env.now)

    def _grow(self, session: Session, draft: Draft, plan: TreePlan) -> Process:
        yield from self._cross(session)
        assert isinstance(plan.growth, BestFirst)
        grown = session.text.grow(session.position, plan.growth)
        result: GrowResult = yield draft.grow(grown, session.position - session.draft_held)
        session.draft_held = session.position
        session.spent("draft", self.env.now)
        return result

    def _verify(self, session: Session, target: Target, proposal: Proposal, history: TokenHistory) -> Process:
        """Send a tree until it is verified; if the session has lost its slot, send all tokens again."""
        yield from self._cross(session)
        if target.has_line and not session.target_held:
            yield target.room(session)
            session.spent("place", self.env.now)
        while True:
            call = VerifyCall(
                Context.of(session.session_id, history, session.target_held, session.prompt_tokens),
                epoch=session.number,
                round=session.num_rounds,
                tree=proposal.tree,
                sampling=GREEDY,
                max_length=session.prompt_tokens + session.num_tokens,
                caller=CALLER,
                num_running=target.num_running,
                may_leave_out=proposal.may_leave_out,
            )
            try:
                result: VerifyResult = yield target.verify(session, call)
            except PrefixMissing:
                session.target_held = 0
            except Exhausted as exc:
                if isinstance(exc, Preempted) and session.target_held:
                    self.num_preemptions += 1
                    session.target_held = 0
                yield target.room(session)
                session.spent("place", self.env.now)
            else:
                break
        queued = result.timings.queue_ns / SECOND
        session.parts["queue"] += queued
        session.since += queued
        session.spent("sweep", self.env.now)
        session.target_held = result.held_length
        return result


GREEDY = SamplingParams(temperature=0.0)


def _pass_on(done: simpy.Event, future: Future[VerifyResult]) -> None:
    """Succeed or fail as a future did."""
    try:
        done.succeed(future.result())
    except BoughError as exc:
        done.fail(exc)
