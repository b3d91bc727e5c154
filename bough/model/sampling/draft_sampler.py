"""What a draft samples guesses with: a distribution to sample from, two ways of sampling, and their random numbers.

For the schemes in which the target must know how its guesses came about: all but Scheme.TARGET.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bough.errors import InvalidRequest, Unavailable
from bough.model.sampling.sampler import Row, filtered, largest
from bough.protocol.sampling_params import SamplingParams

GREEDY_TOKENS = 32  # at most, at temperature 0
GREEDY_STEP = 7  # powers of two between the weights of one token and the next: order is that of rank, nearly always


class Purpose(Enum):
    """What random numbers are for. 0 is the drawing of the text itself (bough.model.sampling.sampler.gumbel_noise)."""

    DRAFT = 1


def generator(seed: int, purpose: Purpose, round_: int, index: int) -> np.random.Generator:
    """Random numbers that no other (purpose, round, index) of the seed shares.

    Philox keyed by the seed and counted by the rest; a run of numbers counts in the lowest word, which never fills up.
    """
    counter = np.array([0, index, round_, purpose.value], np.uint64)
    return np.random.Generator(np.random.Philox(key=seed, counter=counter))


def draft_weights(
    logits: Row, params: SamplingParams, max_tokens: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Tokens and weights, each (at most max_tokens,), best first: what to sample guesses from.

    The draft's distribution at the request's temperature and filters without its tail; weights are above 0. At
    temperature 0, where any distribution is as right as another, they fall so steeply that a sample without
    replacement is the best tokens in their order.

    Raises:
        Unavailable: where the logits hold no number to choose by.
    """
    require_numbers(logits.max())
    if params.is_greedy:
        best = largest(logits, min(max_tokens, GREEDY_TOKENS)).astype(np.int32)
        best = best[np.isfinite(logits[best])]
        return best, greedy_weights(len(best))
    kept = filtered(logits, params)
    best = largest(kept, max_tokens).astype(np.int32)
    weights = np.exp(kept[best] - kept.max()).astype(np.float32)
    return best[weights > 0], weights[weights > 0]


def require_numbers(largest: NDArray[np.floating[Any]] | np.floating[Any]) -> None:
    """Makes sure that the largest logit of a row is one to choose by.

    Raises:
        Unavailable: it is no number.
        InvalidRequest: no token is left to choose.
    """
    if np.isneginf(largest).any():
        raise InvalidRequest("sampling: every token that the draft knows is banned; one that is not would do")
    if not np.isfinite(largest).all():
        raise Unavailable("the draft's logits are not numbers; its weights may be damaged")


def greedy_weights(num: int) -> NDArray[np.float32]:
    """(num,) of the best tokens in their order, at most GREEDY_TOKENS."""
    return np.ldexp(np.float32(1), GREEDY_STEP * (GREEDY_TOKENS // 2 - np.arange(num)))


def without_replacement(
    tokens: NDArray[np.int32], probs: Row, num: int, vocab_size: int, rng: np.random.Generator
) -> NDArray[np.int32]:
    """Distinct tokens in the order drawn, (..., num), from rows of (..., num_entries) tokens and probabilities.

    Once a row's tokens with a probability above 0 are exhausted, the rest are drawn uniformly from the vocabulary's
    other tokens. Fewer than `num` only where the vocabulary has no more.
    """
    num = min(num, vocab_size)
    times = _race(probs, rng)  # who arrives first, second, ... is distributed as a sample without replacement
    arrivals = np.argsort(times, axis=-1)[..., :num]
    drawn = np.zeros((*probs.shape[:-1], num), np.int32)
    drawn[..., : arrivals.shape[-1]] = np.take_along_axis(tokens, arrivals, -1)
    rows, num_possible = drawn.reshape(-1, num), (probs > 0).sum(-1).reshape(-1)
    for index in range(int(num_possible.min()), num):
        exhausted = np.flatnonzero(num_possible <= index)
        number = rng.integers(0, vocab_size - index, (len(exhausted), 1))  # among the tokens that are left
        num_left_below = np.sort(rows[exhausted, :index], axis=1) - np.arange(index)  # of each taken token
        rows[exhausted, index] = number[:, 0] + (num_left_below <= number).sum(1)
    return drawn


def _race(probs: Row, rng: np.random.Generator) -> Row:
    """Exponential arrival times at these rates; infinite where a probability is 0."""
    times: Row = np.full(probs.shape, np.inf)
    return np.divide(rng.standard_exponential(probs.shape), probs, out=times, where=probs > 0)
