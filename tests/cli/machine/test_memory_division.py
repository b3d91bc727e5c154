"""One machine's memory among the processes of `bough up`: never more than there is, and a user's settings stay."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from bough.cli.machine import memory_division as needs_of_drafts
from bough.cli.machine.memory_division import WORKER_BYTES, Division, DraftNeeds, divide, divide_gpu, draft_needs
from bough.cli.machine.up import divided
from bough.config.processes import DraftConfig, OrchestratorConfig, TargetConfig, parse
from bough.errors import CheckpointError, ConfigError
from bough.processes.launch import Settings
from bough.runtime.kv_budget import MOST_BYTES, context_within, kv_budget
from bough.trees.tree_plan import MAX_EXPANSIONS

GB = 1000**3
NEEDS = DraftNeeds(weights=300_000_000, session=90_000_000)


def target_of(*flags: str) -> TargetConfig:
    return parse(TargetConfig, "t", ["--model", "m", "--threads", "3", *flags], {})


def draft_of(*flags: str) -> DraftConfig:
    return parse(DraftConfig, "d", ["--model", "m", "--threads", "2", *flags], {})


def test_kv_memory_follows_from_the_model_and_the_available_memory() -> None:
    assert kv_budget(1_000_000, 16 * GB) == 32_000_000, "a small model takes little"
    assert kv_budget(GB, 100 * GB) == MOST_BYTES
    assert kv_budget(100_000_000, 2 * GB) == 250_000_000, "an eighth"
    assert kv_budget(590_000_000, GB) == 590_000_000, "one session, or none could be served"
    assert kv_budget(40 * GB, 24 * GB, 590_000_000) == 3 * GB, "of a session that cannot fit, what an eighth holds"
    assert kv_budget(40 * GB, 2 * GB, 590_000_000) == 590_000_000, "the least, whatever memory there is"
    assert kv_budget(3 * GB, 100 * GB, 590_000_000) == 3 * GB, "the longest session, where an eighth holds it"


def test_the_context_is_the_models_own_or_a_round_number_that_fits_the_memory() -> None:
    assert context_within(GB, 100_000, 0, 512, 8192) == 8192
    assert context_within(GB, 200_000, 0, 512, 8192) == 4352, "of 5000 rows 512 are a tree's, and 136 are left over"
    assert context_within(GB, 100_000, 50_000_000, 512, 8192) == 3840, "half is for states of other sessions"
    assert context_within(1000, 100_000, 0, 512, 8192) == 1, "refused later, by what a session takes"


@pytest.mark.parametrize("free", [int(2.4 * GB), 16 * GB, 512 * GB])
def test_shares_fit_the_memory_and_settings_follow_them(free: int) -> None:
    division = divide(free, target_of(), draft_of(), NEEDS, has_index=True)
    shares = {share.name: share for share in division.shares}
    assert set(shares) == {"index", "orchestrator", "draft worker", "target worker"}
    assert 0 < sum(share.num_bytes for share in division.shares) <= 0.92 * free
    assert 0 < division.target.device_memory < shares["target worker"].num_bytes
    assert division.draft is not None
    assert shares["draft worker"].num_bytes > NEEDS.weights + division.draft.kv_memory >= NEEDS.weights + NEEDS.session
    assert (shares["target worker"].num_threads, shares["draft worker"].num_threads) == (3, 2)
    assert len(division.lines()) == 6


def test_a_users_settings_are_kept() -> None:
    told = target_of("--device-memory", "9GB", "--kv-memory", "1GB")
    division = divide(4 * GB, told, draft_of("--kv-memory", "123MB"), NEEDS, has_index=False)
    assert division.target == told
    assert division.draft is not None
    assert division.draft.kv_memory == 123_000_000
    assert [share.name for share in division.shares] == ["orchestrator", "draft worker", "target worker"]


def test_without_a_draft_the_target_gets_its_share() -> None:
    def budget(division: Division) -> int:
        return division.target.device_memory

    alone = divide(4 * GB, target_of(), None, None, has_index=True)
    assert budget(alone) > budget(divide(4 * GB, target_of(), draft_of(), NEEDS, has_index=True)) + NEEDS.weights
    assert alone.draft is None


def test_stages_have_equal_shares_of_what_one_target_would_have() -> None:
    alone = divide(16 * GB, target_of(), draft_of(), NEEDS, has_index=True)
    division = divide(16 * GB, target_of("--stages", "3"), draft_of(), NEEDS, has_index=True)
    shares = {share.name: share for share in division.shares}
    assert [*shares][-3:] == ["target worker", "stage 1", "stage 2"]
    budget = division.target.device_memory
    assert {shares[name].num_bytes - budget for name in [*shares][-3:]} == {WORKER_BYTES}
    assert {shares[name].num_threads for name in [*shares][-3:]} == {3}
    taken = alone.target.device_memory - 3 * budget
    assert taken == pytest.approx(2 * WORKER_BYTES, abs=3), "of two processes more"
    assert 0 < sum(share.num_bytes for share in division.shares) <= 0.92 * 16 * GB
    with pytest.raises(ConfigError, match=r"^--device-memory: must be at least 0\.10 GB, got 0\.00 MB"):
        divide(2 * GB, target_of("--stages", "9"), None, None, has_index=False)


def test_a_step_of_recurrent_layers_is_counted_for_the_draft() -> None:
    shares = [
        divide(4 * GB, target_of(), draft_of(), needs, has_index=False).shares[1].num_bytes
        for needs in (NEEDS, NEEDS._replace(step=70_000_000))
    ]
    assert shares[1] - shares[0] == 70_000_000
    drafts = draft_of("--kv-memory", "1GB")
    reserves = [
        divide_gpu(target_of(), drafts, needs).target.device_reserve for needs in (NEEDS, NEEDS._replace(step=9))
    ]
    assert reserves[1] - reserves[0] == 9


def test_too_little_memory_is_refused_with_the_figures() -> None:
    with pytest.raises(ConfigError, match=r"^--device-memory: must be at least 0\.10 GB, got .*: of 1\.50 GB free, "):
        divide(int(1.5 * GB), target_of(), draft_of(), NEEDS, has_index=True)


def test_an_invalid_number_of_bits_is_refused_by_the_draft() -> None:
    """They were divided by."""
    groups = {"config_groups": {"a": {"weights": {"num_bits": 8}}, "b": {}}}
    assert [needs_of_drafts._least_bits(found, "") for found in ({"bits": 0}, {"bits": 0, **groups})] == [4, 8]


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ([], "config.json: must be an object, got []"),
        ({"text_config": 7}, "config.json.text_config: must be an object, got 7"),
        ({"quantization_config": ["awq"]}, "config.json.quantization_config: must be an object, got ['awq']"),
        (
            {"quantization_config": {"config_groups": [1]}},
            "config.json.quantization_config.config_groups: must be an object, got [1]",
        ),
        (
            {"quantization_config": {"config_groups": {"a": "b"}}},
            "config.json.quantization_config.config_groups.a: must be an object, got 'b'",
        ),
        (
            {"quantization_config": {"config_groups": {"a": {"weights": 4}}}},
            "config.json.quantization_config.config_groups.a.weights: must be an object, got 4",
        ),
    ],
)
def test_an_invalid_draft_configuration_is_refused(tmp_path: Path, config: object, problem: str) -> None:
    save_file({"w": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as refusal:
        draft_needs(draft_of("--model", str(tmp_path)))
    assert str(refusal.value) == f"{tmp_path}/{problem}"


def test_a_model_without_experts_needs_no_memory_for_them(tmp_path: Path) -> None:
    """It was divided by their number."""
    save_file({"model.layers.0.experts": np.zeros((0, 2, 2), np.uint8)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"bits": 4}}))
    assert draft_needs(draft_of("--model", str(tmp_path), "--bits", "4")).weights == 0


def test_a_drafts_memory_is_computed_from_headers(smollm: Path) -> None:
    needs = draft_needs(draft_of("--model", str(smollm), "--max-context", "1000"))
    stored = sum(file.stat().st_size for file in smollm.glob("*.safetensors"))
    assert 0.99 * stored < needs.weights <= stored
    assert needs.session == (1000 + MAX_EXPANSIONS) * 30 * 3 * 64 * 2 * 2
    doubled = draft_needs(draft_of("--model", str(smollm), "--max-context", "1000", "--dtype", "float32"))
    assert doubled == DraftNeeds(2 * needs.weights, 2 * needs.session, row=2 * needs.row)


def test_memory_is_divided_only_on_a_cpu(smollm: Path) -> None:
    said: list[str] = []
    orchestrator = parse(OrchestratorConfig, "o", [], {})
    flags = ["--model", str(smollm)]
    settings = Settings(target_of(*flags, "--device", "cpu"), draft_of(*flags, "--device", "cpu"), orchestrator)
    assert divided(settings, said.append).target.device_memory > 0
    assert "target worker" in said[0]
    settings = Settings(target_of(*flags, "--device", "cuda"), None, orchestrator)
    assert divided(settings, said.append) == settings
    simulated = Settings(parse(TargetConfig, "t", ["--simulate", "two-cores"], {}), None, orchestrator)
    assert divided(simulated, said.append) == simulated
    assert len(said) == 1


def test_more_memory_than_is_free_causes_a_warning() -> None:
    """A user may give the target more than there is, and is warned."""
    division = divide(8 * GB, target_of("--device-memory", "20GB"), draft_of(), NEEDS, has_index=True)
    assert division.target.device_memory == 20 * GB
    assert "more than is free by" in division.lines()[-1]
    assert "left free" in divide(8 * GB, target_of(), draft_of(), NEEDS, has_index=True).lines()[-1]
