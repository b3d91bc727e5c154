"""How a model's matrices are stored, according to its configuration, and their sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from bough.errors import CheckpointError
from bough.model.checkpoint.checkpoint import Checkpoint, TensorPlace
from bough.model.checkpoint.gguf_file import BLOCKS
from bough.model.checkpoint.tensor_source import STORED_DTYPES
from bough.model.quant.compressed_tensors import PACKED, CompressedTensorsFormat
from bough.model.quant.format import kept_modules
from bough.model.quant.formats import fields_of, format_of, where_in
from bough.model.quant.gguf import GgufFormat
from bough.model.quant.scaled import SchemeFormat
from bough.model.sizes.samples import BY_ROWS, PackedFormat

SCALE_BYTES, INDEX_BYTES = 2, 4
# FP8 as DeepSeek stores it; Qwen's have 2, which is a ten-thousandth less for the whole weight.
OWN_SCALE_BYTES = {"fp8": 4, "mxfp4": 1, "modelopt": 4}
COMMUNITY_GROUP = 128  # of GPTQ and AWQ if config.json has none, and of most checkpoints of llm-compressor


@dataclass(frozen=True, slots=True)
class Packing:
    """How the matrices of layers are stored."""

    description: str
    common: PackedFormat | None  # of all matrices; None if each has its own scheme
    kept: tuple[str, ...] = ()  # modules that stay in 16 bits
    schemes: SchemeFormat | None = None
    file: tuple[GgufFormat, dict[str, TensorPlace]] | None = None  # of GGUF, which tells every tensor's size

    @classmethod
    def of(cls, config: PretrainedConfig, folder: Path, bits: int) -> Packing | None:
        """The packing for `bits`, or that of the configuration if `bits` is 0; None is unpacked.

        Raises:
            CheckpointError: the configuration's packing is not supported.
        """
        if bits:
            return _as_published(bits) if bits < 16 else None
        quantization = format_of(config, folder)
        if quantization is None:
            return None
        if isinstance(quantization, SchemeFormat):
            return cls(str(quantization), None, schemes=quantization)
        if isinstance(quantization, GgufFormat):
            return cls(str(quantization), None, file=(quantization, Checkpoint.open(folder).tensors))
        fields, where = fields_of(config), where_in(folder)
        group_size = _group_size(fields, where)
        kept = kept_modules(fields, where, "modules_to_not_convert")
        common = PackedFormat(quantization.method, quantization.bits, group_size, not fields.get("desc_act"))
        return cls(str(quantization), common, kept)

    def of_parameter(
        self, name: str, module: nn.Module, parameter: torch.Tensor, dtype: torch.dtype
    ) -> tuple[PackedFormat | None, int] | None:
        """A parameter's format and bytes, by its name in the model; None if it is not packed. `dtype` is the others'.

        Packed are matrices of linear layers, and of experts.
        """
        shape, common = parameter.shape, self.common
        if self.file is not None:
            return self._in_file(name, dtype)
        is_stack = parameter.dim() == 3 and not isinstance(module, nn.Conv1d)
        if not is_stack and not (isinstance(module, nn.Linear) and parameter.dim() == 2):
            return None
        if common is not None:
            return None if any(kept in name for kept in self.kept) else (common, _community_bytes(common, shape))
        assert self.schemes is not None, "matrices have a common format, or schemes"
        scheme = self.schemes.scheme(_stored_modules(name.removesuffix(".weight")))
        if scheme is None:
            return None
        if getattr(module, "is_transposed", False):
            shape = torch.Size((*shape[:-2], shape[-1], shape[-2]))
        elif name.endswith(".gate_up_proj"):  # of experts, stored as two matrices each
            shape = torch.Size((2 * shape[0], shape[1] // 2, shape[2]))
        scale_bytes = OWN_SCALE_BYTES.get(self.schemes.method, dtype.itemsize)
        group_size = -1 if scheme.strategy in ("tensor", "channel", "") else scheme.size[1]
        method = next(method for method, stored in BY_ROWS.items() if stored == (scheme.dtype, bool(scheme.whole)))
        return PackedFormat(method, scheme.bits, group_size, scheme.is_ordered), scheme.num_bytes(shape, scale_bytes)

    def _in_file(self, name: str, dtype: torch.dtype) -> tuple[PackedFormat | None, int] | None:
        """A parameter's format and bytes in a GGUF file; None if plain of this dtype, (None, bytes) if of another."""
        assert self.file is not None, "called for GGUF only"
        format_, tensors = self.file
        places = [tensors[tensor] for tensor, _ in format_.tensors_of(name) if tensor in tensors]
        if not places or STORED_DTYPES.get(places[0].dtype) == dtype:
            return None
        kind, num_bytes = places[0].dtype, sum(place.num_bytes for place in places)
        values, block_bytes = BLOCKS.get(kind, (0, 0))
        return PackedFormat(kind, 8 * block_bytes // values, values) if values else None, num_bytes


def _as_published(bits: int) -> Packing:
    """The packing of most checkpoints of compressed-tensors in 4 or 8 bits."""
    weights = {"num_bits": bits, "group_size": COMMUNITY_GROUP}
    fields = {"format": PACKED, "config_groups": {"layers": {"targets": ["Linear"], "weights": weights}}}
    format_ = CompressedTensorsFormat.of(fields, "--bits")
    return Packing(str(format_), None, schemes=format_)


def _group_size(fields: Mapping[str, Any], where: str) -> int:
    """Inputs that share a scale; -1 for all. Raises CheckpointError."""
    name = "group_size" if fields.get("group_size") else "q_group_size"
    found = str(fields.get(name) or COMMUNITY_GROUP)
    if found != "-1" and not (found.isdecimal() and int(found)):
        raise CheckpointError(f"{where}.{name}: must be -1, or at least 1, got {fields[name]!r}")
    return int(found)


def _stored_modules(name: str) -> tuple[str, ...]:
    """Names of a module in a checkpoint: an expert's own for a stack of experts, of a gate joined with its projection.

    Where experts have other names than these, a pattern for them does not match.
    """
    first = name.replace(".experts.", ".experts.0.").replace(".gate_up_proj", ".gate_proj")
    return (name,) if first == name else (name, first, first.replace(".gate_proj", ".up_proj"))


def _community_bytes(stored: PackedFormat, shape: torch.Size) -> int:
    """Bytes of GPTQ's or AWQ's integers, scales and zeros, and of GPTQ's group indices."""
    size, num_inputs = math.prod(shape), shape[-1]
    num_groups = size // (num_inputs if stored.group_size < 0 else stored.group_size)
    index = num_inputs * INDEX_BYTES * math.prod(shape[:-2]) if stored.method == "gptq" else 0
    return size * stored.bits // 8 + num_groups * SCALE_BYTES + num_groups * stored.bits // 8 + index
