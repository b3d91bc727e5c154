"""The main loop: plan, grow, propose, verify, commit. Also scores prompts before it, as trees of one path."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from bough.config.processes import OrchestratorConfig
from bough.errors import BoughError, InvalidRequest, InvalidTree, Unavailable
from bough.protocol.codec_fields import like
from bough.protocol.decision import RoundTimings
from bough.protocol.generation import PromptLogprobs, Tokens
from bough.protocol.messages import GrowResult, VerifyResult
from bough.protocol.prefix_hash import TokenHistory
from bough.telemetry.logs import log_session
from bough.tokenization.tokenizer import Tokenizer
from bough.trees.tree import Tree
from bough.trees.tree_plan import TreePlan
from orchestrator.cluster.directory import Directory
from orchestrator.cluster.target_place import TargetPlace
from orchestrator.cluster.worker_clients import Timed
from orchestrator.cluster.worker_handle import DraftHandle, TargetHandle
from orchestrator.opening.recorder import Recorder, request_record, session_record
from orchestrator.rounds.prompt_lookup import Acceptance, LookupLimits, PromptLookup, assumed_probability
from orchestrator.rounds.verifier import Verifier
from orchestrator.sessions.detokenizer import TextStream
from orchestrator.sessions.session import Session, verified_part
from orchestrator.sizing.plans import Proposal, RoundOutcome, RoundPlan, Situation, Sizer, WorkerFacts
from orchestrator.sizing.totals import AcceptanceCounter
from orchestrator.telemetry.request_watch import round_attributes

logger = logging.getLogger(__name__)

NOTHING = Timed(0, 0)
GROWING_SHARE = 0.8  # of a draft call's time limit, since part of a tree is better than a timeout


@dataclass(slots=True)
class Rounds:
    """Runs rounds of sessions with the available workers."""

    config: OrchestratorConfig
    directory: Directory
    sizer: Sizer
    verifier: Verifier
    recorder: Recorder
    acceptance: AcceptanceCounter
    lookups: Acceptance = field(default_factory=lambda: Acceptance(assumed_probability))  # shared by all sessions

    def lookup(self, session: Session, resources: ExitStack) -> PromptLookup:
        """Guesses from the session's text, which is read in the background until its end or until `resources` close."""
        lookup = PromptLookup(self.lookups)
        known = session.tokens[:] if self._num_lookup(session) else ()
        resources.enter_context(lookup.reading(known, self.directory.tokenizing.run))
        return lookup

    async def run(self, session: Session, place: TargetPlace, lookup: PromptLookup) -> Tokens:
        """Run one round, in its own span, with the guesses that are available.

        A draft's failure costs a round its guesses, except for those from the session's own text. A target's failure
        costs the time to continue, possibly at another target, to which its place moves. Raises what `Verifier.verify`
        does.
        """
        log_session(session.session_id)
        with session.trace.child("round", {"bough.round": session.round}) as session.span:
            tokens = await self._round(session, place, lookup)
            if session.span.is_recorded:
                session.span.set(round_attributes(tokens))
        return tokens

    async def _round(self, session: Session, place: TargetPlace, lookup: PromptLookup) -> Tokens:
        await self.directory.limiter.acquire()
        began_ns = time.perf_counter_ns()
        draft = self._draft(session, place.target)
        plan = self.sizer.plan(self._situation(session, place, draft))
        drafted, grown, drafting = await self._grow(session, place.target, draft, plan)
        limits = LookupLimits(plan.lookup, plan.lookup_depth, session.sampling.stop_token_ids)
        guesses = lookup.grow(session.tokens, drafted, limits)
        proposal = self.sizer.propose(session.session_id, drafted, guesses.tree)
        if len(drafted) > 1:  # without samples, all guesses are verified by the target's own scheme
            proposal = proposal._replace(scheme=plan.tree.scheme)
        result, verifying = await self.verifier.verify(session, place, proposal)
        timings = _timings(began_ns, drafting, result, verifying)
        with session.span.child("commit"):
            chosen = result.verdict.tokens_of(proposal.tree)
            num_context = len(session.tokens) - 1 - result.cached_length
            lookup.observe(guesses, chosen)
            self.acceptance.observe(proposal.scheme, *verified_part(proposal.tree, result))
            tokens = session.commit(proposal.tree, drafted, result, timings)
            place.believe(min(result.held_length, len(session.tokens) - 1))
            network_ns = drafting.network_ns, verifying.network_ns
            outcome = RoundOutcome(len(proposal.tree), chosen, result, grown, *network_ns, timings, num_context)
            self.sizer.observe(session.session_id, outcome)
            self.record(session, place)
        return tokens

    def record(self, session: Session, place: TargetPlace) -> None:
        """Have the session recorded in the index. Raises StaleEpoch as `require_held`."""
        known = (session_record(session, place), request_record(session))
        self.recorder.record(*known, place.target.info.model_fingerprint, session.cache_salt)
        self.require_held(session)

    def require_held(self, session: Session) -> None:
        """Raise StaleEpoch if the index has reported that the session was claimed by another request or closed."""
        if session.has_claim:
            self.recorder.require_held(session.session_id)

    def _draft(self, session: Session, target: TargetHandle) -> DraftHandle | None:
        """The draft worker to ask, if a tree is wanted and one is usable."""
        if self.config.draft == "none" or session.speculation.disabled or session.num_remaining <= 1:
            return None
        draft = self.directory.draft(target, session.session_id, session.draft_id)
        if draft is None:
            session.num_degraded_rounds += 1
            session.warn("no draft worker could be used: some rounds went without")
        return draft

    def _situation(self, session: Session, place: TargetPlace, draft: DraftHandle | None) -> Situation:
        """The sizer's input. Sampled schemes use prompt lookup only if the request asks for it.

        Sampled schemes draw again in every round: the same seed gives the same text only if rounds end at the same
        tokens, and lookup depends on other sessions' experience.
        """
        speculation = session.speculation
        num_before = len(session.tokens) - 1
        draft_held = session.draft_held if draft and draft.record.worker_id == session.draft_id else 0
        return Situation(
            session.session_id,
            speculation,
            session.sampling.temperature,
            like(WorkerFacts, place.target.info, num_running=place.target.num_running),
            like(WorkerFacts, draft.info, num_running=1) if draft is not None else None,
            session.num_remaining,
            num_before - max(place.held, session.target_cached),
            num_before - draft_held,
            self._num_lookup(session),
        )

    def _num_lookup(self, session: Session) -> int:
        """Limit of guesses from the text."""
        if session.speculation.lookup is not None:
            return session.speculation.lookup
        return 0 if session.speculation.scheme.is_sampled else self.config.lookup

    async def _grow(
        self, session: Session, target: TargetHandle, draft: DraftHandle | None, plan: RoundPlan
    ) -> tuple[Tree, GrowResult | None, Timed]:
        """A draft worker's tree, or the root alone if none is wanted or available."""
        root = Tree.root(session.tokens[-1])
        if draft is None or not plan.asks_draft:
            return root, None, NOTHING
        session.assign_draft(draft.record.worker_id)
        draft.num_running += 1
        try:
            vocab_size, timeout = target.info.vocab_size, session.deadline.within(self.config.draft_timeout)
            in_time = plan.tree.in_time(GROWING_SHARE * timeout)
            result, timed = await draft.client.grow(session, in_time, vocab_size, timeout)
            _require_fit(result.tree, session.tokens[-1], vocab_size, plan.tree)
        except BoughError as exc:
            logger.warning("%s: %s", draft.record.worker_id, exc)
            if isinstance(exc, Unavailable):
                draft.health.lost()
            # Refusing a request, such as a context longer than the draft's own, is no fault.
            elif isinstance(exc, InvalidTree) or not isinstance(exc, InvalidRequest):
                draft.health.failed(session.session_id)
            session.draft_held = 0
            session.num_degraded_rounds += 1
            session.span.event("degraded", {"bough.worker": draft.record.worker_id, "error.type": type(exc).__name__})
            session.warn(f"a draft worker failed ({exc}): some rounds went without")
            return root, None, NOTHING
        finally:
            draft.num_running -= 1
        draft.health.succeeded(session.session_id)
        session.draft_held = result.held_length
        return result.tree, result, timed


def _require_fit(tree: Tree, root_token: int, vocab_size: int, plan: TreePlan) -> None:
    """Check a draft worker's tree like any other untrusted input. Raises InvalidTree."""
    tree.validate(vocab_size, plan.growth.budget, plan.scheme)
    if not plan.scheme.is_sampled and not (tree.draft_probs is None and tree.draws is None):
        raise InvalidTree("tree.draft_probs", "must be left out, with draws, as no sample was requested")
    if (depth := int(tree.depths().max())) > plan.growth.depth:
        raise InvalidTree("tree", f"must have at most {plan.growth.depth} levels", depth)
    if int(tree.tokens[0]) != root_token:
        raise InvalidTree("tree.tokens[0]", f"must be the root {root_token}", tree.tokens[0])


def _timings(began_ns: int, drafting: Timed, result: VerifyResult, verifying: Timed) -> RoundTimings:
    return like(
        RoundTimings,
        result.timings,
        total_ns=time.perf_counter_ns() - began_ns,
        draft_ns=drafting.total_ns - drafting.network_ns,
        network_ns=drafting.network_ns + verifying.network_ns,
        target_ns=result.timings.total_ns,
    )


@dataclass(slots=True)
class PromptScoring:
    """The log-probabilities of a session's prompt, one tree of tokens at a time, each with `num_top` alternatives.

    The whole prompt is computed even if the target has cached it. Afterwards the target has cached all of it.
    """

    session: Session
    place: TargetPlace
    verifier: Verifier
    num_top: int
    _begins: tuple[int, ...] = ()  # of all tokens
    _num_scored: int = 0

    @property
    def is_over(self) -> bool:
        return self._num_scored == self.session.prompt_length

    async def next(self) -> PromptLogprobs:
        """The next tokens' log-probabilities; the first token has none.

        Raises what a round does, and InvalidRequest if the target does not score given tokens.
        """
        session, place, begin = self.session, self.place, self._num_scored
        if begin == 0:
            prompt, tokenizer = [*session.tokens[: session.prompt_length]], place.target.tokenizer
            self._begins = await self.verifier.directory.tokenizing.run(lambda: token_begins(tokenizer, prompt))
            place.believe(0)
            session.cached_tokens, self._num_scored = 0, 1
            return PromptLogprobs(tuple(prompt[:1]), (), self._begins[:1])
        # The last scored token is the root: its keys and values count as missing.
        end = min(begin - 1 + place.target.info.max_nodes, session.prompt_length)
        chain = [*session.tokens[begin - 1 : end]]
        proposal = Proposal(Tree.chain(chain), False, np.zeros(0, np.intp), is_given=True)
        with session.trace.child("score") as session.span, _standing_at(session, begin, self.num_top):
            result, _ = await self.verifier.verify(session, place, proposal)
            session.round += 1
        if [at.token.token_id for at in result.verdict.logprobs] != chain[1:]:
            raise InvalidRequest("prompt_logprobs", "must be left out, as this target worker is older and reports none")
        self._num_scored = end
        place.believe(min(result.held_length, end - 1))
        return PromptLogprobs(tuple(chain[1:]), result.verdict.logprobs, self._begins[begin:end])


@contextmanager
def _standing_at(session: Session, length: int, num_top: int) -> Iterator[None]:
    """The session as if its prompt had `length` tokens."""
    before = session.tokens, session.sampling
    session.tokens = TokenHistory(session.tokens[:length])
    session.sampling = replace(session.sampling, logprobs=num_top)
    try:
        yield
    finally:
        session.tokens, session.sampling = before


def token_begins(tokenizer: Tokenizer, prompt: Sequence[int]) -> tuple[int, ...]:
    """Where each token of a prompt begins in the text of `decode_prompt`; added special tokens take no room."""
    text = TextStream(partial(tokenizer.decode_showing, shown=tokenizer.special_tokens))
    num_added = tokenizer.num_added(prompt)
    begins = [0] * num_added
    for token in prompt[num_added:]:
        begins.append(text.length)
        text.push(token)
    return tuple(begins)
