"""The main loop: plan, grow, verify, commit."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace

from bough.config import OrchestratorConfig
from bough.errors import BoughError, InvalidRequest, InvalidTree
from bough.generation import Tokens
from bough.growth import Scheme, TreePlan
from bough.merge import merged
from bough.messages import RoundTimings, VerifyResult
from bough.ngram import Limits
from bough.tree import Tree
from orchestrator.acceptance import AcceptanceCounter
from orchestrator.calibration import Calibrations
from orchestrator.directory import Directory, Known
from orchestrator.failover import Failover
from orchestrator.lookup import Acceptance, Lookup, assumed_probability
from orchestrator.planner import Planner, Rest, RoundOutcome
from orchestrator.recorder import Recorder
from orchestrator.seat import Seat
from orchestrator.session import Session
from orchestrator.transcripts import request_record, session_record
from orchestrator.workers import TargetClient, Timed

logger = logging.getLogger(__name__)

NOTHING = Timed(0, 0)
GROWING_SHARE = 0.8  # of a draft call's time limit: a part of a tree is worth more than none, and is no fault


@dataclass(slots=True)
class Rounds:
    """Runs sessions to their end with whatever workers there are."""

    config: OrchestratorConfig
    directory: Directory
    planner: Planner
    failover: Failover
    recorder: Recorder
    acceptance: AcceptanceCounter
    calibrations: Calibrations = field(default_factory=Calibrations)
    lookups: Acceptance = field(default_factory=lambda: Acceptance(assumed_probability))  # of all sessions

    async def run(self, session: Session, seat: Seat) -> AsyncGenerator[Tokens]:
        """Rounds of a session until it is finished. A draft's fault costs a round its guesses, and nothing else.

        Below the draft worker's tree in the ladder is what the session's own text suggests; below that a root alone. A
        target's fault costs the time that it takes to go on, perhaps at another target's seat.

        Raises:
            Unavailable: no target could be used for too long.
            Exhausted: no KV slot became free in time.
            StaleEpoch: another orchestrator has the session.
        """
        lookup = Lookup(self.lookups)
        while not session.is_finished:
            began_ns = time.perf_counter_ns()
            plan = self._plan(session, seat.target)
            drafted, drafting = await self._grow(session, seat.target, plan)
            if len(drafted) == 1:  # nothing was drawn: whatever is added is judged by what the target draws
                plan = replace(plan, scheme=Scheme.TARGET)
            guesses = lookup.grow(session.tokens, drafted, self._lookup_limits(session, seat.target, plan))
            tree = merged(drafted, guesses.tree, plan.growth.budget) if guesses.kinds else drafted
            result, verifying = await self.failover.verify(session, seat, tree, plan.scheme)
            timings = _timings(began_ns, drafting, result, verifying)
            lookup.observe(guesses, result.verdict.tokens_of(tree))
            self.calibrations.observe(session.draft_id, plan, drafted, result.verdict.tokens_of(tree))
            tokens = session.commit(tree, drafted, result, timings)
            self.planner.observe(session.session_id, _outcome(plan, tokens, result))
            self.acceptance.observe(plan.scheme, tree, result.verdict.accepted_nodes)
            self.record(session, seat.target)
            yield tokens

    def _plan(self, session: Session, target: Known[TargetClient]) -> TreePlan:
        rest = Rest(target.num_running, len(session.tokens) - 1 - session.target_held)
        plan = self.planner.plan(session.session_id, session.num_left, session.speculation, rest)
        # What is deeper could not be kept, and might lie beyond the positions that the target can place.
        return plan.within(target.info.max_nodes).no_deeper(session.num_left - 1)

    def record(self, session: Session, target: Known[TargetClient]) -> None:
        """The index hears of it, in time."""
        known = (session_record(session, target.record.worker_id), request_record(session))
        self.recorder.record(*known, target.info.model_fingerprint)

    def _lookup_limits(self, session: Session, target: Known[TargetClient], plan: TreePlan) -> Limits:
        """Additions to a sample come beside it, other guesses in place of worse ones of the draft's.

        To a sample only where they are asked for: it is drawn anew where a round ends, so that the same seed gives the
        same text only while rounds end alike, and what is looked up depends on what other sessions have taught.
        They reach no deeper than `depth`, where that is asked for, and than tokens are left to guess.
        """
        is_sample = plan.scheme is not Scheme.TARGET
        wanted = session.speculation.lookup
        if wanted is None:
            wanted = 0 if is_sample else self.config.lookup
        room = target.info.max_nodes - plan.growth.budget if is_sample else plan.growth.budget - 1
        depth = min(session.speculation.depth or session.num_left, session.num_left - 1)
        return Limits(min(wanted, room), depth, session.sampling.stop_token_ids)

    async def _grow(self, session: Session, target: Known[TargetClient], plan: TreePlan) -> tuple[Tree, Timed]:
        """A draft worker's tree, or its root alone where none is wanted or none can be had."""
        root = Tree.root(session.tokens[-1])
        if plan.growth.budget == 1 or self.config.draft == "none":
            return root, NOTHING
        draft = self.directory.draft(target, session.draft_id)
        if draft is None:
            session.num_degraded_rounds += 1
            session.warn("no draft worker could be used: some rounds went without")
            return root, NOTHING
        session.seat_draft(draft.record.worker_id)
        plan = plan.within(draft.info.max_nodes)
        draft.num_running += 1
        try:
            vocab_size, timeout = target.info.vocab_size, session.patience.within(self.config.draft_timeout)
            in_time = plan.in_time(GROWING_SHARE * timeout)
            result, timed = await draft.client.grow(session, in_time, vocab_size, timeout)
            _require_fit(result.tree, session.tokens[-1], vocab_size, plan)
        except BoughError as exc:
            logger.warning("%s: %s", draft.record.worker_id, exc)
            # What it refuses of this request (say, a longer context than it has) is no reason to spare it others.
            draft.report(is_fault=isinstance(exc, InvalidTree) or not isinstance(exc, InvalidRequest))
            session.draft_held = 0
            session.num_degraded_rounds += 1
            session.warn(f"a draft worker failed ({exc}): some rounds went without")
            return root, NOTHING
        finally:
            draft.num_running -= 1
        draft.report(is_fault=False)
        session.draft_held = result.held_length
        return result.tree, timed


def _require_fit(tree: Tree, root_token: int, vocab_size: int, plan: TreePlan) -> None:
    """A draft worker is not trusted: what it sends is checked like any other input.

    Raises:
        InvalidTree: it is no tree, or not the one that was asked for.
    """
    tree.validate(vocab_size, plan.growth.budget, plan.scheme)
    if plan.scheme is Scheme.TARGET and not (tree.draft_probs is None and tree.draws is None):
        raise InvalidTree("tree.draft_probs: no sample was asked for; a tree without draft_probs and draws would do")
    if (depth := int(tree.depths().max())) > plan.growth.depth:
        raise InvalidTree(f"tree: {depth} levels; at most {plan.growth.depth} were asked for")
    if int(tree.tokens[0]) != root_token:
        raise InvalidTree(f"tree.tokens[0]: {tree.tokens[0]} is not the root {root_token} that was asked for")


def _timings(began_ns: int, drafting: Timed, result: VerifyResult, verifying: Timed) -> RoundTimings:
    target = result.timings
    return RoundTimings(
        total_ns=time.perf_counter_ns() - began_ns,
        draft_ns=drafting.total_ns - drafting.network_ns,
        network_ns=drafting.network_ns + verifying.network_ns,
        target_ns=target.total_ns,
        queue_ns=target.queue_ns,
        wait_ns=target.wait_ns,
        compute_ns=target.compute_ns,
        link_ns=target.link_ns,
        link_bytes=target.link_bytes,
        link_ideal_ns=target.link_ideal_ns,
    )


def _outcome(plan: TreePlan, tokens: Tokens, result: VerifyResult) -> RoundOutcome:
    accepted = len(result.verdict.accepted_nodes)
    return RoundOutcome(plan, tokens.num_nodes, tokens.tree_depth, accepted, tokens.timings)
