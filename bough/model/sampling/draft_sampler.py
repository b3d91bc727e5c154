"""How a draft samples guesses: the distribution, sampling without replacement, and random numbers.

Used by schemes in which the target must know the draft's distribution: all but Scheme.TARGET.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bough.errors import InvalidRequest, Unavailable
from bough.model.sampling.sampler import Row

NOT_THE_TEXT = 1  # the text's own sampling has 0 here (`bough.model.sampling.sampler.gumbel_noise`)
GREEDY_TOKENS = 32  # limit at temperature 0
GREEDY_STEP = 7  # powers of two between successive tokens' weights: samples are nearly always in the order of rank


def generator(seed: int, round_: int, index: int) -> np.random.Generator:
    """A generator that is independent of those of any other (round, index) of the seed, and of the text's own numbers.

    Philox with the seed as key and the rest as counter; successive numbers use the lowest counter word, which suffices.
    """
    counter = np.array([0, index, round_, NOT_THE_TEXT], np.uint64)
    return np.random.Generator(np.random.Philox(key=seed, counter=counter))


def require_numbers(largest: NDArray[np.floating[Any]] | np.floating[Any]) -> None:
    """Check the largest logit of each row.

    Raises:
        Unavailable: it is not finite.
        InvalidRequest: all tokens are excluded.
    """
    if np.isneginf(largest).any():
        raise InvalidRequest("sampling", "must leave a token of the draft's vocabulary", "all of them banned")
    if not np.isfinite(largest).all():
        raise Unavailable("the draft's logits are not numbers; its weights may be damaged")


def greedy_weights(num: int) -> NDArray[np.float32]:
    """Weights (num,) of the best tokens in order, at most GREEDY_TOKENS."""
    return np.ldexp(np.float32(1), GREEDY_STEP * (GREEDY_TOKENS // 2 - np.arange(num)))


def without_replacement(
    tokens: NDArray[np.int32], probs: Row, num: int, vocab_size: int, rng: np.random.Generator
) -> NDArray[np.int32]:
    """Distinct tokens in the order drawn, (..., num), from rows of (..., num_entries) tokens and probabilities.

    After a row's tokens with positive probability, the rest are drawn uniformly from all other tokens. There are fewer
    than `num` only if the vocabulary is smaller.
    """
    num = min(num, vocab_size)
    times = _race(probs, rng)  # the order of exponential arrival times is a sample without replacement
    arrivals = np.argsort(times, axis=-1)[..., :num]
    drawn = np.zeros((*probs.shape[:-1], num), np.int32)
    drawn[..., : arrivals.shape[-1]] = np.take_along_axis(tokens, arrivals, -1)
    rows, num_possible = drawn.reshape(-1, num), (probs > 0).sum(-1).reshape(-1)
    for index in range(int(num_possible.min()), num):
        exhausted = np.flatnonzero(num_possible <= index)
        number = rng.integers(0, vocab_size - index, (len(exhausted), 1))  # among the remaining tokens
        num_left_below = np.sort(rows[exhausted, :index], axis=1) - np.arange(index)  # of each taken token
        rows[exhausted, index] = number[:, 0] + (num_left_below <= number).sum(1)
    return drawn


def _race(probs: Row, rng: np.random.Generator) -> Row:
    """Exponential arrival times with these rates; infinite for probability 0."""
    times: Row = np.full(probs.shape, np.inf)
    return np.divide(rng.standard_exponential(probs.shape), probs, out=times, where=probs > 0)
