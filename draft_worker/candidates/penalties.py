"""Penalties for tokens that occur before a draft's nodes, applied to the logits of these few tokens alone."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from bough.model.sampling.token_counts import TokenCounts
from bough.protocol.sampling_params import SamplingParams
from draft_worker.candidates.candidates import Guessing
from draft_worker.candidates.past_tokens import Seen


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
        penalise(logits, params, Seen.of(past, paths, positions, guessing.prompt_length, vocab_size))
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


def penalise(logits: torch.Tensor, params: SamplingParams, seen: Seen) -> None:
    """Apply penalties in place to the logits (num_nodes, vocab_size) of tokens that occurred; others have none.

    Results are rounded to float32 after each penalty, as in decoding.
    """
    columns = torch.from_numpy(seen.tokens).to(logits.device)
    values = logits.index_select(1, columns).cpu().numpy()
    factor = np.where(values > 0, 1 / params.repetition_penalty, params.repetition_penalty)
    values *= np.where(seen.is_seen, factor, 1.0)
    values -= params.presence_penalty * (seen.counts > 0) + params.frequency_penalty * seen.counts
    logits.index_copy_(1, columns, torch.from_numpy(values).to(logits.device))
