"""`bough pack`: writes a checkpoint of 16 or 32 bits in 4 or 8 bits. Resumable, with checksums, shard by shard.

Matrices of decoder layers are packed (`bough.model.quant.bough_format`): those of linear layers, and those of experts
that have their own tensors. Norms, biases, routers, embeddings and the head are copied; so are matrices whose rows are
not whole groups, and experts in one tensor, which could not be read packed. A warning lists these.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import MergeModulelist, WeightConverter

from bough.errors import CheckpointError, ConfigError
from bough.model.architecture.moe import ExpertSources
from bough.model.checkpoint.checkpoint import Checkpoint, TensorPlace
from bough.model.checkpoint.tensor_source import STORED_DTYPES, Joined, Stored, TensorSource
from bough.model.loading.late_writes import can_wait, is_late
from bough.model.loading.loading import ParameterSlot, build_skeleton
from bough.model.packing.shard_writer import SHARD_BYTES, ShardWriter, shards_of
from bough.model.quant.quantize import GROUP_SIZES, RANGE, SCALE_BYTES, Layout
from bough.sizing.placement import gigabytes

logger = logging.getLogger(__name__)

LEAST_SHARE = 0.5  # of the layers' bytes that must be packed for the result to be useful
NUM_NAMED = 3  # unpacked tensors named in a warning


def pack(model: str, bits: int, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the packed checkpoint, or continue an interrupted run; damaged shards are written again.

    Raises:
        CheckpointError: the model cannot be read.
        ConfigError: most of its layers cannot be packed, the folder contains something else, or the disk is full.
    """
    checkpoint = Checkpoint.open(model)
    skeleton = build_skeleton(checkpoint, torch.bfloat16)
    if skeleton.quantization is not None:
        raise ConfigError(f"model: must not be packed, but {model} is packed already ({skeleton.quantization.method})")
    _require_copyable(checkpoint)
    tensors = LayerTensors.of((slot for slots in skeleton.layer_slots for slot in slots), GROUP_SIZES[bits])
    tensors.require_worth(model)
    layout = Layout(bits, GROUP_SIZES[bits])
    written = ShardWriter.begin(folder, checkpoint, {**layout._asdict(), "source": checkpoint.fingerprint()})
    layouts = dict.fromkeys((place.name for place in tensors.packed), layout)
    written.write_all("packed", shards_of(list(checkpoint.tensors.values()), shard_bytes), layouts, RANGE)
    written.finish(checkpoint, layout._asdict())


def _require_copyable(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for a tensor of an unknown dtype."""
    for place in checkpoint.tensors.values():
        if place.dtype not in STORED_DTYPES:
            raise CheckpointError(
                f"{place.file}: tensor {place.name} must be stored as one of "
                f"{', '.join(STORED_DTYPES)}, got {place.dtype}"
            )


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """The tensors of a model's layers by treatment. Packed rows are whole groups of `group_size` inputs."""

    group_size: int
    packed: tuple[TensorPlace, ...]
    uneven: tuple[TensorPlace, ...]  # matrices whose rows are not whole groups
    stacked: tuple[TensorPlace, ...]  # all experts of a layer in one tensor
    others: tuple[TensorPlace, ...]  # norms, biases, routers

    @classmethod
    def of(cls, slots: Iterable[ParameterSlot], group_size: int) -> LayerTensors:
        """Sort the tensors of these parameters."""
        kinds: tuple[dict[TensorPlace, None], ...] = ({}, {}, {}, {})
        packed, uneven, stacked, others = kinds
        for slot in slots:
            matrices = set(matrices_of(slot))
            for place in slot.source.places:
                if place in matrices:
                    kind = uneven if place.shape[-1] % group_size else packed
                else:
                    kind = stacked if len(place.shape) == 3 else others
                kind[place] = None
        return cls(group_size, *map(tuple, kinds))

    def require_worth(self, model: str) -> None:
        """Warn about matrices that stay unpacked.

        Raises:
            ConfigError: they are most of the layers' bytes.
        """
        packed, all_bytes = _num_bytes(self.packed), _num_bytes(self.packed + self.uneven + self.stacked + self.others)
        if packed < LEAST_SHARE * all_bytes:
            raise ConfigError(
                f"model: {model}: of the {gigabytes(all_bytes)} of its layers {gigabytes(packed)} can be packed; "
                f"there are {self._reasons()}; use {self._remedy()}"
            )
        if self.uneven or self.stacked:
            left = gigabytes(all_bytes - packed)
            reasons = self._reasons()
            logger.warning("%s: of its layers' %s %s stay as they are: %s", model, gigabytes(all_bytes), left, reasons)

    def _reasons(self) -> str:
        """What is not packed, and why."""
        kinds = (
            (self.stacked, "all experts of a layer in one tensor, which could not be read packed"),
            (self.uneven, f"matrices whose rows are no whole groups of {self.group_size}"),
            (self.others, "norms, biases, routers and the like"),
        )
        return "; ".join(
            f"{gigabytes(_num_bytes(places))} in {_names(places)} ({why})" for places, why in kinds if places
        )

    def _remedy(self) -> str:
        as_it_is, smallest = "the model as it is", min(GROUP_SIZES.values())
        if _num_bytes(self.stacked) > _num_bytes(self.uneven):
            return f"a checkpoint in which each expert has its own matrices, or {as_it_is}"
        if self.uneven and self.group_size > smallest:
            return f"--bits 4, whose groups are of {smallest}, or {as_it_is}"
        return as_it_is


def _num_bytes(places: Iterable[TensorPlace]) -> int:
    return sum(place.num_bytes for place in places)


def _names(places: Sequence[TensorPlace]) -> str:
    """The largest tensors, and the number of others."""
    largest = sorted(places, key=lambda place: -place.num_bytes)[:NUM_NAMED]
    rest = f" and {len(places) - NUM_NAMED} more" if len(places) > NUM_NAMED else ""
    return ", ".join(place.name for place in largest) + rest


def is_packed(module: nn.Module, name: str, shape: Sequence[int], bits: int) -> bool:
    """Whether `pack` packs a parameter, by architecture alone; `name` is its name in its layer."""
    is_linear, is_stack = is_late(module, name.rpartition(".")[2]), len(shape) == 3
    return (is_linear or (is_stack and _is_stacked_here(module, name))) and shape[-1] % GROUP_SIZES[bits] == 0


def matrices_of(slot: ParameterSlot) -> Iterator[TensorPlace]:
    """Tensors of a parameter that can be packed: matrices of linear layers, and of experts."""
    if can_wait(slot) or isinstance(slot.source, ExpertSources):
        yield from (place for place in _stored(slot.source) if len(place.shape) == 2)


def _is_stacked_here(module: nn.Module, name: str) -> bool:
    """Whether checkpoints have a matrix for each expert of a parameter, which transformers stacks while loading."""
    config = getattr(module, "config", None)  # that transformers gives its experts
    transforms = get_checkpoint_conversion_mapping(config.model_type) if config is not None else None
    converters = [transform for transform in transforms or () if isinstance(transform, WeightConverter)]
    return any(
        name.endswith(target.replace("\\", "").lstrip("."))
        for converter in converters
        if any(isinstance(step, MergeModulelist) for step in converter.operations)
        for target in converter.target_patterns
    )


def _stored(source: TensorSource | ExpertSources) -> Iterator[TensorPlace]:
    if isinstance(source, Stored):
        yield source.place
    elif isinstance(source, ExpertSources | Joined):
        for part in source.parts:
            yield from _stored(part)


def packed_bytes(shape: Sequence[int], bits: int) -> int:
    """Bytes of a packed matrix, or of a stack of equal ones."""
    size = math.prod(shape)
    return size * bits // 8 + size // GROUP_SIZES[bits] * SCALE_BYTES[bits]
