"""Profiles of simulated workers: seconds as described, shipped ones readable, bad ones refused by name."""

from __future__ import annotations

import json
import random
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from bough.errors import ConfigError
from bough.simulation.acceptance_model import PUBLISHED, VECTORS
from bough.simulation.profile import (
    DraftProfile,
    Event,
    Experts,
    Factors,
    Failure,
    NetworkProfile,
    Profile,
    TargetProfile,
    jittered,
    load_profile,
    parse_profile,
    shipped_profiles,
)

GOOD: dict[str, Any] = {
    "source": "made up",
    "target": {"link_seconds": 1.0, "compute_base_seconds": 0.1, "compute_row_seconds": 0.01, "row_step": 8},
    "draft": {"base_seconds": 0.01, "row_seconds": 0.001},
    "acceptance": {"kind": "by_rank", "vector": [0.7, 0.1]},
}


def changed(path: str, value: object) -> str:
    """GOOD as JSON, with the field at a dotted path set."""
    profile = json.loads(json.dumps(GOOD))
    *folders, last = path.split(".")
    at = profile
    for folder in folders:
        at = at.setdefault(folder, {})
    at[last] = value
    return json.dumps(profile)


@pytest.mark.parametrize("name", shipped_profiles())
def test_every_shipped_profile_states_its_source(name: str) -> None:
    profile = load_profile(name)
    assert profile.source.startswith(("Measured", "Calculated", "From"))
    assert profile.target.sweep_seconds(1) <= profile.target.sweep_seconds(64) <= profile.target.sweep_seconds(512)


def test_all_documented_profiles_exist() -> None:
    wanted = "two-cores two-cores-resident rtx4090-70b-4bit rtx4090-70b-16bit l40-70b-16bit l40-70b-4bit"
    wanted += " a100-70b-16bit slow-disk all-resident mixture-of-experts"
    assert set(wanted.split()) <= set(shipped_profiles())


def test_a_sweep_takes_the_longer_of_link_and_padded_compute() -> None:
    target = parse_profile(changed("target.overhead_seconds", 0.5)).target
    assert target.sweep_seconds(1) == pytest.approx(1.0 + 0.5)
    assert target.sweep_seconds(88) == pytest.approx(1.0 + 0.5)  # 0.1 + 88 x 0.01 = 0.98
    assert target.sweep_seconds(89) == pytest.approx(0.1 + 96 * 0.01 + 0.5)  # padded to 96
    assert target.sweep_seconds(1, Factors(link=3.0)) == pytest.approx(3.5)


def test_a_curve_is_followed_and_extrapolated() -> None:
    content = json.loads(json.dumps(GOOD))
    content["target"] = {"compute_curve": [[1, 0.2], [8, 0.9], [16, 1.3]]}
    target = parse_profile(json.dumps(content)).target
    assert [round(target.sweep_seconds(rows), 6) for rows in (1, 4, 8, 12, 16, 24)] == [0.2, 0.5, 0.9, 1.1, 1.3, 1.7]


def test_experts_are_read_if_rows_choose_them() -> None:
    experts = {"miss_seconds": 8.0, "num_experts": 4, "experts_per_token": 1}
    target = parse_profile(changed("target.experts", experts)).target
    assert target.sweep_seconds(1) == pytest.approx(1 + 2.0)
    assert target.sweep_seconds(2) == pytest.approx(1 + 3.5)


def test_rows_that_share_experts_read_fewer() -> None:
    experts = {"miss_seconds": 8.0, "num_experts": 4, "experts_per_token": 1}
    alone = parse_profile(changed("target.experts", experts)).target
    shared = parse_profile(changed("target.experts", experts | {"overlap": 0.5})).target
    assert shared.link_seconds_of(1) == alone.link_seconds_of(1)
    assert (alone.expert_ratio(2), shared.expert_ratio(2)) == (pytest.approx(1.75), pytest.approx(1.375))
    assert shared.link_seconds_of(2) == pytest.approx(1 + 2 * 1.375)
    assert shared.link_seconds_of(100) < alone.link_seconds_of(100)
    assert alone.known_times(1.0).expert_ratio(2) == shared.known_times(1.0).expert_ratio(2) == pytest.approx(1.75), (
        "targets have to learn it"
    )
    assert parse_profile(json.dumps(GOOD)).target.expert_ratio(5) == 0.0


def test_a_step_serves_all_rows_and_a_call_crosses_the_network_twice() -> None:
    profile = parse_profile(changed("network", {"one_way_seconds": 0.025}))
    assert profile.draft.step_seconds(20) == pytest.approx(0.03)
    assert profile.draft.step_seconds(20, Factors(draft=2)) == pytest.approx(0.06)
    assert profile.network.call_seconds() == pytest.approx(0.05)


def test_events_multiply_times_and_failures_end() -> None:
    content = json.loads(changed("events", [{"at_second": 5, "link": 2}, {"at_second": 8, "link": 3, "draft": 4}]))
    content["failures"] = [
        {"worker": "target", "at_second": 10, "for_seconds": 2},
        {"worker": "draft", "kind": "hang", "probability": 0.25},
    ]
    profile = parse_profile(json.dumps(content))
    assert profile.factors_at(4.9) == Factors()
    assert profile.factors_at(5).link == 2
    assert profile.factors_at(9) == Factors(link=6, draft=4)
    assert profile.failure_at("target", 9.9, 0.0) is None
    assert profile.failure_at("target", 11, 0.99) is not None
    assert profile.failure_at("target", 12, 0.0) is None
    hang = profile.failure_at("draft", 1e6, 0.24)
    assert hang is not None
    assert hang.kind == "hang"
    assert profile.failure_at("draft", 1e6, 0.25) is None


def test_jitter_keeps_the_mean_and_is_repeatable() -> None:
    values = [jittered(2.0, 0.3, random.Random(seed)) for seed in range(4000)]
    assert values[5] == jittered(2.0, 0.3, random.Random(5))
    # The mean's standard error is 2 x 0.3 / sqrt(4000) = 0.0095; five of them: one in 1.7 million seeds would fail.
    assert abs(sum(values) / len(values) - 2.0) < 0.048
    assert jittered(2.0, 0.0, random.Random(1)) == 2.0


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("target.link_seconds", -1, "target.link_seconds: must be greater than or equal to 0, got -1"),
        ("target.link_seconds", float("nan"), "target.link_seconds: must be a finite number, got nan"),
        ("target.link_seconds", float("inf"), "target.link_seconds: must be a finite number, got inf"),
        ("target.link_seconds", "1", "target.link_seconds: must be a valid number, got '1'"),
        ("target.link_seconds", True, "target.link_seconds: must be a valid number, got True"),
        ("target.row_step", 1.5, "target.row_step: must be a valid integer, got 1.5"),
        ("target.row_stpe", 8, "target.row_stpe: no such field; must be left out"),
        ("targt", {}, "targt: no such field; must be left out"),
        (
            "target.compute_row_seconds",
            -0.01,
            "target.compute_row_seconds: must be greater than or equal to 0, got -0.01",
        ),
        ("target.compute_curve", [[1, 1], [2, 2]], "target.compute_curve: must be empty if"),
        (
            "target.compute_curve",
            [[1, 1], [2, 0.5]],
            "target.compute_curve: must have rows that ascend",
        ),
        (
            "target.compute_curve",
            [[2, 1], [2, 2]],
            "must have rows that ascend and seconds that do not decrease: 2, 2 follow 2, 1, got [[2, 1], [2, 2]]",
        ),
        (
            "target.compute_curve",
            [[1, 1]],
            "target.compute_curve: must be empty, or have two points or more, got [[1, 1]]",
        ),
        ("target.compute_curve", [1, 2], "target.compute_curve[0]: must be a valid array"),
        ("target.experts", {"miss_seconds": 1}, "target.experts.num_experts: missing; must be given"),
        (
            "target.experts",
            {"miss_seconds": 1, "num_experts": 4, "experts_per_token": 5},
            "target.experts.experts_per_token: must be at most num_experts, 4, got 5",
        ),
        (
            "target.experts",
            {"miss_seconds": 1, "num_experts": 4, "experts_per_token": 1, "overlap": 1},
            "target.experts.overlap: must be less than 1, got 1",
        ),
        ("target.jitter", 3, "target.jitter: must be less than or equal to 2, got 3"),
        ("target.jitter", float("nan"), "target.jitter: must be less than or equal to 2, got nan"),
        ("draft.jitter", float("nan"), "draft.jitter: must be less than or equal to 2, got nan"),
        ("target.max_nodes", 2048, "target.max_sweep_rows: must be at least max_nodes, 2048, got 1024"),
        ("target.max_sweep_rows", 4, "target.max_sweep_rows: must be greater than or equal to 8, got 4"),
        ("target", {}, "target.compute_base_seconds: must be above 0"),
        ("target", 3, "target: must be an object, got 3"),
        ("source", "", "source: must have at least 1 character, got ''"),
        ("events", [{"link": 2}], "events[0].at_second: missing; must be given"),
        ("events", {"link": 2}, "events: must be a valid array"),
        (
            "events",
            [{"at_second": 1, "link": float("nan")}],
            "events[0].link: must be less than or equal to 1000, got nan",
        ),
        ("failures", [{"worker": "index"}], "failures[0].worker: must be 'target' or 'draft', got 'index'"),
        (
            "failures",
            [{"worker": "draft", "probability": 2}],
            "failures[0].probability: must be less than or equal to 1, got 2",
        ),
        (
            "failures",
            [{"worker": "draft", "probability": float("nan")}],
            "failures[0].probability: must be less than or equal to 1, got nan",
        ),
        ("clock_scale", 0, "clock_scale: must be greater than 0, got 0"),
        ("clock_scale", float("nan"), "clock_scale: must be a finite number, got nan"),
        ("acceptance", {}, "acceptance.kind: must be one of by_rank, by_depth"),
        ("acceptance.kind", "lucky", "acceptance.kind: must be one of by_rank"),
        (
            "acceptance.vector",
            [0.7, 0.4],
            "acceptance.vector: must sum to at most 1, as at most one child is accepted, got 1.1",
        ),
        ("acceptance.vector", [0.7, -0.1], "acceptance.vector[1]: must be a probability from 0 to 1, got -0.1"),
        ("acceptance.vector", [0.5, float("nan")], "acceptance.vector[1]: must be a probability from 0 to 1, got nan"),
        ("acceptance.vector", [0.001] * 300, "acceptance.vector: must be at most 256 probabilities, got 300"),
        ("acceptance.vector", "gpt", "acceptance.vector: must be a list of probabilities by rank, or"),
        ("acceptance.vector", [[0.5], [0.4]], "acceptance.vector: must be one list"),
        ("acceptance.spread", 1, "acceptance.spread: must be less than or equal to 0.99, got 1"),
        ("acceptance.spread", float("nan"), "acceptance.spread: must be less than or equal to 0.99, got nan"),
        (
            "acceptance.overconfidence",
            float("nan"),
            "acceptance.overconfidence: must be less than or equal to 16, got nan",
        ),
        ("acceptance.overconfidence", 0, "acceptance.overconfidence: must be greater than 0, got 0"),
    ],
)
def test_invalid_fields_are_refused_by_name(path: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_profile(changed(path, value))
    assert said in str(refused.value)


def test_an_invalid_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="profile: invalid JSON: EOF"):
        parse_profile("{")
    with pytest.raises(ConfigError, match="profile: must be a JSON file, or one of a100"):
        load_profile("nowhere")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\x00")
    for name, said in ((str(tmp_path), "Is a directory"), (str(binary), "not text in UTF-8"), ("x" * 300, "too long")):
        with pytest.raises(ConfigError, match=f"profile: must be a JSON file, or one of .*{said}"):
            load_profile(name)
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(GOOD))
    assert load_profile(str(file)).source == "made up"
    file.write_text(json.dumps({"source": "x"}))
    with pytest.raises(ConfigError, match=f"^{file}: target: missing; must be given"):
        load_profile(str(file))


def test_the_document_names_every_field_and_every_kind_of_acceptance() -> None:
    """What a stranger writes a profile of their own by."""
    text = Path("docs/simulated-workers.md").read_text()
    parts = (Profile, TargetProfile, Experts, DraftProfile, NetworkProfile, Event, Failure)
    named = {field.name for part in parts for field in fields(part)}
    named |= {*VECTORS, *(name for names in VECTORS.values() for name in names), *PUBLISHED}
    named |= {"over_positions", "spread", "overconfidence"}
    assert [name for name in sorted(named) if f"`{name}`" not in text] == []
    assert [name for name in shipped_profiles() if f"`{name}`" not in text] == []


def test_the_example_in_the_document_is_a_profile() -> None:
    """The longest of its blocks; the others are parts of one."""
    blocks = re.findall(r"```json\n(.*?)```", Path("docs/simulated-workers.md").read_text(), re.DOTALL)
    profile = parse_profile(max(blocks, key=len))
    assert profile.target.compute_seconds(2) <= max(profile.target.link_seconds, profile.target.compute_seconds(1))
    (part,) = (block for block in blocks if "failures" in block)
    changed_in_mid_run = parse_profile(json.dumps(GOOD | json.loads("{" + part + "}")))
    assert changed_in_mid_run.failure_at("target", 25, 0.4) is not None
    assert changed_in_mid_run.factors_at(61).link == 3
