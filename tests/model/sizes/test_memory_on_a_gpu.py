"""How a GPU's memory is divided among layers, KV and unpacking, and the default context of a target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from bough.config.processes import TargetConfig, parse
from bough.errors import ConfigError
from bough.model.backend import computing_by
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.checkpoint.container import TensorPlace
from bough.model.kv.session_kv import KVShape
from bough.model.loading.default_settings import GPU_ROWS, chosen_dtype, conversion, settled
from bough.model.loading.loading import build_skeleton
from bough.model.running.host_embeddings import embeddings_for_host, host_bytes
from bough.model.sizes import memory_budget
from bough.model.sizes.memory_budget import (
    activation_bytes,
    attention_bytes,
    budgets,
    device_budget,
    other_devices,
    with_kv_memory,
    with_sweep_tokens,
)
from bough.model.sizes.model_sizes import find_model, model_shapes
from bough.model.sizes.target_limits import TargetLimits
from bough.sizing.placement import HOST_SLABS, Budgets, Fixed, Placement, Tier, place, place_with
from loadtest.common.tiny_model import TINY, save_model
from tests.fakes.gpu.device_sweeps import Where, on_cpu, on_device
from tests.fakes.model.families import FAMILIES
from tests.fakes.model.headers import write_headers

GB = 1000**3
GPU = torch.device("cuda", 0)
CARD = 25_757_220_864  # bytes of an RTX 4090: 24,564 MiB
CONTEXT = 700_000_000  # of CUDA's context, its libraries, and a screen


def llama_70b(**changes: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_attention_heads=64,
        num_key_value_heads=8,
        num_hidden_layers=80,
        vocab_size=128256,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        **changes,
    )


def placed(monkeypatch: pytest.MonkeyPatch, folder: Path, *flags: str) -> Placement:
    """As a target places it on such a card with 128 GB of host memory."""
    monkeypatch.setattr(memory_budget, "free_device_bytes", lambda _: CARD - CONTEXT)
    monkeypatch.setattr(memory_budget, "free_memory", lambda: 128 * GB)
    found = find_model(str(folder))
    config = found.config
    settings = settled(parse(TargetConfig, "t", ["--model", "m", *flags], {}), config, "cuda")
    shapes = model_shapes(found, settings.dtype, 0, settings.rows, "cuda")
    device, host = device_budget(settings, GPU), memory_budget.host_budget(settings, is_gpu=True)
    settings = with_sweep_tokens(settings, config, shapes.kv, device)
    settings = with_kv_memory(settings, shapes.kv, 8192, device, host)
    others = other_devices(settings, config, shapes.kv, shapes.scratch_bytes, "cuda:0", 2)
    allowed = budgets(settings, shapes.layer_bytes, device, host)
    return place_with(shapes.layer_bytes, shapes.fixed(settings, True), allowed, others)


@pytest.fixture(scope="module")
def awq_70b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The headers of a 70B in 4 bits."""
    folder = tmp_path_factory.mktemp("awq") / "70b"
    return write_headers(folder, llama_70b(dtype="float16", quantization_config=AWQ), "awq 4 bits")


def test_a_card_of_24_gb_keeps_37_layers_of_a_70b_in_4_bits(awq_70b: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 0.8 of the memory and embeddings there it kept 18."""
    placement = placed(monkeypatch, awq_70b)
    assert len(placement.layers(Tier.RESIDENT)) >= 37
    assert placement.device_bytes <= 0.95 * (CARD - CONTEXT)
    assert placement.fixed.host_embeddings == 2 * 8192 * 128256


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}


@pytest.mark.parametrize(("backend", "scratch"), [("triton", 0), ("cublas", 2 * 8192 * 28672)])
def test_one_unpacked_matrix_has_room_if_there_is_any(
    backend: str, scratch: int, awq_70b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer in 16 bits is 1.7 GB, the size of three or four in 4 bits."""
    with computing_by(backend):
        placement = placed(monkeypatch, awq_70b, "--kv-memory", "2GB")
    assert placement.fixed.scratch == scratch
    assert len(placement.layers(Tier.RESIDENT)) >= 38


@pytest.mark.parametrize(("context", "num_bytes"), [(768, 0), (8192, 2**26), (200_000, 4 * 16 * 64 * 196 * 130)])
def test_results_of_parts_of_long_contexts_have_room(context: int, num_bytes: int) -> None:
    """64 MiB, or those of one tile of rows."""
    config, limits = llama_70b(), TargetLimits(256, 1024, 256, context)
    assert attention_bytes(config, KVShape.of(config, torch.bfloat16), limits, num_threads=0) == num_bytes


@pytest.mark.parametrize("num_sessions", [1, 2, 4])
def test_kv_memory_can_be_given_in_sessions(num_sessions: int, awq_70b: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which each takes layers from the card, by what its tokens take."""
    flags = "--max-context", "8000", "--max-nodes", "192"
    placement = placed(monkeypatch, awq_70b, *flags, "--kv-sessions", str(num_sessions))
    assert placement.fixed.kv == num_sessions * 8192 * 320 * 1024
    assert len(placement.layers(Tier.RESIDENT)) >= 42 - 7 * num_sessions


def test_kv_memory_is_counted_once(awq_70b: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "--kv-sessions", "2", "--kv-memory", "4GB"
    with pytest.raises(ConfigError, match=r"^--kv-sessions: must be left out with --kv-memory \(4.00 GB\), .*, got 2"):
        placed(monkeypatch, awq_70b, *flags)


def test_the_ring_to_the_host_leaves_its_memory_to_layers() -> None:
    """16 bits of a 70B with 100 GB of host memory: it once had 14 slabs, and 32 layers crossed from disk."""
    placement = place([1_711_000_000] * 80, Fixed(0, 0, 0, 0), Budgets(22 * GB, 100 * GB, 6 * GB, 99))
    assert placement.num_host_slabs == HOST_SLABS
    assert len(placement.layers(Tier.DISK)) <= 80 - len(placement.layers(Tier.RESIDENT)) - 55
    small = place([10_000_000] * 80, Fixed(0, 0, 0, 0), Budgets(GB // 10, 6 * GB // 10, GB, 99))
    assert small.num_host_slabs > HOST_SLABS, "of small layers as many are ahead as before"


def test_rows_and_data_type_follow_device_and_checkpoint() -> None:
    config, settings = llama_70b(dtype="float16"), parse(TargetConfig, "t", ["--model", "m"], {})
    assert [settled(settings, config, where).dtype for where in ("cuda", "cpu")] == ["float16", "bfloat16"]
    assert [settled(settings, config, where).rows for where in ("cuda", "cpu")] == [GPU_ROWS, 64]
    told = parse(TargetConfig, "t", ["--model", "m", "--rows", "32", "--dtype", "float32"], {})
    assert (settled(told, config, "cuda").rows, settled(told, config, "cuda").dtype) == (32, "float32")
    assert chosen_dtype("auto", llama_70b(), "cuda") == "bfloat16"


def test_large_sweeps_take_little_memory(awq_70b: Path) -> None:
    """Logits are for the nodes of trees only, of which there are no more; a small card has sweeps of fewer tokens."""
    config, settings = find_model(str(awq_70b)).config, parse(TargetConfig, "t", ["--model", "m"], {})
    shape, settings = KVShape.of(config, torch.float16), settled(settings, config, "cuda")

    def tokens(settings: TargetConfig, memory: int) -> int:
        return with_sweep_tokens(settings, config, shape, memory).max_sweep_tokens

    assert [tokens(settings, memory * GB) for memory in (24, 14, 6)] == [4096, 2048, 1024]
    assert tokens(replace(settings, max_sweep_tokens=3000), GB) == 3000
    few, many = (
        activation_bytes(config, shape, TargetLimits.of(replace(settings, max_sweep_tokens=tokens), 8192))
        for tokens in (1024, 4096)
    )
    assert few < 0.71 * GB
    assert many - few < 0.16 * GB
    one = TargetLimits.of(replace(settings, max_sweep_tokens=4096, kv_sessions=1, max_nodes=64), 8192)
    assert one.max_logit_rows == 64
    assert TargetLimits.of(replace(settings, max_nodes=2000), 8192).max_logit_rows == 2000, "of one tree"
    assert TargetLimits.of(replace(settings, max_nodes=2000), 8192, is_given=False).sweep_tokens(0.0) == 2000
    assert settled(parse(TargetConfig, "t", ["--model", "m"], {}), config, "cpu").max_sweep_tokens == 1024


def test_a_conversion_is_reported() -> None:
    def of(name: str, dtype: str, size: int) -> TensorPlace:
        return TensorPlace(name, Path(), 0, size, dtype, (size // 2,))

    places = [of("a", "F16", GB), of("norm", "F32", 1000), of("b.scales", "F32", GB)]
    assert conversion(places, torch.float16) == ""
    assert conversion(places, torch.bfloat16) == (
        "weights are converted: 1.00 GB of float16, 0.00 MB of float32, computed in bfloat16; --dtype float16 would "
        "use most of them unconverted"
    )


@pytest.mark.parametrize("is_tied", [False, True])
def test_embeddings_are_on_the_host_unless_the_head_shares_their_matrix(is_tied: bool, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", LlamaConfig(**{**TINY.to_dict(), "tie_word_embeddings": is_tied}))
    skeleton = build_skeleton(Checkpoint.open(folder), torch.bfloat16)
    assert embeddings_for_host(skeleton.model, "cpu") is None
    assert host_bytes(skeleton, "cuda") == (0 if is_tied else 2 * 262 * 64)
    shapes = model_shapes(find_model(str(folder)), "bfloat16", 0, 64, "cuda")
    assert shapes.host_bytes == host_bytes(skeleton, "cuda")


def test_float16_on_the_device_is_close_to_the_cpus_results(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", FAMILIES["llama"])
    mine, theirs = on_device(folder, Where(), torch.float16), on_cpu(folder, torch.float32)
    assert float((mine - theirs).abs().max()) < 0.02 * float(theirs.abs().max())


SHAPE = KVShape(80, 8, 128, torch.bfloat16)  # of a 70B: 327,680 bytes a token


def with_default_context(num_positions: int, memory: int, *flags: str) -> TargetConfig:
    config = parse(TargetConfig, "t", ["--model", "m", *flags], {})
    return with_kv_memory(config, SHAPE, num_positions, memory, 0)


def test_the_default_context_is_the_models_own_if_memory_allows() -> None:
    """It was 2,048 tokens for any model: fewer than the first request of an agent."""
    config = with_default_context(8192, 24 * GB)
    assert config.max_context == 8192
    assert config.kv_memory == (8192 + 512) * SHAPE.row_bytes
    assert with_default_context(8192, 64 * GB, "--kv-memory", "8GB").max_context == 8192


def test_the_default_context_is_what_kv_memory_holds_if_that_is_less() -> None:
    config = with_default_context(131_072, 24 * GB)
    assert (config.kv_memory, config.max_context) == (3 * GB, 8448)
    assert TargetLimits.of(config, 131_072).num_rows(SHAPE.row_bytes, config.kv_memory) >= 8448 + 512
    assert with_default_context(131_072, 24 * GB, "--kv-memory", "1GB").max_context == 2304
    assert with_default_context(131_072, 4 * GB).max_context == 2048, "the least, for which there was room before"


def test_max_context_is_accepted_up_to_the_models_own_limit() -> None:
    assert with_default_context(8192, 24 * GB, "--max-context", "3000").max_context == 3000
    assert with_default_context(8192, 24 * GB, "--max-context", "9000").max_context == 8192
    assert with_default_context(131_072, 24 * GB, "--max-context", "32768").kv_memory == (32768 + 512) * SHAPE.row_bytes


@pytest.mark.parametrize("flags", [(), ("--max-context", "4096")])
def test_the_requested_number_of_sessions_has_room_for_the_context(flags: tuple[str, ...]) -> None:
    config = with_default_context(131_072, 200 * GB, "--kv-sessions", "4", *flags)
    limits = replace(TargetLimits.of(config, 131_072))
    assert limits.num_rows(SHAPE.row_bytes, config.kv_memory) >= 4 * limits.slot_rows
    assert config.max_context >= 4096
