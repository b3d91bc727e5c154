"""Matrices of all layers one after another in memory, for compiled code."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from bough.model.cpu.huge_pages import large_pages
from bough.model.cpu.linear import numbers
from bough.model.cpu.llvm_vectors import LANES
from bough.model.cpu.operands import MOST, ZERO


class Stack:
    """Stores matrices in bfloat16, as in the checkpoint."""

    def __init__(self, count: int) -> None:
        self._count, self._used = count, 0
        self.matrices: NDArray[np.uint16] = np.zeros((0, 0, 0), np.uint16)  # (count, outputs, inputs)

    def put(self, matrix: torch.Tensor) -> None:
        """Add the next matrix; all have the same shape."""
        if not self._used:
            memory = np.frombuffer(large_pages(self._count * matrix.nbytes), np.uint16)
            self.matrices = memory.reshape(self._count, *matrix.shape)
        self.matrices[self._used] = numbers(matrix.detach())
        self._used += 1


class Int8Stack:
    """Stores matrices in 8 bits (`bough.model.cpu.operands`) with a scale for each output: half the bytes to read."""

    def __init__(self, count: int) -> None:
        self._count, self._used = count, 0
        self.matrices: NDArray[np.int32] = np.zeros((0, 0, 0, 0), np.int32)  # (count, groups, words, LANES)

    def put(self, matrix: torch.Tensor) -> None:
        """Add the next matrix; all have one shape, with inputs in whole words. Outputs are padded to whole groups."""
        whole = nn.functional.pad(matrix.detach().float(), (0, 0, 0, -len(matrix) % LANES))
        shape = len(whole) // LANES, whole.shape[1] // 4 + 1, LANES
        if not self._used:
            memory = np.frombuffer(large_pages(self._count * math.prod(shape) * 4), np.int32)
            self.matrices = memory.reshape(self._count, *shape)
        scales = whole.abs().amax(1) / MOST
        codes = (whole / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round().clamp(-MOST, MOST) + ZERO
        words = codes.to(torch.uint8).numpy().view(np.int32).reshape(-1, LANES, shape[1] - 1)
        self.matrices[self._used, :, :-1] = words.transpose(0, 2, 1)
        self.matrices[self._used, :, -1] = scales.numpy().view(np.int32).reshape(-1, LANES)
        self._used += 1
