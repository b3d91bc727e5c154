"""Counts of a text's tokens for penalties: distinct tokens, and how often each occurs after the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bough.protocol.prefix_hash import Tokens


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
