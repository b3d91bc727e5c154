"""Whether two checkpoints have the same weights, as far as samples show."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from bough.errors import CheckpointError, StreamError
from bough.model.checkpoint import checkpoint
from bough.model.checkpoint.checkpoint import SAMPLE_BYTES, Checkpoint, samples_digest, samples_of
from bough.model.checkpoint.container import TensorPlace
from bough.model.checkpoint.safetensors_folder import SINGLE_NAME
from target_worker.link import direct_io
from tests.fakes.models import plain_logits, streamed

DATA = Path(__file__).parents[2] / "data"
TOKENS = [3, 1, 4, 1, 5]


def train(place: TensorPlace) -> None:
    """Changes every number of a tensor, as training does, and nothing else of the file."""
    with place.file.open("r+b") as file:
        file.seek(place.offset)
        data = np.frombuffer(file.read(place.num_bytes), np.uint8)
        file.seek(place.offset)
        file.write((data ^ 1).tobytes())


def plain(tiny: Path, folder: Path) -> Path:
    return shutil.copytree(tiny, folder)


def community(name: str) -> Callable[[Path, Path], Path]:
    """A folder with a layer that a library has packed."""

    def make(tiny: Path, folder: Path) -> Path:
        folder.mkdir()
        shutil.copyfile(tiny / "config.json", folder / "config.json")
        shutil.copyfile(DATA / f"{name}.safetensors", folder / SINGLE_NAME)
        return folder

    return make


FORMATS = {"safetensors": plain, "gptq": community("auto-gptq"), "awq": community("autoawq")}
FORMATS |= {name: community(name) for name in ("compressed-tensors", "compressed-tensors-fp8")}


@pytest.mark.parametrize("name", FORMATS)
def test_checkpoints_that_differ_in_one_tensor_have_different_identities(tiny: Path, tmp_path: Path, name: str) -> None:
    first, second = (Checkpoint.open(FORMATS[name](tiny, tmp_path / str(number))) for number in range(2))
    assert first.fingerprint() == second.fingerprint(), "a copy is the same"
    for place in (*second.tensors.values(),)[:3]:
        train(place)
        assert first.fingerprint() != second.fingerprint(), place.name
        train(place)
        assert first.fingerprint() == second.fingerprint()


def test_samples_are_few_and_from_every_part_of_a_tensor(tmp_path: Path) -> None:
    size = 1000 * SAMPLE_BYTES
    place = TensorPlace("weight", tmp_path / "file", 100, size, "U8", (size,))
    samples = samples_of(place, 10)
    assert samples == samples_of(place, 10), "the same on every machine"
    for number, sample in enumerate(samples):
        assert sample.num_bytes == SAMPLE_BYTES
        assert 100 + number * size // 10 <= sample.offset <= 100 + (number + 1) * size // 10 - SAMPLE_BYTES
    assert len({sample.offset % (size // 10) for sample in samples}) > 5, "not all at the same place of their parts"
    short = TensorPlace("bias", tmp_path / "file", 7, 9, "U8", (9,))
    assert [(sample.offset, sample.num_bytes) for sample in samples_of(short, 10)] == [(7, 9)]


@pytest.mark.slow
@pytest.mark.parametrize("num_tensors", [1, 3, 5000])
def test_a_start_reads_a_limited_part_of_any_checkpoint(
    tmp_path: Path, num_tensors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(bytes(2 * num_tensors * SAMPLE_BYTES))
    places = [
        TensorPlace(f"t{n}", tmp_path / "file", 2 * n * SAMPLE_BYTES, 2 * SAMPLE_BYTES, "U8", (2 * SAMPLE_BYTES,))
        for n in range(num_tensors)
    ]
    num_read = []
    read = checkpoint.os.pread

    def counted(descriptor: int, num_bytes: int, offset: int) -> bytes:
        num_read.append(num_bytes)
        return read(descriptor, num_bytes, offset)

    monkeypatch.setattr(checkpoint.os, "pread", counted)
    assert samples_digest(places) == samples_digest(reversed(places))
    assert len(num_read) // 2 <= max(checkpoint.NUM_SAMPLES, num_tensors)
    assert sum(num_read) // 2 <= max(checkpoint.NUM_SAMPLES, num_tensors) * SAMPLE_BYTES


def test_a_truncated_or_missing_file_is_named(tmp_path: Path) -> None:
    place = TensorPlace("weight", tmp_path / "file", 0, 20, "U8", (20,))
    with pytest.raises(CheckpointError, match="file: tensor weight cannot be read"):
        samples_digest([place])
    (tmp_path / "file").write_bytes(bytes(10))
    with pytest.raises(CheckpointError, match="file: ends within tensor weight"):
        samples_digest([place])


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """Why this process would have ended."""
    found: list[Exception] = []
    monkeypatch.setattr(direct_io, "exit_soon", found.append)
    return found


@pytest.mark.parametrize("max_resident", [0, 2])
def test_a_file_overwritten_in_place_is_never_mixed_with_its_old_content(
    tiny: Path, tmp_path: Path, max_resident: int, ends: list[Exception]
) -> None:
    """The descriptor stays, and its bytes become another checkpoint's, in the middle of a sweep or between two."""
    folder = plain(tiny, tmp_path / "model")
    place = Checkpoint.open(folder).tensors["model.layers.2.mlp.up_proj.weight"]
    with streamed(folder, torch.float32, max_resident=max_resident) as model:
        plain_logits(model, TOKENS)
        assert not ends
        train(place)
        for _ in range(2):
            with pytest.raises(StreamError, match=rf"{place.file.name}: was written to while .*; this worker ends"):
                plain_logits(model, TOKENS)
        assert len(ends) == 2


def test_a_file_truncated_in_place_is_named_and_ends_the_worker(
    tiny: Path, tmp_path: Path, ends: list[Exception]
) -> None:
    folder = plain(tiny, tmp_path / "model")
    place = Checkpoint.open(folder).tensors["model.layers.2.mlp.up_proj.weight"]
    with streamed(folder, torch.float32) as model:
        os.truncate(place.file, 4096)
        with pytest.raises(StreamError, match=rf"{place.file.name}: layer \d, tensor .*ends here"):
            plain_logits(model, TOKENS)
        assert "was written to while" in str(ends[0])


def test_a_file_replaced_by_another_is_not_read(tiny: Path, tmp_path: Path, ends: list[Exception]) -> None:
    """What is open stays what it was."""
    folder = plain(tiny, tmp_path / "model")
    place = Checkpoint.open(folder).tensors["model.layers.2.mlp.up_proj.weight"]
    with streamed(folder, torch.float32) as model:
        before = plain_logits(model, TOKENS)
        (tmp_path / "other").write_bytes(b"other")
        (tmp_path / "other").replace(place.file)
        assert all(map(torch.equal, before, plain_logits(model, TOKENS)))
    assert not ends


def test_a_file_that_is_no_longer_read_may_be_overwritten(tiny: Path, tmp_path: Path) -> None:
    folder = plain(tiny, tmp_path / "model")
    with streamed(folder, torch.float32, max_resident=100) as model:
        before = plain_logits(model, TOKENS)
        for file in folder.glob("*.safetensors"):
            file.write_bytes(bytes(file.stat().st_size))
        assert all(map(torch.equal, before, plain_logits(model, TOKENS)))
