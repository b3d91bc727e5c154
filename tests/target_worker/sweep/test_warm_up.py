"""A start reads a few layers, compiles where the compiler's memory is given back, and leaves no trace."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import LlamaConfig

from bough.protocol.cost_curve import CostCurve
from bough.sizing.distinct_experts import Mixture
from bough.sizing.row_counts import RowCounts
from loadtest.common.inline_streams import InlineStreams
from loadtest.common.tiny_model import TINY, save_model
from target_worker.sweep import streamed_model
from target_worker.sweep.streamed_model import PassSeconds, compute_curve
from tests.fakes.model.families import FAMILIES
from tests.fakes.models import new_slot, plain_logits, streamed

TOKENS = [5, 6, 7, 8]
MOST = 100  # rows of a sweep
WAYS: dict[str, dict[str, Any]] = {
    "from disk": {},
    "resident": {"max_resident": 12},
    "resident on a device": {"max_resident": 12, "streams": InlineStreams()},
    "copied to a device": {"streams": InlineStreams(), "host_layers": 3},
    "with keys and values": {"streams": InlineStreams(), "host_layers": 12, "staged_rows": 400},
}


@pytest.fixture(scope="module")
def twelve_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(**{**TINY.to_dict(), "num_hidden_layers": 12})
    return save_model(tmp_path_factory.mktemp("models") / "twelve", config)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_output_after_a_warm_up_is_the_same(twelve_layers: Path, way: str) -> None:
    with streamed(twelve_layers, torch.bfloat16, **WAYS[way]) as model:
        wanted = plain_logits(model, TOKENS)
    with streamed(twelve_layers, torch.bfloat16, **WAYS[way]) as model:
        for _ in range(2):
            model.warm_up(new_slot(model), MOST)
            assert all(torch.equal(*pair) for pair in zip(plain_logits(model, TOKENS), wanted, strict=True))


class Known(NamedTuple):
    """What sweeps are said to take, in place of the class that learns on from there."""

    step: int
    most_rows: int
    compute: CostCurve | None = None
    link_bytes: int = 0
    link_seconds: float = 0.0
    mixture: Mixture | None = None


def test_a_start_measures_sweep_times(twelve_layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_model, "SweepTimes", Known)
    with streamed(twelve_layers, torch.bfloat16) as model:
        prior = model.warm_up(new_slot(model), MOST)
        assert isinstance(prior, Known)
        assert prior.compute is not None
        assert prior.most_rows == MOST
        prior.compute.validate("compute")
        assert prior.step == prior.compute.step == model.rows.step
        assert prior.link_bytes == sum(layer.num_bytes for layer in model.tiers.layers)
        assert prior.link_seconds > 0


def test_a_whole_sweep_is_estimated_from_a_layer_and_the_head() -> None:
    asked: list[int] = []

    def one_layer(num_tokens: int) -> PassSeconds:
        asked.append(num_tokens)
        return PassSeconds(layer=0.2 + 0.01 * num_tokens, rest=0.1 + 0.001 * num_tokens)

    curve = compute_curve(one_layer, RowCounts(256, 1), 1000, 10, lambda: 0.0)
    assert curve.rows == (1, 8, 16, 17, 32, 33, 64, 128, 256)
    assert [curve(1), curve(256)] == pytest.approx([2.201, 27.956])
    few = compute_curve(one_layer, RowCounts(256, 1), 100, 10, lambda: 0.0)
    assert few.rows[-1] == 100, "a slot has no room for more"
    assert compute_curve(one_layer, RowCounts(1024, 1), 1024, 10, lambda: 0.0).rows[-4:] == (128, 256, 512, 1024)
    now = itertools.count(0.0, 1.0)
    assert compute_curve(one_layer, RowCounts(256, 1), 1000, 10, lambda: next(now)).rows == (1, 256), "time is up"
    asked.clear()
    assert compute_curve(one_layer, RowCounts(128, 128), 1, 10).rows == (128,)
    assert {*asked} == {1}, "a slot of one row has no room for what pads it"
    compute_curve(lambda tokens: PassSeconds(1 / tokens, 0.0), RowCounts(256, 1), 1000, 10).validate("compute")


def test_experts_read_for_the_warm_up_are_the_same_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_model, "SweepTimes", Known)
    folder = save_model(tmp_path / "model", FAMILIES["qwen3 moe"])
    with streamed(folder, torch.bfloat16) as model:
        wanted = plain_logits(model, TOKENS)
    with streamed(folder, torch.bfloat16, expert_slabs=8) as model:
        prior = model.warm_up(new_slot(model), MOST)
        assert isinstance(prior, Known)
        assert (prior.step, prior.most_rows, prior.compute) == (1, MOST, None), (
            "rows cost what they choose, not what pads them"
        )
        assert prior.mixture is not None
        assert prior.mixture[:2] == (6, 3)
        assert prior.mixture.fixed_bytes + prior.mixture.expert_bytes == model.tiers.placement.link_bytes
        assert all(torch.equal(*pair) for pair in zip(plain_logits(model, TOKENS), wanted, strict=True))


def test_the_time_of_a_mixture_in_memory_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal tokens would choose the same experts, so that many rows would seem to cost as much as one."""
    monkeypatch.setattr(streamed_model, "SweepTimes", Known)
    folder = save_model(tmp_path / "model", FAMILIES["qwen3 moe"])
    with streamed(folder, torch.bfloat16, max_resident=4) as model:
        assert model.warm_up(new_slot(model), MOST) == Known(1, MOST, mixture=Mixture(6, 3))
    with streamed(folder, torch.bfloat16) as model:
        prior = model.warm_up(new_slot(model), MOST)
        assert isinstance(prior, Known)
        num_bytes = model.tiers.placement.link_bytes
        assert (prior.compute, prior.link_bytes, prior.mixture) == (None, num_bytes, Mixture(6, 3, num_bytes))
        assert prior.link_seconds > 0


def test_the_warm_up_does_not_read_the_model(twelve_layers: Path) -> None:
    """Two layers, the first one again, and what the ring reads ahead of them: not counted as the next sweep's."""
    with streamed(twelve_layers, torch.bfloat16) as model:
        sizes = sum(layer.num_bytes for layer in model.tiers.layers)
        model.warm_up(new_slot(model), MOST)
        assert model.tiers.figures().link_bytes <= 0.8 * sizes
