"""The GPU backend with the library's products in place of our own kernels for them."""

from __future__ import annotations

import torch

from bough.model.backends.triton import TritonBackend, product_by_library, products_by_library


class CublasBackend(TritonBackend):
    """Products of a fixed number of rows by torch, in parts and including padding; all else as `TritonBackend`."""

    name = "cublas"

    def multiply(self, rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return product_by_library(rows, matrix, bias)

    def linear_by_head(self, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        return products_by_library(rows, matrices)

    def describe(self, device: torch.device) -> str:
        """Name of the GPU, and whose products these are."""
        return f"{super().describe(device)}, products by cuBLAS"


BACKEND = CublasBackend()
