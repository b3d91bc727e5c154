"""The CPU backend: our own kernels, compiled by numba."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bough.model.backend import Backend
from bough.model.batch.batch import Chunk
from bough.model.batch.state_steps import StateSteps
from bough.model.cpu import unpack
from bough.model.cpu.attention_kernel import attend_in_slots
from bough.model.cpu.delta_rule import run_on_cpu
from bough.model.cpu.gemm import GROUP, LINE_BYTES
from bough.model.cpu.linear import can_multiply, fixed_product, is_left_to_us, multiply
from bough.model.cpu.llvm_vectors import has_feature, multiplies_bytes, multiplies_pairs
from bough.model.llama.decoder import CompiledLayers, LlamaDecoder
from bough.model.llama.weights import supports_fused_int8, supports_fused_layers
from bough.model.packed import Matrix


class CpuBackend(Backend):
    """Kernels of `bough.model.cpu`, and whole layers of Llama-like models of `bough.model.llama`."""

    name = "cpu"
    rooms = ("bough.model.cpu", "bough.model.llama")
    compiles_ahead = True
    linear = staticmethod(fixed_product)
    multiplies_single_rows = staticmethod(is_left_to_us)
    write = staticmethod(unpack.write)
    compiles = staticmethod(supports_fused_layers)
    compiles_int8 = staticmethod(supports_fused_int8)
    decoder = LlamaDecoder
    layers = CompiledLayers

    def describe(self, device: torch.device) -> str:
        """torch's instruction set, and the way in which our products multiply bfloat16."""
        dots = " and products of bfloat16" if has_feature("avx512bf16") else ""
        ours = "by pairs" if multiplies_pairs() else "one by one"
        return f"CPU with {torch.backends.cpu.get_cpu_capability()}{dots}, ours {ours}"

    def multiply(self, rows: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
        return multiply(rows, self.written_out(matrix, rows.dtype), bias)

    def fits_single_rows(self, linear: nn.Linear, dtype: torch.dtype) -> bool:
        is_usual = linear.out_features >= GROUP and linear.in_features * dtype.itemsize % LINE_BYTES == 0
        return is_usual and can_multiply(linear.in_features, dtype)

    def attend(
        self, chunk: Chunk, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *rules: Any
    ) -> torch.Tensor:
        return attend_in_slots(chunk, layer, queries, keys, values, *rules).to(queries.dtype)

    def recur(
        self,
        qkv: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        steps: StateSteps,
        states: torch.Tensor,
        num_key_heads: int,
        begin: int,
    ) -> torch.Tensor:
        return run_on_cpu(qkv[: len(decay)], decay, beta, steps.steps, states, num_key_heads, begin)

    @property
    def prefers_int8(self) -> bool:
        return multiplies_bytes()


BACKEND = CpuBackend()
