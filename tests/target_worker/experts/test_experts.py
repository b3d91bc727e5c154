"""Experts that are read when rows choose them: the same bits as with whole layers, and fewer bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

from bough.config.processes import TargetConfig, parse
from bough.errors import ConfigError, StreamError
from bough.model.batch.batch import Batch, Segment
from bough.protocol.ids import ScopedId
from bough.protocol.messages import Context, VerifyCall
from bough.protocol.sampling_params import SamplingParams
from bough.sizing.placement import Budgets, ExpertSizes, Fixed, SeparateExperts, Tier, place_with_expert_cache
from bough.trees.tree import Tree
from loadtest.common.inline_streams import InlineStreams
from loadtest.common.packed_model import pack
from loadtest.common.tiny_model import save_model
from target_worker.experts.expert_cache import Expert
from target_worker.experts.expert_loaders import ExpertReads
from target_worker.experts.expert_store import ExpertStore
from target_worker.link import direct_io
from target_worker.link.layer_extents import LayerExperts, sizes_of
from target_worker.sweep.streamed_model import StreamedModel
from target_worker.worker import TargetWorker
from tests.cli.planning.test_plan import run
from tests.fakes.model.families import FAMILIES, of_two_layers, random_tree
from tests.fakes.models import CPU, new_slot, plain_logits, plan_of, streamed
from tests.fakes.tiers import long_but

NUM_EXPERTS = {"mixtral": 4, "qwen2 moe, shared expert": 6, "qwen3 moe": 6, "gpt-oss, sinks, alternating windows": 4}
SIZES = (1, 2, 40, 1, 7)  # nodes of trees in sweeps after one another, one of which has several chunks of rows


@pytest.fixture(params=NUM_EXPERTS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def logits_of(model: StreamedModel, *sizes: int) -> list[torch.Tensor]:
    """Of trees of these sizes after one context, one sweep each."""
    slot, rng = new_slot(model), np.random.default_rng(3)
    model.sweep(Batch([Segment.context(slot, 0, list(range(30, 50)))], model.rows, CPU))
    trees = [random_tree(rng, size, root=9) for size in sizes]
    return [model.sweep(Batch([Segment.tree(slot, 20, tree)], model.rows, CPU))[0].clone() for tree in trees]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", long_but([torch.bfloat16], [torch.bfloat16, torch.float32]), ids=str)
def test_bits_equal_those_of_whole_layers(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """With as little room as may be, with some more and with room for all; sweeps of several chunks too."""
    folder = save_model(tmp_path / "model", of_two_layers(family))
    with streamed(folder, dtype) as model:
        wanted = logits_of(model, *SIZES)
    for num_slabs in (NUM_EXPERTS[family], NUM_EXPERTS[family] + 3, 40):
        with streamed(folder, dtype, expert_slabs=num_slabs) as model:
            for mine, right in zip(logits_of(model, *SIZES), wanted, strict=True):
                assert torch.equal(mine, right)


@pytest.mark.parametrize(("bits", "where"), [(8, {}), (4, {"streams": InlineStreams(), "host_layers": 3})])
def test_packed_experts_have_the_bits_of_whole_layers(
    bits: int, where: dict[str, Any], mixture: Path, tmp_path: Path
) -> None:
    """Read from disk when rows choose them, or copied from the host's memory."""
    folder = pack(mixture, bits, tmp_path / "packed")
    with streamed(folder, torch.bfloat16) as model:
        wanted = logits_of(model, 1, 20)
    with streamed(folder, torch.bfloat16, expert_slabs=8, **where) as model:
        for mine, right in zip(logits_of(model, 1, 20), wanted, strict=True):
            assert torch.equal(mine, right)


def test_a_token_reads_its_chosen_experts_and_padding_chooses_none(mixture: Path) -> None:
    """Rows are padded to 16, whose experts would be read as well."""
    config = FAMILIES["qwen3 moe"]
    with streamed(mixture, torch.bfloat16, max_resident=config.num_hidden_layers, expert_slabs=6) as model:
        slot, before = new_slot(model), model.tiers.figures().link_bytes
        model.sweep(Batch([Segment.tree(slot, 0, Tree.root(5))], model.rows, CPU))
        expert_bytes = max(e.num_bytes for layer in plan_of(mixture).values() for e in layer.each)
        read = model.tiers.figures().link_bytes - before
        assert 0 < read <= config.num_hidden_layers * config.num_experts_per_tok * expert_bytes


@pytest.mark.parametrize("num_slabs", [0, 8], ids=["whole layers", "on demand"])
@pytest.mark.parametrize("num_rows", [1, 16, 48])
def test_sweeps_count_the_distinct_experts_of_their_rows(num_slabs: int, num_rows: int, mixture: Path) -> None:
    """As the routers chose them, in one chunk of rows or in several; numbers of rows that are not padded."""
    config, chosen = FAMILIES["qwen3 moe"], dict[int, set[int]]()
    with streamed(mixture, torch.bfloat16, expert_slabs=num_slabs) as model:
        for index, layer in enumerate(model.skeleton.layers):
            own = chosen[index] = set()
            layer.mlp.gate.register_forward_hook(lambda *call, own=own: own.update(call[-1][-1].flatten().tolist()))
        tree = random_tree(np.random.default_rng(3), num_rows, root=9)
        _, timings = model.sweep(Batch([Segment.tree(new_slot(model), 0, tree)], model.rows, CPU))
        assert timings.row_experts == config.num_hidden_layers * config.num_experts_per_tok
        assert timings.num_experts == (sum(map(len, chosen.values())) if num_rows > 1 else timings.row_experts)
        assert timings.expert_ratio > 1.0 or num_rows == 1


def test_dense_models_count_no_experts(tmp_path: Path) -> None:
    with streamed(save_model(tmp_path / "model", FAMILIES["llama"]), torch.bfloat16) as model:
        _, timings = model.sweep(Batch([Segment.tree(new_slot(model), 0, Tree.root(5))], model.rows, CPU))
        assert (timings.num_experts, timings.expert_ratio) == (0, 0.0)


class Rounds:
    """Sweeps of a store without a model: the test says which experts each layer wants."""

    def __init__(self, store: ExpertStore, num_layers: int) -> None:
        self._store, self._num_layers = store, num_layers

    def sweep(self, experts: Sequence[int]) -> int:
        """How many experts were read; bytes are compared with the checkpoint's."""
        before = self._num_bytes()
        for layer in range(self._num_layers):
            self._store.begin(layer)
            self._store.expect(layer, experts)
            for expert in experts:
                weights = self._store._layers[layer].each[expert]
                for slot in range(len(weights.slots)):
                    places = weights.slots[slot].source.places
                    for place, data in zip(places, self._store.bytes_of(Expert(layer, expert), slot), strict=True):
                        assert data.numpy().tobytes() == read(place.file, place.offset, place.num_bytes)
        return (self._num_bytes() - before) // self._store._layers[0].each[0].num_bytes

    def _num_bytes(self) -> int:
        assert isinstance(self._store.loader, ExpertReads)
        return self._store.loader._traffic.figures(0).link_bytes


def read(file: Path, offset: int, num_bytes: int) -> bytes:
    with file.open("rb") as stream:
        stream.seek(offset)
        return stream.read(num_bytes)


def store_of(layers: dict[int, LayerExperts], num_slabs: int) -> ExpertStore:
    return ExpertStore(layers, num_slabs, ExpertReads(layers, sizes_of(layers.values()).slab_bytes, num_slabs, 3))


def test_experts_that_every_sweep_uses_stay(layers: dict[int, LayerExperts]) -> None:
    """Room for 12 of 24: four layers want two that never change, and one of the other four by turns."""
    with store_of(layers, 12) as store:
        rounds = Rounds(store, 4)
        counts = [rounds.sweep([0, 1, 2 + number % 4]) for number in range(24)]
        assert counts[0] == 12
        assert max(counts[12:]) <= 4


def test_a_round_larger_than_the_cache_keeps_a_part(layers: dict[int, LayerExperts]) -> None:
    """All 24, with room for 16: were what was used longest ago to leave, nothing would be there when it is wanted."""
    with store_of(layers, 16) as store:
        rounds = Rounds(store, 4)
        counts = [rounds.sweep(range(6)) for _ in range(12)]
        assert counts[0] == 24
        assert sum(counts[6:]) / 6 < 20


def test_likely_experts_are_read_before_they_are_needed(layers: dict[int, LayerExperts]) -> None:
    """Also round the end of a sweep."""
    with store_of(layers, 12) as store:
        rounds = Rounds(store, 4)
        for _ in range(8):
            rounds.sweep(range(6))
        assert (store._cache._layer_at[store._cache._is_ahead] == 0).any()


def test_a_prefetched_expert_only_evicts_less_likely_ones(layers: dict[int, LayerExperts]) -> None:
    """Room for two experts of each layer, which are there; a third one is wanted in 6 sweeps of 10, then in 9."""
    with store_of(layers, 8) as store:
        rounds = Rounds(store, 4)
        for _ in range(12):
            rounds.sweep([0, 1])
        store._cache._usage[1, 2] = 0.6
        store.begin(0)
        assert not store._cache._is_ahead.any()
        store._cache._usage[1, 2], store._cache._usage[3, 0] = 0.9, 0.1
        store.begin(0)
        assert (store._cache._slab_of[1, 2] >= 0, store._cache._slab_of[3, 0] >= 0) == (True, False)


def test_needed_experts_are_read_before_prefetched_ones(layers: dict[int, LayerExperts]) -> None:
    """A layer never begins with a guessed expert, which might never come."""
    with store_of(layers, 12) as store:
        rounds, gate = Rounds(store, 4), Event()
        for _ in range(8):
            rounds.sweep(range(6))
        assert isinstance(store.loader, ExpertReads)
        stuck = [store.loader._prefetching.submit(gate.wait) for _ in range(3)]
        try:
            rounds.sweep(range(6))
            assert store._cache._is_ahead.any()
            rounds.sweep([0, 3])
            rounds.sweep(range(6))
        finally:
            gate.set()
        assert all(read.result() for read in stuck)


def test_present_experts_are_computed_before_missing_ones(layers: dict[int, LayerExperts]) -> None:
    with store_of(layers, 12) as store:
        rounds, gate = Rounds(store, 4), Event()
        rounds.sweep([1, 4])
        assert isinstance(store.loader, ExpertReads)
        stuck = [store.loader._threads.submit(gate.wait) for _ in range(3)]
        store.begin(0)
        assert store.expect(0, [0, 1, 4, 5]) == [1, 4, 0, 5]
        gate.set()
        assert all(read.result() for read in stuck)


@pytest.mark.parametrize("num_slabs", [6, 9])
def test_the_cache_knows_where_experts_are_in_any_order_of_use(num_slabs: int, layers: dict[int, LayerExperts]) -> None:
    rng = np.random.default_rng(0)
    with store_of(layers, num_slabs) as store:
        rounds = Rounds(store, 4)
        for _ in range(40):
            rounds.sweep(rng.choice(6, size=rng.integers(1, 7), replace=False).tolist())
            held = [
                (layer, expert) for layer, expert in zip(store._cache._layer_at, store._cache._number_at, strict=True)
            ]
            for slab, (layer, expert) in enumerate(held):
                assert layer < 0 or store._cache._slab_of[layer, expert] == slab


def test_a_damaged_file_is_named_and_ends_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[Exception] = []
    monkeypatch.setattr(direct_io, "exit_soon", ends.append)
    folder = save_model(tmp_path / "model", FAMILIES["qwen3 moe"])
    with streamed(folder, torch.float32, expert_slabs=6) as model:
        plain_logits(model, [5, 6, 7])
        file = plan_of(folder)[2].each[3].extents[0].file
        whole = file.read_bytes()
        os.truncate(file, 4096)
        with pytest.raises(StreamError, match=rf"{file}: layer \d(, expert \d)?, tensor (model\.layers\.\d\.|padding)"):
            logits_of(model, 60)
        file.write_bytes(whole)
        with pytest.raises(StreamError, match="was written to while"):
            logits_of(model, 60)
    assert "was written to while" in str(ends[0])


MIXTURE = [850] * 10, SeparateExperts([50] * 10, ExpertSizes(slab_bytes=100, most=8, num_experts=80, num_bytes=8000))


def test_remaining_memory_is_used_for_experts() -> None:
    fixed = Fixed(1000, 0, 0, 0)
    placement = place_with_expert_cache(*MIXTURE, fixed, Budgets(3000, 0, 500, 10))
    assert placement.layers(Tier.RESIDENT) == tuple(range(10))
    assert placement.fixed.experts == 1500
    assert placement.device_bytes == 3000
    assert placement.link_bytes == 6500
    assert place_with_expert_cache(*MIXTURE, fixed, Budgets(9500, 0, 500, 10)).fixed.experts == 0  # everything stays
    told = place_with_expert_cache(*MIXTURE, fixed, Budgets(3000, 0, 500, 0))
    assert (told.layers(Tier.RESIDENT), told.fixed.experts) == ((), 800)
    two = place_with_expert_cache(*MIXTURE, fixed, Budgets(4000, 0, 500, 2))
    assert (len(two.layers(Tier.RESIDENT)), two.fixed.experts) == (2, 1600)


def test_too_little_memory_for_a_layers_experts_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"--device-memory: must be at least .*experts"):
        place_with_expert_cache(*MIXTURE, Fixed(1000, 0, 0, 0), Budgets(1850, 0, 500, 10))


@pytest.mark.slow
def test_a_target_with_little_memory_gives_the_same_output(tmp_path: Path) -> None:
    """Also where even layers without experts stream."""
    folder, answers = save_model(tmp_path / "model", FAMILIES["mixtral"]), []
    for flags in ("--experts all --resident-layers 0", "--resident-layers 0", "--device-memory 2.9MB"):
        with closing(start(folder, flags)) as worker:
            is_apart = any("experts are loaded when rows choose them" in note for note in worker.info().notes)
            assert is_apart == ("--experts all" not in flags)
            answers.append([answer(worker, tokens) for tokens in ([5], [7, 8, 9], list(range(40)))])
    assert answers[0] == answers[1] == answers[2]


def start(folder: Path, flags: str) -> TargetWorker:
    flags += f" --model {folder} --kv-memory 1MB --max-context 128 --max-nodes 16 --max-sweep-tokens 64 --device cpu"
    return TargetWorker(parse(TargetConfig, "test", flags.split(), {}), "test")


def answer(worker: TargetWorker, tokens: list[int]) -> int:
    call = VerifyCall(
        Context.of(ScopedId("s"), tokens, 0, len(tokens)), 0, 0, Tree.root(tokens[-1]), SamplingParams(0.0)
    )
    bonus_token = worker.verify(call).result().verdict.bonus_token
    worker.release(ScopedId("s")).result()
    return bonus_token


@pytest.mark.slow
def test_a_plan_includes_the_experts_that_rows_choose(
    mixture: Path, layers: dict[int, LayerExperts], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--resident-layers 0 --kv-memory 1MB --max-context 128 --max-nodes 64 --link-speed 1 --compute-speed 1"
    plans = {
        experts: run(capsys, str(mixture), "--experts", experts, "--device", "cpu", *flags.split())
        for experts in ("auto", "all")
    }
    seconds = {name: {s["tokens"]: s["link_seconds"] for s in plan["sweeps"]} for name, plan in plans.items()}
    sizes = sizes_of(layers.values())
    missing = sum(e.num_bytes for layer in layers.values() for e in layer.each) - sizes.most * sizes.slab_bytes
    assert seconds["auto"][1] < 0.8 * seconds["all"][1]
    assert seconds["auto"][64] < seconds["all"][64]
    assert plans["auto"]["fixed_bytes"]["experts"] > 0
    chosen = seconds["auto"][64] - seconds["auto"][1]
    assert chosen == pytest.approx(missing / 1e9 * 0.5, rel=0.3)  # a token chooses half of the experts, 64 nearly all
