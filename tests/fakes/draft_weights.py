"""Weights of a draft's guesses from one row of its logits, as the draft worker computes them from many rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bough.model.sampling.draft_sampler import GREEDY_TOKENS, greedy_weights, require_numbers
from bough.model.sampling.sampler import Row, filtered, largest
from bough.protocol.sampling_params import SamplingParams


def draft_weights(
    logits: Row, params: SamplingParams, max_tokens: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Tokens and weights, each (at most max_tokens,), best first: what to sample guesses from.

    The draft's distribution at the request's temperature and filters without its tail; weights are above 0. At
    temperature 0, where any distribution is as right as another, they fall so steeply that a sample without
    replacement is the best tokens in their order.

    Raises:
        Unavailable: the logits hold no finite number.
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
