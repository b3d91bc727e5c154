"""`bough plan --stages`: members hold what fits, sweeps add up, one machine is compared, and bad flags are named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MixtralConfig

from bough.cli.main import argument_parser, main
from bough.cli.planning.plan import settings_from
from bough.cli.planning.plan_stages import make_stage_plan
from bough.config.cache_paths import demonstration_folder
from bough.config.parsers import parse_stages
from bough.config.processes import TargetConfig
from bough.errors import ConfigError
from bough.model.kv.session_kv import KVShape
from bough.model.sizes.memory_budget import fixed_bytes, layer_kv_bytes, stage_buffer_bytes
from bough.model.small_model import HYBRID, WHOLE
from tests.cli.planning.test_plan import ELSEWHERE, FAMILIES, LLAMA_70B, run, write_config

CPU = ("--device", "cpu", "--compute-speed", "1", "--memory-speed", "30", "--link-speed", "2")
GPU = ELSEWHERE[2:]
NODES, HIDDEN = 64, 8192


@pytest.fixture
def llama_70b(tmp_path: Path) -> str:
    return write_config(tmp_path / "llama", LLAMA_70B)


def report(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What `bough plan` prints without --json."""
    with pytest.raises(SystemExit) as ended:
        main(["plan", *argv])
    output = capsys.readouterr()
    assert ended.value.code == 0, output.err
    return output.out


def sweep_of(plan: dict[str, Any], tokens: int) -> dict[str, float]:
    return next(dict(sweep) for sweep in plan["sweeps"] if sweep["tokens"] == tokens)


def test_three_machines_stream_from_three_disks(llama_70b: str, capsys: pytest.CaptureFixture[str]) -> None:
    """So a sweep takes as long as the slowest of them, and less than a third of what one machine takes."""
    plan = run(capsys, llama_70b, *CPU, "--stages", "first:24GB,second:24GB,third:32GB")
    members = plan["stages"]
    assert [member["name"] for member in members] == ["first", "second", "third"]
    assert [member["memory_bytes"] // 10**9 for member in members] == [24, 24, 32]
    ends = [member["first_layer"] + member["num_layers"] for member in members]
    assert [member["first_layer"] for member in members] + [80] == [0, *ends]
    layer_bytes = plan["alone"]["layer_bytes"][0]
    for member in members:
        assert member["resident_bytes"] + member["streamed_bytes"] == member["num_layers"] * layer_bytes
        assert member["resident_bytes"] + member["kv_bytes"] < member["memory_bytes"]
        assert member["link_seconds"] == pytest.approx(member["streamed_bytes"] / 2e9)
    longest = max(member["link_seconds"] for member in members)
    assert sweep_of(plan, NODES)["seconds"] == longest
    assert longest - min(member["link_seconds"] for member in members) < 2 * layer_bytes / 2e9
    assert longest < sweep_of(plan["alone"], NODES)["seconds"] / 3
    assert plan["rates"][1]["tokens_per_second"] == pytest.approx(3 / longest)


def test_layers_that_fit_on_two_gpus_do_not_stream(llama_70b: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (*GPU, "--bits", "4", "--unpack-speed", "500")
    plan = run(capsys, llama_70b, *flags, "--stages", "first:24GB,second:24GB")
    assert [member["num_layers"] for member in plan["stages"]] == [40, 40]
    assert [member["streamed_bytes"] for member in plan["stages"]] == [0, 0]
    alone = run(capsys, llama_70b, *flags, "--device-memory", "24GB")
    assert plan["alone"] == alone
    for tokens in (1, NODES):
        hops = 2 * (0.5e-3 + tokens * HIDDEN * 2 / 125e6)
        assert sweep_of(plan, tokens)["seconds"] == pytest.approx(sweep_of(alone, tokens)["compute_seconds"] + hops)


def test_hidden_states_on_a_cpu_are_float32(llama_70b: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = run(capsys, llama_70b, *CPU, "--stages", "first:200GB,second:200GB")
    hops = 2 * (0.5e-3 + NODES * HIDDEN * 4 / 125e6)
    alone = sweep_of(plan["alone"], NODES)
    assert sweep_of(plan, NODES)["compute_seconds"] == pytest.approx(alone["compute_seconds"] + hops)


@pytest.mark.parametrize(("bits", "speed"), [("8", 25e9), ("16", 3e9)])
def test_gpus_stream_from_the_hosts_memory_if_all_layers_fit_there(
    llama_70b: str, capsys: pytest.CaptureFixture[str], bits: str, speed: float
) -> None:
    """Those of a 70B in 16 bits take more than 128 GB; the split then assumes the slower way, from disk."""
    flags = (*GPU, "--unpack-speed", "500", "--link-speed", "3", "--bits", bits)
    for member in run(capsys, llama_70b, *flags, "--stages", "a:24GB,b:24GB")["stages"]:
        assert member["link_seconds"] == pytest.approx(member["streamed_bytes"] / speed)
        assert member["streamed_bytes"] > 0


def test_one_machine_may_be_too_small_for_the_kv_of_all(llama_70b: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (*CPU, "--kv-memory", "26GB", "--stages", "first:24GB,second:24GB,third:24GB")
    plan = run(capsys, llama_70b, *flags)
    assert sum(member["kv_bytes"] for member in plan["stages"]) == pytest.approx(26e9, rel=0.01)
    assert plan["alone"] is None
    assert plan["alone_refused"].startswith("--kv-memory: must be less than the 24.00 GB")
    assert "first alone is too small: --kv-memory" in report(capsys, llama_70b, *flags)


def test_the_report_shows_members_and_the_first_machine_alone(
    llama_70b: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = report(capsys, llama_70b, *CPU, "--stages", "[::1]:24GB,second:24GB")
    assert "streamed" in out
    assert "[::1]\n" in out
    assert "2 hops over the network (assumed: 1 Gbit/s, 0.5 ms)" in out
    assert "[::1] alone: 7 layers resident" in out
    assert out.count("plain decoding") == 2
    assert "experts" not in out
    experts = MixtralConfig(**(FAMILIES["mixtral"].to_dict() | {"num_hidden_layers": 4})).to_dict()
    mixture = write_config(tmp_path / "mixture", experts)
    assert "experts of a layer that streams all move with it" in report(
        capsys, mixture, *CPU, "--stages", "a:24MB,b:24MB", "--max-sweep-tokens", "64", "--max-nodes", "64"
    )


def test_the_demonstration_stays_in_memory_on_several_machines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone it streams although it fits, so that it costs what a large model does."""
    monkeypatch.setenv("BOUGH_CACHE_DIR", str(tmp_path))
    folder = demonstration_folder()
    small = LLAMA_70B | {"num_hidden_layers": 3, "hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8}
    write_config(folder, small)
    plan = run(capsys, str(folder), *CPU, "--stages", "a:4GB,b:4GB")
    assert [member["streamed_bytes"] for member in plan["stages"]] == [0, 0]
    assert plan["alone"]["tiers"] == ["resident"] * 3


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("config", [WHOLE, HYBRID], ids=["attention", "hybrid"])
def test_the_kv_of_layers_adds_up_to_that_of_the_model(config: LlamaConfig, tier: str) -> None:
    """A recurrent layer has states instead of rows, which stay on the device; a stage has no output head."""
    on_device, settings = (
        TargetConfig(model="m", kv_memory=2_000_000, max_nodes=16, max_sweep_tokens=16, rows=16, kv_tier=each)
        for each in ("device", tier)
    )
    shape = KVShape.of(config, torch.float32)
    fixed = fixed_bytes(settings, True, config, shape, resident=1000, scratch=100)
    layers = layer_kv_bytes(settings, config, shape)
    assert len(layers) == config.num_hidden_layers
    buffers = stage_buffer_bytes(settings, True, config, shape, scratch=100)
    staged = buffers - stage_buffer_bytes(on_device, True, config, shape, scratch=100)
    assert sum(layers) + staged == pytest.approx(fixed.kv, abs=len(layers))
    assert (staged > 0) == (tier == "host")
    assert buffers < fixed.total - sum(layers) - 1000
    assert stage_buffer_bytes(settings, False, config, shape, scratch=100) > buffers, "of the threads' scores"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:24GB", "must name two machines or more, each once; the first is the head"),
        ("a:24GB,a:24GB", "must name two machines or more, each once"),
        ("", "must be machines and the memory to use of each, such as first:24GB,second:24GB"),
        ("a:24GB,", "must be machines and the memory"),
        ("a:24GB,b", "must be machines and the memory"),
        ("a:24GB,b:lots", "must be machines and the memory"),
        ("a:24GB,:24GB", "must be machines and the memory"),
        ("a:24GB,b:-1GB", "must be machines and the memory"),
    ],
)
def test_invalid_machines_are_refused(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=message):
        parse_stages(text)
    with pytest.raises(SystemExit) as ended:
        main(["plan", "anything", f"--stages={text}"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert f"error: --stages: {message}" in error
    assert f"got {text!r}" in error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([*CPU, "--device-memory", "24GB"], "--device-memory: must be left out with --stages, got 24000000000"),
        ([*CPU, "--resident-layers", "0"], "--resident-layers: must be left out with --stages, got 0"),
        ([*CPU, "--ring-memory", "1GB"], "--ring-memory: must be left out with --stages, got 1000000000"),
        ([*GPU, "--resident-devices", "cuda:1=2GB"], "--resident-devices: must be left out with --stages"),
        ([*CPU, "--kv-memory", "60GB"], "--kv-memory: must be less than the 48.00 GB"),
        (["--device", "gpu"], "--host-memory: missing"),
        ([*GPU[:4]], "--compute-speed: missing"),
        ([*CPU, "--kv-memory", "4MB", "--max-context", "512"], "--kv-memory: must be at least"),
    ],
)
def test_invalid_flags_are_named(flags: Sequence[str], message: str, llama_70b: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = argument_parser().parse_args(["plan", llama_70b, *flags, "--stages", "a:24GB,b:24GB"])
    with pytest.raises(ConfigError) as refused:
        make_stage_plan(settings_from(arguments), arguments.stages)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ("head:6GB,b:64GB", "--stages: head must have at least 1.75 GB for 1 of the model's layers and their KV after"),
        ("head:64GB,small:1GB", "--stages: small must have at least"),
        (",".join(f"m{i}:24GB" for i in range(81)), "--stages: must be at most 80, as each has a layer"),
    ],
)
def test_machines_that_are_too_small_are_named(stages: str, message: str, llama_70b: str) -> None:
    arguments = argument_parser().parse_args(["plan", llama_70b, *CPU, "--stages", stages])
    with pytest.raises(ConfigError) as refused:
        make_stage_plan(settings_from(arguments), arguments.stages)
    assert message in str(refused.value)
