"""The longest session of a target that no flag limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bough.config.processes import TargetConfig, parse
from bough.model.kv.session_kv import KVShape
from bough.model.sizes.memory_budget import with_kv_memory
from bough.model.sizes.target_limits import TargetLimits

GB = 1000**3
SHAPE = KVShape(80, 8, 128, torch.bfloat16)  # of a 70B: 327,680 bytes a token


def settled(num_positions: int, memory: int, *flags: str) -> TargetConfig:
    config = parse(TargetConfig, "t", ["--model", "m", *flags], {})
    return with_kv_memory(config, SHAPE, num_positions, memory, 0)


def test_it_is_the_models_own_where_memory_holds_it() -> None:
    """It was 2,048 tokens, whatever the model: fewer than the first request of an agent."""
    config = settled(8192, 24 * GB)
    assert config.max_context == 8192
    assert config.kv_memory == (8192 + 512) * SHAPE.row_bytes
    assert settled(8192, 64 * GB, "--kv-memory", "8GB").max_context == 8192


def test_it_is_what_kv_memory_holds_where_that_is_less() -> None:
    config = settled(131_072, 24 * GB)
    assert (config.kv_memory, config.max_context) == (3 * GB, 8448)
    assert TargetLimits.of(config, 131_072).num_rows(SHAPE.row_bytes, config.kv_memory) >= 8448 + 512
    assert settled(131_072, 24 * GB, "--kv-memory", "1GB").max_context == 2304
    assert settled(131_072, 4 * GB).max_context == 2048, "the least, for which there was room before"


def test_a_flag_is_followed_up_to_the_models_own_limit() -> None:
    assert settled(8192, 24 * GB, "--max-context", "3000").max_context == 3000
    assert settled(8192, 24 * GB, "--max-context", "9000").max_context == 8192
    assert settled(131_072, 24 * GB, "--max-context", "32768").kv_memory == (32768 + 512) * SHAPE.row_bytes


@pytest.mark.parametrize("flags", [(), ("--max-context", "4096")])
def test_sessions_that_were_asked_for_have_room_for_it(flags: tuple[str, ...]) -> None:
    config = settled(131_072, 200 * GB, "--kv-sessions", "4", *flags)
    limits = replace(TargetLimits.of(config, 131_072))
    assert limits.num_rows(SHAPE.row_bytes, config.kv_memory) >= 4 * limits.slot_rows
    assert config.max_context >= 4096
