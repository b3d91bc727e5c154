"""Matrices of all layers one after another in memory, for compiled code."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from bough.model.cpu.linear import numbers
from bough.model.cpu.llvm_vectors import LANES
from bough.model.cpu.operands import MOST, ZERO
from bough.runtime.host_memory import large_pages


class Stack:
    """Stores matrices in bfloat16, as in the checkpoint."""

    def __init__(self, count: int) -> None:
        self._count, self._used = count, 0
        self.matrices: NDArray[Any] = np.zeros(0, np.uint16)  # (count, ...) as `laid_out` makes them

    def put(self, matrix: torch.Tensor) -> None:
        """Add the next matrix; all have the same shape."""
        own = self.laid_out(matrix.detach())
        if not self._used:
            memory = np.frombuffer(large_pages(self._count * own.nbytes), own.dtype)
            self.matrices = memory.reshape(self._count, *own.shape)
        self.matrices[self._used] = own
        self._used += 1

    @staticmethod
    def laid_out(matrix: torch.Tensor) -> NDArray[Any]:
        """The numbers of a matrix, (outputs, inputs) uint16, in the form that products read."""
        return numbers(matrix)

    def weights_of(self, outputs: NDArray[np.int32]) -> NDArray[np.float32]:
        """The weights (num_outputs, inputs) of some outputs of the first matrix."""
        weights: NDArray[np.float32] = (self.matrices[0][outputs].astype(np.uint32) << np.uint32(16)).view(np.float32)
        return weights


class Int8Stack(Stack):
    """Stores matrices in 8 bits (`bough.model.cpu.operands`) with a scale for each output: half the bytes to read."""

    @staticmethod
    def laid_out(matrix: torch.Tensor) -> NDArray[Any]:
        """(groups, words, LANES) int32; inputs are whole words, and outputs are padded to whole groups."""
        whole = nn.functional.pad(matrix.float(), (0, 0, 0, -len(matrix) % LANES))
        scales = whole.abs().amax(1) / MOST
        codes = (whole / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round().clamp(-MOST, MOST) + ZERO
        words = codes.to(torch.uint8).numpy().view(np.int32).reshape(-1, LANES, whole.shape[1] // 4)
        of_outputs = scales.numpy().view(np.int32).reshape(-1, 1, LANES)
        return np.concatenate((words.transpose(0, 2, 1), of_outputs), axis=1)

    def weights_of(self, outputs: NDArray[np.int32]) -> NDArray[np.float32]:
        words = self.matrices[0][outputs // LANES, :, outputs % LANES]
        codes, scales = (np.ascontiguousarray(part) for part in (words[:, :-1], words[:, -1:]))
        weights: NDArray[np.float32] = (codes.view(np.uint8).astype(np.float32) - ZERO) * scales.view(np.float32)
        return weights
