"""What a request's parameters and its grammar make of a draft's logits: penalties, biases, and forbidden tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bough.grammar.allowed_tokens import AllowedTokens
from bough.model.sampling.sampler import penalised
from bough.model.sampling.token_counts import TokenCounts
from bough.protocol.sampling_params import SamplingParams
from draft_worker.candidates.candidates import Guessing


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


@torch.inference_mode()
def adjust(
    logits: torch.Tensor, guessing: Guessing, past: TokenCounts, paths: NDArray[np.int32], positions: NDArray[np.int32]
) -> None:
    """Apply penalties, bias and `min_tokens` in place to logits (num_nodes, vocab_size), as decoding at each node.

    Paths and positions (num_nodes, width) lead from the root to each node; position -1 marks unused places. Paths and
    `past` may contain tokens that only the target has.
    """
    params, vocab_size = guessing.params, logits.shape[1]
    if params.has_penalties:
        _penalise(logits, params, Seen.of(past, paths, positions, guessing.prompt_length, vocab_size))
    biases = {token: bias for token, bias in params.logit_bias.items() if token < vocab_size}
    if biases:
        columns = torch.tensor([*biases], device=logits.device)
        values = torch.tensor([*biases.values()], dtype=logits.dtype, device=logits.device)
        logits.index_copy_(1, columns, logits.index_select(1, columns) + values)
    early = positions.max(axis=1) + 1 - guessing.prompt_length < params.min_tokens
    ends = [token for token in params.stop_token_ids if token < vocab_size]
    if ends and early.any():
        rows = torch.from_numpy(np.flatnonzero(early)).to(logits.device)
        logits[rows[:, None], torch.tensor(ends, device=logits.device)] = -torch.inf
    if guessing.vocab_size:
        logits[:, guessing.vocab_size :] = -torch.inf


def _penalise(logits: torch.Tensor, params: SamplingParams, seen: Seen) -> None:
    """Apply penalties in place to the logits (num_nodes, vocab_size) of the few tokens that occurred."""
    columns = torch.from_numpy(seen.tokens).to(logits.device)
    values = logits.index_select(1, columns).cpu().numpy()
    seen_values = penalised(values.astype(np.float64), seen.counts, params)
    values = np.where(seen.is_seen, seen_values, values).astype(np.float32)
    logits.index_copy_(1, columns, torch.from_numpy(values).to(logits.device))


@torch.inference_mode()
def constrain(
    logits: torch.Tensor, allowed: AllowedTokens, paths: NDArray[np.int32], is_output: NDArray[np.bool_]
) -> None:
    """Set logits (num_nodes, vocab_size) of tokens that may not follow to minus infinity, in place.

    `paths` (num_nodes, width) lead from the root to each node; `is_output` marks the places that are tokens of the
    output. Nodes that the grammar forbids themselves keep their logits: the target never gets there.
    """
    forbidden = np.zeros(logits.shape, np.bool_)
    outputs = [path[places].tolist() for path, places in zip(paths, is_output, strict=True)]
    for node, following in enumerate(allowed.after_each(outputs)):
        if following is not None:
            np.logical_not(following, out=forbidden[node])
    logits.masked_fill_(torch.from_numpy(forbidden).to(logits.device), -torch.inf)
