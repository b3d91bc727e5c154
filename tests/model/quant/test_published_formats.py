"""Weights of compressed-tensors and FP8 checkpoints: bit for bit what the written-out weights give."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig

from bough.errors import CheckpointError
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.checkpoint.safetensors_folder import read_header
from bough.model.checkpoint.tensor_source import FreshMemory, TensorSource
from bough.model.loading.loading import build_skeleton, logical_sources
from bough.model.quant.formats import FORMATS as REGISTERED
from bough.model.quant.formats import format_of
from bough.model.quant.fp8 import Fp8Format
from bough.model.quant.modelopt import ModeloptFormat
from loadtest.common.tiny_model import save_model
from tests.fakes.gpu.device_sweeps import on_cpu, three_sweeps
from tests.fakes.model.families import FAMILIES
from tests.fakes.model.packed_files import (
    MIXTRAL,
    raw_parts,
    require_same_sizes,
    rewrite,
    stored_as,
    tensors_of,
)
from tests.fakes.model.published_formats import FLOAT8, FORMATS, FP8, GROUP, INT4, compressed, words
from tests.fakes.models import CPU, streamed

METHODS = {each.method: each for each in REGISTERED}


def opened(tensors: dict[str, torch.Tensor], quantization: dict[str, Any], folder: Path) -> dict[str, TensorSource]:
    """The values of a file with these tensors."""
    file, method = folder / "model.safetensors", METHODS[quantization["quant_method"]]
    save_file(tensors, file)
    return logical_sources(Checkpoint(folder, read_header(file)), method.of(quantization, "config.json"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_has_the_bits_of_its_documented_layout(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Of 100 outputs, which fill no whole words and blocks; rounded to float32, and then once more."""
    quantization, store = FORMATS[name]
    stored = store(100, 96, np.random.default_rng(len(name)))
    sources = opened({f"m.x.{ending}": part for ending, part in stored.tensors.items()}, quantization, tmp_path)
    ((found, source),) = sources.items()
    value = source.value(raw_parts(source), dtype, FreshMemory(CPU))
    assert found == "m.x.weight"
    assert torch.equal(value, stored.value.to(dtype))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["W4A16, by g_idx", "W8A16", "int8", "FP8, tensors", "NVFP4"])
def test_a_packed_model_gives_the_results_of_its_unpacked_weights(name: str, tiny: Path, tmp_path: Path) -> None:
    """Plain and with trees, streamed and from memory, in the same bits."""
    packed, plain = stored_as(name, tiny, tmp_path, torch.bfloat16)
    wanted = on_cpu(plain, torch.bfloat16)
    assert torch.equal(on_cpu(packed, torch.bfloat16), wanted)
    with streamed(packed, torch.bfloat16, max_resident=4) as model:
        assert torch.equal(three_sweeps(model, CPU).float(), wanted)


@pytest.mark.parametrize("name", ["W4A16, asymmetric", "DeepSeek", "ModelOpt"])
def test_packed_experts_give_the_results_of_unpacked_ones(name: str, tmp_path: Path) -> None:
    packed, plain = stored_as(name, save_model(tmp_path / "mixtral", MIXTRAL), tmp_path, torch.bfloat16)
    with streamed(packed, torch.bfloat16, expert_slabs=8) as model:
        assert torch.equal(three_sweeps(model, CPU).float(), on_cpu(plain, torch.bfloat16))
    require_same_sizes(packed)


def test_fp8_experts_in_one_tensor_give_the_results_of_unpacked_ones(tmp_path: Path) -> None:
    """One of them comes at a time, too."""
    source, (quantization, store) = save_model(tmp_path / "qwen3", FAMILIES["qwen3 moe"]), FORMATS["DeepSeek"]
    packed, plain, rng = tensors_of(source), tensors_of(source), np.random.default_rng(8)
    for layer, (name, matrices) in product(range(4), (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",)))):
        stack, prefix = [], f"model.layers.{layer}.mlp.experts"
        for expert in range(6):
            names = [f"{prefix}.{expert}.{matrix}_proj.weight" for matrix in matrices]
            outputs, inputs = packed[names[0]].shape
            stack.append(store(len(names) * outputs, inputs, rng))
            plain |= dict(zip(names, stack[-1].value.bfloat16().split(outputs), strict=True))
            packed = {key: tensor for key, tensor in packed.items() if key not in names}
        for ending in ("", "_scale_inv"):
            packed[f"{prefix}.{name}{ending}"] = torch.stack([one.tensors[f"weight{ending}"] for one in stack])
    folder = rewrite(source, tmp_path / "packed", packed, quantization)
    with streamed(folder, torch.bfloat16, expert_slabs=8) as model:
        wanted = on_cpu(rewrite(source, tmp_path / "plain", plain, None), torch.bfloat16)
        assert torch.equal(three_sweeps(model, CPU).float(), wanted)


@pytest.mark.parametrize(
    "name",
    ["W4A16, asymmetric", "W4A16, by g_idx", "W4A16, channels", "FP8, tensors", "FP8, channels", "DeepSeek", "NVFP4"],
)
def test_a_plan_uses_the_files_sizes(name: str, tiny: Path, tmp_path: Path) -> None:
    require_same_sizes(stored_as(name, tiny, tmp_path, torch.bfloat16)[0])


@pytest.mark.parametrize(
    ("name", "field"),
    [("int8", "input_activations"), ("DeepSeek", "activation_scheme"), ("ModelOpt", "kv_cache_scheme and quant_algo")],
)
def test_activations_that_stay_unquantized_are_reported(
    name: str, field: str, tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And their scales are not among the tensors that have no place."""
    packed, plain = stored_as(name, tiny, tmp_path, torch.float32)
    quantization = dict(FORMATS[name][0])
    if name == "int8":
        group = {**quantization["config_groups"]["group_0"], "input_activations": {"num_bits": 8, "dynamic": False}}
        quantization |= {"config_groups": {"group_0": group}, "kv_cache_scheme": {"num_bits": 8}}
    scales = {f"model.layers.0.self_attn.{of}_scale": torch.ones(1) for of in ("q_proj.input", "k", "v")}
    folder = rewrite(packed, tmp_path / "static", tensors_of(packed) | scales, quantization)
    with caplog.at_level(logging.WARNING):
        skeleton = build_skeleton(Checkpoint.open(folder), torch.float32)
    assert not skeleton.unused
    (said,) = (record.message for record in caplog.records)
    assert f"weights are read exactly as stored; values that {field}" in said
    assert "stay in the compute dtype" in said
    assert not build_skeleton(Checkpoint.open(plain), torch.float32).unused


def weights(**changed: Any) -> dict[str, Any]:
    return compressed("pack-quantized", {**INT4, **changed})


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq", "bits": 3}, r"bits: must be 4 or 8, got 3"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            r"checkpoint_format: must be 'gptq' or 'gptq_v2', got 'marlin'",
        ),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, r"version: must be 'gemm', got 'gemv'"),
        ({"quant_method": "bitsandbytes"}, r"quant_method: must be one of .*, compressed-tensors, fp8, .*bitsandbytes"),
        (compressed("nvfp4-pack-quantized", INT4), r"group_0\.weights\.type: must be 'float', got 'int'"),
        (compressed("marlin-24", INT4), r"config\.format: must be .* or 'nvfp4-pack-quantized', got 'marlin-24'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, r"quant_algo: must be NVFP4 or FP8, got 'W4A8_AWQ'"),
        (compressed("pack-quantized", FLOAT8), r"group_0\.weights\.type: must be 'int', got 'float'"),
        (
            compressed("float-quantized", {**FLOAT8, "num_bits": 4}),
            r"group_0\.weights\.num_bits: must be 8, got 4",
        ),
        (weights(num_bits=3), r"weights\.num_bits: must be 4 or 8, got 3"),
        (weights(strategy="tensor_group"), r"weights\.strategy: must be 'group' or .*, got 'tensor_group'"),
        (weights(group_size=0), r"weights\.group_size: must be at least 1, got 0"),
        (weights(dynamic=True), r"weights\.dynamic: must be False, got True"),
        (weights(codebook=2), r"weights: must have no fields but num_bits, .*, got codebook"),
        (
            compressed("int-quantized", {**INT4, "symmetric": False}),
            r"weights\.symmetric: must be True, got False",
        ),
        (
            compressed("float-quantized", {**FLOAT8, "strategy": "block", "block_structure": [128]}),
            r"weights\.block_structure: must be the outputs and inputs of a block, .* got \[128\]",
        ),
        ({**weights(), "config_groups": {}}, r"config_groups: must be groups of modules by name, got \{\}"),
        ({**weights(), "config_groups": {"W4A16": ["Linear"]}}, r"config_groups\.W4A16: must be an object"),
        (
            {**weights(), "sparsity_config": {"format": "sparse-24-bitmask"}},
            r"sparsity_config\.format: must be 'dense', got 'sparse-24-bitmask'",
        ),
        ({**weights(), "sparsity_config": ["x"]}, r"sparsity_config\.format: must be 'dense', got \['x'\]"),
        ({**weights(), "transform_config": {"config_groups": {}}}, r"transform_config: must be empty"),
        ({**FP8, "fmt": "e5m2"}, r"fmt: must be 'e4m3', got 'e5m2'"),
        ({**FP8, "expert_dtype": "fp4"}, r"expert_dtype: must be 'fp8', got 'fp4'"),
        ({**FP8, "weight_block_size": [128, 0]}, r"weight_block_size: must be the outputs and inputs of a block"),
    ],
)
def test_unsupported_settings_of_a_configuration_are_named(quantization: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        format_of(PretrainedConfig(quantization_config=quantization), Path())


def test_modelopts_own_file_is_used_if_config_json_has_no_settings(tmp_path: Path) -> None:
    file, config = tmp_path / "hf_quant_config.json", PretrainedConfig()
    fields = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": fields}))
    format_ = format_of(config, tmp_path)
    assert format_ == ModeloptFormat.of(fields, "")
    assert isinstance(format_of(PretrainedConfig(quantization_config=FP8), tmp_path), Fp8Format)
    file.write_text(json.dumps({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}))
    assert format_of(config, tmp_path) is None
    file.write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: quantization\.quant_algo: must be NVFP4 or FP8"):
        format_of(config, tmp_path)
    file.write_text("[]")
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: must be JSON with an object quantization"):
        format_of(config, tmp_path)


@pytest.mark.parametrize(
    ("name", "ending", "change", "message"),
    [
        ("W4A16", "scale", None, r"x\.weight_scale, which belongs to x\.weight_packed, is missing"),
        ("W4A16", "scale", lambda t: t[:, :1], r"weight_scale must have shape \[100, 3\], got \[100, 1\]"),
        ("W4A16", "scale", torch.Tensor.int, r"weight_scale must be BF16 or F16 or F32 or F8_E8M0, got I32"),
        ("W4A16", "shape", lambda t: t - 1, r"weight_shape must be \[100, 96\], as its numbers are, got \[99, 95\]"),
        ("W4A16", "shape", lambda t: t.repeat(2), r"weight_shape must have shape \[2\], got \[4\]"),
        ("W4A16, asymmetric", "zero_point", None, r"x\.weight_zero_point, which belongs to .* is missing"),
        ("W4A16, asymmetric", "zero_point", lambda t: t[1:], r"zero_point must have shape \[13, 3\], got \[12, 3\]"),
        ("W4A16, by g_idx", "g_idx", None, r"x\.weight_g_idx, which belongs to .* is missing"),
        ("W4A16, by g_idx", "g_idx", lambda t: t.clamp(max=1) + 2, r"weight_g_idx: groups must be 0 to 2, got 3"),
        ("FP8, channels", "scale", None, r"x\.weight_scale, which belongs to x\.weight, is missing"),
        ("FP8, channels", "", lambda t: t.view(torch.int8), r"x\.weight must be F8_E4M3, got I8"),
        ("FP8, tensors", "scale", lambda t: t.expand(2), r"weight_scale must have shape \[1\], got \[2\]"),
        ("NVFP4", "global_scale", None, r"x\.weight_global_scale, which belongs to x\.weight_packed, is missing"),
        ("NVFP4", "scale", torch.Tensor.float, r"weight_scale must be F8_E4M3, got F32"),
        ("ModelOpt", "scale", lambda t: t[:, :3], r"weight_scale must have shape \[100, 6\], got \[100, 3\]"),
        ("ModelOpt", "scale_2", lambda t: t.repeat(2), r"weight_scale_2 must have shape \[1\], got \[2\]"),
        ("DeepSeek", "scale_inv", None, r"x\.weight_scale_inv, which belongs to x\.weight, is missing"),
        ("DeepSeek", "", lambda t: t[None], r"x\.weight must be a matrix, got shape \[1, 100, 96\]"),
    ],
)  # fmt: skip
def test_a_missing_or_wrong_tensor_is_named(
    name: str, ending: str, change: Callable[[torch.Tensor], torch.Tensor] | None, message: str, tmp_path: Path
) -> None:
    quantization, store = FORMATS[name]
    tensors = {f"x.{key}": tensor for key, tensor in store(100, 96, np.random.default_rng(0)).tensors.items()}
    victim = f"x.weight{ending and '_'}{ending}"
    before = tensors.pop(victim)
    tensors |= {victim: change(before).contiguous()} if change else {}
    with pytest.raises(CheckpointError, match=message):
        opened(tensors, quantization, tmp_path)


def test_experts_without_their_own_scales_are_named(tmp_path: Path) -> None:
    tensors = {"x_proj": torch.zeros(2, 8, 8).to(torch.float8_e4m3fn), "x_proj_scale_inv": torch.ones(3)}
    with pytest.raises(CheckpointError, match=r"x_proj and x_proj_scale_inv must have .* \[2, 8, 8\] and \[3\]"):
        opened(tensors, FP8, tmp_path)


def test_a_tensor_without_a_target_group_is_named(tmp_path: Path) -> None:
    quantization = compressed("pack-quantized", INT4)
    quantization["config_groups"]["group_0"]["targets"] = ["re:.*mlp.*"]
    tensors = words(4, GROUP)(100, 96, np.random.default_rng(0)).tensors
    with pytest.raises(CheckpointError, match=r"config_groups has no target for tensor x\.weight_packed"):
        opened({f"x.{ending}": tensor for ending, tensor in tensors.items()}, quantization, tmp_path)


def test_unset_group_indices_are_ignored(tmp_path: Path) -> None:
    """The library once wrote -1 for each input of a weight whose groups are consecutive."""
    stored = words(4, GROUP)(8, 96, np.random.default_rng(0))
    tensors = {f"x.{ending}": tensor for ending, tensor in stored.tensors.items()}
    tensors["x.weight_g_idx"] = torch.full((96,), -1, dtype=torch.int32)
    (source,) = opened(tensors, compressed("pack-quantized", INT4), tmp_path).values()
    assert torch.equal(source.value(raw_parts(source), torch.float32, FreshMemory(CPU)), stored.value)
