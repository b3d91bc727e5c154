"""Hash of the code that decides tokens: a target may continue another's session only if their hashes are equal.

The hash covers the parsed code, so that changed comments and docstrings do not prevent a failover. `DECIDING` lists the
modules that decide the bits of a token. A test follows their imports, and names those that only find, move, count or
name things.
"""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from pathlib import Path

from bough.config.cache_paths import cache_folder
from bough.model.checkpoint.atomic_files import make_folder, replace

ROOT = Path(__file__).parents[2]


def modules(*packages: tuple[str, str]) -> frozenset[str]:
    """Full names of the modules that are listed for each package."""
    return frozenset(f"{package}.{name}" for package, names in packages for name in names.split())


DECIDING = modules(
    ("bough.grammar", "allowed_tokens grammar_process grammar_worker"),
    ("bough.model.architecture", "architecture attention gated_delta latent moe side_by_side"),
    ("bough.model.batch", "batch gpu_paths path_spans state_steps"),
    ("bough.model.checkpoint", "gguf_config tensor_source"),
    ("bough.model.cpu",
     "atomics attention_cpu attention_kernel delta_rule float_bits gemm gemm_few_outputs "
     "gemm_int8 gemm_parallel jit kv_rows late_code linear llvm_vectors operands simd threads work_stealing"),
    ("bough.model.gpu",
     "attention_tiles attention_triton blocks_triton delta_rule_triton kernels number_formats_triton "
     "online_softmax_triton unpack_triton"),
    ("bough.model.kv", "segment session_kv slot split_layers state_shape states"),
    ("bough.model.llama", "layer rows weights workspace"),
    ("bough.model.loading", "late_writes loading weight_map"),
    ("bough.model.quant", " ".join(file.stem for file in (ROOT / "bough/model/quant").glob("[a-z]*.py"))),
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
