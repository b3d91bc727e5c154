"""The accelerator of a worker: chosen by name, refused by name."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from time import perf_counter

import torch
from torch.nn.functional import linear

from bough.errors import ConfigError
from bough.model.project import HAS_TILES
from bough.model.vectors import multiplies_pairs

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}  # to train in; where both are as fast the first
PROBED, NUM_PROBES = 1024, 20


def choose_device(name: str) -> torch.device:
    """The device of a setting, "auto", "cpu", "cuda" or "cuda:1"; `auto` is the first GPU where torch finds one.

    Raises:
        ConfigError: it is not there.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        why = "finds none" if torch.version.cuda else f"{torch.__version__} is a build without CUDA"
        raise ConfigError(f"--device: {name} asks for a GPU, but torch {why}; cpu or auto would do")
    index = 0 if name == "auto" else torch.device(name).index or 0
    count = torch.cuda.device_count()
    if index >= count:
        raise ConfigError(
            f"--device: {name}; torch finds cuda:0" + (f" to cuda:{count - 1}" if count > 1 else " alone")
        )
    return torch.device("cuda", index)


def choose_dtype(name: str, device: torch.device) -> str:
    """The data type of a setting to train in: `auto` is bfloat16, or on a CPU what torch multiplies faster there.

    Without instructions for bfloat16 that is float32 by far, and with them too where they take longer than two others.
    """
    if name != "auto":
        return name
    return min(DTYPES, key=product_seconds) if device.type == "cpu" else "bfloat16"


def product_seconds(dtype: str) -> float:
    """Of a product on the CPU of the size of a training step's, by torch: the least of a few."""
    rows, matrix = (torch.ones(size, PROBED, dtype=DTYPES[dtype]) for size in (PROBED // 2, PROBED))
    seconds = []
    for _ in range(NUM_PROBES):
        began = perf_counter()
        linear(rows, matrix)
        seconds.append(perf_counter() - began)
    return min(seconds)


def device_name(device: torch.device) -> str:
    """What it is; of a CPU the instructions that torch's kernels and ours are chosen by."""
    if device.type == "cpu":
        dots = " and products of bfloat16" if multiplies_pairs() else ""
        dots += " by tiles" if HAS_TILES else ""
        return f"CPU with {torch.backends.cpu.get_cpu_capability()}{dots}"
    return str(torch.cuda.get_device_name(device))


def working_on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a device the one that kernels of this thread are launched on."""
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)
