"""What numba has compiled is found again if the files are the same, and not if one of them differs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bough.model.kernel_cache import ByContents, _contents_hash


def folder_of(parent: Path, *, neighbour: str) -> Path:
    folder = parent / "package"
    folder.mkdir(parents=True)
    (folder / "kernels.py").write_text("import numba\n")
    (folder / "neighbour.py").write_text(neighbour)
    return folder / "kernels.py"


def test_a_folders_hash_covers_all_of_its_files(tmp_path: Path) -> None:
    """A function that calls one of a neighbour's kept using what had been compiled of the old one."""
    first, second, other = (
        ByContents.get_suitable_cache_subpath(str(folder_of(tmp_path / name, neighbour=text)))
        for name, text in (("first", "A = 1\n"), ("second", "A = 1\n"), ("other", "A = 2\n"))
    )
    assert first == second != other
    assert first.startswith("package_")


def test_a_packages_hash_covers_everything_that_it_compiles(tmp_path: Path) -> None:
    """A compiled function of one room calls those of another."""
    paths = []
    for name, text in (
        ("first", "from bough.model.cpu.jit import strict\n\n@strict\ndef f(): ..."),
        ("second", "from bough.model.cpu.jit import strict\n\n@strict\ndef f(): return 1"),
        ("words", "A = 1"),
    ):
        room = folder_of(tmp_path / name, neighbour="A = 1\n").parent
        other = room.parent / "other"
        other.mkdir()
        (room.parent / "__init__.py").touch()
        (other / "functions.py").write_text(text)
        paths.append(ByContents.get_suitable_cache_subpath(str(room / "kernels.py")))
    assert len(set(paths)) == 3
    (tmp_path / "words" / "other" / "words.py").write_text("B = 2")
    _contents_hash.cache_clear()
    assert ByContents.get_suitable_cache_subpath(str(tmp_path / "words" / "package" / "kernels.py")) == paths[2]


@pytest.mark.slow
def test_boughs_kernels_are_cached_there(tmp_path: Path) -> None:
    code = "from bough.model.cpu import linear; print(linear._multiply._cache._cache_path)"
    environ = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    environ.pop("NUMBA_CACHE_LOCATOR_CLASSES", None)
    output = subprocess.run([sys.executable, "-c", code], env=environ, check=True, capture_output=True, text=True)
    assert output.stdout.strip() == str(tmp_path / ByContents.get_suitable_cache_subpath(_products()))


def _products() -> str:
    from bough.model.cpu import linear

    return linear.__file__
