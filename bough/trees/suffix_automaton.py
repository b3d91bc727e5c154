"""What followed before where a text now ends: a suffix automaton, and small trees of such continuations.

Knows no models: tokens are numbers, and how likely a continuation is to be right is for the caller to say.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from enum import Enum
from typing import NamedTuple

from bough.trees.tree import Tree

MAX_BRANCH = 4  # continuations of a node that are considered


class Match(NamedTuple):
    """Some `length` tokens that stand in the text, as the automaton knows them."""

    state: int
    length: int


class Follower(NamedTuple):
    """A token that has followed."""

    token: int
    match_length: int  # tokens before it that were the same
    times: int  # that it has followed those
    match: Match  # those tokens and it


class Draft(Enum):
    """What a draft's tree says of a guess."""

    SILENT = 0  # it has guessed nothing below the parent
    OTHERWISE = 1  # it has guessed other tokens there
    UNLIKELY = 2  # it has guessed the token too, with a probability below 0.1,
    POSSIBLE = 3  # below 0.5,
    LIKELY = 4  # or more


class GuessKind(NamedTuple):
    """What is known of a guess before it is verified."""

    match_length: int  # tokens before it that were the same where it stood before
    rank: int  # 0 is the first choice below its parent: longest match, then most frequent, then most recent
    depth: int  # below the root
    draft: Draft = Draft.SILENT


class Context(NamedTuple):
    """A node of a tree in the making: the text with the path to it."""

    node: int
    depth: int
    score: float  # log-probability of the path
    match: Match
    drafted: dict[int, int]  # what the draft has guessed below it: token to the draft's node


class Guesses(NamedTuple):
    """A tree of continuations, and of each of its nodes but the root the kind."""

    tree: Tree
    kinds: tuple[GuessKind, ...]  # (num_nodes - 1,)


class Limits(NamedTuple):
    """What a tree of continuations may be."""

    max_nodes: int  # beside the root
    max_depth: int
    closed: frozenset[int] = frozenset()  # tokens that nothing follows


class SuffixAutomaton:
    """All that stands in a text, to be asked what followed (Blumer et al., 1985: states are sets of places of endings).

    A token takes amortised constant time for the automaton and at most `max_match` steps for the counts. There are at
    most two states and three transitions for each token.
    """

    def __init__(self, max_match: int = 24) -> None:
        self.num_tokens = 0
        self._max_match = max_match  # tokens; longer repetitions are told apart by their last ones only
        self._next: list[dict[int, int]] = [{}]  # by state: token to state
        self._link = [-1]  # by state: the state of its longest suffix that ends in more places
        self._length = [0]  # by state: tokens of its longest string
        self._count = [0]  # by state: how often its strings stand in the text; up to max_match + 1 tokens
        self._last = [0]  # by state: where they stood last
        self._whole = 0  # the state of the whole text
        self._counted = Match(0, 0)  # the end of the text, as far as it is counted

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends to the text."""
        for token in tokens:
            self._append(token)
            self._count_end(token)

    def longest_match(self) -> Match:
        """The longest end of the text, up to `max_match` tokens, that something has followed before."""
        match = self._shortened(self._counted)
        while match.state and not self._next[match.state]:
            match = self._parent(match)
        return match

    def followers(self, match: Match, limit: int) -> list[Follower]:
        """What has followed a match and its own ends: longest first, then most frequent, then most recent."""
        found: dict[int, Follower] = {}
        while match.state and len(found) < limit:
            fresh = [(token, state) for token, state in self._next[match.state].items() if token not in found]
            fresh.sort(key=lambda entry: (-self._count[entry[1]], -self._last[entry[1]]))
            for token, state in fresh[: limit - len(found)]:
                longer = self._shortened(Match(state, match.length + 1))
                found[token] = Follower(token, match.length, self._count[state], longer)
            match = self._parent(match)
        return list(found.values())

    def _append(self, token: int) -> None:
        self.num_tokens += 1
        new = self._add_state({}, self.num_tokens, 0)
        state, self._whole = self._whole, new
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state >= 0:
            self._link[new] = self._ending(state, token)

    def _ending(self, state: int, token: int) -> int:
        """The state of the longest string of `state` with `token`; split off where its state has longer strings."""
        target = self._next[state][token]
        if self._length[target] == self._length[state] + 1:
            return target
        split = self._add_state(self._next[target].copy(), self._length[state] + 1, self._link[target])
        self._count[split], self._last[split] = self._count[target], self._last[target]
        self._link[target] = split
        while state >= 0 and self._next[state].get(token) == target:
            self._next[state][token] = split
            state = self._link[state]
        return split

    def _add_state(self, transitions: dict[int, int], length: int, link: int) -> int:
        self._next.append(transitions)
        self._length.append(length)
        self._link.append(link)
        self._count.append(0)
        self._last.append(0)
        return len(self._next) - 1

    def _count_end(self, token: int) -> None:
        """Counts every end of the text up to max_match + 1 tokens: what follows a match is one longer than it."""
        state, length = self._counted
        self._counted = self._within(Match(self._next[state][token], length + 1), self._max_match + 1)
        state = self._counted.state
        while state:
            self._count[state] += 1
            self._last[state] = self.num_tokens
            state = self._link[state]

    def _shortened(self, match: Match) -> Match:
        return self._within(match, self._max_match)

    def _within(self, match: Match, max_length: int) -> Match:
        """The last tokens of a match, in the state that has them now."""
        state, length = match.state, min(match.length, max_length)
        while state and self._length[self._link[state]] >= length:
            state = self._link[state]
        return Match(state, length)

    def _parent(self, match: Match) -> Match:
        link = self._link[match.state]
        return Match(link, self._length[link])


_BOUNDS = ((Draft.UNLIKELY, math.log(0.1)), (Draft.POSSIBLE, math.log(0.5)))


def grow_continuations(
    text: SuffixAutomaton, drafted: Tree, limits: Limits, log_prob: Callable[[GuessKind], float]
) -> Guesses:
    """The likeliest continuations of a text, by the estimate of each kind of guess; the root is the text's last token.

    Below every node stands what has followed the text with the path to that node. The best path is always extended
    first, so that siblings are best first and the nodes are the `max_nodes` best of those that were considered. What
    the draft has guessed adds no nodes; it is part of a guess's kind.
    """
    tokens, parents, log_probs = [int(drafted.tokens[0])], [-1], [0.0]
    kinds: list[GuessKind] = []
    children = drafted.children()
    heap: list[tuple[float, int, int, GuessKind, Follower, Context]] = []  # parent and rank settle every order

    def consider(parent: Context) -> None:
        if parent.depth >= limits.max_depth or tokens[parent.node] in limits.closed:
            return
        for rank, follower in enumerate(text.followers(parent.match, MAX_BRANCH)):
            draft = _draft(drafted, parent.drafted, follower.token)
            kind = GuessKind(follower.match_length, rank, parent.depth + 1, draft)
            score = parent.score + min(log_prob(kind), 0.0)
            heapq.heappush(heap, (-score, parent.node, rank, kind, follower, parent))

    consider(Context(0, 0, 0.0, text.longest_match(), children[0]))
    while heap and len(kinds) < limits.max_nodes:
        cost, _, _, kind, follower, parent = heapq.heappop(heap)
        tokens.append(follower.token)
        parents.append(parent.node)
        log_probs.append(-cost - parent.score)
        kinds.append(kind)
        drafted_node = parent.drafted.get(follower.token)
        below = children[drafted_node] if drafted_node is not None else {}
        consider(Context(len(kinds), kind.depth, -cost, follower.match, below))
    return Guesses(Tree.of(tokens, parents, log_probs), tuple(kinds))


def _draft(tree: Tree, children: dict[int, int], token: int) -> Draft:
    if token not in children:
        return Draft.OTHERWISE if children else Draft.SILENT
    log_prob = float(tree.log_probs[children[token]])
    return next((draft for draft, bound in _BOUNDS if log_prob < bound), Draft.LIKELY)
