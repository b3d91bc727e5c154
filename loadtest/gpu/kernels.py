"""Measures a recurrent layer's steps and unpacking, compared with torch's operations and the CPU's bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from bough.model.backend import backend_of, load
from bough.model.batch.batch import BatchPart, Segment
from bough.model.batch.state_steps import chain_steps
from bough.model.checkpoint.tensor_source import FreshMemory, ReusedMemory
from bough.model.kv.session_kv import KVSlot
from bough.model.quant.format import Dequantized
from bough.model.quant.formats import SAMPLES
from bough.model.running.device import working_on
from bough.trees.tree import Tree
from loadtest.gpu.parts import device_milliseconds, milliseconds

KEY_HEADS, HEADS, DIM, WIDTH = 16, 32, 128, 3  # of Qwen3-Next
CLOSE_SUMS = 1e-4  # of the largest output: two orders of sums in float32, over as many steps as there are rows
LAYER_WEIGHTS = 855_638_016  # weights in a layer of a 70B
DTYPES = (torch.bfloat16, torch.float16)
CPU = torch.device("cpu")


def recurrence(device: torch.device, rows: Sequence[int]) -> list[dict[str, Any]]:
    """A layer's steps over text and over a tree: milliseconds, and the largest difference of the two ways."""
    torch.manual_seed(0)
    return [_recurrence_row(device, count, is_tree) for count in rows for is_tree in (False, True)]


def _recurrence_row(device: torch.device, count: int, is_tree: bool) -> dict[str, Any]:
    parents = [-1] + [max(0, node - 3) for node in range(1, count)]
    tree = Segment.tree(KVSlot.__new__(KVSlot), 0, Tree.of(list(range(count)), parents, [0.0] * count))
    steps = BatchPart(0, tree).tree_steps(WIDTH) if is_tree else chain_steps(count, WIDTH)
    qkv = torch.randn(count, (2 * KEY_HEADS + HEADS) * DIM, device=device)
    decay, beta = torch.rand(2, count, HEADS, device=device)
    states = torch.zeros(HEADS, steps.num_places, DIM, DIM, device=device)
    rest = states, KEY_HEADS, 0
    acts = [
        partial(backend_of(device).recur, qkv, decay, beta, steps, *rest),
        partial(load("reference").recur, qkv, decay, beta, steps, *rest),
    ]
    with working_on(device):
        mine = acts[0]()
        states.zero_()
        theirs = acts[1]()
        difference, largest = float((mine - theirs).abs().max()), float(theirs.abs().max())
        return {
            "rows": count,
            "of": "a tree" if is_tree else "text",
            "largest_difference": difference,
            "is_close": difference <= CLOSE_SUMS * largest,  # false for NaN
            "kernel_ms": device_milliseconds(acts[0], device),
            "by_torch_ms": milliseconds(acts[1], device),
        }


def unpacking(device: torch.device, compared: tuple[int, int], timed: tuple[int, int]) -> list[dict[str, Any]]:
    """Compare the bits of matrices `compared` (outputs, inputs), and time those of `timed`, which exceed caches."""
    return [
        _unpacking_row(name, device, make(*compared), make(*timed), dtype)
        for name, make in SAMPLES.items()
        for dtype in DTYPES
    ]


def _unpacking_row(
    name: str, device: torch.device, small: Dequantized, large: Dequantized, dtype: torch.dtype
) -> dict[str, Any]:
    raw = small.random(np.random.default_rng(0))
    wanted = small.value(raw, dtype, FreshMemory(CPU))
    found = small.value([part.to(device) for part in raw], dtype, FreshMemory(device)).cpu()
    is_equal = torch.equal(found.contiguous().view(torch.int16), wanted.contiguous().view(torch.int16))
    raw = [part.to(device) for part in large.random(np.random.default_rng(0))]
    memory = ReusedMemory(torch.empty(large.scratch_bytes(dtype), dtype=torch.uint8, device=device))

    def write_out() -> None:
        memory.begin()
        large.value(raw, dtype, memory)

    ms = device_milliseconds(write_out, device)
    weights, packed_bytes = int(np.prod(large.shape)), sum(place.num_bytes for place in large.places)
    return {
        "format": name,
        "dtype": str(dtype).removeprefix("torch."),
        "is_equal": is_equal,
        "ms": ms,
        "gb_s": round((packed_bytes + 2 * weights) / ms / 1e6, 1) if ms else None,
        "ms_a_70b_layer": round(ms * LAYER_WEIGHTS / weights, 2),
    }
