"""Chooses the layers of a checkpoint that run."""

from __future__ import annotations

import json

from bough.config.cache_paths import EXPANSION_NAME
from bough.errors import ConfigError
from bough.model.architecture.architecture import load_config
from bough.model.checkpoint.checkpoint import Checkpoint


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
