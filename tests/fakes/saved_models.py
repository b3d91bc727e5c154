"""Random models on disk, each of which a process of the tests makes once."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch
from transformers import PretrainedConfig

from loadtest.common import tiny_model

_made: dict[tuple[str, str, int], tuple[Path, torch.Tensor]] = {}  # where a model is, and torch's state afterwards


def save_model(folder: Path, config: PretrainedConfig = tiny_model.TINY, seed: int = 0) -> Path:
    """Write what `tiny_model.save_model` writes, and leave torch's random numbers where it leaves them."""
    settings = config.to_dict() | {"dtype": None}  # which making a model sets
    key = (type(config).__name__, json.dumps(settings, default=str), seed)
    if key not in _made:
        made = tiny_model.save_model(_folder() / str(len(_made)), config, seed)
        _made[key] = made, torch.get_rng_state()
    made, state = _made[key]
    shutil.copytree(made, folder, dirs_exist_ok=True)
    torch.set_rng_state(state)
    return folder


@cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="bough-models-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
