"""The law of a simulated pair: which token is true at a position, and what a draft guesses there.

The truth is a function of seed and position alone, so that text does not depend on trees, batches or workers. A guess
is a function of the law, the seed, the position and, off the true path, of where it stands (`salt`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bough.simulation.acceptance_law import AcceptanceLaw, same_shape
from bough.simulation.hashing import Keys, mixed, uniforms
from bough.simulation.levels import NUM_LEVELS, level_vectors
from bough.trees.acceptance import Acceptance, FloatArray, smoothed
from bough.trees.optimal_tree import best_shape, expected_tokens
from bough.trees.tree_plan import StaticShape

HOSTILE_CLAIM = 0.999
LOWEST_PROB = 1e-9  # that a draft states: ranks that are never right have a logarithm too
_TRUTH, _LEVEL, _RANK, _OTHERS, _END = range(1, 6)  # what a random number is for
_ON_PATH = 0  # salt of every true path: there is one for each position


class Candidates(NamedTuple):
    """What a draft says may follow some nodes, likeliest first."""

    tokens: NDArray[np.int32]  # (num_nodes, num_ranks), distinct within a row
    log_probs: NDArray[np.float32]  # (num_nodes, num_ranks), as the draft states them


@dataclass(frozen=True)
class Law:
    """A law over words: the tokens `first_word` to `first_word + num_words - 1`.

    With `end_rate` above 0 that share of all positions holds `end_token`; positions below `min_position` never do.
    """

    acceptance: AcceptanceLaw
    first_word: int
    num_words: int
    end_token: int = -1
    end_rate: float = 0.0

    def __post_init__(self) -> None:
        assert self.num_words > self.num_ranks + 1, "there must be more words than ranks"

    @cached_property
    def num_ranks(self) -> int:
        """Children that a draft can name below a node."""
        return int(self._vectors[0].shape[2])

    @cached_property
    def _vectors(self) -> tuple[FloatArray, FloatArray]:
        """Twice (num_depths, NUM_LEVELS, num_ranks): at the first position and where a drift has ended."""
        first, last = self._ends
        return self._spread_out(first), self._spread_out(last)

    @cached_property
    def _stated_vectors(self) -> tuple[FloatArray, FloatArray]:
        """The same as a draft believes them: never more for a later rank, since it puts the likeliest first."""
        first, last = self._ends
        return self._spread_out(smoothed(first)), self._spread_out(smoothed(last))

    @cached_property
    def _ends(self) -> tuple[Acceptance, Acceptance]:
        law = self.acceptance
        return same_shape(np.array(law.rows), np.array(law.last_rows or law.rows))

    def _spread_out(self, rows: Acceptance) -> FloatArray:
        return np.stack([level_vectors(row, self.acceptance.spread) for row in rows])

    def truth(self, seed: int, positions: NDArray[np.integer]) -> NDArray[np.int32]:
        """(n,) tokens at these absolute positions; a function of seed and position alone."""
        keys = mixed(_TRUTH, seed, positions)
        words = self._word(keys % np.uint64(self.num_words))
        if self.end_rate:
            ends = uniforms(mixed(_END, seed, positions)) < self.end_rate
            words[ends] = self.end_token
        return words

    def candidates(
        self,
        seed: int,
        path_is_true: NDArray[np.bool_],
        positions: NDArray[np.integer],
        salts: NDArray[np.integer] | int = 0,
        depths: NDArray[np.integer] | int = 0,
    ) -> Candidates:
        """What may follow nodes, at the absolute `positions` of their children.

        `path_is_true` (n,) says whether a node and all before it are the truth; below a wrong one the candidates look
        alike, but the truth is not among them. `salts` tell wrong paths apart: any hash of the path will do, and on the
        true path it does not count. `depths` are of the nodes below the root, for laws by depth.
        """
        shape = path_is_true.shape
        salt = np.where(path_is_true, np.uint64(_ON_PATH), np.asarray(salts).astype(np.uint64))
        levels, rows = mixed(_LEVEL, seed, positions, salt), np.broadcast_to(depths, shape)
        probs = self._probs(self._vectors, levels, positions, rows)
        truth = mixed(_TRUTH, seed, positions) % np.uint64(self.num_words)
        tokens = self._wrong_words(truth, mixed(_OTHERS, seed, positions, salt))
        true_ranks = (probs.cumsum(axis=1) <= uniforms(mixed(_RANK, seed, positions))[:, None]).sum(axis=1)
        right = np.flatnonzero(path_is_true & (true_ranks < self.num_ranks))
        tokens[right, true_ranks[right]] = self.truth(seed, np.asarray(positions)[right])
        return Candidates(tokens, self._stated(self._probs(self._stated_vectors, levels, positions, rows)))

    def true_ranks(
        self, seed: int, positions: NDArray[np.integer], depths: NDArray[np.integer] | int = 0
    ) -> NDArray[np.int64]:
        """(n,) rank of the truth among what is guessed below the true path; `num_ranks` where it is not among it."""
        levels = mixed(_LEVEL, seed, positions, _ON_PATH)
        probs = self._probs(self._vectors, levels, positions, np.broadcast_to(depths, np.shape(positions)))
        ranks: NDArray[np.int64] = (probs.cumsum(axis=1) <= uniforms(mixed(_RANK, seed, positions))[:, None]).sum(
            axis=1
        )
        return ranks

    def _probs(
        self,
        vectors: tuple[FloatArray, FloatArray],
        keys: Keys,
        positions: NDArray[np.integer],
        depths: NDArray[np.integer],
    ) -> FloatArray:
        """(n, num_ranks): probabilities by rank, of a position as certain as it happens to be."""
        first, last = vectors
        levels = (keys >> np.uint64(11)).astype(np.int64) % NUM_LEVELS
        rows = np.minimum(depths, len(first) - 1)
        probs: FloatArray = first[rows, levels]
        if self.acceptance.last_rows:
            share = np.clip(np.asarray(positions) / self.acceptance.over_positions, 0.0, 1.0)[:, None]
            probs = (1 - share) * probs + share * last[rows, levels]
        return probs

    def _stated(self, probs: FloatArray) -> NDArray[np.float32]:
        """What the draft says: probabilities to a power, over all words as if the unnamed were as rare as the last.

        A hostile draft is certain.
        """
        if self.acceptance.is_hostile:
            stated = np.full(probs.shape, (1 - HOSTILE_CLAIM) / probs.shape[1])
            stated[:, 0] = HOSTILE_CLAIM
            return np.asarray(np.log(stated), np.float32)
        power = self.acceptance.overconfidence
        probs = np.maximum(probs, LOWEST_PROB)
        if power == 1:
            return np.asarray(np.log(probs), np.float32)
        unnamed = np.maximum(1 - probs.sum(axis=1, keepdims=True), 0.0)
        raised = probs**power
        total = raised.sum(axis=1, keepdims=True) + unnamed * probs.min(axis=1, keepdims=True) ** (power - 1)
        return np.asarray(np.log(np.minimum(raised / total, 1.0)), np.float32)

    def _wrong_words(self, truth: Keys, keys: Keys) -> NDArray[np.int32]:
        """(n, num_ranks) words that are distinct and not the truth."""
        others = np.uint64(self.num_words - 1)
        ranks = np.arange(self.num_ranks, dtype=np.uint64)
        offsets: Keys = np.asarray((keys[:, None] + ranks) % others + np.uint64(1), np.uint64)
        return self._word((truth[:, None] + offsets) % np.uint64(self.num_words))

    def _word(self, numbers: Keys) -> NDArray[np.int32]:
        return numbers.astype(np.int32) + np.int32(self.first_word)


def best_tree(law: AcceptanceLaw, nodes: int, levels: int, position: int = 0) -> StaticShape:
    """The shape worth most of so many nodes and levels, both counting the root; vectors are made monotone first."""
    return best_shape(smoothed(law.acceptance(position)), nodes, levels)


def expected_tokens_of(law: AcceptanceLaw, nodes: int, levels: int, position: int = 0) -> float:
    """E(nodes, levels) of the best fixed shape, the bonus token included; with `spread` best-first trees have more."""
    shape = best_tree(law, nodes, levels, position)
    return expected_tokens(shape, smoothed(law.acceptance(position))) if shape.parents else 1.0
