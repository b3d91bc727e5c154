"""Finds the weights of each parameter of a model, and loads those that are resident."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)

from bough.errors import CheckpointError
from bough.model.architecture import moe
from bough.model.architecture.architecture import build_empty, describe, load_config, max_positions
from bough.model.architecture.moe import AnySource, ExpertSources, ExpertTable
from bough.model.backend import backend_of
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.checkpoint.container import TensorPlace
from bough.model.checkpoint.tensor_source import (
    STORED_DTYPES,
    VALUE_DTYPES,
    FreshMemory,
    Joined,
    ReusedMemory,
    Scratch,
    Stored,
    TensorSource,
    is_aligned,
    row_blocks,
)
from bough.model.kv.session_kv import KVShape
from bough.model.packed import Packed
from bough.model.quant.format import Dequantized, PackedTensors, WeightFormat, in_language_model
from bough.model.quant.formats import format_of
from bough.model.quant.ggml_blocks import Blocks

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CONVERTED_BYTES = 16_000_000  # limit of one read of a tensor that is converted
GPU = torch.device("cuda")  # for its backend, which is that of every GPU
NUM_NAMED = 3  # unused tensors named in a warning
_WRITES = "_bough_writes"  # attribute of a module: functions that write its matrix


def logical_sources(
    checkpoint: Checkpoint, quantization: WeightFormat | None, parameters: Collection[str] = ()
) -> dict[str, AnySource]:
    """The values of a checkpoint by name; packed ones under the name of their weight, a GGUF file's by `parameters`."""
    left = dict(checkpoint.tensors)
    sources: dict[str, AnySource] = {}
    spare = quantization.spare if quantization is not None else ()
    if quantization is not None:
        for name, place in checkpoint.tensors.items():
            if (weight := quantization.weight_name(place)) is not None:
                sources[weight] = quantization.source(name, PackedTensors(left, checkpoint.has_data))
    sources.update({name: Stored(place) for name, place in left.items() if not name.endswith(spare)})
    return quantization.named(sources, parameters) if quantization is not None else in_language_model(sources)


class WeightMap:
    """Sources by transformers' parameter names.

    Packed tensors are combined first (`X.qweight`, `X.scales`, ... are the value `X.weight`). Then transformers' own
    mapping of checkpoint names to parameters is applied, with all of its renaming and stacking.
    """

    def __init__(self, model: PreTrainedModel, known: Collection[str], sources: dict[str, AnySource]) -> None:
        """`known` are the parameter names of the whole checkpoint, even if the model has fewer layers."""
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
        """The source of a parameter; None if the checkpoint has none.

        Raises:
            CheckpointError: transformers would combine the tensors in a way that is not supported.
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
        columns = [[self._apart(part) for part in parts[pattern]] for pattern in converter.source_patterns]
        steps = [(type(step), getattr(step, "dim", None)) for step in converter.operations]
        if steps == [(Concatenate, 0)] and all(len(column) == 1 for column in columns):
            return Joined(tuple(column[0] for column in columns))
        if steps in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]):
            rows = list(zip(*columns, strict=True))
            return ExpertSources(tuple(row[0] if len(row) == 1 else Joined(row) for row in rows))
        operations = ", ".join(type(step).__name__ for step in converter.operations)
        raise CheckpointError(f"parameter {name}: its tensors are put together by {operations}, which is not supported")

    def _apart(self, name: str) -> TensorSource:
        """A value that transformers would combine with others. Raises CheckpointError for a stack of experts."""
        source = self._sources[name]
        if isinstance(source, ExpertSources):
            raise CheckpointError(f"tensor {source.places[0].name}: packed experts must be stored as the parameter is")
        return source

    def unclaimed(self) -> Iterable[str]:
        """Names of values in the checkpoint that no parameter has claimed."""
        return (name for name in self._parts if name not in self._claimed)


@dataclass(frozen=True, slots=True)
class ParameterSlot:
    """A parameter or persistent buffer of a module, and the source of its value."""

    module: nn.Module
    key: str
    source: AnySource

    def bind(self, raw: Sequence[torch.Tensor], dtype: torch.dtype, scratch: Scratch) -> None:
        """Set the parameter from `raw`, as in `TensorSource.value`."""
        self.assign(self.materialize(raw, dtype, scratch))

    def materialize(
        self, raw: Sequence[torch.Tensor], dtype: torch.dtype, scratch: Scratch, by_matrix: bool = False
    ) -> Any:
        """Make the value in the form that `assign` takes; with `by_matrix` a packed one if it `stays_packed`."""
        if isinstance(self.source, ExpertSources):
            return self.source.table(raw, dtype, scratch)
        if by_matrix and stays_packed(self) and isinstance(self.source, Dequantized):
            return self.source.packed(raw)
        return self.as_parameter(self.source.value(raw, dtype, scratch))

    def scratch_bytes(self, dtype: torch.dtype, by_matrix: bool) -> int:
        """Scratch bytes that `materialize` takes."""
        return 0 if by_matrix and stays_packed(self) else self.source.scratch_bytes(dtype)

    def as_parameter(self, value: torch.Tensor) -> torch.Tensor:
        """Wrap a tensor in the form that `assign` takes."""
        return value if self.key in self.module._buffers else nn.Parameter(value, requires_grad=False)

    def assign(self, value: Any) -> None:
        """Set the parameter to what `materialize` returned."""
        if isinstance(value, ExpertTable | Packed):
            self.module._parameters.pop(self.key, None)  # nn.Module would refuse what is not a tensor
            self.module.__dict__[self.key] = value
        elif self.key in self.module._buffers:
            self.module._buffers[self.key] = value
        else:
            self.module._parameters[self.key] = value


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A transformers model on the meta device, and the sources of its weights."""

    model: PreTrainedModel
    config: PretrainedConfig
    layers: tuple[nn.Module, ...]
    layer_slots: tuple[tuple[ParameterSlot, ...], ...]  # one tuple for each layer
    resident_slots: tuple[ParameterSlot, ...]  # embeddings, final norm, output head
    dtype: torch.dtype
    quantization: WeightFormat | None
    unused: tuple[str, ...]  # tensors of the checkpoint without a place in the architecture

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def max_positions(self) -> int:
        """The context length, within which rotary embeddings do not depend on the rest of the batch."""
        return max_positions(self.config)

    def kv_shape(self) -> KVShape:
        """Shape of the model's keys and values."""
        return KVShape.of(self.config, self.dtype)

    def describe(self) -> str:
        """Description of architecture, size and dtype."""
        packed = f", {self.quantization}" if self.quantization else ""
        return describe(self.model, self.dtype) + packed


def build_skeleton(checkpoint: Checkpoint, dtype: torch.dtype, keep_layers: tuple[int, ...] | None = None) -> Skeleton:
    """Build the model on the meta device; `keep_layers` are the layers to use, by default all.

    Raises:
        CheckpointError: the architecture cannot run, or names a tensor that is missing or has the wrong shape.
    """
    config = load_config(checkpoint.path)
    quantization = format_of(config, checkpoint.path)
    if quantization is not None and quantization.note:
        logger.warning("%s: %s", checkpoint.path, quantization.note)
    kept = keep_layers if keep_layers is not None else tuple(range(config.num_hidden_layers))
    model = build_empty(config, dtype, keep_layers)
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = moe.NAME
    layers = tuple(model.get_decoder().layers)
    prefix = next(name for name, module in model.named_modules() if module is model.get_decoder().layers)
    finder = _Finder(checkpoint, quantization, model, {f"{prefix}.{i}": f"{prefix}.{k}" for i, k in enumerate(kept)})
    layer_slots = tuple(tuple(finder.slots(layer, f"{prefix}.{index}")) for index, layer in enumerate(layers))
    in_layers = frozenset(id(module) for layer in layers for module in layer.modules())
    resident = tuple(finder.slots(model, "", in_layers))
    return Skeleton(model, config, layers, layer_slots, resident, dtype, quantization, finder.unused(prefix))


class _Finder:
    """Finds the source of each parameter of a model."""

    def __init__(
        self, checkpoint: Checkpoint, quantization: WeightFormat | None, model: PreTrainedModel, layers: dict[str, str]
    ) -> None:
        """`layers` maps the model's layer names to those in the checkpoint."""
        self._checkpoint, self._layers = checkpoint, layers
        self._float32_names = build_glob_alternation([*(model._keep_in_fp32_modules_strict or ())])[0]
        is_tied = getattr(model.config, "tie_word_embeddings", False)
        self._tied: dict[str, str] = dict(getattr(model, "_tied_weights_keys", None) or {}) if is_tied else {}
        names = list(map(self._original, model.state_dict()))
        self._naming = WeightMap(model, names, logical_sources(checkpoint, quantization, names))

    def slots(self, root: nn.Module, prefix: str, skip: Collection[int] = ()) -> Iterator[ParameterSlot]:
        """Slots of all modules below `root`, named `prefix` in the model, except those whose `id` is in `skip`."""
        for module_name, module in root.named_modules(prefix=prefix):
            if id(module) in skip:
                continue
            buffers = ((k, b) for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set)
            for key, parameter in (*module._parameters.items(), *buffers):
                if parameter is not None:
                    yield self._slot(module, key, f"{module_name}.{key}" if module_name else key, parameter)

    def unused(self, prefix: str) -> tuple[str, ...]:
        """Names of values that no parameter uses, except those of layers that were left out."""
        layers = tuple(f"{name}." for name in self._layers.values())
        names = (n for n in self._naming.unclaimed() if n not in self._tied and not n.endswith("rotary_emb.inv_freq"))
        unused = tuple(name for name in names if not name.startswith(f"{prefix}.") or name.startswith(layers))
        if unused:
            logger.warning(
                "%s: %d tensors have no place in this architecture and are not used, as in transformers: %s%s",
                self._checkpoint.path,
                len(unused),
                ", ".join(unused[:NUM_NAMED]),
                ", ..." if len(unused) > NUM_NAMED else "",
            )
        return unused

    def _original(self, name: str) -> str:
        """A parameter's name in the checkpoint, which may have more layers."""
        for mine, original in self._layers.items():
            if name.startswith(f"{mine}."):
                return original + name.removeprefix(mine)
        return name

    def _slot(self, module: nn.Module, key: str, name: str, parameter: torch.Tensor) -> ParameterSlot:
        source = self._naming.source(name := self._original(name))
        if source is None and name in self._tied:
            source = self._naming.source(self._tied[name])
        if source is None:
            raise CheckpointError(f"{self._checkpoint.path}: tensor {name}, which its configuration has, is missing")
        place = source.places[0]
        _require_readable(source)
        if source.shape != tuple(parameter.shape):
            raise CheckpointError(
                f"{place.file}: tensor {place.name} must have the configuration's shape {list(parameter.shape)}, "
                f"got {list(source.shape)}"
            )
        if (
            isinstance(source, Stored)
            and place.dtype == "F32"
            and self._float32_names.pattern
            and self._float32_names.search(name)
        ):
            source = replace(source, keeps_dtype=True)  # rounding it would cost accuracy
        return ParameterSlot(module, key, source)


def _require_readable(source: AnySource | TensorSource) -> None:
    """Raise CheckpointError for a tensor of unsupported dtype, or whose shape differs from its siblings'."""
    parts = source.parts if isinstance(source, Joined | ExpertSources) else ()
    for part in parts:
        _require_readable(part)
        if part.shape[1:] != parts[0].shape[1:] or (isinstance(source, ExpertSources) and part.shape != parts[0].shape):
            raise CheckpointError(
                f"{part.places[0].file}: tensor {part.places[0].name} has shape {list(part.shape)}, but "
                f"{parts[0].places[0].name} of the same parameter has {list(parts[0].shape)}"
            )
    known = VALUE_DTYPES if isinstance(source, Stored) else STORED_DTYPES
    for place in () if parts else source.places:
        if place.dtype not in known:
            raise CheckpointError(
                f"{place.file}: tensor {place.name} must be stored as one of {', '.join(known)}, got {place.dtype}"
            )


def bind_resident(skeleton: Skeleton, slots: Sequence[ParameterSlot], device: torch.device) -> None:
    """Load parameters permanently; a value shared by several parameters is loaded once.

    Raises:
        CheckpointError: a tensor cannot be read.
    """
    memory = FreshMemory(device)
    loaded: dict[tuple[TensorPlace, ...], tuple[nn.Module, str]] = {}
    for slot in slots:
        if slot.source.places in loaded:
            module, key = loaded[slot.source.places]
            slot.module._parameters[slot.key] = module._parameters[key]
            continue
        if isinstance(slot.source, Stored | Blocks) and slot.source.scratch_bytes(skeleton.dtype):
            value = memory.take(slot.source.shape, skeleton.dtype)
            _convert(slot.source, value)
            slot.assign(slot.as_parameter(value))
        else:
            slot.bind(read_raw(slot, device), skeleton.dtype, memory)
        loaded[slot.source.places] = (slot.module, slot.key)


def _convert(source: Stored | Blocks, out: torch.Tensor) -> None:
    """Convert a tensor some rows at a time: two whole copies would exceed the memory budget."""
    begin, place = 0, source.place
    for part in row_blocks(place, CONVERTED_BYTES) if source.is_by_rows else [place]:
        data, end = read_place(part), begin + part.shape[0]
        replace(source, place=part).write(data.to(out.device), out[begin:end])
        begin = end


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move buffers such as rotary frequencies to a device; meta tensors stay."""
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[key] = buffer.to(device)


def read_place(place: TensorPlace) -> torch.Tensor:
    """The bytes of a tensor, (num_bytes,) uint8."""
    try:
        data = np.fromfile(place.file, np.uint8, place.num_bytes, offset=place.offset)
    except OSError as exc:
        raise CheckpointError(f"{place.file}: tensor {place.name} cannot be read: {exc}") from exc
    if len(data) < place.num_bytes:
        raise CheckpointError(f"{place.file}: tensor {place.name} ends after {len(data)} of {place.num_bytes} bytes")
    return torch.from_numpy(data)


def read_raw(slot: ParameterSlot, device: torch.device) -> list[torch.Tensor]:
    """The bytes of a parameter's tensors on a device. Raises CheckpointError."""
    return [read_place(place).to(device) for place in slot.source.places]


@dataclass(frozen=True, slots=True)
class LateWrites:
    """Functions that dequantize a module's matrix just before its product, into the same memory as the one before.

    A 70B model's whole layer in 16 bits takes 1.7 GB, its largest matrix 0.5 GB: the saved memory keeps more layers on
    the device. Each further chunk of rows dequantizes again.
    """

    module: nn.Module
    writes: tuple[Callable[[], object], ...]

    def register(self) -> None:
        """Make the module call them before its forward."""
        known = self.module.__dict__
        if _WRITES not in known:
            self.module.register_forward_pre_hook(_write)
        known[_WRITES] = self.writes


def bind_all(skeleton: Skeleton, device: torch.device, keeps_packed: bool = False) -> None:
    """Load a whole model permanently; if it is kept packed, with memory for the largest dequantized matrix or expert.

    Raises:
        CheckpointError: a tensor cannot be read.
    """
    slots = [slot for layer in skeleton.layer_slots for slot in layer]
    waiting = (slot for slot in slots if keeps_packed and (can_wait(slot) or isinstance(slot.source, ExpertSources)))
    late = [slot for slot in waiting if slot.source.scratch_bytes(skeleton.dtype)]
    bind_resident(skeleton, [*skeleton.resident_slots, *(slot for slot in slots if slot not in late)], device)
    move_buffers(skeleton.model, device)
    num_bytes = max((slot.scratch_bytes(skeleton.dtype, device.type != "cpu") for slot in late), default=0)
    memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    for slot in late:
        scratch = ReusedMemory(memory)
        slot.assign(slot.materialize(read_raw(slot, device), skeleton.dtype, scratch, device.type != "cpu"))
        if can_wait(slot) and scratch.writes:  # a table of experts writes requested experts
            LateWrites(slot.module, tuple(scratch.writes)).register()
        elif can_wait(slot):
            slot.module.forward = partial(_multiplied, slot.module)


def can_wait(slot: ParameterSlot) -> bool:
    """Whether a parameter is used only by its module's forward."""
    return is_late(slot.module, slot.key)


def stays_packed(slot: ParameterSlot) -> bool:
    """Whether a GPU's products read a parameter's packed value, of which then nothing is written out.

    Values of tensors that are not aligned would be copies of what a slab has at one time.
    """
    is_packed = isinstance(slot.source, Dequantized) and slot.source.is_packed and can_wait(slot)
    return is_packed and all(map(is_aligned, slot.source.places)) and backend_of(GPU).takes_packed


def is_late(module: nn.Module, key: str) -> bool:
    """Whether only a module's forward uses `key`: a linear layer's matrix, unless latent attention uses parts of it."""
    return isinstance(module, nn.Linear) and key == "weight" and not hasattr(module, "is_used_by_parts")


def _multiplied(module: Any, rows: torch.Tensor) -> torch.Tensor:
    """The forward of a linear layer whose matrix stays packed."""
    return backend_of(rows.device).multiply(rows, module.weight, module.bias)


def _write(module: nn.Module, _: Any) -> None:
    for write in module.__dict__[_WRITES]:
        write()
