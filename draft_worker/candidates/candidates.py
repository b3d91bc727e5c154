"""From a draft's logits to candidates: the likeliest tokens, those that noise favours, or weights to sample by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bough.model.sampling.draft_sampler import GREEDY_TOKENS, greedy_weights, require_numbers
from bough.model.sampling.sampler import filtered
from bough.protocol.messages import GrowCall
from bough.protocol.sampling_params import SamplingParams
from bough.trees.tree_plan import Guess
from draft_worker.growth.grower import Candidates

NUM_CANDIDATES = 64  # tokens kept of those considered
LEAST_POWER, MOST_POWER = 0.25, 4.0
PRIOR_INFORMATION = 16.0  # Fisher information of the prior that the power is 1, worth about as many uncertain tokens
HALF_LIFE_TOKENS = 4096.0  # tokens after which earlier observations weigh half as much
LEAST_CHANCE = 1e-6  # least probability that none of the candidates is right
MAX_KINDS = 64  # limit of kinds of guesses that are remembered


@dataclass(frozen=True, slots=True)
class Guessing:
    """All inputs of candidates besides the logits; if it is equal, cached expansions stay valid."""

    params: SamplingParams
    prompt_length: int
    is_sample: bool  # candidates are a distribution to sample from, instead of the likeliest to be accepted
    is_perturbed: bool  # by the noise with which the target will sample
    vocab_size: int = 0  # the target's: it cannot draw further tokens; 0 if it has all tokens of the draft

    @classmethod
    def of(cls, call: GrowCall) -> Guessing:
        """The inputs that a call asks for."""
        is_sample = call.plan.scheme.is_sampled
        is_perturbed = not is_sample and call.plan.guess is Guess.SAMPLE and not call.sampling.is_greedy
        return cls(call.sampling, call.context.prompt_length, is_sample, is_perturbed, call.vocab_size)

    def adjusts(self, vocab_size: int) -> bool:
        """Whether logits of `vocab_size` tokens depend on more than the model."""
        params = self.params
        changes = params.has_penalties or params.logit_bias or params.grammar or params.min_tokens
        return bool(changes) or 0 < self.vocab_size < vocab_size

    def candidates(
        self, values: NDArray[np.float32], tokens: NDArray[np.int32], positions: NDArray[np.int32]
    ) -> Candidates:
        """Candidates from each node's largest logits, descending, and their tokens; `positions` are the children's.

        With noise G at temperature T the target takes the largest of logit + T G: greedy decoding of perturbed logits.
        So its sample is predicted by the softmax of the draft's own logits with the same perturbation.
        """
        if self.is_sample:
            return self._weighted(values, tokens)
        scores: NDArray[np.floating[Any]] = values
        if not self.params.is_greedy:
            with np.errstate(divide="ignore", invalid="ignore"):  # if a row has no token with a finite logit
                scores = filtered(values.astype(np.float64), self.params)
        if self.is_perturbed:
            from draft_worker.candidates.noise import noise_at  # compiled: simulated drafts start without numba

            scores = self.params.temperature * (scores + noise_at(self.params.seed, positions, tokens))
            best = np.argsort(-scores, axis=1, kind="stable")
            tokens, scores = np.take_along_axis(tokens, best, 1), np.take_along_axis(scores, best, 1)
        return Candidates(tokens[:, :NUM_CANDIDATES], _log_probs(scores, min(NUM_CANDIDATES, scores.shape[1])))

    def _weighted(self, values: NDArray[np.float32], tokens: NDArray[np.int32]) -> Candidates:
        """Logarithms of `draft_sampler.draft_weights` of every node; -inf for tokens that are not sampled.

        Raises Unavailable for a row without a finite logit.
        """
        require_numbers(values[:, 0])
        if self.params.is_greedy:
            num = min(GREEDY_TOKENS, values.shape[1])
            log_weights = np.where(np.isfinite(values[:, :num]), np.log(greedy_weights(num)), -np.inf)
            return Candidates(tokens[:, :num], log_weights.astype(np.float32))
        scores = filtered(values.astype(np.float64), self.params)[:, :NUM_CANDIDATES]
        return Candidates(tokens[:, :NUM_CANDIDATES], (scores - scores[:, :1]).astype(np.float32))


class StepAnswer(Protocol):
    """A draft's answer about the nodes of one step."""

    def candidates(self, guessing: Guessing, positions: NDArray[np.int32]) -> Candidates:
        """Candidates after each node; `positions` (num_nodes,) are the absolute ones of the children.

        Raises InvalidRequest or Unavailable if nothing can be chosen.
        """


def _log_probs(scores: NDArray[np.floating[Any]], num: int) -> NDArray[np.float32]:
    """Log-softmax over all scores of a node, (num_nodes, num) of the first tokens; -inf for excluded tokens."""
    with np.errstate(invalid="ignore"):  # in rows without a finite score
        known = np.where(scores > -np.inf, scores, -np.inf).astype(np.float64)  # without NaN
        peaks = known.max(1, keepdims=True)
        known -= peaks
        known -= np.log(np.exp(known).sum(1, keepdims=True))
    return np.where(np.isfinite(peaks), np.minimum(known[:, :num], 0.0), -np.inf).astype(np.float32)


class TemperatureScaling:
    """The exponent (inverse temperature) for one kind of guess (Guo et al., arXiv 1706.04599), learnt while serving.

    The target takes the largest of its logits, or of its logits plus noise that the draft knows. The draft's logits
    differ from the target's. If the differences were Gumbel noise, a token's chance to be the target's would be the
    softmax of the draft's logits over the scale of that noise: a close draft may be more certain than its own
    probabilities. If the target's noise is unknown, a draft may also be too certain. One number corrects both, an
    exponent of probabilities, learnt from the tokens that followed. It does not affect the ranking of a node's
    children, but the choice of the nodes to add.
    """

    def __init__(self, power: float = 1.0, is_learnt: bool = True) -> None:
        self.power, self.is_learnt = power, is_learnt
        self.num_tokens = 0  # observed so far
        self._information = PRIOR_INFORMATION  # Fisher information about the power in all observed tokens

    def observe(self, candidates: Candidates, tokens: NDArray[np.int32]) -> None:
        """Learn from the tokens (num_nodes,) that followed nodes with these candidates.

        This is one step of Newton's method towards the maximum likelihood, weighted by earlier observations.
        """
        if not self.is_learnt or len(tokens) == 0:
            return
        slope, information = _slope(candidates, tokens, self.power)
        self.num_tokens += len(tokens)
        kept = 0.5 ** (len(tokens) / HALF_LIFE_TOKENS)
        self._information = max(PRIOR_INFORMATION, kept * self._information + information)
        self.power = min(MOST_POWER, max(LEAST_POWER, self.power + slope / self._information))


class TemperatureScalings:
    """The exponents of a draft worker by kind of guess, learnt from all its sessions together."""

    def __init__(self, power: float = 0.0) -> None:
        """`power` fixes all exponents; 0 learns each."""
        self._fixed = TemperatureScaling(power or 1.0, is_learnt=False)
        self._own = TemperatureScaling(is_learnt=False)
        self._is_learnt = power == 0.0
        self._learnt: dict[tuple[str, float], TemperatureScaling] = {}

    def of(self, guessing: Guessing) -> TemperatureScaling:
        """The exponent for what a call asks for; sampled schemes use the draft's probabilities unchanged."""
        if guessing.is_sample:
            return self._own
        if not self._is_learnt:
            return self._fixed
        kind = ("noise known" if guessing.is_perturbed else "noise unknown", round(guessing.params.temperature, 1))
        found = self._learnt[kind] = self._learnt.pop(kind, TemperatureScaling())  # moved to the end: LRU
        if len(self._learnt) > MAX_KINDS:
            del self._learnt[next(iter(self._learnt))]
        return found

    def notes(self) -> list[str]:
        """A readable summary of the learnt exponents."""
        return [
            f"guesses at temperature {temperature:g}{'' if temperature == 0 else f', {noise}'} are judged by the "
            f"draft's probabilities to the power of {scaling.power:.2f}, learnt from {scaling.num_tokens} tokens"
            for (noise, temperature), scaling in list(self._learnt.items())
            if scaling.num_tokens
        ]


def scaled(log_probs: NDArray[np.float32], power: float) -> NDArray[np.float32]:
    """Probabilities (num_nodes, num_candidates) to a power, normalised with the rest as one more candidate."""
    if power == 1.0:
        return log_probs
    return np.minimum(_raised(_with_rest(log_probs), power)[:, :-1], 0.0).astype(np.float32)


def _with_rest(log_probs: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-probabilities (num_nodes, num_candidates + 1), the last that of all other tokens together."""
    known = log_probs.astype(np.float64)
    rest = np.log(np.maximum(1.0 - np.exp(known).sum(1, keepdims=True), LEAST_CHANCE))
    return np.concatenate((known, rest), axis=1)


def _raised(log_probs: NDArray[np.float64], power: float) -> NDArray[np.float64]:
    """Log-probabilities to a power, each row normalised."""
    raised: NDArray[np.float64] = power * log_probs
    raised -= np.log(np.exp(raised).sum(1, keepdims=True))
    return raised


def _slope(candidates: Candidates, right: NDArray[np.int32], power: float) -> tuple[float, float]:
    """Derivative of the log-likelihood of the right tokens by the power, and Fisher's information about the power."""
    log_probs = _with_rest(candidates.log_probs)
    probs, finite = np.exp(_raised(log_probs, power)), np.where(np.isfinite(log_probs), log_probs, 0.0)
    mean, mean_square = (probs * finite).sum(1), (probs * finite**2).sum(1)
    is_right = (candidates.tokens == right[:, None]) & np.isfinite(candidates.log_probs)
    places = np.where(is_right.any(1), is_right.argmax(1), -1)  # among candidates, or in the rest
    chosen = log_probs[np.arange(len(right)), places]
    return float((chosen - mean).sum()), float((mean_square - mean**2).sum())
