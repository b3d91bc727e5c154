"""Compiled kernels: a row's attention is that of its path alone, whatever was compiled before them."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numba.core.caching import NullCache
from numba.core.codegen import JITCPUCodegen
from numba.core.registry import cpu_target

from bough.model.batch.batch import Batch, BatchPart, Segment
from bough.model.batch.path_spans import PathSpans, Place
from bough.model.cpu import attention_kernel, jit, late_code
from bough.model.cpu.attention_kernel import _as_float, attend_in_slots
from bough.model.kv.session_kv import KVShape, KVSlot
from bough.trees.tree import Tree
from tests.fakes.models import CPU
from tests.model.cpu.test_gemm_parallel import before_a_wall

NUM_HEADS, NUM_KV_HEADS = 9, 3
ROOT = Path(__file__).parents[3]
FOLDERS = "bough", "draft_worker", "target_worker", "orchestrator", "deploy", "loadtest"
COMPILERS = {"jit", "njit", "cfunc", "vectorize", "guvectorize", "stencil", "jitclass"}


def names_of_numba(path: Path) -> set[str]:
    """What a file takes from numba, by way of the module or by name."""
    if "numba" not in (text := path.read_text()):  # most do not name it, and take long to parse
        return set()
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "numba":
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module == "numba":
            names |= {alias.name for alias in node.names}
    return names


@pytest.mark.slow
def test_compiler_settings_are_in_one_file() -> None:
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
        (jit.fastmath_parallel, jit.FASTMATH),
        (jit.fastmath_inner, jit.FASTMATH),
    ],
)
def test_every_decorator_states_its_rounding(decorator: Any, fastmath: object) -> None:
    options = decorator(add_to).targetoptions
    assert (options["fastmath"], options["nogil"], options["error_model"]) == (fastmath, True, "numpy")


def add_to(out: Any, number: Any) -> None:
    out[0] += number


def test_a_function_is_called_by_its_pointer() -> None:
    """Of arguments of other types the compiler knows before anything is called."""
    out = np.zeros(1)
    pointer = jit.pointer(jit.strict(add_to), out, 2.0)
    call_twice(pointer, out, 2.0)
    assert out[0] == 4.0
    with pytest.raises(ValueError, match="mismatch of argument types"):
        call_twice(pointer, np.zeros(1, np.int32), 2.0)


@jit.strict
def call_twice(function, out, number):
    function(out, number)
    function(out, number)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("head_dim", "window"), [(20, 0), (64, 0), (64, 7)])
def test_a_nodes_attention_has_the_bits_of_its_path(head_dim: int, window: int, dtype: torch.dtype) -> None:
    """Random trees of one tile or several, on contexts of any length, with another session."""
    rng, shape = np.random.default_rng(0), KVShape(1, NUM_KV_HEADS, head_dim, dtype)
    rules = head_dim**-0.5, window, 3.0, torch.linspace(-1, 1, NUM_HEADS)
    for seed in range(12):
        generator, base, size = torch.Generator().manual_seed(seed), int(rng.integers(1, 70)), int(rng.integers(2, 40))
        parents = [-1, *(int(rng.integers(max(0, node - 5), node)) for node in range(1, size))]
        queries = (3 * torch.randn(size, NUM_HEADS, head_dim, generator=generator)).to(dtype)
        keys, values, held_keys, held_values = (
            torch.randn(num_rows, NUM_KV_HEADS, head_dim, generator=generator).to(dtype)
            for num_rows in (size, size, base, base)
        )

        def attended(
            nodes: list[int],
            parents: list[int],
            num_before: int = 0,
            base: int = base,
            held: tuple[torch.Tensor, ...] = (held_keys, held_values),
            new: tuple[torch.Tensor, ...] = (queries, keys, values),
        ) -> torch.Tensor:
            slot, other = KVSlot(shape, base + len(nodes), CPU), KVSlot(shape, num_before, CPU)
            slot.keys[0, :base], slot.values[0, :base] = held
            tree = Tree.of([1] * len(nodes), parents, [0.0] * len(nodes))
            segments = [Segment.context(other, 0, [1] * num_before), Segment.tree(slot, base, tree)]
            (chunk,) = Batch(segments, None, CPU).chunks
            rows = (torch.cat([part[:1].expand(num_before, -1, -1), part[nodes]]) for part in new)
            return attend_in_slots(chunk, 0, *rows, *rules)[num_before:]

        whole, tree = attended(list(range(size)), parents, 5), Tree.of([1] * size, parents, [0.0] * size)
        for node in range(0, size, 3):
            path = [int(step) for step in tree.path(node)]
            assert torch.equal(attended(path, list(range(-1, len(path) - 1)))[-1], whole[node])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nothing_is_read_beyond_keys_and_values(dtype: torch.dtype) -> None:
    """The last number of the last one is before memory that cannot be read."""
    base, size, head_dim = 19, 2, 20
    slot = KVSlot(KVShape(1, NUM_KV_HEADS, head_dim, dtype), base + size, CPU)
    slot.keys.copy_(torch.randn(slot.keys.shape)), slot.values.copy_(torch.randn(slot.values.shape))
    piece = BatchPart(0, Segment.tree(slot, base, Tree.of([1, 1], [-1, 0], [0.0, 0.0])))
    queries, rules = torch.randn(size, NUM_HEADS, head_dim).to(dtype), (0.25, 0, 0.0, None)
    guarded = [before_a_wall(rows.view(torch.uint8).numpy().tobytes()) for rows in (slot.keys, slot.values)]
    place = Place(guarded[0].ctypes.data, guarded[1].ctypes.data, base + size)
    spans = PathSpans.at([place], [piece], NUM_KV_HEADS)
    found = attention_kernel.attend_over(spans, 0, NUM_KV_HEADS, head_dim, queries, *rules)
    expected = attention_kernel.attend_over(PathSpans.of([piece]), 0, NUM_KV_HEADS, head_dim, queries, *rules)
    assert torch.equal(found, expected)


def test_float16_is_read_exactly() -> None:
    """All of them, with their signs; what is no number stays none."""
    bits = np.arange(2**16, dtype=np.uint16)
    found, expected = read_all(bits.view(np.int16)), bits.view(np.float16).astype(np.float32)
    is_number = ~np.isnan(expected)
    assert np.array_equal(found.view(np.uint32)[is_number], expected.view(np.uint32)[is_number])
    assert np.isnan(found[~is_number]).all()


@jit.strict
def read_all(numbers):
    out = np.empty(len(numbers), np.float32)
    for i in range(len(numbers)):
        out[i] = _as_float(numbers[i])
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_in_16_bits_equals_float32_of_the_same_numbers(dtype: torch.dtype) -> None:
    base, parents, head_dim = 37, [-1, 0, 0, 1, 1, 2], 20
    tree = Tree.of([1] * len(parents), parents, [0.0] * len(parents))
    held = torch.randn(2, base, NUM_KV_HEADS, head_dim).to(dtype)
    new = [torch.randn(len(parents), num, head_dim).to(dtype) for num in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]

    def attended(own: torch.dtype) -> torch.Tensor:
        slot = KVSlot(KVShape(1, NUM_KV_HEADS, head_dim, own), base + len(parents), CPU)
        slot.keys[0, :base], slot.values[0, :base] = held.to(own)
        (chunk,) = Batch([Segment.tree(slot, base, tree)], None, CPU).chunks
        return attend_in_slots(chunk, 0, *(rows.to(own) for rows in new), 0.25, 0, 0.0, None)

    assert torch.equal(attended(dtype), attended(torch.float32).to(dtype))


@jit.strict_inner
def _doubled(number):
    return 2 * number


@jit.strict_inner
def _added(number, others):
    return _doubled(number) + np.zeros(others).sum()


@jit.strict
def both(number):
    return _doubled(number) + _added(number, 3)


def have_code(function: Any) -> set[bool]:
    """Whether a function has machine code, for arguments of any types that it was compiled for."""
    return {compiled.library._has_code for compiled in function.overloads.values()}


def test_functions_only_called_by_compiled_code_have_no_code_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(both, "_cache", NullCache())  # code loaded from disk would not compile what it calls
    assert both(2.0) == 8.0
    assert [have_code(function) for function in (both, _doubled, _added)] == [{True}, {False}, {False}]


def test_python_can_run_compiled_functions_itself() -> None:
    """numba's own class would have ended the process."""
    assert _added(2.0, 3) == 4.0


def test_other_versions_of_numba_compile_in_their_usual_way(monkeypatch: pytest.MonkeyPatch) -> None:
    codegen = cpu_target.target_context.codegen()
    monkeypatch.setattr(codegen, "__class__", JITCPUCodegen)
    monkeypatch.setattr(late_code, "TRIED_VERSION", (0, 0))
    late_code.make_code_late()
    assert type(codegen) is JITCPUCodegen
