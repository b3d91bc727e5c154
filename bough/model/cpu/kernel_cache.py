"""Where numba keeps what it has compiled: by what stands in the files that it compiled, wherever these are.

numba's own place is a file's path, and it looks for changes in a function's own file only. So every clone and every
worktree compiled the same files anew, for a minute or more, and a function that calls one of another file that has
changed went on with what had been compiled of the old one.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import numba
from llvmlite.binding import get_host_cpu_name
from numba.core.caching import UserProvidedCacheLocator

from bough.model import compiled_files

KERNELS = Path(__file__).parent  # which compiled functions of all packages call


class ByContents(UserProvidedCacheLocator):
    """A folder within NUMBA_CACHE_DIR, named after a folder of Python files and a hash of all that these may call."""

    @classmethod
    def get_suitable_cache_subpath(cls, py_file: str) -> str:
        """The same for all files of a folder."""
        folder = Path(py_file).absolute().parent
        return f"{folder.name}_{_contents_hash(folder)}"


@cache
def _contents_hash(folder: Path) -> str:
    """Of the folder's files, of all with compiled functions in its package, and of the kernels that all packages use.

    They are taken as they were when the first of them was imported.
    """
    package = folder
    while (package.parent / "__init__.py").exists():
        package = package.parent
    files = {*folder.glob("*.py"), *compiled_files(package), *KERNELS.glob("*.py")}
    hash_ = hashlib.sha256()
    for name, file in sorted((file.name, file) for file in files):
        hash_.update(name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return hash_.hexdigest()[:16]


def compiled_ground(package: Path) -> str:
    """What numba tells what it has compiled apart by: its own version, the processor, and a package's files."""
    ground = f"{numba.__version__} {get_host_cpu_name()} {_contents_hash(package)}"
    return hashlib.sha256(ground.encode()).hexdigest()[:12]
