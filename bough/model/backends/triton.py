"""The GPU backend: our own Triton kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from subprocess import CalledProcessError
from typing import Any, NamedTuple

import torch
from torch import nn

from bough.errors import ConfigError
from bough.model.backend import Backend, Norm, Rotary, in_counts
from bough.model.batch.batch import Chunk
from bough.model.batch.state_steps import StateSteps
from bough.model.faults import is_full, named_faults
from bough.model.running.device import driver
from bough.sizing.row_counts import RowCounts

FIXED = RowCounts(256, 256)  # rows of the library's products: it chooses a kernel by their number


class Kernels(NamedTuple):
    """Functions of `attention_triton`, `delta_rule_triton`, `rows_triton` and `unpack_triton` in `bough.model.gpu`."""

    attend: Callable[..., torch.Tensor]
    take_steps: Callable[..., torch.Tensor]
    norm: Callable[..., torch.Tensor]
    rotate: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    gate: Callable[..., torch.Tensor]
    write_down: Callable[..., None]
    write_across: Callable[..., None]
    write_along: Callable[..., None]
    write_blocks: Callable[..., None]


@cache
def kernels() -> Kernels:
    """The Triton kernels, imported when first used. Raises ConfigError if Triton is not installed."""
    try:
        from bough.model.gpu import attention_triton, delta_rule_triton, rows_triton, unpack_triton
    except ImportError as exc:
        raise ConfigError(
            f"--device: for a GPU Triton must be installed, which torch's builds for GPUs bring along, got {exc}"
        ) from exc
    functions = vars(delta_rule_triton) | vars(rows_triton) | vars(unpack_triton)
    return Kernels(attention_triton.attend_by_triton, *(functions[name] for name in Kernels._fields[1:]))


class TritonBackend(Backend):
    """Kernels of `bough.model.gpu`."""

    name = "triton"
    rooms = ("bough.model.gpu",)
    takes_any_rows = True
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
        return {kernel.name for kernel in compiled if kernel.n_spills}

    def multiply(self, rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return product_by_library(rows, matrix, bias)

    def linear_by_head(self, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        return products_by_library(rows, matrices)

    def norm(
        self, rows: torch.Tensor, weight: torch.Tensor, epsilon: float, kind: Norm, gate: torch.Tensor | None = None
    ) -> torch.Tensor:
        return kernels().norm(rows, weight, epsilon, kind, gate)

    def rotate(
        self, queries: torch.Tensor, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kind: Rotary
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return kernels().rotate(queries, keys, cos, sin, kind)

    def gate(self, gates: torch.Tensor, ups: torch.Tensor, activation: str) -> torch.Tensor:
        return kernels().gate(gates, ups, activation)

    def attend(
        self, chunk: Chunk, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *rules: Any
    ) -> torch.Tensor:
        paths, (held_keys, held_values) = chunk.paths_on(queries.device), chunk.memory(layer)
        held_keys.index_copy_(0, paths.rows, keys)
        held_values.index_copy_(0, paths.rows, values)
        return kernels().attend(queries.contiguous(), held_keys, held_values, paths, *rules)

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

    def write_down(self, *arguments: Any) -> None:
        kernels().write_down(*arguments)

    def write_across(self, *arguments: Any) -> None:
        kernels().write_across(*arguments)

    def write_along(self, *arguments: Any) -> None:
        kernels().write_along(*arguments)

    def write_blocks(self, *arguments: Any) -> None:
        kernels().write_blocks(*arguments)


def product_by_library(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`Backend.multiply` by torch."""
    flat = rows.reshape(-1, rows.shape[-1])
    out = in_counts(lambda part: nn.functional.linear(part, matrix, bias), FIXED, flat)
    return out.view(*rows.shape[:-1], len(matrix))


def products_by_library(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """`Backend.linear_by_head` by torch."""
    by_inputs = matrices.transpose(1, 2)
    return in_counts(lambda part: torch.bmm(part, by_inputs), FIXED, rows, axis=1).transpose(0, 1)


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
    """Unpack one group of 4-bit weights."""
    with torch.cuda.device(device):
        words = torch.full((1, 16), 0xA9, dtype=torch.uint8, device=device).view(torch.int32)  # 9 and 10, of 0 to 15
        out = torch.empty((1, 32), dtype=torch.float16, device=device)
        kernels().write_along(
            words, torch.ones((1, 1), dtype=torch.float16, device=device), None, None, 4, (1, 32), out
        )
        found = sorted({float(number) for number in out.cpu().flatten()})
    if found != [1.0, 2.0]:
        raise RuntimeError(f"9 and 10 less 8, times 1, came to {found}")


BACKEND = TritonBackend()
