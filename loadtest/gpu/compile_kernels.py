"""Compiles every kernel for GPUs that need not be present, and reports registers, spills and shared memory.

    python -m loadtest.gpu.compile_kernels [--capabilities 80 86 89 90 120] [--tritons 3.7.1 3.6.0] [--only bf16]

The wrappers that a worker calls bind and compile them, through Triton's own path, with a driver that launches nothing.
Calls with few and many rows must come to one program. A version of Triton that is not installed is downloaded with pip
to bough's cache folder, and used in another process. Launches of a layer are counted on a pretended device.

Prints a line for each kernel, then one JSON line. Kernels in Triton's cache that have an assembler report are not
compiled again. The exit status is 1 if a kernel spills registers to memory, needs more shared memory than there is, or
is attention or a product without tensor cores or without loads of 16 bytes, or if a layer has more launches than
MOST_LAUNCHES. Speed is not measured.
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
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from triton import JITFunction, knobs
from triton import __version__ as triton_version
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager

from bough.config.cache_paths import cache_folder
from bough.config.flag_parser import FlagParser
from bough.model.backend import ACTIVATIONS, Norm, Rotary, Table
from bough.model.batch.path_spans import Paths
from bough.model.checkpoint.gguf_file import BLOCKS
from bough.model.gpu import attention_triton, delta_rule_triton, product_triton, rows_triton, unpack_triton
from bough.model.packed import Along, ExpertTiles, InBlocks, Matrix, Packed, Stack, is_transposed
from bough.model.quant.formats import SAMPLES
from bough.model.quant.ggml_blocks import TYPES
from bough.model.running.fused_parts import NORMS, ROTARIES

CAPABILITIES = (80, 86, 89, 90, 120)
PREVIOUS_TRITON = "3.6.0"  # of torch 2.11
MOST_LAUNCHES = {"dense": 24, "packed": 26, "mixture": 40}  # of a layer
SHARED_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 120: 101_376}  # limit of a program
LOG = "assembler.log"  # the assembler's report, next to a kernel in Triton's cache
WIDE_LOADS = 6  # least of a product: rows and weights, of at least three tiles
UNALIGNED = "Q3_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q6_K", "Q8_0", "IQ4_NL", "IQ4_XS", "Q2_K"  # not of 16 bytes
ROW_COUNTS = (1, 2, 8, 64, 256)  # of calls whose bits for a row must be equal, and so their program
PROGRAM_ROWS = {16: (1, 2, 8, 16), 32: (17, 32), 64: (33, 64), 128: (65, 256, 1000)}  # counts by rows of a program
KEY_COUNTS = (1, 0, 2000, 33_000, 8192)  # of these calls; 0 is unknown
KV_HEADS, TAIL = 8, 32
INPUTS, OUTPUTS = 4096, 1024  # of a packed matrix
HIDDEN = 4096
CHOICES = 8  # experts of a row
WIDTHS = (64, 128, 256, 2880, 8192, 16384)  # of other rows, from heads to hidden sizes


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


class Kernel(NamedTuple):
    """Calls of a wrapper in `bough.model.gpu` that must come to one program."""

    name: str
    calls: Sequence[Callable[[], object]]
    function: str = ""  # of several that the wrapper launches


@dataclass(frozen=True, slots=True)
class Compiled:
    """The assembler's report about a kernel."""

    name: str
    capability: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    products: tuple[str, ...]  # shapes of its tensor cores' instructions
    wide_loads: int  # instructions that load 16 bytes
    triton: str = triton_version

    @property
    def fits(self) -> bool:
        """Whether it needs no spills, fits in shared memory, uses tensor cores, and loads what is aligned widely."""
        is_product = self.name.startswith("product")
        has_products = bool(self.products) or not (is_product or self.name.startswith("attention"))
        is_wide = (
            self.wide_loads >= WIDE_LOADS or not is_product or any(f", {name}, " in self.name for name in UNALIGNED)
        )
        fits = self.shared_bytes <= SHARED_BYTES.get(self.capability, 49_152)
        return self.spilled_bytes == 0 and fits and has_products and is_wide


class _AbsentGPU:
    """Triton's driver for a GPU that is not there: kernels are bound and compiled for it, and never launched."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # Triton keeps what it has compiled by device

    def get_current_stream(self, device: int) -> int:  # as Triton calls it
        return 0


def kernels() -> Iterator[Kernel]:
    """All kernels: of recurrent layers; in bfloat16 and float16 attention of every family, parts of rows, unpacking."""
    yield Kernel("gated delta rule", [partial(_recur, rows) for rows in ROW_COUNTS])
    yield Kernel("table of experts", [partial(_expert_tiles, rows) for rows in ROW_COUNTS])
    for dtype, short in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        for heads in FAMILIES:
            calls = [
                partial(_attend, heads, dtype, rows, keys) for rows, keys in zip(ROW_COUNTS, KEY_COUNTS, strict=True)
            ]
            yield Kernel(f"attention, {heads}, {short}", calls, "_attend")
            yield Kernel(f"folding of attention, {heads}, {short}", calls, "_fold_parts")
        for name, call_rows in _rows():
            yield Kernel(f"{name}, {short}", [partial(call_rows, dtype, rows) for rows in ROW_COUNTS])
        for name, matrix in matrices():
            yield Kernel(f"unpacking, {name}, {short}", [partial(_write, matrix, dtype)])
        for kernel in _products(dtype):
            yield kernel._replace(name=f"{kernel.name}, {short}")


def _attend(heads: Heads, dtype: torch.dtype, num_rows: int, num_keys: int) -> None:
    num_kv_heads = 1 if heads.key_dim else KV_HEADS
    num_heads = heads.group * KV_HEADS
    queries = torch.zeros(num_rows, num_heads, heads.dim + heads.key_dim, dtype=dtype)
    keys = torch.zeros(TAIL, num_kv_heads, heads.key_dim or heads.dim, dtype=dtype)
    values = torch.zeros(TAIL, num_kv_heads, heads.dim, dtype=dtype)
    own, tails = torch.zeros(num_rows, dtype=torch.int32), torch.zeros(num_rows, TAIL, dtype=torch.int32)
    paths = Paths(own.long(), own, own, own, tails, torch.zeros(num_rows, 2, dtype=torch.int32), num_keys)
    sinks = torch.zeros(num_heads) if heads.has_sinks else None
    attention_triton.attend_by_triton(queries, keys, values, paths, 0.1, 0, heads.softcap, sinks)


def _recur(num_rows: int) -> None:
    """With the heads of Qwen3-Next; Qwen3.5's are as large."""
    key_heads, heads, dim = 16, 32, 128
    qkv, gates = torch.zeros(num_rows, (2 * key_heads + heads) * dim), torch.zeros(num_rows, heads)
    table, states = torch.zeros(num_rows, 5, dtype=torch.int32), torch.zeros(heads, 3, dim, dim)
    delta_rule_triton.take_steps(qkv, gates, gates, table, states, key_heads, 0)


def _rows() -> Iterator[tuple[str, Callable[[torch.dtype, int], None]]]:
    """Norms of every kind and width, rotary embeddings in every layout, gates, and sums."""
    for kind in NORMS:
        yield f"norm of {HIDDEN}, {kind}", partial(_norm, kind, HIDDEN, False)
    for width in WIDTHS:
        yield f"norm of {width}", partial(_norm, NORMS[0], width, False)
    yield "norm of 128 with a gate", partial(_norm, NORMS[0], 128, True)
    for layout in ROTARIES:
        yield f"rotary, {layout}", partial(_rotate, layout, 128, 128)
    for dim, turned in ((64, 64), (96, 96), (128, 96), (256, 64), (256, 256)):
        yield f"rotary, {turned} of {dim}", partial(_rotate, ROTARIES[0], dim, turned)
    for activation in ACTIVATIONS:
        yield f"gate by {activation}", partial(_gate, activation)
    yield "sum of experts", _combine


def _norm(kind: Norm, width: int, has_gate: bool, dtype: torch.dtype, num_rows: int) -> None:
    """Also of rows that are a part of others."""
    for rows in (torch.zeros(1, num_rows, width, dtype=dtype), torch.zeros(1, num_rows, width + 64, dtype=dtype)):
        part = rows[:, :, :width]
        rows_triton.norm(part, torch.zeros(width, dtype=dtype), 1e-6, kind, part if has_gate else None)


def _rotate(kind: Rotary, dim: int, turned: int, dtype: torch.dtype, num_rows: int) -> None:
    queries, keys = (torch.zeros(1, num_rows, heads, dim, dtype=dtype).transpose(1, 2) for heads in (32, KV_HEADS))
    table = torch.zeros(1, num_rows, turned // 2 if kind.table is Table.HALF else turned, dtype=dtype)
    rows_triton.rotate(queries, keys, table, table, kind)


def _gate(activation: str, dtype: torch.dtype, num_rows: int) -> None:
    numbers = torch.zeros(1, num_rows, 4 * HIDDEN, dtype=dtype)
    rows_triton.gate(numbers, numbers, activation)


def _expert_tiles(num_rows: int) -> ExpertTiles:
    """Of so many experts that a tile has few rows."""
    numbers = torch.zeros(num_rows * CHOICES, dtype=torch.int64)
    return product_triton.expert_tiles(numbers, numbers, CHOICES, ROW_COUNTS[-1])


def _combine(dtype: torch.dtype, num_rows: int) -> None:
    chosen = torch.zeros(num_rows, CHOICES, dtype=torch.int64)
    entries = ExpertTiles(chosen, chosen.flatten().int(), chosen.flatten().int())
    made = torch.zeros(num_rows * CHOICES, HIDDEN, dtype=dtype)
    rows_triton.combine(made, entries, chosen, torch.zeros(num_rows, CHOICES), 128)


def matrices() -> Iterator[tuple[str, Packed]]:
    """A matrix of zeros in each format, by name."""
    for name, make in SAMPLES.items():
        source = make(OUTPUTS, INPUTS)
        matrix = source.packed([torch.zeros(place.num_bytes, dtype=torch.uint8) for place in source.places])
        yield name, matrix
        if isinstance(matrix, Along) and matrix.numbers.dtype == torch.int32 and matrix.bits == 4:
            yield f"{name}, zeros", matrix._replace(zeros=torch.zeros(OUTPUTS // 8, INPUTS // 128, dtype=torch.int32))
    for name in TYPES.keys() - SAMPLES.keys():
        values, num_bytes = BLOCKS[name]
        data = torch.zeros(OUTPUTS, INPUTS // values * num_bytes, dtype=torch.uint8)
        yield name, InBlocks(data, BLOCKS[name], TYPES[name], 1)


def _write(matrix: Packed, dtype: torch.dtype) -> None:
    shape = matrix.shape[::-1] if is_transposed(matrix) else matrix.shape
    out = torch.empty(shape, dtype=dtype)
    unpack_triton.write(matrix, out.t() if is_transposed(matrix) else out)


def _products(dtype: torch.dtype) -> Iterator[Kernel]:
    """With a matrix of each format, plain ones first, alone and by expert: for each number of rows of a program."""
    plain = torch.zeros(OUTPUTS, INPUTS, dtype=dtype)
    transposed = ("16 bits, transposed", plain.view(INPUTS, OUTPUTS).t())
    for name, matrix in (("16 bits", plain), transposed, *matrices()):
        for most, counts in PROGRAM_ROWS.items():
            yield Kernel(f"product, {name}, {most}", [partial(_multiply, matrix, dtype, count) for count in counts])
        yield Kernel(f"product, {name}, by expert", [partial(_multiply_grouped, matrix, dtype, n) for n in ROW_COUNTS])
    yield Kernel("product, by head", [partial(_multiply_by_head, dtype, count) for count in (1, 2, 8)])


def _multiply(matrix: Matrix, dtype: torch.dtype, num_rows: int) -> None:
    product_triton.multiply(torch.zeros(num_rows, INPUTS, dtype=dtype), matrix)


def _multiply_by_head(dtype: torch.dtype, num_rows: int) -> None:
    product_triton.linear_by_head(torch.zeros(32, num_rows, 128, dtype=dtype), torch.zeros(32, 512, 128, dtype=dtype))


def _multiply_grouped(matrix: Matrix, dtype: torch.dtype, num_rows: int) -> None:
    """Of so many experts that a program has few rows."""
    stack = Stack.of([matrix] * ROW_COUNTS[-1])
    tiles = ExpertTiles(*(torch.zeros(shape, dtype=torch.int32) for shape in ((num_rows, 3), num_rows, num_rows)))
    product_triton.multiply_grouped(torch.zeros(num_rows, INPUTS, dtype=dtype), stack, tiles)


def compiled(kernel: Kernel, capability: int) -> Compiled:
    """Compile a kernel by its wrapper; raises errors of Triton's compiler or of the assembler.

    Raises AssertionError if its calls come to several programs, which may give a row other bits.
    """
    with _programs(capability, kernel.function) as programs:
        for call in kernel.calls:
            call()
    assert len(programs) == 1, f"{kernel.name}: {len(programs)} programs for {len(kernel.calls)} numbers of rows"
    ((made, said),) = programs.values()
    registers = re.search(r"Used (\d+) registers", said)
    spilled = re.search(r"(\d+) bytes spill stores", said)
    assert registers is not None
    assert spilled is not None
    products = re.findall(r"mma(?:_async)?\.sync\.aligned\.(m\d+n\d+k\d+)", made.asm["ptx"])
    wide_loads = len(
        re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*, 0x10,|ld\.global\S*\.v4\.b32", made.asm["ptx"])
    )
    figures = int(registers[1]), int(spilled[1]), made.metadata.shared, tuple(sorted(set(products))), wide_loads
    return Compiled(kernel.name, capability, *figures)


@contextmanager
def _programs(capability: int, name: str) -> Iterator[dict[str, tuple[Any, str]]]:
    """Within the block, launches only compile; yields a function's programs, or all, and the assembler's reports."""
    programs: dict[str, tuple[Any, str]] = {}
    launch = JITFunction.run

    def run(function: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> Any:  # noqa: ARG001
        if name and function.__name__ != name:
            return None
        made, said = _assembled(function, lambda: launch(function, *arguments, grid=grid, warmup=True, **constants))
        programs[made.hash] = made, said
        return made

    driver.set_active(_AbsentGPU(capability))
    JITFunction.run = run
    try:
        yield programs
    finally:
        JITFunction.run = launch


def _assembled(function: Any, compile_: Callable[[], Any]) -> tuple[Any, str]:
    """A compiled kernel and the assembler's report, from Triton's cache if it has both."""
    with redirect_stdout(io.StringIO()) as printed, knobs.compilation.scope():
        made = compile_()
        kept = get_cache_manager(made.hash)
        if not printed.getvalue() and kept.get_file(LOG) is None:  # cached without its report
            knobs.compilation.always_compile = True
            function.device_caches.clear()
            made = compile_()
    if printed.getvalue():
        kept.put(printed.getvalue(), LOG)
    return made, Path(kept.get_file(LOG)).read_text()


def compiled_here(capabilities: Sequence[int], only: Sequence[str]) -> list[Compiled]:
    """Compile kernels whose name matches any pattern of `only` with this process's Triton; prints each."""
    rows = []
    for kernel in kernels():
        for capability in capabilities if any(re.search(part, kernel.name) for part in only) else ():
            rows.append(compiled(kernel, capability))
            print(rows[-1], flush=True)
    return rows


def compiled_by(version: str, capabilities: Sequence[int], only: Sequence[str]) -> list[Compiled]:
    """The same with another version of Triton, in a process of its own."""
    folder = cache_folder() / f"triton-{version}"
    if not (folder / "triton").is_dir():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*install, f"triton=={version}"], check=True)
    command = [sys.executable, "-m", "loadtest.gpu.compile_kernels", "--tritons", version, "--only", *only]
    command += ["--capabilities", *map(str, capabilities)]
    path = os.pathsep.join((str(folder), os.getcwd(), os.environ.get("PYTHONPATH", "")))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path})
    assert process.stdout is not None
    line = ""
    for line in process.stdout:
        if not line.startswith("{"):
            print(line, end="", flush=True)
    process.wait()
    return [Compiled(**row) for row in json.loads(line)["kernels"]]


def launches() -> dict[str, int]:
    """Launches of a layer by kind of model, from the pretended device of the tests."""
    counting = import_module("tests.fakes.gpu.launches")  # tests are not installed, nor are their types checked
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        counted: dict[str, int] = counting.launches_per_layer(Path(folder))
        return counted


def main() -> None:
    """Print results as they come, and one JSON line."""
    parser = FlagParser(description=__doc__)
    parser.add_argument("--capabilities", type=int, nargs="+", default=CAPABILITIES)
    parser.add_argument("--tritons", nargs="+", default=[triton_version, PREVIOUS_TRITON], help="versions of Triton")
    parser.add_argument("--only", nargs="+", default=[""], help="kernels whose name matches any of these patterns")
    arguments = parser.parse_args()
    rows = []
    for version in arguments.tritons:
        act = compiled_here if version == triton_version else partial(compiled_by, version)
        rows += act(arguments.capabilities, arguments.only)
    found = {"architectures": sorted({row.capability for row in rows}), "tritons": sorted({row.triton for row in rows})}
    counted = launches() if arguments.only == [""] else {}
    fit = all(row.fits for row in rows) and all(count <= MOST_LAUNCHES[name] for name, count in counted.items())
    spills = sum(row.spilled_bytes > 0 for row in rows)
    found |= {"spills": spills, "launches": counted, "fit": fit}
    print(json.dumps(found | {"kernels": [asdict(row) for row in rows]}))
    raise SystemExit(0 if fit else 1)


if __name__ == "__main__":
    main()
