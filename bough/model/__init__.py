"""Running a causal language model on packed trees: what the draft worker and the target worker share."""

import hashlib
import os
from pathlib import Path

from bough.config.cache_paths import cache_folder

# How long an OpenMP thread spins before it sleeps, in turns; read once, when torch loads the library, so it is set
# here, before anything imports torch. The default is milliseconds: as soon as two processes compute on the same
# processors, threads spin while those that they wait for cannot run, and both become many times slower. A third of
# this lets them fall asleep between one product and the next (docs/decisions/022-threads.md).
os.environ.setdefault("GOMP_SPINCOUNT", "3000")


def compiled_files(package: Path) -> list[Path]:
    """Files in a package's folder, and in folders below it, that mention our settings of numba's compiler."""
    return [file for file in sorted(package.rglob("*.py")) if b"cpu.jit" in file.read_bytes()]


def compiled_folder() -> Path:
    """For what numba compiles of this package as it is, on processors like this.

    On its own numba looks only at the processor and the file that a function stands in. It would go on using what it
    compiled from other files that have changed since.
    """
    contents = b"".join(file.read_bytes() for file in compiled_files(Path(__file__).parent))
    return cache_folder() / "compiled" / hashlib.sha256(contents).hexdigest()[:16]


os.environ.setdefault("NUMBA_CACHE_DIR", str(compiled_folder()))
os.environ.setdefault("NUMBA_CACHE_LOCATOR_CLASSES", "bough.model.cpu.kernel_cache.ByContents,UserProvidedCacheLocator")
