"""A stage whose device has no memory left for a sweep."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from bough.errors import AcceleratorFull
from bough.model.batch.batch import Batch
from bough.model.kv.arena import Arena
from bough.model.kv.session_kv import KVArena
from bough.model.sizes.target_limits import TargetLimits
from bough.protocol.messages import Timings
from bough.sizing.row_counts import OWN_MOST
from target_worker.kv.slot_pool import SlotPool
from target_worker.scheduler.engine import SweepEngine
from target_worker.stages.remote import OtherStages
from target_worker.stages.sweeper import StagedSweeper
from target_worker.sweep.streamed_model import StreamedSweeper
from tests.fakes.models import CPU, streamed
from tests.fakes.staged_models import RingInProcess, staged
from tests.fakes.target import NO_GRAMMARS, verify_call

LIMITS = TargetLimits(rows=16, max_sweep_tokens=2 * OWN_MOST, max_nodes=16, max_context=600)
PROMPT = [token * 7 % 250 for token in range(LIMITS.max_sweep_tokens)]
NUM_ROWS = 700


@contextmanager
def engine_of(
    sweeper: StreamedSweeper, arena: Arena, lost_kv: Callable[[], bool] = lambda: False
) -> Iterator[SweepEngine]:
    engine = SweepEngine(sweeper, SlotPool(arena, 60.0, time.monotonic), LIMITS, 100, lost_kv=lost_kv)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def conversation(engine: SweepEngine) -> list[int]:
    """Tokens after a prompt that fills the largest sweep, each from a call that sends only the token before it."""
    tokens = [*PROMPT]
    for round_ in range(3):
        held = len(tokens) - 1 if round_ else 0
        result = engine.verify(verify_call("a", tokens, held, round_)).result(60)
        tokens.append(result.verdict.bonus_token)
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("number", [0, 1])
def test_a_stage_without_memory_makes_sweeps_smaller_and_keeps_what_all_hold(
    tiny: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with streamed(tiny, torch.float32) as whole:
        shape = whole.skeleton.kv_shape()
        with engine_of(StreamedSweeper(whole, NO_GRAMMARS), KVArena(shape, shape.empty(NUM_ROWS, CPU))) as engine:
            wanted = conversation(engine)
    with staged(tiny, torch.float32, [1, 2], NUM_ROWS) as target:
        model, num_refused = target.stages[number]._model, 0
        run_layers = model.run_layers

        def small(batch: Batch, hidden: torch.Tensor) -> tuple[torch.Tensor, Timings]:
            nonlocal num_refused
            if batch.num_tokens > OWN_MOST:
                num_refused += 1
                raise AcceleratorFull("--device: cuda:0 has no memory left: 2 GiB")
            return run_layers(batch, hidden)

        monkeypatch.setattr(model, "run_layers", small)
        others = OtherStages(cast(Any, RingInProcess(target.stages)), target.log, lambda: "")
        assert others.lost_kv()
        sweeper = StagedSweeper(target.model, NO_GRAMMARS, others)
        with engine_of(sweeper, target.arena, others.lost_kv) as engine, caplog.at_level(logging.WARNING):
            assert conversation(engine) == wanted
    assert num_refused == 1
    refused = f"stage {number + 1}: --device: cuda:0 has no memory left: 2 GiB; sweeps have at most"
    assert refused in caplog.text
