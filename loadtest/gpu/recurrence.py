"""Measures a recurrent layer's steps, by the kernel and by torch's operations; part of `loadtest.gpu`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from bough.model.backend import backend_of, load
from bough.model.batch.batch import BatchPart, Segment
from bough.model.batch.state_steps import chain_steps
from bough.model.kv.session_kv import KVSlot
from bough.model.running.device import working_on
from bough.trees.tree import Tree
from loadtest.gpu.parts import device_milliseconds, milliseconds

KEY_HEADS, HEADS, DIM, WIDTH = 16, 32, 128, 3  # of Qwen3-Next
CLOSE = 1e-4  # of the largest output: two orders of sums in float32, over as many steps as there are rows


def recurrence(device: torch.device, rows: Sequence[int]) -> list[dict[str, Any]]:
    """A layer's steps over text and over a tree: milliseconds, and the largest difference of the two ways."""
    torch.manual_seed(0)
    return [_row(device, count, is_tree) for count in rows for is_tree in (False, True)]


def _row(device: torch.device, count: int, is_tree: bool) -> dict[str, Any]:
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
            "is_close": difference <= CLOSE * largest,  # false for NaN
            "kernel_ms": device_milliseconds(acts[0], device),
            "by_torch_ms": milliseconds(acts[1], device),
        }
