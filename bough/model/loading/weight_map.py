"""Which tensors of a checkpoint make up which parameter of a model.

First packed tensors are put together (`X.qweight`, `X.scales`, ... are the value `X.weight`), then transformers' own
mapping from checkpoint names to parameters is applied, so that whatever it renames or stacks while loading is renamed
and stacked here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from bough.errors import CheckpointError
from bough.model.architecture.moe import Experts
from bough.model.checkpoint.checkpoint import Checkpoint, TensorPlace
from bough.model.checkpoint.tensor_source import VALUE_DTYPES, Joined, Source, Stored
from bough.model.quant.group_order import unless_in_order
from bough.model.quant.packed import Awq, Gptq, Packed

PACKED_SUFFIX, SCALES_SUFFIX = ".packed", ".packed_scales"  # after the name of a weight that bough has packed
MIXED = "mixed"  # in config.json, instead of a number of bits
BITS = {"U8": 4, "I8": 8}  # by the data type of the integers that bough has packed
METHODS = ("bough", "gptq", "awq")
# How names begin in a model of which the language model is a part, and how they begin in that by itself.
PARTS = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a checkpoint's weights are packed, as its config.json says it."""

    method: str
    bits: int  # 0 where bough has packed some weights in 4 and others in 8
    zero_offset: int = 0  # GPTQ: what its zeros lack

    @classmethod
    def of(cls, config: PretrainedConfig, folder: Path) -> Quantization | None:
        """None for a checkpoint in 16 or 32 bits.

        Raises:
            CheckpointError: packed in a way that cannot be read here.
        """
        entry = getattr(config, "quantization_config", None)
        if not entry:
            return None
        fields: dict[str, Any] = entry if isinstance(entry, dict) else entry.to_dict()
        method, named = str(fields.get("quant_method", "")), fields.get("bits") or fields.get("w_bit") or 0
        where = f"{folder / 'config.json'}: quantization_config"
        if method not in METHODS:
            raise CheckpointError(
                f"{where}.quant_method: {method!r} cannot be read; {', '.join(METHODS)} can, and checkpoints in 16 bits"
            )
        if method == "awq" and str(fields.get("version", "gemm")).lower() != "gemm":
            raise CheckpointError(f"{where}.version: {fields['version']!r} cannot be read; 'gemm' can")
        if method == "bough" and named == MIXED:
            return cls(method, 0)
        bits = int(named) if str(named).isdecimal() else named
        allowed = (4,) if method == "awq" else (4, 8)
        if bits not in allowed:
            raise CheckpointError(f"{where}.bits: {bits}; {' or '.join(map(str, allowed))} can be read")
        is_first_gptq = method == "gptq" and fields.get("checkpoint_format", "gptq") == "gptq"
        return cls(method, bits, 1 if is_first_gptq else 0)

    def __str__(self) -> str:
        return f"{self.bits or MIXED} bits ({self.method})"


def logical_sources(checkpoint: Checkpoint, quantization: Quantization | None) -> dict[str, Source]:
    """The values of a checkpoint by name, packed ones put together under the name of the weight that they are."""
    left = dict(checkpoint.tensors)
    sources: dict[str, Source] = {}
    if quantization is not None:
        for name in list(left):
            base = _weight_name(name, quantization.method)
            if base is not None:
                sources[base] = _packed_source(name, quantization, left)
    sources.update({name: Stored(place) for name, place in left.items()})
    return {_own_name(name): source for name, source in sources.items()}


def _own_name(name: str) -> str:
    """That a value has where the language model is no part of another."""
    of_part = next((beginning for beginning in PARTS if name.startswith(beginning)), None)
    return name if of_part is None else PARTS[of_part] + name.removeprefix(of_part)


def _weight_name(name: str, method: str) -> str | None:
    """The weight to which a tensor of integers belongs; None for any other tensor."""
    suffix, ending = (PACKED_SUFFIX, "") if method == "bough" else (".qweight", ".weight")
    return name.removesuffix(suffix) + ending if name.endswith(suffix) else None


def _packed_source(name: str, quantization: Quantization, left: dict[str, TensorPlace]) -> Source:
    """Takes the tensors of one packed weight out of what is left."""

    def take(other: str, dtypes: Collection[str]) -> TensorPlace:
        place = left.pop(other, None)
        if place is None:
            raise CheckpointError(f"{words.file}: tensor {other}, which belongs to {name}, is missing")
        if place.dtype not in dtypes:
            raise CheckpointError(f"{place.file}: tensor {other} is {place.dtype}; {' or '.join(dtypes)} would do")
        return place

    words = left[name]
    if quantization.method == "bough":
        base = name.removesuffix(PACKED_SUFFIX)
        packed = take(name, [dtype for dtype, bits in BITS.items() if quantization.bits in (0, bits)])
        _require_matrix(packed)
        scales, bits = take(base + SCALES_SUFFIX, ("F16",)), BITS[packed.dtype]
        _require_groups(scales, packed.shape[1] * 8 // bits, scales.shape[-1] if scales.shape else 0)
        _require_shape(scales, (2 if bits == 4 else 1, packed.shape[0], scales.shape[-1]))
        return Packed(packed, scales, bits)
    base = name.removesuffix(".qweight")
    words, zeros = take(name, ("I32",)), take(f"{base}.qzeros", ("I32",))
    scales = take(f"{base}.scales", VALUE_DTYPES)
    _require_matrix(words)
    num_groups, per_word = scales.shape[0] if scales.shape else 0, 32 // quantization.bits
    source: Awq | Gptq = Awq(words, zeros, scales)
    if quantization.method == "gptq":
        groups = take(f"{base}.g_idx", ("I32",)) if f"{base}.g_idx" in left else None
        source = Gptq(words, zeros, scales, groups, quantization.bits, quantization.zero_offset)
    outputs, inputs = source.shape
    _require_shape(scales, (num_groups, outputs))
    _require_shape(zeros, (num_groups, outputs // per_word))
    if isinstance(source, Gptq) and source.groups is not None:
        _require_shape(source.groups, (inputs,))
        return replace(source, groups=unless_in_order(source.groups, num_groups))
    _require_groups(scales, inputs, num_groups)
    return source


def _require_matrix(place: TensorPlace) -> None:
    if len(place.shape) != 2:
        raise CheckpointError(f"{place.file}: tensor {place.name} has shape {list(place.shape)}; a matrix would do")


def _require_shape(place: TensorPlace, shape: tuple[int, ...]) -> None:
    """Kernels take shapes at their word."""
    if place.shape != shape:
        raise CheckpointError(
            f"{place.file}: tensor {place.name} has shape {list(place.shape)}; {list(shape)} would fit its weight"
        )


def _require_groups(scales: TensorPlace, inputs: int, num_groups: int) -> None:
    if num_groups < 1 or inputs % num_groups:
        raise CheckpointError(
            f"{scales.file}: tensor {scales.name} has shape {list(scales.shape)}; {inputs} inputs are not so "
            "many groups of equal size"
        )


AnySource = Source | Experts


class Naming:
    """Sources by the names that transformers gives its parameters."""

    def __init__(self, model: PreTrainedModel, known: Collection[str], sources: dict[str, Source]) -> None:
        """`known` are the parameters' names as the whole checkpoint would have them, whatever layers the model has."""
        transforms = get_model_conversion_mapping(model)
        renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, WeightConverter)]
        by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        self._converters: dict[str, WeightConverter | None] = {}
        self._parts: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        self._sources = sources
        names = dict.fromkeys(known, True)
        for name in sorted(sources, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, names)
            if target not in names and name in names:
                target, pattern = name, None
            self._parts[target][pattern or ""].append(name)
            self._converters[target] = by_pattern[pattern] if pattern else None
        self._claimed: set[str] = set()

    def source(self, name: str) -> AnySource | None:
        """What makes up a parameter; None where the checkpoint has nothing for it.

        Raises:
            CheckpointError: transformers would put the tensors together in a way that is not known here.
        """
        if name not in self._parts:
            return None
        self._claimed.add(name)
        parts, converter = self._parts[name], self._converters[name]
        if converter is None:
            ((first, *others),) = parts.values()
            if others:
                raise CheckpointError(f"tensors {first} and {', '.join(others)} are both parameter {name}")
            return self._sources[first]
        columns = [[self._sources[part] for part in parts[pattern]] for pattern in converter.source_patterns]
        steps = [(type(step), getattr(step, "dim", None)) for step in converter.operations]
        if steps == [(Concatenate, 0)] and all(len(column) == 1 for column in columns):
            return Joined(tuple(column[0] for column in columns))
        if steps in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]):
            rows = list(zip(*columns, strict=True))
            return Experts(tuple(row[0] if len(row) == 1 else Joined(row) for row in rows))
        operations = ", ".join(type(step).__name__ for step in converter.operations)
        raise CheckpointError(f"parameter {name}: its tensors are put together by {operations}, which is not supported")

    def unclaimed(self) -> Iterable[str]:
        """Names under which the checkpoint has values that no parameter has asked for."""
        return (name for name in self._parts if name not in self._claimed)
