"""Temperature scaling of a draft's probabilities (Guo et al., arXiv 1706.04599), learnt while serving.

The target takes the largest of its logits, or of its logits plus noise that the draft knows
(`draft_worker.candidates.candidates`). The draft's logits differ from the target's. If the differences were Gumbel
noise, a token's chance to be the target's would be the softmax of the draft's logits over the scale of that noise: a
close draft may be more certain than its own probabilities. Where the target's noise is unknown a draft may also be too
certain. Either is corrected by one number, an exponent of probabilities, learnt from the tokens that followed. The
ranking of a node's children does not depend on it; which nodes are worth adding does.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
        """What has been learnt, for people."""
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
