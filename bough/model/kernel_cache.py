"""The location of numba's cache of compiled code: by the contents of the compiled files instead of their paths.

numba's default cache is by path and checks only a function's own file for changes. Every clone would compile the same
files again, for a minute or more, and a function would still call the old code of a changed function in another file.
"""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from pathlib import Path

import numba
from llvmlite.binding import get_host_cpu_name
from numba.core.caching import UserProvidedCacheLocator

from bough.model import compiled_files

KERNELS = Path(__file__).parent / "cpu"  # called by compiled functions of all packages


class ByContents(UserProvidedCacheLocator):
    """Locates the cache in NUMBA_CACHE_DIR, in a folder named by a hash of all files that the code may use."""

    @classmethod
    def get_suitable_cache_subpath(cls, py_file: str) -> str:
        """Name of the cache folder, the same for all files of a folder."""
        folder = Path(py_file).absolute().parent
        return f"{folder.name}_{_contents_hash(folder)}"


@cache
def _contents_hash(folder: Path) -> str:
    """Hash of the folder's files, of its package's files with compiled functions, and of `KERNELS`.

    Files are hashed once, when the first of them is imported.
    """
    package = folder
    while (package.parent / "__init__.py").exists():
        package = package.parent
    files = {*folder.glob("*.py"), *compiled_files(package), *KERNELS.glob("*.py")}
    hash_ = hashlib.sha256()
    for name, file in sorted((file.name, file) for file in files):
        hash_.update(name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return hash_.hexdigest()[:16]


def compiled_key(package: Path) -> str:
    """Key of a package's compiled code: versions of Python and numba, the processor, and the contents of its files."""
    versions = f"{sys.implementation.cache_tag} {numba.__version__}"
    key = f"{versions} {get_host_cpu_name()} {_contents_hash(package)}"
    return hashlib.sha256(key.encode()).hexdigest()[:12]
