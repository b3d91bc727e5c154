"""How a model's matrices are stored, according to its configuration, and their sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from bough.errors import CheckpointError
from bough.model.packing.pack import is_packed, packed_bytes
from bough.model.quant.formats import format_of
from bough.model.quant.quantize import GROUP_SIZES
from bough.model.quant.samples import PackedFormat

SCALE_BYTES, INDEX_BYTES = 2, 4
COMMUNITY_GROUP = 128  # default of GPTQ and AWQ if config.json has none


@dataclass(frozen=True, slots=True)
class Packing:
    """How the matrices of layers are stored."""

    method: str
    bits: int
    group_size: int  # inputs that share a scale; -1 is all
    kept: tuple[str, ...] = ()  # modules that stay in 16 bits
    is_ordered: bool = True  # as in `PackedFormat`

    @property
    def format(self) -> PackedFormat:
        """The format of one matrix."""
        return PackedFormat(self.method, self.bits, self.group_size, self.is_ordered)

    @classmethod
    def of(cls, config: PretrainedConfig, folder: Path, bits: int) -> Packing | None:
        """The packing for `bits`, or that of the configuration if `bits` is 0; None is unpacked.

        Raises:
            CheckpointError: the configuration's packing is not supported.
        """
        if bits:
            return cls("bough", bits, GROUP_SIZES[bits]) if bits in GROUP_SIZES else None
        quantization = format_of(config, folder)
        if quantization is None:
            return None
        if not quantization.bits:
            raise CheckpointError(
                f"model: must not be a draft of mixed bits, whose weights are dequantized when loaded, got {folder}; "
                "use --drop-layers of its target, or the target itself"
            )
        entry = config.quantization_config
        fields: dict[str, Any] = entry if isinstance(entry, dict) else entry.to_dict()
        group_size = int(fields.get("group_size") or fields.get("q_group_size") or COMMUNITY_GROUP)
        if quantization.method == "bough":
            group_size = GROUP_SIZES[quantization.bits]
        kept = tuple(fields.get("modules_to_not_convert") or ())
        return cls(quantization.method, quantization.bits, group_size, kept, not fields.get("desc_act"))

    def has(self, name: str, module: nn.Module, parameter: torch.Tensor) -> bool:
        """Whether a parameter is packed, by its name in the layer: a matrix of a linear layer, or of experts.

        For bough's format this is what `bough pack` does, which excludes checkpoints with all experts in one tensor.
        """
        if self.method == "bough":
            return is_packed(module, name, parameter.shape, self.bits)
        is_matrix = (isinstance(module, nn.Linear) and parameter.dim() == 2) or parameter.dim() == 3
        return is_matrix and not any(kept in name for kept in self.kept)

    def num_bytes(self, shape: torch.Size) -> int:
        """Bytes of integers and scales; for GPTQ and AWQ also zeros, and for GPTQ group indices."""
        if self.method == "bough":
            return packed_bytes(shape, self.bits)
        size, num_inputs = math.prod(shape), shape[-1]
        num_groups = size // (num_inputs if self.group_size < 0 else self.group_size)
        index = num_inputs * INDEX_BYTES * math.prod(shape[:-2]) if self.method == "gptq" else 0
        return size * self.bits // 8 + num_groups * SCALE_BYTES + num_groups * self.bits // 8 + index
