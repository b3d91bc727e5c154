"""Selects the device of a worker."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext

import torch

from bough.errors import ConfigError
from bough.runtime.machine import may_be_gpu

logger = logging.getLogger(__name__)


def choose_device(name: str) -> torch.device:
    """The device of a setting, "auto", "cpu", "cuda" or "cuda:1"; `auto` is the first GPU, or the CPU if there is none.

    If torch cannot use the machine's GPU, `auto` is the CPU, with a warning, as the intention is unknown.

    Raises:
        ConfigError: the device does not exist.
    """
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        why = "finds none" if torch.version.cuda else f"{torch.__version__} is a build without CUDA"
        if name != "auto":
            raise ConfigError(f"--device: must be cpu or auto, as torch {why}, got {name}")
        if may_be_gpu(name):
            logger.warning("--device: auto is the CPU, although this machine has a GPU: torch %s", why)
        return torch.device("cpu")
    index = 0 if name == "auto" else torch.device(name).index or 0
    count = torch.cuda.device_count()
    if index >= count:
        raise ConfigError("--device: must be cuda:0" + (f" to cuda:{count - 1}" if count > 1 else "") + f", got {name}")
    return torch.device("cuda", index)


def working_on(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one for kernels of this thread."""
    if device.type == "cpu":
        return nullcontext()
    chosen: AbstractContextManager[object] = torch.get_device_module(device).device(device)
    return chosen


def await_all(device: torch.device) -> None:
    """Wait until all work queued on a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
