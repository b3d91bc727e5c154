"""The benchmark of growing together times what it says: trees that are grown cold, on a context that is held."""

from __future__ import annotations

from pathlib import Path

import pytest

from bough.config.processes import DraftConfig, parse
from bough.protocol.sampling_params import SamplingParams
from bough.trees.tree_plan import BestFirst, TreePlan
from draft_worker.worker import DraftWorker
from loadtest.draft_batch import grow_together


def shortened(prompts: dict[int, list[int]], length: int) -> dict[int, list[int]]:
    return {number: tokens[:length] for number, tokens in prompts.items()}


def test_every_growth_is_cold_and_one_that_is_not_is_no_measurement(tiny: Path) -> None:
    """One token earlier each time; at the same place again everything is known."""
    draft = DraftWorker(parse(DraftConfig, "d", ["--model", str(tiny), "--threads", "1"], {}), "test")
    params, plan = SamplingParams(temperature=0.0), TreePlan(BestFirst(8, 2, 3))
    prompts = {number: [(7 * number + place) % 50 for place in range(40)] for number in range(2)}
    try:
        grow_together(draft, prompts, 0, params, plan)
        for length in (39, 38, 37):
            assert grow_together(draft, shortened(prompts, length), length, params, plan).num_steps == 3
        with pytest.raises(RuntimeError, match=r"\d+ nodes were known beforehand: what was timed is no cold growth"):
            grow_together(draft, shortened(prompts, 37), 37, params, plan)
    finally:
        draft.close()
