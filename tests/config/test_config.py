"""Settings: from flags and environment, refused by name where they are unknown or malformed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bough.cli.flags.machine import up_arguments
from bough.cli.machine.up import settings_from
from bough.cli.main import argument_parser
from bough.client import Client
from bough.config.cache_paths import demonstration_folder
from bough.config.parsers import parse_bytes, parse_layers
from bough.config.processes import DraftConfig, OrchestratorConfig, TargetConfig, parse, to_flags
from bough.errors import CheckpointError, ConfigError
from bough.processes.exit_with_parent import MODULE


def test_flags_override_the_environment_which_overrides_defaults() -> None:
    environ = {"BOUGH_TARGET_MODEL": "a", "BOUGH_TARGET_ROWS": "32", "BOUGH_DRAFT_BRANCH": "3", "HOME": "/"}
    config = parse(TargetConfig, "target_worker", ["--model", "b"], environ)
    assert (config.model, config.rows, config.dtype) == ("b", 32, "auto")


def test_flags_round_trip_to_an_equal_value() -> None:
    config = parse(DraftConfig, "draft_worker", ["--model", "m", "--drop-layers", "1-3,9", "--kv-memory", "1GiB"], {})
    assert config.drop_layers == (1, 2, 3, 9)
    assert config.kv_memory == 2**30
    assert parse(DraftConfig, "draft_worker", to_flags(config), {}) == config


def test_flags_of_other_gpus_are_passed_on_unchanged() -> None:
    """A target that `bough up` started was given a Python tuple, refused it, and the start failed."""
    flags = ["--model", "m", "--resident-devices", "cuda:1=10GB,cuda:2=8GB", "--tls-peer-names", "a,b"]
    config = parse(TargetConfig, "target_worker", flags, {})
    assert parse(TargetConfig, "target_worker", to_flags(config), {}) == config


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        ([], {}, "--model: missing; must be set by the flag or BOUGH_TARGET_MODEL"),
        (["--model", "m", "--row", "3"], {}, "--row"),
        (["--model", "m", "--rows", "many"], {}, "--rows: must be a whole number, 0 or more, got 'many'"),
        (["--model", "m", "--rows", "-1"], {}, "--rows: must be .* got '-1'"),
        (["--model", "m", "--max-sweep-tokens", "-1"], {}, "--max-sweep-tokens: must be a whole number, 0 or more"),
        (["--model", "m", "--port", "70000"], {}, "--port: must be a whole number, 0 to 65535, got '70000'"),
        (["--model", "m", "--dtype", "int3"], {}, "--dtype: must be auto, bfloat16.*, got 'int3'"),
        (["--model", "m", "--kv-memory", "lots"], {}, "--kv-memory: must be a size such as .*, got 'lots'"),
        (["--model", "m", "--device", "gpu"], {}, "--device: must be auto, cpu, cuda or cuda:1, got 'gpu'"),
        (["--model", "m", "--lease-seconds", "nan"], {}, "--lease-seconds: must be a number, .* got 'nan'"),
        (["--model", "m"], {"BOUGH_TARGET_PROT": "1"}, "BOUGH_TARGET_PROT: no such setting"),
        (["--model", "m"], {"BOUGH_TARGET_PORT": "x"}, "BOUGH_TARGET_PORT: must be .* got 'x'"),
    ],
)
def test_invalid_settings_are_refused_by_name(argv: list[str], environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(TargetConfig, "target_worker", argv, environ)


def test_sizes_in_bytes_and_ranges_of_layers_are_read() -> None:
    assert parse_bytes("1.5GB") == 1_500_000_000
    assert parse_bytes("512 MiB") == 512 * 2**20
    assert parse_layers("") == ()
    assert parse_layers("12-14,3") == (12, 13, 14, 3)
    for wrong in ("a-b", "3-2", ",", "3,"):
        with pytest.raises(ValueError, match="12-15"):
            parse_layers(wrong)


def test_the_orchestrator_has_a_default_port() -> None:
    assert parse(OrchestratorConfig, "orchestrator", [], {}).port == 7411


@pytest.mark.parametrize(
    ("flags", "environ", "target", "draft", "drops"),
    [
        ([], {}, "x10", "x10", (3, 14)),
        (["--drop-layers", "3,14"], {}, "x10", "x10", (3, 14)),
        (["--target", "T", "--draft", "D"], {}, "T", "D", ()),
        (["--target", "T"], {"BOUGH_DRAFT_DROP_LAYERS": "1"}, "T", "T", (1,)),
        ([], {"BOUGH_TARGET_MODEL": "T", "BOUGH_DRAFT_MODEL": "D"}, "T", "D", ()),
        (["--draft", "D"], {"BOUGH_DRAFT_MODEL": "E"}, "x10", "D", ()),
    ],
)
def test_bough_up_reads_models_from_flags_then_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    environ: dict[str, str],
    target: str,
    draft: str,
    drops: tuple[int, ...],
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    settings = settings_from(argument_parser().parse_args(["up", *flags]))
    assert settings.target.model.endswith(target)
    assert settings.draft is not None
    assert settings.draft.model.endswith(draft)
    assert settings.draft.drop_layers == drops


@pytest.mark.parametrize(
    ("flags", "environ"),
    [
        (["--draft", "none"], {}),
        (["--draft", "none", "--target", "T"], {}),
        ([], {"BOUGH_DRAFT_MODEL": "none"}),
        (["--target", "T"], {"BOUGH_ORCHESTRATOR_DRAFT": "none"}),
    ],
)
def test_bough_up_needs_no_draft(monkeypatch: pytest.MonkeyPatch, flags: list[str], environ: dict[str, str]) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    settings = settings_from(argument_parser().parse_args(["up", *flags]))
    assert settings.draft is None
    assert settings.orchestrator.draft == "none"


def test_a_requested_draft_overrides_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOUGH_ORCHESTRATOR_DRAFT", "none")
    settings = settings_from(argument_parser().parse_args(["up", "--draft", "D"]))
    assert settings.draft is not None
    assert settings.orchestrator.draft == "workers"


def test_no_draft_with_dropped_layers_is_a_contradiction() -> None:
    with pytest.raises(ConfigError, match="--drop-layers: must not be given with --draft none, got 3"):
        settings_from(argument_parser().parse_args(["up", "--draft", "none", "--drop-layers", "3"]))


def test_bough_up_requires_a_draft_if_it_cannot_choose_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--draft: missing; must be a smaller model"):
        settings_from(argument_parser().parse_args(["up", "--target", str(tmp_path)]))
    with pytest.raises(CheckpointError, match=r"^--target: must be a folder or a GGUF file that exists"):
        settings_from(argument_parser().parse_args(["up", "--target", str(tmp_path / "nowhere")]))


@pytest.mark.parametrize("flag", ["--target", "--draft", "--simulate", "--drop-layers"])
def test_an_empty_value_does_not_mean_the_demonstration(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag}: must have a value, or be left out, got ''"):
        settings_from(argument_parser().parse_args(["up", flag, ""]))


def test_a_draft_s_device_is_refused_by_the_flag_of_up() -> None:
    with pytest.raises(ConfigError, match=r"^--draft-device: must be auto, cpu, cuda or cuda:1, got 'gpu'"):
        settings_from(argument_parser().parse_args(["up", "--draft-device", "gpu"]))


def test_memory_and_draft_ahead_are_flags_of_up() -> None:
    flags = ["--device-memory", "3GB", "--kv-memory", "1GB", "--host-memory", "9GB", "--ahead-steps", "16"]
    settings = settings_from(argument_parser().parse_args(["up", *flags]))
    assert (settings.target.device_memory, settings.target.host_memory) == (3 * 10**9, 9 * 10**9)
    assert settings.target.kv_memory == 10**9
    assert settings.draft is not None
    assert settings.draft.ahead_steps == 16
    with pytest.raises(ConfigError, match="--device-memory: must be a size such as 512MB or 2GiB, got 'plenty'"):
        settings_from(argument_parser().parse_args(["up", "--device-memory", "plenty"]))


@pytest.mark.parametrize(
    ("flags", "ahead_steps"),
    [
        ([], 0),
        (["--draft-device", "cuda:0"], 0),
        (["--draft-device", "cuda:1"], -1),
        (["--draft-device", "cpu"], -1),
        (["--ahead-steps", "5"], 5),
        (["--ahead-steps", "0", "--draft-device", "cuda:1"], 0),
    ],
)
def test_a_draft_works_ahead_if_that_takes_nothing_from_the_target(flags: list[str], ahead_steps: int) -> None:
    """-1 leaves it to the worker, which knows whether it has a GPU."""
    settings = settings_from(argument_parser().parse_args(["up", *flags]))
    assert settings.draft is not None
    assert settings.draft.ahead_steps == ahead_steps


def test_the_demonstration_starts_the_same_as_up() -> None:
    """An option that `up` had gained once broke `make demo`, which no test runs whole."""
    settings = settings_from(up_arguments())
    assert settings.target.model == str(demonstration_folder())
    assert settings.draft is not None
    assert (settings.orchestrator.port, settings.orchestrator.http_port) == (0, -1)


@pytest.mark.parametrize("workers", [[], ["--simulate", "two-cores"]])
def test_trees_are_self_sized_unless_up_has_a_budget(workers: list[str]) -> None:
    parser = argument_parser()
    assert settings_from(parser.parse_args(["up", *workers])).orchestrator.planner == "self"
    assert settings_from(parser.parse_args(["up", *workers, "--planner", "fixed"])).orchestrator.planner == "fixed"
    with pytest.raises(SystemExit):
        parser.parse_args(["up", "--planner", "guess"])


def test_the_demonstrations_draft_is_the_target_without_two_layers() -> None:
    settings = settings_from(argument_parser().parse_args(["up"]))
    assert settings.draft is not None
    assert settings.draft.model == str(demonstration_folder())
    assert settings.draft.drop_layers == (3, 14)


def test_a_draft_has_the_targets_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had a context of its own that no flag of `up` reached, and saw half of longer sessions."""
    flags = ["up", "--max-context", "9000", "--draft-device", "cuda:1"]
    settings = settings_from(argument_parser().parse_args(flags))
    assert settings.draft is not None
    assert (settings.target.max_context, settings.draft.max_context) == (9000, 9000)
    assert (settings.target.device, settings.draft.device) == ("auto", "cuda:1")
    monkeypatch.setenv("BOUGH_DRAFT_MAX_CONTEXT", "500")
    settings = settings_from(argument_parser().parse_args(flags))
    assert settings.draft is not None
    assert settings.draft.max_context == 500


@pytest.mark.parametrize(("flags", "bits"), [([], "auto"), (["--draft-bits", "16"], "16")])
def test_the_bits_of_a_drafts_products_are_configured(flags: list[str], bits: str) -> None:
    draft = settings_from(argument_parser().parse_args(["up", *flags])).draft
    assert draft is not None
    assert draft.bits == bits
    with pytest.raises(ConfigError, match=r"--bits: must be .*16, got '5'"):
        parse(DraftConfig, "draft_worker", [*to_flags(draft), "--bits", "5"], {})


def test_an_invalid_port_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="--port: must be a whole number, 0 to 65535, got '99999'"):
        settings_from(argument_parser().parse_args(["up", "--port", "99999"]))


async def test_an_address_with_an_invalid_port_is_refused() -> None:
    """gRPC would call the port that is left when 65536 is taken off."""
    with pytest.raises(ConfigError, match=r"addresses: must have a port from 1 to 65535, got '127\.0\.0\.1:99999'"):
        Client("127.0.0.1:7411", "127.0.0.1:99999")


def test_started_processes_do_not_depend_on_the_working_folder(tmp_path: Path) -> None:
    """Next to a clone of the repository, its folder was mistaken for the package."""
    (tmp_path / "bough").mkdir()
    command = [sys.executable, *MODULE, "orchestrator", "--help"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["up", "--port", "x"], "--port: must be a whole number, got 'x'; see bough up --help"),
        (["generate", "--temperature", "hot", "Hi"], "--temperature: must be a number, got 'hot'; see bough generate"),
        (["generate", "--no-such", "Hi"], "unrecognized arguments: --no-such; see bough generate --help"),
        (["chat", "--sed=9"], "unrecognized arguments: --sed=9 (similar: --seed); see bough chat --help"),
    ],
)
def test_an_invalid_flag_is_named_in_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not below the names of forty that are right."""
    with pytest.raises(SystemExit, match="2"):
        argument_parser().parse_args(flags)
    said = capsys.readouterr().err
    assert said.startswith(f"error: {message}")
    assert said.count("\n") == 1
