"""Sizes of recurrent layers, and memory that their states take; without torch, for `bough up`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

RECURRENT = "linear_attention"  # layer type in configurations
SNAPSHOTS = 2  # of a session: where its text diverged from another session's, and before its last answer
PATH_ROWS = 64  # accepted rows that a target's memory is planned for; trees are seldom deeper
GROWN_ROWS = 512  # nodes on which a draft runs below a session's text, whose rows are all kept
FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class StateShape:
    """Sizes of the recurrent layers of a model."""

    num_layers: int
    num_key_heads: int
    num_heads: int  # of values; each key head serves as many of them
    key_dim: int
    value_dim: int
    window: int  # earlier inputs that the convolution reads, in addition to a row's own
    dtype: torch.dtype  # of these inputs; states are float32

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype) -> StateShape | None:
        """The shape for a configuration; None if no layer is recurrent."""
        num_layers = list(getattr(config, "layer_types", None) or ()).count(RECURRENT)
        if not num_layers or not hasattr(config, "linear_conv_kernel_dim"):
            return None
        heads = int(config.linear_num_key_heads), int(config.linear_num_value_heads)
        dims = int(config.linear_key_head_dim), int(config.linear_value_head_dim)
        return cls(num_layers, *heads, *dims, int(config.linear_conv_kernel_dim) - 1, dtype)

    @property
    def num_inputs(self) -> int:
        """Numbers of a row that the convolution reads: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    @property
    def size(self) -> tuple[int, int, int]:
        """Shape of a layer's state."""
        return self.num_heads, self.key_dim, self.value_dim

    @property
    def row_bytes(self) -> int:
        """Bytes stored for a tree's row in all layers."""
        return self.num_layers * (self.num_inputs * self.dtype.itemsize + 2 * self.num_heads * FLOAT32_BYTES)

    def step_bytes(self, num_rows: int) -> int:
        """Bytes of computing a session's rows in a layer: the convolution's products and sums, and branches' states."""
        num_states = 1 + num_rows.bit_length()
        return FLOAT32_BYTES * (6 * num_rows * self.num_inputs + num_states * math.prod(self.size))

    def session_bytes(self, num_rows: int) -> int:
        """Bytes of a session: its states, their snapshots, and the stored inputs of `num_rows` rows."""
        state = math.prod(self.size) * FLOAT32_BYTES + self.window * self.num_inputs * self.dtype.itemsize
        return (1 + SNAPSHOTS) * self.num_layers * state + num_rows * self.row_bytes
