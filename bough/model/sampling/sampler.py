"""Chooses the next token from the target's logits and a position's random numbers alone.

The token at a position is the argmax of log-probability + Gumbel noise, where the noise is a function of seed, position
and token id (the Gumbel-max trick). So it does not depend on tree, batch or process; and a draft that knows the seed
sees the same noise and can predict the sample itself, not just its distribution (arXiv 2408.07978, "coupling without
communication"). Works on one row at a time in numpy: a row's result cannot depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bough.errors import InvalidRequest, Unavailable
from bough.protocol.prefix_hash import Tokens
from bough.protocol.sampling_params import PositionLogprobs, SamplingParams, TokenLogprob

Row = NDArray[np.float64]  # (vocab_size,) unless stated otherwise

NUM_LIKELY = 1024  # tokens among which top-p nearly always ends
SLACK = 1e-6  # much more than the rounding errors of noise


class TokenCounts(NamedTuple):
    """Counts of a text or its prefix."""

    tokens: NDArray[np.int64]  # (num_distinct,) ascending
    num_outputs: NDArray[np.int64]  # (num_distinct,) occurrences after the prompt

    @classmethod
    def of(cls, tokens: Tokens, prompt_length: int) -> TokenCounts:
        """Counts of `tokens`, of which the first `prompt_length` are the prompt."""
        text = np.asarray(tokens, np.int64)
        numbers = np.bincount(text)
        distinct = np.flatnonzero(numbers)
        return cls(distinct, np.bincount(text[prompt_length:], minlength=len(numbers))[distinct])

    def after(self, tokens: Sequence[int], num_prompt: int) -> TokenCounts:
        """Counts after appending few tokens, of which the first `num_prompt` are still the prompt."""
        more = TokenCounts.of(tokens, num_prompt)
        distinct = np.union1d(self.tokens, more.tokens)
        num_outputs = np.zeros(len(distinct), np.int64)
        for counts in (self, more):
            num_outputs[np.searchsorted(distinct, counts.tokens)] += counts.num_outputs
        return TokenCounts(distinct, num_outputs)


def gumbel_noise(seed: int, position: int, vocab_size: int) -> Row:
    """Noise for the token at an absolute position: Philox (Salmon et al., 2011), key seed, counter position."""
    return gumbel(_raw(seed, position, vocab_size))


def _raw(seed: int, position: int, vocab_size: int) -> NDArray[np.uint64]:
    return np.random.Philox(key=seed, counter=[0, position, 0, 0]).random_raw(vocab_size)


def gumbel(raw: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Gumbel noise from raw random numbers of any shape; monotonic."""
    uniform = ((raw >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52  # in (0, 1)
    return -np.log(-np.log(uniform))


def adjusted(logits: Row, params: SamplingParams, counts: TokenCounts) -> Row:
    """Logits with penalties and bias for a text with these token counts."""
    if not params.has_penalties and not params.logit_bias:
        return logits
    logits = logits.copy()
    if params.has_penalties:
        logits[counts.tokens] = penalised(logits[counts.tokens], counts.num_outputs, params)
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    return logits


def penalised(logits: Row, num_outputs: NDArray[np.int64], params: SamplingParams) -> Row:
    """Logits with penalties for tokens that occurred in a text, `counts` times after its prompt; any shape."""
    penalties = params.presence_penalty + num_outputs * params.frequency_penalty
    repeated = np.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
    result: Row = repeated - np.where(num_outputs > 0, penalties, 0.0)
    return result


def unending(logits: Row, params: SamplingParams) -> Row:
    """Logits with -inf for the tokens that would end the text."""
    logits = logits.copy()
    logits[[*params.stop_token_ids]] = -np.inf
    return logits


def constrained(logits: Row, allowed: NDArray[np.bool_]) -> Row:
    """Logits with -inf for tokens that may not follow; `allowed` is (vocab_size,).

    Raises:
        InvalidRequest: none is left, as the others are banned.
    """
    left: Row = np.where(allowed, logits, -np.inf)
    if np.isneginf(left.max()) and not np.isneginf(logits.max()):
        raise InvalidRequest("constraint", "must allow a token that logit_bias and min_tokens leave", "none")
    return left


def filtered(logits: Row, params: SamplingParams) -> Row:
    """Logits / temperature, with -inf for tokens that top-k, top-p and min-p (in this order) exclude.

    Rows are (..., num_tokens): the target's of the whole vocabulary, or a draft's largest.
    """
    logits = logits / params.temperature
    if 0 < params.top_k < logits.shape[-1]:
        threshold = np.partition(logits, -params.top_k, axis=-1)[..., -params.top_k, None]
        logits = np.where(logits < threshold, -np.inf, logits)
    if params.top_p < 1.0:
        rows = logits.reshape(-1, logits.shape[-1])
        logits = np.array([_within_mass(row, params.top_p) for row in rows]).reshape(logits.shape)
    if params.min_p > 0.0:
        logits = np.where(logits < logits.max(-1, keepdims=True) + np.log(params.min_p), -np.inf, logits)
    return logits


def within_deviations(logits: NDArray[Any], params: SamplingParams) -> NDArray[Any]:
    """Logits (..., vocab_size) with -inf for tokens that top-n-sigma excludes; of whole rows, as all tokens count.

    Temperature divides the deviation too, so what is excluded does not depend on it (arXiv 2411.07641, section 3).
    """
    if params.top_n_sigma <= 0.0:
        return logits
    is_known = np.isfinite(logits)
    num = np.maximum(is_known.sum(-1, keepdims=True), 1)
    mean = np.where(is_known, logits, 0.0).sum(-1, keepdims=True) / num
    deviation = np.sqrt((np.where(is_known, logits - mean, 0.0) ** 2).sum(-1, keepdims=True) / num)
    least = logits.max(-1, keepdims=True) - params.top_n_sigma * deviation
    return np.where(logits < least, -np.inf, logits)


def draw(logits: Row, params: SamplingParams, position: int) -> int:
    """The token at an absolute position, from `adjusted` logits.

    Raises:
        Unavailable: no logit is finite.
    """
    require_numbers(logits, position)
    if params.is_greedy:
        return int(logits.argmax())
    return _noisiest(filtered(within_deviations(logits, params), params), params.seed, position)


def draw_by(distribution: Callable[[Row], Row], logits: Row, params: SamplingParams, position: int) -> int:
    """The token at an absolute position, from `distribution` of the target's probabilities (vocab_size,).

    Raises:
        Unavailable: no logit is finite.
    """
    require_numbers(logits, position)
    with np.errstate(divide="ignore"):
        log_probs = np.log(distribution(probabilities(logits, params)))
    return _noisiest(log_probs, params.seed, position)


def require_numbers(logits: Row, position: int) -> None:
    """Raise Unavailable if the largest logit is not finite."""
    require_number(bool(np.isfinite(logits.max())), position)


def require_number(is_there: bool, position: int) -> None:
    """Raise Unavailable unless `is_there`, whether the largest logit for a position is finite."""
    if not is_there:
        raise Unavailable(f"the target's logits for position {position} are not numbers; its weights may be damaged")


def probabilities(logits: Row, params: SamplingParams) -> Row:
    """Probabilities (vocab_size,) of the next token from `adjusted` logits; one-hot at temperature 0."""
    if params.is_greedy:
        one: Row = np.zeros(len(logits))
        one[logits.argmax()] = 1.0
        return one
    return _softmax(filtered(within_deviations(logits, params), params))


def position_logprobs(logits: Row, token: int, num_top: int) -> PositionLogprobs:
    """Log-probabilities of the sampled token and the `num_top` best ones, from the target's raw logits."""
    normaliser = logits.max() + np.log(np.exp(logits - logits.max()).sum())
    top = tuple(TokenLogprob(int(i), float(logits[i] - normaliser)) for i in largest(logits, num_top))
    return PositionLogprobs(TokenLogprob(token, float(logits[token] - normaliser)), top)


def largest(scores: Row, num: int) -> NDArray[np.intp]:
    """Indices of the largest scores, (at most num,), in descending order; ties in ascending order of indices.

    Sorts only candidates: sorting a whole vocabulary takes longer than everything else for a token.
    """
    if num == 0:
        return np.zeros(0, np.intp)
    num = min(num, len(scores))
    candidates = np.flatnonzero(scores >= np.partition(scores, -num)[-num])
    return candidates[np.argsort(-scores[candidates], kind="stable")[:num]]


def _within_mass(logits: Row, top_p: float) -> Row:
    """Logits with -inf outside the top-p nucleus; ties are ordered by token id."""
    probs = _softmax(logits)
    for num_likely in (NUM_LIKELY, len(logits)):  # sorting a whole vocabulary takes longer than everything else
        least = np.partition(logits, -num_likely)[-num_likely] if num_likely < len(logits) else -np.inf
        likely = np.flatnonzero(~(logits < least))  # a damaged draft's NaN too
        order = likely[np.argsort(-logits[likely], kind="stable")]
        mass = np.cumsum(probs[order])
        if mass[-1] >= top_p:
            break
    kept = np.full_like(logits, -np.inf)
    inside = order[mass - probs[order] < top_p]
    kept[inside] = logits[inside]
    return kept


def _noisiest(logits: Row, seed: int, position: int) -> int:
    """Argmax of logits + noise. Noise is computed only for tokens that can win, as logarithms are slow."""
    raw, best = _raw(seed, position, len(logits)), int(logits.argmax())
    low, high = gumbel(np.array([raw[best], raw.max()]))
    near = np.flatnonzero(logits >= logits[best] + low - high - SLACK)
    return int(near[(logits[near] + gumbel(raw[near])).argmax()])


def _softmax(logits: Row) -> Row:
    exps: Row = np.exp(logits - logits.max())
    exps /= exps.sum()
    return exps
