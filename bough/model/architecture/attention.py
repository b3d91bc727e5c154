"""Tree attention, registered as an attention function of transformers.

Every row attends to the keys on its own path, in the order of positions and in blocks fixed by position. So its result
depends on its query and its path alone, bit for bit, not on the rest of the tree or the batch.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import AttentionInterface

from bough.errors import CheckpointError
from bough.model.architecture.latent import absorbed, expanded, is_latent
from bough.model.backend import backend_of
from bough.model.batch.batch import Chunk

NAME = "bough"


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001
    scaling: float,
    chunk: Chunk,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """Implements transformers' attention interface: (1, heads, rows, head_dim) in, (1, rows, heads, head_dim) out.

    Writes the rows' keys and values into their slots, then attends over the slots. `chunk` comes through the model's
    keyword arguments; the mask is implied by it.
    """
    layer = cast(int, module.layer_idx)
    _require_room(chunk, layer, key, value)
    keys, values = (numbers[0].transpose(0, 1) for numbers in (key, value))
    queries = absorbed(module, query) if is_latent(module) else query[0].transpose(0, 1)
    rules = scaling, sliding_window or 0, softcap or 0.0, None if s_aux is None else s_aux.float()
    out = backend_of(query.device).attend(chunk, layer, queries, keys, values, *rules)
    return (expanded(module, out) if is_latent(module) else out)[None], None


def _require_room(chunk: Chunk, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Check sizes before kernels write. Raises CheckpointError if the slots' sizes differ."""
    for piece in chunk.pieces[:1]:
        for name, numbers, held in (("keys", key, piece.slot.keys), ("values", value, piece.slot.values)):
            found, room = (numbers.shape[1], numbers.shape[3]), tuple(held.shape[2:])
            if found != room:
                raise CheckpointError(
                    f"config.json: {name} of all layers must be {room[0]} heads of {room[1]} numbers, as it says, got "
                    f"{found[0]} of {found[1]} in layer {layer}"
                )


AttentionInterface.register(NAME, tree_attention)
