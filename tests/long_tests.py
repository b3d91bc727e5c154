"""Which of the tests marked `long` CI runs: those whose code has changed since they last passed on this machine.

python -m tests.long_tests             prints the folders whose tests are due
python -m tests.long_tests --passed    notes that they have passed
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

from bough.config.cache_paths import cache_folder

ROOT = Path(__file__).parents[1]
EVERYWHERE = ("bough/model", "bough/protocol", "bough/trees", "constraints.txt", "tests/conftest.py", "tests/fakes")
COVERS = {  # what each folder's long tests may fail for, besides its own code
    "tests/cli": ("bough/cli", "bough/processes", "orchestrator"),
    "tests/clients": ("bough/grammar", "bough/tokenization", "orchestrator"),
    "tests/draft_worker": ("draft_worker",),
    "tests/gpu": ("draft_worker", "target_worker"),
    "tests/loadtest": (
        *("bough/client", "bough/registry", "bough/simulation", "draft_worker", "loadtest", "orchestrator"),
        *("simulator", "target_worker"),
    ),
    "tests/model": ("bough/sizing", "loadtest/common"),
    "tests/orchestrator": ("orchestrator",),
    "tests/pipeline": ("bough/grammar", "bough/processes", "draft_worker", "orchestrator", "target_worker"),
    "tests/processes": ("bough/processes", "orchestrator", "target_worker"),
    "tests/rpc": ("bough/rpc", "orchestrator"),
    "tests/runtime": ("bough/runtime", "draft_worker"),
    "tests/security": ("bough/rpc", "orchestrator"),
    "tests/simulation": ("bough/grammar", "bough/simulation"),
    "tests/simulator": ("bough/simulation", "bough/sizing", "docs/capacity.md", "orchestrator/sizing", "simulator"),
    "tests/sizing": ("bough/sizing", "draft_worker", "orchestrator", "target_worker"),
    "tests/target_worker": ("target_worker",),
}


def contents(name: str) -> bytes:
    """The contents of a file, or of every file of a folder, with their names."""
    path = ROOT / name
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix != ".pyc")
    return b"".join(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes() for file in files if file.is_file())


def passed(folder: str) -> Path:
    """A file that exists if the folder's long tests have passed on what they cover now."""
    covered = b"".join(contents(name) for name in (folder, *COVERS[folder], *EVERYWHERE))
    return cache_folder() / "long-tests" / f"{Path(folder).name}-{hashlib.sha256(covered).hexdigest()[:16]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passed", action="store_true")
    due = {folder: file for folder in COVERS if not (file := passed(folder)).exists()}
    if parser.parse_args().passed:
        for folder, file in due.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            for before in file.parent.glob(f"{Path(folder).name}-*"):
                before.unlink()
            file.touch()
    else:
        print(*due)


if __name__ == "__main__":
    main()
