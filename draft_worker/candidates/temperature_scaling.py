"""How sure of its guesses a draft may be: its own probabilities to a power, learnt from what was said then.

The target takes the largest of its own logits, or of these and noise that the draft knows
(`draft_worker.candidates.candidates`). The draft has other logits. Were the differences Gumbel noise of its own, a
token's chance to be the target's would be the softmax of the draft's logits over the scale of that noise: a close draft
may be surer than its own probabilities say. Where the target's noise is not known a draft may be too sure of a token as
well. Either way it is one number, as in temperature scaling (Guo et al., arXiv 1706.04599), and here it is learnt while
running, by what followed where the draft had been asked. The rank of a node's children does not depend on it: which
nodes are worth having does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bough.model.cpu.jit import strict, strict_inner
from draft_worker.candidates.candidates import Guessing
from draft_worker.growth.grower import Candidates

LEAST_POWER, MOST_POWER = 0.25, 4.0
PRIOR_INFORMATION = 16.0  # that the power is 1: about as many tokens of which the draft is in doubt
HALF_LIFE_TOKENS = 4096.0  # what was learnt before weighs half as much
LEAST_CHANCE = 1e-6  # that none of the candidates is right
MAX_KINDS = 64  # of guesses of which something is remembered


class TemperatureScaling:
    """The power for one kind of guess."""

    def __init__(self, power: float = 1.0, is_learnt: bool = True) -> None:
        self.power, self.is_learnt = power, is_learnt
        self.num_tokens = 0  # that it was learnt from
        self._information = PRIOR_INFORMATION  # in all tokens so far, about the power (Fisher's)

    def observe(self, candidates: Candidates, tokens: NDArray[np.int32]) -> None:
        """These tokens (num_nodes,) were right where the draft had said that the candidates may follow.

        One step of Newton's method towards the likeliest power, as far as all that was seen before allows.
        """
        if not self.is_learnt or len(tokens) == 0:
            return
        slope, information = _slope(candidates.tokens, candidates.log_probs, tokens, self.power)
        self.num_tokens += len(tokens)
        kept = 0.5 ** (len(tokens) / HALF_LIFE_TOKENS)
        self._information = max(PRIOR_INFORMATION, kept * self._information + information)
        self.power = min(MOST_POWER, max(LEAST_POWER, self.power + slope / self._information))


class TemperatureScalings:
    """What all sessions of a draft worker have taught it together, by kind of guess."""

    def __init__(self, power: float = 0.0) -> None:
        """`power` is that of every kind; 0 has each of them learnt."""
        self._fixed = TemperatureScaling(power or 1.0, is_learnt=False)
        self._own = TemperatureScaling(is_learnt=False)
        self._is_learnt = power == 0.0
        self._learnt: dict[tuple[str, float], TemperatureScaling] = {}

    def of(self, guessing: Guessing) -> TemperatureScaling:
        """That of what a call asks for: samples come from the draft's probabilities as they are."""
        if guessing.is_sample:
            return self._own
        if not self._is_learnt:
            return self._fixed
        kind = ("noise known" if guessing.is_perturbed else "noise unknown", round(guessing.params.temperature, 1))
        found = self._learnt[kind] = self._learnt.pop(kind, TemperatureScaling())  # the last used is the last
        if len(self._learnt) > MAX_KINDS:
            del self._learnt[next(iter(self._learnt))]
        return found

    def notes(self) -> list[str]:
        """What has been learnt, for people."""
        return [
            f"guesses at temperature {temperature:g}{'' if temperature == 0 else f', {noise}'} are judged by the "
            f"draft's probabilities to the power of {sharpness.power:.2f}, learnt from {sharpness.num_tokens} tokens"
            for (noise, temperature), sharpness in list(self._learnt.items())
            if sharpness.num_tokens
        ]


def sharpened(log_probs: NDArray[np.float32], power: float) -> NDArray[np.float32]:
    """(num_nodes, num_candidates) to a power, with what is left for other tokens taken as one more candidate."""
    return log_probs if power == 1.0 else _sharpened(log_probs, power)


@strict_inner
def _log_rest(log_probs: Any) -> Any:
    """Logarithm of what candidates leave for other tokens."""
    total = 0.0
    for log_prob in log_probs:
        total += np.exp(np.float64(log_prob))
    return np.log(max(1.0 - total, LEAST_CHANCE))


@strict_inner
def _log_total(log_probs: Any, log_rest: Any, power: Any) -> Any:
    """Logarithm of the sum by which powers of probabilities are probabilities again."""
    total = np.exp(power * log_rest)
    for log_prob in log_probs:
        total += np.exp(power * np.float64(log_prob))
    return np.log(total)


@strict
def _sharpened(log_probs: Any, power: Any) -> Any:
    result = np.empty_like(log_probs)
    for node in range(len(log_probs)):
        log_total = _log_total(log_probs[node], _log_rest(log_probs[node]), power)
        for place in range(log_probs.shape[1]):
            result[node, place] = min(0.0, power * np.float64(log_probs[node, place]) - log_total)
    return result


@strict
def _slope(tokens: Any, log_probs: Any, right: Any, power: Any) -> Any:
    """Derivative by the power of the log-likelihood of what was right, and Fisher's information about the power."""
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
