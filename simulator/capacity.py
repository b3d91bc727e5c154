"""Users of a fleet who think, ask and wait (`bough simulate`): a closed network around a `World`.

Of many identical targets only a share is simulated, and of many waiting users only as many as keep all slots taken.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from bough.protocol.generation import Speculation
from bough.simulation.law import Law
from bough.simulation.tokenizer import FIRST_WORD, NUM_WORDS
from bough.trees.tree import Tree
from bough.trees.tree_plan import BestFirst
from orchestrator.sizing.tree_sizer import TreeSizer
from simulator.guesses import PooledText
from simulator.measuring import Measured, report
from simulator.scenario import CapacityReport, RequestKind, Scenario
from simulator.world import Process, Session, World

LEAST_REQUESTS, MOST_REQUESTS = 30, 150  # measured; within these, half as many as there are users
LEAST_LEFT_OUT, MOST_LEFT_OUT = 2, 100  # before measuring, likewise, as all users begin at once
CROWD = 2.0  # users, as a multiple of the KV slots, beyond which more users only wait longer
DEFAULT_SIZE, MAX_DEPTH = BestFirst(64, 16, 7), 24  # an orchestrator's defaults


def simulate(scenario: Scenario) -> CapacityReport:
    """Run until enough requests are measured; deterministic for a scenario and its seed.

    The waiting time of users who are not simulated follows from Little's law.

    Raises:
        ConfigError: a request does not fit a target, or no request ends within the rounds that are simulated.
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
        """Ask, wait for the answer, and think; at first in the midst of an answer, or of thinking."""
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
        law = Law(kind.acceptance or self._scenario.profile.acceptance, FIRST_WORD, NUM_WORDS)
        num_tokens = max(1, round(share * kind.output_tokens))
        return Session(str(self._num_asked), PooledText(law, self._random), kind.prompt_tokens, num_tokens)

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
