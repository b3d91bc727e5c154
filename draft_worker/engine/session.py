"""A session at the draft worker: its committed tokens, their KV, and the expansion cache below them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bough.errors import Unavailable
from bough.grammar.allowed_tokens import AllowedTokens
from bough.model.kv.slot import Segment, Slot, require_prefix
from bough.model.sampling.sampler import TokenCounts
from bough.protocol.messages import GrowCall
from bough.trees.tree import Tree
from bough.trees.tree_plan import MAX_EXPANSIONS
from draft_worker.candidates.candidates import Guessing, StepAnswer, TemperatureScaling
from draft_worker.expansions.expansion_cache import ExpansionCache, PendingExpansions
from draft_worker.growth.grower import GrowingTree

CONTEXT_CHUNK = 512  # limit of context tokens in one draft step, which other sessions' trees share


class Window(NamedTuple):
    """Limits of the context that a draft sees; beyond them the oldest tokens are dropped."""

    max_context: int  # tokens, the root included
    max_positions: int  # of the model, which must hold the tree too
    max_expansions: int = MAX_EXPANSIONS  # nodes below the context on which the draft runs

    def holds(self, num_tokens: int, depth: int) -> bool:
        """Whether a tree of `depth` levels fits after `num_tokens` tokens."""
        return num_tokens < self.max_context and num_tokens + depth < self.max_positions

    @property
    def max_rows(self) -> int:
        """Rows of a slot for the longest context and the most expansions."""
        return self.max_context + self.max_expansions

    def num_rows(self, num_tokens: int, num_expansions: int) -> int:
        """Rows of a slot for `num_tokens` before the root and `num_expansions` nodes to expand."""
        return min(num_tokens, self.max_context) + min(num_expansions, self.max_expansions)

    def kept(self, depth: int) -> int:
        """Number of tokens to keep of a session that exceeds the window: half, to make this rare."""
        return max(0, min(self.max_context // 2, self.max_positions - depth - 1))


class DraftSession:
    """A draft's state of one session. The slot holds a window of it that begins at token `start`.

    Positions and slot rows count from the window's start; only positions of the target's random numbers are absolute.
    """

    def __init__(self, slot: Slot, window: Window) -> None:
        self.slot = slot
        self.tokens: list[int] = []  # committed, before the root; the slot may lack the last ones
        self.start = 0
        self.epoch = 0  # the newest that called
        self.cache_salt = ""  # the slot may be copied only by sessions with the same salt
        self.explored = ExpansionCache(0)
        self._window = window
        self.grown: GrowingTree | None = None  # of the last call
        self.guessing: Guessing | None = None  # of the last call
        self._scaling = TemperatureScaling(is_learnt=False)
        self.past = TokenCounts.of((), 0)  # for calls with penalties
        self.allowed: AllowedTokens | None = None  # for calls with a grammar

    def stand_on(self, call: GrowCall, guessing: Guessing, scaling: TemperatureScaling) -> None:
        """Adopt the call's context, and keep expansions that are still below it.

        First `scaling`, the exponent for such guesses, learns from the tokens after the last tree. Raises PrefixMissing
        if the session here holds less than the caller assumes, or something else.
        """
        context = call.context
        require_prefix(self.tokens, context.context_start, context.prefix_hash)
        self.slot.roll_back(self.slot.length)  # or less, after a step that failed midway
        tokens = [*self.tokens[: context.context_start], *context.tokens]
        is_same = tokens[: len(self.tokens)] == self.tokens
        is_continued = is_same and self.num_pending == 0  # whether cached expansions are still below the text
        if is_continued:
            new_tokens = [*tokens[len(self.tokens) :], call.root_token]
            self._observe(new_tokens)
            self._follow(new_tokens)
        elif not is_same:
            is_in_window = context.context_start >= self.start
            self.slot.roll_back(min(self.slot.length, context.context_start - self.start) if is_in_window else 0)
            self.start = self.start if is_in_window else 0
        self.tokens = tokens
        growth = call.plan.growth
        if not self.has_room(growth.depth):
            self.start = len(tokens) - min(len(tokens), self._window.kept(growth.depth))
            self.slot.roll_back(0)
            is_continued = False
        # Not num_pending: if the text became shorter, or the window is empty, no token needs to be run again.
        if not is_continued or guessing != self.guessing:
            self.forget_expansions()
        self.explored.power, self._scaling = scaling.power, scaling
        self.guessing, self.grown = guessing, None
        self.past = TokenCounts.of(tokens if guessing.params.has_penalties else (), guessing.prompt_length)

    def forget_expansions(self) -> None:
        """Empty the expansion cache below the committed tokens."""
        power = self.explored.power
        self.explored = ExpansionCache(len(self.tokens) - self.start)
        self.explored.power = power

    def has_room(self, depth: int) -> bool:
        """Whether a tree of `depth` levels fits after the committed tokens without moving the window."""
        return self._window.holds(len(self.tokens) - self.start, depth)

    def has_rows(self, num_expansions: int) -> bool:
        """Whether the slot has rows for `num_expansions` more."""
        num_explored = len(self.explored) + num_expansions
        return num_explored <= self._window.max_expansions and self.explored.base + num_explored <= self.slot.num_rows

    @property
    def num_pending(self) -> int:
        """Number of committed tokens in the window that the model has not been run on."""
        return len(self.tokens) - self.start - self.slot.length

    def drop_partial(self) -> None:
        """Drop partial results of a step that failed midway; the model is then run on these tokens again.

        Raises Unavailable if the growing tree is below them; the session's next tree starts over.
        """
        if self.slot.usable(self.slot.length) < self.slot.length:
            self.slot.roll_back(self.slot.length)
        if self.num_pending and len(self.explored):
            raise Unavailable("the draft's states were lost in a step that failed")

    def pending(self) -> Segment:
        """The next committed tokens to run."""
        begin = self.slot.length
        tokens = self.tokens[self.start + begin :][:CONTEXT_CHUNK]
        return Segment.context(self.slot, begin, tokens)

    def commit(self, num_run: int) -> None:
        """Record that the model has been run on the next `num_run` pending tokens."""
        begin = self.slot.length
        self.slot.compact(range(begin, begin + num_run), self.tokens[self.start + begin :][:num_run])

    def path_positions(self, wanted: PendingExpansions) -> NDArray[np.int32]:
        """Positions (num_new, width) of the tokens of `ExpansionCache.path_tokens`; -1 for unused places."""
        steps = np.arange(wanted.paths.shape[1])
        return np.where(steps <= wanted.depths[:, None], len(self.tokens) + steps, -1).astype(np.int32)

    def learn(self, wanted: PendingExpansions, answer: StepAnswer) -> None:
        """Store the draft's answer about these nodes."""
        assert self.guessing is not None, "a call has requested candidates"
        positions = len(self.tokens) + 1 + wanted.depths
        self.explored.learn(wanted, answer.candidates(self.guessing, positions))

    def _observe(self, tokens: list[int]) -> None:
        """Learn the exponent from the tokens, root first, that followed the last tree's root.

        Expansions of draft-ahead do not count: equal calls must grow equal trees with and without it.
        """
        if self.grown is None or self.grown.tokens[0] != tokens[0] or len(tokens) == 1:
            return
        expansions = self.grown.expansions[[0, *self.grown.tree().along(tokens[1:-1])]]
        expansions = expansions[expansions >= 0]  # a node that was not expanded has no candidates
        right = np.array(tokens[1 : 1 + len(expansions)], np.int32)
        self._scaling.observe(self.explored.raw_candidates(expansions), right)

    def _follow(self, tokens: list[int]) -> None:
        """Commit the KV of accepted tokens (all but the last), and keep the expansions below the last."""
        chain = Tree.chain(tokens)
        found = self.explored.find_tree(chain.parents, chain.tokens)
        path: list[int] = found[found >= 0].tolist()  # nothing is below a missing one
        accepted = path[: len(tokens) - 1]
        rows, below = accepted, ExpansionCache(self.slot.length + len(tokens) - 1)
        if len(path) == len(tokens):
            below, kept = self.explored.below(path[-1], below.base)
            rows = [*accepted, *kept.tolist()]
        self.slot.compact([self.explored.base + row for row in rows], tokens[: len(accepted)])
        self.explored = below
