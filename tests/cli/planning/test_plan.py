"""`bough plan`: sizes agree with real checkpoints, predictions with their own model, and bad flags are named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import SafetensorsFileMetadata, SafetensorsRepoMetadata
from huggingface_hub.utils._safetensors import TensorInfo
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, LlamaConfig, MiniCPM3Config, MixtralConfig, PretrainedConfig, Qwen3MoeConfig

from bough.cli.machine import up
from bough.cli.main import argument_parser, main
from bough.cli.planning.demonstration import STREAMED
from bough.cli.planning.plan import settings_from, text_plot
from bough.cli.planning.plan_model import make_plan
from bough.config.cache_paths import demonstration_folder
from bough.errors import CheckpointError, ConfigError
from bough.model.architecture.architecture import load_config
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.loading.loading import DTYPES, build_skeleton
from bough.model.sizes import model_sizes
from bough.model.sizes.hardware_probe import STAND_IN_BYTES, Read, best_rate, disk_speed
from bough.model.sizes.memory_budget import resident_bytes
from bough.model.sizes.model_sizes import find_model, model_shapes
from bough.sizing.cost_model import ExpertWork, Speed, Speeds, SweepModel, TiledWork, Work, purchases, rate, sweep_model
from bough.sizing.placement import Budgets, Fixed, Placement, Tier, gigabytes, place
from bough.sizing.row_counts import RowCounts
from loadtest.common.packed_model import pack
from loadtest.common.tiny_model import save_model
from target_worker.link.layer_extents import plan_layer
from tests.fakes.model.headers import write_headers

LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_size": 8192,
    "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 80,
    "vocab_size": 128256, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
ELSEWHERE = ["--device-memory", "24GB", "--host-memory", "128GB", "--host-link-speed", "25", "--compute-speed", "80"]
SPEEDS = Speeds(Speed(1e12, "told"), disk=Speed(1e9, "told"), host_link=Speed(20e9, "told"))


@pytest.fixture
def llama_70b(tmp_path: Path) -> str:
    """A folder with a configuration and nothing else."""
    return write_config(tmp_path / "llama", LLAMA_70B)


def write_config(folder: Path, config: Mapping[str, Any]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    """What `bough plan --json` prints."""
    with pytest.raises(SystemExit) as ended:
        main(["plan", *argv, "--json"])
    output = capsys.readouterr()
    assert ended.value.code == 0, output.err
    (line,) = output.out.splitlines()
    return dict(json.loads(line))


FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(
        vocab_size=262, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=260, eos_token_id=261,
    ),
    "tied": LlamaConfig(
        vocab_size=262, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=260, eos_token_id=261,
        tie_word_embeddings=True, attention_bias=True,
    ),
    "mixtral": MixtralConfig(
        vocab_size=262, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, num_local_experts=4, num_experts_per_tok=2,
        bos_token_id=260, eos_token_id=261,
    ),
    "qwen3_moe": Qwen3MoeConfig(
        vocab_size=262, hidden_size=64, intermediate_size=96, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512, num_experts=4,
        num_experts_per_tok=2, mlp_only_layers=[0], bos_token_id=260, eos_token_id=261,
    ),
    "minicpm3": MiniCPM3Config(
        vocab_size=262, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        kv_lora_rank=32, q_lora_rank=64, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
        max_position_embeddings=512, bos_token_id=260, eos_token_id=261,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_planned_sizes_equal_those_of_the_real_checkpoint(family: str, tmp_path: Path) -> None:
    """By the headers, and by the configuration alone."""
    folder = save_model(tmp_path / "model", FAMILIES[family])
    skeleton = build_skeleton(Checkpoint.open(folder), torch.bfloat16)
    layers = [{place for slot in slots for place in slot.source.places} for slots in skeleton.layer_slots]
    (tmp_path / "alone").mkdir()
    shutil.copyfile(folder / "config.json", tmp_path / "alone" / "config.json")
    for where in (folder, tmp_path / "alone"):
        planned = model_shapes(find_model(str(where)), "bfloat16", 0, 64)
        assert planned.layer_bytes == tuple(sum(place.num_bytes for place in places) for places in layers)
        assert planned.resident_bytes == resident_bytes(skeleton)
        assert planned.kv == skeleton.kv_shape()
        assert planned.description == skeleton.describe()
        real_scratch = max(plan_layer("", slots).scratch_bytes(torch.bfloat16) for slots in skeleton.layer_slots)
        assert real_scratch <= planned.scratch_bytes <= (1.5 if where != folder else 1) * real_scratch


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_packed_sizes_equal_those_of_the_files(family: str, tmp_path: Path) -> None:
    folder = pack(save_model(tmp_path / "model", FAMILIES[family]), 4, tmp_path / "packed")
    planned = model_shapes(find_model(str(folder)), "bfloat16", 0, 64)
    skeleton = build_skeleton(Checkpoint.open(folder), torch.bfloat16)
    layers = [{place for slot in slots for place in slot.source.places} for slots in skeleton.layer_slots]
    assert planned.layer_bytes == tuple(sum(place.num_bytes for place in places) for places in layers)
    assert planned.description.endswith("4 bits (compressed-tensors)")
    assert planned.packed is not None


def test_a_hub_id_is_planned_from_its_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are fetched by range requests; group indices, which are data, are taken to be in order."""
    folder = write_headers(tmp_path / "70b", LlamaConfig(**LLAMA_70B, quantization_config=GPTQ), "gptq 4 bits by g_idx")
    tensors = {
        name: TensorInfo(place.dtype, [*place.shape], (place.offset, place.offset + place.num_bytes))
        for name, place in Checkpoint.open(folder).tensors.items()
    }
    metadata = SafetensorsRepoMetadata(None, False, {}, {"model.safetensors": SafetensorsFileMetadata({}, tensors)})
    monkeypatch.setattr("huggingface_hub.get_safetensors_metadata", lambda model: {"org/llama": metadata}[model])
    config = load_config(folder)
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: config)
    monkeypatch.setattr(model_sizes, "try_to_load_from_cache", lambda *_: str(folder / "config.json"))
    found = find_model("org/llama")
    assert found.checkpoint is not None
    assert not found.checkpoint.has_data
    matrices = (2 * 8192 + 2 * 1024 + 3 * 28672) * 8192
    (size, *_) = model_shapes(found, "float16", 0, 64).layer_bytes
    assert size == matrices // 2 + matrices // 128 * 2 + matrices // 128 // 2 + 2 * 8192 * 2


def test_a_hub_id_without_headers_is_planned_from_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(model: str) -> None:
        raise OSError(f"no way to {model}")

    monkeypatch.setattr("huggingface_hub.get_safetensors_metadata", offline)
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: FAMILIES["llama"])
    assert find_model("org/llama").checkpoint is None


def test_packed_weights_without_headers_are_refused(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "packed", {**LLAMA_70B, "quantization_config": GPTQ})
    with pytest.raises(CheckpointError, match=r"must have its weights' headers .*, got .*packed without"):
        model_shapes(find_model(folder), "float16", 0, 64)
    assert model_shapes(find_model(folder), "float16", 4, 64).description.endswith(", 4 bits")


def test_a_70b_is_planned_from_its_config(llama_70b: str, capsys: pytest.CaptureFixture[str]) -> None:
    whole = run(capsys, llama_70b, *ELSEWHERE, "--link-speed", "3")
    assert len(whole["tiers"]) == 80
    assert 140e9 < whole["weight_bytes"] < 142e9
    assert whole["kv_bytes_per_token"] == 2 * 80 * 8 * 128 * 2
    assert whole["flops_per_token"] == pytest.approx(2 * 69.5e9, rel=0.01)
    packed = run(capsys, llama_70b, *ELSEWHERE, "--bits", "4")
    matrices = (2 * 8192 + 2 * 1024 + 3 * 28672) * 8192
    assert packed["layer_bytes"][0] == matrices // 2 + matrices // 128 * 2 + matrices // 128 // 2 + 2 * 8192 * 2
    assert set(packed["tiers"]) == {"resident", "host"}
    assert packed["device_bytes"] <= 24e9
    assert packed["host_bytes"] <= 128e9
    assert packed["link_seconds"] == pytest.approx(packed["sweep_bytes"]["link"] / 25e9)
    assert packed["knee_tokens"] % 128 == 0, "as many rows as a tile of products has"
    assert packed["speeds"]["compute"]["per_second"] == pytest.approx(0.55 * 80e12)
    assert packed["speeds"]["compute"]["origin"] == "assumed: 55 % of that set by --compute-speed"


def test_the_demonstration_is_planned_like_bough_up_starts_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was planned in memory, with ten times the tokens a second that it has: `bough up` streams it on purpose."""
    monkeypatch.setenv("BOUGH_CACHE_DIR", str(tmp_path))
    folder = demonstration_folder()
    small = LLAMA_70B | {"num_hidden_layers": 3, "hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8}
    write_config(folder, small)
    speeds = ["--device", "cpu", "--compute-speed", "1", "--memory-speed", "10", "--link-speed", "1"]
    plan = run(capsys, str(folder), *speeds)
    assert plan["tiers"] == ["disk"] * 3
    started = up.settings_from(argument_parser().parse_args(["up"])).target
    assert started.model == str(folder)
    assert started.resident_layers == 0
    with pytest.raises(SystemExit):
        main(["plan", str(folder), *speeds])
    report = capsys.readouterr().out
    assert STREAMED in report
    assert f"every sweep moves {gigabytes(plan['sweep_bytes']['link'])} of layers" in report
    in_memory = run(capsys, str(folder), *speeds, "--resident-layers", "-1")
    assert in_memory["tiers"] == ["resident"] * 3
    monkeypatch.setenv("BOUGH_TARGET_RESIDENT_LAYERS", "-1")
    assert run(capsys, str(folder), *speeds)["tiers"] == ["resident"] * 3
    assert up.settings_from(argument_parser().parse_args(["up"])).target.resident_layers == -1


def test_a_plan_places_layers_like_the_worker(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same sizes but for the padding of pages, hence the same layers."""
    flags = ["--device-memory", "12MB", "--kv-memory", "4MB", "--dtype", "float32", "--max-nodes", "64"]
    speeds = ["--compute-speed", "1", "--memory-speed", "10", "--link-speed", "1"]
    plan = run(capsys, str(tiny), *flags, *speeds, "--max-context", "256", "--resident-layers", "2")
    assert plan["tiers"] == ["disk", "resident", "disk", "resident"]
    assert plan["device_bytes"] <= 12e6
    skeleton = build_skeleton(Checkpoint.open(tiny), DTYPES["float32"])
    assert plan["fixed_bytes"]["resident"] == resident_bytes(skeleton)
    assert plan["fixed_bytes"]["kv"] == 4_000_000 // skeleton.kv_shape().row_bytes * 4 * 2 * 2 * 16 * 4


FIXED = RowCounts(64, 64)
COUNTS = st.sampled_from([RowCounts(16, 16), FIXED, RowCounts(64, 4)])
ONE = Speed(1.0, "one a second: bytes and operations below are seconds")
ALL_KNOWN = Speeds(ONE, memory=ONE, unpack=ONE)
DENSE = st.builds(Work, st.floats(1e-4, 0.2), st.floats(0, 3), st.floats(0, 1))
TILED = st.builds(TiledWork, st.floats(1e-4, 0.2), st.floats(0, 3), st.floats(0, 1))
EXPERTS = st.builds(
    ExpertWork, st.floats(0, 0.2), st.floats(0, 3), st.floats(0, 1), st.integers(8, 128), st.integers(1, 8), st.just(16)
)
MIXTURES = st.builds(Work, st.floats(1e-4, 0.2), st.floats(0, 3), st.floats(0, 1), EXPERTS)
DENSE_MODELS = st.builds(SweepModel, COUNTS, DENSE, st.just(ALL_KNOWN), st.floats(0, 100))
DENSE_MODELS |= st.builds(SweepModel, st.just(RowCounts(1024, 1)), TILED, st.just(ALL_KNOWN), st.floats(0, 100))
MIXED_MODELS = st.builds(SweepModel, COUNTS, MIXTURES, st.just(ALL_KNOWN), st.floats(0, 100), st.floats(0, 100))
MODELS = DENSE_MODELS | MIXED_MODELS


@given(model=MIXED_MODELS)
def test_below_the_knee_the_link_limits_a_sweep_and_above_it_the_products(model: SweepModel) -> None:
    knee, more = model.knee, model.knee + model.rows.step
    if knee:
        assert model.compute_seconds(knee) <= model.link_seconds_of(knee) * (1 + 1e-9)
    assert model.compute_seconds(more) > model.link_seconds_of(more) * (1 - 1e-9)


def test_few_rows_compute_few_experts() -> None:
    """One of a hundred experts for each row, each in 16 rows; a thousand rows have all of them, ten and more each."""
    work = Work(1.0, 10, 0, ExpertWork(1.0, 1000, 500, num_experts=100, num_chosen=1, least_rows=16))
    assert work.flops_per_token == 2.0
    assert work.flops(16, 1) == pytest.approx(16 + 16)
    assert (work.bytes_read(1), work.bytes_unpacked(1)) == (pytest.approx(20), pytest.approx(5))
    assert work.flops(1008, 1000) == pytest.approx(1008 + 1600, rel=0.01)
    assert work.flops(3200, 3200) == pytest.approx(3200 + 3200)
    assert work.bytes_read(1000) == pytest.approx(1010, rel=0.01)


@given(model=DENSE_MODELS)
def test_nodes_are_free_below_the_knee_only(model: SweepModel) -> None:
    knee = model.knee
    if knee:
        assert model.compute_seconds(knee) <= model.link_seconds * (1 + 1e-9)
        assert model.seconds(knee) == pytest.approx(model.seconds(1))
    assert model.compute_seconds(knee + 1) > model.link_seconds * (1 - 1e-9)


@given(model=MODELS, tokens=st.integers(1, 5000))
def test_more_tokens_are_never_faster(model: SweepModel, tokens: int) -> None:
    assert model.seconds(tokens) <= model.seconds(tokens + 1) * (1 + 1e-9)
    assert model.seconds(tokens) >= max(model.link_seconds, model.chunk_seconds(1)) * (1 - 1e-9)


@given(
    num_layers=st.integers(2, 80),
    device=st.integers(2, 100),
    host=st.integers(0, 100),
    more_device=st.integers(0, 30),
    more_host=st.integers(0, 30),
)
def test_more_memory_never_predicts_less_speed(
    num_layers: int, device: int, host: int, more_device: int, more_host: int
) -> None:
    sizes, unit = [10**9] * num_layers, 10**9 // 2

    def seconds(device: int, host: int) -> float:
        budgets = Budgets(device * unit + 2 * 10**9, host * unit, 4 * 10**9, num_layers)
        placement = place(sizes, Fixed(0, 0, 0, 0), budgets)
        return sweep_model(placement, Work(1e9, 10**9), FIXED, SPEEDS).seconds(64)

    assert seconds(device + more_device, host + more_host) <= seconds(device, host)


def test_the_price_list_shows_savings() -> None:
    sizes, fixed = [10**9] * 40, Fixed(0, 0, 0, 0)
    budgets = Budgets(device=10 * 10**9, host=20 * 10**9, ring=2 * 10**9, max_resident=40)

    def seconds(placement: Placement) -> float:
        return sweep_model(placement, Work(0, 0), FIXED, SPEEDS).link_seconds_of(1)

    bought = purchases(budgets, ("device", "host"), lambda budgets: place(sizes, fixed, budgets), seconds)
    before = place(sizes, fixed, budgets)
    assert [(p.kind, p.added_bytes // 10**9) for p in bought] == [
        ("device", 1),
        ("device", 4),
        ("host", 1),
        ("host", 4),
    ]
    assert bought[1].saved_seconds == pytest.approx(4.0)  # four layers less from a disk of 1 GB/s
    assert bought[3].saved_seconds == pytest.approx(4.0)  # and no more ahead on the host than before
    assert bought[1].sweep_seconds + bought[1].saved_seconds == before.num_bytes(Tier.DISK) / 1e9


def test_rates_include_the_draft_except_in_plain_decoding() -> None:
    model = SweepModel(FIXED, Work(0.001, 0), Speeds(Speed(1.0, "")), link_seconds=1.0)
    assert rate(model, 1, 64, draft_seconds=0.5).tokens_per_second == 1.0
    assert rate(model, 6, 64, draft_seconds=0.5).tokens_per_second == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--bits", "5"], "--bits: must be 4, 8, 16, got '5'"),
        (["--device", "tpu"], "--device: must be cpu, gpu, got 'tpu'"),
        (["--link-speed", "fast"], "--link-speed: must be a number, 0 or more, got 'fast'"),
        (["--compute-speed", "-1"], "--compute-speed: must be a number, 0 or more, got '-1'"),
        (["--device-memory", "lots"], "--device-memory: must be a size such as 512MB or 2GiB, got 'lots'"),
        (["--dtype", "int3"], "--dtype: must be auto, "),
        (["--device", "cpu", "--host-memory", "1GB"], "--host-memory: must not be given with --device cpu"),
        (["--device-memory", "8GB", "--kv-memory", "1MB"], "tokens, got 1000000; or choose a smaller"),
        ([*ELSEWHERE[2:]], "--device-memory: missing"),
        (["--device", "gpu", "--device-memory", "24GB"], "--host-memory: missing"),
        ([*ELSEWHERE[:4], "--compute-speed", "80"], "--host-link-speed: missing"),
        ([*ELSEWHERE[:6]], "--compute-speed: missing"),
        ([*ELSEWHERE, "--device-memory", "6GB"], "--device-memory: must be at least"),
    ],
)
def test_invalid_flags_are_named(flags: Sequence[str], message: str, llama_70b: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError) as refused:
        make_plan(settings_from(argument_parser().parse_args(["plan", llama_70b, *flags])))
    assert message in str(refused.value)


def test_a_missing_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="cannot be fetched, and is not in the local"):
        find_model("bough-tests/no-such-model")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        find_model(str(tmp_path))
    with pytest.raises(CheckpointError, match="must be a folder that exists"):
        find_model(str(tmp_path / "missing"))


def test_a_plan_shows_its_knee_the_gain_of_more_memory_and_draft_steps(
    llama_70b: str, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", llama_70b, *ELSEWHERE, "--bits", "4", "--draft", str(tiny), "--memory-speed", "900"])
    out = capsys.readouterr().out
    assert "<- knee" in out
    assert "+1 GB of host memory" in out
    assert "7 draft steps" in out


def test_a_plot_is_as_high_as_its_slowest_sweep() -> None:
    plot = text_plot(SweepModel(FIXED, Work(0.25 / 64, 0), Speeds(Speed(1.0, "")), 1.0), 1024)
    assert plot.splitlines()[0].strip().startswith("4 |")
    assert plot.count("K") == 1


def test_unspecified_speeds_are_measured(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "PROBE_SECONDS": 0.02,
        "DISK_SECONDS": 0.05,
        "COPY_BYTES": 1 << 20,
        "CACHE_BYTES": 1 << 16,
    }.items():
        monkeypatch.setattr(f"bough.model.sizes.hardware_probe.{name}", value)
    flags = ["--device", "cpu", "--kv-memory", "4MB", "--threads", "2", "--bits", "4", "--resident-layers", "0"]
    plan = run(capsys, str(tiny), *flags, "--draft", str(tiny))
    measured = {name for name, speed in plan["speeds"].items() if speed and speed["origin"].startswith("measured")}
    assert measured == {"compute", "disk", "memory", "unpack"}
    assert plan["draft"]["num_steps"] == 7
    assert plan["draft"]["step_seconds"] > 0


def test_a_fluctuating_disk_is_rated_by_its_best_third() -> None:
    steady = [Read(float(second), second + 1.0, 100) for second in range(9)]
    later = [Read(read.begin + 15, read.end + 15, 100) for read in steady]
    assert best_rate(steady) == pytest.approx(100)
    assert best_rate([*steady, *later]) == pytest.approx(100), "though it stood still in between"
    assert best_rate([Read(0.0, 2.0, 100)]) == pytest.approx(50)
    together = [Read(2.0 * turn, 2.0 * turn + 2.0, 100) for turn in range(9) for _ in range(8)]
    assert best_rate(together) == pytest.approx(400), "eight that end at once are no faster than they are"


def test_measuring_a_disk_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bough.model.sizes.hardware_probe.STAND_IN_BYTES", STAND_IN_BYTES // 32)
    monkeypatch.setattr("bough.model.sizes.hardware_probe.DISK_SECONDS", 0.05)
    assert disk_speed(tmp_path, 2).per_second > 1e6
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="--link-speed"):
        disk_speed(tmp_path / "missing", 2)


@pytest.mark.parametrize("num_layers", [0, -1])
def test_a_model_without_layers_is_refused_by_name(tiny: Path, tmp_path: Path, num_layers: int) -> None:
    config = json.loads((tiny / "config.json").read_text()) | {"num_hidden_layers": num_layers}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"config.json: num_hidden_layers must be at least 1, got {num_layers}"):
        load_config(tmp_path)
