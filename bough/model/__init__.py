"""Runs causal language models on packed trees; shared by the draft worker and the target worker."""

import hashlib
import os
from pathlib import Path

from bough.config.cache_paths import cache_folder

# Iterations for which an idle OpenMP thread spins before it sleeps; read once, when torch loads the library, so it must
# be set before anything imports torch. By default threads spin for milliseconds: when two processes share processors,
# spinning threads block the threads that they wait for, and both processes become many times slower. A third of this
# value would let threads fall asleep between one product and the next (docs/decisions/022-threads.md).
os.environ.setdefault("GOMP_SPINCOUNT", "3000")


def compiled_files(package: Path) -> list[Path]:
    """Files below a package's folder that mention our settings of numba's compiler."""
    return [file for file in sorted(package.rglob("*.py")) if b"cpu.jit" in file.read_bytes()]


def compiled_folder() -> Path:
    """Folder for what numba compiles of this version of the package, on processors like this.

    By default numba checks only the processor and the file with the function, and would reuse code compiled from other
    files that have changed since.
    """
    contents = b"".join(file.read_bytes() for file in compiled_files(Path(__file__).parent))
    return cache_folder() / "compiled" / hashlib.sha256(contents).hexdigest()[:16]


os.environ.setdefault("NUMBA_CACHE_DIR", str(compiled_folder()))
os.environ.setdefault("NUMBA_CACHE_LOCATOR_CLASSES", "bough.model.kernel_cache.ByContents,UserProvidedCacheLocator")

# By default Triton's cache is in the home folder, which a service may not write to, and which a container loses. Triton
# itself distinguishes versions and GPUs.
os.environ.setdefault("TRITON_CACHE_DIR", str(cache_folder() / "triton"))
