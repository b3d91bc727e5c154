"""Compiled kernels: a row's attention is that of its path alone, whatever was compiled before them."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

import numpy as np
import pytest
import torch
from numba.core.dispatcher import Dispatcher

import bough.model
import draft_worker
from bough.model.batch.batch import Batch, Segment
from bough.model.cpu.attention_cpu import attend_in_slots
from bough.model.kv.session_kv import KVShape, KVSlot
from bough.trees.tree import Tree
from tests.fakes.models import CPU

NUM_HEADS, NUM_KV_HEADS = 9, 3


def modules_of(package: ModuleType) -> list[ModuleType]:
    names = [info.name for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")]
    return [importlib.import_module(name) for name in names if not name.endswith(("__main__", "triton"))]


def test_every_kernel_says_how_it_may_round() -> None:
    """numba would take it over from a caller: exact sums were reordered where a draft's kernels were compiled first."""
    modules = [*modules_of(bough.model), *modules_of(draft_worker)]
    kernels = {kernel for module in modules for kernel in vars(module).values() if isinstance(kernel, Dispatcher)}
    assert len(kernels) > 20
    assert [kernel for kernel in kernels if "fastmath" not in kernel.targetoptions] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 64])
def test_a_nodes_attention_is_bitwise_that_of_its_path(head_dim: int, dtype: torch.dtype) -> None:
    """Random trees on contexts of any length: keys are read where they stand, or copied together."""
    rng, shape = np.random.default_rng(0), KVShape(1, NUM_KV_HEADS, head_dim, dtype)
    for seed in range(40):
        generator, base, size = torch.Generator().manual_seed(seed), int(rng.integers(1, 70)), int(rng.integers(2, 12))
        parents = [-1, *(int(rng.integers(0, node)) for node in range(1, size))]
        queries = (3 * torch.randn(size, NUM_HEADS, head_dim, generator=generator)).to(dtype)
        keys, values, held_keys, held_values = (
            torch.randn(num_rows, NUM_KV_HEADS, head_dim, generator=generator).to(dtype)
            for num_rows in (size, size, base, base)
        )

        def attended(
            nodes: list[int],
            parents: list[int],
            base: int = base,
            held: tuple[torch.Tensor, ...] = (held_keys, held_values),
            new: tuple[torch.Tensor, ...] = (queries, keys, values),
        ) -> torch.Tensor:
            slot = KVSlot(shape, base + len(nodes), CPU)
            slot.keys[0, :base], slot.values[0, :base] = held
            tree = Tree.of([1] * len(nodes), parents, [0.0] * len(nodes))
            (chunk,) = Batch([Segment.tree(slot, base, tree)], None, CPU).chunks
            return attend_in_slots(chunk, 0, *(rows[nodes] for rows in new), head_dim**-0.5, 0, 0.0, None)

        whole, tree = attended(list(range(size)), parents), Tree.of([1] * size, parents, [0.0] * size)
        for node in range(size):
            path = [int(step) for step in tree.path(node)]
            assert torch.equal(attended(path, list(range(-1, len(path) - 1)))[-1], whole[node])
