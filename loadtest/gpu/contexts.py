"""Measures attention by number of rows and context length; part of `loadtest.gpu`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from bough.model.batch.batch import BatchPart, Segment
from bough.model.batch.gpu_paths import Paths
from bough.model.gpu.kernels import kernels_on
from bough.model.kv.session_kv import KVSlot
from bough.trees.tree import Tree
from loadtest.gpu.parts import device_milliseconds
from loadtest.gpu.reference import attend_by_mask

HEADS, KV_HEADS, HEAD_DIM = 64, 8, 128  # a 70B's


def contexts(device: torch.device, rows: Sequence[int], lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Milliseconds of a layer's attention for a chain-like tree, by rows and context length."""
    torch.manual_seed(0)
    kernels, found = kernels_on(device), []
    attend = kernels.attend if kernels else attend_by_mask
    for length in lengths:
        keys, values = torch.randn(2, length + max(rows), KV_HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
        for count in rows:
            queries = torch.randn(count, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
            parents = [-1] + [max(0, node - 3) for node in range(1, count)]
            tree = Tree.of(list(range(count)), parents, [0.0] * count)
            piece = BatchPart(0, Segment.tree(KVSlot.__new__(KVSlot), length, tree))
            paths = Paths.of([piece], [0]).on(device)
            act = partial(attend, queries, keys, values, paths, HEAD_DIM**-0.5, 0, 0.0, None)
            found.append({"rows": count, "context": length, "ms": device_milliseconds(act, device)})
    return found
