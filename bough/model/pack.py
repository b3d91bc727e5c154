"""`bough pack`: a smaller checkpoint, in 4 or 8 bits, from one in 16 or 32. Resumable, checksummed, a shard at a time.

The matrices of the decoder layers are packed (`bough.model.packed.Packed`); norms, biases, embeddings and the head are
copied. A shard is whole or not there; the manifest says which are, and what each tensor's bytes add up to; the
configuration is written last, without which a folder is no model.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from tqdm import tqdm

from bough.errors import ConfigError
from bough.model.checkpoint import INDEX_NAME, Checkpoint, TensorPlace
from bough.model.experts import Experts
from bough.model.files import replace
from bough.model.loading import ParameterSlot, build_skeleton, read_place
from bough.model.naming import PACKED_SUFFIX, SCALES_SUFFIX
from bough.model.quantize import GROUP_SIZES, SCALE_BYTES, quantize
from bough.model.source import Joined, Source, Stored, crc32, typed

MANIFEST_NAME = "bough_pack.json"
FORMAT = 2  # 4 bits with offsets
SHARD_BYTES = 1_000_000_000


def read_checksums(folder: Path) -> dict[str, int]:
    """crc32 by tensor name, where `bough pack` wrote the checkpoint; nothing for any other."""
    manifest = folder / MANIFEST_NAME
    return dict(json.loads(manifest.read_text())["checksums"]) if manifest.is_file() else {}


def pack(model: str, bits: int, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes the packed checkpoint, or goes on where an interrupted run has left off.

    Raises:
        CheckpointError: the model cannot be read.
        ConfigError: the folder holds something else, or the disk is full.
    """
    checkpoint = Checkpoint.open(model)
    skeleton = build_skeleton(checkpoint, torch.bfloat16)
    if skeleton.quantization is not None:
        raise ConfigError(f"model: {model} is packed already ({skeleton.quantization.method})")
    packable = {place for slots in skeleton.layer_slots for slot in slots for place in _matrices(slot, bits)}
    manifest = _Manifest.begin(folder, checkpoint, bits)
    shards = _shards(checkpoint, shard_bytes)
    num_bytes = sum(packed_bytes(p.shape, bits) if p in packable else p.num_bytes for shard in shards for p in shard)
    _require_room(folder, num_bytes)
    with tqdm(total=num_bytes, unit="B", unit_scale=True, desc=f"{folder.name}, {bits} bits") as progress:
        for number, places in enumerate(shards):
            name = f"packed-{number:05d}-of-{len(shards):05d}.safetensors"
            if not manifest.has(name):
                tensors = dict(item for place in places for item in _tensors(place, bits, place in packable))
                _write_shard(folder, name, tensors, manifest)
            progress.update((folder / name).stat().st_size)
    _write_rest(checkpoint, folder, manifest, bits)


@dataclass(slots=True)
class _Manifest:
    """What has been written so far."""

    path: Path
    content: dict[str, Any]

    @classmethod
    def begin(cls, folder: Path, checkpoint: Checkpoint, bits: int) -> _Manifest:
        """The manifest of a run that goes on, or a new one."""
        if folder.resolve() == checkpoint.folder.resolve():
            raise ConfigError(f"--out: {folder} is the model itself; another folder would do")
        path = folder / MANIFEST_NAME
        origin = {"format": FORMAT, "bits": bits, "group_size": GROUP_SIZES[bits], "source": checkpoint.fingerprint()}
        if path.is_file():
            content = json.loads(path.read_text())
            if {name: content.get(name) for name in origin} != origin:
                raise ConfigError(f"--out: {folder} holds another packed model; another folder would do")
            return cls(path, content)
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(f"--out: {folder} is not empty; another folder would do")
        folder.mkdir(parents=True, exist_ok=True)
        manifest = cls(path, {**origin, "shards": {}, "checksums": {}, "weight_map": {}})
        manifest.save()
        return manifest

    def has(self, name: str) -> bool:
        """Whether a shard is there and whole."""
        file = self.path.parent / name
        return file.is_file() and self.content["shards"].get(name) == file.stat().st_size

    def save(self) -> None:
        """At once or not at all."""
        replace(self.path, lambda partial: partial.write_text(json.dumps(self.content)))


def _shards(checkpoint: Checkpoint, shard_bytes: int) -> list[list[TensorPlace]]:
    """Tensors in the order in which they stand on disk, cut into runs of about `shard_bytes`."""
    shards: list[list[TensorPlace]] = [[]]
    total = 0
    for place in sorted(checkpoint.tensors.values(), key=lambda place: (place.file, place.offset)):
        if total + place.num_bytes > shard_bytes and shards[-1]:
            shards.append([])
            total = 0
        shards[-1].append(place)
        total += place.num_bytes
    return shards


def is_packable(shape: Sequence[int], bits: int) -> bool:
    """Whether the rows of a matrix are whole groups."""
    return shape[-1] % GROUP_SIZES[bits] == 0


def _matrices(slot: ParameterSlot, bits: int) -> Iterator[TensorPlace]:
    """Tensors of a parameter that can be packed: matrices of linear layers, and of experts."""
    is_linear = isinstance(slot.module, nn.Linear) and slot.key == "weight"
    if is_linear or isinstance(slot.source, Experts):
        for place in _stored(slot.source):
            if len(place.shape) == 2 and is_packable(place.shape, bits):
                yield place


def _stored(source: Source | Experts) -> Iterator[TensorPlace]:
    if isinstance(source, Stored):
        yield source.place
    elif isinstance(source, Experts | Joined):
        for part in source.parts:
            yield from _stored(part)


def packed_bytes(shape: Sequence[int], bits: int) -> int:
    """What a matrix, or several of one shape in a stack, takes when it is packed."""
    size = math.prod(shape)
    return size * bits // 8 + size // GROUP_SIZES[bits] * SCALE_BYTES[bits]


def _tensors(place: TensorPlace, bits: int, is_packed: bool) -> list[tuple[str, torch.Tensor]]:
    """What a tensor becomes."""
    value = typed(read_place(place), place)
    if not is_packed:
        return [(place.name, value)]
    packed, scales = quantize(value, bits)
    return [(place.name + PACKED_SUFFIX, packed), (place.name + SCALES_SUFFIX, scales)]


def _write_shard(folder: Path, name: str, tensors: dict[str, torch.Tensor], manifest: _Manifest) -> None:
    replace(folder / name, lambda partial: save_file(tensors, partial, metadata={"format": "pt"}))
    checksums = {key: crc32(tensor.flatten().view(torch.uint8)) for key, tensor in tensors.items()}
    manifest.content["checksums"].update(checksums)
    manifest.content["weight_map"].update(dict.fromkeys(tensors, name))
    manifest.content["shards"][name] = (folder / name).stat().st_size
    manifest.save()


def _write_rest(checkpoint: Checkpoint, folder: Path, manifest: _Manifest, bits: int) -> None:
    """Tokenizer and everything else beside the weights; the configuration last."""
    weights = {place.file.name for place in checkpoint.tensors.values()}
    for file in sorted(checkpoint.folder.iterdir()):
        if file.is_file() and file.name not in {*weights, INDEX_NAME, "config.json"} and file.suffix != ".safetensors":
            shutil.copyfile(file, folder / file.name)
    index = {"metadata": {}, "weight_map": manifest.content["weight_map"]}
    replace(folder / INDEX_NAME, lambda partial: partial.write_text(json.dumps(index, indent=1)))
    config = json.loads((checkpoint.folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bough", "bits": bits, "group_size": GROUP_SIZES[bits]}
    replace(folder / "config.json", lambda partial: partial.write_text(json.dumps(config, indent=2)))


def _require_room(folder: Path, num_bytes: int) -> None:
    there = sum(file.stat().st_size for file in folder.iterdir())
    free = shutil.disk_usage(folder).free
    if free < num_bytes - there:
        raise ConfigError(
            f"--out: {folder}: {num_bytes / 1e9:.2f} GB are to be written and {(free + there) / 1e9:.2f} GB are free"
        )
