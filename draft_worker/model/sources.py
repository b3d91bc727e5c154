"""Loads draft models: any causal language model in Hugging Face's format, whole or a substitute without some layers."""

from __future__ import annotations

import json

import torch

from bough.config.cache_paths import EXPANSION_NAME
from bough.errors import ConfigError
from bough.model.architecture.architecture import load_config
from bough.model.backend import backend_of
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.loading.default_settings import chosen_dtype
from bough.model.loading.loading import DTYPES, Skeleton, build_skeleton
from bough.model.running.device import require_fast
from bough.model.running.runner import ResidentModel


def working_layers(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Layers that change their input: all but identity copies of a block expansion."""
    manifest = checkpoint.path / EXPANSION_NAME
    if manifest.is_file():
        return tuple(json.loads(manifest.read_text())["working_layers"])
    return tuple(range(load_config(checkpoint.path).num_hidden_layers))


def kept_layers(checkpoint: Checkpoint, drop_layers: tuple[int, ...]) -> tuple[int, ...]:
    """Layers of a substitute without `drop_layers`, which do not count identity copies.

    Raises:
        ConfigError: a layer to drop does not exist, or none is left.
    """
    working = working_layers(checkpoint)
    wrong = [layer for layer in drop_layers if layer >= len(working)]
    if wrong:
        name = checkpoint.name
        raise ConfigError(f"--drop-layers: must be 0 to {len(working) - 1} for {name}, got {wrong[0]}")
    kept = tuple(layer for index, layer in enumerate(working) if index not in set(drop_layers))
    if not kept:
        raise ConfigError(f"--drop-layers: must leave a layer of {checkpoint.name}, got all {len(working)}")
    return kept


def draft_skeleton(checkpoint: Checkpoint, drop_layers: tuple[int, ...], dtype: str, device: torch.device) -> Skeleton:
    """A draft without its weights; dropping layers makes a substitute. Layer numbers do not count identity copies.

    Raises:
        CheckpointError: the checkpoint is damaged.
        ConfigError: a layer to drop does not exist, or the device is slow in this type.
    """
    name = chosen_dtype(dtype, load_config(checkpoint.path), device.type)
    require_fast(name, device)
    skeleton = build_skeleton(checkpoint, DTYPES[name], kept_layers(checkpoint, drop_layers))
    if not skeleton.kv_shape().num_layers:
        raise ConfigError("--drop-layers: must leave a layer with attention, got all of them")
    return skeleton


def load_draft(
    checkpoint: Checkpoint, drop_layers: tuple[int, ...], dtype: str, device: torch.device, bits: str = "16"
) -> ResidentModel:
    """Load a resident draft model, as `draft_skeleton` and `with_weights` do."""
    return with_weights(draft_skeleton(checkpoint, drop_layers, dtype, device), device, bits)


def with_weights(skeleton: Skeleton, device: torch.device, bits: str) -> ResidentModel:
    """Load the weights. Products use 8 or 16 bits, or the faster ("auto"); 8 bits change guesses slightly.

    With "4" a packed model stays packed, with the guesses of 16 bits.

    Raises:
        CheckpointError: the checkpoint is damaged.
        ConfigError: 4 or 8 bits are not possible.
    """
    if bits == "4":
        require_packed(skeleton, device)
    return ResidentModel(skeleton, device, is_int8(skeleton, device, bits), bits == "4")


def require_packed(skeleton: Skeleton, device: torch.device) -> None:
    """Raise ConfigError if the model cannot stay packed."""
    if device.type == "cpu":
        raise ConfigError("--bits: must be auto, 8 or 16 on the CPU, got 4")
    if skeleton.quantization is None:
        raise ConfigError(
            f"--bits: must be auto or 16 for {skeleton.describe()}, which is not packed, got 4; use a "
            "checkpoint of it in 4 bits, such as GPTQ, AWQ or compressed-tensors"
        )


def is_int8(skeleton: Skeleton, device: torch.device, bits: str) -> bool:
    """Whether the setting means products in 8 bits. Raises ConfigError if it does and they are not possible."""
    backend = backend_of(device)
    is_possible = backend.compiles_int8(skeleton)
    if bits == "8" and not is_possible:
        raise ConfigError(
            f"--bits: must be 16 or auto for {skeleton.describe()} on {device.type}, got 8, which takes a Llama-like "
            "model whose sizes are multiples of 64, in bfloat16 on the CPU"
        )
    return is_possible and (bits == "8" or (bits == "auto" and backend.prefers_int8))
