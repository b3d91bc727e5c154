"""Compiles every kernel for GPUs that need not be present, and reports registers, spills and shared memory.

    python -m loadtest.gpu.compile_kernels [--capabilities 80 86 89 90 120]

A line for each, then one JSON line. Exit status 1 where one spills registers to memory or wants more shared memory than
there is. Speed is for a GPU to say.
"""

from __future__ import annotations

# isort: off
import os

os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported
import bough.model  # noqa: F401  # before torch, see there
# isort: on

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as triton_compile

from bough.config.flag_parser import FlagParser
from bough.model.gpu import attention_triton, unpack_triton

CAPABILITIES = (80, 86, 89, 90, 120)
SHARED_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 120: 101_376}  # limit of a program
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_VARYING = ("scale", "window", "tail_width", "zero_offset")
BLACKWELL = 100  # first capability for which Triton has its own assembler


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel with the arguments of its launch for a 70B."""

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
    """All kernels: attention, and unpacking of each format, writing bfloat16 and float16."""
    for dtype, bits in (("bf16", "i16"), ("fp16", "fp16")):
        for group, head_dim in ((8, 128), (1, 128), (2, 256)):  # Llama 70B, Llama-2 7B, Gemma
            yield _attention(dtype, group, head_dim)
        for name, function, constants in _unpacking():
            pointers = {"packed": "*u8", "scales": "*fp16", "out": f"*{bits}"}
            pointers |= dict.fromkeys(("words", "zeros", "group_of"), "*i32")
            options = {"num_warps": unpack_triton.NUM_WARPS, "enable_fp_fusion": False}
            yield Kernel(
                f"{name}, {dtype}", function, constants | {"IS_BF16": dtype == "bf16"}, pointers, options, _VARYING
            )


def _attention(dtype: str, group: int, head_dim: int) -> Kernel:
    constants = {"NUM_KV_HEADS": 8, "HEAD_DIM": head_dim, "SOFTCAP": 0.0, "HAS_SINKS": False, "IN_HALVES": True}
    constants |= attention_triton.tile_constants(group, head_dim, True)
    pointers = dict.fromkeys(("queries", "keys", "values", "sinks", "out"), f"*{dtype}") | {"scale": "fp32"}
    pointers |= dict.fromkeys(("origins", "bases", "lengths", "tails", "tiles"), "*i32")
    options = attention_triton.launch_options(True)
    return Kernel(
        f"attention, {group} heads of {head_dim} a KV head, {dtype}",
        attention_triton._attend,
        constants,
        pointers,
        options,
        _VARYING,
    )


def _unpacking() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    for bits in (4, 8):
        group_bytes = {4: 16, 8: 64}[bits]
        constants = {"HALF": group_bytes, "IS_WHOLE": bits == 8, "TILE": unpack_triton.TILE_BYTES // group_bytes}
        yield f"bough {bits} bits", unpack_triton.unpack_own, constants
    columns, words = unpack_triton.TILE_COLUMNS, unpack_triton.TILE_ROWS // unpack_triton.NIBBLES
    for name, is_ordered in (("gptq", True), ("gptq by g_idx", False)):
        constants = {"BITS": 4, "IS_ORDERED": is_ordered, "ROWS": words, "COLUMNS": columns}
        yield name, unpack_triton.unpack_down, constants
    yield "awq", unpack_triton.unpack_across, {"ROWS": unpack_triton.TILE_ROWS, "COLUMNS": columns}


def compiled(kernel: Kernel, capability: int) -> Compiled:
    """Compile a kernel; raises errors of Triton's compiler or of the assembler."""
    names = kernel.function.arg_names
    signature = {name: "constexpr" if name in kernel.constants else kernel.pointers.get(name, "i32") for name in names}
    constants = {(names.index(name),): value for name, value in kernel.constants.items()}
    round_ = (name for name in names if signature[name] != "constexpr" and name not in kernel.varying)
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in round_}
    source = ASTSource(kernel.function, signature, constants, aligned)
    made = triton_compile(source, target=GPUTarget("cuda", capability, 32), options=kernel.options)
    registers, spilled = _assembled(made.asm["ptx"], capability)
    return Compiled(kernel.name, capability, registers, spilled, made.metadata.shared)


def _assembled(ptx: str, capability: int) -> tuple[int, int]:
    """Registers and spilled bytes of a thread."""
    target = re.search(r"\.target (sm_\w+)", ptx)
    assert target is not None, "PTX names its target"
    tool = TOOLS / ("ptxas-blackwell" if capability >= BLACKWELL else "ptxas")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [tool, "-v", "--gpu-name", target[1], file.name, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    assert registers is not None
    assert spilled is not None
    return int(registers[1]), int(spilled[1])


def main() -> None:
    """Print results as they come, and one JSON line."""
    parser = FlagParser(description=__doc__)
    parser.add_argument("--capabilities", type=int, nargs="+", default=CAPABILITIES)
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    arguments = parser.parse_args()
    rows = []
    for kernel in kernels():
        for capability in arguments.capabilities if arguments.only in kernel.name else ():
            rows.append(compiled(kernel, capability))
            print(rows[-1], flush=True)
    fit = all(row.fits for row in rows)
    print(json.dumps({"kernels": [asdict(row) for row in rows], "fit": fit}))
    raise SystemExit(0 if fit else 1)


if __name__ == "__main__":
    main()
