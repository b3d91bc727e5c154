"""Products of rows with a layer's matrices, in which no row knows of any other.

A library's product rounds differently for different numbers of rows, because it goes about them differently. By tiles
(`bough.model.tiles`) a row has the same bits alone and among a thousand, at any place. So nothing need be padded for
the sake of bits. Knows no models.
"""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np
import torch

from bough.model.project import project
from bough.model.shares import counters
from bough.model.tiles import GROUP, LINE_BYTES, lay_out, parallel
from bough.model.vectors import LANES, has_feature

NEEDED = {torch.bfloat16: "avx512bf16", torch.float32: "avx512f"}  # features of a processor


def can_multiply(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether this processor has what it takes for matrices (outputs, inputs) of a shape and type."""
    outputs, inputs = shape
    is_whole = outputs >= GROUP and inputs * dtype.itemsize % LINE_BYTES == 0
    return is_whole and dtype in NEEDED and has_feature(NEEDED[dtype])


def multiply(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """(..., outputs) rows times a matrix, plus bias, rounded once; on the threads that numba has.

    rows (..., inputs), matrix (outputs, inputs) contiguous, bias (outputs,), of one type that `can_multiply` allows.
    """
    outputs = matrix.shape[0]
    flat = rows.reshape(-1, rows.shape[-1]).contiguous()
    words = flat.view(torch.int32).numpy() if flat.dtype == torch.bfloat16 else flat.numpy()
    blocks = np.empty((-(-len(words) // LANES), words.shape[1], LANES), words.dtype)
    out = torch.empty(len(blocks) * LANES, outputs, dtype=rows.dtype)
    added = np.zeros(outputs, np.float32) if bias is None else bias.float().numpy()
    num_threads = numba.get_num_threads()
    _multiply(counters(num_threads)[0], num_threads, words, blocks, numbers(matrix), added, numbers(out))
    return out[: len(words)].view(*rows.shape[:-1], outputs)


def numbers(tensor: torch.Tensor) -> np.ndarray:
    """As compiled code reads them: bfloat16 as the uint16 of its bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@parallel
def _multiply(taken, num_threads, words, blocks, matrix, bias, out):  # type: ignore[no-untyped-def]
    """words (rows, words) of float32, or int32 of two bfloat16; the rest as `project` has it."""
    num_blocks = len(blocks)
    if num_blocks == 1:  # not worth a thread
        lay_out(words, 0, blocks)
    else:
        for block in numba.prange(num_blocks):
            lay_out(words, block, blocks)
    project(taken, num_threads, blocks, matrix, bias, out)
