"""What a sweep may ask of a GPU: one wait, nothing sent within a layer, few launches, and few logits.

A greedy verdict asks for none of the logits, any other for the rows on its walk.
"""

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
from bough.model.batch.batch import Batch, Segment
from bough.model.kv.session_kv import KVArena, split_memory
from bough.model.kv.states import by_kv_place
from bough.model.sampling.sampler import Row
from bough.protocol.messages import Verdict
from bough.protocol.sampling_params import SamplingParams
from bough.trees.tree import Tree
from loadtest.common.packed_model import pack
from loadtest.common.tiny_model import save_model
from target_worker.scheduler.batching import Part
from target_worker.sweep.streamed_model import StreamedSweeper
from target_worker.verification.verdict import NO_NUMBER, LogitRows, RowReader, best_tokens, compute_verdict
from tests.fakes.gpu.device_sweeps import Where, on_the_device, three_sweeps
from tests.fakes.gpu.pretend import Notes, device, notes, pretending
from tests.fakes.model.families import FAMILIES
from tests.fakes.model.packed_files import packed_as
from tests.fakes.target import NO_GRAMMARS, verify_call

DENSE_LAUNCHES = 19  # of a layer of a Llama, in 16 bits, with its share of what is around layers
MIXTURE_LAUNCHES = 29  # of a layer of a Qwen3, the same
LOGITS_LAUNCHES = 8  # of a sweep, for each row's largest logit
MOST_SENDS = 9  # tokens, positions, paths, and which rows are wanted, before the first layer
SENDS_ELSEWHERE = 6  # paths, to another device


def counted(folder: Path, where: Where, rows: int, kv: torch.device) -> tuple[Notes, int]:
    """Of one sweep of 31 rows, after one that made what is made once; and the number of layers."""
    with pretending(), on_the_device(folder, where, torch.bfloat16, rows) as model:
        three_sweeps(model, kv, counting=True)
        return notes, len(model.tiers.layers)


@pytest.mark.parametrize("kv_on_host", [False, True])
@pytest.mark.parametrize("elsewhere", [(), (1,), (2, 3)])
def test_a_dense_sweep_waits_once_and_transfers_nothing_within_a_layer(
    kv_on_host: bool, elsewhere: tuple[int, ...], tiny: Path
) -> None:
    kv = torch.device("cpu") if kv_on_host else device()
    seen, _ = counted(tiny, Where(kv_on_host=kv_on_host, elsewhere=elsewhere), 64, kv)
    assert len(seen.stops) == 1, seen.stops
    assert seen.stops[0].startswith("_to_copy"), "the logits, at the end"
    assert not seen.inside
    assert len(seen.sends) <= MOST_SENDS + (SENDS_ELSEWHERE if elsewhere else 0), seen.sends


def test_a_packed_layer_needs_as_many_launches_as_a_plain_one(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", dtype=torch.bfloat16)
    plain, num_layers = counted(folder, Where(), 64, device())
    num_plain = sum(plain.launches.values())
    assert num_plain <= num_layers * DENSE_LAUNCHES + LOGITS_LAUNCHES, plain.launches
    packed, _ = counted(packed_as("compressed-tensors", folder, tmp_path / "packed"), Where(), 64, device())
    assert packed.launches["multiply"] >= 7 * num_layers
    assert not packed.launches["write"]
    assert sum(packed.launches.values()) == num_plain


@pytest.mark.slow
@pytest.mark.parametrize("method", ["compressed-tensors", "awq", "gptq", "gptq, unordered", "FP8, blocks"])
def test_a_packed_sweep_waits_once_and_transfers_nothing_within_a_layer(
    method: str, tiny: Path, tmp_path: Path
) -> None:
    seen, _ = counted(packed_as(method, tiny, tmp_path / "packed"), Where(), 64, device())
    assert len(seen.stops) == 1, seen.stops
    assert not seen.inside


@pytest.mark.parametrize("kv_on_host", [False, True])
def test_recurrent_layers_receive_their_steps_once_and_use_one_launch(kv_on_host: bool, tmp_path: Path) -> None:
    """Two trees, and the token that one session has accepted before: a launch each in each of three layers."""
    folder = save_model(tmp_path / "model", FAMILIES["qwen3.5, recurrent layers"])
    kv = torch.device("cpu") if kv_on_host else device()
    seen, _ = counted(folder, Where(kv_on_host=kv_on_host), 64, kv)
    assert len(seen.stops) == 1, seen.stops
    assert seen.launches["take_steps"] == 3 * 3
    assert len(seen.inside) == 3 * 3, "rows, their steps, what the convolution reads for each; in the first layer alone"


def test_experts_on_the_device_are_multiplied_together(tmp_path: Path) -> None:
    """Without waiting for routers, in 16 bits and in 4, of which none are written out."""
    folder = save_model(tmp_path / "model", FAMILIES["qwen3 moe"], dtype=torch.bfloat16)
    for bits in (16, 4):
        seen, num_layers = counted(
            folder if bits == 16 else pack(folder, bits, tmp_path / "packed"), Where(max_resident=9), 64, device()
        )
        assert len(seen.stops) == 1, seen.stops
        assert not seen.inside
        assert seen.launches["multiply_grouped"] == 3 * num_layers
        assert sum(seen.launches.values()) <= num_layers * MIXTURE_LAUNCHES + LOGITS_LAUNCHES, seen.launches


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "qwen2 moe, shared expert"])
@pytest.mark.parametrize("elsewhere", [(), (0,)])
@pytest.mark.parametrize("rows", [64, 16])
def test_experts_that_come_when_chosen_take_one_wait_for_the_routers_of_a_layer(
    family: str, elsewhere: tuple[int, ...], rows: int, tmp_path: Path
) -> None:
    """However many chunks of rows there are; nothing is sent there, and no other layer waits."""
    folder = save_model(tmp_path / "model", FAMILIES[family], dtype=torch.bfloat16)
    seen, num_layers = counted(folder, Where(expert_slabs=8, elsewhere=elsewhere), rows, device())
    without = {*elsewhere, *(getattr(FAMILIES[family], "mlp_only_layers", None) or ())}
    assert seen.inside == ["tolist"] * (num_layers - len(without)), "which rows chose each expert"
    assert len(seen.stops) == len(seen.inside) + 1, seen.stops


@pytest.mark.parametrize(
    ("where", "name"), [(Where(max_resident=9), "multiply_grouped"), (Where(expert_slabs=8), "gate")]
)
def test_experts_are_computed_once_for_all_chunks(where: Where, name: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", FAMILIES["mixtral"], dtype=torch.bfloat16)
    one, two = (counted(folder, where, rows, device())[0].launches for rows in (64, 16))
    assert one[name] == two[name] > 0


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
def test_a_verdict_does_not_depend_on_whether_all_logits_are_read(name: str) -> None:
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
def test_nans_are_refused_as_on_a_cpu(bad: float) -> None:
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


def test_a_greedy_sweep_transfers_one_number_per_node(tiny: Path) -> None:
    verdicts, seen = swept(tiny, GREEDY)
    assert len(verdicts) == 2
    assert len(seen.stops) == 1, seen.stops
    assert "(6,)" in seen.stops[0], "of six nodes"


def test_a_sampled_sweep_transfers_the_rows_on_the_path(tiny: Path) -> None:
    verdicts, seen = swept(tiny, SamplingParams(seed=1))
    num_walked = sum(1 + len(verdict.accepted_nodes) for verdict in verdicts)
    assert len(seen.stops) == 1 + num_walked, seen.stops


@pytest.mark.parametrize("elsewhere", [(), (1,)])
def test_distinct_experts_on_the_device_are_counted_as_where_the_host_knows_them(
    elsewhere: tuple[int, ...], tmp_path: Path
) -> None:
    """After the sweep, with the tokens: the host waits for nothing more."""
    folder = save_model(tmp_path / "model", FAMILIES["mixtral"], dtype=torch.bfloat16)
    tree = Tree.of([3, 8, 9, 8, 12], [-1, 0, 0, 1, 1], [0.0] * 5)
    counts = []
    for where in (Where(max_resident=9, elsewhere=elsewhere), Where(expert_slabs=8)):
        with pretending(), on_the_device(folder, where, torch.bfloat16) as model:
            shape = model.skeleton.kv_shape()
            kv = split_memory(shape, 50, device(), by_kv_place(model.skeleton.config, model.tiers.elsewhere))
            batch = Batch([Segment.tree(KVArena(shape, kv).take(50), 0, tree)], model.rows, model.device)
            for run in (model.sweep, model.run_layers):
                notes.clear()
                _, timings = run(batch)
                counts.append((timings.num_experts, timings.row_experts))
                assert where.expert_slabs or len(notes.stops) == 1, notes.stops
    assert len({*counts}) == 1
    assert counts[0][0] > counts[0][1] > 0
