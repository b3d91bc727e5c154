"""Hash of the code that decides tokens: a target may continue another's session only if their hashes are equal.

The hash covers the parsed code of one backend; changed comments and docstrings do not prevent a failover. A test
follows the imports of a sweep, and lists the modules that cannot change tokens.
"""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from pathlib import Path

from bough.config.cache_paths import cache_folder
from bough.model.backend import Backend
from bough.model.checkpoint.atomic_files import make_folder, replace

ROOT = Path(__file__).parents[2]


def modules(*packages: tuple[str, str]) -> frozenset[str]:
    """Full names of the modules that are listed for each package."""
    return frozenset(f"{package}.{name}" for package, names in packages for name in names.split())


ROOMS = ("bough.model.architecture", "bough.model.batch", "bough.model.quant", "target_worker.verification")
OTHERS = modules(
    ("bough.grammar", "allowed_tokens grammar_process grammar_worker"),
    ("bough.model", "backend packed threads"),
    ("bough.model.checkpoint", "gguf_model tensor_source"),
    ("bough.model.kv", "session_kv slot state_shape states"),
    ("bough.model.loading", "loading"),
    ("bough.model.running", "batch_invariance fused_parts host_embeddings"),
    ("bough.model.sampling", "sampler"),
    ("bough.model.sizes", "target_limits"),
    ("bough.protocol", "sampling_params"),
    ("bough.sizing", "row_counts"),
    ("bough.trees", "tree tree_plan"),
    ("target_worker.experts", "expert_store"),
    ("target_worker.stages", "passes slots stage"),
    ("target_worker.sweep", "streamed_model"),
)


def deciding(backend: Backend) -> frozenset[str]:
    """The modules that decide the bits of a token: the backend's, all of `ROOMS` (with formats), and `OTHERS`."""
    files = [(room, file) for room in (*backend.rooms, *ROOMS) for file in source_of(room).parent.glob("[a-z]*.py")]
    own = {kind.__module__ for kind in type(backend).__mro__ if kind.__module__.startswith("bough.")}
    return OTHERS | {f"{room}.{file.stem}" for room, file in files} | own


@cache
def code_hash(backend: Backend) -> str:
    """Hash of the code of `deciding` as it was at the first call. Parsing takes half a second: the result is cached."""
    contents = {name: source_of(name).read_bytes() for name in sorted(deciding(backend))}
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
