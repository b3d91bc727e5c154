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

from bough.demonstration import cache_folder
from bough.model.files import make_folder, replace

ROOT = Path(__file__).parent.parent
DECIDING = frozenset(
    {f"target_worker.{name}" for name in ("compiled", "expert_store", "judge", "streamed_sweeper", "sweep")}
    | {f"target_worker.{name}" for name in ("traversal", "verify")}
    | {f"bough.{name}" for name in ("draft_probs", "growth", "row_counts", "sampling", "tree")}
    | {f"bough.model.gpu.{name}" for name in ("embeddings", "kernels", "unpack_triton")}
    | {
        f"bough.model.{name}"
        for name in (
            "architecture", "atomics", "attention", "attention_cpu", "attention_scores",
            "attention_tiles", "attention_triton", "batch", "draw", "experts", "few_outputs", "group_order",
            "int8_tiles", "kv", "lanes", "lean_layer", "lean_parts", "lean_rooms", "lean_rows", "limits", "loading",
            "naming", "numbers", "operands", "packed", "paths", "project", "quantize", "reproducible", "row_products",
            "segment", "shares", "slot", "source", "spans", "threads", "tiles", "token_counts", "vectors",
        )
    }
)  # fmt: skip
OTHERS = frozenset(
    {"bough", "bough.model", "bough.model.gpu", "target_worker"}  # the rooms themselves
    | {f"bough.{name}" for name in ("config", "demonstration", "errors", "futures", "messages", "placement", "prefix")}
    | {f"bough.{name}" for name in ("service_links", "settings", "values", "work")}
    | {f"bough.runtime.{name}" for name in ("ending", "kv_budget", "machine")}
    | {f"bough.sizing.{name}" for name in ("cost_curve", "row_averages", "sweep_times")}
    | {
        f"bough.model.{name}"
        for name in (
            "checkpoint", "contents", "device", "files", "gpu.faults", "hub", "memory", "origin", "pack", "pack_folder",
            "pack_manifest", "pages", "shapes",
        )
    }
    | {
        f"target_worker.{name}"
        for name in (
            "batching", "copy_ring", "digests", "disk", "expert_copies", "expert_reads", "expert_rooms", "files",
            "held", "host", "job", "kv_stage", "lane_traffic", "lanes", "reading", "stream", "sweep_figures", "sweeper",
            "tiers", "traffic", "warm_up", "weights",
        )
    }
)  # fmt: skip


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
