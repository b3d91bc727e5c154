"""Writes a folder of packed tensors shard by shard; resumable, with checksums.

Shards are written atomically. The manifest lists complete shards and the checksum of each tensor. The configuration is
written last; without it a folder is no model.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from bough.errors import CheckpointError, ConfigError
from bough.model.checkpoint.atomic_files import is_taken, make_folder, replace
from bough.model.checkpoint.checkpoint import INDEX_NAME, Checkpoint, TensorPlace, read_header
from bough.model.checkpoint.pack_manifest import MANIFEST_NAME, read_manifest
from bough.model.checkpoint.tensor_source import STORED_DTYPES, crc32, typed
from bough.model.loading.loading import read_place
from bough.model.quant.bough_format import PACKED_SUFFIX, SCALES_SUFFIX
from bough.model.quant.quantize import Layout, quantize

FORMAT = 2  # 2: 4 bits with offsets
SHARD_BYTES = 1_000_000_000


@dataclass(slots=True)
class ShardWriter:
    """A folder in progress."""

    path: Path
    manifest: dict[str, Any]

    @classmethod
    def begin(cls, path: Path, source: Checkpoint, origin: Mapping[str, Any]) -> ShardWriter:
        """Continue a run, or begin one; `origin` has everything that distinguishes one pack from another.

        Raises:
            ConfigError: the folder contains something else.
        """
        if path.resolve() == source.path.resolve():
            raise ConfigError(f"--out: must be another folder than the model's, got {path}")
        file = path / MANIFEST_NAME
        origin = {"format": FORMAT, **origin}
        if file.is_file():
            manifest = read_manifest(file)
            if {name: manifest.get(name) for name in origin} != origin:
                raise ConfigError(f"--out: must be empty or an interrupted run, got {path} with another packed model")
            return cls(path, manifest)
        if is_taken(path):
            raise ConfigError(f"--out: must be an empty or a new folder, got {path}")
        make_folder("--out", path)
        folder = cls(path, {**origin, "shards": {}, "checksums": {}, "weight_map": {}})
        folder.save()
        return folder

    def write_all(
        self,
        kind: str,
        shards: Sequence[Sequence[TensorPlace]],
        layouts: Mapping[str, Layout],
        ranges: Sequence[float],
    ) -> None:
        """Write missing and damaged shards, whose names begin with `kind`.

        Existing shards are first compared with their checksums, so that a continued or repairing run ends with a
        complete folder. Matrices in `layouts` are packed, with `ranges` as in `quantize`; other tensors are copied.

        Raises:
            CheckpointError: the source cannot be read.
            ConfigError: the folder cannot be written to, or has no room.
        """
        sizes = {place: _num_bytes(place, layouts.get(place.name)) for places in shards for place in places}
        total = sum(sizes.values())
        self.require_room(total)
        with tqdm(total=total, unit="B", unit_scale=True, desc=self.path.name) as progress:
            for number, places in enumerate(shards):
                name = f"{kind}-{number:05d}-of-{len(shards):05d}.safetensors"
                before = progress.n
                if self.has(name, progress.update):
                    continue
                total += int(progress.n - before)  # comparing a damaged shard is extra work
                progress.total = total
                tensors: dict[str, torch.Tensor] = {}
                for place in places:
                    tensors.update(_tensors(place, layouts.get(place.name), ranges))
                    progress.update(sizes[place])
                self.write_shard(name, tensors)

    def has(self, name: str, count: Callable[[int], object]) -> bool:
        """Whether a shard exists and has correct checksums; `count` is called with bytes as they are compared.

        Damage is reported on standard error.
        """
        file = self.path / name
        if name not in self.manifest["shards"] or not file.is_file():
            return False
        try:
            self._require_whole(file, count)
        except CheckpointError as exc:
            tqdm.write(f"{exc}; it is written again", file=sys.stderr)
            return False
        return True

    def _require_whole(self, file: Path, count: Callable[[int], object]) -> None:
        """Raise CheckpointError if a shard is not as written."""
        size, written = file.stat().st_size, self.manifest["shards"][file.name]
        if size != written:
            raise CheckpointError(f"{file}: has {size} bytes, and {written} were written")
        places = read_header(file)
        if places.keys() != {tensor for tensor, name in self.manifest["weight_map"].items() if name == file.name}:
            raise CheckpointError(f"{file}: its header does not name the tensors that were written")
        checksums = self.manifest["checksums"]
        for place in sorted(places.values(), key=lambda place: place.offset):
            is_equal = place.dtype in STORED_DTYPES and crc32(read_place(place)) == checksums.get(place.name)
            count(place.num_bytes)
            if not is_equal:
                raise CheckpointError(f"{file}: tensor {place.name} is not what was written")

    def save(self) -> None:
        """Write the manifest atomically."""
        replace(self.path / MANIFEST_NAME, lambda partial: partial.write_text(json.dumps(self.manifest)))

    def require_room(self, num_bytes: int) -> None:
        """Raise ConfigError if the disk has no room for these bytes, less those already written."""
        there = sum(file.stat().st_size for file in self.path.iterdir())
        free = shutil.disk_usage(self.path).free
        if free < num_bytes - there:
            raise ConfigError(
                f"--out: {self.path}: {num_bytes / 1e9:.2f} GB are to be written and "
                f"{(free + there) / 1e9:.2f} GB are free"
            )

    def write_shard(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Write tensors to one file."""
        first, *others = tensors
        content = f"tensor {first}" + (f" and {len(others)} more" if others else "")
        replace(self.path / name, lambda partial: save_file(tensors, partial, metadata={"format": "pt"}), content)
        checksums = {key: crc32(tensor.flatten().view(torch.uint8)) for key, tensor in tensors.items()}
        self.manifest["checksums"].update(checksums)
        self.manifest["weight_map"].update(dict.fromkeys(tensors, name))
        self.manifest["shards"][name] = (self.path / name).stat().st_size
        self.save()

    def finish(self, source: Checkpoint, quantization: Mapping[str, Any], leave_out: Collection[str] = ()) -> None:
        """Copy the tokenizer and other files except weights and `leave_out`; write the configuration last."""
        others = {place.file.name for place in source.tensors.values()} | {INDEX_NAME, "config.json", *leave_out}
        for file in sorted(source.path.iterdir()):
            if file.is_file() and file.name not in others and file.suffix != ".safetensors":
                replace(self.path / file.name, partial(shutil.copyfile, file))
        index = {"metadata": {}, "weight_map": self.manifest["weight_map"]}
        replace(self.path / INDEX_NAME, lambda partial: partial.write_text(json.dumps(index, indent=1)))
        config = json.loads((source.path / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "bough", **quantization}
        replace(self.path / "config.json", lambda partial: partial.write_text(json.dumps(config, indent=2)))


def _num_bytes(place: TensorPlace, layout: Layout | None) -> int:
    """Bytes that are written for a tensor."""
    return place.num_bytes if layout is None else int(math.prod(place.shape) * layout.bits_per_weight) // 8


def _tensors(place: TensorPlace, layout: Layout | None, ranges: Sequence[float]) -> dict[str, torch.Tensor]:
    """The tensors that are written for a tensor; without a layout it is copied."""
    value = typed(read_place(place), place)
    if layout is None:
        return {place.name: value.contiguous()}
    packed, scales = quantize(value, *layout, ranges)
    return {place.name + PACKED_SUFFIX: packed, place.name + SCALES_SUFFIX: scales}


def shards_of(places: Sequence[TensorPlace], shard_bytes: int) -> list[list[TensorPlace]]:
    """Split tensors, in order of their places on disk, into shards of about `shard_bytes`."""
    shards: list[list[TensorPlace]] = [[]]
    total = 0
    for place in sorted(places, key=lambda place: (place.file, place.offset)):
        if total + place.num_bytes > shard_bytes and shards[-1]:
            shards.append([])
            total = 0
        shards[-1].append(place)
        total += place.num_bytes
    return shards
