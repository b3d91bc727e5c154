"""Random weights, with which kernels are checked: they have every number of a layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bough.model.checkpoint.tensor_source import FreshMemory
from bough.model.quant.formats import SAMPLES
from bough.model.quant.ggml_blocks import TYPES, sample
from tests.fakes.models import CPU

NANS = {0x7F, 0xFF}


def test_numbers_of_8_bits_have_all_values_but_nan() -> None:
    numbers, *_ = SAMPLES["fp8 8 bits"](64, 512).random(np.random.default_rng(0))
    assert set(numbers.tolist()) == set(range(256)) - NANS


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_have_numbers_of_either_sign_that_fit_in_every_type(kind: str) -> None:
    source = sample(kind, 64, 512)
    raw = source.random(np.random.default_rng(0))
    assert set(raw[0].tolist()) == set(range(256))
    values = source.value(raw, torch.float16, FreshMemory(CPU))
    assert values.isfinite().all()
    assert 0.1 < (values < 0).double().mean() < 0.9
