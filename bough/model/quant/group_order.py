"""Which group each input of a GPTQ matrix belongs to, looked at when a model is opened: kernels take it at its word."""

from __future__ import annotations

import numpy as np

from bough.errors import CheckpointError
from bough.model.checkpoint.checkpoint import TensorPlace


def unless_in_order(groups: TensorPlace, num_groups: int) -> TensorPlace | None:
    """None where inputs are in the order of groups of equal size, as most tools write them: nothing need be looked up.

    Raises:
        CheckpointError: it cannot be read, or names groups that are not there.
    """
    try:
        numbers = np.fromfile(groups.file, np.int32, groups.shape[0], offset=groups.offset)
    except OSError as exc:
        raise CheckpointError(f"{groups.file}: tensor {groups.name} cannot be read: {exc}") from exc
    if len(numbers) < groups.shape[0]:
        raise CheckpointError(f"{groups.file}: tensor {groups.name} ends after {len(numbers)} of {groups.shape[0]}")
    wrong = numbers[(numbers < 0) | (numbers >= num_groups)]
    if len(wrong):
        raise CheckpointError(
            f"{groups.file}: tensor {groups.name}: groups must be 0 to {num_groups - 1}, got {wrong[0]}"
        )
    if num_groups < 1 or len(numbers) % num_groups:
        return groups
    in_order = np.arange(len(numbers)) // (len(numbers) // num_groups)
    return None if np.array_equal(numbers, in_order) else groups
