"""Takes from a draft's guesses the tokens that the request's grammar forbids."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from bough.grammar.allowed_tokens import AllowedTokens


@torch.inference_mode()
def constrain(
    logits: torch.Tensor, allowed: AllowedTokens, paths: NDArray[np.int32], is_output: NDArray[np.bool_]
) -> None:
    """Set logits (num_nodes, vocab_size) of tokens that may not follow to minus infinity, in place.

    `paths` (num_nodes, width) lead from the root to each node; `is_output` marks the places that are tokens of the
    output. Nodes that the grammar forbids themselves keep their logits: the target never gets there.
    """
    forbidden = np.zeros(logits.shape, np.bool_)
    for node, (path, places) in enumerate(zip(paths, is_output, strict=True)):
        if (following := allowed.after(path[places].tolist())) is not None:
            np.logical_not(following, out=forbidden[node])
    logits.masked_fill_(torch.from_numpy(forbidden).to(logits.device), -torch.inf)
