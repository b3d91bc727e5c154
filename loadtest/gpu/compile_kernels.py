"""Compiles every kernel for GPUs that need not be present, and reports registers, spills and shared memory.

    python -m loadtest.gpu.compile_kernels [--capabilities 80 86 89 90 120] [--only bf16]

Prints a line for each kernel, then one JSON line. Kernels in Triton's cache that have an assembler report are not
compiled again. The exit status is 1 if a kernel spills registers to memory or needs more shared memory than there is.
Speed is not measured.
"""

from __future__ import annotations

# isort: off
import os

# Before Triton is imported: it compiles kernels and prints the assembler's reports.
os.environ |= {"TRITON_INTERPRET": "0", "TRITON_DUMP_PTXAS_LOG": "1"}
import bough.model  # noqa: F401  # before torch, see there
# isort: on

import io
import json
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as triton_compile
from triton.runtime.cache import get_cache_manager

from bough.config.flag_parser import FlagParser
from bough.model.checkpoint.gguf_file import BLOCKS
from bough.model.gpu import attention_triton, delta_rule_triton, unpack_triton
from bough.model.quant.ggml_blocks import TYPES
from bough.model.quant.mxfp4 import GROUP

CAPABILITIES = (80, 86, 89, 90, 120)
SHARED_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 120: 101_376}  # limit of a program
LOG = "assembler.log"  # the assembler's report, next to a kernel in Triton's cache
_VARYING = ("scale", "window", "tail_width", "zero_offset", "half", "epsilon", "num_steps", "num_places", "begin")


class Heads(NamedTuple):
    """The parts of a model that its attention kernel is compiled for."""

    group: int  # query heads of a KV head
    dim: int
    softcap: float = 0.0
    has_sinks: bool = False
    key_dim: int = 0  # of keys whose second part is the value

    def __str__(self) -> str:
        if self.key_dim:
            return f"{self.group} heads of latents of {self.key_dim} and {self.dim}"
        extras = f"{f', softcap {self.softcap:g}' if self.softcap else ''}{', sinks' if self.has_sinks else ''}"
        return f"{self.group} heads of {self.dim} a KV head{extras}"


FAMILIES = {  # sizes of every family that bough runs
    Heads(1, 64): "SmolLM2-1.7B",
    Heads(3, 64): "SmolLM2-135M",
    Heads(4, 64): "Llama-3.2-1B, Granite-3-2B",
    Heads(7, 64): "Qwen2.5-0.5B",
    Heads(8, 64, has_sinks=True): "GPT-OSS",
    Heads(1, 96): "Phi-3-mini",
    Heads(1, 128): "Llama-2-7B, OLMo-2-7B, Command-R, Qwen1.5-MoE",
    Heads(2, 128): "Gemma-3-27B, Qwen3-0.6B",
    Heads(2, 128, 50.0): "Gemma-2-27B",
    Heads(3, 128): "Llama-3.2-3B, Phi-4-mini",
    Heads(4, 128): "Llama-3-8B, Mistral, Mixtral-8x7B, Qwen3-8B, Phi-3-medium, Granite-3-8B",
    Heads(5, 128): "Qwen2.5-32B, Qwen3-14B, OLMo-2-32B",
    Heads(6, 128): "Qwen2.5-1.5B, Mixtral-8x22B",
    Heads(7, 128): "Qwen2.5-7B, Qwen2-57B-MoE",
    Heads(8, 128): "Llama-2-70B, Llama-3-70B, Qwen2.5-72B, Qwen3-32B, Qwen3-30B-MoE",
    Heads(9, 128): "StarCoder2-7B",
    Heads(12, 128): "Mistral-Large, Command-R+, StarCoder2-15B",
    Heads(16, 128): "Llama-3.1-405B, Qwen3-235B-MoE",
    Heads(2, 256): "Gemma-3-4B",
    Heads(2, 256, 50.0): "Gemma-2-9B",
    Heads(4, 256): "Gemma-3-1B",
    Heads(16, 512, key_dim=64): "DeepSeek-V2, V3 and R1",
    Heads(10, 512, key_dim=64): "GLM-4.7-Flash",
    Heads(10, 256, key_dim=32): "MiniCPM3-4B",
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel with the arguments of its launch."""

    name: str
    function: Any
    constants: dict[str, Any]
    pointers: dict[str, str]
    options: dict[str, Any]
    varying: tuple[str, ...]  # arguments without specialisation; the others are divisible by 16


@dataclass(frozen=True, slots=True)
class Compiled:
    """The assembler's report about a kernel."""

    name: str
    capability: int
    registers: int
    spilled_bytes: int
    shared_bytes: int

    @property
    def fits(self) -> bool:
        """Whether it needs no spills and fits in shared memory."""
        return self.spilled_bytes == 0 and self.shared_bytes <= SHARED_BYTES.get(self.capability, 49_152)


def kernels() -> Iterator[Kernel]:
    """All kernels: of recurrent layers, and in bfloat16 and float16 attention of every family and unpacking."""
    yield _recurrence()
    for dtype, bits in (("bf16", "i16"), ("fp16", "fp16")):
        for heads in FAMILIES:
            yield _attention(dtype, heads)
        for name, function, constants in _unpacking():
            pointers = {"packed": "*u8", "numbers": "*u8", "data": "*u8", "scales": "*fp16", "out": f"*{bits}"}
            pointers |= dict.fromkeys(("words", "zeros", "group_of"), "*i32")
            pointers |= {"mxfp4": {"scales": "*u8"}, "nvfp4": {"scales": "*fp32"}, "fp8": {"scales": "*fp32"}}.get(
                name, {}
            )
            options = {"num_warps": unpack_triton.NUM_WARPS, "enable_fp_fusion": False}
            yield Kernel(
                f"{name}, {dtype}", function, constants | {"IS_BF16": dtype == "bf16"}, pointers, options, _VARYING
            )


def _attention(dtype: str, heads: Heads) -> Kernel:
    constants = {"NUM_KV_HEADS": 8, "HEAD_DIM": heads.dim, "SOFTCAP": heads.softcap, "HAS_SINKS": heads.has_sinks}
    tile = attention_triton.tile_constants(heads.group, heads.dim, True, heads.key_dim)
    pointers = dict.fromkeys(("queries", "keys", "values", "out"), f"*{dtype}")
    pointers |= {"scale": "fp32", "sinks": "*fp32" if heads.has_sinks else f"*{dtype}"}
    pointers |= dict.fromkeys(("origins", "bases", "lengths", "tails", "tiles"), "*i32")
    return Kernel(
        f"attention, {heads}, {dtype}",
        attention_triton._attend,
        constants | {"IN_HALVES": True} | tile,
        pointers,
        attention_triton.launch_options(tile, True),
        _VARYING,
    )


def _recurrence() -> Kernel:
    """Arguments for the heads of Qwen3-Next; Qwen3.5's are as large."""
    pointers = dict.fromkeys(("qkv", "decay", "beta", "states", "out"), "*fp32") | {"table": "*i32"}
    pointers |= dict.fromkeys(("epsilon", "scale"), "fp32")
    constants = delta_rule_triton.step_constants(16, 32, 128, 128)
    options = delta_rule_triton.OPTIONS
    return Kernel("gated delta rule", delta_rule_triton.run_steps, constants, pointers, options, _VARYING)


def _unpacking() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    columns, rows = unpack_triton.TILE_COLUMNS, unpack_triton.TILE_ROWS
    for name, bits in (("gptq", 4), ("gptq of bytes", 8)):
        constants = {"BITS": bits, "ROWS": rows * bits // 32, "COLUMNS": columns}
        yield name, unpack_triton.unpack_down, constants | {"IS_ORDERED": True, "HAS_ORDER": False}
        yield f"{name} by g_idx", unpack_triton.unpack_down, constants | {"IS_ORDERED": False, "HAS_ORDER": True}
    yield "awq", unpack_triton.unpack_across, {"ROWS": rows, "COLUMNS": columns}
    by_rows = [("compressed-tensors", 4, "UNSIGNED"), ("compressed-tensors by g_idx", 4, "UNSIGNED")]
    by_rows += [("compressed-tensors of bytes", 8, "UNSIGNED"), ("int8", 8, "SIGNED"), ("fp8", 8, "E4M3")]
    for name, bits, kind in (*by_rows, ("mxfp4", 4, "E2M1"), ("nvfp4", 4, "E2M1")):
        is_ordered = name not in ("nvfp4", "compressed-tensors by g_idx")
        layout = {"BITS": bits, "KIND": kind, "HAS_ZEROS": kind == "UNSIGNED", "IS_ORDERED": is_ordered}
        layout["HAS_ORDER"] = "g_idx" in name
        tile = {"ROWS": rows, "COLUMNS": GROUP if name == "mxfp4" else columns}
        yield name, unpack_triton.unpack_along, layout | tile
    for name, type_ in TYPES.items():
        yield name, unpack_triton.unpack_blocks, unpack_triton.block_constants(BLOCKS[name], type_)


def compiled(kernel: Kernel, capability: int) -> Compiled:
    """Compile a kernel; raises errors of Triton's compiler or of the assembler."""
    names = kernel.function.arg_names
    signature = {name: "constexpr" if name in kernel.constants else kernel.pointers.get(name, "i32") for name in names}
    constants = {(names.index(name),): value for name, value in kernel.constants.items()}
    round_ = (name for name in names if signature[name] != "constexpr" and name not in kernel.varying)
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in round_}
    source = ASTSource(kernel.function, signature, constants, aligned)
    made, said = _assembled(source, GPUTarget("cuda", capability, 32), kernel.options)
    registers = re.search(r"Used (\d+) registers", said)
    spilled = re.search(r"(\d+) bytes spill stores", said)
    assert registers is not None
    assert spilled is not None
    return Compiled(kernel.name, capability, int(registers[1]), int(spilled[1]), made.metadata.shared)


def _assembled(source: ASTSource, target: GPUTarget, options: dict[str, Any]) -> tuple[Any, str]:
    """A compiled kernel and the assembler's report, from Triton's cache if it has both."""
    with redirect_stdout(io.StringIO()) as printed, knobs.compilation.scope():
        made = triton_compile(source, target=target, options=options)
        kept = get_cache_manager(made.hash)
        if not printed.getvalue() and kept.get_file(LOG) is None:  # cached without its report
            knobs.compilation.always_compile = True
            made = triton_compile(source, target=target, options=options)
    if printed.getvalue():
        kept.put(printed.getvalue(), LOG)
    return made, Path(kept.get_file(LOG)).read_text()


def main() -> None:
    """Print results as they come, and one JSON line."""
    parser = FlagParser(description=__doc__)
    parser.add_argument("--capabilities", type=int, nargs="+", default=CAPABILITIES)
    parser.add_argument("--only", nargs="+", default=[""], help="kernels whose name contains any of these")
    arguments = parser.parse_args()
    rows = []
    for kernel in kernels():
        for capability in arguments.capabilities if any(part in kernel.name for part in arguments.only) else ():
            rows.append(compiled(kernel, capability))
            print(rows[-1], flush=True)
    fit = all(row.fits for row in rows)
    print(json.dumps({"kernels": [asdict(row) for row in rows], "fit": fit}))
    raise SystemExit(0 if fit else 1)


if __name__ == "__main__":
    main()
