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


@dataclass(frozen=True, slots=True)
class Guessing:
    """All inputs of candidates besides the logits; where it is equal, cached expansions stay valid."""

    params: SamplingParams
    prompt_length: int
    is_sample: bool  # candidates are a distribution to sample from, not the likeliest to be accepted
    is_perturbed: bool  # by the noise with which the target will sample
    vocab_size: int = 0  # of the target: it cannot draw further tokens; 0 if it has all tokens of the draft

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
            with np.errstate(divide="ignore", invalid="ignore"):  # where a row has no token with a finite logit
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
