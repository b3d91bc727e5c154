"""Logits stay on the device: a greedy verdict asks for none of them, any other for the rows on its walk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bough.errors import Unavailable
from bough.model.batch.batch import Segment
from bough.model.kv.session_kv import KVArena
from bough.model.sampling.sampler import Row
from bough.protocol.messages import Verdict
from bough.protocol.sampling_params import SamplingParams
from bough.trees.tree import Tree
from target_worker.scheduler.batching import Part
from target_worker.sweep.streamed_model import StreamedSweeper
from target_worker.verification.verdict import NO_NUMBER, LogitRows, RowReader, best_tokens, compute_verdict
from tests.fakes.gpu.device_sweeps import Where, on_the_device
from tests.fakes.gpu.pretend import Notes, device, notes, pretending
from tests.fakes.target import NO_GRAMMARS, verify_call

GREEDY = SamplingParams(temperature=0.0)
OTHERS = {
    "sampled": SamplingParams(seed=3),
    "penalties": replace(GREEDY, presence_penalty=0.5),
    "bias": replace(GREEDY, logit_bias={4: 2.0}),
    "log-probabilities": replace(GREEDY, logprobs=2),
}


def verdict(tree: Tree, params: SamplingParams, rows: LogitRows) -> tuple[Verdict, int]:
    """And how many rows it asked for."""
    asked = []

    def after(path: Sequence[int]) -> Row:
        asked.append(path[-1])
        return rows.after(path)

    call = replace(verify_call("a", [1, 2, 3]), tree=tree, sampling=params)
    return compute_verdict(call, [1, 2, 3], after, rows.best_after), len(asked)


@pytest.mark.parametrize("name", ["greedy", *OTHERS])
def test_a_verdict_is_the_same_by_the_largest_and_by_all(name: str) -> None:
    """In bfloat16, where the largest are often equal: the first of them is the token."""
    params = OTHERS.get(name, GREEDY)
    logits = torch.from_numpy(np.random.default_rng(1).integers(0, 4, (6, 40))).bfloat16()
    best = best_tokens(logits)
    assert best.tolist() == [int(row.float().numpy().argmax()) for row in logits]
    first = int(best[0])
    tree = Tree.of([3, first, 7, int(best[1]), 9, 11], [-1, 0, 0, 1, 1, 3], [0.0] * 6)
    whole, num_whole = verdict(tree, params, LogitRows(logits, None, RowReader()))
    reduced, num_reduced = verdict(tree, params, LogitRows(logits, best, RowReader()))
    assert whole == reduced
    assert num_reduced == (0 if name == "greedy" else num_whole)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_no_number_is_refused_as_ever(bad: float) -> None:
    logits = torch.zeros(1, 8)
    logits[0, 5] = bad
    best = best_tokens(logits)
    assert best.tolist() == [NO_NUMBER]
    for known in (best, None):
        with pytest.raises(Unavailable, match="position 3 are not numbers"):
            verdict(Tree.root(3), GREEDY, LogitRows(logits, known, RowReader()))


def swept(folder: Path, params: SamplingParams) -> tuple[list[Any], Notes]:
    """Verdicts on two sessions' trees from one sweep on the device, and what was asked of it."""
    with pretending(), on_the_device(folder, Where(), torch.bfloat16, 64) as model:
        shape = model.skeleton.kv_shape()
        arena = KVArena(shape, shape.empty(200, device()))
        jobs = []
        for root in (3, 5):
            call = replace(verify_call(f"session {root}", [root]), sampling=params)
            tree = Tree.of([root, 8, 9], [-1, 0, 0], [0.0] * 3)
            segment, text = Segment.tree(arena.take(50), 0, tree), SimpleNamespace(tokens=[])
            jobs.append(
                SimpleNamespace(
                    session=SimpleNamespace(allowed=None),
                    call=call,
                    tree=tree,
                    num_nodes=3,
                    text=text,
                    segments=lambda *_, segment=segment: [segment],
                )
            )
        sweeper = StreamedSweeper(model, NO_GRAMMARS)
        sweeper.sweep([Part(job, 0, True) for job in jobs])
        notes.clear()
        done = sweeper.sweep([Part(job, 0, True) for job in jobs])
        return [done.verdict_on(job) for job in jobs], notes


def test_a_greedy_sweep_brings_back_a_number_a_node(tiny: Path) -> None:
    verdicts, seen = swept(tiny, GREEDY)
    assert len(verdicts) == 2
    assert len(seen.stops) == 1, seen.stops
    assert "(6,)" in seen.stops[0], "of six nodes"


def test_a_sampled_one_brings_the_rows_that_are_walked(tiny: Path) -> None:
    verdicts, seen = swept(tiny, SamplingParams(seed=1))
    num_walked = sum(1 + len(verdict.accepted_nodes) for verdict in verdicts)
    assert len(seen.stops) == 1 + num_walked, seen.stops
