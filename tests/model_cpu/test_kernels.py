"""Compiled kernels: a row's attention is that of its path alone, whatever was compiled before them."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bough.model.batch.batch import Batch, Segment
from bough.model.cpu import jit
from bough.model.cpu.attention_cpu import attend_in_slots
from bough.model.kv.session_kv import KVShape, KVSlot
from bough.trees.tree import Tree
from tests.fakes.models import CPU

NUM_HEADS, NUM_KV_HEADS = 9, 3
ROOT = Path(__file__).parents[2]
FOLDERS = "bough", "draft_worker", "target_worker", "orchestrator", "deploy", "loadtest"
COMPILERS = {"jit", "njit", "cfunc", "vectorize", "guvectorize", "stencil", "jitclass"}


def names_of_numba(path: Path) -> set[str]:
    """What a file takes from numba, by way of the module or by name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "numba":
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module == "numba":
            names |= {alias.name for alias in node.names}
    return names


def test_settings_of_the_compiler_stand_in_one_file() -> None:
    """What did not say how it may round took it over from a caller: exact sums were reordered."""
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    assert [file for file in files if names_of_numba(file) & COMPILERS] == [ROOT / "bough/model/cpu/jit.py"]


@pytest.mark.parametrize(
    ("decorator", "fastmath"),
    [
        (jit.strict, False),
        (jit.strict_parallel, False),
        (jit.strict_inline, False),
        (jit.strict_inner, False),
        (jit.fastmath, jit.FASTMATH),
        (jit.fastmath_parallel, jit.FASTMATH),
        (jit.fastmath_inner, jit.FASTMATH),
    ],
)
def test_every_decorator_says_how_a_function_may_round(decorator: Any, fastmath: object) -> None:
    options = decorator(add_to).targetoptions
    assert (options["fastmath"], options["nogil"], options["error_model"]) == (fastmath, True, "numpy")


def add_to(out: Any, number: Any) -> None:
    out[0] += number


def test_a_function_is_called_by_a_pointer_to_it() -> None:
    """Of arguments of other types the compiler knows before anything is called."""
    out = np.zeros(1)
    pointer = jit.pointer(jit.strict(add_to), out, 2.0)
    call_twice(pointer, out, 2.0)
    assert out[0] == 4.0
    with pytest.raises(ValueError, match="mismatch of argument types"):
        call_twice(pointer, np.zeros(1, np.int32), 2.0)


@jit.strict
def call_twice(function, out, number):  # type: ignore[no-untyped-def]
    function(out, number)
    function(out, number)


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
