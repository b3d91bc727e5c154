"""The GPU backend: our own Triton kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from subprocess import CalledProcessError
from typing import Any, NamedTuple

import torch

from bough.errors import ConfigError
from bough.model.backend import Backend
from bough.model.batch.batch import Chunk
from bough.model.batch.state_steps import StateSteps
from bough.model.faults import is_full, named_faults
from bough.model.packed import ExpertTiles, Matrix, Packed, Stack
from bough.model.running.device import driver


class Kernels(NamedTuple):
    """Functions of the modules of `bough.model.gpu`."""

    attend: Callable[..., torch.Tensor]
    take_steps: Callable[..., torch.Tensor]
    norm: Callable[..., torch.Tensor]
    rotate: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    gate: Callable[..., torch.Tensor]
    combine: Callable[..., torch.Tensor]
    write: Callable[..., None]
    multiply: Callable[..., torch.Tensor]
    linear_by_head: Callable[..., torch.Tensor]
    multiply_grouped: Callable[..., torch.Tensor]
    expert_tiles: Callable[..., ExpertTiles]


@cache
def kernels() -> Kernels:
    """The Triton kernels, imported when first used. Raises ConfigError if Triton is not installed."""
    try:
        from bough.model.gpu import attention_triton, delta_rule_triton, product_triton, rows_triton, unpack_triton
    except ImportError as exc:
        raise ConfigError(
            f"--device: for a GPU Triton must be installed, which torch's builds for GPUs bring along, got {exc}"
        ) from exc
    modules = delta_rule_triton, rows_triton, unpack_triton, product_triton
    functions = {name: value for module in modules for name, value in vars(module).items()}
    return Kernels(attention_triton.attend_by_triton, *(functions[name] for name in Kernels._fields[1:]))


class TritonBackend(Backend):
    """Kernels of `bough.model.gpu`."""

    name = "triton"
    rooms = ("bough.model.gpu",)
    takes_any_rows = True
    takes_packed = True
    groups_experts = True
    captures_steps = True

    def describe(self, device: torch.device) -> str:
        """Name of the GPU."""
        return str(torch.cuda.get_device_name(device))

    def make_ready(self, device: torch.device) -> None:
        """Set matrix products to accumulate in float32, and try a kernel.

        Raises:
            ConfigError: Triton is not installed, or cannot compile.
            AcceleratorFull: others have taken the device's memory.
        """
        accumulate_in_float32()
        with named_faults(device):
            require_kernels(device, lambda: _try_one(device))
            _take_library_memory(device)

    def spilling(self) -> set[str]:
        modules = [module for name, module in sys.modules.items() if name.startswith(f"{self.rooms[0]}.")]
        functions = [value for module in modules for value in vars(module).values() if hasattr(value, "device_caches")]
        compiled = [kernel for each in functions for kept in each.device_caches.values() for kernel in kept[0].values()]
        return {kernel.name for kernel in compiled if getattr(kernel, "n_spills", 0)}  # not loaded: has none

    def linear_by_head(self, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        return kernels().linear_by_head(rows, matrices)

    def multiply(self, rows: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
        return kernels().multiply(rows, matrix, bias)

    def expert_tiles(self, chosen: torch.Tensor, num_experts: int) -> ExpertTiles:
        numbers, choices = torch.sort(chosen.flatten(), stable=True)
        return kernels().expert_tiles(numbers, choices, chosen.shape[1], num_experts)

    def multiply_grouped(
        self, rows: torch.Tensor, stack: Stack, tiles: ExpertTiles, is_sorted: bool = False
    ) -> torch.Tensor:
        return kernels().multiply_grouped(rows, stack, tiles, is_sorted)

    def combine(self, *arguments: Any) -> torch.Tensor:
        return kernels().combine(*arguments)

    def norm(self, *arguments: Any) -> torch.Tensor:
        return kernels().norm(*arguments)

    def rotate(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return kernels().rotate(*arguments)

    def gate(self, *arguments: Any) -> torch.Tensor:
        return kernels().gate(*arguments)

    def attend(
        self, chunk: Chunk, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *rules: Any
    ) -> torch.Tensor:
        paths, (held_keys, held_values) = chunk.paths_on(queries.device), chunk.memory(layer)
        held_keys.index_copy_(0, paths.rows, keys)
        held_values.index_copy_(0, paths.rows, values)
        return kernels().attend(queries, held_keys, held_values, paths, *rules)

    def recur(
        self,
        qkv: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        steps: StateSteps,
        states: torch.Tensor,
        num_key_heads: int,
        begin: int,
    ) -> torch.Tensor:
        return kernels().take_steps(qkv, decay, beta, steps.on(qkv.device).table, states, num_key_heads, begin)

    def write(self, matrix: Packed, out: torch.Tensor) -> None:
        kernels().write(matrix, out)


def accumulate_in_float32() -> None:
    """Turn off reduced-precision accumulation, whose rounding depends on the shape, and undo a division of sums."""
    products: Any = torch.backends.cuda.matmul
    products.allow_tf32 = False
    for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"):
        try:
            setattr(products, name, (False, False))  # nor may cuBLAS divide a sum among blocks that add to it in parts
        except (RuntimeError, TypeError):  # torch before 2.9, or a library without that choice
            setattr(products, name, False)
    torch.backends.cudnn.allow_tf32 = False


def _take_library_memory(device: torch.device) -> None:
    """Make cuBLAS allocate its workspace, before free memory is measured."""
    with torch.cuda.device(device):
        for dtype in (torch.bfloat16, torch.float16):
            square = torch.zeros((256, 256), dtype=dtype, device=device)
            torch.nn.functional.linear(square, square)
        torch.cuda.synchronize(device)


def require_kernels(device: torch.device, try_one: Callable[[], None]) -> None:
    """Run `try_one`, which compiles and runs a kernel. Raises ConfigError if Triton is missing or fails.

    If a device has no memory left, its error is raised unchanged.
    Triton compiles a kernel's launcher with a C compiler; other errors are often those of an old driver.
    """
    kernels()
    try:
        try_one()
    except Exception as exc:
        if is_full(exc):
            raise
        if isinstance(exc, CalledProcessError) or "C compiler" in str(exc):
            advice = "it takes a C compiler (gcc, or what CC names) and Python's headers (Python.h, as in python3-dev)"
        else:
            advice = f"{driver()}, and an older one than that of Triton's kernels cannot load them"
        raise ConfigError(
            f"--device: on {device} Triton must compile and run kernels, got {type(exc).__name__}: {exc}; {advice}"
        ) from exc


def _try_one(device: torch.device) -> None:
    """Compile and run a small kernel; results are checked by `bough.model.running.self_check`."""
    with torch.cuda.device(device):
        ones = torch.ones((1, 16), device=device)
        kernels().gate(ones, ones, "silu")
        torch.cuda.synchronize(device)


BACKEND = TritonBackend()
