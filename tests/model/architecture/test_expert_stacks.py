"""Which experts can be multiplied together: those whose bytes are in memory as products take them, and alike."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bough.model.architecture.moe import ExpertSources, _stacks
from bough.model.checkpoint.tensor_source import FreshMemory, Joined, ReusedMemory, Stored, TensorSource, Transposed
from bough.model.quant.format import Dequantized, place_of
from bough.model.quant.formats import SAMPLES

OUTPUTS, INPUTS = 32, 256
PLAIN = Stored(place_of("BF16", OUTPUTS, INPUTS))
WIDE = Stored(place_of("F32", OUTPUTS, INPUTS))
AWQ, BYTES, FP4 = (SAMPLES[name](OUTPUTS, INPUTS) for name in ("awq 4 bits", "int8", "mxfp4 4 bits"))
CPU = torch.device("cpu")


def raw_of(source: TensorSource) -> list[torch.Tensor]:
    if isinstance(source, Dequantized):
        return source.random(np.random.default_rng(0))
    return [torch.zeros(place.num_bytes, dtype=torch.uint8) for place in source.places]


def num_stacks(*experts: TensorSource, is_transposed: bool = False, stays: bool = False) -> int:
    sources = ExpertSources(experts)
    room = 2 * sources.scratch_bytes(torch.bfloat16)
    scratch = FreshMemory(CPU) if stays else ReusedMemory(torch.empty(room, dtype=torch.uint8))
    table = sources.table([raw for expert in experts for raw in raw_of(expert)], torch.bfloat16, scratch)
    module = SimpleNamespace(has_bias=False, is_transposed=is_transposed, num_experts=len(experts), up_proj=table)
    stacks = _stacks(module, "up_proj")
    assert _stacks(module, "up_proj") is stacks, "made once"
    assert all(len(stack.matrices) == len(experts) for stack in stacks)
    return len(stacks)


@pytest.mark.parametrize("source", [PLAIN, AWQ, BYTES, FP4])
def test_experts_as_stored_are_one_stack_for_each_tensor(source: TensorSource) -> None:
    assert num_stacks(source, source) == 1
    assert num_stacks(*[Joined((source, source))] * 3) == 2
    assert num_stacks(Transposed(source), Transposed(source), is_transposed=True) == 1


def test_other_experts_are_none() -> None:
    assert num_stacks(WIDE, WIDE) == 0, "to be converted"
    assert num_stacks(WIDE, WIDE, stays=True) == 1, "converted for good"
    assert num_stacks(PLAIN, AWQ) == 0
    assert num_stacks(AWQ, BYTES) == 0
    assert num_stacks(*[Transposed(AWQ)] * 2) == 0, "products take packed matrices by outputs"
    assert num_stacks(*[Joined((PLAIN, PLAIN))] * 2, is_transposed=True) == 0, "parts along inputs"
    odd = Stored(replace(PLAIN.place, offset=1))
    assert num_stacks(odd, odd) == 0, "whose bytes are copied to be read"
