"""A real model's verdicts and log-probabilities, bit for bit, however its slots grow, move and give way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bough.errors import Exhausted, PrefixMissing
from bough.model.kv.session_kv import KVArena
from bough.model.sizes.target_limits import TargetLimits
from bough.protocol.ids import ScopedId
from bough.protocol.messages import Verdict
from bough.protocol.sampling_params import SamplingParams
from bough.trees.tree import Tree
from target_worker.kv.slot_pool import SlotPool
from target_worker.scheduler.engine import SweepEngine
from target_worker.sweep.streamed_model import StreamedModel, StreamedSweeper
from tests.fakes.models import streamed
from tests.fakes.target import CPU, NO_GRAMMARS, Clock, verify_call
from tests.fakes.tiers import long_but

LIMITS = TargetLimits(rows=16, max_sweep_tokens=64, max_nodes=16, max_context=128)
SAMPLING = SamplingParams(temperature=0.8, seed=11, logprobs=4)
PROMPT, ENOUGH = 70, 100  # tokens: in between, slots grow several times, and keys fill another block of attention


class Session:
    """Sends what is missing of its text, and asks again where there is no room."""

    def __init__(self, number: int) -> None:
        self.name, self.epoch = f"s{number}", number + 1
        self.tokens: list[int] = np.random.default_rng(number).integers(0, 256, PROMPT).tolist()
        self.held = 0
        self.verdicts: list[Verdict] = []

    def step(self, engine: SweepEngine) -> None:
        root = self.tokens[-1]
        tree = Tree.of([root, 3, 9, 4, 5, 6], [-1, 0, 0, 1, 1, 3], [0.0] * 6)
        call = verify_call(self.name, self.tokens, self.held, len(self.verdicts), self.epoch, tree)
        try:
            result = engine.verify(replace(call, sampling=SAMPLING)).result(60)
        except PrefixMissing as missing:
            self.held = missing.held_length
        except Exhausted:
            pass
        else:
            self.verdicts.append(result.verdict)
            self.tokens += result.verdict.tokens_of(tree)
            self.held = result.held_length


def verdicts(model: StreamedModel, num_sessions: int, step: int, num_rows: int) -> tuple[list[list[Verdict]], int]:
    """Of each session to its end, and how often one was preempted."""
    shape, clock = model.skeleton.kv_shape(), Clock()
    pool = SlotPool(KVArena(shape, shape.empty(num_rows, CPU)), 60.0, clock, step)
    engine = SweepEngine(StreamedSweeper(model, NO_GRAMMARS), pool, replace(LIMITS, kv_step=step), max_waiting=10)
    sessions = [Session(number) for number in range(num_sessions)]
    engine.start()
    try:
        while going_on := [session for session in sessions if len(session.tokens) < ENOUGH]:
            clock.now += 1.0
            for session in going_on:
                session.step(engine)
                if len(session.tokens) >= ENOUGH:
                    engine.release(ScopedId(session.name)).result(60)
    finally:
        engine.stop()
    return [session.verdicts for session in sessions], pool.figures().num_preemptions


@pytest.mark.slow
@pytest.mark.parametrize("dtype", long_but([torch.float32], [torch.float32, torch.bfloat16]))
def test_bits_do_not_depend_on_how_slots_grow(tiny: Path, dtype: torch.dtype) -> None:
    with streamed(tiny, dtype) as model:
        whole, num_preemptions = verdicts(model, 3, 1000, 3 * LIMITS.slot_rows)
        assert num_preemptions == 0
        for step in (1, 7):
            assert verdicts(model, 3, step, 3 * LIMITS.slot_rows) == (whole, 0)
        crowded, num_preemptions = verdicts(model, 3, 8, LIMITS.slot_rows + PROMPT)
        assert crowded == whole
        assert num_preemptions > 0
