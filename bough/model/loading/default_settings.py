"""Settings that a model and its device choose where nobody tells them, and what is said where weights are converted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

import torch
from transformers import PretrainedConfig

from bough.config.parsers import AUTO, DTYPE_NAMES
from bough.config.processes import TargetConfig
from bough.model.checkpoint.checkpoint import TensorPlace
from bough.model.checkpoint.tensor_source import STORED_DTYPES, VALUE_DTYPES
from bough.sizing.placement import gigabytes

CPU_DTYPE = "bfloat16"  # which kernels of ours are for; on a GPU a checkpoint is computed in its own
CPU_ROWS, GPU_ROWS = 64, 256  # a GPU reads weights once for a chunk: of 64 rows that is most of a product's time
WORTH_SAYING = 0.01  # of what is stored: norms and routers may be of another type than matrices

Settings = TypeVar("Settings", bound=TargetConfig)


def settled(settings: Settings, config: PretrainedConfig, device_type: str) -> Settings:
    """The same settings, with a data type and a number of rows."""
    rows = settings.rows or (CPU_ROWS if device_type == "cpu" else GPU_ROWS)
    return replace(settings, dtype=chosen_dtype(settings.dtype, config, device_type), rows=rows)


def chosen_dtype(name: str, config: PretrainedConfig, device_type: str) -> str:
    """A data type as told, or for `auto` the checkpoint's own on a GPU: what a target says is then what it would say
    anywhere, but for the order of sums.
    """
    if name != AUTO:
        return name
    own = str(getattr(config, "dtype", None)).removeprefix("torch.")
    return own if device_type != "cpu" and own in DTYPE_NAMES else CPU_DTYPE


def conversion(places: Iterable[TensorPlace], dtype: torch.dtype) -> str:
    """What is to be said of weights that are stored in another data type than they are computed in; empty if none."""
    sizes = Counter[str]()
    for place in places:
        if place.dtype in VALUE_DTYPES and not place.name.endswith("scales"):
            sizes[place.dtype] += place.num_bytes
    others = {name: size for name, size in sizes.items() if STORED_DTYPES[name] != dtype}
    if sum(others.values()) <= WORTH_SAYING * sum(sizes.values()):
        return ""
    named = {name: str(STORED_DTYPES[name]).removeprefix("torch.") for name in others}
    parts = ", ".join(f"{gigabytes(size)} of {named[name]}" for name, size in others.items())
    most = named[max(others, key=lambda name: others[name])]
    return (
        f"weights are converted: {parts}, computed in {str(dtype).removeprefix('torch.')}; "
        f"--dtype {most} would take most of them as they are"
    )
