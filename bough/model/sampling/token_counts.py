"""The tokens of a text as penalties count them: which there are, and how often each stands after the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bough.protocol.prefix_hash import Tokens


class TokenCounts(NamedTuple):
    """Of a text, or of its beginning."""

    tokens: NDArray[np.int64]  # (num_distinct,) ascending
    num_outputs: NDArray[np.int64]  # (num_distinct,) how often each stands after the prompt

    @classmethod
    def of(cls, tokens: Tokens, prompt_length: int) -> TokenCounts:
        """Of tokens in the order of the text, `prompt_length` of which are the prompt."""
        text = np.asarray(tokens, np.int64)
        numbers = np.bincount(text)
        distinct = np.flatnonzero(numbers)
        return cls(distinct, np.bincount(text[prompt_length:], minlength=len(numbers))[distinct])

    def after(self, tokens: Sequence[int], num_prompt: int) -> TokenCounts:
        """With more tokens behind the text, `num_prompt` of which still are the prompt: few, and so never all again."""
        more = TokenCounts.of(tokens, num_prompt)
        distinct = np.union1d(self.tokens, more.tokens)
        num_outputs = np.zeros(len(distinct), np.int64)
        for counts in (self, more):
            num_outputs[np.searchsorted(distinct, counts.tokens)] += counts.num_outputs
        return TokenCounts(distinct, num_outputs)
