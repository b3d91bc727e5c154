"""The GPU's attention kernel: equal to the reference, and its bits a function of a row's own path.

Where there is no GPU, Triton's interpreter runs the kernel, if TRITON_INTERPRET=1 asks for it; what the compiler makes
of it is then not tested.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import numpy as np
import pytest
import torch

from bough.model.attention import attend_by_mask
from bough.model.batch import Piece, Segment
from bough.model.kv import KVSlot
from bough.tree import Tree

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytest.importorskip("triton", reason="Triton is not installed; builds of torch for GPUs bring it")
if DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("without a GPU, TRITON_INTERPRET=1 has the kernel interpreted", allow_module_level=True)
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of the result's own type


@pytest.fixture
def kernel() -> ModuleType:
    """Not imported where the tests are skipped."""
    return importlib.import_module("bough.model.attention_triton")


def random_tree(rng: np.random.Generator, size: int) -> Tree:
    parents = [-1] + [int(rng.integers(max(0, node - 6), node)) for node in range(1, size)]
    return Tree.of(list(range(size)), parents, [0.0] * size)


def piece_of(tree: Tree, base: int) -> Piece:
    return Piece(0, Segment.tree(KVSlot.__new__(KVSlot), base, tree), DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "softcap", "has_sinks"),
    [(6, 2, 16, 0, 0.0, False), (8, 1, 24, 20, 0.0, True), (4, 4, 64, 0, 5.0, False), (4, 2, 16, 70, 5.0, True)],
)
def test_the_kernel_equals_attention_by_mask(
    kernel: ModuleType,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int,
    softcap: float,
    has_sinks: bool,
) -> None:
    torch.manual_seed(3)
    piece = piece_of(random_tree(np.random.default_rng(3), 12), 120)
    keys, values = torch.randn(2, 160, kv_heads, head_dim, device=DEVICE, dtype=dtype)
    queries = torch.randn(12, heads, head_dim, device=DEVICE, dtype=dtype)
    sinks = torch.randn(heads, device=DEVICE) if has_sinks else None
    mine = kernel.attend_by_triton(queries, keys, values, piece, 0.25, window, softcap, sinks)
    theirs = attend_by_mask(queries, keys, values, piece, 0.25, window, softcap, sinks)
    torch.testing.assert_close(mine.float(), theirs.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("window", [0, 30])
def test_a_row_is_bitwise_what_it_would_be_on_a_path_of_its_own(kernel: ModuleType, window: int) -> None:
    """The same keys as part of a tree, and one after another as decoding leaves them."""
    torch.manual_seed(4)
    tree, base, node = random_tree(np.random.default_rng(4), 14), 59, 13
    keys, values = torch.randn(2, 90, 2, 16, device=DEVICE)
    queries = torch.randn(14, 4, 16, device=DEVICE)
    in_tree = kernel.attend_by_triton(queries, keys, values, piece_of(tree, base), 0.25, window, 0.0, None)[node]
    path = [*range(base), *(base + step for step in tree.path(node))]
    alone = Piece(0, Segment.tree(KVSlot.__new__(KVSlot), len(path) - 1, Tree.root(1)), DEVICE)
    plain = kernel.attend_by_triton(queries[[node]], keys[path], values[path], alone, 0.25, window, 0.0, None)[0]
    assert torch.equal(in_tree, plain)


def test_context_has_no_tail(kernel: ModuleType) -> None:
    torch.manual_seed(5)
    keys, values = torch.randn(2, 8, 1, 16, device=DEVICE)
    queries = torch.randn(4, 2, 16, device=DEVICE)
    piece = Piece(0, Segment.context(KVSlot.__new__(KVSlot), 3, [1, 2, 3, 4]), DEVICE)
    mine = kernel.attend_by_triton(queries, keys, values, piece, 0.25, 0, 0.0, None)
    torch.testing.assert_close(mine, attend_by_mask(queries, keys, values, piece, 0.25, 0, 0.0, None))
