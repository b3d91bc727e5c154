"""The text distribution of a simulated pair: the target's token at each position, and a draft's guesses there.

The true token is a function of seed and position alone: text does not depend on trees, batches or workers. A
guess is a function of the distribution, the seed, the position and, off the true path, of its path (`salt`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bough.simulation.acceptance_model import AcceptanceModel, same_shape
from bough.simulation.hashing import Keys, mixed, uniforms
from bough.trees.acceptance import Acceptance, FloatArray, smoothed

NUM_BYTES = 256  # tokens of one byte, which come first in the vocabulary
FIRST_WORD, NUM_WORDS = NUM_BYTES + 2, 8**3  # tokens that are words of three syllables with a leading space
HOSTILE_CLAIM = 0.999
LOWEST_PROB = 1e-9  # smallest stated probability: its logarithm must be finite
_TRUTH, _LEVEL, _RANK, _OTHERS, _END = range(1, 6)  # uses of random numbers
_ON_PATH = 0  # salt of the true path
NUM_LEVELS = 64  # equally frequent kinds of positions, from the least to the most certain
_POINTS = 20001  # of the numerical integral, whose integrand is smooth and vanishes at both ends
_REACH = 45.0  # the integrand is negligible beyond this exponent


class StatedCandidates(NamedTuple):
    """A draft's candidate children for some nodes, likeliest first."""

    tokens: NDArray[np.int32]  # (num_nodes, num_ranks), distinct within a row
    log_probs: NDArray[np.float32]  # (num_nodes, num_ranks), as the draft states them


@dataclass(frozen=True)
class TextModel:
    """A distribution over the words `first_word` to `first_word + num_words - 1`.

    A share `end_rate` of all positions has `end_token` instead of a word.
    """

    acceptance: AcceptanceModel
    first_word: int
    num_words: int
    end_token: int = -1
    end_rate: float = 0.0

    def __post_init__(self) -> None:
        assert self.num_words > self.num_ranks + 1, "there must be more words than ranks"

    @cached_property
    def num_ranks(self) -> int:
        """Most candidate children of a node."""
        return int(self._vectors[0].shape[2])

    @cached_property
    def _vectors(self) -> tuple[FloatArray, FloatArray]:
        """True probabilities at the first position and after the drift, each (num_depths, NUM_LEVELS, num_ranks)."""
        first, last = self._ends
        return self._spread_out(first), self._spread_out(last)

    @cached_property
    def _stated_vectors(self) -> tuple[FloatArray, FloatArray]:
        """Probabilities that the draft states, which never increase with rank; same shapes as `_vectors`."""
        first, last = self._ends
        return self._spread_out(smoothed(first)), self._spread_out(smoothed(last))

    @cached_property
    def _ends(self) -> tuple[Acceptance, Acceptance]:
        model = self.acceptance
        return same_shape(np.array(model.rows), np.array(model.last_rows or model.rows))

    def _spread_out(self, rows: Acceptance) -> FloatArray:
        return np.stack([level_vectors(row, self.acceptance.spread) for row in rows])

    def truth(self, seed: int, positions: NDArray[np.integer]) -> NDArray[np.int32]:
        """(n,) true tokens at these absolute positions."""
        words = self.words(seed, positions)
        if self.end_rate:
            ends = uniforms(mixed(_END, seed, positions)) < self.end_rate
            words[ends] = self.end_token
        return words

    def words(self, seed: int, positions: NDArray[np.integer]) -> NDArray[np.int32]:
        """(n,) true tokens at these absolute positions of a text that does not end."""
        return self._word(mixed(_TRUTH, seed, positions) % np.uint64(self.num_words))

    def candidates(
        self,
        seed: int,
        path_is_true: NDArray[np.bool_],
        positions: NDArray[np.integer],
        salts: NDArray[np.integer] | int = 0,
        depths: NDArray[np.integer] | int = 0,
        true_tokens: NDArray[np.int32] | None = None,
    ) -> StatedCandidates:
        """Candidate children of n nodes, at the absolute `positions` of the children.

        `path_is_true` (n,) says whether a node and all its ancestors are true tokens; otherwise the true token is not
        among the candidates. `salts` is any hash of a path, and distinguishes wrong paths. `depths` are the nodes'
        levels below the root, for distributions by depth. `true_tokens` (n,) replace the model's tokens if a grammar
        demands others.
        """
        shape = path_is_true.shape
        salt = np.where(path_is_true, np.uint64(_ON_PATH), np.asarray(salts).astype(np.uint64))
        probs, stated = self.chances(mixed(_LEVEL, seed, positions, salt), positions, np.broadcast_to(depths, shape))
        truth = mixed(_TRUTH, seed, positions) % np.uint64(self.num_words)
        tokens = self._wrong_words(truth, mixed(_OTHERS, seed, positions, salt))
        true_ranks = (probs.cumsum(axis=1) <= uniforms(mixed(_RANK, seed, positions))[:, None]).sum(axis=1)
        right = np.flatnonzero(path_is_true & (true_ranks < self.num_ranks))
        if true_tokens is None:
            true_tokens = self.truth(seed, positions)
        else:  # the wrong candidates without a grammar
            tokens = np.where(tokens == true_tokens[:, None], self._word(truth)[:, None], tokens)
        tokens[right, true_ranks[right]] = true_tokens[right]
        return StatedCandidates(tokens, stated)

    def chances(
        self, keys: Keys, positions: NDArray[np.integer], depths: NDArray[np.integer]
    ) -> tuple[FloatArray, NDArray[np.float32]]:
        """(n, num_ranks) each: true probabilities by rank of the children of n nodes, and log-probabilities as stated.

        `keys` (n,) choose how certain each position is; `positions` are the children's, `depths` the nodes' own.
        """
        stated = self._stated(self._probs(self._stated_vectors, keys, positions, depths))
        return self._probs(self._vectors, keys, positions, depths), stated

    def _probs(
        self,
        vectors: tuple[FloatArray, FloatArray],
        keys: Keys,
        positions: NDArray[np.integer],
        depths: NDArray[np.integer],
    ) -> FloatArray:
        """(n, num_ranks): probabilities by rank; `keys` choose each position's level of certainty."""
        first, last = vectors
        levels = (keys >> np.uint64(11)).astype(np.int64) % NUM_LEVELS
        rows = np.minimum(depths, len(first) - 1)
        probs: FloatArray = first[rows, levels]
        if self.acceptance.last_rows:
            share = np.clip(np.asarray(positions) / self.acceptance.over_positions, 0.0, 1.0)[:, None]
            probs = (1 - share) * probs + share * last[rows, levels]
        return probs

    def _stated(self, probs: FloatArray) -> NDArray[np.float32]:
        """Stated log-probabilities: `probs` to the power `overconfidence`, normalised over all words.

        Words that are not candidates are taken to be as likely as the last one. A hostile draft states certainty.
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
        """(n, num_ranks) distinct words other than the true one."""
        others = np.uint64(self.num_words - 1)
        ranks = np.arange(self.num_ranks, dtype=np.uint64)
        offsets: Keys = np.asarray((keys[:, None] + ranks) % others + np.uint64(1), np.uint64)
        return self._word((truth[:, None] + offsets) % np.uint64(self.num_words))

    def _word(self, numbers: Keys) -> NDArray[np.int32]:
        return numbers.astype(np.int32) + np.int32(self.first_word)


def level_vectors(row: FloatArray, spread: float) -> FloatArray:
    """(NUM_LEVELS, num_ranks): probabilities by rank at positions of each level; their mean over levels is `row`.

    The first rank's probability follows a Beta distribution on [smallest value not below the second rank's, 1], with
    `spread` times the largest possible standard deviation; the other ranks share the rest in fixed proportions. So
    ranks keep the order of `row`.
    """
    first, rest = float(row[0]), row[1:]
    if spread <= 0 or not 0 < first < 1:
        return np.tile(row, (NUM_LEVELS, 1))
    second = float(rest[0]) if len(rest) else 0.0
    low = min(first, second / (1 - first + second))
    mean = (first - low) / (1 - low)
    if not 0 < mean < 1:
        return np.tile(row, (NUM_LEVELS, 1))
    firsts = low + (1 - low) * _beta_levels(mean, 1 / spread**2 - 1)
    return np.column_stack((firsts, np.outer((1 - firsts) / (1 - first), rest)))


@lru_cache(maxsize=1024)
def _beta_levels(mean: float, concentration: float) -> FloatArray:
    """(NUM_LEVELS,) ascending means of equally probable slices of a Beta distribution with mean `mean`.

    Over logits its density is x^a (1-x)^b, which is smooth for any a and b. An integral takes milliseconds, and
    a profile has hundreds, so results are cached; callers must not change the array.
    """
    a, b = mean * concentration, (1 - mean) * concentration
    centre = np.log(mean / (1 - mean))
    logits = np.linspace(centre - _REACH / a - _REACH, centre + _REACH / b + _REACH, _POINTS)
    log_x, log_rest = -np.logaddexp(0, -logits), -np.logaddexp(0, logits)
    log_density = a * log_x + b * log_rest
    density = np.exp(log_density - log_density.max())
    mass = np.concatenate(([0.0], np.cumsum((density[1:] + density[:-1]) / 2)))
    weighted = density * np.exp(log_x)
    moment = np.concatenate(([0.0], np.cumsum((weighted[1:] + weighted[:-1]) / 2)))
    moments = np.interp(np.linspace(0, mass[-1], NUM_LEVELS + 1), mass, moment)
    levels = np.clip(np.diff(moments) / mass[-1] * NUM_LEVELS, 0.0, 1.0)
    found = float(levels.mean())
    if found < mean:  # scaled towards 1 or 0 to keep the mean exact despite the integration's error
        return np.asarray(1 - (1 - levels) * ((1 - mean) / (1 - found)))
    return np.asarray(levels * (mean / found))
