"""`bough plan` for a GPU considers what runs there: formats, other GPUs, matrices unpacked for every chunk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bough.cli.flags.planning import PlanConfig
from bough.cli.planning.plan import as_json
from bough.cli.planning.plan_model import make_plan
from bough.config.processes import parse
from bough.errors import ConfigError
from bough.model.checkpoint.tensor_source import FreshMemory
from bough.model.quant.awq import Awq
from bough.model.quant.formats import SAMPLES
from bough.model.quant.scaled import Scaled
from bough.model.sizes.hardware_probe import unpack_speed
from bough.sizing.placement import Tier
from loadtest.common.packed_model import pack
from tests.fakes.model.headers import write_headers
from tests.model.sizes.test_memory_on_a_gpu import AWQ, llama_70b

CPU = torch.device("cpu")
GPU = ("--device", "gpu", "--device-memory", "24GB", "--host-memory", "64GB", "--host-link-speed", "25")
GPU += ("--compute-speed", "150", "--memory-speed", "1000", "--unpack-speed", "400")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a 70B in 4 bits its headers."""
    return write_headers(tmp_path / "70b", llama_70b(dtype="float16", quantization_config=AWQ), "awq 4 bits")


def planned(folder: Path, *flags: str) -> Any:
    return make_plan(parse(PlanConfig, "target_worker", ["--model", str(folder), *GPU, *flags], {}))


def test_a_second_chunk_of_rows_unpacks_matrices_again(folder: Path) -> None:
    sweep = planned(folder).sweep
    once = sweep.work.unpacked_bytes / 400e9
    assert sweep.work.bytes_unpacked_once(1) == 0
    for num_tokens, parts in ((1, [1]), (1024, [1024]), (1025, [1024, 1]), (3000, [1024, 1024, 952])):
        products = sum(max(sweep.work.flops(part, part) / 150e12, sweep.work.bytes_read(part) / 1e12) for part in parts)
        assert sweep.compute_seconds(num_tokens) == pytest.approx(len(parts) * once + products, rel=0.01)


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


def test_a_draft_that_stays_packed_is_unpacked_in_every_step(folder: Path) -> None:
    sixteen, four = (planned(folder, "--draft", str(folder), "--draft-bits", bits).draft for bits in ("16", "4"))
    assert four.step_seconds - sixteen.step_seconds == pytest.approx(80 * 855_638_016 * 2 / 400e9, rel=0.01)


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


def test_the_models_own_format_is_timed(folder: Path, tiny: Path, tmp_path: Path) -> None:
    assert isinstance(planned(folder).shapes.packed, Awq)
    found = planned(pack(tiny, 8, tmp_path / "packed")).shapes.packed
    assert isinstance(found, Scaled)
    assert found.bits == 8
