"""The Protocol of sizers: their inputs, their answers, and what they learn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from bough.errors import InvalidTree
from bough.protocol.cost_curve import CostCurve
from bough.protocol.decision import Decision, RoundTimings
from bough.protocol.generation import Speculation
from bough.protocol.ids import ScopedId
from bough.protocol.messages import GrowResult, VerifyResult
from bough.trees.tree import Tree
from bough.trees.tree_plan import NO_TREE, BestFirst, Scheme, TreePlan

MIN_SHARE = 4  # nodes below which sharing does not shrink a tree


def merged(tree: Tree, other: Tree, budget: int) -> Tree:
    """The `budget` best-scoring nodes of the union of both trees, best first.

    A node in both trees gets the larger of its two estimates. A sampled first tree is kept whole, with all
    added nodes after it and no trimming. `draws` lists the sampled nodes, which the scheme verifies; an added node
    is accepted only if the target draws its token itself.

    Raises:
        InvalidTree: the roots differ, or `budget` is below 1.
    """
    assert other.draft_probs is None, "only the first tree may be sampled"
    if tree.tokens[0] != other.tokens[0]:
        raise InvalidTree("tree.tokens[0]", "must be the same in both trees", f"{tree.tokens[0]} and {other.tokens[0]}")
    both = union(tree, other)
    if tree.draft_probs is None:  # parents stay first when sorted, as no child scores higher than its parent
        return both.only(np.argsort(-both.scores(), kind="stable")).trimmed(budget)
    draws = np.arange(1, len(tree), dtype=np.int32) if tree.draws is None else tree.draws
    return replace(both, draft_probs=tree.draft_probs, draws=draws)


def union(tree: Tree, other: Tree) -> Tree:
    """The first tree's nodes, then those only in the other; the `worth` of shared nodes is the larger estimate."""
    known = dict(zip(tree.keys().tolist(), range(len(tree)), strict=True))
    worth, others = tree.estimates.copy(), other.estimates
    added: list[int] = []  # nodes of `other`
    parents_of_added: list[int] = []
    places = [0]  # index in the union of each node of `other`
    for node in range(1, len(other)):
        parent = places[other.parents[node]]
        place = known.get(parent << 32 | int(other.tokens[node]))
        if place is None:
            place = len(tree) + len(added)
            added.append(node)
            parents_of_added.append(parent)
        else:
            worth[place] = max(worth[place], others[node])
        places.append(place)
    return Tree(
        np.concatenate((tree.tokens, other.tokens[added])),
        np.concatenate((tree.parents, np.array(parents_of_added, np.int32))),
        np.concatenate((tree.log_probs, other.log_probs[added])),
        worth=np.minimum(np.concatenate((worth, others[added])), 0.0),  # validation tolerates rounding above 0
    )


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """Facts about a worker that a sizer needs."""

    worker_id: str
    identity: str  # equal for workers that give the same guesses or tokens
    max_nodes: int
    cost: CostCurve | None  # as reported when the worker was introduced
    num_running: int = 1  # sessions that this orchestrator runs at a target, including the one in question


@dataclass(frozen=True, slots=True)
class Situation:
    """The state of a session before a round."""

    session_id: ScopedId
    speculation: Speculation
    temperature: float
    target: WorkerFacts
    draft: WorkerFacts | None  # None if there is none to ask
    num_remaining: int  # limit of tokens still to come
    num_context: int = 0  # tokens before the tree that the target is expected to compute
    num_draft_context: int = 0  # tokens that the draft has not cached
    lookup: int = 0  # limit of guesses from the session's own text


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """Limits of a round's tree, and how to grow it."""

    tree: TreePlan  # for the draft worker; a budget of 1 asks for no tree
    max_nodes: int  # limit to send, root included; samples may not be cut and count in full
    lookup: int  # limit of guesses from the session's own text
    lookup_depth: int = 0  # and of their levels below the root

    @property
    def asks_draft(self) -> bool:
        return self.tree.growth.budget > 1


class Proposal(NamedTuple):
    """The tree to send to the target."""

    tree: Tree
    may_leave_out: bool  # whether the target may cut it further if others share its sweep
    places: NDArray[np.intp]  # (num_drafted,) number of each drafted node in the tree; -1 for those cut
    is_given: bool = False  # its tokens are the prompt's, whose log-probabilities are requested
    scheme: Scheme = Scheme.TARGET  # by which it is verified


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """The result of a round."""

    num_nodes: int  # of the tree sent
    tokens: Sequence[int]  # chosen by the target, including the bonus token
    result: VerifyResult
    grown: GrowResult | None  # None if no draft worker answered or was asked
    draft_network_ns: int  # of the draft call, outside the worker
    target_network_ns: int
    timings: RoundTimings
    num_context: int | None = None  # tokens before the tree that the target has computed; None is as many as planned


class Sizer(Protocol):
    """Decides tree sizes; all limits pass through it."""

    def plan(self, situation: Situation) -> RoundPlan:
        """Plan how to grow the next tree."""

    def propose(self, session_id: ScopedId, drafted: Tree, looked_up: Tree) -> Proposal:
        """Choose the part of the grown tree and the looked-up guesses that is worth verifying."""

    def observe(self, session_id: ScopedId, outcome: RoundOutcome) -> Decision | None:
        """Learn from a round; returns its record, or None if it had no plan."""

    def forget(self, session_id: ScopedId) -> None:
        """Drop the state of a session whose request has ended."""


def whole(drafted: Tree, looked_up: Tree, decision: Decision | None = None, most: int = 0) -> Proposal:
    """The whole drafted tree, or of both trees the `most` best-scoring nodes, by default as many as were drafted.

    Without a `decision` the round has no plan: when one stream takes over another's session, the earlier stream may
    forget the session during the later one's round.
    """
    tree = merged(drafted, looked_up, most or len(drafted)) if len(looked_up) > 1 else drafted
    if decision is not None:
        decision.num_grown = decision.num_sent = len(tree)
    return Proposal(tree, False, np.arange(len(drafted)))


def requested_plan(situation: Situation, size: BestFirst) -> RoundPlan | None:
    """The plan of a request that fixes the size itself, else None.

    `size` supplies the parts of the size that the request does not give.
    """
    speculation = situation.speculation
    if speculation.disabled or situation.num_remaining <= 1:
        return RoundPlan(NO_TREE, 1, 0)
    if speculation.growth is None and speculation.budget is None:
        return None
    budget = speculation.budget or size.budget
    width = speculation.width or min(size.width, max(4, budget // 2))
    growth = speculation.growth or BestFirst(budget, width, speculation.depth or size.depth)
    return limited(TreePlan(growth, speculation.scheme), situation)


def shared_plan(situation: Situation, size: BestFirst, sweep_nodes: int) -> RoundPlan:
    """The plan of a tree of `size`, or less: sessions at one target share the nodes of a sweep.

    Tokens of the prompt that the target needs are deducted from the session's share.
    """
    share = max(MIN_SHARE, sweep_nodes // max(1, situation.target.num_running) - situation.num_context)
    speculation, budget = situation.speculation, min(size.budget, share)
    narrow = min(size.width, max(MIN_SHARE, budget // 2))  # a larger width would hardly save steps
    growth = BestFirst(budget, speculation.width or narrow, speculation.depth or size.depth)
    return limited(TreePlan(growth, speculation.scheme), situation)


def limited(plan: TreePlan, situation: Situation, lookup: int | None = None) -> RoundPlan:
    """The plan within all limits of a round's tree: those of both workers, of the request and of the lookup.

    Without a draft, or if `plan` asks for a root alone, only lookup remains: up to `lookup` guesses, by default as many
    as the tree could have. Guesses from lookup are added to samples; in other trees they replace worse guesses.
    """
    target, speculation, deepest = situation.target, situation.speculation, situation.num_remaining - 1
    most = min(plan.growth.budget if lookup is None else 1 + lookup, target.max_nodes)
    tree = NO_TREE
    if situation.draft is not None:
        # Deeper nodes could not be kept, and may exceed the model's positions.
        growth = plan.growth.limited(min(most, situation.draft.max_nodes), deepest)
        tree = replace(plan, growth=growth) if growth.budget > 1 else NO_TREE
    room = target.max_nodes - tree.growth.budget if tree.scheme.is_sampled else most - 1
    return RoundPlan(tree, most, min(situation.lookup, room), min(speculation.depth or deepest, deepest))
