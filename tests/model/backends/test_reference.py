"""The reference against the CPU's kernels: the same formulas, so only the order of sums may differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bough.errors import ConfigError
from bough.model.backend import Backend, backend_of, choose_backend, computing_by, load
from bough.model.backends import reference
from bough.model.batch.batch import Batch, BatchPart, Segment
from bough.model.batch.state_steps import chain_steps
from bough.model.checkpoint.tensor_source import FreshMemory
from bough.model.cpu import unpack
from bough.model.kv.session_kv import KVShape, KVSlot
from bough.model.packed import Along, InBlocks
from bough.model.quant.formats import SAMPLES
from loadtest.common.tiny_model import TINY, save_model
from tests.fakes.model.families import random_tree
from tests.fakes.models import CPU, new_slot, streamed
from tests.fakes.tiers import long_but

CPU_KERNELS, REFERENCE = load("cpu"), load("reference")
CLOSE = 1e-5  # of values near 1: sums of some hundred float32 products in two orders
HEADS, KV_HEADS, CONTEXT = 6, 2, 100


def attended(backend: Backend, dim: int, sinks: torch.Tensor | None, window: int, softcap: float) -> torch.Tensor:
    """Of a context and a tree of one session, with a tree of another."""
    rng, generator = np.random.default_rng(3), torch.Generator().manual_seed(3)
    slots = [KVSlot(KVShape(1, KV_HEADS, dim, torch.float32), 160, CPU) for _ in range(2)]
    trees = [
        Segment.tree(slots[0], CONTEXT, random_tree(rng, 20, 1)),
        Segment.tree(slots[1], 0, random_tree(rng, 9, 1)),
    ]
    (chunk,) = Batch([Segment.context(slots[0], 0, [0] * CONTEXT), *trees], None, CPU).chunks
    queries, keys, values = (
        torch.randn(chunk.num_tokens, heads, dim, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    return backend.attend(chunk, 0, queries, keys, values, dim**-0.5, window, softcap, sinks)


@pytest.mark.parametrize("dim", [16, 64])  # keys and values are copied, and read in place
@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 1, HEADS)], ids=["no sinks", "sinks"])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (9, 0.0), (0, 5.0), (70, 5.0)])
def test_attention_equals_the_reference(dim: int, sinks: torch.Tensor | None, window: int, softcap: float) -> None:
    mine, theirs = (attended(backend, dim, sinks, window, softcap) for backend in (REFERENCE, CPU_KERNELS))
    assert mine.shape == (CONTEXT + 29, HEADS, dim)
    torch.testing.assert_close(mine, theirs, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("is_tree", [False, True])
def test_the_gated_delta_rule_equals_the_reference(is_tree: bool) -> None:
    piece = BatchPart(0, Segment.tree(KVSlot.__new__(KVSlot), 0, random_tree(np.random.default_rng(1), 12, 1)))
    steps, begin = (piece.tree_steps(3), 0) if is_tree else (chain_steps(12, 3), 4)
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(12, (2 * 2 + 4) * 8, generator=generator)
    decay, beta = torch.rand(2, 12, 4, generator=generator)
    outs, states = [], [torch.full((4, steps.num_places, 8, 8), 0.5) for _ in range(2)]
    for backend, own in zip((REFERENCE, CPU_KERNELS), states, strict=True):
        outs.append(backend.recur(qkv, decay, beta, steps, own, 2, begin))
    torch.testing.assert_close(*outs, rtol=CLOSE, atol=CLOSE)
    torch.testing.assert_close(states[0][:, 0], states[1][:, 0], rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_equal_the_reference(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    rows, matrix, bias = (torch.randn(*size, generator=generator).to(dtype) for size in ((16, 96), (64, 96), (64,)))
    close = CLOSE if dtype is torch.float32 else 2**-6  # a step of bfloat16 in a sum near 10, rounded once or twice
    mine, theirs = (backend.linear(rows, matrix, bias) for backend in (REFERENCE, CPU_KERNELS))
    torch.testing.assert_close(mine, theirs, rtol=close, atol=close)


@pytest.mark.parametrize("dtype", long_but([torch.bfloat16], [torch.float32, torch.bfloat16, torch.float16]), ids=str)
@pytest.mark.parametrize("name", SAMPLES)
def test_weights_are_unpacked_to_the_same_bits(name: str, dtype: torch.dtype) -> None:
    packed = SAMPLES[name](256, 512)
    raw = packed.random(np.random.default_rng(0))
    wanted = packed.value(raw, dtype, FreshMemory(CPU))
    with computing_by("reference"):
        found = packed.value(raw, dtype, FreshMemory(CPU))
    assert torch.equal(found, wanted)


class _Largest(TorchDispatchMode):
    """Bytes of the largest tensor made within the block, other than views."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view and not func._schema.is_mutable:
            self.num_bytes = max(self.num_bytes, out.nbytes)
        return out


@pytest.mark.parametrize("backend", [REFERENCE, CPU_KERNELS], ids=["reference", "cpu"])
@pytest.mark.parametrize("name", [*SAMPLES, "by pairs of rows"])
def test_weights_are_unpacked_in_parts(name: str, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, they took up to 27 bytes each with the reference, and scales of two levels a quarter: no budget had room.

    With GGUF's rows of a head of 40, parts are of whole heads.
    """
    source = SAMPLES.get(name, SAMPLES["Q4_K"])(480, 256)
    matrix = source.packed(source.random(np.random.default_rng(0)))
    if name not in SAMPLES:
        assert isinstance(matrix, InBlocks)
        matrix = matrix._replace(half=20)
    whole = backend.written_out(matrix, torch.bfloat16)
    out = torch.empty_like(whole)
    for module in (reference, unpack):
        monkeypatch.setattr(module, "PART_WEIGHTS", 2**15)
    with _Largest() as largest:
        backend.write(matrix, out)
    assert torch.equal(out, whole)
    if backend is REFERENCE or isinstance(matrix, Along):
        assert 0 < largest.num_bytes <= 2**15 * (8 if backend is REFERENCE else 0.5)


def swept(name: str, dtype: torch.dtype, folder: Path) -> torch.Tensor:
    """Logits of a tree after a context."""
    with computing_by(name), streamed(folder, dtype) as model:
        slot, tree = new_slot(model), random_tree(np.random.default_rng(5), 25, root=3)
        segments = [Segment.context(slot, 0, list(range(40))), Segment.tree(slot, 40, tree)]
        assert model.arithmetic == ("products of single rows" if name == "cpu" else "products of 16 rows")
        return model.sweep(Batch(segments, model.rows, CPU))[0].float()


def test_a_sweep_equals_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, whose rounding grows from layer to layer, it is as near the truth as layers not compiled whole."""
    folder = save_model(tmp_path, TINY)
    monkeypatch.setattr(CPU_KERNELS, "compiles", lambda _: False)
    truth, mine = swept("cpu", torch.float32, folder), swept("reference", torch.float32, folder)
    torch.testing.assert_close(mine, truth, rtol=1e-4, atol=1e-4)
    errors = [(swept(name, torch.bfloat16, folder) - truth).abs().mean() for name in ("reference", "cpu")]
    assert errors[0] < 1.25 * errors[1]


def test_a_backend_for_another_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--backend: must be auto, cpu or reference on cpu, got triton$"):
        choose_backend("triton", CPU)
    with pytest.raises(ConfigError, match=r"^--backend: must be auto, triton, cublas or reference on cuda:0, got cpu$"):
        choose_backend("cpu", torch.device("cuda", 0))
    assert choose_backend("auto", CPU) is choose_backend("cpu", CPU) is backend_of(CPU) is CPU_KERNELS
