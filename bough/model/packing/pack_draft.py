"""`bough pack --draft`: a draft out of a target's own weights, with some layers left out and the rest in few bits.

The matrices of the layers that are kept are packed, each in the layout that `bough.model.packing.bit_allocation` has
chosen for it. What is in no layer (embeddings, the last norm, the head) is not stored again: the folder names the
target, whose files hold it (`bough.model.checkpoint.shared_weights`). Or it is copied, for a draft worker that runs
where the target's files are not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from bough.config.cache_paths import EXPANSION_NAME
from bough.errors import ConfigError
from bough.model.checkpoint.checkpoint import Checkpoint, TensorPlace, resolve
from bough.model.checkpoint.shared_weights import SharedWeights
from bough.model.checkpoint.tensor_source import typed
from bough.model.loading.layer_selection import kept_layers
from bough.model.loading.loading import build_skeleton, read_place
from bough.model.packing.bit_allocation import LAYOUTS, Option, choose
from bough.model.packing.pack import LayerTensors
from bough.model.packing.shard_writer import SHARD_BYTES, ShardWriter, shards_of
from bough.model.quant.bough_format import MIXED, PACKED_SUFFIX, SCALES_SUFFIX
from bough.model.quant.quantize import SHRUNKEN, Layout, quantize, rounding_error

SAMPLE_ROWS = 256  # of a matrix, on which the error of a layout is measured


@dataclass(frozen=True, slots=True)
class Written:
    """What a draft came to."""

    num_bytes: int  # of its own tensors
    bits_per_weight: float  # of the packed matrices, scales included
    layouts: Mapping[str, Layout]  # by the name of the matrix


def pack_draft(
    model: str,
    drop_layers: tuple[int, ...],
    bits: float,
    folder: Path,
    *,
    is_whole: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Written:
    """Writes the draft, or goes on where an interrupted run has left off. `bits` is for a weight, scales included;
    a whole draft has copies of what it would share.

    Raises:
        CheckpointError: the model cannot be read.
        ConfigError: a layer to drop is not there, `bits` are too few, most of the layers cannot be packed, the folder
            holds something else, or the disk is full.
    """
    checkpoint = Checkpoint.open(model)
    kept = kept_layers(checkpoint, drop_layers)
    skeleton = build_skeleton(checkpoint, torch.bfloat16, kept)
    if skeleton.quantization is not None:
        raise ConfigError(f"model: {model} is packed already ({skeleton.quantization.method})")
    slots = [slot for layer in skeleton.layer_slots for slot in layer]
    tensors = LayerTensors.of(slots, min(layout.group_size for layout in LAYOUTS))
    tensors.require_worth(model)
    matrices = {place.name: place for place in tensors.packed}
    fingerprint = checkpoint.fingerprint()
    origin = {"draft": True, "bits": bits, "kept_layers": list(kept), "source": fingerprint, "whole": is_whole}
    written = ShardWriter.begin(folder, checkpoint, origin)
    layouts = _chosen(written, matrices, bits)
    places = dict.fromkeys(place for slot in slots for place in slot.source.places)
    shared = dict.fromkeys(place for slot in skeleton.resident_slots for place in slot.source.places)
    written.write_all(
        "draft",
        shards_of([*places, *(shared if is_whole else ())], shard_bytes),
        num_bytes=lambda place: _num_bytes(place, layouts.get(place.name)),
        convert=lambda place: _tensors(place.name, _read(place), layouts.get(place.name)),
    )
    borrowed = () if is_whole else tuple(place.name for place in shared)
    SharedWeights(_reference(model), fingerprint, kept, borrowed).save(folder)
    written.finish(checkpoint, {"bits": MIXED}, leave_out=(EXPANSION_NAME,))
    weights = sum(math.prod(place.shape) for place in matrices.values())
    packed_bits = sum(math.prod(p.shape) * layouts[name].bits_per_weight for name, p in matrices.items())
    return Written(sum(written.manifest["shards"].values()), packed_bits / weights, layouts)


def _read(place: TensorPlace) -> torch.Tensor:
    return typed(read_place(place), place)


def _layouts(place: TensorPlace) -> list[Layout]:
    """In which a matrix can be packed: its rows are whole groups."""
    return [layout for layout in LAYOUTS if place.shape[-1] % layout.group_size == 0]


def _chosen(
    written: ShardWriter,
    matrices: Mapping[str, TensorPlace],
    bits: float,
) -> dict[str, Layout]:
    """A layout for each matrix, chosen once and then kept with what is being written."""
    if "layouts" not in written.manifest:
        bar = tqdm(matrices.items(), desc="measuring", unit=" matrices")
        options = {name: _options(place, _read(place)) for name, place in bar}
        weights = sum(math.prod(place.shape) for place in matrices.values())
        written.manifest["layouts"] = choose(options, bits, weights)
        written.save()
    return {name: Layout(*layout) for name, layout in written.manifest["layouts"].items()}


def _options(place: TensorPlace, value: torch.Tensor) -> list[Option]:
    """What each layout would cost, measured on some of the rows."""
    some = value[:: max(1, len(value) // SAMPLE_ROWS)]
    return [
        Option(layout, value.numel() * layout.bits_per_weight, rounding_error(some, layout, SHRUNKEN))
        for layout in _layouts(place)
    ]


def _num_bytes(place: TensorPlace, layout: Layout | None) -> int:
    return place.num_bytes if layout is None else int(math.prod(place.shape) * layout.bits_per_weight) // 8


def _tensors(name: str, value: torch.Tensor, layout: Layout | None) -> dict[str, torch.Tensor]:
    """What a tensor becomes; without a layout it stays as it is."""
    if layout is None:
        return {name: value.contiguous()}
    packed, scales = quantize(value, *layout, SHRUNKEN)
    return {name + PACKED_SUFFIX: packed, name + SCALES_SUFFIX: scales}


def _reference(model: str) -> str:
    """How the draft will find its target: a hub id as it is, a folder wherever one works from."""
    folder = Path(model).expanduser()
    return str(resolve(model).resolve()) if folder.is_dir() else model
