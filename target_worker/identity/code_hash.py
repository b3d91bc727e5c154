"""Hash of the code that decides tokens: a target may continue another's session only if their hashes are equal.

The hash covers the parsed code, so that changed comments and docstrings do not prevent a failover. `DECIDING` lists the
modules that decide the bits of a token; `OTHERS` lists what they import that only finds, moves, counts or names things.
A test checks that every imported module is in one of the two.
"""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from pathlib import Path

from bough.config.cache_paths import cache_folder
from bough.model.checkpoint.atomic_files import make_folder, replace

ROOT = Path(__file__).parents[2]


def _modules(*rooms: tuple[str, str]) -> frozenset[str]:
    """Full names of the modules that are listed for each package."""
    return frozenset(f"{room}.{name}" for room, names in rooms for name in names.split())


DECIDING = _modules(
    ("bough.grammar", "allowed_tokens"),
    ("bough.model.architecture", "architecture attention moe"),
    ("bough.model.batch", "batch gpu_paths path_spans"),
    ("bough.model.checkpoint", "tensor_source"),
    ("bough.model.cpu",
     "atomics attention_cpu attention_kernel float_bits gemm gemm_few_outputs "
     "gemm_int8 gemm_parallel jit kv_rows late_code linear llvm_vectors operands simd threads work_stealing"),
    ("bough.model.gpu", "attention_triton kernels unpack_triton"),
    ("bough.model.kv", "segment session_kv slot split_layers"),
    ("bough.model.llama", "layer rows weights workspace"),
    ("bough.model.loading", "late_writes loading weight_map"),
    ("bough.model.quant", "awq bough_format format formats gptq quantize"),
    ("bough.model.running", "batch_invariance host_embeddings"),
    ("bough.model.sampling", "sampler token_counts"),
    ("bough.model.sizes", "target_limits"),
    ("bough.protocol", "sampling_params"),
    ("bough.sizing", "row_counts"),
    ("bough.trees", "draft_probs tree tree_plan"),
    ("target_worker.experts", "expert_store"),
    ("target_worker.sweep", "compiled_layers streamed_model streamed_sweeper"),
    ("target_worker.verification", "logit_rows traversal verdict verify"),
)  # fmt: skip
OTHERS = _modules(
    ("bough", "errors"),
    ("bough.model", "architecture cpu gpu"),  # the rooms themselves
    ("bough.concurrency", "futures"),
    ("bough.config", "cache_paths flag_parser parsers processes reader service_links"),
    ("bough.model.checkpoint", "atomic_files checkpoint content_samples hub pack_manifest shared_weights"),
    ("bough.model.cpu", "huge_pages"),
    ("bough.model.gpu", "faults"),
    ("bough.model.packing", "pack shard_writer"),
    ("bough.model.quant", "samples"),
    ("bough.model.running", "device"),
    ("bough.model.sizes", "memory_budget model_sizes stored_format"),
    ("bough.protocol", "cost_curve messages prefix_hash"),
    ("bough.runtime", "fatal_exit host_memory kv_budget machine"),
    ("bough.sizing", "flops other_devices placement row_averages sweep_times"),
    ("bough.telemetry", "spans"),
    ("bough.tokenization", "vocabulary"),
    ("target_worker.experts", "expert_cache expert_copies expert_reads"),
    ("target_worker.kv", "kv_offload session_slot"),
    ("target_worker.link",
     "copy_stats device_ring direct_io disk_reader disk_ring disk_stats file_digests host_layers layer_extents "
     "open_files pinned_memory streams"),
    ("target_worker.scheduler", "batching job sweep_figures sweeper"),
    ("target_worker.sweep", "tiers warm_up"),
)  # fmt: skip


@cache
def code_hash() -> str:
    """Hash of `DECIDING` as the files were at the first call. Parsing takes half a second, so the result is cached."""
    contents = {name: source_of(name).read_bytes() for name in sorted(DECIDING)}
    raw = hashlib.sha256(b"\0".join(contents.values())).hexdigest()[:32]
    kept = cache_folder() / "code" / raw
    try:
        return kept.read_text()
    except OSError:
        pass
    digest = hashlib.sha256()
    for name, content in contents.items():
        digest.update(f"{name}\n{meaning(content)}\n".encode())
    found = digest.hexdigest()[:16]
    make_folder("BOUGH_CACHE_DIR", kept.parent)
    replace(kept, lambda partial: partial.write_text(found))
    return found


def meaning(content: bytes) -> str:
    """The parsed code of a file, without comments, docstrings and positions."""
    tree = ast.parse(content)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


def source_of(module: str) -> Path:
    """The file of a module or package."""
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
