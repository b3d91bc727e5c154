"""`bough plan` for a GPU considers what runs there: tiles of rows, packed weights, other GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bough.cli.flags.planning import PlanConfig
from bough.cli.planning.plan import as_json, print_report
from bough.cli.planning.plan_model import make_plan
from bough.config.processes import parse
from bough.errors import ConfigError
from bough.model.checkpoint.tensor_source import FreshMemory
from bough.model.quant.formats import SAMPLES
from bough.model.quant.scaled import Scaled
from bough.model.sizes.hardware_probe import unpack_speed
from bough.model.sizes.model_sizes import find_model, model_shapes
from bough.sizing.cost_model import tiled
from bough.sizing.placement import Tier
from loadtest.common.packed_model import pack
from tests.fakes.model.headers import write_headers
from tests.model.sizes.test_memory_on_a_gpu import AWQ, llama_70b

CPU = torch.device("cpu")
GPU = ("--device", "gpu", "--device-memory", "24GB", "--host-memory", "64GB", "--host-link-speed", "25")
GPU += ("--compute-speed", "165", "--memory-speed", "1008", "--unpack-speed", "400")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a 70B in 4 bits its headers."""
    return write_headers(tmp_path / "70b", llama_70b(dtype="float16", quantization_config=AWQ), "awq 4 bits")


def planned(folder: Path, *flags: str) -> Any:
    return make_plan(parse(PlanConfig, "target_worker", ["--model", str(folder), *GPU, *flags], {}))


def test_packed_weights_are_read_once_and_rows_padded_to_tiles(folder: Path) -> None:
    """A quarter of a second was added to each 256 rows by writing them out, and 8 rows cost as much as 256."""
    plan = planned(folder)
    weights = sum(plan.shapes.layer_bytes) + 2 * 8192 * 128256
    assert (plan.sweep.work.unpacked_bytes, plan.shapes.packed) == (0, None)
    assert plan.sweep.work.weight_bytes == pytest.approx(weights, rel=0.001)
    assert tiled(1) == tiled(16) == 16
    for num_tokens in (1, 8, 16):
        assert plan.sweep.compute_seconds(num_tokens) == pytest.approx(weights / 504e9 + 80 * 0.25e-3, rel=0.001)
    for num_tokens, num_rows in ((17, 32), (128, 128), (129, 256), (256, 256), (1000, 1024)):
        assert tiled(num_tokens) == num_rows
        seconds = max(139.0e9 * num_rows / 90.75e12, weights / 504e9) + 0.02
        assert plan.sweep.compute_seconds(num_tokens) == pytest.approx(seconds, rel=0.001)


def test_4_bits_without_headers_are_placed_and_predicted_as_awq(folder: Path, tmp_path: Path) -> None:
    """Without zero points they kept a layer more on the card."""
    llama_70b(dtype="float16").save_pretrained(tmp_path / "alone")
    stored, imagined = planned(folder), planned(tmp_path / "alone", "--bits", "4")
    assert imagined.shapes.layer_bytes == stored.shapes.layer_bytes
    assert imagined.placement == stored.placement
    assert imagined.sweep == stored.sweep


def test_a_prompt_of_8_thousand_tokens_takes_two_sweeps_of_16_bits(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a sweep has as many tokens as are computed while the link brings the layers."""
    llama_70b(dtype="float16").save_pretrained(tmp_path / "plain")
    plain = make_plan(parse(PlanConfig, "target_worker", ["--model", str(tmp_path / "plain"), *GPU], {}))
    assert plain.sweep.knee > 4096
    assert (plain.max_sweep_tokens, as_json(plain)["max_sweep_tokens"]) == (4096, 4096)
    print_report(plain)
    assert "a sweep has up to 4096 tokens" in capsys.readouterr().out
    packed = planned(folder)
    assert packed.sweep.knee < 1024 == packed.max_sweep_tokens
    assert planned(folder, "--max-sweep-tokens", "2000").max_sweep_tokens == 2000


def test_layers_on_another_gpu_do_not_cross_the_link(folder: Path) -> None:
    alone, both = planned(folder), planned(folder, "--resident-devices", "cuda:1=10GB")
    count = len(both.placement.layers(Tier.ELSEWHERE))
    assert 15 <= count <= 21, "of 0.45 GB each, beside what computes them"
    assert both.sweep.link_seconds < alone.sweep.link_seconds - 0.7 * count * max(both.shapes.layer_bytes) / 25e9
    assert as_json(both)["tiers"].count("elsewhere") == count


def test_transfers_of_hidden_states_are_included(folder: Path) -> None:
    """Through the host's memory by default: half as fast as the link."""
    alone = planned(folder)
    both, told = (
        planned(folder, "--resident-devices", "cuda:1=10GB", *flags) for flags in ((), ("--crossing-speed", "50"))
    )
    count = both.placement.num_crossings
    assert 2 <= count < 2 * len(both.placement.layers(Tier.ELSEWHERE)), "in runs"
    for plan, speed in ((both, 12.5e9), (told, 50e9)):
        for tokens in (1, 257):
            wanted = count * (30e-6 + tokens * 8192 * 2 / speed)
            assert plan.sweep.crossing_seconds(tokens) == pytest.approx(wanted)
            beside = plan.sweep.compute_seconds(tokens) - alone.sweep.compute_seconds(tokens)
            assert beside == pytest.approx(wanted)
    assert as_json(both)["speeds"]["crossing"]["origin"].startswith("assumed: copies through the host's memory")
    assert as_json(told)["speeds"]["crossing"]["origin"] == "set by --crossing-speed"
    assert (alone.sweep.crossing_seconds(256), alone.speeds.crossing) == (0.0, None)


def test_a_draft_that_stays_packed_reads_a_quarter(folder: Path) -> None:
    sixteen, four = (planned(folder, "--draft", str(folder), "--draft-bits", bits).draft for bits in ("16", "4"))
    saved = 80 * 855_638_016 * (2 - 0.5 - 0.02)
    assert sixteen.weight_bytes - four.weight_bytes == pytest.approx(saved, rel=0.01)
    assert sixteen.step_seconds - four.step_seconds == pytest.approx(saved / 504e9, rel=0.01)


def test_a_draft_that_cannot_stay_packed_is_refused(tmp_path: Path, folder: Path) -> None:
    llama_70b(dtype="float16").save_pretrained(tmp_path / "plain")
    with pytest.raises(ConfigError, match=r"^--draft-bits: must be auto or 16, got 4: .*plain is not packed$"):
        planned(folder, "--draft", str(tmp_path / "plain"), "--draft-bits", "4")


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_every_sample_matrix_can_be_timed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = SAMPLES[name](64, 256)
    assert sample.shape == (64, 256)
    raw = sample.random(np.random.default_rng(0))
    assert [len(part) for part in raw] == [place.num_bytes for place in sample.places]
    assert sample.value(raw, torch.float32, FreshMemory(CPU)).isfinite().all()
    monkeypatch.setattr("bough.model.sizes.hardware_probe.PROBE_SECONDS", 0.001)
    speed = unpack_speed(sample, torch.bfloat16, CPU)
    assert speed.per_second > 0
    assert speed.origin == "measured: 64 x 256 written out, bytes written"


def test_only_a_cpu_unpacks_a_models_format(tiny: Path, tmp_path: Path) -> None:
    """So only there it is timed."""
    found = find_model(str(pack(tiny, 8, tmp_path / "packed")))
    on_cpu, on_gpu = (model_shapes(found, "bfloat16", 0, 64, where) for where in ("cpu", "cuda"))
    assert isinstance(on_cpu.packed, Scaled)
    assert on_cpu.packed.bits == 8
    assert (on_gpu.packed, on_gpu.work.unpacked_bytes) == (None, 0)
    assert on_gpu.work.weight_bytes < on_cpu.work.weight_bytes
