"""Kernels that write packed weights out on a GPU, interpreted: the reference's bits, in one pass over the memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton.runtime.interpreter as interpreter

from bough.model.checkpoint.container import TensorPlace
from bough.model.checkpoint.gguf_file import BLOCKS
from bough.model.checkpoint.tensor_source import FreshMemory
from bough.model.gpu import unpack_triton
from bough.model.quant.awq import Awq
from bough.model.quant.format import Dequantized
from bough.model.quant.ggml_blocks import TYPES, Blocks
from bough.model.quant.gptq import Gptq
from bough.model.quant.scaled import EXPONENTS, FLOAT4, FLOAT8, INT8, WORDS, Scaled
from tests.fakes.model.gguf_files import random_blocks
from tests.fakes.tiers import long_but

NAMES = {torch.uint8: "U8", torch.int8: "I8", torch.int32: "I32", torch.float16: "F16"}
NAMES |= {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0"}
NAMES |= {torch.bfloat16: "BF16", torch.float32: "F32"}
CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BF16, F32, E8M0 = torch.bfloat16, torch.float32, torch.float8_e8m0fnu


def place(name: str, array: np.ndarray) -> TensorPlace:
    names = {"uint8": "U8", "int8": "I8", "int32": "I32", "float16": "F16"}
    return TensorPlace(name, Path(), 0, array.nbytes, names[str(array.dtype)], array.shape)


def raws(*arrays: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(array.copy()).view(torch.uint8).flatten() for array in arrays]


def halves(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Scales of all magnitudes that are numbers, either sign."""
    values = rng.integers(0, 1 << 16, shape).astype(np.uint16).view(np.float16)
    return np.where(np.isfinite(values) & (np.abs(values) < 100), values, np.float16(0.01))


def words(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-(1 << 31), 1 << 31, shape).astype(np.int32)


def gptq(
    rng: np.random.Generator, inputs: int, outputs: int, group: int, bits: int, has_order: bool, offset: int
) -> tuple[Dequantized, list[torch.Tensor]]:
    integers, zeros = words(rng, inputs * bits // 32, outputs), words(rng, inputs // group, outputs * bits // 32)
    scales, order = halves(rng, inputs // group, outputs), rng.permutation(np.arange(inputs) // group).astype(np.int32)
    groups = place("g", order) if has_order else None
    source = Gptq(place("w", integers), place("z", zeros), place("s", scales), groups, bits, offset)
    return source, raws(integers, zeros, scales, *((order,) if has_order else ()))


def awq(rng: np.random.Generator, inputs: int, outputs: int, group: int) -> tuple[Dequantized, list[torch.Tensor]]:
    integers, zeros = words(rng, inputs, outputs // 8), words(rng, inputs // group, outputs // 8)
    scales = halves(rng, inputs // group, outputs)
    return Awq(place("w", integers), place("z", zeros), place("s", scales)), raws(integers, zeros, scales)


def by_rows(
    rng: np.random.Generator,
    shape: tuple[int, int],
    dtype: str,
    bits: int,
    block: tuple[int, int],
    scale_dtype: torch.dtype,
    zeros: bool = False,
    order: bool = False,
) -> tuple[Dequantized, list[torch.Tensor]]:
    (outputs, inputs), (height, width) = shape, block
    num_groups = -(-inputs // width)
    numbers = torch.from_numpy(rng.integers(0, 256, (outputs, inputs * bits // 8)).astype(np.uint8))
    if dtype == FLOAT8:
        numbers[numbers & 0x7F == 0x7F] = 0x80  # equal numbers may be none with different bits
    numbers = numbers.view({WORDS: torch.int32, INT8: torch.int8, FLOAT8: torch.float8_e4m3fn}[dtype])
    scales = torch.from_numpy(rng.uniform(0 if scale_dtype == E8M0 else -1, 1, (-(-outputs // height), num_groups)))
    groups = torch.from_numpy(rng.permutation(np.arange(inputs) // width).astype(np.int32))
    extra = torch.from_numpy(words(rng, -(-outputs * bits // 32), num_groups))
    tensors = [numbers, scales.to(scale_dtype), *([extra] if zeros else []), *([groups] if order else [])]
    places = [TensorPlace("", Path(), 0, t.nbytes, NAMES[t.dtype], tuple(t.shape)) for t in tensors]
    own_groups = places[-1] if order else None
    source = Scaled(places[0], places[1], places[2] if zeros else None, own_groups, bits, block)
    return source, [tensor.contiguous().view(torch.uint8).flatten() for tensor in tensors]


def in_blocks(rng: np.random.Generator, kind: str, half: int) -> tuple[Dequantized, list[torch.Tensor]]:
    blocks = random_blocks(kind, 12, 512 if BLOCKS[kind][0] == 256 else 160, rng)
    return Blocks(place("w", blocks), kind, half), raws(blocks)


def mxfp4(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Dequantized, list[torch.Tensor]]:
    """With exponents from the smallest, which is no normal number's, to where float16 ends."""
    numbers = rng.integers(0, 256, (outputs, inputs // 2)).astype(np.uint8)
    exponents = rng.integers(0, 141, (outputs, inputs // 32)).astype(np.uint8)
    exponents[0, 0] = 0
    places = replace(place("w", numbers), dtype=FLOAT4), replace(place("s", exponents), dtype=EXPONENTS)
    return Scaled(*places, None, None, 4, (1, 32)), raws(numbers, exponents)


def nvfp4(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Dequantized, list[torch.Tensor]]:
    numbers = rng.integers(0, 256, (outputs, inputs // 2)).astype(np.uint8)
    scales, whole = rng.integers(0, 0x7F, (outputs, inputs // 16)).astype(np.uint8), np.array([12.3], np.float32)
    places = replace(place("w", numbers), dtype=FLOAT4), replace(place("s", scales), dtype=FLOAT8)
    last = TensorPlace("", Path(), 0, 4, "F32", (1,))
    return Scaled(*places, None, None, 4, (1, 16), last, True), raws(numbers, scales, whole)


def by_kernel(source: Dequantized, raw: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """As a GPU's backend writes it out."""
    outputs, inputs = source.shape
    out = torch.full((outputs, inputs), torch.nan, dtype=dtype)
    out = torch.full((inputs, outputs), torch.nan, dtype=dtype).t() if source.is_transposed else out
    unpack_triton.write(source.packed(raw), out)
    return out


CASES: dict[str, Any] = {
    "gptq": lambda rng: gptq(rng, 128, 136, 32, 4, False, 1),
    "gptq, its second version": lambda rng: gptq(rng, 64, 40, 64, 4, False, 0),
    "gptq, 8 bits": lambda rng: gptq(rng, 64, 40, 32, 8, False, 1),
    "gptq, in an order of its own": lambda rng: gptq(rng, 128, 136, 32, 4, True, 1),
    "gptq, 8 bits, in an order of its own": lambda rng: gptq(rng, 96, 16, 32, 8, True, 1),
    "gptq, groups of no whole words": lambda rng: gptq(rng, 24, 16, 12, 4, False, 1),
    "awq": lambda rng: awq(rng, 96, 136, 32),
    "awq, groups of an odd number of eights": lambda rng: awq(rng, 48, 8, 24),
    "words": lambda rng: by_rows(rng, (36, 192), WORDS, 4, (1, 64), BF16),
    "words with zeros": lambda rng: by_rows(rng, (36, 192), WORDS, 4, (1, 64), BF16, zeros=True),
    "words in an order of their own": lambda rng: by_rows(rng, (20, 128), WORDS, 4, (1, 32), F32, True, True),
    "words of bytes": lambda rng: by_rows(rng, (9, 96), WORDS, 8, (1, 96), F32, zeros=True),
    "int8": lambda rng: by_rows(rng, (9, 100), INT8, 8, (1, 100), torch.float16),
    "e4m3, blocks that are cut off": lambda rng: by_rows(rng, (70, 200), FLOAT8, 8, (32, 128), F32),
    "e4m3, groups of odd sizes": lambda rng: by_rows(rng, (5, 60), FLOAT8, 8, (4, 20), BF16),
    "e4m3, blocks with exponents": lambda rng: by_rows(rng, (70, 200), FLOAT8, 8, (32, 128), E8M0),
    "mxfp4": lambda rng: mxfp4(rng, 36, 192),
    "nvfp4": lambda rng: nvfp4(rng, 36, 208),
    "e4m3, one scale": lambda rng: by_rows(rng, (5, 60), FLOAT8, 8, (5, 60), F32),
    **{kind: partial(in_blocks, kind=kind, half=3 * (kind == "Q6_K") or 1) for kind in TYPES},
}


@pytest.mark.parametrize("dtype", long_but([torch.bfloat16], DTYPES), ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_gives_the_references_bits(name: str, dtype: torch.dtype) -> None:
    source, raw = CASES[name](np.random.default_rng(len(name)))
    wanted = source.value(raw, dtype, FreshMemory(CPU))
    found = by_kernel(source, raw, dtype)
    assert torch.equal(found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


class Traffic:
    """Bytes that an interpreted kernel loads and stores, and how many of them are different ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moved = 0
        self._read: list[np.ndarray] = []
        self._written: list[np.ndarray] = []
        builder = interpreter.InterpreterBuilder
        load, store = builder.create_masked_load, builder.create_masked_store

        def loads(own: Any, ptrs: Any, mask: Any, *others: Any) -> Any:
            self._note(self._read, ptrs, mask)
            return load(own, ptrs, mask, *others)

        def stores(own: Any, ptrs: Any, value: Any, mask: Any, *others: Any) -> Any:
            self._note(self._written, ptrs, mask)
            return store(own, ptrs, value, mask, *others)

        monkeypatch.setattr(builder, "create_masked_load", loads)
        monkeypatch.setattr(builder, "create_masked_store", stores)

    def _note(self, places: list[np.ndarray], ptrs: Any, mask: Any) -> None:
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        there = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)]
        self.moved += there.size * size
        places.append((there.ravel()[:, None] + np.arange(size, dtype=there.dtype)).ravel())

    @property
    def different(self) -> int:
        return sum(len(np.unique(np.concatenate(places))) for places in (self._read, self._written))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case", "most_moved"),
    [
        ("gptq", lambda rng: gptq(rng, 256, 256, 128, 4, False, 1), 3.0),
        (
            "gptq, in an order of its own",
            lambda rng: gptq(rng, 256, 256, 128, 4, True, 1),
            5.2,
        ),  # its groups' from a cache
        ("awq", lambda rng: awq(rng, 256, 256, 128), 3.0),
        ("words", lambda rng: by_rows(rng, (256, 256), WORDS, 4, (1, 128), BF16, zeros=True), 3.0),
        ("mxfp4", lambda rng: mxfp4(rng, 256, 256), 3.0),
        ("Q4_K", lambda rng: in_blocks(rng, "Q4_K", 1), 3.3),  # a byte for each of its two numbers
    ],
)
def test_a_weight_costs_less_than_three_bytes_of_traffic(
    name: str, case: Any, most_moved: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which two and a half cannot be less: half a byte in, two out. By torch's operators it is 30 to 67."""
    source, raw = case(np.random.default_rng(0))
    traffic = Traffic(monkeypatch)
    out = by_kernel(source, raw, torch.bfloat16)
    assert traffic.different / out.numel() < 3.0, name
    assert traffic.moved / out.numel() < most_moved, name


def test_a_missing_group_reads_nothing_beyond_the_table() -> None:
    """A file that changes while a worker runs must not end a GPU's context."""
    source, raw = gptq(np.random.default_rng(0), 64, 16, 32, 4, True, 1)
    matrix, out = source.packed(raw), torch.full((16, 64), torch.nan)
    matrix.groups[:2] = torch.tensor([1_000_000, -5], dtype=torch.int32)
    unpack_triton.write(matrix, out)
    assert not out.isnan().any()
