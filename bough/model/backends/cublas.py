"""The GPU backend with the library's products in place of our own kernels for them."""

from __future__ import annotations

import torch
from torch import nn

from bough.model.backend import in_counts
from bough.model.backends.triton import TritonBackend
from bough.model.packed import Matrix
from bough.sizing.row_counts import RowCounts

FIXED = RowCounts(256, 256)  # rows of the library's products: it chooses a kernel by their number


class CublasBackend(TritonBackend):
    """Products by torch, of a fixed number of rows that follow one another in memory; all else as `TritonBackend`."""

    name = "cublas"
    takes_packed = False
    groups_experts = False

    def multiply(self, rows: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
        weights, flat = self.written_out(matrix, rows.dtype), rows.reshape(-1, rows.shape[-1])
        out = in_counts(lambda part: nn.functional.linear(part.contiguous(), weights, bias), FIXED, flat)
        return out.view(*rows.shape[:-1], len(weights))

    def linear_by_head(self, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        by_inputs = matrices.transpose(1, 2)
        return in_counts(lambda part: torch.bmm(part.contiguous(), by_inputs), FIXED, rows, axis=1).transpose(0, 1)

    def describe(self, device: torch.device) -> str:
        """Name of the GPU, and whose products these are."""
        return f"{super().describe(device)}, products by cuBLAS"


BACKEND = CublasBackend()
