"""Weights in the format of the library compressed-tensors, as llm-compressor writes them: integers or E4M3 numbers."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from bough.errors import CheckpointError
from bough.model.architecture.moe import ExpertSources
from bough.model.checkpoint.container import TensorPlace
from bough.model.quant.format import SAMPLE_GROUP, PackedTensors, WeightFormat, module_names
from bough.model.quant.scaled import (
    FLOAT8,
    INT8,
    SPARE,
    WHOLE_DIVISOR,
    WORDS,
    Scaled,
    StoredAs,
    block_size,
    nvfp4,
    unquantized,
)

PACKED, INTEGERS, FLOATS, NAIVE = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
NVFP4, TENSOR_GROUP = "nvfp4-pack-quantized", "tensor_group"  # and its strategy: groups, within one scale
DENSE = "dense"  # the only layout of zeros: explicit values
PATTERN, CLASS = "re:", "Linear"  # in targets: the prefix of a regular expression, and the class of every matrix
SCHEME_FIELDS = ("targets", "weights", "input_activations", "output_activations", "format")
WEIGHT_FIELDS = (
    *("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder"),
    *("scale_dtype", "zp_dtype", "observer", "observer_kwargs"),  # fields about how the weights were made
)


@dataclass(frozen=True, slots=True)
class CompressedTensorsFormat(WeightFormat):
    """The schemes of a checkpoint's groups of modules."""

    schemes: tuple[tuple[str, StoredAs], ...]  # by target, the more specific first
    bits: int
    note: str
    method = "compressed-tensors"
    spare = SPARE
    samples: ClassVar = {
        "compressed-tensors 4 bits": StoredAs(WORDS, 4, "group", (1, SAMPLE_GROUP)).sample,
        "compressed-tensors 8 bits by g_idx": StoredAs(WORDS, 8, "group", (1, SAMPLE_GROUP), is_ordered=False).sample,
        "int8": StoredAs(INT8, 8, "channel").sample,
    }

    @classmethod
    def of(cls, fields: Mapping[str, Any], where: str) -> CompressedTensorsFormat:
        """Read `quantization_config`. Raises CheckpointError."""
        _require_plain(fields, where)
        groups = fields.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise CheckpointError(f"{where}.config_groups: must be groups of modules by name, got {groups!r}")
        schemes, changed = list[tuple[str, StoredAs]](), set[str]()
        for name, group in groups.items():
            at = f"{where}.config_groups.{name}"
            _require_known(group, SCHEME_FIELDS, at)
            changed.update(key for key in ("input_activations", "output_activations") if group.get(key))
            if group.get("weights"):
                own, common = (group.get("format"), f"{at}.format"), (fields.get("format"), f"{where}.format")
                scheme = _scheme(group["weights"], *(own if own[0] else common), f"{at}.weights")
                schemes += [(target, scheme) for target in _targets(group.get("targets"), f"{at}.targets")]
        if not schemes:
            raise CheckpointError(f"{where}.config_groups: must have a group with weights, got {', '.join(groups)}")
        if fields.get("kv_cache_scheme"):
            changed.add("kv_cache_scheme")
        bits, *others = {scheme.bits for _, scheme in schemes}
        return cls(tuple(sorted(schemes, key=_rank)), 0 if others else bits, unquantized(changed))

    def weight_name(self, place: TensorPlace) -> str | None:
        """X.weight for "X.weight_packed", and for "X.weight" in 8 bits."""
        if place.name.endswith(".weight_packed"):
            return place.name.removesuffix("_packed")
        return place.name if place.name.endswith(".weight") and place.dtype in (INT8, FLOAT8) else None

    def source(self, tensor: str, tensors: PackedTensors) -> Scaled | ExpertSources:
        """Take numbers, scales, and other tensors of the module's scheme. Raises CheckpointError."""
        module, weight = tensor.rpartition(".")[0], tensor.removesuffix("_packed")
        scheme = next((scheme for target, scheme in self.schemes if _matches(target, module)), None)
        if scheme is None:
            raise CheckpointError(f"config.json: quantization_config.config_groups has no target for tensor {tensor}")
        return scheme.source(tensor, (f"{weight}_scale",), tensors)


def _require_plain(fields: Mapping[str, Any], where: str) -> None:
    """Refuse fields that change values beyond numbers and scales."""
    sparsity = fields.get("sparsity_config") or {}
    found = sparsity.get("format", DENSE) if isinstance(sparsity, Mapping) else sparsity
    _require_one_of(found, (DENSE,), f"{where}.sparsity_config.format")
    for name in ("transform_config", "moe_sparsity_config"):
        if fields.get(name):
            raise CheckpointError(f"{where}.{name}: must be empty, got {fields[name]!r}")


def _require_known(fields: object, names: Collection[str], where: str) -> None:
    if not isinstance(fields, Mapping):
        raise CheckpointError(f"{where}: must be an object, got {fields!r}")
    if unknown := sorted(set(fields) - set(names)):
        raise CheckpointError(f"{where}: must have no fields but {', '.join(names)}, got {', '.join(unknown)}")


def _scheme(weights: Any, format_: object, format_where: str, where: str) -> StoredAs:
    """The scheme of a group's weights, which are stored in `format_`."""
    _require_known(weights, WEIGHT_FIELDS, where)
    _require_one_of(format_, (PACKED, INTEGERS, FLOATS, NAIVE, NVFP4), format_where)
    if format_ == NVFP4:
        return _nvfp4(weights, where)
    kind, bits, is_symmetric = weights.get("type", "int"), weights.get("num_bits", 8), weights.get("symmetric", True)
    types = {PACKED: ("int",), INTEGERS: ("int",), FLOATS: ("float",), NAIVE: ("int", "float")}
    _require_one_of(kind, types[str(format_)], f"{where}.type")
    dtype = FLOAT8 if kind == "float" else WORDS if format_ == PACKED else INT8
    _require_one_of(bits, (8,) if dtype == FLOAT8 else (4, 8), f"{where}.num_bits")
    _require_one_of(is_symmetric, (True, False) if dtype == WORDS else (True,), f"{where}.symmetric")
    _require_one_of(weights.get("dynamic", False), (False,), f"{where}.dynamic")
    strategy, size = _strategy(weights, where)
    strategies = ["group", "channel", *(["tensor"] if is_symmetric else []), *(["block"] if dtype != WORDS else [])]
    _require_one_of(strategy, strategies, f"{where}.strategy")
    is_ordered = str(weights.get("actorder")).lower() not in ("group", "dynamic", "true")
    return StoredAs(dtype, bits if dtype == WORDS else 8, strategy, size, is_symmetric, is_ordered)


def _nvfp4(weights: Mapping[str, Any], where: str) -> StoredAs:
    scheme = nvfp4(WHOLE_DIVISOR)
    named = {"type": "float", "num_bits": scheme.bits, "symmetric": True, "strategy": TENSOR_GROUP}
    for name, value in (named | {"group_size": scheme.size[1], "dynamic": False}).items():
        _require_one_of(weights.get(name, value), (value,), f"{where}.{name}")
    return scheme


def _strategy(weights: Mapping[str, Any], at: str) -> tuple[str, tuple[int, int]]:
    """The kind of part that shares a scale, and the outputs and inputs of a group or block."""
    size, blocks = weights.get("group_size"), weights.get("block_structure")
    by_size = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = str(weights.get("strategy") or by_size).lower()
    if strategy == "group":
        if type(size) is not int or size < 1:
            raise CheckpointError(f"{at}.group_size: must be at least 1, got {size!r}")
        return strategy, (1, size)
    return strategy, block_size(blocks, f"{at}.block_structure") if strategy == "block" else (1, 1)


def _require_one_of(value: object, allowed: Collection[object], where: str) -> None:
    if value not in allowed:
        raise CheckpointError(f"{where}: must be {' or '.join(map(repr, allowed))}, got {value!r}")


def _targets(found: object, where: str) -> tuple[str, ...]:
    """Names, patterns and classes of modules."""
    targets = module_names(found, where)
    for target in targets:
        if target.startswith(PATTERN):
            try:
                re.compile(target.removeprefix(PATTERN))
            except re.error as exc:
                raise CheckpointError(f"{where}: must be regular expressions after re:, got {target!r}: {exc}") from exc
    return targets


def _rank(entry: tuple[str, object]) -> tuple[int, str]:
    """The order in which the library looks for a module's target: its name, a pattern, its class."""
    target, _ = entry
    return (2 if target == CLASS else int(target.startswith(PATTERN)), target)


def _matches(target: str, module: str) -> bool:
    if target.startswith(PATTERN):
        return re.match(target.removeprefix(PATTERN), module) is not None
    return target in (module, CLASS)
