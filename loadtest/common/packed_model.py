"""Writes a model's layers in 4 or 8 bits, as llm-compressor does: symmetric integers in groups of inputs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from bough.model.checkpoint.safetensors_folder import INDEX_NAME

GROUP = 32  # inputs that share a scale
EXPERTS = ".experts."


def quantization(bits: int, ignored: Sequence[str] = ()) -> dict[str, Any]:
    """The `quantization_config` of what `pack` writes; modules that are `ignored` stay as they are."""
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    group = {"targets": ["Linear"], "weights": weights}
    fields = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"layers": group}}
    return {**fields, "ignore": list(ignored)}


def quantized(weight: torch.Tensor, bits: int) -> dict[str, torch.Tensor]:
    """The tensors of a matrix (outputs, inputs) by what follows its name: numbers in words of 32 bits, and scales."""
    outputs, inputs = weight.shape
    highest = 2 ** (bits - 1)
    groups = weight.float().view(outputs, inputs // GROUP, GROUP)
    scales = (groups.abs().amax(2) / (highest - 1)).clamp_(min=1e-6).to(weight.dtype)
    numbers = (groups / scales.float()[:, :, None]).round_().clamp_(-highest, highest - 1) + highest
    words = numbers.to(torch.uint8).view(outputs, inputs)
    if bits == 4:
        words = words[:, ::2] | words[:, 1::2] << 4
    return {"_packed": words.contiguous().view(torch.int32), "_scale": scales}


def pack(source: Path, bits: int, folder: Path) -> Path:
    """Write a model folder whose decoder layers' matrices are packed, those of experts included."""
    folder.mkdir(parents=True)
    packed, ignored = dict[str, torch.Tensor](), list[str]()
    for file in source.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            is_matrix = tensor.dim() == 2 and ".layers." in name and ("proj" in name or EXPERTS in name)
            is_packed = is_matrix and tensor.shape[1] % GROUP == 0
            if tensor.dim() == 2 and ".layers." in name and not is_packed:
                ignored.append("re:.*" + re.escape(name.removesuffix(".weight")[name.find("layers.") :]))
            parts = quantized(tensor, bits) if is_packed else {"": tensor}
            packed |= {name + ending: part for ending, part in parts.items()}
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name != INDEX_NAME:
            shutil.copyfile(file, folder / file.name)
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": quantization(bits, ignored)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
