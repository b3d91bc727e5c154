"""Prompt lookup: guesses from earlier continuations in a session's own text, and how often they were right."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from bough.trees.tree import Tree
from orchestrator.rounds.suffix_automaton import (
    DraftOpinion,
    Guesses,
    GuessKind,
    LookupLimits,
    SuffixAutomaton,
    grow_continuations,
)

Run = Callable[[Callable[[], None]], Awaitable[None]]

PRIOR_WEIGHT = 8.0  # of an estimate's prior, in trials
MEMORY = 500.0  # trials of a kind, after which older ones weigh less
MAX_READ = 1024  # tokens read at once, so that a long prompt does not delay other sessions

# Measured (docs/decisions/041-prompt-lookup.md); shrunk towards the middle where few were measured.
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
        """Learn from the tokens that the target chose below the root, whether the guesses were sent or not."""
        tree = guesses.tree
        for node, token in zip((0, *tree.along(chosen)), chosen, strict=False):
            for child in np.flatnonzero(tree.parents == node).tolist():
                for acceptance in (self._own, self._shared):
                    acceptance.observe(guesses.kinds[child - 1], int(tree.tokens[child]) == token)

    def _log_prob(self, kind: GuessKind) -> float:
        return math.log(self._own.probability(kind))
