"""Kernels are compiled by a process of their own, once for all that want them."""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path

import pytest

from bough.errors import ConfigError
from bough.processes import compile_once
from bough.processes.compile_once import compile_in_subprocess, require_kernel_folder


def test_each_set_of_kernels_is_compiled_once_by_a_process_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[tuple[str, ...]] = []
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setattr(compile_once, "compile_in_a_process", lambda *command: compiled.append(command))
    wanted = (("target", ["bfloat16"], "1"), ("target", ["float32"], "1"), ("draft", ["bfloat16"], "1"))
    for each in (*wanted, *wanted, ("target", ["bfloat16"], "2")):
        assert compile_in_subprocess(*each)
    assert compiled == [(module, arguments) for module, arguments, _ in (*wanted, wanted[0])]


def test_a_worker_continues_if_kernels_cannot_be_compiled_separately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(module: str, arguments: list[str]) -> None:
        raise subprocess.CalledProcessError(-9, [module, *arguments])

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setattr(compile_once, "compile_in_a_process", fails)
    with caplog.at_level(logging.WARNING):
        assert not compile_in_subprocess("target", ["bfloat16"], "1")
    assert "kernels could not be compiled in a separate process" in caplog.text
    monkeypatch.setattr(compile_once, "compile_in_a_process", lambda *_: None)
    assert compile_in_subprocess("target", ["bfloat16"], "1")


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "new"))
    require_kernel_folder()
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/dev/null/kernels")
    with pytest.raises(ConfigError, match=r"^/dev/null/kernels: must be a folder .*; set BOUGH_CACHE_DIR to another"):
        require_kernel_folder()
