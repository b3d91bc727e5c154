"""Which of a checkpoint's layers there are to run."""

from __future__ import annotations

import json

from bough.config.cache_paths import EXPANSION_NAME
from bough.errors import ConfigError
from bough.model.architecture.architecture import load_config
from bough.model.checkpoint.checkpoint import Checkpoint


def working_layers(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Layers that change their input: all that are there, but for the identity copies of a block expansion."""
    if checkpoint.kept_layers is not None:
        return checkpoint.kept_layers
    manifest = checkpoint.folder / EXPANSION_NAME
    if manifest.is_file():
        return tuple(json.loads(manifest.read_text())["working_layers"])
    return tuple(range(load_config(checkpoint.folder).num_hidden_layers))


def kept_layers(checkpoint: Checkpoint, drop_layers: tuple[int, ...]) -> tuple[int, ...]:
    """The layers of a substitute without these, which are counted without identity copies.

    Raises:
        ConfigError: a layer to drop is not there, or none is left.
    """
    working = working_layers(checkpoint)
    wrong = [layer for layer in drop_layers if layer >= len(working)]
    if wrong:
        raise ConfigError(f"--drop-layers: {wrong[0]}; {checkpoint.folder.name} has layers 0 to {len(working) - 1}")
    kept = tuple(layer for index, layer in enumerate(working) if index not in set(drop_layers))
    if not kept:
        raise ConfigError(f"--drop-layers: all {len(working)} layers of {checkpoint.folder.name}; one has to be left")
    return kept
