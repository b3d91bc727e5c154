"""Prompt lookup: a suffix automaton finds earlier continuations in a session's text, with estimates of how often
such guesses are right."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from typing import NamedTuple

import numpy as np

from bough.trees.tree import Tree

Run = Callable[[Callable[[], None]], Awaitable[None]]

MAX_BRANCH = 4  # continuations considered for each node
PRIOR_WEIGHT = 8.0  # of an estimate's prior, in trials
MEMORY = 500.0  # trials of a kind, after which older ones weigh less
MAX_READ = 1024  # tokens read at once: a long prompt must not delay other sessions


class TextMatch(NamedTuple):
    """A string of `length` tokens that occurs in the text, and its automaton state."""

    state: int
    length: int


class Follower(NamedTuple):
    """A token that followed an earlier occurrence of a match."""

    token: int
    match_length: int  # tokens in the match
    times: int  # occurrences of the match followed by this token
    match: TextMatch  # the match extended by this token


class DraftOpinion(IntEnum):
    """Whether the draft model's tree agrees with a guess from lookup."""

    SILENT = 0  # the draft has no children below the same parent
    OTHERWISE = 1  # the draft has only other tokens there
    UNLIKELY = 2  # the draft has the same token, with a probability below 0.1
    POSSIBLE = 3  # the same token, with a probability from 0.1 to below 0.5
    LIKELY = 4  # the same token, with a probability of 0.5 or more


class GuessKind(NamedTuple):
    """Features of a guess that predict whether it is accepted."""

    match_length: int  # tokens in the match before the guess
    rank: int  # among its siblings, from 0: longest match, then most frequent, then most recent
    depth: int  # levels below the root
    draft: DraftOpinion = DraftOpinion.SILENT


class LookupContext(NamedTuple):
    """A node of a growing tree, with the match of the text followed by the node's path."""

    node: int
    depth: int
    score: float  # log-probability of the path
    match: TextMatch
    drafted: dict[int, int]  # the draft's children of the same node: token to node in the draft's tree


class Guesses(NamedTuple):
    """A tree of continuations, and the kind of each node but the root."""

    tree: Tree
    kinds: tuple[GuessKind, ...]  # (num_nodes - 1,)


class LookupLimits(NamedTuple):
    """LookupLimits of a tree of continuations."""

    max_nodes: int  # not counting the root
    max_depth: int
    stop_tokens: frozenset[int] = frozenset()  # nodes with these tokens get no children


class SuffixAutomaton:
    """An online suffix automaton (Blumer et al., 1985) with occurrence counts.

    A state is the set of strings that end at the same positions. Appending a token takes amortised constant time for
    the automaton and at most `max_match` steps for the counts; there are at most two states and three transitions for
    each token.
    """

    def __init__(self, max_match: int = 24) -> None:
        self.num_tokens = 0
        self._max_match = max_match  # tokens; longer matches are cut to their last max_match
        self._next: list[dict[int, int]] = [{}]  # by state: token to state
        self._link = [-1]  # by state: the suffix link, the state of its longest suffix with more end positions
        self._length = [0]  # by state: tokens of its longest string
        self._count = [0]  # by state: occurrences, counted for strings of up to max_match + 1 tokens
        self._last = [0]  # by state: the latest end position
        self._whole = 0  # the state of the whole text
        self._counted = TextMatch(0, 0)  # the longest counted suffix of the text

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self._append(token)
            self._count_end(token)

    def longest_match(self) -> TextMatch:
        """The longest suffix of the text, up to `max_match` tokens, that also occurs earlier."""
        match = self._shortened(self._counted)
        while match.state and not self._next[match.state]:
            match = self._parent(match)
        return match

    def followers(self, match: TextMatch, limit: int) -> list[Follower]:
        """Tokens that followed a match or its suffixes: longest match first, then most frequent, then most recent."""
        found: dict[int, Follower] = {}
        while match.state and len(found) < limit:
            fresh = [(token, state) for token, state in self._next[match.state].items() if token not in found]
            fresh.sort(key=lambda entry: (-self._count[entry[1]], -self._last[entry[1]]))
            for token, state in fresh[: limit - len(found)]:
                longer = self._shortened(TextMatch(state, match.length + 1))
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
            self._link[new] = self._extended_state(state, token)

    def _extended_state(self, state: int, token: int) -> int:
        """The state of the longest string of `state` plus `token`, cloned if that state has longer strings too."""
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
        """Count every suffix of the text up to max_match + 1 tokens: a match and the token after it."""
        state, length = self._counted
        self._counted = self._within(TextMatch(self._next[state][token], length + 1), self._max_match + 1)
        state = self._counted.state
        while state:
            self._count[state] += 1
            self._last[state] = self.num_tokens
            state = self._link[state]

    def _shortened(self, match: TextMatch) -> TextMatch:
        return self._within(match, self._max_match)

    def _within(self, match: TextMatch, max_length: int) -> TextMatch:
        """The last `max_length` tokens of a match, with their current state."""
        state, length = match.state, min(match.length, max_length)
        while state and self._length[self._link[state]] >= length:
            state = self._link[state]
        return TextMatch(state, length)

    def _parent(self, match: TextMatch) -> TextMatch:
        link = self._link[match.state]
        return TextMatch(link, self._length[link])


_BOUNDS = ((DraftOpinion.UNLIKELY, math.log(0.1)), (DraftOpinion.POSSIBLE, math.log(0.5)))


def grow_continuations(
    text: SuffixAutomaton, drafted: Tree, limits: LookupLimits, log_prob: Callable[[GuessKind], float]
) -> Guesses:
    """A tree of the likeliest continuations of `text`, by `log_prob` of each kind; the root is the text's last token.

    A node's children are the tokens that followed an earlier occurrence of the text plus the node's path. Growth is
    best-first, so siblings are best first and the tree holds the `max_nodes` best nodes considered. The draft's tree
    adds no nodes; it is a feature of a guess's kind.
    """
    tokens, parents, log_probs = [int(drafted.tokens[0])], [-1], [0.0]
    kinds: list[GuessKind] = []
    children = drafted.children()
    heap: list[tuple[float, int, int, GuessKind, Follower, LookupContext]] = []  # (parent, rank) breaks ties

    def consider(parent: LookupContext) -> None:
        if parent.depth >= limits.max_depth or tokens[parent.node] in limits.stop_tokens:
            return
        for rank, follower in enumerate(text.followers(parent.match, MAX_BRANCH)):
            draft = _draft(drafted, parent.drafted, follower.token)
            kind = GuessKind(follower.match_length, rank, parent.depth + 1, draft)
            score = parent.score + min(log_prob(kind), 0.0)
            heapq.heappush(heap, (-score, parent.node, rank, kind, follower, parent))

    consider(LookupContext(0, 0, 0.0, text.longest_match(), children[0]))
    while heap and len(kinds) < limits.max_nodes:
        cost, _, _, kind, follower, parent = heapq.heappop(heap)
        tokens.append(follower.token)
        parents.append(parent.node)
        log_probs.append(-cost - parent.score)
        kinds.append(kind)
        drafted_node = parent.drafted.get(follower.token)
        below = children[drafted_node] if drafted_node is not None else {}
        consider(LookupContext(len(kinds), kind.depth, -cost, follower.match, below))
    return Guesses(Tree.of(tokens, parents, log_probs), tuple(kinds))


def _draft(tree: Tree, children: dict[int, int], token: int) -> DraftOpinion:
    if token not in children:
        return DraftOpinion.OTHERWISE if children else DraftOpinion.SILENT
    log_prob = float(tree.log_probs[children[token]])
    return next((draft for draft, bound in _BOUNDS if log_prob < bound), DraftOpinion.LIKELY)


# Measured (docs/decisions/041-prompt-lookup.md); kinds with few samples are shrunk towards the mean.
FIRST_CHOICE = (0.2, 0.55, 0.7, 0.9, 0.95)  # by the power of two of the match length
LATER_CHOICE = 0.1  # share of the remaining probability that each later choice gets
DRAFT = {  # for the shortest match
    DraftOpinion.OTHERWISE: 0.01,
    DraftOpinion.UNLIKELY: 0.05,
    DraftOpinion.POSSIBLE: 0.3,
    DraftOpinion.LIKELY: 0.75,
}


def assumed_probability(kind: GuessKind) -> float:
    """The probability before anything is observed: text and draft are independent evidence, so their odds multiply."""
    first = FIRST_CHOICE[_doublings(kind.match_length, len(FIRST_CHOICE) - 1)]
    own = first if kind.rank == 0 else (1 - first) * LATER_CHOICE**kind.rank
    if kind.draft is DraftOpinion.SILENT:
        return own
    odds = _odds(DRAFT[kind.draft]) * _odds(own) / _odds(FIRST_CHOICE[0])
    return odds / (1 + odds)


def _odds(probability: float) -> float:
    return probability / (1 - probability)


class Acceptance:
    """How often guesses of each kind were right, shrunk towards a prior."""

    def __init__(self, prior: Callable[[GuessKind], float]) -> None:
        self._prior = prior
        self._trials: dict[GuessKind, tuple[float, float]] = {}  # (tried, right) by bucket

    def probability(self, kind: GuessKind) -> float:
        """Probability that a guess is right if its parent is; strictly between 0 and 1 if the prior is."""
        tried, right = self._trials.get(_bucket(kind), (0.0, 0.0))
        return (right + PRIOR_WEIGHT * self._prior(kind)) / (tried + PRIOR_WEIGHT)

    def observe(self, kind: GuessKind, was_right: bool) -> None:
        """Record the outcome of a guess whose parent was accepted."""
        tried, right = self._trials.get(_bucket(kind), (0.0, 0.0))
        kept = 1.0 if tried < MEMORY else 1.0 - 1.0 / MEMORY
        self._trials[_bucket(kind)] = (tried * kept + 1, right * kept + was_right)


def _bucket(kind: GuessKind) -> GuessKind:
    """The kind's bucket: match lengths and depths are grouped by powers of two."""
    return GuessKind(_doublings(kind.match_length, 4), kind.rank, _doublings(kind.depth, 3), kind.draft)


def _doublings(number: int, most: int) -> int:
    return min(number.bit_length() - 1, most)


class PromptLookup:
    """One session's text, and how often guesses from it were right; the prior is shared by all sessions."""

    def __init__(self, shared: Acceptance) -> None:
        self._text = SuffixAutomaton()
        self._shared = shared
        self._own = Acceptance(shared.probability)
        self._is_reading = False  # in the background

    @contextmanager
    def reading(self, tokens: Sequence[int], run: Run) -> Iterator[None]:
        """Read a long prompt in the background during the block, by `run`, which runs work in a thread.

        Rounds do not wait for it; there are no guesses before its end.
        """
        if len(tokens) <= MAX_READ:
            yield
            return
        self._is_reading, reading = True, asyncio.create_task(self._read(tokens, run))
        try:
            yield
        finally:
            reading.cancel()

    async def _read(self, tokens: Sequence[int], run: Run) -> None:
        for begin in range(0, len(tokens), MAX_READ):
            part = tokens[begin : begin + MAX_READ]
            await run(partial(self._text.extend, part))
        self._is_reading = False

    def grow(self, tokens: Sequence[int], drafted: Tree, limits: LookupLimits) -> Guesses:
        """Guesses below the last token, in addition to the draft's.

        There are none while the prompt is being read, or if nothing repeats.
        """
        if self._is_reading:
            return Guesses(Tree.root(tokens[-1]), ())
        if limits.max_nodes > 0:
            start = self._text.num_tokens
            self._text.extend(tokens[start : start + MAX_READ])
        if self._text.num_tokens < len(tokens):
            return Guesses(Tree.root(tokens[-1]), ())
        return grow_continuations(self._text, drafted, limits, self._log_prob)

    def observe(self, guesses: Guesses, chosen: Sequence[int]) -> None:
        """Learn from the tokens that the target chose below the root, for guesses that were sent and for others."""
        tree = guesses.tree
        for node, token in zip((0, *tree.along(chosen)), chosen, strict=False):
            for child in np.flatnonzero(tree.parents == node).tolist():
                for acceptance in (self._own, self._shared):
                    acceptance.observe(guesses.kinds[child - 1], int(tree.tokens[child]) == token)

    def _log_prob(self, kind: GuessKind) -> float:
        return math.log(self._own.probability(kind))
