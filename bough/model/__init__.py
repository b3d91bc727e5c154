"""Running a causal language model on packed trees: what the draft worker and the target worker share."""

import hashlib
import os
from functools import cache
from pathlib import Path

from bough.demonstration import cache_folder

# How long an OpenMP thread spins before it sleeps, in turns; read once, when torch loads the library, so it is set
# here, before anything imports torch. The default is milliseconds: as soon as two processes compute on the same
# processors, threads spin while those that they wait for cannot run, and both become many times slower. A third of
# this lets them fall asleep between one product and the next (docs/decisions.md).
os.environ.setdefault("GOMP_SPINCOUNT", "3000")


@cache
def files_hash() -> str:
    """Of these files as they were when they were imported: others might round otherwise."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def compiled_folder() -> Path:
    """For what numba compiles of these files as they are.

    On its own numba looks only at the file that a function stands in, and would go on using what it compiled from
    others that have changed since.
    """
    return cache_folder() / "compiled" / files_hash()


os.environ.setdefault("NUMBA_CACHE_DIR", str(compiled_folder()))
