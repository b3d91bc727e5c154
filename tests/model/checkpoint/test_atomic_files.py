"""Files that several processes write."""

from __future__ import annotations

from pathlib import Path

import pytest

from bough.model.checkpoint.atomic_files import replace


def test_two_processes_may_write_a_file_at_the_same_time(tmp_path: Path) -> None:
    """Stages that start together kept a hash in one cache: the second took the first one's unfinished file away."""
    file = tmp_path / "hash"

    def write(partial: Path) -> None:
        replace(file, lambda other: other.write_text("theirs"))
        partial.write_text("ours")

    replace(file, write)
    assert file.read_text() == "ours"
    assert [*tmp_path.iterdir()] == [file]


def test_an_interrupted_write_leaves_no_file(tmp_path: Path) -> None:
    """Ctrl-C while a model was written left its unfinished part, under a name that nobody uses again."""

    def interrupted(partial: Path) -> None:
        partial.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace(tmp_path / "part of a model", interrupted)
    assert not [*tmp_path.iterdir()]
