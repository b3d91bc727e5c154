"""Launches of a layer on the pretended device: of a dense model, a packed one and a mixture of experts."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from transformers import PretrainedConfig

from loadtest.common.tiny_model import TINY, save_model
from tests.fakes.gpu.device_sweeps import Where, on_the_device, three_sweeps
from tests.fakes.gpu.pretend import device, notes, pretending
from tests.fakes.model.families import FAMILIES
from tests.fakes.model.packed_files import packed_as

FEWER, MORE = 2, 4  # layers of the models whose launches are compared
ALL_RESIDENT = Where(max_resident=MORE)
PACKING = "compressed-tensors"
MIXTURE = "qwen3 moe"


def launches_per_layer(folder: Path) -> dict[str, int]:
    """Launches of one more layer in a sweep of 31 rows, with all weights on the device; `folder` is for the models."""
    kinds = {"dense": (TINY, ""), "packed": (TINY, PACKING), "mixture": (FAMILIES[MIXTURE], "")}
    return {name: _of_a_layer(folder / name, config, packing) for name, (config, packing) in kinds.items()}


def _of_a_layer(folder: Path, config: PretrainedConfig, packing: str) -> int:
    fewer, more = (_of_a_sweep(folder / str(num), config, packing, num) for num in (FEWER, MORE))
    each, rest = divmod(more - fewer, MORE - FEWER)
    assert not rest, f"{more} launches with {MORE} layers and {fewer} with {FEWER}: layers differ"
    return each


def _of_a_sweep(folder: Path, config: PretrainedConfig, packing: str, num_layers: int) -> int:
    config = copy.deepcopy(config)
    config.num_hidden_layers = num_layers
    model = save_model(folder / "model", config, dtype=torch.bfloat16)
    if packing:
        model = packed_as(packing, model, folder / "packed")
    with pretending(), on_the_device(model, ALL_RESIDENT, torch.bfloat16, 64) as streamed:
        three_sweeps(streamed, device(), counting=True)
        return sum(notes.launches.values())
