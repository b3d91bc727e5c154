"""Checkpoints whose weights are packed as others pack them, written from a model's folder, and what is in them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig

from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.checkpoint.safetensors_folder import INDEX_NAME
from bough.model.checkpoint.tensor_source import TensorSource
from bough.model.loading.loading import build_skeleton
from bough.model.sizes.model_sizes import find_model, model_shapes
from loadtest.common.packed_model import pack
from target_worker.link.layer_extents import plan_layer
from tests.fakes.model.published_formats import FORMATS, GROUP

TOKENS = [5, 6, 7, 200, 31]
MIXTRAL = MixtralConfig(
    vocab_size=262,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    max_position_embeddings=256,
    initializer_range=0.2,
    eos_token_id=261,
)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def rewrite(
    source: Path, folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, object] | None
) -> Path:
    """The same model with other tensors and another quantization_config."""
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.name != INDEX_NAME:
            shutil.copyfile(file, folder / file.name)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config", None)
    if quantization:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def raw_parts(source: TensorSource) -> list[torch.Tensor]:
    return [torch.from_numpy(np.fromfile(p.file, np.uint8, p.num_bytes, offset=p.offset)) for p in source.places]


def gptq(
    weight: torch.Tensor, bits: int, group: int, rng: np.random.Generator, in_order: bool
) -> tuple[dict, torch.Tensor]:
    """Packs a matrix as GPTQModel does, badly; returns the tensors and the values that they encode."""
    outputs, inputs = weight.shape
    highest = 2**bits - 1
    groups = np.arange(inputs) // group if in_order else rng.permutation(np.arange(inputs) // group)
    scales = torch.from_numpy(rng.uniform(0.1, 1.0, (inputs // group, outputs)) / 2**bits / 4).half()
    zeros = rng.integers(1, highest, (inputs // group, outputs))
    integers = rng.integers(0, highest + 1, (inputs, outputs))
    value = torch.from_numpy(integers - zeros[groups]).float() * scales[groups].float()
    per_word = 32 // bits
    words = np.zeros((inputs // per_word, outputs), np.uint32)
    for k in range(inputs):
        words[k // per_word] |= integers[k].astype(np.uint32) << np.uint32(bits * (k % per_word))
    packed_zeros = np.zeros((inputs // group, outputs // per_word), np.uint32)
    for n in range(outputs):
        packed_zeros[:, n // per_word] |= (zeros[:, n] - 1).astype(np.uint32) << np.uint32(bits * (n % per_word))
    tensors = {
        "qweight": torch.from_numpy(words.view(np.int32)),
        "qzeros": torch.from_numpy(packed_zeros.view(np.int32)),
        "scales": scales,
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }
    return tensors, value.t()


def awq(
    weight: torch.Tensor, bits: int, group: int, rng: np.random.Generator, in_order: bool
) -> tuple[dict, torch.Tensor]:
    """Packs a matrix as AutoAWQ does, badly."""
    outputs, inputs = weight.shape
    scales = torch.from_numpy(rng.uniform(0.005, 0.02, (inputs // group, outputs))).half()
    zeros = rng.integers(0, 16, (inputs // group, outputs))
    integers = rng.integers(0, 16, (inputs, outputs))

    def words(values: np.ndarray) -> torch.Tensor:
        out = np.zeros((len(values), outputs // 8), np.uint32)
        for i, column in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):  # AutoAWQ's order
            out |= values[:, column::8].astype(np.uint32) << np.uint32(4 * i)
        return torch.from_numpy(out.view(np.int32))

    value = torch.from_numpy(integers - zeros.repeat(group, 0)).float() * scales.float().repeat_interleave(group, 0)
    return {"qweight": words(integers), "qzeros": words(zeros), "scales": scales}, value.t()


def in_words(folder: Path, method: str, is_ordered: bool, source: Path, bits: int = 4) -> Path:
    """The model in a format of others; `is_ordered` inputs are in the order of their groups."""
    make, rng, packed = {"awq": awq, "gptq": gptq}[method], np.random.default_rng(5), {}
    for name, tensor in tensors_of(source).items():
        if "proj" not in name:
            packed[name] = tensor
            continue
        parts, _ = make(tensor, bits, GROUP, rng, is_ordered)
        packed |= {f"{name.removesuffix('.weight')}.{key}": data for key, data in parts.items()}
    quantization: dict[str, object] = {"quant_method": method, "bits": bits, "group_size": GROUP}
    if method == "awq":
        quantization["version"] = "gemm"
    return rewrite(source, folder, packed, quantization)


def packed_as(method: str, source: Path, folder: Path, bits: int = 4) -> Path:
    """The model packed by compressed-tensors, AWQ or GPTQ, or in one of FORMATS.

    In "gptq, unordered" inputs are not in the order of their groups.
    """
    if method in FORMATS:
        return stored_as(method, source, folder.parent, torch.float32)[0]
    if method == "compressed-tensors":
        return pack(source, bits, folder)
    return in_words(folder, method.removesuffix(", unordered"), "unordered" not in method, source, bits)


def stored_as(name: str, source: Path, folder: Path, dtype: torch.dtype) -> tuple[Path, Path]:
    """A model in one of FORMATS, and the same model written out in `dtype`, both in `folder`."""
    (quantization, store), rng = FORMATS[name], np.random.default_rng(7)
    packed, plain = {}, {}
    for tensor, weight in tensors_of(source).items():
        packed[tensor] = plain[tensor] = weight
        if "proj" in tensor or ".experts." in tensor:
            stored = store(*weight.shape, rng)
            del packed[tensor]
            packed |= {f"{tensor.removesuffix('weight')}{ending}": part for ending, part in stored.tensors.items()}
            plain[tensor] = stored.value.to(dtype)
    return rewrite(source, folder / "packed", packed, quantization), rewrite(source, folder / "plain", plain, None)


def require_same_sizes(file: Path) -> None:
    """A plan must have the bytes of the files."""
    planned = model_shapes(find_model(str(file)), "bfloat16", 0, 64)
    skeleton = build_skeleton(Checkpoint.open(file), torch.bfloat16)
    layers = [{place for slot in slots for place in slot.source.places} for slots in skeleton.layer_slots]
    assert planned.layer_bytes == tuple(sum(place.num_bytes for place in places) for places in layers)
    assert planned.description == skeleton.describe()
    real_scratch = max(plan_layer("", slots).scratch_bytes(torch.bfloat16) for slots in skeleton.layer_slots)
    assert real_scratch <= planned.scratch_bytes
