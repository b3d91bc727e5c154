"""Allocates the buffers of passes through a Llama-like model's layers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from bough.model.cpu.llvm_vectors import LANES
from bough.model.cpu.operands import LINE, LINE_WORDS
from bough.model.llama.layer import LayerWorkspace
from bough.model.llama.weights import sizes_of
from bough.model.loading.loading import Skeleton

RowsOf = Callable[[int, int], NDArray[np.int32] | NDArray[np.uint32]]  # from a number of blocks and of inputs


def num_blocks(num_rows: int) -> int:
    """Number of blocks for `num_rows` rows."""
    return -(-num_rows // LANES)


def word_rows(blocks: int, inputs: int) -> NDArray[np.int32]:
    """Buffer for rows of products in 16 bits."""
    return np.zeros((blocks, inputs // 2, LANES), np.int32)


def code_rows(blocks: int, inputs: int) -> NDArray[np.uint32]:
    """Buffer for rows of products in 8 bits."""
    return np.zeros((blocks, inputs // LINE * LINE_WORDS, LANES), np.uint32)


class Workspace:
    """Buffers that grow to the largest pass so far."""

    def __init__(self, skeleton: Skeleton, make_rows: RowsOf) -> None:
        """Allocate one block; `make_rows` allocates rows of products."""
        self._sizes, self._make_rows = sizes_of(skeleton), make_rows
        self._hidden, self._intermediate = int(skeleton.config.hidden_size), int(skeleton.config.intermediate_size)
        self._buffers = self._allocate(1)

    def of(self, blocks: int) -> LayerWorkspace:
        """Buffers for `blocks` blocks of rows; valid until the next call."""
        most = len(self._buffers.hidden)
        if blocks > most:
            self._buffers, most = self._allocate(blocks), blocks
        return LayerWorkspace._make(part[: len(part) // most * blocks] for part in self._buffers)

    def _allocate(self, blocks: int) -> LayerWorkspace:
        rows, attended = blocks * LANES, self._sizes.num_heads * self._sizes.head_dim
        qkv = attended + 2 * self._sizes.num_kv_heads * self._sizes.head_dim
        return LayerWorkspace(
            np.zeros((blocks, self._hidden, LANES), np.float32),
            self._make_rows(blocks, self._hidden),
            np.zeros((rows, qkv), np.float32),
            np.zeros((rows, attended), np.uint16),
            np.zeros((blocks, attended, LANES), np.float32),
            self._make_rows(blocks, attended),
            np.zeros((blocks, self._intermediate, LANES), np.float32),
            np.zeros((blocks, self._intermediate, LANES), np.float32),
            self._make_rows(blocks, self._intermediate),
        )
