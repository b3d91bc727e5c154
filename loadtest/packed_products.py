"""Products with weights in 4 and 8 bits: as a sweep makes them, and by the kernels that torch brings.

    python -m loadtest.packed_products

A sweep has each matrix once, as it stands in the checkpoint. bough's way writes it out in bfloat16, so that a packed
model gives bit for bit what its written-out weights give, and multiplies that. The others: the same with torch's own
operations; torch's fused products `_weight_int8pack_mm`, with one scale for each output, and `_weight_int4pack_mm`,
whose layout is that of the processor and so has to be made of what a file can hold: with that and without. Matrices
take turns so that each comes from memory; contestants take turns too. Ends with one JSON line: milliseconds of each
contestant (the best of several turns) by bits, shape and rows, and those of a product with 16-bit weights.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.functional import linear

from bough.model.checkpoint.checkpoint import ITEM_BYTES, TensorPlace
from bough.model.cpu.linear import multiply
from bough.model.cpu.threads import compute_with
from bough.model.quant.packed import Packed
from bough.model.quant.quantize import GROUP_SIZES, quantize
from loadtest.draft_step import processor
from loadtest.products import COLD_BYTES

SHAPES = "1536x576,576x1536,5632x2048,2048x5632"  # of the demonstration target, and of a 1B
INNER_TILES = 2  # of torch's layout for 4 bits; the CPU's does not depend on it
MAX_ERROR = 0.02  # of a product, in the norm: rounding to bfloat16, and of 8 bits with one scale for each output
Product = Callable[[torch.Tensor], torch.Tensor]


class OneRoom:
    """Where every matrix is written out, one after another, as a worker does it; a small one stays in the cache."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self._room = torch.empty(shape, dtype=torch.bfloat16)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The same memory again."""
        return self._room

    def write(self, how: Callable[[], object]) -> None:
        """At once."""
        how()


class Quantized(NamedTuple):
    """A matrix in few bits: with the scales that a pack has, and in 8 bits with one for each output."""

    shape: tuple[int, int]
    bits: int
    integers: torch.Tensor
    scales: torch.Tensor
    by_output: tuple[torch.Tensor, torch.Tensor] | None

    @classmethod
    def random(cls, shape: tuple[int, int], bits: int) -> Quantized:
        """Of normal weights."""
        weight = torch.randn(shape)
        return cls(shape, bits, *quantize(weight, bits), quantize(weight, 8, shape[1]) if bits == 8 else None)

    def copy(self) -> Quantized:
        """In memory of its own."""
        by_output = (self.by_output[0].clone(), self.by_output[1].clone()) if self.by_output else None
        return self._replace(integers=self.integers.clone(), scales=self.scales.clone(), by_output=by_output)


def products(matrix: Quantized, room: OneRoom) -> dict[str, Product]:
    """Of rows with one matrix, by contestant."""
    shape, bits, integers, scales, by_output = matrix
    packed = Packed(_place(integers, "U8" if bits == 4 else "I8"), _place(scales, "F16"), bits)
    raw = [tensor.view(torch.uint8).flatten() for tensor in (integers, scales)]
    written = packed.value(raw, torch.bfloat16, OneRoom(shape))
    group = shape[1] // scales.shape[2]

    def own(rows: torch.Tensor) -> torch.Tensor:
        return multiply(rows, packed.value(raw, torch.bfloat16, room), None)

    def by_torch(rows: torch.Tensor) -> torch.Tensor:
        values = _apart(integers, bits, group) * scales[0, :, :, None].bfloat16()
        if bits == 4:
            values += scales[1, :, :, None].bfloat16()
        return linear(rows, values.view(shape))

    return {
        "16 bits": partial(multiply, matrix=written, bias=None),
        "own": own,
        "torch, written out": by_torch,
        **(_fused8(*by_output) if by_output else _fused4(integers, scales, group)),
    }


def _fused8(integers: torch.Tensor, scales: torch.Tensor) -> dict[str, Product]:
    """With one scale for each output, which is all that it knows."""
    scale = scales[0, :, 0].bfloat16().contiguous()
    return {"torch, fused": lambda rows: torch.ops.aten._weight_int8pack_mm(rows, integers, scale)}


def _fused4(integers: torch.Tensor, scales: torch.Tensor, group: int) -> dict[str, Product]:
    """Whose integers stand for themselves less 8."""
    both = torch.stack((scales[0], scales[1] + 8 * scales[0]), 2).bfloat16().transpose(0, 1).contiguous()
    multiplied = torch.ops.aten._weight_int4pack_mm_for_cpu

    def laid_out() -> torch.Tensor:
        codes = _apart(integers, 4, group).flatten(1).int()
        matrix: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, INNER_TILES)
        return matrix

    before = laid_out()
    return {
        "torch, fused": lambda rows: multiplied(rows, before, group, both),
        "torch, laid out and fused": lambda rows: multiplied(rows, laid_out(), group, both),
    }


def require_alike(contestants: dict[str, Product], inputs: int) -> None:
    """Ends where a contestant does not multiply by these weights, but for rounding."""
    rows = torch.randn(4, inputs).bfloat16()
    wanted = contestants["16 bits"](rows).float()
    for name, product in contestants.items():
        error = float((product(rows).float() - wanted).norm() / wanted.norm())
        if error > MAX_ERROR:
            raise SystemExit(f"{name}: {error:.1%} from the product with 16-bit weights")


def _apart(integers: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """(outputs, groups, group size) from how they stand in a file."""
    if bits == 8:
        return integers.view(len(integers), -1, group)
    pairs = integers.view(len(integers), -1, group // 2)
    return torch.cat((pairs & 15, pairs >> 4), 2)


def _place(tensor: torch.Tensor, dtype: str) -> TensorPlace:
    return TensorPlace("weight", Path(), 0, tensor.numel() * ITEM_BYTES[dtype], dtype, tuple(tensor.shape))


def best_milliseconds(
    bits: int, shape: tuple[int, int], row_counts: Sequence[int], turns: int
) -> list[dict[str, object]]:
    """A line for each number of rows."""
    outputs, inputs = shape
    count, room = max(2, COLD_BYTES * 8 // (outputs * inputs * bits)), OneRoom(shape)
    quantized = Quantized.random(shape, bits)
    matrices = [products(quantized.copy(), room) for _ in range(count)]
    require_alike(matrices[0], inputs)
    results: list[dict[str, object]] = []
    for num_rows in row_counts:
        rows, best = torch.randn(num_rows, inputs).bfloat16(), dict.fromkeys(matrices[0], float("inf"))
        for _ in range(turns):
            for name in best:
                began = time.perf_counter()
                for matrix in matrices:
                    matrix[name](rows)
                best[name] = min(best[name], (time.perf_counter() - began) / len(matrices))
        times = {name: round(seconds * 1e3, 3) for name, seconds in best.items()}
        results.append(
            {"bits": bits, "group": GROUP_SIZES[bits], "shape": f"{outputs}x{inputs}", "rows": num_rows, **times}
        )
        print(results[-1], flush=True)
    return results


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, nargs="+", choices=[4, 8], default=[4, 8])
    parser.add_argument("--shapes", default=SHAPES, help="outputs x inputs, several by commas")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    compute_with(arguments.threads)
    results = []
    for bits in arguments.bits:
        for shape in arguments.shapes.split(","):
            outputs, inputs = map(int, shape.split("x"))
            results += best_milliseconds(bits, (outputs, inputs), arguments.rows, arguments.turns)
    print(json.dumps({"processor": processor(), "threads": arguments.threads, "milliseconds": results}))


if __name__ == "__main__":
    main()
