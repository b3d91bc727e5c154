"""Temperature scaling of a draft's probabilities (Guo et al., arXiv 1706.04599), learnt while serving.

The target takes the largest of its logits, or of its logits plus noise that the draft knows
(`draft_worker.candidates.candidates`). The draft's logits differ from the target's. If the differences were Gumbel
noise, a token's chance to be the target's would be the softmax of the draft's logits over the scale of that noise: a
close draft may be more certain than its own probabilities. Where the target's noise is unknown a draft may also be too
certain. Either is corrected by one number, an exponent of probabilities, learnt from the tokens that followed. The
ranking of a node's children does not depend on it; which nodes are worth adding does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bough.model.cpu.jit import strict, strict_inner
from draft_worker.candidates.candidates import Guessing
from draft_worker.growth.grower import Candidates

LEAST_POWER, MOST_POWER = 0.25, 4.0
PRIOR_INFORMATION = 16.0  # Fisher information of the prior that the power is 1, worth about as many uncertain tokens
HALF_LIFE_TOKENS = 4096.0  # after so many tokens, earlier observations weigh half as much
LEAST_CHANCE = 1e-6  # least probability that none of the candidates is right
MAX_KINDS = 64  # limit of kinds of guesses that are remembered


class TemperatureScaling:
    """The exponent (inverse temperature) for one kind of guess."""

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
        slope, information = _slope(candidates.tokens, candidates.log_probs, tokens, self.power)
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
        """What has been learnt, for people."""
        return [
            f"guesses at temperature {temperature:g}{'' if temperature == 0 else f', {noise}'} are judged by the "
            f"draft's probabilities to the power of {scaling.power:.2f}, learnt from {scaling.num_tokens} tokens"
            for (noise, temperature), scaling in list(self._learnt.items())
            if scaling.num_tokens
        ]


def scaled(log_probs: NDArray[np.float32], power: float) -> NDArray[np.float32]:
    """Probabilities (num_nodes, num_candidates) to a power, normalised with the rest as one more candidate."""
    return log_probs if power == 1.0 else _scaled(log_probs, power)


@strict_inner
def _log_rest(log_probs: Any) -> Any:
    """Logarithm of the probability that candidates leave for other tokens."""
    total = 0.0
    for log_prob in log_probs:
        total += np.exp(np.float64(log_prob))
    return np.log(max(1.0 - total, LEAST_CHANCE))


@strict_inner
def _log_total(log_probs: Any, log_rest: Any, power: Any) -> Any:
    """Logarithm of the normalising sum of the powers."""
    total = np.exp(power * log_rest)
    for log_prob in log_probs:
        total += np.exp(power * np.float64(log_prob))
    return np.log(total)


@strict
def _scaled(log_probs: Any, power: Any) -> Any:
    result = np.empty_like(log_probs)
    for node in range(len(log_probs)):
        log_total = _log_total(log_probs[node], _log_rest(log_probs[node]), power)
        for place in range(log_probs.shape[1]):
            result[node, place] = min(0.0, power * np.float64(log_probs[node, place]) - log_total)
    return result


@strict
def _slope(tokens: Any, log_probs: Any, right: Any, power: Any) -> Any:
    """Derivative of the log-likelihood of the right tokens by the power, and Fisher's information about the power."""
    slope, information = 0.0, 0.0
    for node in range(len(right)):
        log_rest = _log_rest(log_probs[node])
        log_total = _log_total(log_probs[node], log_rest, power)
        prob = np.exp(power * log_rest - log_total)
        chosen, mean, mean_square = log_rest, prob * log_rest, prob * log_rest**2
        for place in range(log_probs.shape[1]):
            log_prob = np.float64(log_probs[node, place])
            if log_prob == -np.inf:
                continue
            if tokens[node, place] == right[node]:
                chosen = log_prob
            prob = np.exp(power * log_prob - log_total)
            mean += prob * log_prob
            mean_square += prob * log_prob**2
        slope += chosen - mean
        information += mean_square - mean**2
    return slope, information
