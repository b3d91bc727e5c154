"""Kernels by the code for CPUs, as Triton's interpreter takes a hundred times as long.

Weights are unpacked to the same bits as Triton's, as `tests/model/gpu/test_unpack.py` shows; sums of the delta rule are
in another order (`tests/model/gpu/test_delta_rule_triton.py`).
"""

from __future__ import annotations

from pathlib import Path

import torch

from bough.model.checkpoint.checkpoint import TensorPlace
from bough.model.checkpoint.gguf_file import BLOCKS
from bough.model.cpu.delta_rule import run_on_cpu
from bough.model.quant.awq import Awq
from bough.model.quant.ggml_blocks import TYPES, Blocks, BlockType
from bough.model.quant.gptq import Gptq
from bough.model.quant.scaled import Scaled

NAMES = {torch.uint8: "U8", torch.int8: "I8", torch.int32: "I32", torch.float16: "F16"}
NAMES |= {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0"}
NAMES |= {torch.bfloat16: "BF16", torch.float32: "F32"}


def take_steps(
    qkv: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, table: torch.Tensor, states: torch.Tensor, *rest: int
) -> torch.Tensor:
    """Take steps of the gated delta rule on the CPU."""
    return run_on_cpu(qkv[: len(decay)], decay, beta, table[:, :3].long().numpy(), states, *rest)


def write_down(
    words: torch.Tensor,
    zeros: torch.Tensor,
    scales: torch.Tensor,
    groups: torch.Tensor | None,
    bits: int,
    zero_offset: int,
    out: torch.Tensor,
) -> None:
    """Dequantize GPTQ's format on the CPU."""
    own = None if groups is None else _place(groups)
    source = Gptq(_place(words), _place(zeros), _place(scales), own, bits, zero_offset)
    _write(source, out, words, zeros, scales, *(() if groups is None else (groups,)))


def write_across(words: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Dequantize AWQ's format on the CPU."""
    _write(Awq(_place(words), _place(zeros), _place(scales)), out, words, zeros, scales)


def write_along(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    groups: torch.Tensor | None,
    bits: int,
    block: tuple[int, int],
    out: torch.Tensor,
) -> None:
    """Dequantize numbers by rows on the CPU."""
    tensors = [tensor for tensor in (numbers, scales, zeros, groups) if tensor is not None]
    own_zeros, own_groups = (None if tensor is None else _place(tensor) for tensor in (zeros, groups))
    _write(Scaled(_place(numbers), _place(scales), own_zeros, own_groups, bits, block), out, *tensors)


def write_blocks(data: torch.Tensor, size: tuple[int, int], type_: BlockType, half: int, out: torch.Tensor) -> None:
    """Dequantize a GGUF file's blocks on the CPU."""
    kind = next(kind for kind in TYPES if (BLOCKS[kind], TYPES[kind]) == (size, type_))
    Blocks(_place(data), kind, half).write(data.flatten(), out)


def _place(tensor: torch.Tensor) -> TensorPlace:
    return TensorPlace("", Path(), 0, tensor.nbytes, NAMES[tensor.dtype], tuple(tensor.shape))


def _write(source: Gptq | Awq | Scaled, out: torch.Tensor, *tensors: torch.Tensor) -> None:
    source._write([tensor.contiguous().view(torch.uint8).flatten() for tensor in tensors], out)
