"""The GPU's attention kernel: equal to the reference, and its bits a function of a row's own path.

Where there is no GPU, Triton's interpreter runs the kernel, if TRITON_INTERPRET=1 asks for it as conftest.py does. That
the compiler takes it is tested apart; what GPUs make of that is not.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from bough.model.batch.batch import BatchPart, Segment
from bough.model.batch.path_spans import Paths
from bough.model.kv.session_kv import KVSlot
from bough.trees.tree import Tree
from loadtest.gpu.reference import attend_by_mask

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytest.importorskip("triton", reason="Triton is not installed; builds of torch for GPUs bring it")
if DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("without a GPU, TRITON_INTERPRET=1 has the kernel interpreted", allow_module_level=True)
PART = 64  # positions of a part in these tests
BLOCK: int = importlib.import_module("bough.model.gpu.attention_triton").BLOCK
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of the result's own type


@pytest.fixture
def kernel() -> ModuleType:
    """Not imported where the tests are skipped."""
    return importlib.import_module("bough.model.gpu.attention_triton")


def random_tree(rng: np.random.Generator, size: int) -> Tree:
    parents = [-1] + [int(rng.integers(max(0, node - 6), node)) for node in range(1, size)]
    return Tree.of(list(range(size)), parents, [0.0] * size)


def paths_of(*segments: Segment, begins: tuple[int, ...] = (0,)) -> Paths:
    return Paths.of([BatchPart(0, segment) for segment in segments], begins).on(DEVICE)


def tree_at(base: int, tree: Tree) -> Segment:
    return Segment.tree(KVSlot.__new__(KVSlot), base, tree)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "softcap", "has_sinks"),
    [(6, 2, 16, 0, 0.0, False), (8, 1, 24, 20, 0.0, True), (2, 2, 64, 0, 5.0, False), (4, 2, 16, 70, 5.0, True)],
)
def test_the_kernel_equals_masked_attention(
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
    rules = 0.25, window, softcap, sinks
    theirs = attend_by_mask(queries, keys, values, paths, *rules).float()
    in_parts = kernel.attend_by_triton(queries, keys, values, paths, *rules, PART)
    captured = kernel.attend_by_triton(queries, keys, values, paths._replace(longest=0), *rules, PART)
    for mine in (in_parts, captured):  # a captured step has one part of any length
        torch.testing.assert_close(mine.float(), theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("window", [0, 30])
def test_a_row_has_the_bits_of_its_own_path(kernel: ModuleType, window: int) -> None:
    """The same keys as part of a tree, and one after another as decoding leaves them."""
    torch.manual_seed(4)
    tree, base, node = random_tree(np.random.default_rng(4), 14), 59, 13
    keys, values = torch.randn(2, 90, 2, 16, device=DEVICE)
    queries = torch.randn(14, 4, 16, device=DEVICE)
    paths, rules = paths_of(tree_at(base, tree)), (0.25, window, 0.0, None, PART)
    in_tree = kernel.attend_by_triton(queries, keys, values, paths, *rules)[node]
    path = [*range(base), *(base + step for step in tree.path(node))]
    alone = paths_of(tree_at(len(path) - 1, Tree.root(1)))
    assert base < PART < len(path), "the path has its own keys in both parts"
    assert torch.equal(in_tree, kernel.attend_by_triton(queries[[node]], keys[path], values[path], alone, *rules)[0])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.long), torch.bfloat16])
def test_latents_are_keys_and_values(kernel: ModuleType, dtype: torch.dtype) -> None:
    """Of 20 heads, 10 a program: as the reference says, and bitwise what they are on a path of their own."""
    torch.manual_seed(8)
    tree, base, node = random_tree(np.random.default_rng(8), 6), 37, 5
    keys, values = torch.randn(50, 1, 8, device=DEVICE, dtype=dtype), torch.randn(50, 1, 24, device=DEVICE, dtype=dtype)
    queries, rules = torch.randn(6, 20, 32, device=DEVICE, dtype=dtype), (0.25, 0, 0.0, None, BLOCK)
    paths = paths_of(tree_at(base, tree))
    mine = kernel.attend_by_triton(queries, keys, values, paths, *rules)
    wanted = attend_by_mask(queries, keys, values, paths, *rules[:-1])
    torch.testing.assert_close(mine.float(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    path = [*range(base), *(base + step for step in tree.path(node))]
    alone = paths_of(tree_at(len(path) - 1, Tree.root(1)))
    assert torch.equal(mine[node], kernel.attend_by_triton(queries[[node]], keys[path], values[path], alone, *rules)[0])


def test_unwritten_rows_have_no_effect(kernel: ModuleType) -> None:
    """A GPU's memory is not initialised: NaN, of which the reference once made a sum, times a weight of 0."""
    torch.manual_seed(7)
    tree, base = random_tree(np.random.default_rng(7), 9), 20
    written = slice(5, 5 + base + len(tree.tokens))
    keys, values = torch.full((2, 60, 2, 16), torch.nan, device=DEVICE)
    keys[written], values[written] = torch.randn(2, base + len(tree.tokens), 2, 16, device=DEVICE)
    queries = torch.randn(9, 4, 16, device=DEVICE)
    paths = paths_of(tree_at(base, tree), begins=(5,))
    mine = kernel.attend_by_triton(queries, keys, values, paths, 0.25, 0, 0.0, None)
    for other in (queries.transpose(0, 1).contiguous().transpose(0, 1), torch.stack((queries, queries), 3)[..., 0]):
        assert torch.equal(mine, kernel.attend_by_triton(other, keys, values, paths, 0.25, 0, 0.0, None)), "by strides"
    theirs = attend_by_mask(queries, keys, values, paths, 0.25, 0, 0.0, None)
    assert not mine.isnan().any()
    torch.testing.assert_close(mine, theirs, atol=3e-6, rtol=3e-6)


class Loads:
    """Bytes that an interpreted kernel loads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        interpreter = importlib.import_module("triton.runtime.interpreter")
        self.num_bytes, load = 0, interpreter.InterpreterBuilder.create_masked_load

        def loads(own: Any, ptrs: Any, mask: Any, *others: Any) -> Any:
            self.num_bytes += int(mask.data.sum()) * max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
            return load(own, ptrs, mask, *others)

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", loads)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU does not tell what it loads")
def test_rows_of_a_session_read_the_same_committed_rows(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each tile, not for each row: 768 rows by 8,000 keys would be 25 GB a layer of a 70B."""
    loads, base, num_rows = Loads(monkeypatch), 20 * BLOCK, 16
    keys, values = torch.randn(2, base + num_rows, 1, 16, device=DEVICE, dtype=torch.float16)
    queries = torch.randn(num_rows, 4, 16, device=DEVICE, dtype=torch.float16)
    star = Tree.of([*range(num_rows)], [-1] + [0] * (num_rows - 1), [0.0] * num_rows)
    kernel.attend_by_triton(queries, keys, values, paths_of(tree_at(base, star)), 0.25, 0, 0.0, None)
    once = 2 * base * 16 * 2
    assert once < loads.num_bytes < 1.2 * once
    loads.num_bytes, rules = 0, (0.25, 2 * BLOCK, 0.0, None)
    found = kernel.attend_by_triton(queries, keys, values, paths_of(tree_at(base, star)), *rules, BLOCK)
    theirs = attend_by_mask(queries, keys, values, paths_of(tree_at(base, star)), *rules)
    torch.testing.assert_close(found.float(), theirs, atol=1e-3, rtol=1e-3)
    assert loads.num_bytes < once, "parts before the window load nothing but rows' lengths"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "dtype"),
    [
        (8, 1, 24, 0, torch.float16),
        (2, 2, 16, 30, torch.float16),
        pytest.param(2, 1, 16, 0, torch.float16, marks=pytest.mark.long),
        pytest.param(3, 1, 16, 0, torch.float32, marks=pytest.mark.long),
    ],
)
def test_a_rows_bits_do_not_depend_on_other_rows(
    kernel: ModuleType, heads: int, kv_heads: int, head_dim: int, window: int, dtype: torch.dtype
) -> None:
    """Of two sessions' trees and a piece of context, with any of their rows in a chunk, and anywhere in a tile.

    With others some rows' keys are parts of which alone there is one; and tiles need not be launched at once.
    """
    torch.manual_seed(8)
    rng, begins = np.random.default_rng(8), (0, 150, 300)
    segments = [
        tree_at(2 * BLOCK - 1, random_tree(rng, 20)),
        tree_at(90, random_tree(rng, 7)),
        Segment.context(KVSlot.__new__(KVSlot), BLOCK - 3, [*range(9)]),
    ]
    keys, values = torch.randn(2, 500, kv_heads, head_dim, device=DEVICE, dtype=dtype)
    sizes = [len(segment) for segment in segments]
    queries = torch.randn(sum(sizes), heads, head_dim, device=DEVICE, dtype=dtype)

    sinks = torch.randn(heads, device=DEVICE)

    def attend(rows: torch.Tensor, *parts: Segment, begins: tuple[int, ...], most_bytes: int = 2**26) -> torch.Tensor:
        paths = paths_of(*parts, begins=begins)
        return kernel.attend_by_triton(rows, keys, values, paths, 0.25, window, 0.0, sinks, PART, most_bytes)

    together = attend(queries, *segments, begins=begins)
    assert torch.equal(together, attend(queries, *segments, begins=begins, most_bytes=1))
    theirs = attend_by_mask(queries, keys, values, paths_of(*segments, begins=begins), 0.25, window, 0.0, sinks)
    torch.testing.assert_close(together.float(), theirs.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for segment, begin, own in zip(segments, begins, together.split(sizes), strict=True):
        mine = queries.split(sizes)[segments.index(segment)]
        for first, end in ((5, 6), (3, len(segment))):
            alone = attend(mine[first:end], segment.part(first, end), begins=(begin,))
            assert torch.equal(alone, own[first:end]), (first, end)


def test_nans_on_one_path_do_not_affect_another(kernel: ModuleType) -> None:
    """A guess that overflows would otherwise end the request: a draft may cost time, and nothing else."""
    torch.manual_seed(9)
    star = tree_at(40, Tree.of([1, 2, 3], [-1, 0, 0], [0.0] * 3))
    keys, values = torch.randn(2, 60, 2, 16, device=DEVICE)
    queries = torch.randn(3, 4, 16, device=DEVICE)
    wanted = kernel.attend_by_triton(queries, keys, values, paths_of(star), 0.25, 0, 0.0, None)
    values[41] = torch.inf
    keys[41] = torch.nan
    with np.errstate(invalid="ignore"):
        found = kernel.attend_by_triton(queries, keys, values, paths_of(star), 0.25, 0, 0.0, None)
    assert torch.equal(found[[0, 2]], wanted[[0, 2]])
    assert found[1].isnan().all()


COMPILE = """
import json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from bough.model.gpu.attention_triton import launch_options, tile_constants
from bough.model.gpu.attention_triton import _attend as kernel

def compiled(capability, numbers, in_halves):
    constants = {"NUM_KV_HEADS": 8, "HEAD_DIM": 128, "SOFTCAP": 0.0, "HAS_SINKS": False, "IN_HALVES": in_halves}
    constants |= tile_constants(8, 128, in_halves)
    kinds = dict.fromkeys(("queries", "keys", "values", "sinks", "out"), numbers) | {"scale": "fp32"}
    kinds |= dict.fromkeys(("origins", "bases", "lengths", "tails", "tiles"), "*i32")
    kinds |= dict.fromkeys(("results", "marks"), "*fp32")
    kinds |= dict.fromkeys(("row_step", "head_step", "tail_width", "window"), "i32")
    kinds |= dict.fromkeys(("part_keys", "num_places", "first_tile"), "i32")
    signature = {name: kinds.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(name),): value for name, value in constants.items()})
    return compile(source, target=GPUTarget("cuda", capability, 32), options=launch_options(constants, in_halves))

for case in json.loads(sys.argv[1]):
    found = compiled(*case)
    print(len(found.asm["cubin"]), found.metadata.shared)
"""
CASES = ((75, "*fp16", True), (80, "*fp32", False), (90, "*bf16", True))  # others: tests/loadtest/gpu
SHARED_BYTES = {75: 65_536, 80: 166_912, 90: 232_448}  # that a program may have


@pytest.mark.slow
def test_the_kernel_compiles_for_other_gpus() -> None:
    """Once: after that it is in the cache. Other cases are in `tests/loadtest/gpu/test_compile_kernels.py`."""
    environ = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", COMPILE, json.dumps(CASES)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    for (capability, *_), line in zip(CASES, done.stdout.splitlines(), strict=True):
        num_bytes, shared = map(int, line.split())
        assert num_bytes > 0
        assert shared <= SHARED_BYTES[capability], capability
