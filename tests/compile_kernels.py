"""Has numba compile the kernels once, before dozens of processes would each do it at the same time.

Where all is compiled already, which a file beside the compiled code tells, nothing that compiles is imported.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from bough.model.kernel_cache import compiled_key

ROOT = Path(__file__).parents[1]
CALLERS = ("bough/model", "draft_worker", "target_worker")  # their code decides which kernels are called with what


def ground() -> str:
    """Key of all that kernels are compiled from and for."""
    hash_ = hashlib.sha256(compiled_key(ROOT / "target_worker").encode())
    files = [file for folder in CALLERS for file in sorted((ROOT / folder).rglob("*.py"))]
    for file in (*files, ROOT / "tests" / "all_kernels.py"):
        hash_.update(file.read_bytes())
    return hash_.hexdigest()[:16]


def main() -> None:
    """Takes a minute or two where nothing is in the cache, and a moment where all is."""
    done = Path(os.environ["NUMBA_CACHE_DIR"]) / f"tests-{ground()}"
    if not done.exists():
        from tests.all_kernels import compile_all

        compile_all()
        done.touch()


if __name__ == "__main__":
    main()
