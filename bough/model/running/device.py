"""Selects the device of a worker, and names what decides its bits."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import PackageNotFoundError, version

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
        why = _why_none() if torch.version.cuda else f"{torch.__version__} is a build without CUDA"
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


def _why_none() -> str:
    """That torch finds no GPU, and the first sentence of its reason, such as a driver that is too old."""
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as exc:
        return f"finds none ({str(exc).partition('. ')[0]})"
    return "finds none"


def driver() -> str:
    """The newest CUDA that the driver knows, and torch's."""
    number = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()  # a build for CPUs has none
    return f"the driver is of CUDA {number // 1000}.{number % 1000 // 10}, torch of {torch.version.cuda}"


def require_fast(dtype: str, device: torch.device) -> None:
    """Raise ConfigError if a GPU computes in this type without tensor cores, many times slower."""
    if device.type != "cuda" or dtype != "bfloat16":
        return
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(
            f"--dtype: must be float16 on {device}, {name} of compute capability {major}.{minor}, whose tensor cores "
            "cannot multiply in bfloat16, got bfloat16; give --dtype float16"
        )


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


def on_host(result: torch.Tensor) -> torch.Tensor:
    """Copy a sweep's result to the host. The thread sleeps until a GPU has computed it, where `cpu` would keep a core
    busy.
    """
    if result.device.type == "cuda":
        computed = torch.cuda.Event(blocking=True)
        computed.record(torch.cuda.current_stream(result.device))
        computed.synchronize()
    return result.cpu()


def on_host_together(results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """As `on_host`, for several results at once."""
    if len(results) == 1:
        return [on_host(results[0])]
    parts = [result.contiguous().view(-1).view(torch.uint8) for result in results]
    read = torch.split(on_host(torch.cat(parts)), [len(part) for part in parts])
    return [part.clone().view(own.dtype).view(own.shape) for part, own in zip(read, results, strict=True)]


def gpu_libraries() -> str:
    """Versions of Triton, CUDA and cuBLAS, which decide the bits of a GPU's results."""
    try:
        triton = version("triton")
    except PackageNotFoundError:  # the reference backend does without
        triton = "none"
    return f"triton {triton}, CUDA {torch.version.cuda}, cuBLAS {_cublas_version()}"


def _cublas_version() -> str:
    """Version of the cuBLAS that torch has loaded, whose name has the major version of torch's CUDA."""
    try:
        library = ctypes.CDLL(f"libcublas.so.{str(torch.version.cuda).partition('.')[0]}")
    except OSError:  # linked otherwise, or another vendor's
        return "unknown"
    levels = [ctypes.c_int() for _ in range(3)]  # major, minor and patch
    for number, level in enumerate(levels):
        library.cublasGetProperty(number, ctypes.byref(level))
    return ".".join(str(level.value) for level in levels)
