"""Which layers to leave out: one after another, each time the one whose loss costs least, by measurement."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from bough.distill.evaluate import Agreement, agreement
from bough.distill.rows import Rows
from bough.distill.teacher import Network
from bough.errors import ConfigError
from bough.model.files import replace

CHOOSING_ROWS = 3  # of text, on which the choice is made
SHORTLIST = 12  # layers that are cheapest alone: those that are tried after the first


def choose_layers(
    teacher: Network, num_layers: int, rows: Rows, opening: torch.Tensor, folder: Path, report: Callable[[str], None]
) -> tuple[int, ...]:
    """The layers to drop so that `num_layers` are left; `report` hears of each step. The teacher is left as it was.

    The choice is kept in `folder`, where the text is too, and not made again.

    Raises:
        ConfigError: that choice cannot be read.
    """
    file = folder / f"dropped-for-{num_layers}.json"
    if file.is_file():
        return _chosen_before(file, len(teacher.layers), num_layers)
    layers, types = list(teacher.layers), getattr(teacher.skeleton.config, "layer_types", None)
    dropped: list[int] = []
    candidates = list(range(len(layers)))
    while len(layers) - len(dropped) > num_layers:
        trials: dict[int, Agreement] = {}
        for layer in candidates:
            _use(teacher, layers, types, {*dropped, layer})
            trials[layer] = agreement(teacher, rows, opening)
        _use(teacher, layers, types, set())
        ranked = sorted(candidates, key=lambda layer: trials[layer].loss)
        candidates = ranked[1 : max(SHORTLIST, len(layers) - num_layers)]
        dropped.append(ranked[0])
        report(f"without layers {', '.join(map(str, sorted(dropped)))}: {trials[ranked[0]]}")
    replace(file, lambda partial: partial.write_text(json.dumps(sorted(dropped))))
    return tuple(sorted(dropped))


def _chosen_before(file: Path, num_all: int, num_left: int) -> tuple[int, ...]:
    try:
        dropped = json.loads(file.read_text())
    except (OSError, ValueError) as exc:
        raise ConfigError(f"--data: {file} is damaged: {exc}; without it the layers are chosen anew") from exc
    is_choice = isinstance(dropped, list) and all(type(layer) is int and 0 <= layer < num_all for layer in dropped)
    if not is_choice or not len({*dropped}) == len(dropped) == num_all - num_left:
        raise ConfigError(
            f"--data: {file} is damaged: {dropped} leave no {num_left} of {num_all} layers; without it the layers are "
            "chosen anew"
        )
    return tuple(dropped)


def _use(network: Network, layers: list[nn.Module], types: list[str] | None, left_out: set[int]) -> None:
    """The layers that a forward pass runs through, and of which type each is."""
    kept = [i for i in range(len(layers)) if i not in left_out]
    network.skeleton.model.get_decoder().layers = nn.ModuleList(layers[i] for i in kept)
    if types is not None:
        network.skeleton.config.layer_types = [types[i] for i in kept]
