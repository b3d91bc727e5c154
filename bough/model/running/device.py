"""The accelerator of a worker: chosen by name, refused by name."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from bough.errors import ConfigError
from bough.model.cpu.llvm_vectors import has_feature, multiplies_pairs


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


def device_name(device: torch.device) -> str:
    """What it is; of a CPU the instructions that torch's kernels are chosen by, and how ours multiply bfloat16."""
    if device.type == "cpu":
        dots = " and products of bfloat16" if has_feature("avx512bf16") else ""
        ours = "by pairs" if multiplies_pairs() else "one by one"
        return f"CPU with {torch.backends.cpu.get_cpu_capability()}{dots}, ours {ours}"
    return str(torch.cuda.get_device_name(device))


def working_on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a device the one that kernels of this thread are launched on."""
    if device.type == "cpu":
        return nullcontext()
    chosen: AbstractContextManager[object] = torch.get_device_module(device).device(device)
    return chosen


def await_all(device: torch.device) -> None:
    """Until all that was queued on a device is done; on the CPU everything is."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
