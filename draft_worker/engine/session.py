"""A session at the draft worker: its committed tokens, their KV, and what has been found out below them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bough.errors import PrefixMissing
from bough.model.kv.segment import Segment
from bough.model.kv.slot import Slot
from bough.model.sampling.token_counts import TokenCounts
from bough.protocol.messages import Context, GrowCall
from bough.protocol.prefix_hash import prefix_hash
from bough.trees.tree_plan import MAX_EXPANSIONS
from draft_worker.candidates.candidates import Answer, Guessing
from draft_worker.candidates.temperature_scaling import TemperatureScaling
from draft_worker.expansions.expansion_cache import ExpansionCache, PendingExpansions
from draft_worker.growth.grower import GrowingTree

CONTEXT_CHUNK = 512  # tokens of a context that one draft step runs at most: others' trees grow in the same step


class Window(NamedTuple):
    """How much of a session a draft looks at; beyond it the oldest tokens are dropped."""

    max_context: int  # tokens, the root included
    max_positions: int  # that the model was made for, a tree's included

    def holds(self, num_tokens: int, depth: int) -> bool:
        """Whether a tree of so many levels can stand on so many tokens before its root."""
        return num_tokens < self.max_context and num_tokens + depth < self.max_positions

    @property
    def max_rows(self) -> int:
        """Of a slot: for the longest window, and all that may be explored below it."""
        return self.max_context + MAX_EXPANSIONS

    def num_rows(self, num_tokens: int, num_expansions: int) -> int:
        """Of a slot for so many tokens before the root, and so many nodes to be expanded."""
        return min(num_tokens, self.max_context) + min(num_expansions, MAX_EXPANSIONS)

    def kept(self, depth: int) -> int:
        """Tokens to keep of a session that has become too long: few enough that this is seldom needed."""
        return max(0, min(self.max_context // 2, self.max_positions - depth - 1))


class DraftSession:
    """What a draft holds of one session. The slot holds a window of it, from token `start` on.

    Positions and slot rows count from the start of the window, but for those of the target's random numbers.
    """

    def __init__(self, slot: Slot, window: Window) -> None:
        self.slot = slot
        self.tokens: list[int] = []  # committed, before the root; those that the slot lacks are still to be run
        self.start = 0
        self.epoch = 0  # the newest in which it was called
        self.cache_salt = ""  # sessions with another one begin from nothing of this one
        self.explored = ExpansionCache(0)
        self._window = window
        self.grown: GrowingTree | None = None  # the last call's, as it grew
        self.guessing: Guessing | None = None  # what the last call asks for
        self._sharpness = TemperatureScaling(is_learnt=False)
        self.past = TokenCounts.of((), 0)  # of a call with penalties

    def stand_on(self, call: GrowCall, guessing: Guessing, sharpness: TemperatureScaling) -> None:
        """Takes over the call's context, and what of earlier trees lies on it.

        `sharpness` is that of such guesses; what followed the last tree's is learnt first.

        Raises:
            PrefixMissing: this worker holds less of the session, or something else, than the caller believes.
        """
        context = call.context
        self._require_held(context)
        tokens = [*self.tokens[: context.context_start], *context.tokens]
        is_same = tokens[: len(self.tokens)] == self.tokens
        stands = is_same and self.num_pending == 0  # whether what was explored is still below the text
        if stands:
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
            stands = False
        # Not num_pending: of a shorter text, or of a window that keeps nothing, no token need be run again.
        if not stands or guessing != self.guessing or not self.has_rows(growth.max_expansions):
            self.explored = ExpansionCache(len(tokens) - self.start)
        self.explored.power, self._sharpness = sharpness.power, sharpness
        self.guessing, self.grown = guessing, None
        self.past = TokenCounts.of(tokens if guessing.params.has_penalties else (), guessing.prompt_length)

    def has_room(self, depth: int) -> bool:
        """Whether a tree of so many levels can stand on what is committed without a new window."""
        return self._window.holds(len(self.tokens) - self.start, depth)

    def has_rows(self, num_expansions: int) -> bool:
        """Whether so many more nodes can be expanded."""
        num_explored = len(self.explored) + num_expansions
        return num_explored <= MAX_EXPANSIONS and self.explored.base + num_explored <= self.slot.num_rows

    @property
    def num_pending(self) -> int:
        """Committed tokens of the window that have not been run yet."""
        return len(self.tokens) - self.start - self.slot.length

    def pending(self) -> Segment:
        """The next committed tokens to run."""
        begin = self.slot.length
        tokens = self.tokens[self.start + begin :][:CONTEXT_CHUNK]
        return Segment.context(self.slot, begin, tokens)

    def commit(self, num_run: int) -> None:
        """The model has been run on the next `num_run` pending tokens."""
        begin = self.slot.length
        self.slot.compact(range(begin, begin + num_run), self.tokens[self.start + begin :][:num_run])

    def path_positions(self, wanted: PendingExpansions) -> NDArray[np.int32]:
        """(num_new, width) positions of the tokens of `ExpansionCache.path_tokens`; -1 for places without one."""
        steps = np.arange(wanted.paths.shape[1])
        return np.where(steps <= wanted.depths[:, None], len(self.tokens) + steps, -1).astype(np.int32)

    def learn(self, wanted: PendingExpansions, answer: Answer) -> None:
        """The draft has been asked about these nodes."""
        assert self.guessing is not None, "a call asks for something"
        positions = len(self.tokens) + 1 + wanted.depths
        self.explored.learn(wanted, answer.candidates(self.guessing, positions))

    def _require_held(self, context: Context) -> None:
        start = context.context_start
        if start <= len(self.tokens) and prefix_hash(self.tokens[:start]) == context.prefix_hash:
            return
        held = f"{len(self.tokens)} tokens" if start > len(self.tokens) else "other tokens"
        raise PrefixMissing(
            f"context.context_start: {start} tokens were taken to be held, but {held} are; "
            "send the session's tokens again from what is held",
            len(self.tokens),
            prefix_hash(self.tokens),
        )

    def _observe(self, tokens: list[int]) -> None:
        """The last tree's root, and what followed it: where the draft had been asked, it learns how sure it may be.

        What was explored without being asked for does not count, so that equal calls grow equal trees either way.
        """
        if self.grown is None or self.grown.tokens[0] != tokens[0] or len(tokens) == 1:
            return
        expansions = self.grown.expanded_along(tokens[1:-1])
        right = np.array(tokens[1 : 1 + len(expansions)], np.int32)
        self._sharpness.observe(self.explored.learnt(np.array(expansions, np.int32)), right)

    def _follow(self, tokens: list[int]) -> None:
        """Commits the KV of what has been accepted, all but the last of these tokens, and keeps what lies below it."""
        path = self.explored.walk(tokens)
        accepted = path[: len(tokens) - 1]
        rows, below = accepted, ExpansionCache(self.slot.length + len(tokens) - 1)
        if len(path) == len(tokens):
            below, kept = self.explored.below(path[-1], below.base)
            rows = [*accepted, *kept.tolist()]
        self.slot.compact([self.explored.base + row for row in rows], tokens[: len(accepted)])
        self.explored = below
