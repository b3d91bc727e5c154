"""`bough pack --draft`: makes a draft of a target's own weights, with layers left out and the rest in few bits.

Matrices of the kept layers are packed in layouts chosen by `bough.model.packing.bit_allocation`. Tensors outside layers
(embeddings, last norm, head) are not stored again: the folder refers to the target's files
(`bough.model.checkpoint.shared_weights`). They are copied for a draft worker on a machine without the target's files.
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
from bough.model.quant.bough_format import MIXED
from bough.model.quant.quantize import SHRUNKEN, Layout, rounding_error

SAMPLE_ROWS = 256  # of a matrix, on which a layout's error is measured


@dataclass(frozen=True, slots=True)
class Written:
    """Summary of a draft that was written."""

    num_bytes: int  # of its own tensors
    bits_per_weight: float  # of packed matrices, scales included
    layouts: Mapping[str, Layout]  # by name of the matrix


def pack_draft(
    model: str,
    drop_layers: tuple[int, ...],
    bits: float,
    folder: Path,
    *,
    is_whole: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Written:
    """Write the draft, or continue an interrupted run. `bits` is the average per weight, scales included; a draft with
    `is_whole` has copies of what it would share.

    Raises:
        CheckpointError: the model cannot be read.
        ConfigError: a layer to drop does not exist, `bits` are too few, most of the layers cannot be packed, the folder
            contains something else, or the disk is full.
    """
    checkpoint = Checkpoint.open(model)
    kept = kept_layers(checkpoint, drop_layers)
    skeleton = build_skeleton(checkpoint, torch.bfloat16, kept)
    if skeleton.quantization is not None:
        raise ConfigError(f"model: must not be packed, but {model} is packed already ({skeleton.quantization.method})")
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
    written.write_all("draft", shards_of([*places, *(shared if is_whole else ())], shard_bytes), layouts, SHRUNKEN)
    borrowed = () if is_whole else tuple(place.name for place in shared)
    SharedWeights(_reference(model), fingerprint, kept, borrowed).save(folder)
    written.finish(checkpoint, {"bits": MIXED}, leave_out=(EXPANSION_NAME,))
    weights = sum(math.prod(place.shape) for place in matrices.values())
    packed_bits = sum(math.prod(p.shape) * layouts[name].bits_per_weight for name, p in matrices.items())
    return Written(sum(written.manifest["shards"].values()), packed_bits / weights, layouts)


def _layouts(place: TensorPlace) -> list[Layout]:
    """Layouts in which a matrix's rows are whole groups."""
    return [layout for layout in LAYOUTS if place.shape[-1] % layout.group_size == 0]


def _chosen(
    written: ShardWriter,
    matrices: Mapping[str, TensorPlace],
    bits: float,
) -> dict[str, Layout]:
    """A layout for each matrix, chosen once and stored in the manifest of the run."""
    if "layouts" not in written.manifest:
        bar = tqdm(matrices.items(), desc="measuring", unit=" matrices")
        options = {name: _options(place, typed(read_place(place), place)) for name, place in bar}
        weights = sum(math.prod(place.shape) for place in matrices.values())
        written.manifest["layouts"] = choose(options, bits, weights)
        written.save()
    return {name: Layout(*layout) for name, layout in written.manifest["layouts"].items()}


def _options(place: TensorPlace, value: torch.Tensor) -> list[Option]:
    """Size and error of each layout, measured on some rows."""
    some = value[:: max(1, len(value) // SAMPLE_ROWS)]
    return [
        Option(layout, value.numel() * layout.bits_per_weight, rounding_error(some, layout, SHRUNKEN))
        for layout in _layouts(place)
    ]


def _reference(model: str) -> str:
    """How the draft refers to its target: by hub id, or by absolute path."""
    folder = Path(model).expanduser()
    return str(resolve(model).resolve()) if folder.is_dir() else model
