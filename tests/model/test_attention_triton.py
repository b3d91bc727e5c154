"""The GPU's attention kernel: equal to the reference, and its bits a function of a row's own path.

Where there is no GPU, Triton's interpreter runs the kernel, if TRITON_INTERPRET=1 asks for it as conftest.py does. That
the compiler takes it is tested apart; what GPUs make of that is not.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from bough.model.architecture.attention import attend_by_mask
from bough.model.batch.batch import Piece, Segment
from bough.model.batch.gpu_paths import PathArrays, Paths
from bough.model.kv.session_kv import KVSlot
from bough.trees.tree import Tree

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytest.importorskip("triton", reason="Triton is not installed; builds of torch for GPUs bring it")
if DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("without a GPU, TRITON_INTERPRET=1 has the kernel interpreted", allow_module_level=True)
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of the result's own type


@pytest.fixture
def kernel() -> ModuleType:
    """Not imported where the tests are skipped."""
    return importlib.import_module("bough.model.gpu.attention_triton")


def random_tree(rng: np.random.Generator, size: int) -> Tree:
    parents = [-1] + [int(rng.integers(max(0, node - 6), node)) for node in range(1, size)]
    return Tree.of(list(range(size)), parents, [0.0] * size)


def paths_of(*segments: Segment, begins: tuple[int, ...] = (0,)) -> Paths:
    return PathArrays.of([Piece(0, segment) for segment in segments], begins).on(DEVICE)


def tree_at(base: int, tree: Tree) -> Segment:
    return Segment.tree(KVSlot.__new__(KVSlot), base, tree)


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
    paths = paths_of(tree_at(120, random_tree(np.random.default_rng(3), 12)))
    keys, values = torch.randn(2, 160, kv_heads, head_dim, device=DEVICE, dtype=dtype)
    queries = torch.randn(12, heads, head_dim, device=DEVICE, dtype=dtype)
    sinks = torch.randn(heads, device=DEVICE) if has_sinks else None
    mine = kernel.attend_by_triton(queries, keys, values, paths, 0.25, window, softcap, sinks)
    theirs = attend_by_mask(queries, keys, values, paths, 0.25, window, softcap, sinks)
    torch.testing.assert_close(mine.float(), theirs.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("window", [0, 30])
def test_a_row_is_bitwise_what_it_would_be_on_a_path_of_its_own(kernel: ModuleType, window: int) -> None:
    """The same keys as part of a tree, and one after another as decoding leaves them."""
    torch.manual_seed(4)
    tree, base, node = random_tree(np.random.default_rng(4), 14), 59, 13
    keys, values = torch.randn(2, 90, 2, 16, device=DEVICE)
    queries = torch.randn(14, 4, 16, device=DEVICE)
    paths = paths_of(tree_at(base, tree))
    in_tree = kernel.attend_by_triton(queries, keys, values, paths, 0.25, window, 0.0, None)[node]
    path = [*range(base), *(base + step for step in tree.path(node))]
    alone = paths_of(tree_at(len(path) - 1, Tree.root(1)))
    plain = kernel.attend_by_triton(queries[[node]], keys[path], values[path], alone, 0.25, window, 0.0, None)[0]
    assert torch.equal(in_tree, plain)


def test_rows_that_nobody_has_written_do_no_harm(kernel: ModuleType) -> None:
    """A GPU's memory is whatever it was: NaN, of which the reference once made a sum, times a weight of 0."""
    torch.manual_seed(7)
    tree, base = random_tree(np.random.default_rng(7), 9), 20
    written = slice(5, 5 + base + len(tree.tokens))
    keys, values = torch.full((2, 60, 2, 16), torch.nan, device=DEVICE)
    keys[written], values[written] = torch.randn(2, base + len(tree.tokens), 2, 16, device=DEVICE)
    queries = torch.randn(9, 4, 16, device=DEVICE)
    paths = paths_of(tree_at(base, tree), begins=(5,))
    mine = kernel.attend_by_triton(queries, keys, values, paths, 0.25, 0, 0.0, None)
    theirs = attend_by_mask(queries, keys, values, paths, 0.25, 0, 0.0, None)
    assert not mine.isnan().any()
    torch.testing.assert_close(mine, theirs, atol=3e-6, rtol=3e-6)


def test_context_has_no_tail(kernel: ModuleType) -> None:
    torch.manual_seed(5)
    keys, values = torch.randn(2, 8, 1, 16, device=DEVICE)
    queries = torch.randn(4, 2, 16, device=DEVICE)
    paths = paths_of(Segment.context(KVSlot.__new__(KVSlot), 3, [1, 2, 3, 4]))
    mine = kernel.attend_by_triton(queries, keys, values, paths, 0.25, 0, 0.0, None)
    torch.testing.assert_close(mine, attend_by_mask(queries, keys, values, paths, 0.25, 0, 0.0, None))


def test_sessions_side_by_side_are_bitwise_what_they_are_alone(kernel: ModuleType) -> None:
    """One call for all: rows of two slots, of which the second begins where it happens to be."""
    torch.manual_seed(6)
    rng, begins = np.random.default_rng(6), (0, 70)
    trees = [tree_at(40, random_tree(rng, 9)), tree_at(20, random_tree(rng, 5))]
    keys, values = torch.randn(2, 130, 2, 16, device=DEVICE)
    queries = torch.randn(14, 4, 16, device=DEVICE)
    together = kernel.attend_by_triton(queries, keys, values, paths_of(*trees, begins=begins), 0.25, 0, 0.0, None)
    for rows, tree, begin in zip((slice(0, 9), slice(9, 14)), trees, begins, strict=True):
        slot = keys[begin:].contiguous(), values[begin:].contiguous()
        alone = kernel.attend_by_triton(queries[rows].contiguous(), *slot, paths_of(tree), 0.25, 0, 0.0, None)
        assert torch.equal(together[rows], alone)


COMPILE = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from bough.model.gpu.attention_triton import NUM_STAGES, NUM_WARPS, _attend as kernel

capability, numbers, in_halves = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "1"
constants = {"NUM_KV_HEADS": 8, "GROUP": 8, "HEAD_DIM": 128, "SOFTCAP": 0.0, "HAS_SINKS": False}
constants |= {"IN_HALVES": in_halves, "BLOCK": 64, "GROUP_PADDED": 16, "DIM_PADDED": 128}
kinds = dict.fromkeys(("queries", "keys", "values", "sinks", "out"), numbers) | {"scale": "fp32"}
kinds |= dict.fromkeys(("origins", "bases", "lengths", "tails"), "*i32") | {"tail_width": "i32", "window": "i32"}
signature = {name: kinds.get(name, "constexpr") for name in kernel.arg_names}
source = ASTSource(kernel, signature, {(kernel.arg_names.index(name),): value for name, value in constants.items()})
options = {"num_warps": NUM_WARPS, "num_stages": NUM_STAGES if in_halves else 1, "enable_fp_fusion": True}
compiled = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
print(len(compiled.asm["cubin"]), compiled.metadata.shared)
"""
SHARED_BYTES = {75: 65_536, 80: 166_912, 90: 232_448}  # that a program may have


@pytest.mark.parametrize(
    ("capability", "numbers", "in_halves"),
    [(75, "*fp16", "1"), (80, "*bf16", "1"), (80, "*fp32", "0"), (90, "*bf16", "1")],
)
def test_the_kernel_compiles_for_gpus_that_are_not_here(
    tmp_path: Path, capability: int, numbers: str, in_halves: str
) -> None:
    environ = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE, str(capability), numbers, in_halves]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    num_bytes, shared = map(int, done.stdout.split())
    assert num_bytes > 0
    assert shared <= SHARED_BYTES[capability]
