"""Batch-invariant linear layers: a row's result does not depend on other rows.

A library's product rounds differently for different numbers of rows, because it chooses other algorithms. With the
tiles of `bough.model.cpu.gemm` a row has the same bits alone and among a thousand, at any place, so bits need no
padding. This module knows no models.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import nn

from bough.model.cpu.gemm import GROUP, WORD_BYTES, lay_out
from bough.model.cpu.gemm_parallel import share_product
from bough.model.cpu.jit import pointer, strict_parallel
from bough.model.cpu.llvm_vectors import LANES, multiplies_and_adds
from bough.model.cpu.work_stealing import as_thread, counters
from bough.model.threads import all_threads

DTYPES = (torch.bfloat16, torch.float32)
_shares: dict[torch.dtype, Any] = {}  # pointers to `share_product`, by type


def can_multiply(num_inputs: int, dtype: torch.dtype) -> bool:
    """Whether `multiply` supports rows of `num_inputs` numbers of this type on this processor."""
    return dtype in DTYPES and num_inputs * dtype.itemsize % WORD_BYTES == 0 and multiplies_and_adds()


def is_left_to_us(rows: torch.Tensor, matrix: torch.Tensor) -> bool:
    """Whether `multiply` also computes products of a fixed number of rows, instead of the library.

    In float32 it must: on Intel's processors without AVX-512, MKL's rounding depends on a row's place among the others.
    In other types it does if the matrix, (outputs, inputs), need not be copied.
    """
    is_possible = rows.device.type == "cpu" and can_multiply(rows.shape[-1], rows.dtype)
    return is_possible and (rows.dtype == torch.float32 or matrix.is_contiguous())


def fixed_product(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A product whose number of rows is always the same."""
    if is_left_to_us(rows, matrix):
        return multiply(rows, matrix, bias)
    with all_threads():
        return nn.functional.linear(rows, matrix, bias)


def multiply(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Rows times a matrix, plus bias, (..., outputs), rounded once; computed by numba's threads.

    rows (..., inputs), matrix (outputs, inputs), bias (outputs,), of one type that `can_multiply` allows. A matrix that
    is not contiguous is copied first.
    """
    assert rows.shape[-1] == matrix.shape[1], "kernels do not check shapes"
    num_outputs = matrix.shape[0]
    outputs = max(num_outputs, GROUP)
    flat = rows.reshape(-1, rows.shape[-1]).contiguous()
    words = flat.view(torch.int32).numpy() if flat.dtype == torch.bfloat16 else flat.numpy()
    blocks = np.empty((-(-len(words) // LANES), words.shape[1], LANES), words.dtype)
    out = torch.empty(len(blocks) * LANES, outputs, dtype=rows.dtype)
    added = np.zeros(outputs, np.float32)
    if bias is not None:
        added[:num_outputs] = bias.float()
    if num_outputs < GROUP:
        matrix = nn.functional.pad(matrix, (0, 0, 0, GROUP - num_outputs))
    num_threads = numba.get_num_threads()
    taken, operands = counters(num_threads)[0], (numbers(matrix.contiguous()), added, numbers(out))
    if rows.dtype not in _shares:
        _shares[rows.dtype] = pointer(share_product, taken, 0, num_threads, blocks, len(words), *operands)
    _multiply(_shares[rows.dtype], taken, num_threads, words, blocks, *operands)
    return out[: len(words), :num_outputs].reshape(*rows.shape[:-1], num_outputs)


def numbers(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as an array for compiled code: bfloat16 as its bits in uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@strict_parallel
def _multiply(
    share: Any, taken: Any, num_threads: Any, words: Any, blocks: Any, matrix: Any, bias: Any, out: Any
) -> Any:
    """Multiply `words` (rows, words) of float32, or of int32 with two bfloat16; `share` points to `share_product`."""
    num_blocks = len(blocks)
    if num_blocks == 1:  # threads would cost more than they save
        lay_out(words, 0, blocks)
    else:
        for block in numba.prange(num_blocks):
            lay_out(words, block, blocks)
    for number in numba.prange(num_threads):
        share(taken, as_thread(number), num_threads, blocks, len(words), matrix, bias, out)
