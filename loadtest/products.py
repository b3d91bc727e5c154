"""Products of rows with a layer's matrices: bough's own, in which rows do not know of one another, and torch's.

    python -m loadtest.products

Matrices take turns so that each comes from memory, as in a sweep; the two contestants take turns too. Ends with one
JSON line: for each shape and number of rows the milliseconds of both (the best of several turns), billions of
operations per second of ours, and `ratio`: torch's time over ours.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence

import torch

from bough.model.cpu.linear import can_multiply, multiply
from bough.model.cpu.threads import compute_with

SHAPES = "576x576,1536x576,576x1536,5632x2048,2048x5632"  # of the demonstration target, and of a 1B
COLD_BYTES = 128 * 1024 * 1024  # more than caches hold
Product = Callable[[torch.Tensor, torch.Tensor, None], torch.Tensor]


def best_seconds(rows: torch.Tensor, matrices: Sequence[torch.Tensor], turns: int) -> dict[str, float]:
    """Of one product by each contestant."""
    contestants: dict[str, Product] = {"own": multiply, "torch": torch.nn.functional.linear}
    best = dict.fromkeys(contestants, float("inf"))
    for _ in range(turns):
        for name, product in contestants.items():
            began = time.perf_counter()
            for matrix in matrices:
                product(rows, matrix, None)
            best[name] = min(best[name], (time.perf_counter() - began) / len(matrices))
    return best


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES, help="outputs x inputs, several by commas")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--turns", type=int, default=7)
    arguments = parser.parse_args()
    compute_with(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    results = []
    for shape in arguments.shapes.split(","):
        outputs, inputs = map(int, shape.split("x"))
        if not can_multiply(inputs, dtype):
            raise SystemExit(f"--shapes: {shape} in {arguments.dtype} is left to the library on this processor")
        count = max(2, COLD_BYTES // (outputs * inputs * dtype.itemsize))
        matrices = [torch.randn(outputs, inputs).to(dtype) for _ in range(count)]
        for num_rows in arguments.rows:
            seconds = best_seconds(torch.randn(num_rows, inputs).to(dtype), matrices, arguments.turns)
            entry = {
                "shape": shape,
                "rows": num_rows,
                "own_ms": round(seconds["own"] * 1e3, 4),
                "torch_ms": round(seconds["torch"] * 1e3, 4),
                "gflops": round(2 * num_rows * outputs * inputs / seconds["own"] / 1e9),
                "ratio": round(seconds["torch"] / seconds["own"], 2),
            }
            print(entry, flush=True)
            results.append(entry)
    print(json.dumps({"dtype": arguments.dtype, "threads": arguments.threads, "products": results}))


if __name__ == "__main__":
    main()
