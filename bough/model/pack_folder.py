"""A folder of packed tensors that is being written: shard by shard, resumable, checksummed.

A shard is whole or not there; the manifest says which are, and what each tensor's bytes add up to; the configuration is
written last, without which a folder is no model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bough.errors import CheckpointError, ConfigError
from bough.model.checkpoint import INDEX_NAME, Checkpoint, TensorPlace
from bough.model.files import make_folder, replace
from bough.model.source import crc32

MANIFEST_NAME = "bough_pack.json"
FORMAT = 2  # 4 bits with offsets
SHARD_BYTES = 1_000_000_000


def read_checksums(folder: Path) -> dict[str, int]:
    """crc32 by tensor name, where `bough pack` wrote the checkpoint; nothing for any other."""
    manifest = folder / MANIFEST_NAME
    return dict(_read(manifest)["checksums"]) if manifest.is_file() else {}


def _read(manifest: Path) -> dict[str, Any]:
    """Raises CheckpointError where it is damaged."""
    try:
        content = dict(json.loads(manifest.read_text()))
        return {**content, **{name: dict(content[name]) for name in ("shards", "checksums", "weight_map")}}
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise CheckpointError(f"{manifest}: is damaged: {exc!r}; `bough pack` into another folder would do") from exc


@dataclass(slots=True)
class PackFolder:
    """What has been written so far."""

    path: Path
    manifest: dict[str, Any]

    @classmethod
    def begin(cls, path: Path, source: Checkpoint, origin: Mapping[str, Any]) -> PackFolder:
        """A run that goes on, or a new one; `origin` is what makes one pack another than the next.

        Raises:
            ConfigError: the folder holds something else.
        """
        if path.resolve() == source.folder.resolve():
            raise ConfigError(f"--out: {path} is the model itself; another folder would do")
        file = path / MANIFEST_NAME
        origin = {"format": FORMAT, **origin}
        if file.is_file():
            manifest = _read(file)
            if {name: manifest.get(name) for name in origin} != origin:
                raise ConfigError(f"--out: {path} holds another packed model; another folder would do")
            return cls(path, manifest)
        if path.is_dir() and any(path.iterdir()):
            raise ConfigError(f"--out: {path} is not empty; another folder would do")
        make_folder("--out", path)
        folder = cls(path, {**origin, "shards": {}, "checksums": {}, "weight_map": {}})
        folder.save()
        return folder

    def has(self, name: str) -> bool:
        """Whether a shard is there and whole."""
        file = self.path / name
        return file.is_file() and self.manifest["shards"].get(name) == file.stat().st_size

    def save(self) -> None:
        """The manifest, at once or not at all."""
        replace(self.path / MANIFEST_NAME, lambda partial: partial.write_text(json.dumps(self.manifest)))

    def require_room(self, num_bytes: int) -> None:
        """Raises ConfigError where so many bytes, less what is written already, do not fit on the disk."""
        there = sum(file.stat().st_size for file in self.path.iterdir())
        free = shutil.disk_usage(self.path).free
        if free < num_bytes - there:
            raise ConfigError(
                f"--out: {self.path}: {num_bytes / 1e9:.2f} GB are to be written and "
                f"{(free + there) / 1e9:.2f} GB are free"
            )

    def write_shard(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Tensors in one file."""
        replace(self.path / name, lambda partial: save_file(tensors, partial, metadata={"format": "pt"}))
        checksums = {key: crc32(tensor.flatten().view(torch.uint8)) for key, tensor in tensors.items()}
        self.manifest["checksums"].update(checksums)
        self.manifest["weight_map"].update(dict.fromkeys(tensors, name))
        self.manifest["shards"][name] = (self.path / name).stat().st_size
        self.save()

    def finish(self, source: Checkpoint, quantization: Mapping[str, Any], leave_out: Collection[str] = ()) -> None:
        """Tokenizer and everything else beside the source's weights, but what is named; the configuration last."""
        others = {place.file.name for place in source.tensors.values()} | {INDEX_NAME, "config.json", *leave_out}
        for file in sorted(source.folder.iterdir()):
            if file.is_file() and file.name not in others and file.suffix != ".safetensors":
                replace(self.path / file.name, partial(shutil.copyfile, file))
        index = {"metadata": {}, "weight_map": self.manifest["weight_map"]}
        replace(self.path / INDEX_NAME, lambda partial: partial.write_text(json.dumps(index, indent=1)))
        config = json.loads((source.folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "bough", **quantization}
        replace(self.path / "config.json", lambda partial: partial.write_text(json.dumps(config, indent=2)))


def shards_of(places: Sequence[TensorPlace], shard_bytes: int) -> list[list[TensorPlace]]:
    """Tensors in the order in which they stand on disk, cut into runs of about `shard_bytes`."""
    shards: list[list[TensorPlace]] = [[]]
    total = 0
    for place in sorted(places, key=lambda place: (place.file, place.offset)):
        if total + place.num_bytes > shard_bytes and shards[-1]:
            shards.append([])
            total = 0
        shards[-1].append(place)
        total += place.num_bytes
    return shards
