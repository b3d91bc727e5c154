"""A head that starts again while its stages hold their layers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from bough.config.processes import TargetConfig, parse
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.sizes.target_limits import KVRoom
from bough.sizing.stage_split import StageRoom
from target_worker.stages.head import Split, StagesHead, loaded_split
from target_worker.stages.roster import Assignment, JoinCall, StageFacts, StageFigures
from target_worker.sweep.held_layers import HeldLayers

FACTS = StageFacts("0.1", "code", "checkpoint", "tokenizer", "float32", "cpu")
LOADED, NOW = KVRoom(1000, 0), KVRoom(1200, 0)
LAYERS = Assignment(1, 3, 4, *LOADED, 300, 64, 256, 64)  # as no head would divide them
FIGURES = StageFigures(3, 4, 700, "a CPU", *LOADED, 300)


def test_a_restarted_head_keeps_the_split_that_its_stages_have_loaded() -> None:
    kv = {"num_rows": 1000, "num_states": 2, "max_context": 300}
    stages = [StageFigures(3, 5, **kv), StageFigures(5, 9, **kv)]
    assert loaded_split(stages, 9) == Split([range(3), range(3, 5), range(5, 9)], KVRoom(1000, 2), 300)


@pytest.mark.parametrize(
    "stages",
    [
        [StageFigures(3, 5), StageFigures()],  # one was restarted too
        [StageFigures(), StageFigures()],
        [StageFigures(3, 5), StageFigures(6, 9)],  # of another model, or another number of stages
        [StageFigures(3, 5), StageFigures(5, 8)],
        [StageFigures(0, 5), StageFigures(5, 9)],
        [StageFigures(5, 9), StageFigures(3, 5)],
        [StageFigures(3, 5, num_rows=1000), StageFigures(5, 9, num_rows=1200)],  # of two heads
    ],
)
def test_other_layers_are_divided_anew(stages: list[StageFigures]) -> None:
    assert loaded_split(stages, 9) is None


@pytest.mark.parametrize(
    ("flags", "memory", "is_kept"),
    [
        ([], 10**9, True),
        (["--max-context", "300"], 10**9, True),
        (["--max-context", "200"], 10**9, False),
        (["--max-nodes", "701"], 10**9, False),  # does not fit the rows beside a session
        (["--kv-memory", "8MB"], 10**9, False),
        (["--kv-sessions", "3"], 10**9, False),
        ([], 2_200_000, False),  # too little for three layers
    ],
)
async def test_a_restarted_head_takes_the_kv_memory_of_loaded_stages_unless_its_settings_decide_it(
    tiny: Path, flags: list[str], memory: int, is_kept: bool
) -> None:
    """By default it depends on the memory that is free at a start: stages with other rows must start again, too."""
    flags = ["--max-nodes", "64", "--max-sweep-tokens", "256", "--rows", "64", *flags]
    asked = parse(TargetConfig, "t", ["--model", str(tiny), "--dtype", "float32", "--stages", "2", *flags], {})
    whole = HeldLayers(asked, Checkpoint.open(str(tiny)))
    whole.config = replace(asked, kv_memory=10**9, max_context=asked.max_context or 400)
    head = StagesHead(asked)
    head.admit(FACTS)
    call = JoinCall("id", "127.0.0.1:1", FACTS, StageRoom("b", 10**9, 0.0, 0.01, 1), FIGURES)
    head.roster.join(call)
    split = await asyncio.to_thread(head.split, whole, StageRoom("a", memory, 0.0, 0.01, 1), NOW, asked)
    assert (head.roster.join(call) == LAYERS) == is_kept
    assert (split == Split([range(3), range(3, 4)], LOADED, 300)) == is_kept
    assert split.room == (LOADED if is_kept else NOW)
