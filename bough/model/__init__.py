"""Running a causal language model on packed trees: what the draft worker and the target worker share."""

import ctypes
import hashlib
import os
import platform
from functools import cache
from pathlib import Path

from bough.config.cache_paths import cache_folder

# How long an OpenMP thread spins before it sleeps, in turns; read once, when torch loads the library, so it is set
# here, before anything imports torch. The default is milliseconds: as soon as two processes compute on the same
# processors, threads spin while those that they wait for cannot run, and both become many times slower. A third of
# this lets them fall asleep between one product and the next (docs/decisions/022-threads.md).
os.environ.setdefault("GOMP_SPINCOUNT", "3000")


@cache
def may_use_tiles() -> bool:
    """Whether the system lets this process use registers of tiles (`bough.model.cpu.amx`), if the processor has any.

    Linux gives a process the room for them when it asks first, and otherwise ends it at the first instruction.
    BOUGH_TILES=0 does without them.
    """
    if os.environ.get("BOUGH_TILES") == "0" or (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18  # Documentation/arch/x86/xstate.rst
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


def compiled_files(package: Path) -> list[Path]:
    """Files in a package's folder, and in folders below it, that mention numba's compiler or our settings of it."""
    files = sorted(package.rglob("*.py"))
    return [file for file in files if any(word in file.read_bytes() for word in (b"njit", b"compiled"))]


def compiled_folder() -> Path:
    """For what numba compiles of this package as it is, on processors and in systems like this.

    On its own numba looks only at the processor and the file that a function stands in. It would go on using what it
    compiled from other files that have changed since, and use tiles where they are refused.
    """
    contents = b"".join(file.read_bytes() for file in compiled_files(Path(__file__).parent))
    folder = hashlib.sha256(contents).hexdigest()[:16] + ("-tiles" if may_use_tiles() else "")
    return cache_folder() / "compiled" / folder


os.environ.setdefault("NUMBA_CACHE_DIR", str(compiled_folder()))
os.environ.setdefault("NUMBA_CACHE_LOCATOR_CLASSES", "bough.model.cpu.kernel_cache.ByContents,UserProvidedCacheLocator")
