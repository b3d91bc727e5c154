"""The demonstration model is written once, whoever wants it at the same time."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bough.cli.machine import up
from bough.config.cache_paths import EXPANSION_NAME, demonstration_folder
from bough.errors import ConfigError


def test_who_comes_second_waits_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOUGH_CACHE_DIR", str(tmp_path / "new"))
    written = []

    def write(folder: Path, copies: int) -> None:
        time.sleep(0.2)
        folder.mkdir()
        (folder / EXPANSION_NAME).write_text(json.dumps({"copies": copies}))
        written.append(folder)

    monkeypatch.setattr(up, "_write_demonstration", write)
    with ThreadPoolExecutor(3) as pool:
        for waiting in [pool.submit(up.ensure_demonstration, 2) for _ in range(3)]:
            waiting.result()
    assert written == [demonstration_folder(2)]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BOUGH_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"file/smollm2-135m-x3: .*exists"):
        up.ensure_demonstration(2)
