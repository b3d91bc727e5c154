"""Builds a model from its configuration with no weights in it, and finds the weights that belong in each place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from bough.errors import CheckpointError
from bough.model import attention, experts
from bough.model.checkpoint import Checkpoint, TensorPlace
from bough.model.experts import Experts
from bough.model.kv import KVShape
from bough.model.naming import AnySource, Naming, Quantization, logical_sources
from bough.model.source import VALUE_DTYPES, FreshMemory, Scratch, Stored

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BATCH_DEPENDENT_ROPES = ("dynamic", "longrope")  # beyond their original length the longest position decides for all
NUM_NAMED = 3  # unused tensors that a warning names


Correction = Callable[[int, nn.Module], None]  # of the weights of a layer with this number, in place


def uncorrected(_index: int, _layer: nn.Module) -> None:
    """Leaves weights as they are stored."""


@dataclass(frozen=True, slots=True)
class ParameterSlot:
    """One parameter or persistent buffer of a module, and what its value is made of."""

    module: nn.Module
    key: str
    source: AnySource

    def bind(self, raw: Sequence[torch.Tensor], dtype: torch.dtype, scratch: Scratch) -> None:
        """Puts the value in the parameter's place; `raw` as in `Source.value`."""
        self.put(self.made(raw, dtype, scratch))

    def made(self, raw: Sequence[torch.Tensor], dtype: torch.dtype, scratch: Scratch) -> Any:
        """The value as `put` wants it."""
        if isinstance(self.source, Experts):
            return self.source.table(raw, dtype, scratch)
        value = self.source.value(raw, dtype, scratch)
        return value if self.key in self.module._buffers else nn.Parameter(value, requires_grad=False)

    def put(self, made: Any) -> None:
        """Puts what `made` has returned in the parameter's place."""
        if isinstance(self.source, Experts):
            self.module._parameters.pop(self.key, None)  # a table is no tensor, and would not be let in
            self.module.__dict__[self.key] = made
        elif self.key in self.module._buffers:
            self.module._buffers[self.key] = made
        else:
            self.module._parameters[self.key] = made


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A transformers model on the meta device, and the places of its weights."""

    model: PreTrainedModel
    config: PretrainedConfig
    layers: tuple[nn.Module, ...]
    layer_slots: tuple[tuple[ParameterSlot, ...], ...]  # one tuple for each layer
    resident_slots: tuple[ParameterSlot, ...]  # embeddings, final norm, output head
    dtype: torch.dtype
    quantization: Quantization | None
    unused: tuple[str, ...]  # tensors of the checkpoint for which the architecture has no place

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def max_positions(self) -> int:
        """As `max_positions` of its configuration."""
        return max_positions(self.config)

    def kv_shape(self) -> KVShape:
        """What one token's keys and values take."""
        return KVShape.of(self.config, self.dtype)

    def describe(self) -> str:
        """Architecture, size and data type in words."""
        packed = f", {self.quantization}" if self.quantization else ""
        return describe(self.model, self.dtype) + packed


def describe(model: PreTrainedModel, dtype: torch.dtype) -> str:
    """Architecture, size and data type in words."""
    config = model.config
    name = str(dtype).removeprefix("torch.")
    return f"{type(model).__name__}, {config.num_hidden_layers} layers of {config.hidden_size}, {name}"


def max_positions(config: PretrainedConfig) -> int:
    """A model's context, as far as a token's rotary embedding does not depend on what else is in the batch."""
    longest = int(config.max_position_embeddings)
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        if rope.get("rope_type") in BATCH_DEPENDENT_ROPES:
            longest = min(longest, int(rope.get("original_max_position_embeddings") or longest))
    return longest


def load_config(folder: Path) -> PretrainedConfig:
    """The configuration in a model folder.

    Raises:
        CheckpointError: where transformers cannot read it.
    """
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as exc:
        raise CheckpointError(f"{folder / 'config.json'}: {exc}") from exc
    return config


def build_skeleton(checkpoint: Checkpoint, dtype: torch.dtype, keep_layers: tuple[int, ...] | None = None) -> Skeleton:
    """Builds the model on the meta device; `keep_layers` names the layers to use, by default all that are there.

    Raises:
        CheckpointError: naming a tensor that is missing or has another shape than the architecture wants.
    """
    config = load_config(checkpoint.folder)
    quantization = Quantization.of(config, checkpoint.folder)
    there = checkpoint.kept_layers if checkpoint.kept_layers is not None else tuple(range(config.num_hidden_layers))
    kept = keep_layers if keep_layers is not None else there
    _cut_layers(config, kept)
    model = build_empty(config, dtype)
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = experts.NAME
    layers = tuple(model.get_decoder().layers)
    prefix = next(name for name, module in model.named_modules() if module is model.get_decoder().layers)
    finder = _Finder(checkpoint, quantization, model, {f"{prefix}.{i}": f"{prefix}.{k}" for i, k in enumerate(kept)})
    layer_slots = tuple(tuple(finder.slots(layer, f"{prefix}.{index}")) for index, layer in enumerate(layers))
    in_layers = frozenset(id(module) for layer in layers for module in layer.modules())
    resident = tuple(finder.slots(model, "", in_layers))
    unused = finder.unused(prefix)
    return Skeleton(model, config, layers, layer_slots, resident, dtype, quantization, unused)


def build_empty(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The architecture on the meta device: every parameter has a shape and no memory."""
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.NAME)
    model.eval().requires_grad_(False)
    model.tie_weights()
    return model  # type: ignore[no-any-return]


def _cut_layers(config: PretrainedConfig, kept: tuple[int, ...]) -> None:
    wrong = [index for index in kept if not 0 <= index < config.num_hidden_layers]
    if wrong or not kept:
        raise CheckpointError(
            f"layers: {wrong or kept} to keep of a model that has 0 to {config.num_hidden_layers - 1}"
        )
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[index] for index in kept]
    config.num_hidden_layers = len(kept)


class _Finder:
    """Finds the source of each parameter of a model."""

    def __init__(
        self, checkpoint: Checkpoint, quantization: Quantization | None, model: PreTrainedModel, layers: dict[str, str]
    ) -> None:
        """`layers` maps the names of the model's layers to those that they have in the checkpoint."""
        self._checkpoint = checkpoint
        self._layers = layers
        is_tied = getattr(model.config, "tie_word_embeddings", False)
        self._tied: dict[str, str] = dict(getattr(model, "_tied_weights_keys", None) or {}) if is_tied else {}
        known = [self._original(name) for name in model.state_dict()]
        self._naming = Naming(model, known, logical_sources(checkpoint, quantization))

    def slots(self, root: nn.Module, prefix: str, skip: Collection[int] = ()) -> Iterator[ParameterSlot]:
        """Of all modules below `root`, which the model knows as `prefix`, but those whose `id` is in `skip`."""
        for module_name, module in root.named_modules(prefix=prefix):
            if id(module) in skip:
                continue
            buffers = ((k, b) for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set)
            for key, parameter in (*module._parameters.items(), *buffers):
                if parameter is not None:
                    yield self._slot(module, key, f"{module_name}.{key}" if module_name else key, parameter)

    def unused(self, prefix: str) -> tuple[str, ...]:
        """Names of values that nothing has asked for, but those of layers that were left out."""
        layers = tuple(f"{name}." for name in self._layers.values())
        names = (n for n in self._naming.unclaimed() if n not in self._tied and not n.endswith("rotary_emb.inv_freq"))
        unused = tuple(name for name in names if not name.startswith(f"{prefix}.") or name.startswith(layers))
        if unused:
            logger.warning(
                "%s: %d tensors have no place in this architecture and are not used, as in transformers: %s%s",
                self._checkpoint.folder,
                len(unused),
                ", ".join(unused[:NUM_NAMED]),
                ", ..." if len(unused) > NUM_NAMED else "",
            )
        return unused

    def _original(self, name: str) -> str:
        """A parameter's name in the checkpoint, whose layers may be more."""
        for mine, original in self._layers.items():
            if name.startswith(f"{mine}."):
                return original + name.removeprefix(mine)
        return name

    def _slot(self, module: nn.Module, key: str, name: str, parameter: torch.Tensor) -> ParameterSlot:
        name = self._original(name)
        source = self._naming.source(name)
        if source is None and name in self._tied:
            source = self._naming.source(self._tied[name])
        if source is None:
            raise CheckpointError(f"{self._checkpoint.folder}: tensor {name}, which config.json asks for, is missing")
        place = source.places[0]
        if isinstance(source, Stored) and place.dtype not in VALUE_DTYPES:
            raise CheckpointError(
                f"{place.file}: tensor {place.name} is stored as {place.dtype}; {', '.join(VALUE_DTYPES)} can be read"
            )
        if source.shape != tuple(parameter.shape):
            raise CheckpointError(
                f"{place.file}: tensor {place.name} has shape {list(source.shape)}, "
                f"but config.json asks for {list(parameter.shape)}"
            )
        return ParameterSlot(module, key, source)


def bind_resident(slots: Sequence[ParameterSlot], dtype: torch.dtype, device: torch.device) -> None:
    """Loads parameters for good; a value that several parameters share is loaded once."""
    memory = FreshMemory(device)
    loaded: dict[tuple[TensorPlace, ...], tuple[nn.Module, str]] = {}
    for slot in slots:
        if slot.source.places in loaded:
            module, key = loaded[slot.source.places]
            slot.module._parameters[slot.key] = module._parameters[key]
            continue
        slot.bind([read_place(place).to(device) for place in slot.source.places], dtype, memory)
        loaded[slot.source.places] = (slot.module, slot.key)


def bind_all(skeleton: Skeleton, device: torch.device, correct: Correction = uncorrected) -> None:
    """Loads a whole model for good; `correct` may change each layer's weights when they are there."""
    bind_resident(skeleton.resident_slots, skeleton.dtype, device)
    for index, slots in enumerate(skeleton.layer_slots):
        bind_resident(slots, skeleton.dtype, device)
        correct(index, skeleton.layers[index])
    move_buffers(skeleton.model, device)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Moves what a model holds beside its parameters, such as rotary frequencies; layers without weights stay so."""
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
