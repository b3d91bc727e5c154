"""`bough pack` where something is amiss: damaged shards, disks that take no more, layers that cannot be packed."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import LlamaConfig

from bough.cli.main import main
from bough.errors import ConfigError
from bough.model.checkpoint.atomic_files import replace
from bough.model.checkpoint.checkpoint import Checkpoint, read_header
from bough.model.packing import shard_writer
from bough.model.packing.pack import pack
from bough.model.packing.pack_draft import pack_draft
from tests.conftest import TINY, save_model
from tests.fakes.model.families import FAMILIES
from tests.fakes.model.packed_files import flip

SHARD_BYTES = 60_000
GPT_OSS = FAMILIES["gpt-oss, sinks, alternating windows"]


def write_whole(model: Path, folder: Path) -> None:
    pack(str(model), 4, folder, SHARD_BYTES)


def write_draft(model: Path, folder: Path) -> None:
    pack_draft(str(model), (1,), 6.0, folder, shard_bytes=SHARD_BYTES)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def inodes(folder: Path) -> dict[str, int]:
    """Of the shards: one that is written again is another file."""
    return {file.name: file.stat().st_ino for file in folder.glob("*.safetensors")}


def flip_in_a_tensor(shard: Path) -> None:
    flip(list(read_header(shard).values())[-1])


def swap(before: bytes, after: bytes) -> Callable[[Path], None]:
    """Changes the header, but not its length."""

    def change(shard: Path) -> None:
        shard.write_bytes(shard.read_bytes().replace(before, after, 1))

    return change


def cut_short(shard: Path) -> None:
    os.truncate(shard, shard.stat().st_size - 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_in_a_tensor, r"tensor model\.layers\.\S+ is not what was written"),
        (swap(b'"F16"', b'"F17"'), r"tensor \S+_scales is not what was written"),
        (swap(b"model.layers.", b"model/layers."), "its header does not name the tensors that were written"),
        (swap(b'"dtype"', b'"ftype"'), "is malformed"),
        (cut_short, r"has \d+ bytes, and \d+ were written"),
    ],
    ids=["tensor", "data type", "name", "field", "length"],
)
@pytest.mark.parametrize("write", [write_whole, write_draft])
def test_a_damaged_shard_is_written_again_and_no_other(
    tiny: Path,
    tmp_path: Path,
    write: Callable[[Path, Path], None],
    damage: Callable[[Path], None],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Sizes alone were compared, and what a checksum error advises, to pack again, repaired nothing."""
    folder = tmp_path / "packed"
    write(tiny, folder)
    before = contents(folder)
    victim = sorted(folder.glob("*.safetensors"))[1]
    damage(victim)
    assert contents(folder) != before
    there = inodes(folder)
    capsys.readouterr()
    write(tiny, folder)
    assert contents(folder) == before
    assert {name for name, inode in inodes(folder).items() if inode != there[name]} == {victim.name}
    said = [line for line in capsys.readouterr().err.splitlines() if line.endswith("it is written again")]
    assert len(said) == 1
    assert re.search(f"{victim.name}: .*{message}", said[0])


@pytest.mark.parametrize("write", [write_whole, write_draft])
def test_what_is_compared_counts_as_work(
    tiny: Path, tmp_path: Path, write: Callable[[Path, Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bar ends full, and what was compared in vain was work besides."""
    bars: list[tqdm[Any]] = []

    class Bar(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, file=io.StringIO(), **options)
            bars.append(self)

    monkeypatch.setattr(shard_writer, "tqdm", Bar)
    folder = tmp_path / "packed"
    for _ in range(2):
        write(tiny, folder)
    places = list(read_header(sorted(folder.glob("*.safetensors"))[1]).values())
    flip(places[-1])
    write(tiny, folder)
    first, second, third = bars
    assert all(bar.n == bar.total for bar in bars)
    assert first.total == second.total == third.total - sum(place.num_bytes for place in places)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Of a megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1M", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("disks are mounted by root alone")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_fills_up_is_told_with_file_and_tensors(
    tiny: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(small_disk)  # others fill it only afterwards
    monkeypatch.setattr(shard_writer.shutil, "disk_usage", lambda _: usage)
    folder = small_disk / "packed"
    write_whole(tiny, folder)
    before = contents(folder)
    victim = sorted(folder.glob("*.safetensors"))[2]
    num_others = len(read_header(victim)) - 1
    victim.unlink()
    there = inodes(folder)
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "others").write_bytes(bytes(1 << 20))
    with pytest.raises(ConfigError) as refused:
        write_whole(tiny, folder)
    assert re.fullmatch(
        rf"{victim}: tensor model\.\S+ and {num_others} more cannot be written: .*No space left .*\(os error 28\); "
        r"the disk is full; make room and run the same command again to go on",
        str(refused.value),
    )
    assert not list(folder.glob("*.partial"))
    (small_disk / "others").unlink()
    write_whole(tiny, folder)
    assert contents(folder) == before
    assert there.items() <= inodes(folder).items(), "what was written is not written again"


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """None that this process writes may be larger within the block."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


def test_a_file_that_may_not_grow_is_an_error_and_what_was_written_stays(tiny: Path, tmp_path: Path) -> None:
    """A real limit of the system, which ends no Python process; safetensors tells of it in an exception of its own."""
    folder = tmp_path / "packed"
    write_whole(tiny, folder)
    before = contents(folder)
    _, *later = sorted(name for name in before if name.endswith(".safetensors"))
    victim = max(later, key=lambda name: len(before[name]))
    for name in later:
        (folder / name).unlink()
    with files_of_at_most(len(before[victim]) - 1), pytest.raises(ConfigError) as refused:
        write_whole(tiny, folder)
    assert re.search(
        rf"{folder / victim}: tensor \S+( and \d+ more)? cannot be written: .*File too large \(os error 27\); "
        r"raise the limit for files \(`ulimit -f`\) and run the same command again to go on",
        str(refused.value),
    )
    assert not list(folder.glob("*.partial"))
    there = inodes(folder)
    assert there.keys() == {name for name in before if name.endswith(".safetensors") and name < victim}
    assert len(there) > 1
    write_whole(tiny, folder)
    assert contents(folder) == before
    assert there.items() <= inodes(folder).items(), "what was written is not written again"


def test_a_small_file_too_needs_room(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is always full is where the configuration is to be written."""
    folder = tmp_path / "packed"
    write_whole(tiny, folder)
    before = contents(folder)
    touch = Path.touch
    monkeypatch.setattr(
        Path, "touch", lambda new: new.symlink_to("/dev/full") if new.name == "config.json.partial" else touch(new)
    )
    with pytest.raises(
        ConfigError, match=r"config\.json: cannot be written: .*No space left.*; the disk is full; make"
    ):
        write_whole(tiny, folder)
    assert contents(folder) == before, "and nothing beside it"


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.EDQUOT, "the disk is full; make room and run the same command again to go on"),
        (errno.EROFS, "choose a folder that can be written to"),
        (errno.EIO, "the disk or its connection fails; choose another disk"),
        (errno.ENAMETOOLONG, "choose another folder"),
    ],
)
@pytest.mark.parametrize("is_system", [True, False], ids=["system", "safetensors"])
def test_every_reason_has_its_remedy(tmp_path: Path, code: int, remedy: str, is_system: bool) -> None:
    words = f"{os.strerror(code)} (os error {code})"
    error = OSError(code, os.strerror(code)) if is_system else SafetensorError(f"Error while serializing: {words}")

    def fails(partial: Path) -> None:
        partial.write_text("half")
        raise error

    with pytest.raises(ConfigError) as refused:
        replace(tmp_path / "file", fails, "tensor x")
    assert str(refused.value) == f"{tmp_path / 'file'}: tensor x cannot be written: {error}; {remedy}"
    assert not list(tmp_path.iterdir())


def test_others_may_read_weights_as_they_may_read_new_files(tmp_path: Path) -> None:
    """safetensors closes its files to others, also one left by a killed process: who packs need not be who serves."""
    (tmp_path / "new").touch()
    (tmp_path / "weights.partial").touch(0o600)

    def write(partial: Path) -> None:
        partial.unlink()
        partial.touch(0o600)

    replace(tmp_path / "weights", write)
    assert (tmp_path / "weights").stat().st_mode == (tmp_path / "new").stat().st_mode


def test_a_bug_is_no_error_of_the_disk(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        replace(tmp_path / "file", lambda _: 1 // 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flags", [[], ["--draft"]])
def test_experts_in_one_tensor_are_not_packed_in_silence(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They once stayed in 16 bits, nearly all there is, in a checkpoint that said it had 4."""
    folder = save_model(tmp_path / "model", GPT_OSS)
    with pytest.raises(SystemExit, match="2"):
        main(["pack", str(folder), *flags, "--out", str(tmp_path / "packed")])
    said = capsys.readouterr().err
    assert re.search(
        rf"error: model: {folder}: of the \S+ MB of its layers \S+ MB can be packed; there are \S+ MB in "
        r"model\.layers\.\d\.mlp\.experts\.gate_up_proj, .* and 5 more \(all experts of a layer in one tensor, .*"
        r"; use a checkpoint in which each expert has its own matrices, or the model as it is",
        said,
    )
    assert not (tmp_path / "packed").exists()


def test_rows_that_are_no_whole_groups_are_named(tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert TINY.intermediate_size % 64
    with caplog.at_level(logging.WARNING):
        pack(str(tiny), 4, tmp_path / "packed4")
        assert not caplog.records
        pack(str(tiny), 8, tmp_path / "packed8")
    (record,) = caplog.records
    assert re.search(
        r"stay as they are: \S+ MB in model\.layers\.0\.mlp\.down_proj\.weight, .* and 1 more "
        r"\(matrices whose rows are no whole groups of 64\); \S+ MB in \S+norm\S+, .* \(norms, biases, ",
        record.getMessage(),
    )
    places = [place for name, place in Checkpoint.open(tiny).tensors.items() if "down_proj" in name]
    assert f"{sum(place.num_bytes for place in places) / 1e6:.2f} MB in model" in record.getMessage()


def test_smaller_groups_are_advised_where_they_would_do(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=262,
        hidden_size=96,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=6,
        num_key_value_heads=6,
        eos_token_id=261,
    )
    folder = save_model(tmp_path / "model", config)
    with pytest.raises(ConfigError, match="; use --bits 4, whose groups are of 32, or the model as it is"):
        pack(str(folder), 8, tmp_path / "packed8")
    pack(str(folder), 4, tmp_path / "packed4")
