"""Weights of GGUF files: the parameter of each tensor, and the changes that llama.cpp's converter made to it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PretrainedConfig

from bough.errors import CheckpointError
from bough.model.checkpoint.container import TensorPlace
from bough.model.checkpoint.gguf_file import BLOCKS, PLAIN
from bough.model.checkpoint.gguf_model import METHOD, ROPE_FACTORS
from bough.model.checkpoint.tensor_source import TensorSource, parts_of, typed
from bough.model.quant.format import Dequantized, PackedTensors, WeightFormat
from bough.model.quant.ggml_blocks import Blocks, sample

EXPERTS = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")  # parameters that have all experts of a layer
LAYER = re.compile(r"\d+")
HEAD = "lm_head.weight"  # missing if it equals the embeddings


@dataclass(frozen=True, slots=True)
class GgufFormat(WeightFormat):
    """The weights of a GGUF file, whose tensors may each be of another type."""

    architecture: str
    num_layers: int
    num_heads: tuple[int, int]  # of queries, of keys
    types: tuple[str, ...]  # by their share of the bytes, the largest first
    method = METHOD
    bits = 0
    spare = (ROPE_FACTORS,)
    samples: ClassVar = {kind: partial(sample, kind) for kind in ("Q4_K", "Q6_K", "Q8_0")}

    @classmethod
    def found(cls, config: PretrainedConfig, path: Path) -> tuple[Mapping[str, Any], str] | None:
        """The quantization of a GGUF file, from the fields of `gguf_config`."""
        return super(GgufFormat, cls).found(config, path) if path.is_file() else None

    @classmethod
    def of(cls, fields: Mapping[str, Any], _where: str) -> GgufFormat:
        """Read the fields of `gguf_config`."""
        queries, keys = fields["num_heads"]
        return cls(fields["architecture"], fields["num_layers"], (queries, keys), tuple(fields["types"]))

    def __str__(self) -> str:
        return f"{', '.join(kind for kind in self.types if kind in BLOCKS) or self.types[0]} ({self.method})"

    def weight_name(self, place: TensorPlace) -> str | None:
        """The tensor's own name; None if the tensor is read as it is."""
        is_plain = place.dtype in PLAIN and self._half(place) == 1 and not self._has_offset(place)
        return None if is_plain else place.name

    def source(self, tensor: str, tensors: PackedTensors) -> TensorSource:
        """Take a weight's only tensor, in blocks or plain. Raises CheckpointError for other types."""
        place = tensors.take(tensor, (*PLAIN, *BLOCKS))
        half = self._half(place)
        if place.dtype in PLAIN:
            return Converted(place, half, -1.0 if self._has_offset(place) else 0.0)
        return _blocks(place, half)

    def named(self, sources: Mapping[str, Any], parameters: Collection[str]) -> dict[str, Any]:
        """Sources by names of parameters instead of tensors; experts have one each.

        Raises:
            CheckpointError: a tensor is missing, or has no place.
        """
        found, kinds = dict[str, Any](), set[str]()
        file = next(iter(sources.values())).places[0].file
        for parameter in parameters:
            for tensor, name in self.tensors_of(parameter):
                if tensor in sources:
                    kinds.add(_kind(tensor))
                    found |= dict(_by_expert(name, sources[tensor]))
                elif parameter != HEAD:
                    raise CheckpointError(f"{file}: tensor {tensor}, which is {parameter}, is missing")
        for tensor in sources:
            if _kind(tensor) not in kinds:
                raise CheckpointError(f"{file}: tensor {tensor} has no place in a model of {self.architecture}")
        return found

    def tensors_of(self, parameter: str) -> Iterator[tuple[str, str]]:
        """Tensors of a parameter, each with the name of its value in safetensors checkpoints."""
        if experts := EXPERTS.fullmatch(parameter):
            for part in ("gate", "up") if experts[2] == "gate_up" else ("down",):
                name = f"{experts[1]}.{part}_proj.weight"
                yield self._tensor(name), name.replace(".experts.", ".experts.{}.")
        else:
            yield self._tensor(parameter), parameter

    def _tensor(self, parameter: str) -> str:
        found = _names(self.architecture, self.num_layers).get_name(parameter, (".weight", ".bias"))
        return found or parameter

    def _half(self, place: TensorPlace) -> int:
        """`half` of `Blocks`: in llama's files, rows of queries and keys that are rotated together are adjacent."""
        for name, heads in zip(("attn_q", "attn_k"), self.num_heads, strict=True):
            if self.architecture == "llama" and f".{name}." in place.name:
                return max(1, place.shape[0] // heads // 2)
        return 1

    def _has_offset(self, place: TensorPlace) -> bool:
        """Whether 1 has been added: gemma's norms multiply by 1 + weight."""
        return self.architecture.startswith("gemma") and place.name.endswith("norm.weight")


@cache
def _names(architecture: str, num_layers: int) -> Any:
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    return get_tensor_name_map(
        next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture), num_layers
    )


def _kind(tensor: str) -> str:
    """A tensor's name without the number of its layer."""
    return LAYER.sub("", tensor, count=1)


def _blocks(place: TensorPlace, half: int = 1) -> Blocks:
    """A matrix, or a stack of them as one."""
    values, block_bytes = BLOCKS[place.dtype]
    rows = (*place.shape[:-1], place.shape[-1] // values * block_bytes)
    return Blocks(replace(place, dtype="U8", shape=rows), place.dtype, half)


def _by_expert(name: str, source: TensorSource) -> Iterator[tuple[str, TensorSource]]:
    """The values of a stack by their names, which follow the pattern `name`; other values by their own name."""
    if "{}" not in name:
        yield name, source
        return
    (place,) = source.places
    for expert, own in enumerate(parts_of(place)):
        yield name.format(expert), replace(source, place=own)  # type: ignore[type-var]  # all of them are dataclasses


@dataclass(frozen=True, slots=True)
class Converted(Dequantized):
    """A plain tensor with rows in the order of `ggml_blocks.Blocks`, or with a number added to its values."""

    place: TensorPlace
    half: int
    offset: float
    is_packed = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.place.shape

    def _write(self, raw: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        stored = typed(raw[0], self.place)
        if self.half > 1:
            pairs = stored.view(-1, self.half, 2, *self.shape[1:])
            out.view(-1, 2, self.half, *self.shape[1:]).copy_(pairs.transpose(1, 2))
        else:
            out.copy_(stored.float() + self.offset)
