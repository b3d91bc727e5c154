"""Products with a large layer's matrices: our kernel, plain and packed, against cuBLAS; part of `loadtest.gpu`.

The figures say whether our kernel is worth its place in the ladder of backends, and which sizes it serves badly.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from bough.model.backend import Backend, load
from bough.model.packed import Matrix
from bough.model.quant.formats import SAMPLES
from bough.model.running.device import working_on
from loadtest.gpu.parts import device_milliseconds

COUNTS = (16, 64, 256)  # rows, for which our kernel's programs have different numbers of them
PACKED = "awq 4 bits"
DTYPE = torch.bfloat16


def kernels_on(device: torch.device) -> Backend:
    """The backend whose products are checked; in a dry run on a CPU the reference stands for it."""
    return load("triton" if device.type != "cpu" else "reference")


def products(device: torch.device, matrices: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Milliseconds by number of rows, and whether a row's bits are equal in all, for matrices (outputs, inputs)."""
    generator, found = torch.Generator(device).manual_seed(0), list[dict[str, Any]]()
    with working_on(device):
        for outputs, inputs in matrices:
            rows, weight = (
                torch.randn(size, generator=generator, device=device, dtype=DTYPE)
                for size in ((max(COUNTS), inputs), (outputs, inputs))
            )
            sample = SAMPLES[PACKED](outputs, inputs)
            packed = sample.packed([part.to(device) for part in sample.random(np.random.default_rng(0))])
            found.append({"outputs": outputs, "inputs": inputs, **_compared(device, rows, weight, packed)})
    return found


def _compared(device: torch.device, rows: torch.Tensor, weight: torch.Tensor, packed: Matrix) -> dict[str, Any]:
    multiply = kernels_on(device).multiply
    equal = list[bool]()
    for matrix in (weight, packed):
        whole, middle = multiply(rows, matrix), len(rows) // 2 - 3
        parts = [slice(0, 1), slice(middle, middle + 8), *(slice(0, count) for count in COUNTS)]
        equal += [torch.equal(multiply(rows[part].contiguous(), matrix), whole[part]) for part in parts]
    ones = multiply(torch.ones_like(rows), torch.ones_like(weight))
    acts = {
        "cublas": partial(torch.nn.functional.linear, weight=weight),
        "own": partial(multiply, matrix=weight),
        f"own, {PACKED}": partial(multiply, matrix=packed),
    }
    times = {
        name: {count: device_milliseconds(partial(act, rows[:count].contiguous()), device) for count in COUNTS}
        for name, act in acts.items()
    }
    exact = torch.tensor(float(rows.shape[1]), dtype=DTYPE)
    return {
        "compared": len(equal) + 1,
        "equal": sum(equal) + int(bool((ones.cpu() == exact).all())),
        "cublas_equal_at_other_counts": [
            torch.equal(acts["cublas"](rows[:count].contiguous()), acts["cublas"](rows)[:count]) for count in COUNTS
        ],
        "ms": times,
    }
