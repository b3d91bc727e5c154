"""Which matrices get more bits, and how well scales are chosen: against brute force, and the plainest rounding."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.errors import ConfigError
from bough.model.packing.bit_allocation import LAYOUTS, Option, choose
from bough.model.quant.quantize import SHRUNKEN, Layout, quantize, rounding_error


def matrices(seed: int, num: int) -> dict[str, list[Option]]:
    """Of random sizes, whose errors fall with the bits, mostly."""
    rng = np.random.default_rng(seed)
    return {
        f"matrix {number}": [
            Option(layout, layout.bits_per_weight * size, float(rng.uniform(0.3, 1.0) * 2**-layout.bits_per_weight))
            for layout in LAYOUTS[int(rng.integers(0, 2)) :]
        ]
        for number, size in enumerate(rng.integers(1, 20, num).tolist())
    }


def num_weights(options: dict[str, list[Option]]) -> float:
    return sum(several[0].num_bits / several[0].layout.bits_per_weight for several in options.values())


def least_error(options: dict[str, list[Option]], most_bits: float) -> float:
    """Over all choices that fit."""
    sums = (
        (sum(o.num_bits for o in choice), sum(o.error for o in choice))
        for choice in itertools.product(*options.values())
    )
    return min((error for bits, error in sums if bits <= most_bits), default=math.inf)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31), num=st.integers(1, 5), bits=st.floats(4.25, 9))
def test_the_choice_fits_and_none_that_is_a_step_smaller_is_better(seed: int, num: int, bits: float) -> None:
    options = matrices(seed, num)
    weights = num_weights(options)
    if sum(min(o.num_bits for o in several) for several in options.values()) > bits * weights:
        with pytest.raises(ConfigError, match=r"--bits: must be .*scales included, got"):
            choose(options, bits, weights)
        return
    chosen = choose(options, bits, weights)
    taken = [next(o for o in options[name] if o.layout == layout) for name, layout in chosen.items()]
    assert sum(option.num_bits for option in taken) <= bits * weights + 1e-9
    step = max(max(o.num_bits for o in s) - min(o.num_bits for o in s) for s in options.values())
    assert sum(option.error for option in taken) <= least_error(options, bits * weights - step) + 1e-12


def test_small_matrices_get_their_bits_first() -> None:
    """As much error for fewer bytes."""
    options = {
        name: [Option(layout, layout.bits_per_weight * size, 2 ** -float(layout.bits)) for layout in LAYOUTS]
        for name, size in (("large", 100), ("small", 10))
    }
    assert choose(options, 5.0, 110) == {"large": Layout(4, 128), "small": Layout(8, 64)}


def test_what_is_in_four_bits_already_gets_no_more() -> None:
    """The checkpoint of a model that was rounded before: eight bits would only find other integers for it."""
    generator = torch.Generator().manual_seed(1)
    steps = torch.randint(0, 16, (16, 4, 32), generator=generator).float()
    steps[:, :, 0], steps[:, :, 1] = 0, 15
    weight = (steps * torch.rand(16, 4, 1, generator=generator).half().float()).view(16, 128)
    options = [Option(layout, 2048 * layout.bits_per_weight, rounding_error(weight, layout)) for layout in LAYOUTS]
    assert choose({"w": options}, 8.25, 2048) == {"w": Layout(4, 32)}


@pytest.mark.parametrize(("layout", "gain"), [(Layout(4, 32), 0.15), (Layout(4, 64), 0.12), (Layout(4, 128), 0.1)])
def test_scales_that_minimise_the_error_beat_those_that_span_the_range(layout: Layout, gain: float) -> None:
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(2))
    groups = weight.view(64, -1, layout.group_size)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    spanning = ((groups - low) / (high - low) * 15).round() / 15 * (high - low) + low
    plain = float((spanning - groups).square().sum() / groups.square().sum())
    assert rounding_error(weight, layout, SHRUNKEN) < (1 - gain) * plain
    assert rounding_error(weight, layout, SHRUNKEN) <= rounding_error(weight, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_error_that_is_told_is_that_of_what_is_written(layout: Layout) -> None:
    weight = torch.randn(8, 256, generator=torch.Generator().manual_seed(3))
    packed, scales = quantize(weight, *layout, SHRUNKEN)
    if layout.bits == 4:
        integers = packed.view(8, -1, layout.group_size // 2)
        integers = torch.cat((integers & 15, integers >> 4), dim=2).float()
    else:
        integers = packed.view(8, -1, layout.group_size).float()
    value = integers * scales[0].float()[:, :, None] + (scales[1].float()[:, :, None] if layout.bits == 4 else 0)
    error = float((value.view(8, 256) - weight).square().sum() / weight.square().sum())
    assert rounding_error(weight, layout, SHRUNKEN) == pytest.approx(error, rel=1e-3)
    assert rounding_error(torch.zeros(4, 128), layout) == 0.0
