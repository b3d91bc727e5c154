"""Draft models: any causal language model of Hugging Face's format, whole or as a substitute with layers left out."""

from __future__ import annotations

import json

import torch

from bough.demonstration import EXPANSION_NAME
from bough.errors import ConfigError
from bough.model.checkpoint import Checkpoint
from bough.model.loading import DTYPES, build_skeleton, load_config
from bough.model.runner import ResidentModel


def load_draft(checkpoint: Checkpoint, drop_layers: tuple[int, ...], dtype: str, device: torch.device) -> ResidentModel:
    """Loads the draft model for good. `drop_layers` makes it a substitute; they are counted without identity copies.

    Raises:
        CheckpointError: the checkpoint is damaged.
        ConfigError: a layer to drop is not there.
    """
    working = working_layers(checkpoint)
    wrong = [layer for layer in drop_layers if layer >= len(working)]
    if wrong:
        raise ConfigError(f"--drop-layers: {wrong[0]}; {checkpoint.folder.name} has layers 0 to {len(working) - 1}")
    kept = tuple(layer for index, layer in enumerate(working) if index not in set(drop_layers))
    return ResidentModel(build_skeleton(checkpoint, DTYPES[dtype], kept), device)


def working_layers(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Layers that change their input: all, but for the identity copies of a block-expanded checkpoint."""
    manifest = checkpoint.folder / EXPANSION_NAME
    if manifest.is_file():
        return tuple(json.loads(manifest.read_text())["working_layers"])
    return tuple(range(load_config(checkpoint.folder).num_hidden_layers))
