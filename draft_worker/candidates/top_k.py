"""The largest logits of every row: what a draft step needs of 49,152 numbers is a few hundred."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

GROUP = 64  # logits of which the largest is found first


def largest(logits: torch.Tensor, num: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """The `num` largest of each row of (num_rows, vocab_size), and where they are: (num_rows, num) each, descending.

    On the CPU through maxima of groups: at least `num` logits are not below the `num`-th largest maximum, and hardly
    more are. Several times as fast as torch's own; of equals the lower token comes first. Of a row whose numbers are in
    part none anything may be found; one of nothing else gives none.
    """
    num_groups = logits.shape[1] // GROUP
    if logits.device.type != "cpu" or num_groups < num:
        top = logits.topk(min(num, logits.shape[1]), dim=1)
        return top.values.cpu().numpy(), top.indices.cpu().numpy().astype(np.int32)
    maxima = logits[:, : GROUP * num_groups].unflatten(1, (GROUP, num_groups)).amax(1).numpy()
    least = np.partition(maxima, num_groups - num, axis=1)[:, num_groups - num]
    values, tokens = np.full((len(logits), num), np.nan, np.float32), np.zeros((len(logits), num), np.int32)
    for row, numbers in enumerate(logits.numpy()):
        found = np.flatnonzero(numbers >= least[row])
        if len(found):
            best = found[np.argsort(-numbers[found], kind="stable")[:num]]
            values[row], tokens[row] = numbers[best], best
    return values, tokens
