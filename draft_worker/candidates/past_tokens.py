"""The tokens before a draft's nodes, as penalties count them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bough.model.sampling.token_counts import TokenCounts


class Seen(NamedTuple):
    """Tokens of the vocabulary that occur before or at some nodes."""

    tokens: NDArray[np.int64]  # (num_seen,) ascending
    is_seen: NDArray[np.bool_]  # (num_nodes, num_seen) before or at the node
    counts: NDArray[np.int64]  # (num_nodes, num_seen) occurrences after the prompt

    @classmethod
    def of(
        cls,
        past: TokenCounts,
        paths: NDArray[np.int32],
        positions: NDArray[np.int32],
        prompt_length: int,
        vocab_size: int,
    ) -> Seen:
        """Paths and positions (num_nodes, width) lead from the root to each node; position -1 marks unused places."""
        nodes, places = np.nonzero((positions >= 0) & (paths < vocab_size))
        on_paths, is_output = paths[nodes, places], positions[nodes, places] >= prompt_length
        in_past = past.tokens[: np.searchsorted(past.tokens, vocab_size)]
        tokens = np.union1d(in_past, on_paths)
        of_past, of_paths = np.searchsorted(tokens, in_past), np.searchsorted(tokens, on_paths)
        is_seen = np.zeros((len(paths), len(tokens)), np.bool_)
        is_seen[:, of_past] = True
        is_seen[nodes, of_paths] = True
        counts = np.zeros(is_seen.shape, np.int64)
        counts[:, of_past] = past.num_outputs[: len(in_past)]
        np.add.at(counts, (nodes[is_output], of_paths[is_output]), 1)
        return cls(tokens, is_seen, counts)
