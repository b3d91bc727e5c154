"""What a deployment's `user_config` may say, and that everything else is refused by its name."""

from __future__ import annotations

import pytest

from bough.config.cache_paths import demonstration_folder
from bough.config.processes import TargetConfig
from bough.errors import ConfigError
from deploy.settings import AppSettings, IndexSettings, Role, read_fields, read_program, resolved_url
from deploy.supervisor import child_variables

SIMULATED = {"simulate": "two-cores"}


def test_settings_of_a_program_become_flags() -> None:
    settings = read_program(Role.TARGET, {"program": {**SIMULATED, "kv_memory": "1GB", "rows": 32}, "stall_seconds": 5})
    assert settings.flags == ("--simulate", "two-cores", "--kv-memory", "1GB", "--rows", "32")
    assert isinstance(settings.config, TargetConfig)
    assert (settings.config.kv_memory, settings.config.rows) == (1000**3, 32)
    assert (settings.supervision.stall_seconds, settings.supervision.niceness) == (5.0, 0)


def test_lists_and_the_demonstration_model_become_flags() -> None:
    settings = read_program(Role.DRAFT, {"program": {"model": "demonstration", "drop_layers": [3, 14]}})
    assert settings.flags == ("--model", str(demonstration_folder()), "--drop-layers", "3,14")


@pytest.mark.parametrize(
    ("user_config", "text"),
    [
        (
            {"program": {**SIMULATED, "kv_memroy": "1GB"}},
            r"user_config\.program\.kv_memroy: no such setting; .*kv_memory",
        ),
        ({"program": SIMULATED, "stal_seconds": 5}, r"user_config\.stal_seconds: no such setting; .*stall_seconds"),
        ({"program": {**SIMULATED, "rows": "many"}}, r"user_config\.program: --rows: must be .* got 'many'"),
        ({"program": SIMULATED, "niceness": 20}, r"user_config\.niceness: must be .* got 20"),
        (
            {"program": {**SIMULATED, "index_url": "redis://x"}},
            r"index_url: must be left to the supervisor, got 'redis://x'",
        ),
        ({"program": {**SIMULATED, "stages": 2}}, r"program\.stages: must be left to args\.stages, got 2"),
        (
            {"program": {**SIMULATED, "stage_of": "a:1"}},
            r"program\.stage_of: must be left to the supervisor, got 'a:1'",
        ),
        ({"program": {}}, r"user_config\.program: --model: missing"),
        ({"program": ["simulate"]}, r"user_config\.program: must be a mapping of names to values, got \['simulate'\]"),
        (
            {"program": SIMULATED, "environment": "A=1"},
            r"user_config\.environment: must be a mapping of names to values, got 'A=1'",
        ),
        (
            {"program": SIMULATED, "environment": {"A": None}},
            r"user_config\.environment\.A: must be a value, or left out, got None",
        ),
        (
            {"program": SIMULATED, "environment": {"BOUGH_TARGET_DRAIN_SECONDS": 5}},
            r"environment\.BOUGH_TARGET_DRAIN_SECONDS: must be under program, got 5",
        ),
        (
            {"program": SIMULATED, "log_folder": None},
            r"user_config\.log_folder: must be a value, or left out, got None",
        ),
    ],
)
def test_invalid_settings_are_refused_by_name(user_config: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read_program(Role.TARGET, user_config)


def test_arguments_and_the_index_have_settings() -> None:
    assert read_fields(AppSettings, {"drafts": False}, "args").drafts is False
    assert read_fields(IndexSettings, {"port": 7000}, "Index").port == 7000
    for cls, values, text in (
        (AppSettings, {"index": "redis://x"}, "args.index: no such setting"),
        (AppSettings, {"drafts": "perhaps"}, "args.drafts: must be yes or no, got 'perhaps'"),
        (AppSettings, {"stages": 0}, "args.stages: must be a whole number, 1 or more, got 0"),
        (IndexSettings, {"port": 70_000}, "args.port: must be a whole number, 0 to 65535, got 70000"),
        (IndexSettings, {"memory": 256}, "args.memory: must be a whole number, 1537 or more, got 256"),
    ):
        with pytest.raises(ConfigError, match=text):
            read_fields(cls, values, "args")


def test_an_index_can_be_named_by_a_variable() -> None:
    assert resolved_url("redis://a", {}) == "redis://a"
    assert resolved_url("$INDEX", {"INDEX": "rediss://:secret@a"}) == "rediss://:secret@a"
    with pytest.raises(ConfigError, match=r"args\.index_url: must name a variable .*, got \$INDEX"):
        resolved_url("$INDEX", {})


def test_a_program_gets_its_threads_and_index_from_ray() -> None:
    """Ray leaves OMP_NUM_THREADS=1 to all that its workers start."""
    program = {**SIMULATED, "threads": 6}
    settings = read_program(Role.TARGET, {"program": program, "environment": {"CUDA_VISIBLE_DEVICES": 1}})
    assert child_variables(settings, "redis://a") == {
        "OMP_NUM_THREADS": "6",
        "CUDA_VISIBLE_DEVICES": "1",
        "BOUGH_TARGET_INDEX_URL": "redis://a",
    }
    settings = read_program(Role.TARGET, {"program": program, "environment": {"OMP_NUM_THREADS": 2}})
    assert child_variables(settings, "redis://a")["OMP_NUM_THREADS"] == "2"


def test_an_orchestrator_drains_for_long_by_default() -> None:
    """Its successor serves meanwhile. A worker's successor waits for its memory."""
    assert read_program(Role.ORCHESTRATOR, {}).config.drain_seconds == 600
    assert read_program(Role.ORCHESTRATOR, {"program": {"drain_seconds": 7}}).config.drain_seconds == 7
    assert read_program(Role.TARGET, {"program": SIMULATED}).config.drain_seconds == 25
