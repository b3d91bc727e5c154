"""A hash over all bytes of the weights: computed once per file, out of the way of sweeps."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import threading
from pathlib import Path

import pytest

from bough.config.processes import TargetConfig, parse
from bough.errors import CheckpointError
from target_worker.identity import weights_hash
from target_worker.identity.weights_hash import (
    BUSY_SHARE,
    PIECE_BYTES,
    Closed,
    ReadPacing,
    WeightsHash,
    file_digest,
    known_digest,
)
from target_worker.link.direct_io import FileState
from target_worker.worker import TargetWorker


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BOUGH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights"


def file_of(folder: Path, size: int, name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_bytes(os.urandom(size))
    return file


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("size", [0, 1, 4096, 2 * PIECE_BYTES + 777])
def test_a_digest_covers_all_bytes(tmp_path: Path, size: int, is_direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_direct:
        monkeypatch.setattr(os, "O_DIRECT", 0o100000000)  # a flag that the kernel does not know
        monkeypatch.setattr(os, "preadv", _refusing_first(os.preadv))
    file = file_of(tmp_path, size)
    assert file_digest(file, FileState.of(file)) == hashlib.sha256(file.read_bytes()).hexdigest()


def _refusing_first(preadv):
    """As a file system without direct reads does: the read that proves them fails."""
    calls = []

    def read(*args: object) -> int:
        calls.append(args)
        if len(calls) == 1:
            raise OSError(22, "Invalid argument")
        return int(preadv(*args))

    return read


def test_a_digest_is_cached_for_an_unchanged_file(tmp_path: Path, cache: Path) -> None:
    file = file_of(tmp_path, 10_000)
    state = FileState.of(file)
    assert known_digest(file, state) is None
    digest = file_digest(file, state)
    assert known_digest(file, state) == digest
    os.utime(file, ns=(0, state.mtime_ns + 1))
    assert known_digest(file, FileState.of(file)) is None, "it was written to"
    (entry,) = cache.iterdir()
    entry.write_text("half of a dig")
    assert known_digest(file, state) is None, "what was damaged is computed again"


def test_a_digest_is_computed_without_a_cache(tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.parent.write_text("a file is in the way")
    file = file_of(tmp_path, 10)
    assert file_digest(file, FileState.of(file)) == hashlib.sha256(file.read_bytes()).hexdigest()
    assert "BOUGH_CACHE_DIR" in caplog.text
    assert "read again at the next start" in caplog.text


def test_a_file_written_to_meanwhile_has_no_digest(tmp_path: Path, cache: Path) -> None:
    file = file_of(tmp_path, 2 * PIECE_BYTES)
    state, pieces = FileState.of(file), []

    def write() -> None:
        pieces.append(1)
        if len(pieces) == 2:
            os.truncate(file, PIECE_BYTES)

    with pytest.raises(CheckpointError, match=r"model\.safetensors: has been written to"):
        file_digest(file, state, write)
    assert not cache.exists()
    with pytest.raises(CheckpointError, match=r"gone: cannot be opened"):
        file_digest(tmp_path / "gone", state)


class Turned:
    """A clock that waiting turns, and time that reading takes."""

    def __init__(self, idle_seconds: float) -> None:
        self.now, self.waited, self.idle_seconds, self.is_over = 0.0, 0.0, idle_seconds, False

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        self.waited += seconds
        return self.is_over

    def pace(self) -> ReadPacing:
        return ReadPacing(lambda: self.idle_seconds, self.wait, lambda: self.now)


def test_little_is_read_while_sweeps_run_and_as_much_as_possible_otherwise() -> None:
    clock = Turned(idle_seconds=0.0)
    pace = clock.pace()
    for _ in range(100):
        clock.now += 0.1  # a piece was read
        pace.give_way()
    assert 10.0 / (10.0 + clock.waited) == pytest.approx(BUSY_SHARE, rel=0.05)
    clock.idle_seconds, clock.waited = weights_hash.QUIET_SECONDS, 0.0
    for _ in range(100):
        clock.now += 0.1
        pace.give_way()
    assert clock.waited == 0.0


@pytest.mark.parametrize("idle_seconds", [0.0, 100.0])
def test_closing_waits_for_at_most_one_piece(idle_seconds: float) -> None:
    clock = Turned(idle_seconds)
    clock.is_over = True
    with pytest.raises(Closed):
        clock.pace().give_way()


def test_files_are_read_once_and_known_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [file_of(tmp_path / "model", 1000, f"{number}.safetensors") for number in range(3)]
    value = _computed(WeightsHash(files))
    monkeypatch.setattr(weights_hash.os, "preadv", None)  # nothing is read any more
    assert WeightsHash(files).value == value
    elsewhere = shutil.copytree(tmp_path / "model", tmp_path / "elsewhere")
    monkeypatch.undo()
    copy = WeightsHash([elsewhere / file.name for file in files])
    assert copy.value == "", "as far as it has not been read"
    assert _computed(copy) == value, "the same on every machine"
    files[0].write_bytes(files[0].read_bytes()[:-1] + b"x")
    assert _computed(WeightsHash(files)) != value


def _computed(weights: WeightsHash) -> str:
    weights.start(lambda: 100.0)
    assert weights._thread is not None
    weights._thread.join()
    return weights.value


def test_a_file_written_to_since_the_start_has_no_hash(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = file_of(tmp_path, 1000)
    weights = WeightsHash([file])
    file.write_bytes(bytes(999))
    with pytest.raises(CheckpointError, match="while the model was loaded"):
        weights.require_unchanged()
    assert _computed(weights) == ""
    assert "compared by samples only" in caplog.text
    file.unlink()
    weights.require_unchanged()


def test_closing_ends_the_thread_within_a_file(tmp_path: Path) -> None:
    weights = WeightsHash([file_of(tmp_path, 10)])
    asked = threading.Event()

    def idle_seconds() -> float:
        asked.set()
        return 0.0

    weights.close()  # before it was started
    weights = WeightsHash([file_of(tmp_path, 10)])
    weights._closed.wait = lambda seconds: asked.set() or threading.Event.wait(weights._closed, seconds)
    weights.start(idle_seconds)
    assert asked.wait(10)
    weights.close()
    assert weights._thread is not None
    assert not weights._thread.is_alive()


def test_a_target_reports_its_hash_once_it_is_known(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(tiny, tmp_path / "model")
    config = parse(TargetConfig, "t", ["--model", str(folder), "--dtype", "float32", "--threads", "1"], {})
    with caplog.at_level(logging.WARNING, "target_worker.identity.weights_hash"):
        worker = TargetWorker(config, "t")
    try:
        assert worker._weights_hash._thread is not None
        worker._weights_hash._thread.join()
        known = worker.info()
    finally:
        worker.close()
    assert len(known.weights_hash) == 32
    assert WeightsHash(folder.glob("*.safetensors")).value == known.weights_hash
