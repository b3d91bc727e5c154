"""Default settings by model and device, and the note about converted weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

import torch
from transformers import PretrainedConfig

from bough.config.parsers import AUTO, DTYPE_NAMES
from bough.config.processes import TargetConfig
from bough.model.checkpoint.container import TensorPlace
from bough.model.checkpoint.tensor_source import STORED_DTYPES, VALUE_DTYPES
from bough.sizing.placement import gigabytes
from bough.sizing.row_counts import SWEEP_TOKENS

CPU_DTYPE = "bfloat16"  # our kernels' dtype; on a GPU the default is the checkpoint's dtype
# A GPU computes all rows of a sweep together, in parts that bound the memory for results: 235 MB for each of an MLP of
# a 70B with 4,096 rows. The reference's products of a fixed number of rows compute padding too.
CPU_ROWS, GPU_ROWS, REFERENCE_ROWS = 64, 1024, 256
SCALES = ("scales", "_scale", "_scale_inv")  # suffixes of the names of tensors that are not weights
WORTH_SAYING = 0.01  # share of the weights; norms and routers may have another dtype than matrices

Settings = TypeVar("Settings", bound=TargetConfig)


def settled(settings: Settings, config: PretrainedConfig, device_type: str) -> Settings:
    """The settings with dtype and rows filled in, and on a CPU the tokens of a sweep."""
    of_gpu = REFERENCE_ROWS if settings.backend == "reference" else GPU_ROWS
    rows = settings.rows or (CPU_ROWS if device_type == "cpu" else of_gpu)
    tokens = settings.max_sweep_tokens or (SWEEP_TOKENS if device_type == "cpu" else 0)
    dtype = chosen_dtype(settings.dtype, config, device_type)
    return replace(settings, dtype=dtype, rows=rows, max_sweep_tokens=tokens)


def chosen_dtype(name: str, config: PretrainedConfig, device_type: str) -> str:
    """The configured dtype; for `auto` on a GPU the checkpoint's own: tokens are then as in other software, up to the
    order of sums.
    """
    if name != AUTO:
        return name
    own = str(getattr(config, "dtype", None)).removeprefix("torch.")
    return own if device_type != "cpu" and own in DTYPE_NAMES else CPU_DTYPE


def conversion(places: Iterable[TensorPlace], dtype: torch.dtype) -> str:
    """A note about weights whose compute dtype differs from the stored one; empty if there are none."""
    sizes, total = Counter[str](), 0
    for place in places:
        total += place.num_bytes
        if place.dtype in VALUE_DTYPES and not place.name.endswith(SCALES):
            sizes[place.dtype] += place.num_bytes
    others = {name: size for name, size in sizes.items() if STORED_DTYPES[name] != dtype}
    if sum(others.values()) <= WORTH_SAYING * total:
        return ""
    named = {name: str(STORED_DTYPES[name]).removeprefix("torch.") for name in others}
    parts = ", ".join(f"{gigabytes(size)} of {named[name]}" for name, size in others.items())
    most = named[max(others, key=lambda name: others[name])]
    return (
        f"weights are converted: {parts}, computed in {str(dtype).removeprefix('torch.')}; "
        f"--dtype {most} would use most of them unconverted"
    )
