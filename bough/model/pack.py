"""`bough pack`: a smaller checkpoint, in 4 or 8 bits, from one in 16 or 32. Resumable, checksummed, a shard at a time.

The matrices of the decoder layers are packed (`bough.model.packed.Packed`); norms, biases, embeddings and the head are
copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from bough.errors import ConfigError
from bough.model.checkpoint import Checkpoint, TensorPlace
from bough.model.experts import Experts
from bough.model.loading import ParameterSlot, build_skeleton, read_place
from bough.model.naming import PACKED_SUFFIX, SCALES_SUFFIX
from bough.model.pack_folder import SHARD_BYTES, PackFolder, shards_of
from bough.model.quantize import GROUP_SIZES, SCALE_BYTES, quantize
from bough.model.source import Joined, Source, Stored, typed


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
    matrices = (place for slots in skeleton.layer_slots for slot in slots for place in matrices_of(slot))
    packable = {place for place in matrices if is_packable(place.shape, bits)}
    origin = {"bits": bits, "group_size": GROUP_SIZES[bits], "source": checkpoint.fingerprint()}
    written = PackFolder.begin(folder, checkpoint, origin)
    shards = shards_of(list(checkpoint.tensors.values()), shard_bytes)
    num_bytes = sum(packed_bytes(p.shape, bits) if p in packable else p.num_bytes for shard in shards for p in shard)
    written.require_room(num_bytes)
    with tqdm(total=num_bytes, unit="B", unit_scale=True, desc=f"{folder.name}, {bits} bits") as progress:
        for number, places in enumerate(shards):
            name = f"packed-{number:05d}-of-{len(shards):05d}.safetensors"
            if not written.has(name):
                tensors = dict(item for place in places for item in _tensors(place, bits, place in packable))
                written.write_shard(name, tensors)
            progress.update((folder / name).stat().st_size)
    written.finish(checkpoint, {"bits": bits, "group_size": GROUP_SIZES[bits]})


def is_packable(shape: Sequence[int], bits: int) -> bool:
    """Whether the rows of a matrix are whole groups."""
    return shape[-1] % GROUP_SIZES[bits] == 0


def matrices_of(slot: ParameterSlot) -> Iterator[TensorPlace]:
    """Tensors of a parameter that can be packed: matrices of linear layers, and of experts."""
    is_linear = isinstance(slot.module, nn.Linear) and slot.key == "weight"
    if is_linear or isinstance(slot.source, Experts):
        yield from (place for place in _stored(slot.source) if len(place.shape) == 2)


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
