"""Which code computes: two targets may go on with one another's sessions only where it is the same.

The hash is over what the code does, as Python parses it: a comment or a docstring that changes must not keep a session
from its other target. `DECIDING` names what decides the bits of a token; `OTHERS` what these modules import and what
only finds, moves, counts or names things. A test holds that nothing that is imported is in neither.
"""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from pathlib import Path

from bough.config.cache_paths import cache_folder
from bough.model.checkpoint.atomic_files import make_folder, replace

ROOT = Path(__file__).parents[2]
DECIDING = frozenset(
    {
        f"bough.model.architecture.{name}"
        for name in (
            "architecture",
            "attention",
            "moe",
        )
    }
    | {
        f"bough.model.batch.{name}"
        for name in (
            "batch",
            "gpu_paths",
            "path_spans",
        )
    }
    | {f"bough.model.checkpoint.{name}" for name in ("tensor_source",)}
    | {
        f"bough.model.cpu.{name}"
        for name in (
            "atomics",
            "attention_cpu",
            "attention_scores",
            "attention_tiles",
            "float_bits",
            "gemm",
            "gemm_few_outputs",
            "gemm_int8",
            "gemm_parallel",
            "linear",
            "llvm_vectors",
            "operands",
            "simd",
            "threads",
            "work_stealing",
        )
    }
    | {
        f"bough.model.gpu.{name}"
        for name in (
            "attention_triton",
            "kernels",
            "unpack_triton",
        )
    }
    | {
        f"bough.model.kv.{name}"
        for name in (
            "segment",
            "session_kv",
            "slot",
        )
    }
    | {
        f"bough.model.llama.{name}"
        for name in (
            "layer",
            "rows",
            "weights",
            "workspace",
        )
    }
    | {
        f"bough.model.loading.{name}"
        for name in (
            "loading",
            "weight_map",
        )
    }
    | {
        f"bough.model.quant.{name}"
        for name in (
            "group_order",
            "packed",
            "quantize",
        )
    }
    | {
        f"bough.model.running.{name}"
        for name in (
            "batch_invariance",
            "host_embeddings",
        )
    }
    | {
        f"bough.model.sampling.{name}"
        for name in (
            "sampler",
            "token_counts",
        )
    }
    | {f"bough.model.sizes.{name}" for name in ("target_limits",)}
    | {f"bough.protocol.{name}" for name in ("sampling_params",)}
    | {f"bough.sizing.{name}" for name in ("row_counts",)}
    | {
        f"bough.trees.{name}"
        for name in (
            "draft_probs",
            "tree",
            "tree_plan",
        )
    }
    | {f"target_worker.experts.{name}" for name in ("expert_store",)}
    | {
        f"target_worker.sweep.{name}"
        for name in (
            "compiled_layers",
            "streamed_model",
            "streamed_sweeper",
        )
    }
    | {
        f"target_worker.verification.{name}"
        for name in (
            "traversal",
            "verdict",
            "verify",
        )
    }
)
OTHERS = frozenset(
    {"bough", "target_worker"}
    | {
        f"bough.{name}"
        for name in (
            "concurrency",
            "config",
            "errors",
            "model",
            "protocol",
            "runtime",
            "sizing",
            "trees",
        )
    }
    | {f"bough.concurrency.{name}" for name in ("futures",)}
    | {
        f"bough.config.{name}"
        for name in (
            "cache_paths",
            "parsers",
            "processes",
            "reader",
            "service_links",
        )
    }
    | {
        f"bough.model.{name}"
        for name in (
            "architecture",
            "batch",
            "checkpoint",
            "cpu",
            "gpu",
            "kv",
            "llama",
            "loading",
            "packing",
            "quant",
            "running",
            "sampling",
            "sizes",
        )
    }
    | {
        f"bough.model.checkpoint.{name}"
        for name in (
            "atomic_files",
            "checkpoint",
            "content_samples",
            "hub",
            "pack_manifest",
            "shared_weights",
        )
    }
    | {f"bough.model.cpu.{name}" for name in ("huge_pages",)}
    | {f"bough.model.gpu.{name}" for name in ("faults",)}
    | {
        f"bough.model.packing.{name}"
        for name in (
            "pack",
            "shard_writer",
        )
    }
    | {f"bough.model.running.{name}" for name in ("device",)}
    | {
        f"bough.model.sizes.{name}"
        for name in (
            "memory_budget",
            "model_sizes",
        )
    }
    | {
        f"bough.protocol.{name}"
        for name in (
            "cost_curve",
            "messages",
            "prefix_hash",
        )
    }
    | {
        f"bough.runtime.{name}"
        for name in (
            "fatal_exit",
            "kv_budget",
            "machine",
        )
    }
    | {
        f"bough.sizing.{name}"
        for name in (
            "flops",
            "placement",
            "row_averages",
            "sweep_times",
        )
    }
    | {
        f"target_worker.{name}"
        for name in (
            "experts",
            "kv",
            "link",
            "scheduler",
            "sweep",
            "verification",
        )
    }
    | {
        f"target_worker.experts.{name}"
        for name in (
            "expert_cache",
            "expert_copies",
            "expert_reads",
        )
    }
    | {
        f"target_worker.kv.{name}"
        for name in (
            "kv_offload",
            "session_slot",
        )
    }
    | {
        f"target_worker.link.{name}"
        for name in (
            "copy_stats",
            "device_ring",
            "direct_io",
            "disk_reader",
            "disk_ring",
            "disk_stats",
            "file_digests",
            "host_layers",
            "layer_extents",
            "open_files",
            "streams",
        )
    }
    | {
        f"target_worker.scheduler.{name}"
        for name in (
            "batching",
            "job",
            "sweep_figures",
            "sweeper",
        )
    }
    | {
        f"target_worker.sweep.{name}"
        for name in (
            "tiers",
            "warm_up",
        )
    }
)


@cache
def code_hash() -> str:
    """Of `DECIDING`, as these files were when this was first asked. Parsing takes half a second, so it is kept."""
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
    """A file's code without comments, docstrings and places."""
    tree = ast.parse(content)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


def source_of(module: str) -> Path:
    """Its file."""
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
